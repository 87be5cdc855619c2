"""Folders that appear whole, and the tensors in their files, whole or in pieces.

A folder is written under a temporary name, flushed to disk, given a manifest with the size and hash
of each file, and renamed: what has its name is complete, and damage to it is noticed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .config import ConfigError
from .run import move_aside, read_json, write_atomically

FORMAT = 1
STEP_FOLDER = re.compile(r"step_(\d{8,})")


# ---- folders that appear whole -------------------------------------------------------------------
def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def manifest_text(content: dict[str, Any]) -> str:
    """Write a manifest, with a hash of itself, in the one form that is valid."""
    plain = json.dumps(content, sort_keys=True)
    return json.dumps(
        {"manifest": content, "sha256": hashlib.sha256(plain.encode()).hexdigest()},
        sort_keys=True,
        indent=1,
    )


def discard(path: Path) -> None:
    """Remove what has a temporary name of ours, whatever it is; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def step_of(folder: Path) -> int:
    """Read the step off a checkpoint's name; -1 where it names none."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: it is missing or damaged; says which.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError("it has no manifest.json, so it was never completed")
    content: dict[str, Any] = {}
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["manifest"]
        intact = text == manifest_text(content) and isinstance(content["step"], int)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("manifest.json is damaged")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')}, this code reads {FORMAT}")
    return content


def damage(folder: Path, *, hashes: bool = True) -> str:
    """Say what is wrong with a checkpoint; nothing if it is whole.

    Args:
        folder: of the checkpoint.
        hashes: read every file, which takes about a second per GB, or look at the sizes only.
    """
    try:
        manifest = read_manifest(folder)
        for name, wanted in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["size"]:
                return f"{name} has {path.stat().st_size} bytes in place of {wanted['size']}"
            if hashes and fingerprint(path) != wanted:
                return f"{name} is damaged: its hash is not the one in manifest.json"
        return _other_step(folder, manifest["step"])
    except (ValueError, OSError) as error:
        return str(error)
    except (KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json is not one of ours ({error!r})"


def _other_step(folder: Path, step: int) -> str:
    """Say which part of a checkpoint is of another step than its manifest; nothing if none is."""
    saved = read_json(folder / "state.json").get("step")
    if saved is None:
        return "state.json is damaged"
    for part, its_step in (("name", step_of(folder)), ("state.json", saved)):
        if its_step not in (-1, step):
            return f"its {part} is of step {its_step}, its manifest.json of step {step}"
    return ""


def complete(temporary: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are on the disk, and give it its name."""
    write_atomically(temporary / "manifest.json", manifest_text(manifest))
    flush_to_disk(temporary)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder appear whole, in place of the one before."""
    temporary, before = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "before"))
    discard(temporary)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in temporary.iterdir():
            flush_to_disk(path)
        flush_to_disk(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    discard(before)
    if folder.is_symlink() or folder.is_file():
        move_aside(folder, "old")
    elif folder.exists():
        os.replace(folder, before)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)
    discard(before)


# ---- tensors in files, whole or in pieces --------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one process holds."""

    tensor: Tensor
    offset: tuple[int, ...]  # of its first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor


def own_piece(tensor: Tensor, is_main: bool) -> Piece | None:
    """Find what this process writes of a tensor: each element is written by one process."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape)) if is_main else None
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    if any(c for c, placed in zip(coordinate, placements, strict=True) if placed.is_replicate()):
        return None  # a copy; the first of them writes
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local().detach()
    return Piece(local, tuple(offset), tuple(tensor.shape)) if local.numel() else None


def save_pieces(pieces: dict[str, Piece], path: Path) -> None:
    """Write tensors; those which share memory (tied weights) are written under each name."""
    seen: set[int] = set()
    separate = {}
    for name, piece in pieces.items():
        tensor = piece.tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    places = {n: [p.offset, p.shape] for n, p in pieces.items() if p.tensor.shape != p.shape}
    save_file(separate, path, metadata={"places": json.dumps(places)} if places else None)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write whole tensors."""
    whole = {n: Piece(t.detach(), (0,) * t.ndim, tuple(t.shape)) for n, t in tensors.items()}
    save_pieces(whole, path)


