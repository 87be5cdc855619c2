"""Start a model sharded: only rank 0 holds all of it, in host memory.

No device holds more than its shards and one weight.

Rank 0 builds the model in host memory and sends the others its modules and buffers, with parameters
on the meta device, which take no memory. FSDP2 shards those, and rank 0 then scatters the weights,
one at a time. In a run that resumes each rank reads its shards, and rank 0's weights are dropped.
"""

import logging
import pickle
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .collectives import on_main_then_broadcast

logger = logging.getLogger(__name__)


def build(
    accelerator: Accelerator, build_whole: Callable[[], nn.Module]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model whose parameters are on the meta device. Called by every rank.

    Rank 0's modules are copied by pickle, so a recipe's build_model may compute with values or read
    weights: only rank 0 calls it. Where a module cannot be pickled, every rank calls it.

    Args:
        accelerator: of this process.
        build_whole: builds the model on the CPU.

    Returns:
        The model, and its weights by name on the CPU: all of them on rank 0, none on others.
    """
    built: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def build_on_main() -> tuple[bytes, dict[str, Tensor]]:
        model = build_whole()
        built.append((model, take_weights(model)))
        try:
            return pickle.dumps(model), {}
        except Exception as error:  # a class or a function without a name of its own
            logger.warning(
                "the model cannot be sent to the other ranks (%s), so each builds all of it in host"
                " memory; define its classes and functions at the top of a module.",
                error,
            )
            return b"", dict(model.named_buffers())

    pickled, buffers = on_main_then_broadcast(accelerator, build_on_main)
    if built:
        return built[0]
    model = pickle.loads(pickled) if pickled else build_whole()
    take_weights(model)
    for name, buffer in buffers.items():
        model.get_buffer(name).data.copy_(buffer)
    return model, {}


def take_weights(model: nn.Module) -> dict[str, Tensor]:
    """Move the parameters to the meta device; return their values by name. Buffers stay."""
    named = dict(model.named_parameters())
    attributes = {name: dict(vars(p)) for name, p in named.items()}
    names = {id(p): name for name, p in named.items()}
    weights: dict[str, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if tensor.is_meta or id(tensor) not in names:
            return tensor
        weights[names[id(tensor)]] = tensor.data
        return torch.empty_like(tensor, device="meta")

    _apply(model, take)
    for name, parameter in named.items():
        vars(parameter).update(attributes[name])
    return weights


def _apply(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters in place, as the same objects: tied weights stay tied.

    By modules' own `_apply`: torch's recurrent layers hold weak references to their weights.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(function)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def allocate(model: nn.Module, place: torch.device) -> None:
    """Allocate the parameters of this rank, which are on the meta device, without values.

    As nn.Module.to_empty does, but that one would empty the buffers too, and untie weights.
    """
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
        assert isinstance(parameter, DTensor)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if name in weights:
            whole.copy_(weights.pop(name))
        filled = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(filled.to_local())
