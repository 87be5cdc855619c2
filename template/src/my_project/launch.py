"""Start this node's part of a run: `accelerate launch`, watched from its start to its outcome.

    python -m my_project.launch --config_file accelerate_configs/multi_node.yaml \
        --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip gpu-a \
        -m my_project.train --config configs/image_classification.yaml

Takes what accelerate launch takes, and does besides, in this order:
1. prints one line: which node this is, its processes, address, precision and run folder;
2. with several nodes, waits until all are there and reach each other (cluster/rendezvous.py);
3. with --preflight, checks the cluster (cluster/preflight.py), and ends with 1 where that fails;
4. trains; what each process prints also goes to <run folder>/logs/node_<n>/;
5. passes signals on, so that the run saves and leaves; leaves no process behind;
6. exits with the run's outcome: 0 finished; 75 preempted; 2 what will not get better by itself (a
   wrong setting); 1 anything else (a node that is late or lost, an exception).
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
from .config import CONFIG_ERRORS, ConfigError, read_yaml
from .files import writing
from .run_folder import read_status
from .safety.redaction import mask_command, refuse_secrets

PREEMPTED = 75
PREFLIGHT = f"{__package__}.cluster.preflight"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
KILLED_BY_A_SIGNAL_AFTER = 5.0  # seconds since the first; launchers and schedulers send doubles
STATUS_SHOWS_WITHIN = 60.0  # seconds, on network file systems
WAITS_FOR_SAVES = (2, 12)  # the first torch that reads TORCH_ELASTIC_SHUTDOWN_TIMEOUT
# What a scheduler or an outer launcher may have set, and torchrun would take for its own.
NOT_INHERITED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|RDZV_\w+)|TORCHELASTIC_(?!LOG_LINE)\w+"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the command line and the accelerate config say together."""

    flags: tuple[str, ...]  # of accelerate launch
    module: str
    arguments: tuple[str, ...]  # of the module
    nodes: int
    processes: int  # over all nodes
    rank: int  # of this node
    address: str  # of node 0
    port: int
    precision: str
    elastic: bool
    preflight: bool
    seconds_to_come: float

    @property
    def processes_per_node(self) -> int:
        """Processes on each node."""
        return self.processes // self.nodes

    @property
    def run_folder(self) -> Path:
        """The run folder that the module's arguments name; as config.parse finds it."""
        return run_folder(self.arguments)

    def command(self, module: str) -> list[str]:
        """Spell out what is run."""
        return [
            sys.executable, "-m", "accelerate.commands.launch", *self.flags,
            "-m", module, *self.arguments,
        ]  # fmt: skip


