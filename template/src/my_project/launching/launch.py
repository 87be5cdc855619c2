"""Start this node's part of a run, as accelerate launch would.

    python -m my_project.launch --config_file accelerate_configs/multi_node.yaml \
        --num_machines 2 --num_processes 16 --machine_rank 0 \
        --main_process_ip gpu-a --main_process_port 29500 \
        -m my_project.train --config configs/image_classification.yaml \
        --batches.micro_batch_size 4

It takes the options of accelerate launch, and accelerate's own code translates them and the config
file to environment variables. Several nodes meet at node 0, whose address and port are
--main_process_ip and --main_process_port (or main_process_port in the config file). All nodes of a
run must be given the same address and port, and different runs must use different ports. A single
node uses any free port. In this order, the command
1. prints one line: this node's rank, the ranks of its processes, the address of node 0 if there are
   several nodes, the precision and the run folder;
2. with several nodes, waits until all have joined and can reach each other (nodes.py);
   with --min_machines, the run goes on without nodes that leave, and takes in nodes that join;
3. with --preflight, checks the cluster (tools/preflight.py), and exits if a check fails;
4. trains, in processes that are forked from this one, so that they need not import anything;
   shows the output and the warnings of rank 0, and writes the output of each process to a file of
   its own in <run folder>/logs/node_<n>/;
5. forwards stop signals, so that the run saves and exits; a second signal, 5 s or more after the
   first, kills it; leaves no process running;
6. prints a summary (summary.py), and exits with the run's outcome: 0 finished; 75 preempted; 2 an
   error that another attempt would repeat (a wrong setting, an exception before the first step); 1
   any other error (a node that is late or lost, a later exception). --requeue is for a scheduler
   that restarts a run only after exit code 75. It turns code 1 into 75 if this launch wrote a newer
   checkpoint. It turns code 75 into 1 if this launch wrote no newer checkpoint, and neither did the
   last two launches that wrote run.json. A stop signal before the first process starts ends this
   command immediately; --requeue then changes no exit code.
"""

import argparse
import ast
import gc
import importlib
import inspect
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_origin, get_type_hints

from .. import exits, failures
from ..config import Config, ConfigError, fits, wrong_value
from ..failures import Failure
from ..files import (
    TransientError,
    check_temporary_folder,
    open_own,
    read_yaml,
    wait_until,
    write_atomically,
    writing,
)
from ..launching import memory
from ..process import (
    CODE,
    HELD_SECONDS,
    LAUNCHER,
    LOGS,
    NODES,
    PREEMPTED,
    START,
    can_redraw,
    never_fail_to_print,
    no_garbage_collection,
    note_blamed,
    stacks_file,
)
from ..provenance import code_digest
from ..run_files import (
    ENDED,
    Status,
    newest_checkpoint,
    read_errors,
    read_failures,
    read_info,
    read_status,
    write_status,
)
from ..run_folder import starts_over_now
from ..safety.redaction import mask_command
from ..settings import did_you_mean
from ..settings import parse as parse_settings
from ..words import PACKAGE, make_parser, say
from . import attempts
from .attempts import RunHasEnded, Starts, failed, status_locked
from .summary import Ending, how_it_ended, tool, unexplained
from .workers import Workers, count_in_child, opened_files_noted, start_method

