"""Build the model, wrap it for DDP, autocast and torch.compile, and synchronize gradients."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from . import contract
from .blocks import checkpoint_activations_of_blocks, compile_blocks_in_place
from .config import Config
from .contract import RecipeModule
from .loading.layout import batch_layout
from .optim import has_sparse_gradients
from .process import world
from .recipe import DataInfo
from .sharding import build_for_sharding, is_sharding, set_gradient_sharding, wrap_for_sharding


def build_model(
    accelerator: Accelerator,
    config: Config,
    data_info: DataInfo,
    resume_from: Path | None = None,
) -> tuple[nn.Module, dict[str, Tensor] | None]:
    """Build the model on the device or, where FSDP will shard it, without its weights.

    Call this before building the optimizer, which depends on the device of the parameters.

    Args:
        accelerator: this process's Accelerator.
        config: the run's config.
        data_info: from the recipe's prepare_data.
        resume_from: the checkpoint whose weights are loaded later; None: the weights are new.

    Returns:
        The model, and what `prepare` needs to fill the shards.
    """
    build: Callable[..., tuple[nn.Module, dict[str, Tensor] | None]] = build_on_device
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
    """Build the model with its weights, and move it to the device."""
    # with several CPU processes the device is cpu:0, and a move from cpu to cpu:0 would copy each
    # buffer separately, even buffers that share memory
    on_cpu = accelerator.device.type == "cpu"
    model = build_whole().to("cpu" if on_cpu else accelerator.device)
    # Fused kernels need dense weights, and a clone is dense. The clones share no memory,
    # and neither do parameters that were moved to a GPU.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # into one buffer, as cuDNN needs
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, None


def prepare(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    weights: dict[str, Tensor] | None = None,
) -> tuple[nn.Module, RecipeModule]:
    """Prepare model and optimizer for DDP, FSDP2, autocast and torch.compile.

    Args:
        accelerator: this process's Accelerator.
        config: the run's config.
        model: the model, with its weights or, for FSDP, on the meta device.
        optimizer: the optimizer of the model's parameters.
        weights: on rank 0, the weights of a model on the meta device; {} on the other ranks; None
            if the model has its weights, or a checkpoint will fill it.

    Returns:
        The module that training calls, and the module that evaluation calls. The latter has
        autocast and FSDP but not DDP, because the ranks evaluate batches of different sizes.
    """
    wrap: Callable[..., nn.Module] = wrap_in_ddp
    if is_sharding(accelerator):
        wrap = wrap_for_sharding
    prepared = wrap(accelerator, config, model, optimizer, weights)
    if type(prepared) is RecipeModule:  # unwrap_model of accelerate 1.10 fails on a compiled model
        return prepared, prepared
    return prepared, accelerator.unwrap_model(prepared)


def wrap_in_ddp(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    _: None,
) -> nn.Module:
    """Wrap the model in DDP if there are several processes. Same arguments as `prepare`."""
    keep_gradients_in_buckets(config, model, optimizer)
    wrapper = RecipeModule(model)
    compile_blocks_in_place(accelerator, wrapper, config)
    placement = [False] if accelerator.device.type == "cpu" else None  # see build_on_device
    prepared = accelerator.prepare(wrapper, device_placement=placement)
    accelerator._models[-1] = prepared  # the DDP module, for release_groups (accelerator.py)
    # for refuse_unused: DDP numbers the parameters that are trained now
    vars(prepared)["trained_names"] = [n for n, p in model.named_parameters() if p.requires_grad]
    return prepared


def gradient_sync(model: nn.Module, *, is_last: bool) -> AbstractContextManager:
    """Return the context that decides what a micro-batch's backward pass communicates.

    DDP all-reduces the gradients only in the last micro-batch of a step.
    """
    set_gradient_sharding(model, is_last=is_last)
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def refuse_unused(model: nn.Module) -> None:
    """Raise torch's error if a parameter got no gradient in a step.

    DDP averages a bucket once all its parameters have a gradient, so a parameter without one leaves
    its bucket unaveraged. DDP itself would notice this only in the next step, and never after the
    last step. So this calls DDP's own check in each step; the check has no public name.
    """
    if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
        try:
            model._check_reducer_finalized()
        except RuntimeError as error:
            trained = dict(enumerate(vars(model).get("trained_names", ())))
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            indices = found[1].split()[:5] if found else []
            names = [trained[int(index)] for index in indices if int(index) in trained]
            error.add_note(
                f"Use {', '.join(names) or 'every parameter'} in the loss, freeze it, or set"
                " --distributed.ddp.find_unused_parameters true."
            )
            raise


def keep_gradients_in_buckets(config: Config, model: nn.Module, optimizer: Optimizer) -> None:
    """Let optimizer.zero_grad leave zeros in DDP's buckets, if a step has several micro-batches.

    If zero_grad set the gradients to None, they would accumulate outside the buckets, which takes 4
    more bytes per parameter. Call this before DDP makes its buckets, because DDP replaces existing
    gradients with views of buckets. This function does nothing if parameters may be unused, because
    the optimizer would still decay a weight with a gradient of zeros and update its momentum. It
    also does nothing if gradients are sparse, because sparse gradients are in no bucket.
    """
    layout, options = batch_layout(config.batches, world()[0]), config.distributed.ddp
    may_be_none = options.get("find_unused_parameters") or has_sparse_gradients(model)
    are_views = options.get("gradient_as_bucket_view", True) and not may_be_none
    if layout.world_size == 1 or layout.accumulation == 1 or not are_views:
        return
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def set_zeros(set_to_none: bool = True) -> None:
        for parameter in parameters:  # expanded zeros take no memory
            parameter.grad = parameter.new_zeros(()).expand_as(parameter)

    def after_first_step(set_to_none: bool = True) -> None:
        set_zeros()  # DDP rebuilds its buckets before its second step
        optimizer.zero_grad = partial(type(optimizer).zero_grad, optimizer, set_to_none=False)

    set_zeros()
    optimizer.zero_grad = after_first_step


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile compiles a model or a part of it."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def not_compiled(model: nn.Module) -> AbstractContextManager:
    """Run a compiled model eagerly inside the block, since evaluation batches differ in size."""
    # only if compiled: set_stance imports torch._dynamo
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
