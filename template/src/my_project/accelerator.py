"""Refuse a wrong launch, start and end the Accelerator, and set precision and determinism."""

import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, get_type_hints

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)
from torch.distributed import (  # documented here, but not exported for type checkers
    DistNetworkError,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.rendezvous import register_rendezvous_handler

from . import sharding
from .config import Config, ConfigError, fits, wrong_value
from .files import check_temporary_folder
from .loading.layout import batch_layout
from .loading.loader import number_of_workers
from .optim import UNSCHEDULED, optimizer_class
from .process import no_garbage_collection, world
from .run_files import Numerics
from .run_folder import Run
from .settings import did_you_mean

# Launchers that set no rank for accelerate, each with the variable that counts its tasks.
TASK_COUNTS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}
UNSUPPORTED = {
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
}
UNSUPPORTED -= {*sharding.VARIABLES}  # sharding.py supports these


def check_launch(config: Config) -> None:
    """Refuse a launch that would silently train copies of one run, or use the wrong device.

    Also refuse an optimizer that is not installed, before anything is written.
    """
    check_temporary_folder(has_workers=number_of_workers(config.batches) > 0)
    optimizer_class(config.optim)
    for launcher, tasks in TASK_COUNTS.items():
        if "WORLD_SIZE" not in os.environ and int(os.environ.get(tasks, "1")) > 1:
            raise ConfigError(
                f"{launcher} started {os.environ[tasks]} tasks, but none was given a rank, so each"
                " would train alone: start one task per node, and in it `accelerate launch"
                " --config_file accelerate_configs/<where>.yaml ...`."
            )
    world_size, rank = world()
    if rank >= world_size:
        raise ConfigError(
            f"RANK is {rank}, but WORLD_SIZE is {world_size}, so this process would train and write"
            " nothing: unset RANK, or start the processes with `accelerate launch`."
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")  # set by accelerate's launcher
    for variable in filter(parse_flag_from_env, sorted(UNSUPPORTED)):
        raise ConfigError(
            f"{variable} is set, but this loop does not support it (DeepSpeed and Megatron-LM"
            " reduce gradients inside backward, so the gradient would be wrong if micro-batches"
            " differ in their number of items): use DDP or FSDP2."
        )
    if precision == "fp8" and config.precision is None:
        raise ConfigError("mixed_precision is fp8, but must be no, bf16 or fp16.")
    if precision and not asked_for_cpu():
        check_gpus(1, count_accelerators())
    sharding.check_config(world_size)


def check_precision(config: Config) -> None:
    """Refuse to train in fp16 on the CPU: accelerate would silently train without it."""
    precision = config.precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "fp16" and use_cpu():
        raise ConfigError("the precision is fp16, which needs a GPU: on the CPU, use bf16 or no.")


def count_accelerators() -> int:
    """Count the GPUs, or other accelerators, that torch can use on this machine."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def check_gpus(needed: int, available: int) -> None:
    """Refuse an accelerate config for more GPUs than torch finds."""
    if available < needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        fewer = f", set --num_processes {available}" if available else ""
        raise ConfigError(
            f"the accelerate config asks for {needed} GPU(s), but torch finds {available}"
            f" (CUDA_VISIBLE_DEVICES={visible}); fix the driver{fewer}, or use"
            " accelerate_configs/cpu.yaml or cpu_2_processes.yaml."
        )


def asked_for_cpu() -> bool:
    """Return whether the accelerate config asks for the CPU.

    A config with several processes can do so only by hiding the GPUs (gpu_ids: '-1,-1').
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith("-1")
    return hidden or parse_flag_from_env("ACCELERATE_USE_CPU")


def use_cpu() -> bool:
    """Return whether this process trains on the CPU."""
    return asked_for_cpu() or not torch.accelerator.is_available()


def keep_on_this_machine() -> str | None:
    """Make gloo and the store use the loopback interface if all processes run on this machine.

    torch's own store listens on all interfaces. Under torchrun, the agent has opened the store.

    Returns:
        The init_method of the process group; None for torch's default.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if not local or local != os.environ.get("WORLD_SIZE"):
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    with suppress(RuntimeError):  # registered by an earlier run in this process
        register_rendezvous_handler("loopback", loopback_store)
    return "loopback://"


def loopback_store(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size); the store listens on the loopback interface."""
    world_size, rank = world()
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    try:
        listener = None if rank else socket.create_server(address).detach()
    except OSError as error:
        raise DistNetworkError(f"{address[0]}:{address[1]} cannot be opened: {error}") from error
    store = TCPStore(*address, world_size, rank == 0, timeout, master_listen_fd=listener)
    yield store, rank, world_size


@contextmanager
def start_accelerator(config: Config) -> Iterator[Accelerator]:
    """Create the Accelerator; destroy its process group afterward, unless NCCL could hang."""
    init_method = keep_on_this_machine()
    AcceleratorState._reset_state(True)  # an earlier run or a recipe may have left a state
    limits = config.distributed
    longest = max(limits.startup_timeout_seconds, limits.timeout_seconds)
    timeout = timedelta(seconds=60 + longest)  # longer than the watchdog's limit
    with sharding.hidden_from_constructor(on_cpu=use_cpu()):
        accelerator = Accelerator(
            cpu=use_cpu(),
            mixed_precision=config.precision,
            kwargs_handlers=[
                ddp_options(config),
                initial_loss_scale(config),
                InitProcessGroupKwargs(init_method=init_method, timeout=timeout),
            ],
        )
    set_numerics(config)  # after the constructor, which allows TF32 with torch.compile
    finished = False
    try:
        check_world(accelerator)
        sharding.set_up_on_cpu(accelerator)
        yield accelerator
        finished = True
    finally:
        # NCCL's teardown would wait for collectives that no rank answers; exiting ends them.
        if torch.distributed.is_initialized() and (finished or accelerator.device.type == "cpu"):
            release_groups(accelerator)
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)


