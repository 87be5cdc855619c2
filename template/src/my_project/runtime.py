"""The Accelerator, the check that all processes see each other, seeds, signals, teardown."""

import inspect
import logging
import os
import random
import re
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .batches import Split, seed_of
from .config import Config, ConfigError, exit_with_sentence
from .faults import turn_on_flight_recorder
from .optim import check_parameters, empty_gradients, optimizer_class
from .redaction import MaskedFormatter
from .roll_call import loopback
from .run import Run, writing

logger = logging.getLogger(__name__)

# How many processes each launcher says there are, and which of them this one is.
LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


def world() -> tuple[int, int]:
    """Read (processes, rank) as the launcher gave them, before there is a process group."""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def check_launch(config: Config, accumulation: int = 1) -> None:
    """Refuse a launch that would become silent copies of one run, or run on the wrong device."""
    check_options(config, accumulation)
    for launcher, (size, rank) in LAUNCHERS.items():
        if "WORLD_SIZE" not in os.environ and int(os.environ.get(size, "1")) > 1:
            raise ConfigError(
                f"{launcher} started {os.environ[size]} tasks (this is {os.environ.get(rank)}), but"
                " none was given a rank, so each would train alone: start one task per node, and in"
                " it `accelerate launch --config_file accelerate_configs/<where>.yaml ...`."
            )
    if not asked_for_cpu() and launched() and not torch.accelerator.is_available():
        raise ConfigError(
            "the accelerate config asks for a GPU, but torch finds none (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); mend the driver, or use"
            " accelerate_configs/cpu.yaml or cpu_2_processes.yaml."
        )
    precision = config.precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if use_cpu() and precision not in ("no", "bf16"):
        raise ConfigError(f"precision {precision} needs a GPU; on a CPU choose no or bf16.")
    if use_cpu() and config.distributed.sync_batchnorm:
        raise ConfigError("distributed.sync_batchnorm needs GPUs; set it to false on a CPU.")
    if wants_sharding():
        if use_cpu():
            raise ConfigError(
                "the accelerate config asks for FSDP, which needs GPUs: on a CPU accelerate would"
                " train DDP without a word; use a config without fsdp_config."
            )
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise ConfigError(
                "the accelerate config asks for FSDP 1, whose flat parameters have other gradients"
                " and checkpoints; set fsdp_version: 2 in its fsdp_config."
            )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        check_mesh()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "DeepSpeed reduces gradients inside backward, so the gradient of ragged batches would"
            " be wrong; use DDP or FSDP."
        )


def check_mesh() -> None:
    """Refuse sizes of parallelism_config that do not make the world.

    Accelerate ignores misspelt keys there, which leaves a size at 1.
    """

    def size(name: str) -> int:
        return int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))

    for name in ("tp", "cp", "sp"):
        if size(name) > 1:
            raise ConfigError(
                f"parallelism_config_{name}_size is {size(name)}, but this loop knows only data"
                " parallelism: dp_replicate and dp_shard."
            )
    replicate, shard, (processes, _) = size("dp_replicate"), size("dp_shard"), world()
    if replicate * shard != processes:
        raise ConfigError(
            f"parallelism_config: replicate {replicate} x shard {shard} = {replicate * shard}, but"
            f" there are {processes} processes; set parallelism_config_dp_replicate_size (nodes)"
            " and parallelism_config_dp_shard_size (GPUs per node)."
        )


def check_options(config: Config, accumulation: int) -> None:
    """Refuse options that accelerate and torch do not know, or would crash with."""
    options = config.distributed.ddp
    known = {f.name for f in fields(DistributedDataParallelKwargs)}
    if unknown := set(options) - known:
        raise ConfigError(
            f"distributed.ddp has no option {', '.join(sorted(unknown))}; it has {sorted(known)}."
        )
    hooks = [hook.value for hook in DDPCommunicationHookType]
    if options.get("comm_hook", "no") not in hooks:
        raise ConfigError(
            f"distributed.ddp.comm_hook is {options['comm_hook']!r}; choose one of {hooks}."
        )
    if options.get("static_graph") and accumulation > 1:
        raise ConfigError(
            f"distributed.ddp.static_graph crashes with accumulation {accumulation}: set it"
            " to false, or raise batches.micro_batch_size until accumulation is 1."
        )
    optimizer_class(config.optim)
    accepted = inspect.signature(DataLoader).parameters
    if unknown := set(config.batches.loader) - set(accepted):
        raise ConfigError(
            f"batches.loader has no option {', '.join(sorted(unknown))}; it has {list(accepted)}."
        )
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if unknown := set(config.telemetry.trackers) - set(trackers):
        raise ConfigError(
            f"telemetry.trackers names {', '.join(sorted(unknown))}, which accelerate does not find"
            f" here; installed: {', '.join(trackers)}."
        )


