"""The Accelerator: refuse a wrong launch, start it, agree between ranks, set numerics."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from typing import Any

import accelerate
import psutil
import torch
import torch.distributed
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

from .collectives import agree, gather_on_main, on_main_then_broadcast
from .config import Config, ConfigError
from .files import writing
from .loading.seeding import derive_seed
from .optim import optimizer_class
from .process import collect_all_garbage, no_garbage_collection, world
from .run_folder import Run, code_digest, not_shared
from .stopping import turn_on_flight_recorder

# The variables in which each launcher gives world size and rank.
LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
USES_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"


def check_launch(config: Config) -> None:
    """Refuse a launch that would become silent copies of one run, or run on the wrong device."""
    check_options(config)
    for launcher, (size, rank) in LAUNCHERS.items():
        if "WORLD_SIZE" not in os.environ and int(os.environ.get(size, "1")) > 1:
            raise ConfigError(
                f"{launcher} started {os.environ[size]} tasks (this is {os.environ.get(rank)}), but"
                " none was given a rank, so each would train alone: start one task per node, and in"
                " it `accelerate launch --config_file accelerate_configs/<where>.yaml ...`."
            )
    world_size, own_rank = world()
    if own_rank >= world_size:
        raise ConfigError(
            f"RANK is {own_rank}, but WORLD_SIZE is {world_size}, so this process would train and"
            " write nothing: unset RANK, or start the processes with `accelerate launch`."
        )
    if not asked_for_cpu() and launched():
        check_gpus(1, count_accelerators())
    if wants_sharding() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "the accelerate config asks for FSDP 1, which this loop does not support (its flat"
            " parameters have other gradients and checkpoints): set fsdp_version: 2 in its"
            " fsdp_config."
        )
    if uses_mesh():
        check_mesh()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "DeepSpeed reduces gradients inside backward, so the gradient of ragged batches would"
            " be wrong; use DDP or FSDP."
        )


def count_accelerators() -> int:
    """Count the GPUs, or other accelerators, that torch can use on this machine."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def check_gpus(needed: int, found: int) -> None:
    """Refuse an accelerate config for more GPUs than were found."""
    if found < needed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        asked = "asks for a GPU, but torch finds none"
        if found:
            asked = f"asks for {needed} GPUs, but torch finds {found}"
        raise ConfigError(
            f"the accelerate config {asked} (CUDA_VISIBLE_DEVICES={visible}); fix the driver, set"
            " --num_processes, or use accelerate_configs/cpu.yaml or cpu_2_processes.yaml."
        )


def uses_mesh() -> bool:
    """Return whether the accelerate config gives the sizes of a device mesh."""
    return os.environ.get(USES_MESH, "false").lower() == "true"


def check_mesh() -> None:
    """Check that the sizes in parallelism_config multiply to the world size.

    Accelerate ignores misspelled keys there, which leaves a size at 1.
    """
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    world_size, _ = world()
    if list(sizes.values())[2:] != [1, 1, 1] or prod(sizes.values()) != world_size:
        raise ConfigError(
            f"parallelism_config has the sizes {sizes}, but must have parallelism_config_"
            "dp_replicate_size (nodes) x parallelism_config_dp_shard_size (GPUs per node) ="
            f" {world_size} processes, and no other: this loop knows only data parallelism."
        )


def check_options(config: Config) -> None:
    """Check for options that accelerate or torch would reject or crash on."""
    options = config.distributed.ddp
    if (hook := options.get("comm_hook", "no")) not in ("no", "fp16", "bf16"):
        raise ConfigError(
            f"distributed.ddp.comm_hook is {hook!r}, but must be no, fp16 or bf16: PowerSGD has a"
            " state that no checkpoint holds."
        )
    optimizer_class(config.optim)
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if unknown := set(config.telemetry.trackers) - set(trackers):
        raise ConfigError(
            f"telemetry.trackers names {', '.join(sorted(unknown))}, which accelerate does not find"
            f" here; installed: {', '.join(trackers)}."
        )


