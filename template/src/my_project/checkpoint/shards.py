"""Write and read tensors, whole or sharded, in safetensors files."""

import functools
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..config import ConfigError
from ..files import Json, open_own
from ..manifest import read_manifest

Stride: TypeAlias = Sequence[int] | None  # None: contiguous
CHUNK_BYTES = 1 << 20  # a chunk is hashed while it is still in the CPU's cache


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that one rank holds."""

    tensor: Tensor
    offset: tuple[int, ...]  # index of its first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor


def own_shard(tensor: Tensor, rank: int) -> Shard | None:
    """Return the shard that this rank writes, or None; exactly one rank writes each element."""
    if not isinstance(tensor, DTensor):
        shard = Shard(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))
        return shard if rank == 0 else None
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    if any(c for c, placed in zip(coordinate, placements, strict=True) if placed.is_replicate()):
        return None  # the first replica writes
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local().detach()
    is_written = local.numel() or (rank == 0 and not tensor.numel())
    return Shard(local, tuple(offset), tuple(tensor.shape)) if is_written else None


def plain_name(name: str) -> str:
    """Remove the wrapper names of activation checkpointing and torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded the model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model with the keys of the plain module, whatever wraps it."""
    if is_sharded(model):
        # imported here because it imports much of torch that a model without shards does not need
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return cast(dict[str, Tensor], get_model_state_dict(model))
    return {plain_name(name): value for name, value in model.state_dict().items()}


def save_shards(shards: dict[str, Shard], path: Path, aliases: dict[str, str]) -> str:
    """Write shards in safetensors format; return the SHA-256 of the file.

    Raises:
        OSError: the file cannot be written.
        ValueError: the safetensors format lacks the dtype of a tensor, or a value is not finite.
    """
    offsets = {n: [s.offset, s.shape] for n, s in shards.items() if s.tensor.shape != s.shape}
    metadata = aliases | ({"offsets": json.dumps(offsets)} if offsets else {})
    tensors = in_file_order({name: shard.tensor for name, shard in shards.items()})
    return save_tensors(tensors, path, starmap(require_finite, tensors.items()), metadata)


def save_tensors(
    tensors: dict[str, Tensor], path: Path, values: Iterator[Tensor], metadata: dict[str, str]
) -> str:
    """Write a safetensors file; each tensor is written before the next one is read.

    safetensors' own `serialize` needs all tensors of the file, and a copy of each, in memory.

    Args:
        tensors: the tensors by name, in the order of in_file_order; only their shapes and dtypes
            are used, so they may be sharded, or on the meta device.
        path: the file.
        values: the values of these tensors, in the same order.
        metadata: the file's metadata, such as the aliases of tied weights: {alias: tensor name}.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: the file cannot be written.
        ValueError: the safetensors format lacks the dtype of a tensor.
    """
    header: dict[str, dict[str, str] | dict[str, str | list[int]]] = {}
    if metadata:
        header["__metadata__"] = metadata
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _dtype_name(tensor.dtype)
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open_own(path, "wb") as file:

        def write(data: memoryview) -> None:
            for begin in range(0, len(data), CHUNK_BYTES):
                chunk = data[begin : begin + CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)

        write(memoryview(struct.pack("<Q", len(text)) + text))
        for _ in tensors:  # each value is freed before the next one is read
            # copies only a tensor that is not contiguous, or on a GPU
            write(next(values).cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor unchanged; refuse one that contains NaN or infinity.

    A run could neither continue nor predict with it. Only the minimum and maximum are tested: they
    are not finite if any value is not, and isfinite on all values would need a copy.
    """
    values = tensor.float() if tensor.itemsize == 1 else tensor  # aminmax does not take float8
    is_checked = tensor.is_floating_point() and tensor.numel()
    if is_checked and not torch.stack(values.aminmax()).isfinite().all():
        raise ValueError(
            f"{name} holds values that are not finite, so it is not saved; earlier checkpoints are"
            " kept. Continue from one of them with --resume and a lower optim.lr; a buffer that"
            " holds such values on purpose needs persistent=False."
        )
    return tensor


