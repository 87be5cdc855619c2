"""Start this node's part of a run, through accelerate launch.

    python -m my_project.launch --config_file accelerate_configs/multi_node.yaml \
        --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip gpu-a \
        -m my_project.train --config configs/image_classification.yaml

Takes the options of accelerate launch, and in this order:
1. prints one line: this node's rank, ranks of its processes, address, precision and run folder;
2. with several nodes, waits until all are there and reach each other (cluster/rendezvous.py);
3. with --preflight, checks the cluster (cluster/preflight.py), and exits with 1 if that fails;
4. trains; the output of each process is also written to <run folder>/logs/node_<n>/;
5. forwards signals, so that the run saves and exits; leaves no process running;
6. exits with the run's outcome: 0 finished; 75 preempted; 2 an error that another attempt would
   repeat (a wrong setting); 1 any other error (a node that is late or lost, an exception).
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from . import cli
from .config import CONFIG_ERRORS, ConfigError, read_yaml, run_folder_of
from .files import wait_until, writing
from .run_folder import read_status
from .safety.redaction import mask_command, secrets_problem

PREEMPTED = 75
PREFLIGHT = f"{__package__}.cluster.preflight"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A second stop signal kills the run if it comes this long after the first: launchers and
# schedulers send each signal twice, at almost the same time.
KILL_AFTER_SECONDS = 5.0
STATUS_SECONDS = 60.0  # how long a network file system may take to show a status.json
SHUTDOWN_TIMEOUT_SINCE = (2, 12)  # the first torch that reads TORCH_ELASTIC_SHUTDOWN_TIMEOUT
# Variables of a scheduler or an outer launcher that torchrun would read as its own.
NOT_INHERITED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|RDZV_\w+)|TORCHELASTIC_(?!LOG_LINE)\w+"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of a launch, from the command line and the accelerate config."""

    flags: tuple[str, ...]  # of accelerate launch
    module: str
    arguments: tuple[str, ...]  # of the module
    nodes: int
    world_size: int  # processes over all nodes
    node_rank: int
    address: str  # of node 0
    port: int
    precision: str
    elastic: bool
    preflight: bool
    join_timeout_seconds: float

    @property
    def processes_per_node(self) -> int:
        """Return the number of processes on each node."""
        return self.world_size // self.nodes

    @property
    def run_folder(self) -> Path:
        """Return the run folder that the module will use."""
        return run_folder_of(self.arguments)

    def command(self, module: str) -> list[str]:
        """Return the command that runs a module through accelerate launch."""
        launcher = (sys.executable, "-m", "accelerate.commands.launch")
        return [*launcher, *self.flags, "-m", module, *self.arguments]


