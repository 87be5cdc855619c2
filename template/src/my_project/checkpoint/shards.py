"""Write and read tensors, whole or sharded, in safetensors files."""

import functools
import hashlib
import json
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..config import ConfigError
from ..files import read_manifest

CHUNK_BYTES = 4 << 20  # written and hashed without the GIL, while it is in the CPU's cache


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that one rank holds."""

    tensor: Tensor
    offset: tuple[int, ...]  # of the first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor


def own_shard(tensor: Tensor, rank: int) -> Shard | None:
    """Return the shard that this rank writes: exactly one rank writes each element."""
    if not isinstance(tensor, DTensor):
        return _whole(tensor) if rank == 0 else None
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    if any(c for c, placed in zip(coordinate, placements, strict=True) if placed.is_replicate()):
        return None  # the first replica writes
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local().detach()
    return Shard(local, tuple(offset), tuple(tensor.shape)) if local.numel() else None


def plain_name(name: str) -> str:
    """Remove the wrapper names of activation checkpointing and torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def model_tensors(model: nn.Module, *, whole: bool = False) -> dict[str, Any]:
    """Return the state of a model with the keys of the plain module, whatever wraps it.

    Args:
        model: sharded by FSDP2, or the same on every rank.
        whole: tensors on the CPU without shards; of a sharded model on rank 0 only, where every
            rank calls this.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        # imports torch's distributed checkpoints and launcher, which a plain model does not need
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        sharded: dict[str, Any] = get_model_state_dict(model, options=options)
        return sharded
    state = {plain_name(name): value for name, value in model.state_dict().items()}
    if whole:
        state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
    return state


def _whole(tensor: Tensor) -> Shard:
    return Shard(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))


def whole(tensors: dict[str, Tensor]) -> dict[str, Shard]:
    """Return whole tensors as shards."""
    return {name: _whole(tensor) for name, tensor in tensors.items()}


def save_shards(shards: dict[str, Shard], path: Path) -> dict[str, Any]:
    """Write shards in safetensors format, and hash the bytes as they are written.

    After safetensors' own save_file the file would have to be read again to hash it, and its
    `serialize` needs a whole second copy in memory. Tensors that share memory (tied weights) are
    written under each name.

    Returns:
        The size and SHA-256 of the file, as from files.fingerprint.

    Raises:
        OSError: the file cannot be written.
        ValueError: the safetensors format has no such dtype.
    """
    offsets = {n: [s.offset, s.shape] for n, s in shards.items() if s.tensor.shape != s.shape}
    header: dict[str, Any] = {}
    if offsets:
        header["__metadata__"] = {"offsets": json.dumps(offsets)}
    # by falling item size, so that each tensor is aligned
    order = sorted(shards, key=lambda name: (-shards[name].tensor.element_size(), name))
    end = 0
    for name in order:
        tensor = shards[name].tensor
        begin, end = end, end + tensor.nbytes
        dtype = _dtype_name(tensor.dtype)
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(start := struct.pack("<Q", len(text)) + text)
    with path.open("wb") as file:
        file.write(start)
        for name in order:
            content = _bytes_of(shards[name].tensor)
            for begin in range(0, len(content), CHUNK_BYTES):
                chunk = content[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
    return {"size": len(start) + end, "sha256": digest.hexdigest()}


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; a copy only if it is not contiguous, or on a GPU."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format, from safetensors' own writer."""
    header: dict[str, Any] = {"": {"shape": []}}
    with suppress(KeyError, SafetensorError):
        header = json.loads(save({"": torch.empty(1, dtype=dtype)})[8 : -dtype.itemsize])
    if header[""]["shape"] != [1]:  # also where two numbers share a byte
        raise ValueError(f"the safetensors format cannot hold tensors of {dtype}.")
    return str(header[""]["dtype"])


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write whole tensors."""
    save_shards(whole(tensors), path)


class SafetensorsFile:
    """A file that is hashed while its tensors are read, as long as they are read in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle: Any = safe_open(path, "pt")  # checks the header
        with path.open("rb") as file:
            start = file.read(8)
            start += file.read(struct.unpack("<Q", start)[0])
        header = json.loads(start[8:])
        metadata = header.pop("__metadata__", {})
        self.offsets: dict[str, Any] = json.loads(metadata.get("offsets", "{}"))
        self.names = sorted(header, key=lambda name: header[name]["data_offsets"])
        self._unread = self.names[::-1]
        self._digest = hashlib.sha256(start)

    def read(self, name: str) -> Tensor:
        """Read a tensor, and hash its bytes if all before it in the file have been hashed."""
        tensor: Tensor = self.handle.get_tensor(name)
        if self._unread and self._unread[-1] == name:
            self._digest.update(_bytes_of(tensor))
            self._unread.pop()
        return tensor

    @property
    def sha256(self) -> str | None:
        """Return the SHA-256 of the file; None if it was not read whole, or in another order."""
        return None if self._unread else self._digest.hexdigest()