# ---- what is asked for ---------------------------------------------------------------------------
def parse(arguments: list[str]) -> tuple[argparse.Namespace, Launch]:
    """Read the command line: this module's options and accelerate's, then -m and the module's.

    Raises:
        ConfigError: it cannot be launched so.
    """
    if "-m" not in arguments[:-1]:
        raise ConfigError("name what to run after the flags, such as -m my_project.train")
    at = arguments.index("-m")
    module, its_arguments = arguments[at + 1], arguments[at + 2 :]
    if not _is_module(module):
        raise ConfigError(f"there is no module {module}; give one such as {__package__}.train")
    if preflight := "--preflight" in its_arguments:  # where the scripts in launch/ put it
        its_arguments.remove("--preflight")
    own, flags = _parser().parse_known_args(arguments[:at])
    accelerates = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config_file", "main_process_ip", "mixed_precision", "rdzv_backend"):
        accelerates.add_argument(f"--{name}")
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_port"):
        accelerates.add_argument(f"--{name}", type=int)
    given, rest = accelerates.parse_known_args(flags)
    if not given.config_file:
        raise ConfigError(
            "give --config_file accelerate_configs/<where>.yaml; without it accelerate reads a file"
            " of your own cache."
        )
    path = Path(given.config_file)
    if not path.is_file():
        raise ConfigError(f"{path} is no file; accelerate_configs/README.md lists those there are.")
    where = read_yaml(path)

    def value(name: str, default: Any) -> Any:
        found = getattr(given, name)
        return where.get(name, default) if found is None else found

    nodes, processes = value("num_machines", 1), value("num_processes", 1)
    rank, port = value("machine_rank", 0), value("main_process_port", None) or 29500
    if nodes < 1:
        raise ConfigError(f"--num_machines is {nodes}, but must be at least 1.")
    if processes % nodes or processes < nodes:
        raise ConfigError(
            f"--num_processes {processes} over --num_machines {nodes} leaves"
            f" {processes % nodes} over; it counts the processes of all nodes: give a multiple of"
            f" {nodes}."
        )
    if not 0 <= rank < nodes:
        raise ConfigError(f"--machine_rank is {rank}, but must lie between 0 and {nodes - 1}.")
    each = processes // nodes
    if str(where.get("gpu_ids", "")).startswith("-1") and "--gpu_ids" not in " ".join(rest):
        flags.append("--gpu_ids=" + ",".join(["-1"] * each))
    if "parallelism_config" in where and "parallelism_config_dp" not in " ".join(rest):
        flags += [
            f"--parallelism_config_dp_replicate_size={nodes}",
            f"--parallelism_config_dp_shard_size={each}",
        ]
    wants_preflight = own.preflight or preflight
    if (nodes > 1 or wants_preflight) and not _is_module(PREFLIGHT):
        raise ConfigError(
            "several nodes and --preflight need the folder cluster/ of the package, which is not"
            " there; copy it from the template again."
        )
    elastic = given.rdzv_backend == "c10d"
    if elastic:  # says who opens the port, where the name of this host stands for 127.0.1.1
        flags += ["--rdzv_conf", f"is_host={int(rank == 0)}"]
    return own, Launch(
        flags=tuple(flags),
        module=module,
        arguments=tuple(its_arguments),
        nodes=nodes,
        processes=processes,
        rank=rank,
        address=value("main_process_ip", "") or "127.0.0.1",
        port=port,
        precision=str(value("mixed_precision", "no")),
        elastic=elastic,
        preflight=wants_preflight,
        seconds_to_come=own.seconds_to_come,
    )


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(__doc__)
    parser.add_argument("--preflight", action="store_true", help="check the cluster first")
    parser.add_argument(
        "--seconds_to_come",
        type=float,
        default=600,
        help="how long to wait for the other nodes",
    )
    parser.add_argument(
        "--stop_at_end_of_input",
        action="store_true",
        help="stop when standard input ends: when the connection that started this is gone",
    )
    return parser


def run_folder(arguments: tuple[str, ...]) -> Path:
    """Find the run folder that a run's arguments name, without importing its recipe."""
    folder, name, stem = "runs", "run", "run"
    words = [part for word in arguments for part in word.split("=", 1)]
    for word, value in pairwise(words):
        if word == "--config":
            stem = Path(value).stem
            settings = read_yaml(Path(value)) if Path(value).is_file() else {}
            folder = str(settings.get("runs_folder", folder))
            name = str(settings.get("run_name", name))
        elif word == "--runs_folder":
            folder = value
        elif word == "--run_name":
            name = value
    return Path(folder) / (stem if name == "run" else name)


def refuse_secret_arguments(arguments: tuple[str, ...]) -> None:
    """Refuse here what train.py would: where it fails, accelerate prints its whole command line."""
    words = [part for word in arguments for part in word.split("=", 1)]
    options = {word[2:]: value for word, value in pairwise(words) if word.startswith("--")}
    if refusal := refuse_secrets(options):
        raise ConfigError(refusal)