def in_file_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors by descending item size, so that each one is aligned in its file."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return {name: tensors[name] for name in order}


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format, as safetensors itself writes it."""
    header: dict[str, Any] = {"": {"shape": []}}
    with suppress(KeyError, SafetensorError):
        header = json.loads(save({"": torch.empty(1, dtype=dtype)})[8 : -dtype.itemsize])
    if header[""]["shape"] != [1]:  # an unknown dtype, or one with two numbers per byte
        raise ValueError(f"the safetensors format cannot hold tensors of {dtype}.")
    return str(header[""]["dtype"])


class TensorReader:
    """Read the tensors of one kind from a checkpoint, sharded or not, or from an export."""

    def __init__(self, folder: Path, kind: str, listed: Iterable[str] | None = None) -> None:
        """Open the files; their tensors are read later.

        Args:
            folder: the checkpoint or export.
            kind: model, optimizer or ema.
            listed: the names of the files in the manifest, if the caller has read the manifest.

        Raises:
            ConfigError: there is no file of this kind, or one is missing or damaged.
            ValueError: `listed` is None, and the checkpoint's manifest is damaged.
            OSError: `listed` is None, and the folder cannot be read.
        """
        self.folder = folder
        self.kind = kind
        # by tensor name: each file with a part of the tensor, and the offset and shape of the part
        self.shards: dict[str, list[tuple[safe_open, list[int], list[int]]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.aliases: dict[str, str] = {}  # {alias: stored name} of tied weights
        if listed is None:
            is_checkpoint = (folder / "manifest.json").is_file()
            listed = [*read_manifest(folder)["files"]] if is_checkpoint else os.listdir(folder)
        is_ours = re.compile(rf"{kind}(\.rank_\d+)?\.safetensors").fullmatch
        if not (names := sorted(filter(is_ours, listed))):
            raise ConfigError(f"{folder} has no {kind}.safetensors.")
        for name in names:
            self._open(folder / name)
        self.aliases = {alias: name for alias, name in self.aliases.items() if name in self.shards}
        for alias, name in self.aliases.items():
            self.shards[alias], self.shapes[alias] = self.shards[name], self.shapes[name]

    def _open(self, path: Path) -> None:
        try:
            if not path.is_file():  # opening a pipe would block
                raise OSError("it is not a file")
            file = safe_open(path, "pt")  # type: ignore[no-untyped-call]
            metadata = {"format": "", "offsets": "{}"} | (file.metadata() or {})
            offsets = json.loads(metadata.pop("offsets"))
            del metadata["format"]
            self.aliases |= metadata
            for name in file.keys():  # noqa: SIM118 - it is not a dictionary
                shape = file.get_slice(name).get_shape()
                offset, whole = offsets.get(name, [[0] * len(shape), shape])
                self.shards.setdefault(name, []).append((file, offset, shape))
                self.shapes[name] = tuple(whole)
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            # torch raises a RuntimeError if the file was removed before torch maps it
            if isinstance(error, RuntimeError) and path.exists():
                raise  # such as too little memory
            raise ConfigError(f"{path} is damaged or missing: {error}.") from error

    def meta(self, name: str) -> Tensor:
        """Return a tensor on the meta device: it has the shape and dtype, but no values."""
        file = self.shards[name][0][0]
        shape = self.shapes[name]
        part = file.get_slice(name)[:0] if shape else file.get_tensor(name)
        return torch.empty(shape, dtype=part.dtype, device="meta")

    def read(self, name: str, offset: Iterable[int] = (), shape: Iterable[int] = ()) -> Tensor:
        """Read a tensor, or the part of it with this offset and shape."""
        name = self.aliases.get(name, name)
        wanted = [*shape] or [*self.shapes[name]]
        start = [*offset] or [0] * len(wanted)
        if wanted == [*self.shapes[name]] == self.shards[name][0][2]:
            return self.shards[name][0][0].get_tensor(name)
        result = torch.empty(wanted, dtype=self.meta(name).dtype)
        filled = 0  # number of elements read
        for file, held_offset, held in self.shards[name]:
            # the overlap of the file's part and the wanted part, as indices of the whole tensor
            spans = [
                (max(o, s), min(o + n, s + w))
                for o, n, s, w in zip(held_offset, held, start, wanted, strict=True)
            ]
            if all(first < end for first, end in spans):
                source, target = (
                    tuple(slice(f - o, e - o) for (f, e), o in zip(spans, origin, strict=True))
                    for origin in (held_offset, start)
                )
                part = file.get_slice(name)[source]
                result[target] = part
                filled += part.numel()
        if filled != result.numel():
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
        """Read all tensors of the files into `tensors`, in place; the names must match exactly."""
        missing = tensors.keys() - self.shards.keys()
        unknown = self.shards.keys() - tensors.keys()
        if missing or unknown:
            lacks = ("the file lacks", missing), ("the model lacks", unknown)
            what = ", ".join(f"{who} {', '.join(sorted(names))}" for who, names in lacks if names)
            raise ConfigError(
                f"{self.folder}/{self.kind}.safetensors does not fit the model: {what}. Undo the"
                " change of the model, or train it under another --run_name."
            )
        for name in self.shards:
            tensors[name].copy_(self.read_like(name, tensors[name]))


# ---- the optimizer's state, by parameter name ----------------------------------------------------
def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return the state of an optimizer as JSON, and the tensors that the JSON names.

    The state consists of parameter groups and slots, such as a parameter's momentum. The name of a
    slot, and of its tensor, is "<parameter>/<slot>".

    Args:
        optimizer: the model's optimizer.
        names: the names of its parameters, by id().

    Raises:
        ConfigError: the state holds something that a checkpoint cannot.
    """
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Json]] = []
    slots: dict[str, Json] = {}
    try:
        for number, group in enumerate(optimizer.param_groups):
            rest = {key: value for key, value in group.items() if key != "params"}
            rest = {key: pack(value, f"/{number}/{key}", tensors) for key, value in rest.items()}
            groups.append(rest | {"params": [names[id(p)] for p in group["params"]]})
        for parameter, values in optimizer.state.items():
            if id(parameter) not in names:
                key = getattr(parameter, "shape", parameter)  # not the values of a tensor
                raise TypeError(f"its state has a key that is not a parameter of the model: {key}")
            for slot, value in values.items():
                key = f"{names[id(parameter)]}/{slot}"
                slots[key] = pack(value, key, tensors, is_sharded=isinstance(parameter, DTensor))
    except TypeError as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be resumed: {error}. A checkpoint holds numbers,"
            " text and tensors, and lists, tuples and dicts of these: choose another"
            " optim.class_path."
        ) from error
    return {"groups": groups, "slots": slots}, tensors