def wants_sharding() -> bool:
    """Tell whether the accelerate config asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def launched() -> bool:
    """Tell whether `accelerate launch` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def asked_for_cpu() -> bool:
    """Tell whether the accelerate config wants the CPU.

    With several processes it can say so only by hiding the GPUs (gpu_ids: '-1,-1').
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").startswith("-1")
    return hidden or os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"


def use_cpu() -> bool:
    """Tell whether this process trains on the CPU."""
    return asked_for_cpu() or not torch.accelerator.is_available()


def keep_gloo_on_this_machine() -> None:
    """Let gloo use the loopback interface where all processes run here."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local and local == os.environ.get("WORLD_SIZE") and (name := loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@contextmanager
def start(config: Config) -> Iterator[Accelerator]:
    """Make the Accelerator; leave no process group behind on any path."""
    set_numerics(config)
    keep_gloo_on_this_machine()
    turn_on_flight_recorder(config)
    AcceleratorState._reset_state(True)  # a run may follow another in one process
    GradientState._reset_state()
    limits = config.distributed
    longest = max(limits.startup_timeout_seconds, limits.timeout_seconds)
    accelerator = Accelerator(
        cpu=use_cpu(),
        mixed_precision=config.precision,
        gradient_accumulation_steps=1,  # the loop accumulates: backward() would divide by it
        log_with=[*config.telemetry.trackers] or None,
        project_config=ProjectConfiguration(
            project_dir=str(config.folder), logging_dir=str(config.folder / "tensorboard")
        ),
        kwargs_handlers=[
            ddp_options(config),
            # faults.Watch strikes before, and says where each process stands
            InitProcessGroupKwargs(timeout=timedelta(seconds=60 + longest)),
        ],
    )
    finished = False
    try:
        check_world(accelerator)
        yield accelerator
        finished = True
    finally:
        # NCCL's teardown would wait for collectives that nobody answers; the exit ends them.
        if torch.distributed.is_initialized() and (finished or accelerator.device.type == "cpu"):
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def ddp_options(config: Config) -> DistributedDataParallelKwargs:
    """Pass DDP's options on; communication hooks by their names (fp16, bf16, power_sgd)."""
    # gradients in DDP's own buffers: 4 bytes per parameter and a copy less
    options: dict[str, Any] = {"gradient_as_bucket_view": True} | config.distributed.ddp
    if "comm_hook" in options:
        options["comm_hook"] = DDPCommunicationHookType(options["comm_hook"])
    return DistributedDataParallelKwargs(**options)


def check_world(accelerator: Accelerator) -> None:
    """End at once where the processes do not see each other."""
    expected, rank = world()
    if accelerator.num_processes != expected:
        if torch.distributed.is_initialized():
            # A process that left at once would break the connecting of the others, who would then
            # report that instead of the cause.
            with suppress(RuntimeError):
                torch.distributed.barrier()
        raise ConfigError(
            f"the launcher started {expected} processes, but process {rank} sees"
            f" {accelerator.num_processes}: something made an accelerate state before train.py did."
        )
    if accelerator.num_processes > 1:
        reached = torch.ones((), device=accelerator.device)
        torch.distributed.all_reduce(reached)
        if int(reached) != expected:
            raise RuntimeError(f"an all-reduce reached {int(reached)} of {expected} processes")


