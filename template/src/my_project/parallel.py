"""Build the model, wrap it for DDP, autocast and torch.compile, and synchronize gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import contract
from .blocks import checkpoint_activations_of_blocks, compile_blocks_in_place
from .config import Config
from .contract import RecipeModule
from .loading.layout import batch_layout
from .optim import has_sparse_gradients
from .process import world
from .sharding import build_for_sharding, is_sharding, set_gradient_sharding, wrap_for_sharding


def build_model(
    accelerator: Accelerator,
    config: Config,
    data_info: dict[str, Any],
    resume_from: Path | None = None,
) -> tuple[nn.Module, dict[str, Tensor] | None]:
    """Build the model on the device or, where FSDP will shard it, without its weights.

    It precedes the optimizer, which looks where the parameters are.

    Args:
        accelerator: of this process.
        config: of the run.
        data_info: from the recipe's prepare_data.
        resume_from: the checkpoint whose weights are loaded later; None for new ones.

    Returns:
        The model, and what `prepare` needs to fill the shards.
    """
    build: Any = build_on_device
    if is_sharding(accelerator):
        build = build_for_sharding
    build_whole = partial(contract.build_model, config, data_info)
    model, weights = build(accelerator, build_whole, config)
    if config.distributed.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    checkpoint_activations_of_blocks(config, model, accelerator)
    return model, None if resume_from else weights


def build_on_device(
    accelerator: Accelerator, build_whole: Callable[[], nn.Module], config: Config
) -> tuple[nn.Module, None]:
    """Build the model, and move it to the device; no weights are left to be filled in."""
    # several CPU processes have cpu:0, and a move there copies what is on the CPU, each buffer by
    # itself: those that share memory would part
    on_cpu = accelerator.device.type == "cpu"
    model = build_whole().to("cpu" if on_cpu else accelerator.device)
    # as a move to a GPU leaves them: dense, as fused kernels need them, and without overlaps
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, None


def prepare(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor] | None = None,
) -> tuple[Any, Any]:
    """Prepare model and optimizer for DDP, FSDP2, autocast and torch.compile.

    Args:
        accelerator: of this process.
        config: of the run.
        model: with its weights or, for FSDP, on the meta device.
        optimizer: of the model's parameters.
        weights: on rank 0 the weights of a model on the meta device, on the others {}; None leaves
            its shards for a checkpoint to fill.

    Returns:
        What training calls, and what evaluation calls: without DDP, since batches there are
        ragged, but with autocast and FSDP.
    """
    wrap: Any = wrap_in_ddp
    if is_sharding(accelerator):
        wrap = wrap_for_sharding
    prepared = wrap(accelerator, config, model, optimizer, weights)
    if type(prepared) is RecipeModule:  # accelerate 1.10 fails on a model that build_model compiles
        return prepared, prepared
    return prepared, accelerator.unwrap_model(prepared)


def wrap_in_ddp(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    _: None,
) -> Any:
    """Wrap the model in DDP, where there are several processes. Same arguments as `prepare`."""
    keep_gradients_in_buckets(config, model, optimizer)
    wrapper = RecipeModule(model)
    compile_blocks_in_place(accelerator, wrapper, config)
    placement = [False] if accelerator.device.type == "cpu" else None  # see build_on_device
    prepared = accelerator.prepare(wrapper, device_placement=placement)
    accelerator._models[-1] = prepared  # the DDP, for accelerator.release_groups
    return prepared


def gradient_sync(model: Any, *, is_last: bool) -> AbstractContextManager:
    """Return the context of a micro-batch: what its backward pass sends of the gradients.

    DDP all-reduces them with the last micro-batch of a step.
    """
    set_gradient_sharding(model, is_last=is_last)
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def refuse_unused(model: Any) -> None:
    """Raise torch's error where a parameter got no gradient in a step.

    DDP averages a bucket of parameters when all of them have a gradient: one without leaves the
    others of its bucket unaveraged, which DDP itself would notice in the next step only, and after
    the last one never. So what it calls then, which has no public name, is called in each step.
    """
    if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
        model._check_reducer_finalized()


def keep_gradients_in_buckets(config: Config, model: nn.Module, optimizer: Any) -> None:
    """Let optimizer.zero_grad leave zeros in DDP's buckets, where a step has several micro-batches.

    With None instead, gradients would accumulate outside the buckets: 4 more bytes per parameter.
    Called before DDP makes its buckets: it replaces the gradients that are there with views of
    them. Not where parameters may be unused: with a gradient of zeros, the optimizer would still
    decay the weight and move its momentum. Sparse gradients are in no bucket.
    """
    layout, options = batch_layout(config.batches, world()[0]), config.distributed.ddp
    may_be_none = options.get("find_unused_parameters") or has_sparse_gradients(model)
    are_views = options.get("gradient_as_bucket_view", True) and not may_be_none
    if layout.world_size == 1 or layout.accumulation == 1 or not are_views:
        return
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def set_zeros(set_to_none: bool = True) -> None:
        for parameter in parameters:  # zeros that take no memory
            parameter.grad = parameter.new_zeros(()).expand_as(parameter)

    def after_first_step(set_to_none: bool = True) -> None:
        set_zeros()  # before its second step DDP makes its buckets again
        optimizer.zero_grad = partial(type(optimizer).zero_grad, optimizer, set_to_none=False)

    set_zeros()
    optimizer.zero_grad = after_first_step


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile compiles a model or a part of it."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def not_compiled(model: nn.Module) -> AbstractContextManager:
    """Run a compiled model without torch.compile, such as for the ragged batches of evaluation."""
    # imports torch._dynamo
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
