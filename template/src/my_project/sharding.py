"""The wrapper that DDP, FSDP2, autocast and torch.compile see, and the units that FSDP2 shards."""

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import contract, sharded_start
from .blocks import compile_in_place, recompute_activations
from .checkpoint.shards import plain_name
from .config import Config, ConfigError
from .devices import wants_sharding
from .optim import check_parameters, set_zero_gradients
from .process import world

logger = logging.getLogger(__name__)
MIN_BLOCK_PARAMETERS = 1_000_000  # fsdp_min_num_params of the accelerate configs


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

    def build() -> nn.Module:
        model = contract.build_model(config, data_info)
        if config.distributed.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return model

    if accelerator.distributed_type == DistributedType.FSDP:
        if config.channels_last and accelerator.is_main_process:
            logger.warning("channels_last is ignored: FSDP shards only contiguous weights.")
        model, weights = sharded_start.build(accelerator, build, is_resumed=resume_from is not None)
    else:
        model, weights = build().to(accelerator.device), None
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    checkpoint_activations(accelerator, config, model)
    return model, weights


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor] | None = None,
    accumulation: int = 1,
) -> tuple[Any, Any]:
    """Prepare model and optimizer for DDP, FSDP2, autocast and torch.compile.

    With accumulation, gradients are views of DDP's buckets from the first step.

    Args:
        accelerator: of this process.
        model: with its weights or, for FSDP, on the meta device.
        optimizer: of the model's parameters.
        weights: on rank 0 the weights of a model on the meta device, on the others {}; None leaves
            its shards for a checkpoint to fill.
        accumulation: micro-batches per step.

    Returns:
        What training calls, and what evaluation calls: without DDP, since batches there are
        ragged, but with autocast and FSDP.
    """
    if getattr(accelerator.state, "fsdp_plugin", None):
        prepared = shard(accelerator, model, optimizer, weights)
    else:
        if accumulation > 1 and not any(getattr(m, "sparse", False) for m in model.modules()):
            set_zero_gradients(optimizer)
        wrapper = RecipeModule(model)
        compile_in_place(accelerator, wrapper, blocks(accelerator, model))
        prepared, _ = accelerator.prepare(wrapper, optimizer)
        accelerator._models[-1] = prepared  # the DDP, for devices.release_groups
    if wants_sharding() and not any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "the accelerate config asks for FSDP, but accelerate has sharded no parameter; check"
            " its fsdp_config and the number of processes."
        )
    if not has_gradients_in_buckets(prepared):
        optimizer.zero_grad()
    check_parameters(optimizer.param_groups, model)
    return prepared, accelerator.unwrap_model(prepared)


def checkpoint_activations(accelerator: Accelerator, config: Config, model: nn.Module) -> None:
    """Recompute the activations of the blocks, if the config or accelerate's wants it."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    wanted = config.distributed.activation_checkpointing
    if plugin and plugin.activation_checkpointing:
        wanted = True
        # accelerate would wrap modules, and draw other dropout masks in the second forward pass
        plugin.activation_checkpointing = False
    found = blocks(accelerator, model) if wanted else []
    if wanted and not found:
        raise ConfigError(
            f"distributed.activation_checkpointing: {type(model).__name__} has no blocks, such as"
            " several layers of one class in a ModuleList or Sequential; set it to false."
        )
    for block in found:
        recompute_activations(block)


def blocks(accelerator: Accelerator, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose activations are recomputed and which are compiled one by one.

    They are those that FSDP2 gathers one at a time; without FSDP, the layers of which a ModuleList
    or a Sequential holds several of one class, or else those that FSDP2 would gather.
    """
    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        choose_blocks(plugin, model)
        names = set(plugin.transformer_cls_names_to_wrap or ())
    elif not (names := repeated_layers(model)):
        names = sharded_blocks(model, MIN_BLOCK_PARAMETERS)
    found = [module for module in model.modules() if type(module).__name__ in names]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def repeated_layers(model: nn.Module) -> set[str]:
    """Return the names of the classes of which a list holds several modules, and no other class.

    Of layers within layers these are the outer ones: of a mixture of experts each rank may call
    others. But where these differ in size, and one has more than a quarter of the model's
    parameters, most of them in inner layers, they are stages, and the inner layers count.
    """
    layers: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            first = module[0]
            is_leaf = not any(first.children())  # a Linear: its class is everywhere
            is_list = (
                isinstance(first, (nn.ModuleList, nn.ModuleDict)) or type(first) is nn.Sequential
            )
            if not (is_leaf or is_list) and {*map(type, module)} == {type(first)}:
                layers.setdefault(type(first).__name__, []).extend(module)

    def inside(layer: nn.Module) -> list[nn.Module]:
        others = (part for part in layer.modules() if type(part) is not type(layer))
        return [part for part in others if type(part).__name__ in layers]

    stages = set()
    for name, found in layers.items():
        largest = max(found, key=parameter_count)
        size = parameter_count(largest)
        are_equal = all(parameter_count(layer) == size for layer in found)
        is_large = 4 * size > parameter_count(model)
        if not are_equal and is_large and 2 * parameter_count(*inside(largest)) > size:
            stages.add(name)
    kept = layers.keys() - stages
    inner = {type(p).__name__ for name in kept for layer in layers[name] for p in inside(layer)}
    return kept - inner