class Tensors:
    """The tensors of one kind in a checkpoint or an export, however many files hold them."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Open the files.

        Raises:
            ConfigError: there are none, or they are not safetensors.
        """
        self.folder, self.kind = folder, kind
        self.pieces: dict[str, list[tuple[Any, list[int], list[int]]]] = {}  # file, offset, shape
        self.shapes: dict[str, tuple[int, ...]] = {}
        paths = [
            p for p in sorted(folder.glob(f"{kind}.*"))
            if re.fullmatch(rf"{kind}(\.rank_\d+)?\.safetensors", p.name)
        ]  # fmt: skip
        if (folder / "manifest.json").is_file():
            paths = [p for p in paths if p.name in read_manifest(folder)["files"]]
        if not paths:
            raise ConfigError(f"{folder} holds no {kind}.safetensors.")
        for path in paths:
            try:
                file = safe_open(path, "pt")
                places = json.loads((file.metadata() or {}).get("places", "{}"))
                for name in file.keys():  # noqa: SIM118
                    shape = file.get_slice(name).get_shape()
                    offset, whole = places.get(name, [[0] * len(shape), shape])
                    self.pieces.setdefault(name, []).append((file, offset, shape))
                    self.shapes[name] = tuple(whole)
            except (SafetensorError, ValueError) as error:
                raise ConfigError(f"{path} is damaged: {error}.") from error

    def read(self, name: str, offset: Iterable[int] = (), shape: Iterable[int] = ()) -> Tensor:
        """Read a tensor, or the part of this shape that starts at this offset."""
        whole = self.shapes[name]
        start, wanted = list(offset) or [0] * len(whole), list(shape) or list(whole)
        if len(self.pieces[name]) == 1 and list(whole) == wanted == self.pieces[name][0][2]:
            return self.pieces[name][0][0].get_tensor(name)
        result, filled = None, 0
        for file, at, size in self.pieces[name]:
            first = [max(a, s) for a, s in zip(at, start, strict=True)]
            last = [min(a + n, s + w) for a, n, s, w in zip(at, size, start, wanted, strict=True)]
            if any(b <= a for a, b in zip(first, last, strict=True)):
                continue
            there = tuple(slice(f - a, b - a) for f, b, a in zip(first, last, at, strict=True))
            here = tuple(slice(f - s, b - s) for f, b, s in zip(first, last, start, strict=True))
            part = file.get_slice(name)[there]
            result = part.new_empty(wanted) if result is None else result
            result[here] = part
            filled += part.numel()
        if result is None or filled != result.numel():
            raise ConfigError(f"{self.folder} holds only a part of {self.kind} {name}.")
        return result

    def read_like(self, name: str, tensor: Tensor) -> Tensor:
        """Read what this process holds of a tensor: all of it, or its shard."""
        if self.shapes[name] != tuple(tensor.shape):
            raise ConfigError(
                f"{self.folder}: {self.kind} {name} has shape {self.shapes[name]}, the model needs"
                f" {tuple(tensor.shape)}."
            )
        if not isinstance(tensor, DTensor):
            return self.read(name)
        mesh, placements = tensor.device_mesh, tensor.placements
        local = tensor.to_local()
        _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        part = self.read(name, offset, local.shape) if local.numel() else torch.empty_like(local)
        return DTensor.from_local(
            part.to(local.device), mesh, placements, run_check=False,
            shape=tensor.shape, stride=tensor.stride(),
        )  # fmt: skip

    @torch.no_grad()
    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read into these tensors; every name must fit."""
        missing, unknown = tensors.keys() - self.pieces.keys(), self.pieces.keys() - tensors.keys()
        if missing or unknown:
            raise ConfigError(
                f"{self.folder}/{self.kind}.safetensors does not fit the model: missing there"
                f" {sorted(missing)}, unknown here {sorted(unknown)}."
            )
        for name, tensor in tensors.items():
            tensor.copy_(self.read_like(name, tensor))