def wants_sharding() -> bool:
    """Return whether the accelerate config asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def launched() -> bool:
    """Return whether `accelerate launch` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def asked_for_cpu() -> bool:
    """Return whether the accelerate config wants the CPU.

    With several processes it can say so only by hiding the GPUs (gpu_ids: '-1,-1').
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith("-1")
    return hidden or os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"


def use_cpu() -> bool:
    """Return whether this process trains on the CPU."""
    return asked_for_cpu() or not torch.accelerator.is_available()


def loopback() -> str:
    """Return the name of the loopback interface; empty where it has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return ""


def keep_gloo_on_this_machine() -> None:
    """Let gloo use the loopback interface where all processes run here."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local and local == os.environ.get("WORLD_SIZE") and (name := loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@contextmanager
def start(config: Config) -> Iterator[Accelerator]:
    """Create the Accelerator; destroy its process group afterwards, unless NCCL could hang."""
    keep_gloo_on_this_machine()
    turn_on_flight_recorder(config)
    AcceleratorState._reset_state(True)  # a run may follow another in one process
    GradientState._reset_state()
    limits = config.distributed
    longest = max(limits.startup_timeout_seconds, limits.timeout_seconds)
    shards_on_cpu = wants_sharding() and use_cpu()
    # on a CPU, accelerate's constructor refuses sizes of a mesh
    mesh_variable = os.environ.pop(USES_MESH, None) if shards_on_cpu else None
    accelerator = Accelerator(
        cpu=use_cpu(),
        mixed_precision=config.precision,
        gradient_accumulation_steps=1,  # the loop accumulates: backward() would divide by it
        log_with=[*config.telemetry.trackers] or None,
        project_config=ProjectConfiguration(
            project_dir=str(config.folder), logging_dir=config.runs_folder
        ),
        kwargs_handlers=[
            ddp_options(config),
            # stopping.Watchdog acts before, and reports where each rank stalled
            InitProcessGroupKwargs(timeout=timedelta(seconds=60 + longest)),
        ],
    )
    if mesh_variable:
        os.environ[USES_MESH] = mesh_variable
    set_numerics(config)  # after its constructor, which allows TF32 where it is to compile
    finished = False
    try:
        check_world(accelerator)
        if shards_on_cpu and accelerator.num_processes > 1:
            shard_on_cpu(accelerator, is_hsdp=uses_mesh())
        yield accelerator
        finished = True
    finally:
        # NCCL's teardown would wait for collectives that no rank answers; the exit ends them.
        if torch.distributed.is_initialized() and (finished or accelerator.device.type == "cpu"):
            release_groups(accelerator)
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def release_groups(accelerator: Accelerator) -> None:
    """Drop the references to process groups that would outlive destroy_process_group.

    DDP's reducer holds its group in C++. If it were the last, it would wait for gloo's threads with
    the GIL, which one of them may need to release a tensor: with torch 2.10 up to half of the runs
    of some tests hung. A reference of Python waits without the GIL.

    FSDP's modules, in cycles, and its mesh, in torch's caches (2.15), would hold theirs while the
    interpreter ends. A thread of gloo that then asks for the GIL aborts the process, with
    "terminate called without an active exception".
    """
    for model in accelerator._models:
        for name in ("logger", "reducer"):
            vars(model).pop(name, None)
    if mesh := getattr(accelerator.state, "device_mesh", None):
        vars(mesh).get("_pg_registry", {}).clear()
        atexit.register(collect_all_garbage)


def shard_on_cpu(accelerator: Accelerator, *, is_hsdp: bool) -> None:
    """Let accelerate's `prepare` shard on CPU processes, where it would use DDP without a word.

    These are the values that its constructor sets for GPUs; `prepare` itself works on both.
    """
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    state: Any = accelerator.state
    # each AcceleratorState() copies the first over the second
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    sizes = {} if is_hsdp else {"dp_replicate_size": 1, "dp_shard_size": accelerator.num_processes}
    state.parallelism_config = ParallelismConfig(**sizes)
    state.device_mesh = state.parallelism_config.build_device_mesh("cpu")


def ddp_options(config: Config) -> DistributedDataParallelKwargs:
    """Pass DDP's options on; communication hooks by their names (fp16, bf16)."""
    # gradients in DDP's own buffers: 4 bytes per parameter and a copy less
    options: dict[str, Any] = {"gradient_as_bucket_view": True} | config.distributed.ddp
    if "comm_hook" in options:
        options["comm_hook"] = DDPCommunicationHookType(options["comm_hook"])
    return DistributedDataParallelKwargs(**options)