# ---- the command line ----------------------------------------------------------------------------
def parse(arguments: list[str]) -> tuple[argparse.Namespace, Launch]:
    """Read the command line: this module's options and accelerate's, then -m and the module's.

    Raises:
        ConfigError: a value is missing or wrong.
    """
    if "-m" not in arguments[:-1]:
        raise ConfigError(
            f"there is no -m with a module after the options; add one such as -m"
            f" {__package__}.train"
        )
    at = arguments.index("-m")
    module = arguments[at + 1]
    module_arguments = arguments[at + 2 :]
    if not _is_module(module):
        raise ConfigError(f"there is no module {module}; give one such as {__package__}.train")
    if preflight := "--preflight" in module_arguments:  # where the scripts in launch/ put it
        module_arguments.remove("--preflight")
    own, flags = _parser().parse_known_args(arguments[:at])
    accelerate_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config_file", "main_process_ip", "mixed_precision", "rdzv_backend"):
        accelerate_parser.add_argument(f"--{name}")
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_port"):
        accelerate_parser.add_argument(f"--{name}", type=int)
    given, rest = accelerate_parser.parse_known_args(flags)
    if not given.config_file:
        raise ConfigError(
            "give --config_file accelerate_configs/<where>.yaml; without it accelerate reads the"
            " default config in your home folder."
        )
    path = Path(given.config_file)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; accelerate_configs/README.md lists the configs.")
    where = read_yaml(path)

    def value(name: str, default: Any) -> Any:
        found = getattr(given, name)
        return where.get(name, default) if found is None else found

    nodes = value("num_machines", 1)
    world_size = value("num_processes", 1)
    node_rank = value("machine_rank", 0)
    if nodes < 1:
        raise ConfigError(f"--num_machines is {nodes}, but must be at least 1.")
    if world_size % nodes or world_size < nodes:
        raise ConfigError(
            f"--num_processes is {world_size}, but must be a multiple of --num_machines {nodes}: it"
            " counts the processes of all nodes."
        )
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"--machine_rank is {node_rank}, but must be between 0 and {nodes - 1}.")
    given_flags = " ".join(rest)
    sizes = sizes_for(where, nodes, world_size // nodes)
    if "gpu_ids" in sizes and "--gpu_ids" not in given_flags:
        flags.append(f"--gpu_ids={sizes['gpu_ids']}")
    if "parallelism_config_dp" not in given_flags:
        mesh = sizes.get("parallelism_config", {})
        flags += [f"--{name}={size}" for name, size in mesh.items()]
    wants_preflight = own.preflight or preflight
    if (nodes > 1 or wants_preflight) and not _is_module(PREFLIGHT):
        raise ConfigError(
            "several nodes and --preflight need the package's folder cluster/, which is missing;"
            " copy it from the template."
        )
    elastic = given.rdzv_backend == "c10d"
    if elastic:  # by its name a host that resolves to 127.0.1.1 would not know that it is node 0
        flags += ["--rdzv_conf", f"is_host={int(node_rank == 0)}"]
    return own, Launch(
        flags=tuple(flags),
        module=module,
        arguments=tuple(module_arguments),
        nodes=nodes,
        world_size=world_size,
        node_rank=node_rank,
        address=value("main_process_ip", "") or "127.0.0.1",
        port=value("main_process_port", None) or 29500,
        precision=str(value("mixed_precision", "no")),
        elastic=elastic,
        preflight=wants_preflight,
        join_timeout_seconds=own.join_timeout_seconds,
    )


def sizes_for(where: dict[str, Any], nodes: int, processes_per_node: int) -> dict[str, Any]:
    """Return the settings of an accelerate config that depend on the number of nodes and GPUs.

    Args:
        where: the accelerate config; a setting that it does not have is left out.
        nodes: number of nodes.
        processes_per_node: one per GPU.
    """
    sizes: dict[str, Any] = {}
    if str(where.get("gpu_ids", "")).startswith("-1"):
        sizes["gpu_ids"] = ",".join(["-1"] * processes_per_node)
    if "parallelism_config" in where:
        sizes["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": nodes,
            "parallelism_config_dp_shard_size": processes_per_node,
        }
    return sizes


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(__doc__)
    parser.add_argument("--preflight", action="store_true", help="check the cluster first")
    parser.add_argument(
        "--join_timeout_seconds",
        type=float,
        default=600,
        help="timeout of the wait for the other nodes",
    )
    parser.add_argument(
        "--stop_at_end_of_input",
        action="store_true",
        help="stop when standard input ends, as when the ssh connection that started this closes",
    )
    return parser


def refuse_secret_arguments(arguments: tuple[str, ...]) -> None:
    """Refuse secrets as train.py does, but before accelerate, which prints a failed command."""
    words = [part for word in arguments for part in word.split("=", 1)]
    options = {word[2:]: value for word, value in pairwise(words) if word.startswith("--")}
    if refusal := secrets_problem(options):
        raise ConfigError(refusal)


# ---- the installed torch -------------------------------------------------------------------------
def torch_limitation(version: str) -> str:
    """Return a line about what torchrun of this version lacks; empty if it lacks nothing."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release >= SHUTDOWN_TIMEOUT_SINCE:
        return ""
    return (
        f"torch {version}: a run that is told to stop has 30 s to save before torchrun kills it"
        f" (from torch {'.'.join(map(str, SHUTDOWN_TIMEOUT_SINCE))} as long as it needs)"
    )


# ---- this node -----------------------------------------------------------------------------------
def prepare_environment() -> None:
    """Set the environment variables that torchrun needs on this node."""
    for name in [name for name in os.environ if NOT_INHERITED.fullmatch(name)]:
        del os.environ[name]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    # the default, 30 s, may be too short for a save; schedulers set limits of their own
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    # a shared store dies with the processes, and a restart would connect to its address
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")


def summary(launch: Launch, interface: str = "") -> str:
    """Return one line about this node's part of the run."""
    first = launch.node_rank * launch.processes_per_node
    last = first + launch.processes_per_node - 1
    return (
        f"node {launch.node_rank} of {launch.nodes} ({socket.gethostname()}"
        + (f", {interface}" if interface else "")
        + f"): rank{'s' * (last > first)} {first}"
        + (f" to {last}" if last > first else "")
        + f" of {launch.world_size}"
        + (f", main node {launch.address}:{launch.port}" if launch.nodes > 1 else "")
        + f", precision {launch.precision}, run folder {launch.run_folder}"
    )


def wait_for_other_nodes(launch: Launch) -> None:
    """Set the network interface, and wait until all nodes are there and reach each other."""
    # The only import of cluster/, which can be deleted.
    from .cluster import rendezvous  # pyright: ignore[reportMissingImports]

    interface, ip = rendezvous.interface_to(launch.address)
    if interface:  # else gloo and NCCL choose
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("PET_LOCAL_ADDR", ip)
    print(summary(launch, interface), flush=True)
    if launch.elastic:
        return
    me = rendezvous.Node(
        rank=launch.node_rank,
        nodes=launch.nodes,
        world_size=launch.world_size,
        run=" ".join((launch.module, *mask_command(launch.arguments))),
        host=socket.gethostname(),
        interface=interface,
        ip=ip,
    )
    rendezvous.wait_for_nodes(
        me,
        launch.address,
        launch.port,
        launch.join_timeout_seconds,
        say=lambda text: print(text, flush=True),
    )


class Child:
    """The process of `accelerate launch` on this node, with all its descendants."""

    def __init__(self, *, torchrun: bool) -> None:
        self.torchrun = torchrun  # False: accelerate starts a single process without torchrun
        self.process: subprocess.Popen | None = None
        self.stop_signal_at: float | None = None  # time.monotonic() of the first stop signal
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        now = time.monotonic()
        is_first = self.stop_signal_at is None
        self.stop_signal_at = self.stop_signal_at or now
        if self.process is None:
            raise SystemExit(PREEMPTED)  # nothing has started; the same command starts it
        if is_first:
            for process in self._signal_targets():
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif now - self.stop_signal_at > KILL_AFTER_SECONDS:
            self.kill_all()

    def _signal_targets(self) -> list[psutil.Process]:
        """Return the processes to signal: torchrun, which forwards signals, or the training one."""
        assert self.process
        try:
            accelerate = psutil.Process(self.process.pid)
            return (not self.torchrun and accelerate.children()) or [accelerate]
        except psutil.NoSuchProcess:
            return []

    def run(self, command: list[str]) -> int:
        """Run a command; return its exit code when it and all its descendants have ended."""
        # a signal is held back until there is a process to forward it to
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process = subprocess.Popen(
                command,
                preexec_fn=partial(_exit_with_parent, os.getpid()),  # noqa: PLW1509 - system calls
                start_new_session=True,  # Ctrl-C in a terminal signals this process only
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return self.process.wait()
        finally:
            self.kill_all()
            self.process = None

    def kill_all(self) -> None:
        """Kill all descendants: a launcher that was killed leaves its processes training."""
        running = psutil.Process().children(recursive=True)
        for process in running:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([p for p in running if not self.process or p.pid != self.process.pid], 10)


def _exit_with_parent(parent: int) -> None:
    """Reset the signal handlers in a new child process, and let it end with its parent."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the mask outlives exec
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if LIBC:
        LIBC.prctl(option, value)


def stop_at_end_of_input() -> None:
    """Send SIGTERM to this process when its standard input ends."""

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the main thread handles them
        while os.read(0, 4096):  # not sys.stdin, whose lock would still be held at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


# ---- the outcome ---------------------------------------------------------------------------------
def exit_code(status: dict[str, Any], before: dict[str, Any], code: int) -> int:
    """Return the exit code for a run's status.

    Args:
        status: the content of status.json.
        before: the same, when the launcher started.
        code: of the launcher, or of a process that exited with a ConfigError.
    """
    outcome = status.get("outcome")
    if outcome == "preempted" and status != before:
        return PREEMPTED
    if code == 0 or (outcome == "finished" and status != before):
        return 0
    return code if code > 0 else 1


def wait_for_status(folder: Path, before: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Return the status of a run whose processes have ended, once this node sees its outcome."""

    def has_changed() -> bool:
        return read_status(folder) != before

    def has_outcome() -> bool:
        status = read_status(folder)
        return status != before and status.get("outcome") != "running"

    if nodes > 1 and wait_until(has_changed, 5.0):
        wait_until(has_outcome, STATUS_SECONDS)
    return read_status(folder)


def main(arguments: list[str]) -> int:
    """Launch this node's part of the run; return the exit code."""
    own, launch = parse(arguments)
    refuse_secret_arguments(launch.arguments)
    child = Child(torchrun=launch.world_size > 1)
    if own.stop_at_end_of_input:
        stop_at_end_of_input()
    prepare_environment()
    installed = importlib.metadata.version("torch")  # importing torch takes 4 s
    if child.torchrun and (limitation := torch_limitation(installed)):
        print(limitation, flush=True)
    if launch.nodes > 1:
        wait_for_other_nodes(launch)
    else:
        print(summary(launch), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as errors:
        os.environ[CONFIG_ERRORS] = errors
        if launch.preflight and child.run(launch.command(PREFLIGHT)) != 0:
            print("preflight failed, so nothing was trained; see the errors above", flush=True)
            return PREEMPTED if child.stop_signal_at else repeat_error(errors) or 1
        if child.stop_signal_at:  # at the end of the preflight
            return PREEMPTED
        return run(launch, child, errors)


def run(launch: Launch, child: Child, errors: str) -> int:
    """Run the module; return the exit code.

    The outcome is printed last, below all output of the launchers.
    """
    folder = launch.run_folder
    before = read_status(folder)
    command = launch.command(launch.module)
    if launch.world_size > 1:
        at = command.index("-m", 3)
        logs = folder / "logs" / f"node_{launch.node_rank}"
        with writing(folder):
            logs.mkdir(parents=True, exist_ok=True)
        command[at:at] = ["--tee", "3", "--log_dir", str(logs)]
    code = child.run(command)
    status = wait_for_status(folder, before, launch.nodes)
    outcome = status.get("outcome")
    is_new = status != before
    # stopped in startup, each process exits by itself, and the others may report a lost connection
    is_unsaved = not is_new or outcome == "running" or "unexplained" in status
    if child.stop_signal_at and code and is_unsaved:
        print("stopped before it could save; run the same command again", flush=True)
        return PREEMPTED
    has_ended = outcome == "finished" or (outcome == "preempted" and is_new)
    if code == 0 and launch.module == f"{__package__}.train" and not has_ended:
        print(
            f"error: the processes exited with 0, but {folder}/status.json does not say finished:"
            " some code in them called os._exit. The same command continues the run.",
            file=sys.stderr,
            flush=True,
        )
        return 1
    if is_new:
        print(f"{folder}: {outcome}: {status.get('reason')}", flush=True)
    if code:
        code = repeat_error(errors) or code
    return exit_code(status, before, code)


def repeat_error(errors: str) -> int:
    """Print again the ConfigError with which a process exited (config.exit_with_error).

    Returns:
        Its exit code, 2 if any process had that; 0 without such an error.
    """
    found = sorted(Path(errors).iterdir())
    if not found:
        return 0
    print(f"error: {found[-1].read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
    return int(found[-1].name.split("_")[0])


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