def from_main(accelerator: Accelerator, function: Callable[[], Any]) -> Any:
    """Call a function on the main process only, and return its result on every one.

    Raises:
        ConfigError: on every process what the function raised on the main one, of the same type.
    """
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome = [function(), None]
        except ConfigError as error:
            outcome = [None, error]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def begin(
    accelerator: Accelerator, run: Run, what: dict[str, Any], lengths: dict[str, int]
) -> None:
    """Begin the run on all processes together.

    Args:
        accelerator: of this process.
        run: the run folder.
        what: must be the same on all processes, by name.
        lengths: of the datasets; the same.

    Raises:
        RuntimeError: processes disagree on what they train.
        ConfigError: they have other data, or a node does not see the run folder of rank 0.
    """
    mine = (socket.gethostname(), {name: seed_of(value) for name, value in what.items()}, lengths)
    everywhere = gather_object([mine])
    run.hosts = [host for host, *_ in everywhere]
    for name in what:
        of_main = everywhere[0][1][name]
        different = [rank for rank, (_, seen, _) in enumerate(everywhere) if seen[name] != of_main]
        if different:
            raise ConfigError(
                f"{name} on rank(s) {different} ({run.hosts[different[0]]}) differs from that on"
                f" rank 0 ({run.hosts[0]}): give all nodes the same files and arguments."
            )
    for name in sorted({name for *_, seen in everywhere for name in seen}):
        counts = [seen.get(name, 0) for *_, seen in everywhere]
        if different := [rank for rank, count in enumerate(counts) if count != counts[0]]:
            raise ConfigError(
                f"{name} has length {counts[different[0]]} on rank(s) {different}"
                f" ({run.hosts[different[0]]}) and {counts[0]} on rank 0 ({run.hosts[0]}), so each"
                " would train in another order: give all nodes the same files."
            )

    run.numerics = numerics(accelerator, run.config)

    def begin_on_main() -> str:
        with writing(run.folder):
            run.begin()
        return run.token

    token = from_main(accelerator, begin_on_main)
    seen = gather_object([run.sees(token)])
    if blind := sorted({host for host, sees in zip(run.hosts, seen, strict=True) if not sees}):
        raise ConfigError(
            f"{run.folder.absolute()} on {', '.join(blind)} is not the folder that {run.hosts[0]}"
            " wrote to, so nothing could be resumed or read there: set --runs_folder to storage"
            " that all nodes share."
        )


def numerics(accelerator: Accelerator, config: Config) -> dict[str, Any]:
    """Tell what a curve may follow from and the config need not say, or may change in a run."""
    sharding, uses_hook = "none", accelerator.num_processes > 1
    if accelerator.distributed_type == DistributedType.FSDP:
        mesh, uses_hook = getattr(accelerator, "parallelism_config", None), False
        sharding = "HSDP" if mesh and mesh.dp_replicate_enabled else "FSDP2"
    return {
        "precision": accelerator.mixed_precision,
        "tf32": config.tf32,
        "deterministic": config.deterministic,
        "sharding": sharding,
        "comm_hook": config.distributed.ddp.get("comm_hook", "no") if uses_hook else "no",
    }


def set_numerics(config: Config) -> None:
    """Set torch's process-wide numeric switches, and the seed that initial weights follow from."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.deterministic = config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)


def seed_draws(seed: int, step: int, micro_batch: int, device: torch.device) -> None:
    """Seed what the model draws (dropout) for one micro-batch of one step.

    So the draws are the same for any split into processes, and after any resume.
    """
    draw = seed_of(seed, "model", step, micro_batch)
    torch.default_generator.manual_seed(draw)
    random.seed(draw)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(draw % 2**32)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(draw)


class Call(nn.Module):
    """Let a recipe call any method of its model inside the one forward that the wrappers see.

    DDP, FSDP, autocast and torch.compile act on `forward` only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable, *arguments: Any) -> Any:
        """Call function(model, *arguments)."""
        return function(self.model, *arguments)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation: int = 1,
) -> tuple[Any, Any]:
    """Wrap model and optimizer for where they run.

    With accumulation the gradients lie in DDP's buckets from the beginning.

    Returns:
        What training calls, and what evaluation calls: without DDP and torch.compile, since
        batches there are ragged, but with autocast and FSDP.
    """
    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        choose_blocks(plugin, model)
    elif accumulation > 1 and not any(getattr(m, "sparse", False) for m in model.modules()):
        empty_gradients(optimizer)
    prepared, _ = accelerator.prepare(Call(model), optimizer)
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
    """Have accelerate shard by the classes of sharded_blocks where its config says by size.

    Its own choice by size takes also what cannot be gathered by itself: a ModuleList, which is
    never called, and one half of a tied weight.
    """
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sharded_blocks(model, plugin.min_num_params)[0]


def sharded_blocks(model: nn.Module, least: int) -> tuple[list[str], list[int], int]:
    """Choose the classes whose modules FSDP2 gathers one at a time.

    From the leaves up, a module with at least so many parameters that are in no block yet is a
    block, and so are all of its class. The root keeps gathered what is left over.

    Returns:
        The names of the classes, the numbers of parameters of the blocks, and that of the root.
    """
    wrapped = model  # peft has two modules around a model, and calls it past its hooks
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
        # of a tied weight, each place that holds it counts its part
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


def strict_ddp(call: Any) -> DistributedDataParallel | None:
    """Return the DDP that waits for the gradient of every parameter, if there is one."""
    ddp = getattr(call, "_orig_mod", call)  # torch.compile wraps what DDP has wrapped
    is_ddp = isinstance(ddp, DistributedDataParallel)
    return ddp if is_ddp and not ddp.find_unused_parameters else None