def pack(value: Any, key: str, tensors: dict[str, Tensor], *, is_sharded: bool = False) -> Json:
    """Return a value of an optimizer as JSON, with keys in place of its tensors.

    Args:
        value: the value of a slot or of a group's setting.
        key: the key of the value, and the prefix of the keys of tensors inside it.
        tensors: the tensors of the value are added here.
        is_sharded: whether the parameter is sharded.

    Raises:
        TypeError: JSON cannot hold it, or a tensor of a sharded parameter is not sharded.
    """
    if isinstance(value, Tensor):
        if is_sharded and value.numel() > 1 and not isinstance(value, DTensor):
            raise TypeError(f"{key} of a sharded parameter is not sharded")
        tensors[key] = value
        # the stride is kept: the rounding of a product depends on the memory order of its operands
        is_whole = isinstance(value, DTensor) or value.is_contiguous()
        stride = None if is_whole else torch.empty_like(value, device="meta").stride()
        return {"tensor": key, "stride": stride}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple, dict):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [
            (name, pack(part, f"{key}/{name}", tensors, is_sharded=is_sharded))
            for name, part in named
        ]
        return {type(value).__name__: parts}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{key} is of type {type(value).__name__}")


def unpack(value: Any, read: Callable[[str, Stride], Tensor]) -> Any:
    """Return the value that `pack` was given; `read` reads its tensors by key and stride."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return read(value["tensor"], value["stride"])
    ((kind, content),) = value.items()
    if kind == "dtype":
        return getattr(torch, content)
    parts = {name: unpack(part, read) for name, part in content}
    return parts if kind == "dict" else {"list": list, "tuple": tuple}[kind](parts.values())


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    folder: Path,
    saved: dict[str, Any],
    slots: TensorReader | None,
) -> None:
    """Restore what optimizer_state returned.

    Args:
        optimizer: the optimizer, of the same model.
        names: the names of its parameters, by id().
        folder: the checkpoint, for error messages.
        saved: the groups and slots.
        slots: reads their tensors; None if there are none.

    Raises:
        ConfigError: the optimizer has other groups, or a tensor cannot be read.
    """
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in saved["groups"]]:
        raise ConfigError(
            f"{folder}: its optimizer has other parameter groups than this model; restore the"
            " recipe's model and parameter_groups, or choose another --run_name."
        )
    # load_state_dict numbers the parameters across all groups.
    index = {name: i for i, name in enumerate(name for group in groups for name in group)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def read(key: str, stride: Stride = None, parameter: Tensor | None = None) -> Tensor:
        assert slots
        if parameter is None or slots.shapes[key] != tuple(parameter.shape):
            value = slots.read(key)
            copy = torch.empty_strided(value.shape, stride or value.stride(), dtype=value.dtype)
        elif isinstance(value := slots.read_like(key, parameter), DTensor):
            return value
        else:  # fused kernels need the slots in the memory order of the weight
            copy = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
        return copy.copy_(value)  # `value` may not be aligned, which changes rounding too

    state: dict[int, dict[str, Any]] = {}
    for key, value in saved["slots"].items():
        name, _, slot = key.rpartition("/")
        read_slot = functools.partial(read, parameter=parameters[index[name]])
        state.setdefault(index[name], {})[slot] = unpack(value, read_slot)

    def read_for_group(key: str, stride: Stride) -> Tensor:
        return read(key, stride).to(parameters[0].device)  # load_state_dict moves only slots

    param_groups = [
        {name: unpack(value, read_for_group) for name, value in group.items() if name != "params"}
        | {"params": [index[name] for name in group["params"]]}
        # keep the choice of kernels for this device and sharding, not that of the saved run
        | {name: current[name] for name in ("fused", "foreach") if name in current}
        for group, current in zip(saved["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})
    for i, named in state.items():
        loaded = optimizer.state[parameters[i]]
        loaded |= {slot: _restore_types(value, loaded[slot]) for slot, value in named.items()}


def _restore_types(saved: Any, loaded: Any) -> Any:
    """Return a loaded slot with the dtypes and other values that were saved.

    load_state_dict casts the tensors of all slots except `step` to the dtype of the weight.
    """
    if isinstance(saved, Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {name: _restore_types(part, loaded[name]) for name, part in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(_restore_types, saved, loaded))
    return saved
