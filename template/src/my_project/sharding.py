"""Shard a model with FSDP2; no device holds the whole model, not even at the start.

At the start, only rank 0 holds the whole model, in host memory, and no device holds more than its
shards and one weight. Rank 0 builds the model and sends the modules and buffers to the other ranks,
with the parameters on the meta device, where they need no memory. FSDP2 shards these parameters,
and rank 0 then scatters the weights, one at a time. In a resumed run, rank 0 drops the weights, and
each rank reads its own shards.
"""

import atexit
import gc
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .blocks import blocks, compile_blocks_in_place
from .config import Config, ConfigError
from .contract import RecipeModule, build_model
from .ranks import on_main_then_broadcast
from .recipe import DataInfo

logger = logging.getLogger(__name__)


# ---- what the accelerate config says -------------------------------------------------------------
USES_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
VARIABLES = ("ACCELERATE_USE_FSDP", USES_MESH)


def uses_mesh() -> bool:
    """Return whether the accelerate config gives the sizes of a device mesh."""
    return parse_flag_from_env(USES_MESH)


def is_wanted() -> bool:
    """Return whether the accelerate config asks for FSDP."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_config(world_size: int) -> None:
    """Refuse a config that asks for FSDP 1, or for a mesh whose size is not the world size.

    Raises:
        ConfigError: the config is refused, or the variables for FSDP are set although no launcher
            started this process.
    """
    variables = [name for name in VARIABLES if parse_flag_from_env(name)]
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "WORLD_SIZE" in os.environ
    if variables and not is_launched:
        raise ConfigError(
            f"{variables[0]} is set in the environment, but no launcher started this process: unset"
            " it, or start with an accelerate config that asks for it, such as fsdp2.yaml."
        )
    if is_wanted() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "the accelerate config (or the variable ACCELERATE_USE_FSDP) asks for FSDP 1, but this"
            " loop supports only FSDP 2: set fsdp_version: 2 in its fsdp_config."
        )
    if uses_mesh():
        # accelerate ignores a misspelled key, so its size stays 1
        names = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        sizes = (os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name in names)
        replicas, shards, *others = map(int, sizes)
        if replicas * shards != world_size or {*others} != {1}:
            raise ConfigError(
                f"parallelism_config has the sizes {replicas} (dp_replicate) and {shards}"
                " (dp_shard), but parallelism_config_dp_replicate_size (nodes) x"
                f" parallelism_config_dp_shard_size (GPUs per node) must be {world_size} processes,"
                " and all other sizes 1: this loop supports only data parallelism."
            )


def is_sharding(accelerator: Accelerator) -> bool:
    """Return whether FSDP2 shards the model."""
    return accelerator.distributed_type == DistributedType.FSDP


def kind(accelerator: Accelerator) -> str:
    """Return the kind of sharding: none, FSDP2 or HSDP."""
    mesh = accelerator.parallelism_config
    is_hsdp = mesh and mesh.dp_replicate_enabled
    return "none" if not is_sharding(accelerator) else "HSDP" if is_hsdp else "FSDP2"


@contextmanager
def hidden_from_constructor(*, on_cpu: bool) -> Iterator[None]:
    """Inside the block, hide the mesh sizes, which accelerate's constructor refuses on a CPU."""
    value = os.environ.pop(USES_MESH, None) if on_cpu and is_wanted() else None
    try:
        yield
    finally:
        if value:
            os.environ[USES_MESH] = value


def set_up_on_cpu(accelerator: Accelerator) -> None:
    """Set up sharding on CPU processes, where accelerate would silently use DDP."""
    is_on_cpu = accelerator.device.type == "cpu" and is_wanted()
    if is_on_cpu and accelerator.num_processes > 1:
        shard_on_cpu(accelerator, is_hsdp=uses_mesh())


def shard_on_cpu(accelerator: Accelerator, *, is_hsdp: bool) -> None:
    """Set the values that accelerate's constructor sets for GPUs."""
    state: Any = accelerator.state
    # each AcceleratorState() copies its distributed_type from PartialState
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    sizes = {} if is_hsdp else {"dp_replicate_size": 1, "dp_shard_size": accelerator.num_processes}
    state.parallelism_config = ParallelismConfig(**sizes)
    state.device_mesh = state.parallelism_config.build_device_mesh("cpu")


def release_groups(accelerator: Accelerator) -> None:
    """Drop the references to process groups that would outlive destroy_process_group.

    FSDP's modules (in reference cycles) and its mesh (in caches of torch 2.15) would keep their
    groups alive while the interpreter ends. A gloo thread that then asks for the GIL aborts the
    process, with "terminate called without an active exception".
    """
    if mesh := getattr(accelerator.state, "device_mesh", None):
        vars(mesh).get("_pg_registry", {}).clear()
        atexit.register(gc.collect)


def set_gradient_sharding(model: nn.Module, *, is_last: bool) -> None:
    """Let FSDP2 reduce-scatter gradients in each micro-batch; HSDP all-reduces only in the last.

    So no rank has the whole gradient at any time.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


def renew_sharding(model: nn.Module) -> None:
    """Let sharded modules gather their weights again: the copies may be stale after an EMA swap."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---- the model -----------------------------------------------------------------------------------
