"""The wrapper that DDP, FSDP2, autocast and torch.compile see, and the units that FSDP2 shards."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .config import Config, ConfigError
from .devices import wants_sharding
from .optim import check_parameters, set_zero_gradients
from .process import world


class RecipeModule(nn.Module):
    """Let a recipe call any method of its model inside the one forward that the wrappers see.

    DDP, FSDP, autocast and torch.compile act on `forward` only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable, *arguments: Any) -> Any:
        """Call function(model, *arguments)."""
        return function(self.model, *arguments)


def to_device(accelerator: Accelerator, config: Config, model: nn.Module) -> nn.Module:
    """Move the model to the device before the optimizer is built, which looks where it is."""
    if config.distributed.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(accelerator.device)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation: int = 1,
) -> tuple[Any, Any]:
    """Prepare model and optimizer for DDP, FSDP2, autocast and torch.compile.

    With accumulation, gradients are views of DDP's buckets from the first step.

    Returns:
        What training calls, and what evaluation calls: without DDP and torch.compile, since
        batches there are ragged, but with autocast and FSDP.
    """
    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        choose_blocks(plugin, model)
    elif accumulation > 1 and not any(getattr(m, "sparse", False) for m in model.modules()):
        set_zero_gradients(optimizer)
    prepared, _ = accelerator.prepare(RecipeModule(model), optimizer)
    if wants_sharding() and not any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "the accelerate config asks for FSDP, but accelerate has sharded no parameter; check"
            " its fsdp_config and the number of processes."
        )
    if not has_gradients_in_buckets(prepared):
        optimizer.zero_grad()
    check_parameters(optimizer.param_groups, model)
    return prepared, accelerator.unwrap_model(prepared, keep_torch_compile=False)


def choose_blocks(plugin: Any, model: nn.Module) -> None:
    """Replace accelerate's size-based wrapping with the classes that sharded_blocks chooses.

    Size-based wrapping would also wrap modules that FSDP2 cannot gather alone: a ModuleList, whose
    forward is never called, and one of two modules that share a tied weight.
    """
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sharded_blocks(model, plugin.min_num_params)[0]


def sharded_blocks(model: nn.Module, least: int) -> tuple[list[str], list[int], int]:
    """Choose the classes whose modules FSDP2 gathers one at a time.

    From the leaves up, a module becomes a block if it has at least `least` parameters that are in
    no block yet; so do all modules of its class. The root keeps the remaining parameters.

    Returns:
        The names of the classes, the numbers of parameters of the blocks, and that of the root.
    """
    wrapped = model  # peft wraps a model in two modules, and calls it without its hooks
    while len(inner := list(wrapped.children())) == 1 and not list(wrapped.parameters(False)):
        wrapped = inner[0]
    # accelerate finds a class by its name
    names = Counter(kind.__name__ for kind in {type(module) for module in model.modules()})
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    classes: set[type] = set()

    def can_be_block(module: nn.Module) -> bool:
        kind = type(module)
        is_leaf = not any(module.children())  # a Linear: its class is everywhere
        is_around_all = any(inner is wrapped for inner in module.modules())
        if is_around_all or is_leaf or kind is nn.Sequential or names[kind.__name__] > 1:
            return False
        inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        return kind.forward is not nn.Module.forward and inside.items() <= holders.items()

    def left_over(module: nn.Module, note: Callable[[nn.Module, float], bool]) -> float:
        # each module that holds a tied weight counts its part
        count = sum(p.numel() / holders[id(p)] for p in module.parameters(recurse=False))
        count += sum(left_over(child, note) for child in module.children())
        return 0 if note(module, count) else count

    def choose(module: nn.Module, count: float) -> bool:
        if count < least or not can_be_block(module):
            return False
        classes.add(type(module))
        return True

    left_over(model, choose)
    blocks: list[int] = []

    def measure(module: nn.Module, count: float) -> bool:
        blocks.extend([round(count)] * (type(module) in classes))
        return type(module) in classes

    root = round(left_over(model, measure))
    return sorted(kind.__name__ for kind in classes), blocks, root


def strict_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP that waits for the gradient of every parameter, if there is one."""
    ddp = getattr(model, "_orig_mod", model)  # torch.compile wraps what DDP has wrapped
    is_ddp = isinstance(ddp, DistributedDataParallel)
    return ddp if is_ddp and not ddp.find_unused_parameters else None


def unused_parameter_finder(model: Any) -> Callable[[], list[int]] | None:
    """Return a function that finds the parameters without a gradient, which DDP waits for.

    It returns their indices among the trained parameters. None if DDP waits for no gradient.
    """
    ddp = strict_ddp(model)

    def find_unused() -> list[int]:
        try:
            ddp._check_reducer_finalized()  # type: ignore[union-attr]
        except RuntimeError as error:
            found = re.search(
                r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error)
            )
            if not found:
                raise
            return [int(index) for index in found[1].split()]
        return []

    return find_unused if ddp else None


def has_gradients_in_buckets(model: Any) -> bool:
    """Return whether the gradients stay in DDP's buckets from step to step, as views.

    Only if DDP waits for all gradients. Otherwise an unused parameter's gradient must be None: with
    zeros the optimizer would still decay its weight and move its momentum.
    """
    ddp = strict_ddp(model)
    # alone in its world, DDP does not rebuild its buckets
    if not (ddp and ddp.gradient_as_bucket_view and world()[0] > 1):
        return False
    return all(p.grad is not None for p in ddp.parameters() if p.requires_grad)
