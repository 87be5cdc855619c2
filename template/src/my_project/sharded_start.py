"""Start a model sharded: only rank 0 holds all of it, in host memory.

No device holds more than its shards and one weight.

Rank 0 builds the model in host memory and sends the others its modules and buffers, with parameters
on the meta device, which take no memory. FSDP2 shards those, and rank 0 then scatters the weights,
one at a time. A run that resumes builds no weights at all: each rank reads its shards.
"""

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from .checkpoint.shards import plain_name
from .collectives import on_main_then_broadcast
from .config import ConfigError

logger = logging.getLogger(__name__)


def build(
    accelerator: Accelerator, build_whole: Callable[[], nn.Module], *, is_resumed: bool
) -> tuple[nn.Module, dict[str, Tensor] | None]:
    """Build a model whose parameters are on the meta device. Called by every rank.

    Rank 0's modules are copied by pickle, so a recipe's build_model may compute with values or read
    weights: only rank 0 calls it. Where a module cannot be pickled, every rank calls it.

    Args:
        accelerator: of this process.
        build_whole: builds the model on the CPU.
        is_resumed: the weights come from a checkpoint, so rank 0 does not build them either.

    Returns:
        The model, and its weights by name on the CPU: all of them on rank 0, none on others. None
        for a run that is resumed.
    """
    built: list[Any] = [None, {}]

    def build_on_main() -> tuple[bytes, dict[str, Tensor]]:
        if is_resumed:
            built[0] = _without_weights(build_whole, keeps_buffers=True)
        else:
            built[:] = _whole(build_whole)
        try:
            return pickle.dumps(built[0]), {}
        except Exception as error:  # a class or a function without a name of its own
            logger.warning(
                "the model cannot be sent to the other ranks (%s), so each builds its own; define"
                " its classes and functions at the top of a module.",
                error,
            )
            return b"", dict(built[0].named_buffers())

    pickled, buffers = on_main_then_broadcast(accelerator, build_on_main)
    model, weights = built
    if not accelerator.is_main_process:
        model = pickle.loads(pickled) if pickled else _without_weights(build_whole)
        with torch.no_grad():
            for name, buffer in buffers.items():
                model.get_buffer(name).copy_(buffer)
    return model, None if is_resumed else weights


def _whole(build_whole: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    model = build_whole()
    return model, take_weights(model)


def _without_weights(
    build_whole: Callable[[], nn.Module], *, keeps_buffers: bool = False
) -> nn.Module:
    """Build a model on the meta device, or whole where its recipe computes with weights.

    Args:
        build_whole: builds it on the CPU.
        keeps_buffers: buffers that checkpoints lack must have the values of a whole model: if they
            may be random, the weights before them have to draw their numbers too.
    """
    random_state = torch.get_rng_state()
    try:
        with _parameters_on_meta():
            model = build_whole()
        if any(buffer.is_meta for buffer in model.buffers()):
            raise RuntimeError("a buffer was computed from weights")
        draws = keeps_buffers and not torch.equal(random_state, torch.get_rng_state())
        if draws and any(module._non_persistent_buffers_set for module in model.modules()):
            raise RuntimeError("it draws random numbers and has buffers that are not saved")
    except ConfigError:
        raise
    except Exception as error:
        logger.warning(
            "build_model cannot run without weights (%s), so this process builds the whole model in"
            " host memory first.",
            error,
        )
        torch.set_rng_state(random_state)
        model = build_whole()
    take_weights(model)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module gets it.

    In place, so that tied weights stay tied; accelerate's init_empty_weights unties them. Buffers
    are built: a checkpoint does not hold all of them.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            on_meta = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            vars(on_meta).update(vars(param))
            torch.utils.swap_tensors(param, on_meta)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def take_weights(model: nn.Module) -> dict[str, Tensor]:
    """Move the parameters to the meta device; return their values by name. Buffers stay."""
    named = dict(model.named_parameters())
    attributes = {name: dict(vars(p)) for name, p in named.items()}
    names = {id(p): name for name, p in named.items()}
    weights: dict[str, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) or tensor.is_meta:
            return tensor
        weights[names[id(tensor)]] = tensor.data
        return torch.empty_like(tensor, device="meta")

    _apply(model, take)
    for name, parameter in named.items():
        vars(parameter).update(attributes[name])
    return weights


def _apply(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters in place, as the same objects: tied weights stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(function)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def allocate(model: nn.Module, place: torch.device) -> None:
    """Allocate the parameters of this rank, which are on the meta device, without values."""
    _apply(model, lambda t: torch.empty_like(t, device=place) if t.is_meta else t)


@torch.no_grad()
def fill(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Fill the shards of all ranks with rank 0's weights. Called by every rank.

    Args:
        model: sharded.
        weights: as returned by `build`; emptied, so that rank 0's host memory is freed on the way.
        device: on which ranks communicate.
    """
    for name, parameter in model.named_parameters():
        whole = weights.pop(plain_name(name), None)
        if isinstance(parameter, DTensor):
            _scatter(parameter, whole, device)
            continue
        copy = torch.empty_like(parameter, device=device)
        if whole is not None:
            copy.copy_(whole)
        distributed.broadcast(copy, 0)
        parameter.copy_(copy)


def _scatter(parameter: DTensor, whole: Tensor | None, device: torch.device) -> None:
    """Fill the shards of one parameter from rank 0, then those of other replicas (HSDP)."""
    mesh, placements, local = parameter.device_mesh, parameter.placements, parameter.to_local()
    (over,) = (i for i, placement in enumerate(placements) if placement.is_shard())
    dim: int = placements[over].dim  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    shape = list(parameter.shape)
    size = shape[dim] = -(-shape[dim] // mesh.size(over))  # the last ones may be smaller or empty
    received = torch.empty(shape, dtype=local.dtype, device=device)
    parts = None
    if whole is not None:
        parts = [torch.zeros_like(received) for _ in range(mesh.size(over))]
        for part, values in zip(parts, whole.split(size, dim), strict=False):
            part.narrow(dim, 0, values.shape[dim]).copy_(values)
    if not any(at for i, at in enumerate(coordinate) if i != over):
        distributed.scatter(received, parts, group=mesh.get_group(over), group_src=0)
    for i in range(mesh.ndim):
        if i != over:
            distributed.broadcast(received, group=mesh.get_group(i), group_src=0)
    local.copy_(received.narrow(dim, 0, local.shape[dim]))