def wrap_for_sharding(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor] | None,
) -> RecipeModule:
    """Shard with torch's `fully_shard`, then allocate and fill the shards.

    Same arguments as parallel.prepare. accelerate's `prepare` cannot be used, for two reasons: it
    would look for blocks in our wrapper, and it matches the optimizer's parameters by address, but
    all parameters on the meta device have the same address. This function matches them by name.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if optimizer.state:  # such as Adagrad's: it is not sharded, so no checkpoint could hold it
        raise ConfigError(
            f"{type(optimizer).__name__} creates its state in its constructor, before FSDP shards"
            " the parameters; choose another optim.class_path."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    is_on_meta = any(p.is_meta for p in model.parameters())
    dtypes = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[accelerator.mixed_precision]
    autocast = (accelerator.device.type, dtype) if dtype else None
    if dtype:
        for p in model.parameters():
            if p.requires_grad and p.dtype != torch.float32:  # the optimizer needs float32
                p.data = p.data.float()
    # no output_dtype, since bf16 would keep only 3 digits of what the loss returns
    block_policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
    # the root's input is a batch, whose targets and item weights must keep their dtype
    root_policy = MixedPrecisionPolicy(dtype, block_policy.reduce_dtype, cast_forward_inputs=False)
    sizes: Any = accelerator.parallelism_config
    mesh: Any = accelerator.torch_device_mesh
    with warnings.catch_warnings():
        # torch warns on every rank about the mesh of the shards
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        mesh = mesh and mesh[tuple(sizes.fsdp_dim_names)]
    options = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
    wrapper = RecipeModule(model, autocast)
    block_list = blocks(config.recipe, model)
    compile_blocks_in_place(accelerator, wrapper, config)
    reshard = plugin.reshard_after_forward
    # torch's BatchNorm needs weights of the same dtype as its statistics, which are float32
    norm_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for norm in [m for m in model.modules() if dtype and isinstance(m, _BatchNorm) and m.affine]:
        fully_shard(norm, reshard_after_forward=reshard, mp_policy=norm_policy, **options)
    for block in block_list:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=block_policy, **options)
    # not resharded, since the backward pass needs the root first
    fully_shard(wrapper, reshard_after_forward=False, mp_policy=root_policy, **options)
    if is_on_meta:
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        device = torch.device("cpu") if is_offloaded else accelerator.device
        allocate(wrapper, device)
        if weights is not None:
            fill(model, weights, accelerator.device)
    parameters = dict(model.named_parameters())
    for group, group_names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in group_names]
    return wrapper


def model_for_sharding(
    accelerator: Accelerator, config: Config, data_info: DataInfo
) -> RecipeModule:
    """Return a sharded model for evaluation; the caller fills its shards."""
    build_whole = partial(build_model, config, data_info)
    model, _ = build_for_sharding(accelerator, build_whole, config)
    no_state = torch.optim.SGD(model.parameters())
    return wrap_for_sharding(accelerator, config, model, no_state, None)


# ---- a model without its weights -----------------------------------------------------------------
def build_for_sharding(
    accelerator: Accelerator, build_whole: Callable[[], nn.Module], _: Config
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model whose parameters are on the meta device. Called by every rank.

    Only rank 0 calls the recipe's build_model, which may read weights or compute with values. It
    sends the modules to the other ranks by pickle; if that fails, every rank calls build_model.

    Args:
        accelerator: this process's Accelerator.
        build_whole: builds the model on the CPU.

    Returns:
        The model, and its weights by name on the CPU: all on rank 0, none on the other ranks.
    """
    built: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def build_on_main() -> tuple[bytes, dict[str, Tensor]]:
        model = build_whole()
        built.append((model, take_weights(model)))
        buffers = dict(model.named_buffers())
        try:
            return pickle.dumps(model), buffers
        except Exception as error:  # such as for a lambda or a local class
            warn(error)
            return b"", buffers

    def warn(error: Exception) -> None:
        logger.warning(
            "the model cannot be sent to the other ranks (%s), so each builds the whole model in"
            " host memory; define its classes and functions at the top level of a module.",
            error,
        )

    pickled, buffers = on_main_then_broadcast(accelerator, build_on_main)
    if built:
        return built[0]
    try:
        if pickled:
            return pickle.loads(pickled), {}
    except Exception as error:  # such as for a class that only build_model makes importable
        warn(error)
    model = build_whole()
    take_weights(model)
    for name, buffer in buffers.items():
        model.get_buffer(name).data.copy_(buffer)
    return model, {}


def take_weights(model: nn.Module) -> dict[str, Tensor]:
    """Move the parameters, but not the buffers, to the meta device; return their values by name."""
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
    """Replace the data of parameters, which stay the same objects, so tied weights stay tied.

    This calls the modules' own `_apply`, since torch's recurrent layers override it: they hold weak
    references to their weights.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(function)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate what is on the meta device, such as this rank's shards; values stay unset.

    nn.Module.to_empty would also empty buffers that have values, and untie weights.
    """
    _apply(model, lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


@torch.no_grad()
def fill(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Fill the shards of all ranks with rank 0's weights. Called by every rank.

    Args:
        model: the sharded model.
        weights: from `build_for_sharding`; emptied on the way, which frees rank 0's host memory.
        device: the device on which ranks communicate.
    """
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if name in weights:
            whole.copy_(weights.pop(name))
        filled = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(filled.to_local())