# ---- the installed torch -------------------------------------------------------------------------
def missing_in(version: str) -> str:
    """Say in one line what torchrun of a version of torch cannot do; empty where it can do all."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release >= WAITS_FOR_SAVES:
        return ""
    return (
        f"torch {version}: a run that is told to stop has 30 s to save before torchrun kills it"
        f" (from torch {'.'.join(map(str, WAITS_FOR_SAVES))} as long as it needs)"
    )


# ---- this node -----------------------------------------------------------------------------------
def prepare_environment() -> None:
    """Set what torchrun needs on this node."""
    for name in [name for name in os.environ if NOT_INHERITED.fullmatch(name)]:
        del os.environ[name]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    # torchrun would kill a run that is still saving after 30 s; schedulers have limits of their own
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # restarts find a live address
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")


def line(launch: Launch, interface: str = "") -> str:
    """Say in one line what this node does."""
    first = launch.rank * launch.processes_per_node
    last = first + launch.processes_per_node - 1
    return (
        f"node {launch.rank} of {launch.nodes} ({socket.gethostname()}"
        + (f", {interface}" if interface else "")
        + f"): rank{'s' * (last > first)} {first}"
        + (f" to {last}" if last > first else "")
        + f" of {launch.processes}"
        + (f", main node {launch.address}:{launch.port}" if launch.nodes > 1 else "")
        + f", precision {launch.precision}, run folder {launch.run_folder}"
    )


def meet_other_nodes(launch: Launch) -> None:
    """Find the interface by which the other nodes are reached, and wait until all are there."""
    from .cluster import rendezvous  # the only import of cluster/, which can be deleted

    interface, ip = rendezvous.interface_to(launch.address)
    if interface:  # else gloo and NCCL choose
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("PET_LOCAL_ADDR", ip)
    print(line(launch, interface), flush=True)
    if launch.elastic:
        return
    me = rendezvous.Node(
        rank=launch.rank,
        nodes=launch.nodes,
        world_size=launch.processes,
        run=" ".join((launch.module, *mask_command(launch.arguments))),
        host=socket.gethostname(),
        interface=interface,
        ip=ip,
    )
    rendezvous.wait_for_nodes(
        me,
        launch.address,
        launch.port,
        launch.seconds_to_come,
        say=lambda text: print(text, flush=True),
    )


class Child:
    """`accelerate launch` on this node, and all that it starts."""

    def __init__(self, *, torchrun: bool) -> None:
        self.torchrun = torchrun  # accelerate starts a single process without it
        self.process: subprocess.Popen | None = None
        self.told: float | None = None  # when first told to stop
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whoever loses its parent becomes ours
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        now = time.monotonic()
        first, self.told = self.told is None, self.told or now
        if self.process is None:
            raise SystemExit(PREEMPTED)  # nothing has begun; the same command starts it
        if first:
            for process in self._who_passes_it_on():
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif now - self.told > KILLED_BY_A_SIGNAL_AFTER:
            self.end_all()

    def _who_passes_it_on(self) -> list[psutil.Process]:
        """Find who is to be told: torchrun tells its processes; without it, they themselves."""
        assert self.process
        try:
            accelerate = psutil.Process(self.process.pid)
            return (not self.torchrun and accelerate.children()) or [accelerate]
        except psutil.NoSuchProcess:
            return []

    def run(self, command: list[str]) -> int:
        """Run a command; return its exit code when it and all it started are gone."""
        # A signal that comes before the child can be told waits until it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process = subprocess.Popen(
                command,
                preexec_fn=partial(_end_with, os.getpid()),  # noqa: PLW1509 - a few system calls
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return self.process.wait()
        finally:
            self.end_all()
            self.process = None

    def end_all(self) -> None:
        """Kill what is left: a launcher that was killed leaves its processes training."""
        left = psutil.Process().children(recursive=True)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([p for p in left if not self.process or p.pid != self.process.pid], 10)


def _end_with(parent: int) -> None:
    """Make a child of this one heed signals, and end with its parent."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the mask outlives exec
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it has gone before it could be watched


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option: int, value: int) -> None:
    """Ask Linux about orphans; elsewhere do without."""
    if LIBC:
        LIBC.prctl(option, value)