def release_groups(accelerator: Accelerator) -> None:
    """Drop the references to process groups that would outlive destroy_process_group.

    DDP's reducer references its group in C++. If this reference is the last one, the group's
    destructor holds the GIL while it waits for gloo's threads, and one of them may need the GIL to
    free a tensor: up to half of the runs of some tests hung with torch 2.10. If the last reference
    is in Python, the GIL is released during the wait.
    """
    for model in accelerator._models:
        for name in ("logger", "reducer"):
            vars(model).pop(name, None)
    sharding.release_groups(accelerator)


def ddp_options(config: Config) -> DistributedDataParallelKwargs:
    """Return DDP's options; in the config, the communication hook is "no" or "bf16".

    Raises:
        ConfigError: an option does not exist, or its value is wrong or does not fit the run.
    """
    kinds = get_type_hints(DistributedDataParallelKwargs)
    for name, value in config.distributed.ddp.items():
        if name not in kinds:
            hint = did_you_mean(name, kinds) or f"; its options are {', '.join(kinds)}."
            raise ConfigError(f"distributed.ddp.{name} is not an option of DDP{hint}")
        if not fits(value, kinds[name]):
            raise wrong_value(f"distributed.ddp.{name}", value, kinds[name])
    accumulation = batch_layout(config.batches, world()[0]).accumulation
    is_ddp = "LOCAL_RANK" in os.environ
    is_ddp = is_ddp and not sharding.is_wanted()
    if config.distributed.ddp.get("static_graph") and accumulation > 1 and is_ddp:
        raise ConfigError(
            f"distributed.ddp.static_graph is true, but a step accumulates {accumulation}"
            " micro-batches, and DDP would fail: leave static_graph out, or set"
            " batches.micro_batch_size so that no accumulation is needed."
        )
    # gradients as views of DDP's buckets save 4 bytes per parameter and a copy
    options = {"gradient_as_bucket_view": True, "comm_hook": "no"} | config.distributed.ddp
    options["comm_hook"] = options["comm_hook"] or "no"  # YAML reads no as false
    if options["comm_hook"] not in ("no", "bf16"):
        raise ConfigError(
            f"distributed.ddp.comm_hook is {options['comm_hook']!r}, but must be no or bf16:"
            " in fp16, the gradient of a summed loss overflows, and PowerSGD's state is not in"
            " checkpoints."
        )
    options["comm_hook"] = DDPCommunicationHookType(options["comm_hook"])
    return DistributedDataParallelKwargs(**options)


def initial_loss_scale(config: Config) -> GradScalerKwargs:
    """Return the initial loss scale of fp16: torch's default, divided by the global batch size.

    A sum over tokens needs an even smaller scale, which the scaler finds by skipping steps.
    """
    # a power of two: scaling changes only the exponent, so nothing is rounded
    samples = 2.0 ** math.ceil(math.log2(config.batches.global_batch_size))
    return GradScalerKwargs(init_scale=2.0**16 / samples)


def check_world(accelerator: Accelerator) -> None:
    """Raise an error if the process group lacks processes of this launch."""
    expected, rank = world()
    if accelerator.num_processes != expected:
        raise ConfigError(
            f"the launcher started {expected} processes, but rank {rank} sees"
            f" {accelerator.num_processes}: an Accelerator or PartialState was created before this"
            " one; remove it from the modules that the recipe imports."
        )


def numerics(accelerator: Accelerator, run: Run) -> Numerics:
    """Return the settings that affect the numbers of a run, but may change between launches."""
    config = run.config
    is_ddp = accelerator.num_processes > 1
    is_ddp = is_ddp and sharding.kind(accelerator) == "none"
    # read before parallel.prepare, which resets the plugin's backend and then compiles
    plugin: Any = accelerator.state.dynamo_plugin
    return {
        "precision": accelerator.mixed_precision,
        "tf32": config.tf32,
        "deterministic": config.deterministic,
        "sharding": sharding.kind(accelerator),
        "comm_hook": (is_ddp and config.distributed.ddp.get("comm_hook")) or "no",
        "torch_compile": plugin.backend != DynamoBackend.NO,
        # the learning rate of a step depends on the total number of steps
        "scheduled_steps": None if config.optim.schedule in UNSCHEDULED else run.total_steps,
    }


def set_numerics(config: Config) -> None:
    """Set torch's process-wide numeric switches."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.deterministic = config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with no_garbage_collection():  # the call imports torch._dynamo, as any optimizer does
        torch.use_deterministic_algorithms(config.deterministic)