def parameter_count(*modules: nn.Module) -> int:
    """Return the number of parameters of modules that may contain one another."""
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())


def shard(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor] | None,
) -> Any:
    """Shard by accelerate's `prepare`, then allocate and fill the shards. Arguments as of prepare.

    Accelerate finds the optimizer's parameters by their addresses, which on the meta device are all
    the same: here they are found by name.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    choose_blocks(plugin, model)
    plugin.cpu_ram_efficient_loading = False  # sharded_start does that
    autocast = None
    if accelerator.mixed_precision != "no":  # accelerate's prepare adds autocast to DDP only
        kind = plugin.mixed_precision_policy.param_dtype
        # accelerate's policy also casts outputs: of what a loss returns, bf16 keeps 3 digits
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy
        autocast = accelerator.device.type, kind
    if optimizer.state:
        raise ConfigError(
            f"{type(optimizer).__name__} makes its state in its constructor, before FSDP shards the"
            " parameters; choose another optim.class_path."
        )
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    is_on_meta = any(p.is_meta for p in model.parameters())
    wrapper = RecipeModule(model, autocast)
    compile_in_place(accelerator, wrapper, blocks(accelerator, model))
    with warnings.catch_warnings():
        # accelerate 1.10 says that it casts float32 to float32
        warnings.filterwarnings("ignore", message="FSDP upcast of low precision parameters")
        # torch, on every rank, of how accelerate takes the mesh of the shards
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        prepared, _ = accelerator.prepare(wrapper, optimizer)
    # the backward pass needs the root at once; accelerate before 1.13 lets it be gathered again
    prepared.set_reshard_after_forward(False, recurse=False)
    if autocast:  # the root's inputs are a batch: targets and weights of items stay as they are
        root: Any = prepared._get_fsdp_state()
        root._mp_policy = replace(root._mp_policy, cast_forward_inputs=False)
    if is_on_meta:
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        place = torch.device("cpu") if is_offloaded else accelerator.device
        sharded_start.allocate(prepared, place)
        if weights is not None:
            sharded_start.fill(model, weights, accelerator.device)
    parameters = {plain_name(name): p for name, p in model.named_parameters()}
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in named]
    return prepared


def choose_blocks(plugin: Any, model: nn.Module) -> None:
    """Replace accelerate's size-based wrapping with the classes that sharded_blocks chooses.

    Size-based wrapping would also wrap modules that FSDP2 cannot gather alone: a ModuleList, whose
    forward is never called, and one of two modules that share a tied weight.
    """
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sorted(sharded_blocks(model, plugin.min_num_params))


def sharded_blocks(model: nn.Module, least: int) -> set[str]:
    """Return the names of the classes whose modules FSDP2 gathers one at a time.

    They are repeated layers that have at least `least` parameters. Elsewhere, from the leaves up, a
    module becomes a block if it has as many, and no block in it. With a module all modules of its
    class are blocks; the root keeps the remaining parameters.
    """
    wrapped = model  # peft wraps a model in two modules, and calls it without its hooks
    while len(inner := list(wrapped.children())) == 1 and not list(wrapped.parameters(False)):
        wrapped = inner[0]
    # accelerate finds a class by its name
    names = Counter(kind.__name__ for kind in {type(module) for module in model.modules()})
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

    def can_be_block(module: nn.Module) -> bool:
        kind = type(module)
        is_leaf = not any(module.children())  # a Linear: its class is everywhere
        is_around_all = any(inner is wrapped for inner in module.modules())
        if is_around_all or is_leaf or kind is nn.Sequential or names[kind.__name__] > 1:
            return False
        inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        return kind.forward is not nn.Module.forward and inside.items() <= holders.items()

    layers = repeated_layers(model)
    classes = {
        type(module)
        for module in model.modules()
        if type(module).__name__ in layers
        and parameter_count(module) >= least
        and can_be_block(module)
    }

    def choose(module: nn.Module) -> float:
        """Return the parameters that are in no block, and add to the classes."""
        if type(module) in classes:
            return 0
        # each module that holds a tied weight counts its part
        own = sum(p.numel() / holders[id(p)] for p in module.parameters(recurse=False))
        count = own + sum(map(choose, module.children()))
        is_around_blocks = any(type(inner) in classes for inner in module.modules())
        if count < least or is_around_blocks or not can_be_block(module):
            return count
        classes.add(type(module))
        return 0

    choose(model)
    return {kind.__name__ for kind in classes}


def strict_ddp(model: Any) -> DistributedDataParallel | None:
    """Return the DDP that waits for the gradient of every parameter, if there is one."""
    is_ddp = isinstance(model, DistributedDataParallel)
    return model if is_ddp and not model.find_unused_parameters else None


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