def stop_at_end_of_input() -> None:
    """Stop this process when its standard input ends."""

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they are for the main thread
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held at the exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


# ---- the outcome ---------------------------------------------------------------------------------
def exit_code(status: dict[str, Any], before: dict[str, Any], code: int) -> int:
    """Turn what a run has recorded into an exit code.

    Args:
        status: now.
        before: as it was when the launcher started.
        code: of the launcher, or of a process that left with a sentence.
    """
    outcome = status.get("outcome")
    if outcome == "preempted" and status != before:
        return PREEMPTED
    if code == 0 or (outcome == "finished" and status != before):
        return 0
    return code if code > 0 else 1


def wait_for_status(folder: Path, before: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Read status.json once it says how the run has ended, or will not any more."""
    started = time.monotonic()
    while True:
        status = read_status(folder)
        waited = time.monotonic() - started
        enough = 5.0 if status == before else STATUS_SHOWS_WITHIN
        has_ended = status != before and status.get("outcome") != "running"
        if has_ended or nodes == 1 or waited > enough:
            return status
        time.sleep(0.2)


def main(arguments: list[str]) -> int:
    """Launch this node's part; return the exit code."""
    own, launch = parse(arguments)
    refuse_secret_arguments(launch.arguments)
    child = Child(torchrun=launch.processes > 1)
    if own.stop_at_end_of_input:
        stop_at_end_of_input()
    prepare_environment()
    installed = importlib.metadata.version("torch")  # importing torch takes 4 s
    if child.torchrun and (missing := missing_in(installed)):
        print(missing, flush=True)
    if launch.nodes > 1:
        meet_other_nodes(launch)
    else:
        print(line(launch), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as errors:
        os.environ[CONFIG_ERRORS] = errors
        if launch.preflight and child.run(launch.command(PREFLIGHT)) != 0:
            print("preflight failed, so nothing was trained; its errors stand above", flush=True)
            return PREEMPTED if child.told else repeat_error(errors) or 1
        if child.told:  # as the preflight ended
            return PREEMPTED
        return run(launch, child, errors)


def run(launch: Launch, child: Child, errors: str) -> int:
    """Run the module; return the exit code.

    Says last, below whatever the launchers have printed about their processes, how that ended.
    """
    folder = launch.run_folder
    before = read_status(folder)
    command = launch.command(launch.module)
    if launch.processes > 1:
        at, logs = command.index("-m", 3), folder / "logs" / f"node_{launch.rank}"
        with writing(folder):
            logs.mkdir(parents=True, exist_ok=True)
        command[at:at] = ["--tee", "3", "--log_dir", str(logs)]
    code = child.run(command)
    status = wait_for_status(folder, before, launch.nodes)
    outcome, is_new = status.get("outcome"), status != before
    # told to stop in start-up, each process leaves by itself: the others may lose contact with it
    if child.told and code and (not is_new or outcome == "running" or "unexplained" in status):
        print("stopped before it could save; run the same command again", flush=True)
        return PREEMPTED
    has_ended = outcome == "finished" or (outcome == "preempted" and is_new)
    if code == 0 and launch.module == f"{__package__}.train" and not has_ended:
        print(
            f"error: the processes ended with 0, but {folder}/status.json does not say finished:"
            " something in them called os._exit; the same command continues.",
            file=sys.stderr,
            flush=True,
        )
        return 1
    if status != before:
        print(f"{folder}: {status.get('outcome')}: {status.get('reason')}", flush=True)
    if code:
        code = repeat_error(errors) or code
    return exit_code(status, before, code)


def repeat_error(errors: str) -> int:
    """Say once more why a process left with a sentence (config.exit_with_sentence).

    Returns:
        Its exit code, 2 if there is one; 0 if none left so.
    """
    left = sorted(Path(errors).iterdir())
    if not left:
        return 0
    print(f"error: {left[-1].read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
    return int(left[-1].name.split("_")[0])


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