TRAIN = f"{PACKAGE}.train"
PREFLIGHT = f"{PACKAGE}.tools.preflight"
# Modules that the loop imports inside its functions in every run.
DEFERRED = ("torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks", "accelerate")
RESTARTS = 3  # default of --max_restarts: consecutive restarts in place without a new step
NO_RESTARTS = Starts(folder=Path(), limit=0)
RESTART_SECONDS = 60.0  # how long the nodes wait for each other after a failure
GO_ON_SECONDS = 30.0  # the same if the run can go on without the missing nodes (--min_machines)
# a file that is deleted when a start ends, so that launcher.json can be written to a full disk
RESERVE, RESERVE_BYTES = ".reserve", 1 << 16
MAX_LOST_SECONDS = 86400  # the kernel's limit for TCP keepalive allows twice as much
STATUS_SECONDS = 60.0  # how long a network file system may take to show a new status.json
UNSUPPORTED = ("DeepSpeed", "Megatron-LM", "TPU", "FP8", "AWS", "MPI")  # accelerate's flag groups
DATA_PARALLEL = "this loop trains with DDP or FSDP2, in float32, bf16 or fp16"
NO_EFFECT = {  # flags and accelerate config settings without effect here: the reason or remedy
    "gradient_accumulation_steps": "it follows from batches.global_batch_size of the run's config",
    "gradient_clipping": "set optim.clip_norm in the run's config",
    "enable_cpu_affinity": "give the flag --enable_cpu_affinity",
} | dict.fromkeys(
    ("fp8_config", "deepspeed_config", "megatron_lm_config", "mpirun_config"), DATA_PARALLEL
)
# used instead of accelerate's types, which allow more values or are classes
SETTING_TYPES: dict[str, Any] = {
    "compute_environment": Literal["LOCAL_MACHINE"],
    "distributed_type": str,
    "mixed_precision": Literal["no", "bf16", "fp16"],
    "downcast_bf16": Any,  # for TPUs; its type is bool, but `accelerate config` writes text
}
# Variables of a scheduler or an outer launcher, which torch would take for those of this launch.
NOT_INHERITED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|RDZV_\w+)|TORCHELASTIC_(?!LOG_LINE)\w+"
)
ACCELERATE_VARIABLES = re.compile(
    r"ACCELERATE_(USE_(?!CPU)|DYNAMO_|FP8_|DEEPSPEED_|GRADIENT_|MIXED_PRECISION)\w*"
    r"|(FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w+"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of a launch, from the command line and the accelerate config."""

    options: argparse.Namespace  # accelerate's options, from its flags and config file
    flags: tuple[str, ...]  # accelerate's flags, as given
    module: str  # train or preflight
    arguments: tuple[str, ...]  # of the module
    all_nodes: int  # how many nodes were asked for
    nodes: int  # how many nodes take part
    world_size: int  # processes over all nodes
    node_rank: int
    address: str  # of node 0
    port: int  # on node 0
    precision: str
    gpus: int  # on each node; 0 for an accelerate config that trains on the CPU
    own: argparse.Namespace  # the launcher's own options, see _parser
    config: Config
    code: str = ""  # code_digest() when the command line was read
    lowered_micro_batch_size: int = 0  # larger micro-batches did not fit in memory; 0: not lowered

    def among(self, others: Any) -> "Launch":
        """Return these settings for the nodes that take part in the current start.

        Args:
            others: nodes.OtherNodes; None on one node.
        """
        if not others:
            return self
        ranks = [node.rank for node in others.members]
        options = argparse.Namespace(**vars(self.options))
        options.num_machines, options.machine_rank = len(ranks), ranks.index(self.node_rank)
        options.num_processes = len(ranks) * self.processes_per_node
        fit_mesh(options, self.flags)
        return replace(
            self,
            options=options,
            nodes=len(ranks),
            world_size=options.num_processes,
            node_rank=options.machine_rank,
            # not --main_process_port, on which the launcher of node 0 listens as long as it runs
            port=others.members[0].port,
        )

    @property
    def processes_per_node(self) -> int:
        """Return the number of processes on each node."""
        return self.world_size // self.nodes

    def environments(self, attempt: int) -> list[dict[str, str]]:
        """Return the environment of each process here, as accelerate and torchrun set it."""
        from accelerate.utils import check_cuda_p2p_ib_support
        from accelerate.utils.other import get_free_port

        port = get_free_port() if self.nodes == 1 else self.port
        common = variables(self.options, port)
        if is_single(self.options):
            return [common]
        if not check_cuda_p2p_ib_support():  # as accelerate launch does
            common = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} | common
        common = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | common
        common |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(port)}
        first = self.node_rank * self.processes_per_node
        common |= {
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes_per_node),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": "none",
        }
        return [
            common | {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
            for local_rank in range(self.processes_per_node)
        ]


# ---- the command line ----------------------------------------------------------------------------
def parse(arguments: list[str]) -> Launch:
    """Read the command line: own options and accelerate's, -m, the module and its arguments.

    Raises:
        ConfigError: a value is missing or wrong.
    """
    split = arguments.index("-m") if "-m" in arguments else len(arguments)
    own, flags = _parser().parse_known_args(arguments[:split])
    module, *module_arguments = arguments[split + 1 :] or [""]
    if module not in (TRAIN, PREFLIGHT):
        raise ConfigError(f"add -m {TRAIN} after the options; use accelerate for other modules.")
    if "--preflight" in module_arguments:  # the scripts in launch/ put it there
        own.preflight = True
        module_arguments.remove("--preflight")
    options = accelerate_options(flags, module)
    nodes, world_size = options.num_machines, options.num_processes
    node_rank = options.machine_rank
    if world_size > 1 and not (options.multi_gpu or options.use_fsdp):
        raise ConfigError(
            f"--num_processes is {world_size}, but the distributed_type of {options.config_file}"
            " starts one process, or is not supported: use cpu_2_processes.yaml or multi_gpu.yaml."
        )
    if options.cpu:  # accelerate, too, starts one process then
        world_size = 1
    if nodes < 1 or world_size % nodes or world_size < nodes:
        raise ConfigError(
            f"--num_processes is {world_size}{' with --cpu' if options.cpu else ''}, but must be a"
            f" multiple of --num_machines {nodes}: it counts the processes of all nodes."
        )
    if own.min_machines and not 1 <= own.min_machines <= nodes != 1:
        raise ConfigError(
            f"--min_machines is {own.min_machines}, but must be between 1 and --num_machines"
            f" ({nodes}), which must be at least 2."
        )
    if not 5 <= own.lost_node_seconds <= MAX_LOST_SECONDS:
        raise ConfigError(
            f"--lost_node_seconds is {own.lost_node_seconds:g}, but must be between 5 and"
            f" {MAX_LOST_SECONDS}."
        )
    if not 0 <= node_rank < nodes and not (own.min_machines and node_rank > 0):
        spare = f"With --min_machines, a spare has rank {nodes} or higher."
        raise ConfigError(
            f"--machine_rank is {node_rank}, but must be between 0 and {nodes - 1}. {spare}"
        )
    if own.min_machines and sets_mesh(flags):
        raise ConfigError(
            "--min_machines sets the mesh from the nodes that take part: leave out the flags"
            " --parallelism_config_dp_replicate_size and --parallelism_config_dp_shard_size."
        )
    fit_mesh(options, flags)
    with opened_files_noted():
        config = parse_settings(module_arguments)
    return Launch(
        options=options,
        flags=tuple(flags),
        module=module,
        arguments=tuple(module_arguments),
        all_nodes=nodes,
        nodes=nodes,
        world_size=world_size,
        node_rank=node_rank,
        address=options.main_process_ip or "127.0.0.1",
        port=options.main_process_port or 29500,
        precision=config.precision or str(options.mixed_precision).lower(),
        gpus=0 if options.cpu or uses_cpu(vars(options)) else world_size // nodes,
        own=own,
        config=config,
        code=code_digest(config.recipe),
        lowered_micro_batch_size=memory.lowered_micro_batch(config, options),
    )


def accelerate_options(flags: list[str], module: str) -> argparse.Namespace:
    """Return the options that accelerate itself reads from the flags and the config file.

    Raises:
        ConfigError: there is no config file; the file or a flag is wrong, or has no effect here.
    """
    # private functions, because this project promises that accelerate's configs and flags work
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    parser = launch_command_parser()
    parser.error = _refuse  # argparse would print the usage, some 200 lines
    given = parser.parse_args([*flags, "-m", module])
    # without a file, accelerate would read a default config in the home folder
    if not Path(given.config_file or "").is_file():
        raise ConfigError(
            f"--config_file is {given.config_file}, but must be a file such as"
            " accelerate_configs/multi_gpu.yaml; accelerate_configs/README.md lists them."
        )
    read_accelerate_config(Path(given.config_file))
    defaults = parser.parse_args(["-m", module])
    for group in parser._action_groups:
        for action in group._group_actions if str(group.title).startswith(UNSUPPORTED) else ():
            if getattr(given, action.dest) != getattr(defaults, action.dest):
                why = NO_EFFECT.get(action.dest, DATA_PARALLEL)
                raise ConfigError(f"{action.option_strings[0]} has no effect here: {why}.")
    try:
        options = _validate_launch_command(given)[0]
        is_unsupported = options.use_deepspeed or options.use_megatron_lm or options.tpu
        if is_unsupported or options.mixed_precision == "fp8":
            raise ValueError(DATA_PARALLEL)
        variables(options, 0)  # runs accelerate's checks, which raise for options it refuses
    except Exception as error:
        raise ConfigError(f"{given.config_file}: {error}") from error
    return options


def read_accelerate_config(path: Path) -> dict[str, Any]:
    """Read an accelerate config, and check all of it: accelerate checks only top-level names.

    Raises:
        ConfigError: a setting does not exist, has no effect here or has a value of a wrong type.
    """
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    content = read_yaml(path)
    kinds = {action.dest: flag_type(action) for action in launch_command_parser()._actions}
    kinds |= get_type_hints(ClusterConfig) | SETTING_TYPES
    # YAML reads a bare NO as False
    settings = content | {"distributed_type": content.get("distributed_type") or "NO"}
    if settings.get("mixed_precision", "no") is None:
        del settings["mixed_precision"]
    for group in ("fsdp", "dynamo", "parallelism"):
        if isinstance(inner := content.get(f"{group}_config"), dict):
            # accelerate adds this prefix too, but ignores a name that does not exist
            prefix = "" if group == "parallelism" else f"{group}_"
            settings |= {f"{prefix}{str(n).removeprefix(prefix)}": v for n, v in inner.items()}
    for name, value in settings.items():
        if value and name in NO_EFFECT:
            raise ConfigError(f"{path}: {name} has no effect here: {NO_EFFECT[name]}.")
        if name not in kinds:
            longer = [full_name for full_name in kinds if full_name.endswith(f"_{name}")]
            hint = did_you_mean(longer[0] if longer else str(name), kinds) or "; remove it."
            raise ConfigError(f"{path}: there is no setting {name}{hint}")
        kind = kinds[name]
        texts = [str(value), str(value).lower()] if get_origin(kind) is Literal else [value]
        if not any(fits(text, kind) for text in texts):
            raise wrong_value(f"{path}: {name}", value, kind)
    if not content:
        raise ConfigError(f"{path} is empty; see accelerate_configs/README.md.")
    return content


def flag_type(action: argparse.Action) -> Any:
    """Return the type that a setting has in a config file, from its flag of accelerate launch."""
    is_switch = str(action.default).lower() in ("true", "false")
    choices = ("true", "false") if is_switch else tuple(map(str, action.choices or ()))
    literal: Any = Literal
    return literal[choices] if choices else int if action.type is int else Any


def variables(options: argparse.Namespace, port: int) -> dict[str, str]:
    """Return the environment variables of all processes, as accelerate sets them."""
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    # a copy, because accelerate changes the options that it is given
    options = argparse.Namespace(**vars(options) | {"main_process_port": port})
    if is_single(options):
        return prepare_simple_launcher_cmd_env(options)[1]
    return prepare_multi_gpu_env(options)


def is_single(options: argparse.Namespace) -> bool:
    """Return whether accelerate starts one process, without a process group."""
    return options.cpu or not (options.multi_gpu or options.use_fsdp)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; accelerate launch --help lists its options.")


def uses_cpu(where: dict[str, Any]) -> bool:
    """Return whether an accelerate config trains on the CPU."""
    return bool(where.get("use_cpu")) or str(where.get("gpu_ids", "")).startswith("-1")


def sets_mesh(flags: Sequence[str]) -> bool:
    """Return whether a flag sets the mesh of HSDP; accelerate accepts both spellings."""
    return "parallelism_config_dp" in " ".join(flags).replace("-", "_")


def fit_mesh(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Set the mesh of HSDP from the number of nodes and processes, unless a flag sets it.

    On one node, the mesh in the config file is kept if it has as many ranks as there are processes:
    cpu_hsdp.yaml rehearses two nodes on one.
    """
    names = [f"parallelism_config_dp_{name}_size" for name in ("replicate", "shard")]
    nodes, world_size = options.num_machines, options.num_processes
    is_kept = nodes == 1 and math.prod(getattr(options, name) for name in names) == world_size
    if options.use_parallelism_config and not is_kept and not sets_mesh(flags):
        for name, size in zip(names, (nodes, world_size // nodes), strict=True):
            setattr(options, name, size)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--preflight", action="store_true", help="check the cluster first")
    options = {
        "join_timeout_seconds": (600.0, "how long to wait for the other nodes"),
        "min_machines": (0, "fewest nodes with which a run goes on without the others; 0: all"),
        "wait_for_node_0": (0.0, "seconds to wait for a new node 0 if its host is lost; 0: end"),
        "lost_node_seconds": (30.0, "seconds a host may be silent before its node counts as lost"),
        "max_restarts": (RESTARTS, "limit on consecutive restarts in place without a new step"),
    }
    for name, (default, help_text) in options.items():
        names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*names, type=type(default), default=default, help=help_text)
    text = "turn code 1 into 75 after a newer checkpoint, 75 into 1 after 3 launches without one"
    parser.add_argument("--requeue", action="store_true", help=text)
    return parser


# ---- this node -----------------------------------------------------------------------------------
def prepare_environment() -> None:
    """Set environment variables that imports read; remove those of a scheduler and of accelerate.

    The accelerate config decides: variables of accelerate that the shell has set could shard or
    compile a model although the config does not. From here on, print raises no error when the
    reader of the output is gone.

    Raises:
        ConfigError: there is no folder for temporary files, and an import may need one.
    """
    never_fail_to_print()
    check_temporary_folder(has_workers=False)  # training processes check again, for loader workers
    for name in [name for name in os.environ if NOT_INHERITED.fullmatch(name)]:
        del os.environ[name]
    if names := [name for name in os.environ if ACCELERATE_VARIABLES.fullmatch(name)]:
        message = "environment variables that are ignored, since the accelerate config decides"
        print(f"{message}: {', '.join(sorted(names))}", flush=True)
        for name in names:
            del os.environ[name]
    os.environ["LAUNCH_TIME"] = str(time.time())  # stop_after counts from now, also after restarts
    # when imported, pyarrow's allocator and NumPy's BLAS would start threads, and then no process
    # could be forked; accelerate launch too gives the BLAS of each process one thread
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # counting GPUs through CUDA itself would initialize its driver, which does not survive a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def summary(launch: Launch, interface: str = "") -> str:
    """Return one line about this node's part of the run."""
    first = launch.node_rank * launch.processes_per_node
    last = first + launch.processes_per_node - 1
    ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
    host = f"{socket.gethostname()}, {interface}" if interface else socket.gethostname()
    parts = [f"node {launch.node_rank} of {launch.nodes} ({host}): {ranks} of {launch.world_size}"]
    if launch.node_rank >= launch.nodes:
        parts = [f"node {launch.node_rank} ({host}): a spare for {launch.nodes} nodes"]
    if launch.nodes > 1:
        parts.append(f"main node {launch.address}:{launch.port}")
    parts.append(f"precision {launch.precision}, run folder {launch.config.folder}")
    return ", ".join(parts)


def meet_other_nodes(
    launch: Launch,
    others: Any,
    seconds: float,
    *,
    start: str = "",
    has_saved: bool = False,
    **about: Any,
) -> None:
    """Set the network interface, and wait until all nodes have joined and can reach each other.

    Args:
        launch: the settings.
        others: the other launchers, nodes.OtherNodes.
        seconds: how long to wait.
        start: Starts.id of the next start; "" for the first start of a launch.
        has_saved: the run has saved, and goes on only if the set of nodes has changed.
        about: further fields of this node's nodes.Node, such as refusal.

    Raises:
        ConfigError: this node starts no process; see OtherNodes.meet.
        RunHasEnded: the run has ended, so no start follows.
    """
    from . import nodes  # pyright: ignore[reportMissingImports]

    interface, ip = nodes.interface_to(launch.address)
    if interface:  # if it is "", with_own_address may find it later; NCCL chooses its own
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not start:
        print(summary(launch, interface), flush=True)
    me = nodes.Node(
        rank=launch.node_rank,
        nodes=launch.nodes,
        min_nodes=launch.own.min_machines,
        world_size=launch.world_size,
        run=" ".join((launch.module, *mask_command(launch.arguments))),
        preflight=launch.own.preflight,
        # forked processes run the code that was imported here, even if files were edited since
        code=launch.code if start_method()[0] == "fork" else code_digest(launch.config.recipe),
        host=socket.gethostname(),
        interface=interface,
        ip=ip,
        lowered_micro_batch_size=launch.lowered_micro_batch_size,
        start=start or f"{uuid.uuid4().hex[:12]}.0",
        is_new=not start,
        **about,
    )
    others.meet(me, seconds, has_saved=has_saved)


# ---- the processes -------------------------------------------------------------------------------
def import_all(config: Config) -> None:
    """Import once, in this process, all modules that the training processes will need.

    These include the modules that the recipe imports inside its methods. Failed imports are ignored
    here, since the training processes repeat and report them; if a module is missed here, each
    training process imports it.
    """
    names = [TRAIN, *DEFERRED]
    source = inspect.getsourcefile(type(config.recipe))
    with suppress(OSError, SyntaxError):
        for node in ast.walk(ast.parse(Path(source or "").read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    with no_garbage_collection():
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
        gc.unfreeze()  # moves the imports to the oldest generation, which is seldom scanned


def say_that_it_imports() -> None:
    """Say on a terminal that the command is importing, which takes its first seconds."""
    if can_redraw():
        print("importing torch and the recipe", flush=True)


def call(module: str, settings: Config | tuple[str, ...], *, launcher_pid: int) -> None:
    """Call the main function of a module, in a process that the launcher has started.

    Args:
        module: the name of the module.
        settings: the config, or in a spawned process the command-line arguments from which to
            build the config: a recipe may open a file, and the process that reads the file must
            open it.
        launcher_pid: the pid of the launcher.
    """
    gc.freeze()  # a collection would copy the memory pages that are shared with the launcher
    LAUNCHER.watch(launcher_pid)
    main = importlib.import_module(module).main
    config = parse_settings([*settings]) if isinstance(settings, tuple) else settings
    with exits.on_all_ranks() as outcome:
        outcome.code = main(config)


def run_module(
    launch: Launch,
    workers: Workers,
    module: str,
    logs: Path | None = None,
    starts: Starts = NO_RESTARTS,
) -> tuple[dict[int, int], list[Failure]]:
    """Run a module in all processes of this node.

    Args:
        launch: the settings.
        workers: the processes.
        module: the name of the module.
        logs: the folder for the output of the processes; None: they write to this terminal.
        starts: the starts of this launch.

    Returns:
        The exit codes of the processes by rank, in the order in which they ended, and the failures
        in their error files.
    """
    os.environ.pop(LOGS, None)
    with opened_files_noted():
        import_all(launch.config)
    if logs:  # made after the imports, which Ctrl-C may interrupt
        # at a restart, a failure to write the reserve file (RESERVE) is ignored
        with suppress(OSError) if logs.exists() else writing(launch.config.folder):
            logs.mkdir(parents=True, exist_ok=True)
            with open_own(logs / RESERVE, "wb") as file:
                file.write(bytes(RESERVE_BYTES))
        os.environ[LOGS] = str(logs.absolute())
    os.environ[START] = starts.id
    os.environ[NODES] = f"{launch.nodes} of {launch.all_nodes}" if launch.all_nodes > 1 else ""
    is_forked = start_method()[0] == "fork"
    os.environ[CODE] = launch.code if is_forked else ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as errors:
        os.environ[failures.FOLDER] = errors
        environments = launch.environments(starts.count)
        starts.begin()
        settings = launch.config if is_forked else launch.arguments
        function = partial(call, module, settings, launcher_pid=os.getpid())
        codes = workers.run(
            function, environments, starts.may_kill, lambda: starts.phase if module == TRAIN else ""
        )
        reported = read_failures(Path(errors).glob("*.json"))
    for rank in [rank for rank, code in codes.items() if code == -signal.SIGVTALRM]:
        reported.append(report_held_lock(launch, rank, logs, starts))
        codes[rank] = 1
    return codes, reported


# ---- the outcome ---------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Launch this node's part of the run; return the exit code."""
    # for its signal handlers: while it has no processes, a stop signal ends the launcher with 75
    Workers()
    prepare_environment()
    say_that_it_imports()
    launch = parse(arguments)
    folder = launch.config.folder
    starts_over, has_begun = starts_over_now(launch.config), False
    steps = [-1] if starts_over else attempts.steps_at_launches(folder)
    workers = get_ready(launch)
    if isinstance(workers, int):
        code = workers
    else:
        ending = run(launch, workers)
        code, has_begun = ending.tell(), ending.is_new
        failure = ending.status.failure if has_begun else None
        if failure and failure.cause in attempts.HOST_CAUSES and not launch.node_rank:
            note_blamed([failure.host])
    if not launch.own.requeue:
        return code
    # A new line of starts.jsonl says from which checkpoint this launch continued. That checkpoint
    # and the lines of earlier launches may have been downloaded after `steps` was read.
    if len(steps_now := attempts.steps_at_launches(folder)) > len(steps):
        steps = steps_now[:-1]
    # with --resume never, the checkpoints belong to the old run until this launch begins its own
    newest = None if starts_over and not has_begun else newest_checkpoint(folder)
    code, why = attempts.requeue(newest, steps, code)
    if why and not launch.node_rank:
        print(why, flush=True)
    return code


def get_ready(launch: Launch) -> Workers | int:
    """Get ready to train: check the GPUs of a single node, or wait for the other nodes.

    The cluster is checked too if that was requested.

    Returns:
        The Workers that will train on this node, or the exit code if nothing will be trained.
    """
    if launch.gpus and launch.nodes == 1:
        from ..accelerator import check_gpus, count_accelerators

        check_gpus(launch.gpus, count_in_child(count_accelerators))
    workers = Workers()
    if launch.nodes > 1:
        from .nodes import OtherNodes  # pyright: ignore[reportMissingImports]

        # import before joining: a run that is training would wait for these imports
        if launch.own.min_machines:
            with opened_files_noted():
                import_all(launch.config)
        own = launch.own
        workers.others = OtherNodes(
            launch.address, launch.port, own.lost_node_seconds, own.wait_for_node_0
        )
        try:
            meet_other_nodes(launch, workers.others, own.join_timeout_seconds)
        except RunHasEnded as ended:
            say("the run has ended without this node")
            return ended.code
        except TransientError:
            # a pod that replaces a lost pod may be started after the run has finished
            has_finished = read_status(launch.config.folder).outcome == "finished"
            if not (launch.node_rank and own.min_machines and has_finished):
                raise
            say("the run has finished without this node")
            return 0
    else:
        print(summary(launch), flush=True)
    # if any node has taken part in an earlier start, the cluster is not checked again
    is_first = all(node.is_new for node in workers.others.members) if workers.others else True
    code = None
    if (launch.own.preflight and is_first) or launch.module == PREFLIGHT:
        code = preflight(launch.among(workers.others), workers)
    if launch.module != TRAIN:
        code = code or 0
    if code is not None and workers.others:
        workers.others.close(None if launch.node_rank else code)
    return workers if code is None else code


def preflight(launch: Launch, workers: Workers) -> int | None:
    """Check the cluster; return None if training may begin, otherwise the exit code."""
    codes, _ = run_module(launch, workers, PREFLIGHT)
    if workers.stop_signal:
        return PREEMPTED
    if any(codes.values()):
        print("preflight failed, so nothing was trained; see the errors above", flush=True)
        return next(max(code, 1) for code in codes.values() if code)
    return None


@dataclass(frozen=True, kw_only=True)
class LastStart:
    """How the last start ended on this node."""

    id: str  # Starts.id
    codes: dict[int, int]  # exit codes of the processes by rank, in the order in which they ended
    failures: list[Failure]
    lost: Any  # the nodes.Node whose host does not answer, or None


def run(launch: Launch, workers: Workers, command: str = "") -> Ending:
    """Train; restart after failures that may not repeat, and when nodes leave or join.

    Args:
        launch: the settings.
        workers: the result of get_ready.
        command: the command that continues the run, as the user types it; "" if not known.
    """
    folder = launch.config.folder
    began = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    logs = folder / "logs" / f"node_{launch.node_rank}" / f"{began}_{os.getpid()}"
    about = {"nodes": launch.nodes, "world_size": launch.world_size}
    starts = Starts(
        folder=folder,
        limit=launch.own.max_restarts,
        about=None if launch.node_rank else about,
    )
    others, lost = workers.others, None
    while True:
        here = launch.among(others)
        launch, here = memory.with_lowered_micro_batch(launch, here, others)
        if others and not workers.stop_signal:  # after a stop signal the nodes have not met again
            starts.follow(others.members[0].start)
            if starts.count:
                print(summary(here), flush=True)
        if starts.about:
            starts.about = {"nodes": here.nodes, "world_size": here.world_size}
            starts.about |= memory.lowered_micro_batch_fields(launch, here)
        start = starts.id
        memory_kills = memory.count_memory_kills()
        codes, reported = run_module(here, workers, TRAIN, logs, starts)
        if codes:  # {}: a stop signal came before the restart
            lost = others.lost if others else None
            if lost:
                reported.append(report_lost_node(here, others, starts))
        record_end(logs, workers, codes, starts.count)
        memory.report_memory_kill(memory_kills, codes, reported, workers, logs, starts)
        launch = memory.with_next_micro_batch(launch, reported)
        unkilled = {rank: code for rank, code in codes.items() if rank not in workers.killed}
        # the run may go on if this start stopped in order to add a node, or because another node
        # was told to stop
        has_saved = bool(launch.own.min_machines) and {*codes.values()} == {PREEMPTED}
        change = others.change if has_saved and others else ""
        starts.end(unkilled, reported, workers.stop_signal or change)
        has_failed = bool(failed(codes)) or has_failed_elsewhere(launch, starts, workers, codes)
        # if a process fails after the run has ended, nothing is left to train
        may_start = has_saved or (has_failed and not has_ended(starts))
        if workers.stop_signal or not may_start:
            break
        if not starts_again(launch, starts, workers, unkilled, reported, has_saved=has_saved):
            break
    workers.ignore_signals()
    last = LastStart(id=start, codes=codes, failures=reported, lost=lost)
    return end(launch, workers, starts, last, logs, command)


def has_ended(starts: Starts) -> bool:
    """Return whether the current start has begun the run, and the run has ended."""
    return starts.has_begun and read_status(starts.folder).outcome in ENDED


def has_failed_elsewhere(
    launch: Launch, starts: Starts, workers: Workers, codes: dict[int, int]
) -> bool:
    """Wait until the run has ended; return whether another node failed after this node succeeded.

    A node may be lost while rank 0 ends the run; then all nodes have to start again.
    """
    others = workers.others
    if not others or not launch.node_rank or not codes or any(codes.values()):
        return False

    def is_over() -> bool:
        return others.has_left or bool(workers.stop_signal) or has_ended(starts)

    wait_until(lambda: others.have_failed or is_over(), STATUS_SECONDS)
    return others.failed is not None


def end(
    launch: Launch, workers: Workers, starts: Starts, last: LastStart, logs: Path, command: str
) -> Ending:
    """Write the run's status, tell the other nodes, and return how the run ended."""
    others = workers.others
    if others and launch.node_rank and workers.stop_signal:
        others.close()  # the others may go on without this node
    if starts.is_new or not starts_over_now(launch.config):  # not into the file of an older run
        starts.write()
    status, is_new = settle_status(launch, workers, starts, last)
    ending = Ending(
        folder=launch.config.folder,
        logs=logs,
        status=status,
        is_new=is_new,
        is_first_node=launch.node_rank == 0,
        failures=last.failures,
        stop_signal=workers.stop_signal,
        stop_signal_time=workers.stop_signal_time,
        command=command,
        codes=last.codes,
        killed=workers.killed,
        may_start_over=launch.config.resume == "never" and not command,
    )
    # with several nodes, other launchers may be using the folder
    if ending.kind == "refused" and not is_new and launch.nodes == 1:
        shutil.rmtree(logs, ignore_errors=True)
    if others:
        code = None if launch.node_rank else ending.exit_code
        others.close(code, may_return=bool(workers.stop_signal))
    return ending


def settle_status(
    launch: Launch, workers: Workers, starts: Starts, last: LastStart
) -> tuple[Status, bool]:
    """Complete status.json: add the first failure in the error files, and a missing outcome.

    Returns:
        The status, and whether this launch has begun the run.
    """
    folder, codes, reported, lost = launch.config.folder, last.codes, last.failures, last.lost

    def is_last() -> bool:
        """Return whether this was the newest start: no nodes have gone on without this one."""
        return read_info(folder).launch == last.id

    # processes that are stopped before the loop begins leave the status as it is
    is_complete = not codes or bool(lost) or bool(workers.stop_signal and failed(codes))
    # a network file system may show the files late
    if launch.nodes > 1 and not is_complete and wait_until(lambda: starts.is_new, 5.0):
        running = ("", "running")
        wait_until(
            lambda: read_status(folder).outcome not in running or not is_last(), STATUS_SECONDS
        )
    status, is_new = read_status(folder), starts.is_new
    if is_new and codes:  # {}: a stop signal came between two starts
        reported += read_errors(folder, read_info(folder).launch)
    if is_new and (launch.node_rank == 0 or (lost and lost.rank == 0 and is_last())):
        # the status may still say "preempted" from an earlier start, which saved so that the nodes
        # could change
        has_saved = status.outcome == "preempted" and (is_last() or workers.stop_signal)
        # a process could not write that it failed if its disk was full or its node was lost
        if reported and status.outcome != "finished" and not has_saved:
            status = as_failed(folder, status, reported)
        elif status.outcome == "running" and not workers.stop_signal:  # even if all codes are 0
            status = replace(status, outcome="failed", reason=unexplained(codes, workers.killed))
        if goodput := tool("goodput"):
            status = replace(status, goodput=goodput.goodput(folder))
        with suppress(OSError), status_locked(folder):  # a full disk; another launch has the lock
            if starts.is_new and (launch.node_rank == 0 or is_last()):
                write_status(folder, status)
    return status, is_new


def as_failed(folder: Path, status: Status, reported: list[Failure]) -> Status:
    """Return the status of a failed run, with the first failure that its ranks have reported."""
    first = failures.first_failure(reported)
    if not first:
        return replace(status, outcome="failed")
    hosts = read_info(folder).hosts
    ranks = {failure.rank for failure in reported}
    silent = [f"rank {n} on {host}" for n, host in enumerate(hosts) if n not in ranks]
    reason = failures.reason_in_status(first, silent)
    step = status.step if first.step is None else first.step  # None: before the loop
    return replace(status, outcome="failed", step=step, reason=reason, failure=first)


def starts_again(
    launch: Launch,
    starts: Starts,
    workers: Workers,
    codes: dict[int, int],
    reported: list[Failure],
    *,
    has_saved: bool,
) -> bool:
    """Meet the other nodes; return whether the run goes on; a stop signal may still end it.

    Args:
        launch: the settings.
        starts: the starts of this launch.
        workers: the workers of this node.
        codes: exit codes of the processes that ended by themselves, by rank.
        reported: the failures of the start that ended.
        has_saved: the start did not fail: it saved and stopped, and may go on with other nodes.
    """
    others, refusal, has_waited = workers.others, "", False
    is_untried = not (starts.has_begun and read_status(starts.folder).first_step_time)
    if has_saved:
        starts.count += 1
    else:
        may_go_on = launch.own.min_machines > 0
        first = failures.first_failure(reported)
        has_waited = may_go_on and first is not None and first.cause == "waiting"
        refusal = starts.refusal(
            failed(codes),
            reported,
            others_failed=bool(others and (others.failed or others.has_left)),
            may_have_waited=may_go_on,
        )
    if others:
        wait = launch.own.wait_for_node_0 * bool(launch.node_rank)
        seconds = max(wait, GO_ON_SECONDS if launch.own.min_machines else RESTART_SECONDS)
        if has_saved and launch.node_rank:
            seconds = wait  # not longer: if node 0 has left too, the run has ended
        if not has_saved:
            others.tell_failure()
        if others.lost and others.lost.rank == 0 and not launch.own.wait_for_node_0:
            say("the run ends, since node 0 is lost; --wait_for_node_0 SECONDS waits for a new one")
            return False
        try:
            with workers.stoppable():
                if (has_saved or launch.own.max_restarts) and not workers.stop_signal:
                    meet_other_nodes(
                        launch,
                        others,
                        seconds,
                        refusal=refusal,
                        is_untried=is_untried,
                        has_waited=has_waited,
                        start=starts.id,
                        has_saved=has_saved and not workers.makes_room,
                    )
        except RunHasEnded:
            return False
        except ConfigError as error:
            say(error)
            return False
    if not (refusal or has_saved or workers.stop_signal):
        why = ", ".join(f"rank {rank} {how_it_ended(code)}" for rank, code in codes.items())
        why = why or "another node failed"
        print(f"{why}: all processes start again, restart {starts.count}", flush=True)
    return not refusal


def report_held_lock(launch: Launch, rank: int, logs: Path | None, starts: Starts) -> Failure:
    """Write an error file for a process that watchdog.LastResort ended; return the failure."""
    stacks = ""
    with suppress(OSError):
        stacks = stacks_file(str(logs or ""), rank).read_text(errors="replace")
    limits = launch.config.distributed
    reason = (
        "no progress, and C code held Python's lock (the GIL), so the process could not report it:"
        f" it was ended {HELD_SECONDS:g} s after the limit (distributed.timeout_seconds"
        f" {limits.timeout_seconds:g}, startup_timeout_seconds {limits.startup_timeout_seconds:g})"
    )
    failure = failures.record(reason=reason, cause="stalled", details=stacks)
    return starts.report(failure, rank=rank)


def report_lost_node(launch: Launch, others: Any, starts: Starts) -> Failure:
    """Print that a node does not answer, and write an error file for it; return the failure."""
    node = others.lost
    position = [member.rank for member in others.members].index(node.rank)
    rank = position * launch.processes_per_node
    reason = (
        f"node {node.rank} has not answered for {launch.own.lost_node_seconds:g} s: its host has"
        " crashed, hangs or is cut off from the network"
    )
    say(f"{node.host}: {reason}")
    failure = failures.record(reason=reason, cause="lost node")
    return starts.report(failure, rank=rank, host=node.host)


def record_end(logs: Path, workers: Workers, codes: dict[int, int], restarts: int) -> None:
    """Write launcher.json in the log folder: how the processes of this node ended."""
    ended = {
        "exit_codes": codes,
        "killed": workers.killed,
        "restarts": restarts,
        "signal": workers.stop_signal or None,
        "time": time.time(),
    }
    with suppress(OSError):  # a full disk
        (logs / RESERVE).unlink(missing_ok=True)
        write_atomically(logs / "launcher.json", json.dumps(ended) + "\n")