def check_world(accelerator: Accelerator) -> None:
    """Raise an error at once if the process group lacks processes of this launch."""
    expected, rank = world()
    if accelerator.num_processes != expected:
        if torch.distributed.is_initialized():
            # If this process exited now, the others would fail to connect, and report that error
            # instead of the cause.
            with suppress(RuntimeError):
                torch.distributed.barrier()
        raise ConfigError(
            f"the launcher started {expected} processes, but rank {rank} sees"
            f" {accelerator.num_processes}: an Accelerator or PartialState was created before this"
            " one; remove it from the modules that the recipe imports."
        )


def open_run(
    accelerator: Accelerator, run: Run, must_agree: dict[str, Any], lengths: dict[str, int]
) -> None:
    """Open the run folder on all ranks together.

    Args:
        accelerator: this process's Accelerator.
        run: the run folder.
        must_agree: values that must be equal on all ranks, by name.
        lengths: the length of each dataset; must be equal on all ranks.

    Raises:
        ConfigError: settings, code or datasets differ between ranks, or a node does not see the run
            folder that rank 0 wrote to.
    """
    facts: dict[str, Any] = {name: derive_seed(value) for name, value in must_agree.items()}
    facts |= {f"the length of {name}": length for name, length in lengths.items()}
    facts["the code of the project and the recipe"] = code_digest(run.config)
    facts["the version of torch or accelerate"] = str(torch.__version__), accelerate.__version__
    run.hosts = agree(accelerator, facts)
    run.numerics = numerics(accelerator, run)
    run.lengths = lengths

    def begin() -> str:
        with writing(run.folder):
            run.begin()
        return run.token

    token = on_main_then_broadcast(accelerator, begin)
    seen = gather_on_main(accelerator, run.sees(token))

    def check_seen() -> None:
        if blind := sorted({host for host, sees in zip(run.hosts, seen, strict=True) if not sees}):
            raise ConfigError(not_shared(run.folder, ", ".join(blind), run.hosts[0]))

    on_main_then_broadcast(accelerator, check_seen)


def numerics(accelerator: Accelerator, run: Run) -> dict[str, Any]:
    """Return the settings that affect the numbers of a run, but may change between launches."""
    config = run.config
    sharding, uses_hook = "none", accelerator.num_processes > 1
    if accelerator.distributed_type == DistributedType.FSDP:
        mesh, uses_hook = getattr(accelerator, "parallelism_config", None), False
        sharding = "HSDP" if mesh and mesh.dp_replicate_enabled else "FSDP2"
    # sharding.prepare, which compiles, takes the backend out of the plugin
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    return {
        "precision": accelerator.mixed_precision,
        "tf32": config.tf32,
        "deterministic": config.deterministic,
        "sharding": sharding,
        "comm_hook": config.distributed.ddp.get("comm_hook", "no") if uses_hook else "no",
        "torch_compile": plugin is not None and plugin.backend != DynamoBackend.NO,
        # the learning rate of a step follows from the number of all steps
        "scheduled_steps": run.total_steps if config.optim.schedule != "constant" else None,
    }


def set_numerics(config: Config) -> None:
    """Set torch's process-wide numeric switches, and the seed that initial weights follow from."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.deterministic = config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with no_garbage_collection():  # imports torch._dynamo, which any optimizer needs
        torch.use_deterministic_algorithms(config.deterministic)