def finder_of_unused(call: Any) -> Callable[[], list[int]] | None:
    """Return a function that finds the parameters for whose gradients DDP waits in vain.

    It returns their places among the trained ones. None where no gradient is waited for.
    """
    ddp = strict_ddp(call)

    def find_unused() -> list[int]:
        try:
            ddp._check_reducer_finalized()  # type: ignore[union-attr]
        except RuntimeError as error:
            found = re.search(
                r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error)
            )
            if not found:
                raise
            return [int(place) for place in found[1].split()]
        return []

    return find_unused if ddp else None


def has_gradients_in_buckets(call: Any) -> bool:
    """Tell whether the gradients lie in DDP's buckets from step to step, as views that were there.

    Only where DDP waits for every one: elsewhere a parameter that is not used must have none, since
    a gradient of zeros decays its weight and moves its momentum.
    """
    ddp = strict_ddp(call)
    if not (ddp and ddp.gradient_as_bucket_view):
        return False
    return all(p.grad is not None for p in ddp.parameters() if p.requires_grad)


def place(accelerator: Accelerator, config: Config, model: nn.Module) -> nn.Module:
    """Move the model to the device before the optimizer is built, which looks where it is."""
    if config.distributed.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(accelerator.device)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def sum_dtype(device: torch.device) -> torch.dtype:
    """Choose the type in which losses and weights are summed."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_due(every_steps: int | None, step: int) -> bool:
    """Tell whether something that happens every so many steps happens now."""
    return every_steps is not None and step % every_steps == 0


def log_start(
    accelerator: Accelerator, run: Run, split: Split, model: nn.Module, resume_from: Path | None
) -> None:
    """Say in a few lines what starts, where, and from what."""
    if not accelerator.is_main_process:
        return
    logger.info(
        "%s: %s on %d process(es), %s, precision %s",
        run.folder,
        accelerator.device,
        split.processes,
        accelerator.distributed_type.value,
        accelerator.mixed_precision,
    )
    logger.info(
        "global batch %d = micro-batch %d x processes %d x accumulation %d; %d steps;"
        " %d parameters",
        split.global_batch_size,
        split.micro_batch_size,
        split.processes,
        split.accumulation,
        run.total_steps,
        sum(p.numel() for p in model.parameters()),
    )
    logger.info("resumed from %s" if resume_from else "from the beginning%.0s", resume_from or "")


class Reduction:
    """A sum over processes that is under way while the loop goes on."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.processes = accelerator.num_processes
        self.work: Any = None

    def start(self, tensor: Tensor) -> None:
        """Begin to sum the tensor over the processes, in place."""
        if self.processes > 1:
            self.work = torch.distributed.all_reduce(tensor, async_op=True)

    def wait(self) -> None:
        """Let what follows use the sum; on a GPU only the device waits."""
        if self.work is not None:
            self.work.wait()


def smallest(accelerator: Accelerator) -> Callable[[int], int]:
    """Return a function for all processes to call, which returns the smallest of their numbers."""

    def smallest_of_all(number: int) -> int:
        everywhere: Any = accelerator.gather(torch.tensor([number], device=accelerator.device))
        return int(everywhere.min())

    return smallest_of_all


def share_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Give every process the main one's buffers (BatchNorm statistics), as DDP does in training."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def set_up_logging() -> None:
    """Log from the main process as it is, from the others warnings and errors with their rank."""
    size, rank = world()
    prefix = f"[rank {rank} on {socket.gethostname()}] " if size > 1 and rank else ""
    handler = logging.StreamHandler(sys.stdout)
    text = f"{prefix}%(levelname)s %(message)s" if prefix else "%(message)s"
    handler.setFormatter(MaskedFormatter(text))
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("accelerate", "torch", "httpx", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="No device id is provided")


def command(main: Callable[[Any], int], argument: Any) -> None:
    """Run main and exit: 2 with a sentence for what a user can mend, 1 with rank and traceback."""
    set_up_logging()
    code = 1
    try:
        code = main(argument)
    except ConfigError as error:
        exit_with_sentence(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except (Exception, SystemExit):  # no recipe ends a run with sys.exit(0)
        logger.exception(
            "process %d of %d failed on %s", world()[1], world()[0], socket.gethostname()
        )
    if code == 75 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # else the launcher would start a preempted run again, in place
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, 75):
        os._exit(code)  # teardown could wait for processes that are gone
    raise SystemExit(code)
