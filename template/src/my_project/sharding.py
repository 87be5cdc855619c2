"""The wrapper that DDP, FSDP2, autocast and torch.compile see, and how FSDP2 shards it.

A model that is sharded starts so: only rank 0 holds all of it, in host memory, and no device holds
more than its shards and one weight. Rank 0 builds the model and sends the others its modules and
buffers, with parameters on the meta device, which take no memory. FSDP2 shards those, and rank 0
then scatters the weights, one at a time. In a run that resumes each rank reads its shards, and rank
0's weights are dropped.
"""

import logging
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from . import contract
from .accelerator import on_main_then_broadcast
from .blocks import blocks, compile_in_place, recompute_activations
from .config import Config, ConfigError
from .loading.layout import batch_layout
from .optim import has_sparse_gradients
from .process import world

logger = logging.getLogger(__name__)


class RecipeModule(nn.Module):
    """Let a recipe call any method of its model inside the one forward that the wrappers see.

    DDP, FSDP, autocast and torch.compile act on `forward` only.
    """

    def __init__(
        self, model: nn.Module, autocast: tuple[str, torch.dtype | None] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast  # the kind of device and the type; None: accelerate does it

    def forward(self, function: Callable, *arguments: Any) -> Any:
        """Call function(model, *arguments)."""
        with torch.autocast(*self.autocast) if self.autocast else nullcontext():
            return function(self.model, *arguments)


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
        resume_from: the checkpoint that the weights come from; None for new ones.

    Returns:
        The model, and what `prepare` needs to fill the shards.
    """
    build = partial(contract.build_model, config, data_info)
    if accelerator.distributed_type == DistributedType.FSDP:
        model, weights = build_on_meta(accelerator, build)
    else:
        # several CPU processes have cpu:0, and a move there copies what is on the CPU, each buffer
        # by itself: those that share memory would part
        on_cpu = accelerator.device.type == "cpu"
        model, weights = build().to("cpu" if on_cpu else accelerator.device), None
        # as a move to a GPU leaves them: dense, as fused kernels need them, and without overlaps
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.distributed.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    checkpoint_activations(config, model, getattr(accelerator.state, "fsdp_plugin", None))
    return model, None if resume_from else weights


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
    if getattr(accelerator.state, "fsdp_plugin", None):
        prepared = shard(accelerator, config, model, optimizer, weights)
    else:
        keep_gradients_in_buckets(config, model, optimizer)
        wrapper = RecipeModule(model)
        compile_in_place(accelerator, wrapper, blocks(config.recipe, model))
        placement = [False] if accelerator.device.type == "cpu" else None  # see build_model
        prepared = accelerator.prepare(wrapper, device_placement=placement)
        accelerator._models[-1] = prepared  # the DDP, for accelerator.release_groups
    if type(prepared) is RecipeModule:  # accelerate 1.10 fails on a model that build_model compiles
        return prepared, prepared
    return prepared, accelerator.unwrap_model(prepared)


def checkpoint_activations(config: Config, model: nn.Module, plugin: Any = None) -> None:
    """Recompute the activations of the blocks, if the config or accelerate's of FSDP says so."""
    by_plugin = getattr(plugin, "activation_checkpointing", False)
    if not (config.distributed.activation_checkpointing or by_plugin):
        return
    if not (found := blocks(config.recipe, model)):
        raise ConfigError(
            f"distributed.activation_checkpointing: {type(model).__name__} has no blocks; return"
            " them from the recipe's model_blocks."
        )
    for block in found:
        recompute_activations(block)


def shard(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor] | None,
) -> Any:
    """Shard by torch's `fully_shard`, then allocate and fill the shards. Arguments as of prepare.

    Not by accelerate's `prepare`, which chooses what is gathered at once by looking into our
    wrapper, and finds the optimizer's parameters by their addresses: on the meta device all have
    the same. Here they are found by name.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if optimizer.state:  # such as Adagrad's: the last save would fail
        raise ConfigError(
            f"{type(optimizer).__name__} makes its state in its constructor, before FSDP shards the"
            " parameters; choose another optim.class_path."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    is_on_meta = any(p.is_meta for p in model.parameters())
    kinds = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    kind = kinds[accelerator.mixed_precision]
    autocast = (accelerator.device.type, kind) if kind else None
    if kind:
        for p in model.parameters():
            if p.requires_grad and p.dtype != torch.float32:  # what the optimizer steps
                p.data = p.data.float()
    # without an output_dtype: of what a loss returns, bf16 would keep 3 digits
    block_policy = MixedPrecisionPolicy(kind, torch.float32 if kind else None)
    # the root's inputs are a batch: targets and weights of items stay as they are
    root_policy = MixedPrecisionPolicy(kind, block_policy.reduce_dtype, cast_forward_inputs=False)
    sizes: Any = accelerator.parallelism_config
    mesh: Any = accelerator.torch_device_mesh
    with warnings.catch_warnings():
        # torch, on every rank, of the mesh of the shards
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        mesh = mesh and mesh[tuple(sizes.fsdp_dim_names)]
    options = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
    wrapper = RecipeModule(model, autocast)
    block_list = blocks(config.recipe, model)
    compile_in_place(accelerator, wrapper, block_list)
    reshard = plugin.reshard_after_forward
    # torch's BatchNorm takes weights and statistics of one type, and the statistics are float32
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    for norm in [m for m in model.modules() if kind and isinstance(m, _BatchNorm) and m.affine]:
        fully_shard(norm, reshard_after_forward=reshard, mp_policy=whole, **options)
    for block in block_list:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=block_policy, **options)
    # the backward pass needs the root at once
    fully_shard(wrapper, reshard_after_forward=False, mp_policy=root_policy, **options)
    if is_on_meta:
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        place = torch.device("cpu") if is_offloaded else accelerator.device
        allocate(wrapper, place)
        if weights is not None:
            fill(model, weights, accelerator.device)
    parameters = dict(model.named_parameters())
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in named]
    return wrapper


# ---- a start without the weights -----------------------------------------------------------------
def build_on_meta(
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
        weights: as returned by `build_on_meta`; emptied, so that rank 0's host memory is freed on
            the way.
        device: on which ranks communicate.
    """
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if name in weights:
            whole.copy_(weights.pop(name))
        filled = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(filled.to_local())


# ---- gradients -----------------------------------------------------------------------------------
def gradient_sync(model: Any, *, is_last: bool) -> AbstractContextManager:
    """Return the context of a micro-batch: what its backward pass sends of the gradients.

    DDP all-reduces them with the last micro-batch of a step. FSDP2 reduce-scatters those of each,
    so that no rank ever holds the whole gradient; HSDP all-reduces the shards with the last.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def strict_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP that waits for the gradient of every parameter, if there is one."""
    is_ddp = isinstance(model, DistributedDataParallel)
    return model if is_ddp and not model.find_unused_parameters else None


def refusal_of_unused(model: Any) -> Callable[[], None] | None:
    """Return what raises torch's error where a parameter got no gradient in a step.

    DDP averages a bucket of parameters when all of them have a gradient: one without leaves the
    others of its bucket unaveraged, which DDP itself would notice in the next step only, and after
    the last one never. So what it calls then, which has no public name, is called in each step.
    None if DDP waits for no gradient.
    """
    ddp = strict_ddp(model)
    return ddp._check_reducer_finalized if ddp else None


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