class TensorReader:
    """Read the tensors of one kind from a checkpoint or an export, in one file or several."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Open the files.

        Raises:
            ConfigError: there is no such file, or it is not in safetensors format.
        """
        self.folder = folder
        self.kind = kind
        self.files: list[SafetensorsFile] = []
        # by name: file, offset, shape
        self.shards: dict[str, list[tuple[SafetensorsFile, list[int], list[int]]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        is_ours = re.compile(rf"{kind}(\.rank_\d+)?\.safetensors").fullmatch
        paths = [p for p in sorted(folder.glob(f"{kind}.*")) if is_ours(p.name)]
        if (folder / "manifest.json").is_file():
            paths = [p for p in paths if p.name in read_manifest(folder)["files"]]
        if not paths:
            raise ConfigError(f"{folder} holds no {kind}.safetensors.")
        for path in paths:
            try:
                file = SafetensorsFile(path)
                self.files.append(file)
                for name in file.names:
                    shape = file.handle.get_slice(name).get_shape()
                    offset, whole = file.offsets.get(name, [[0] * len(shape), shape])
                    self.shards.setdefault(name, []).append((file, offset, shape))
                    self.shapes[name] = tuple(whole)
            except (SafetensorError, ValueError) as error:
                raise ConfigError(f"{path} is damaged: {error}.") from error

    @property
    def names(self) -> list[str]:
        """Return the names in an order that each file has too, so that files are hashed."""
        order: TopologicalSorter[str] = TopologicalSorter()
        for file in self.files:
            for before, name in pairwise(file.names):
                order.add(name, before)
        with suppress(CycleError):  # written by other code
            return list(dict.fromkeys([*order.static_order(), *self.shards]))
        return list(self.shards)

    @property
    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each file that was read whole, by its name."""
        return {file.path.name: file.sha256 for file in self.files if file.sha256}

    def read(self, name: str, offset: Iterable[int] = (), shape: Iterable[int] = ()) -> Tensor:
        """Read a tensor, or its part with this offset and shape."""
        whole = self.shapes[name]
        start, wanted = list(offset) or [0] * len(whole), list(shape) or list(whole)
        if len(self.shards[name]) == 1 and list(whole) == wanted == self.shards[name][0][2]:
            return self.shards[name][0][0].read(name)
        result, filled = None, 0
        for file, at, size in self.shards[name]:
            first = [max(a, s) for a, s in zip(at, start, strict=True)]
            last = [min(a + n, s + w) for a, n, s, w in zip(at, size, start, wanted, strict=True)]
            if any(b <= a for a, b in zip(first, last, strict=True)):
                continue
            there = tuple(slice(f - a, b - a) for f, b, a in zip(first, last, at, strict=True))
            here = tuple(slice(f - s, b - s) for f, b, s in zip(first, last, start, strict=True))
            is_whole = all(b - f == n for f, b, n in zip(first, last, size, strict=True))
            part = file.read(name) if is_whole else file.handle.get_slice(name)[there]
            result = part.new_empty(wanted) if result is None else result
            result[here] = part
            filled += part.numel()
        if result is None or filled != result.numel():
            raise ConfigError(f"{self.folder} holds only a part of {self.kind} {name}.")
        return result

    def read_like(self, name: str, tensor: Tensor) -> Tensor:
        """Read the part of a tensor that this rank holds: the whole tensor, or its shard."""
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
            part.to(local.device),
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    @torch.no_grad()
    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read into these tensors in place; the names must match exactly."""
        missing = tensors.keys() - self.shards.keys()
        unknown = self.shards.keys() - tensors.keys()
        if missing or unknown:
            raise ConfigError(
                f"{self.folder}/{self.kind}.safetensors does not fit the model: the file lacks"
                f" {sorted(missing)}, the model lacks {sorted(unknown)}."
            )
        for name in self.names:
            tensors[name].copy_(self.read_like(name, tensors[name]))
