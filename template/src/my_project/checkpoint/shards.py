"""The tensors of checkpoints and exports in safetensors files, whole or in shards."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..config import ConfigError
from ..files import read_manifest


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
