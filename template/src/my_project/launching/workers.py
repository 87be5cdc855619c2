"""Start the training processes of this node, forward signals to them, and leave none running.

The training processes are forked from this process, which has imported torch, the loop and the
recipe; that saves each of them some four seconds of CPU time in each start. They are spawned
instead if a fork is impossible or unsafe: if this process has another thread or has initialized
CUDA, or if the recipe has opened a file, whose position all of them would share.
"""

import fcntl
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from .. import failures
from ..files import TransientError, wait_until
from ..process import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, PREEMPTED, prctl
from .attempts import failed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A second stop signal kills the run, but only if it comes this long after the first: launchers and
# schedulers send each signal twice, at almost the same time.
KILL_AFTER_SECONDS = 5.0
STOPPING = "stopping; a run in training saves within two steps; a second signal after 5 s kills it"
NOTHING_RUNS = "stopped while no process was running; the same command continues the run"
ENDING = "no process is running, and none will be started"
POLL_SECONDS = 0.1


class Workers:
    """The training processes of this node, with all their descendants."""

    def __init__(self) -> None:
        self.running: list[Any] = []  # processes of multiprocessing
        self.killed: list[int] = []  # ranks that were killed because another process had failed
        self.stop_signal = ""  # the name of the first stop signal
        self.stop_signal_time = float("inf")  # time.time(), to compare with error files
        self._stopped_at = float("inf")  # time.monotonic(), which does not jump
        self._may_raise = True  # a signal may end this process: nothing has to be stopped or saved
        self.others: Any = None  # nodes.OtherNodes if there are several nodes
        self.makes_room = False  # the run saves in order to go on with a new node
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process
        self._handle_signals()

    def _handle_signals(self) -> None:
        for number in SIGNALS:
            # under nohup, SIGHUP is ignored, and has to stay so
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        if not self.stop_signal:
            self.stop_signal, self.stop_signal_time = signal.Signals(number).name, time.time()
            self._stopped_at = time.monotonic()
            message = STOPPING if self.running else NOTHING_RUNS if self._may_raise else ENDING
            with suppress(OSError):  # a closed terminal; the signal may have interrupted a print
                os.write(1, f"\n{self.stop_signal}: {message}\n".encode())
            if self._may_raise:
                raise SystemExit(PREEMPTED)
            # a run that makes room has signaled the first worker already: send it no second signal
            for worker in self.running[1:] if self.makes_room else self.running:
                with suppress(ProcessLookupError):
                    if worker.exitcode is None:
                        os.kill(worker.pid, signal.SIGTERM if number == signal.SIGHUP else number)
        elif time.monotonic() - self._stopped_at > KILL_AFTER_SECONDS:
            kill_all(self.running)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a stop signal end the block (a wait for other nodes) but not this process."""
        self._may_raise = True
        try:
            with suppress(SystemExit):
                yield
        finally:
            self._may_raise = False

    def ignore_signals(self) -> None:
        """Ignore signals from now on: the run has ended, and Ctrl-C would prevent its summary."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def run(
        self,
        function: Callable[[], object],
        environments: list[dict[str, str]],
        may_kill: Callable[[dict[int, int | None], float], bool],
        phase: Callable[[], str] = lambda: "",
    ) -> dict[int, int]:
        """Call a function in new processes, and wait until all of them have ended.

        When a process fails, the others are killed, since they would wait for it.

        Args:
            function: the function to call; it must be picklable if processes are spawned.
            environments: the environment variables of each process.
            may_kill: Starts.may_kill, which returns whether the other processes can be killed.
            phase: returns the phase of the run, Starts.phase.

        Returns:
            The exit code of each process by rank, in the order in which they ended; -n: ended by
            signal n. An empty dict if a stop signal came before the processes were started.
        """
        self.killed, self.makes_room = [], False
        self._handle_signals()  # again, since an import may have replaced the handlers
        ranks = [int(environment.get("RANK", "0")) for environment in environments]
        method, why = start_method()
        if why:
            print(f"each process imports torch itself: {why}", flush=True)
        context: Any = multiprocessing.get_context(method)
        sys.stdout.flush()
        sys.stderr.flush()
        # a signal is held back until there are processes to forward it to
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._may_raise = False
        try:
            try:
                for environment in environments if not self.stop_signal else ():
                    arguments = (function, environment, os.getpid())
                    worker = context.Process(target=_work, args=arguments)
                    worker.start()
                    self.running.append(worker)
            except OSError as error:  # such as EAGAIN: too many processes in the control group
                raise TransientError(f"a process could not be started: {error}.") from error
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return self._wait(ranks, may_kill, phase) if self.running else {}
        finally:
            kill_all(self.running)
            self.running = []

    def _wait(self, ranks: list[int], may_kill: Callable, phase: Callable) -> dict[int, int]:
        failed_at = float("inf")
        ended: dict[int, int] = {}
        while True:
            codes = {
                rank: worker.exitcode for rank, worker in zip(ranks, self.running, strict=True)
            }
            ended |= {rank: code for rank, code in codes.items() if code is not None}
            if len(ended) == len(ranks):
                return ended
            left = [worker for worker in self.running if worker.exitcode is None]
            if failed(codes) or (self.others and self._has_failed_elsewhere(left, phase)):
                failed_at = min(failed_at, time.monotonic())
            reap_orphans({worker.pid for worker in left})
            if not self.killed and may_kill(codes, time.monotonic() - failed_at):
                self.killed = [rank for rank, code in codes.items() if code is None]
                for worker in left:
                    worker.kill()
            # with a timeout: a sentinel that a loader worker has inherited may stay open
            connection.wait([worker.sentinel for worker in left], POLL_SECONDS)

    def _has_failed_elsewhere(self, left: list[Any], phase: Callable[[], str]) -> bool:
        """Return whether processes of other nodes have failed; make room for a waiting node."""
        if self.others.have_failed:
            return True
        newcomer = "" if self.makes_room or self.stop_signal else self.others.newcomer
        if newcomer and len(left) == len(self.running) and phase() == "training":
            print(f"{newcomer} has joined: the run saves, then goes on with it", flush=True)
            self.makes_room = True
            os.kill(left[0].pid, signal.SIGUSR1)
        # If a node leaves in training, its processes save together with the others. In startup they
        # cannot save, so a node that leaves has failed.
        return self.others.has_left and phase() == "starting"


def start_method() -> tuple[str, str]:
    """Return ("fork", ""), or ("spawn", the reason)."""
    torch: Any = sys.modules.get("torch")
    if sys.platform != "linux":
        return "spawn", "only Linux forks safely"
    if torch and torch.cuda.is_initialized():
        return "spawn", "an import has initialized CUDA, which does not work after a fork"
    if len(names := threads()) > 1:
        return "spawn", f"an import has started threads ({', '.join(sorted(names)[:4])})"
    if names := sorted(name for _, name in OPENED & open_files()):
        return "spawn", f"an import or the recipe's __post_init__ has opened {', '.join(names[:4])}"
    return "fork", ""


OPENED: set[tuple[int, str]] = set()  # files that imports have opened, as open_files returns them


@contextmanager
def opened_files_noted() -> Iterator[None]:
    """Add to OPENED the files that are opened in the block and stay open.

    In the block, modules are imported or the recipe is made.
    """
    before = open_files()
    yield
    OPENED.update(open_files() - before)


def open_files() -> set[tuple[int, str]]:
    """Return the descriptors and names of files, pipes and sockets that are open for reading here.

    If one forked process reads data from these, the other processes miss that data. Devices and
    memory-mapped files are left out, since they have no position to share.
    """
    opened: set[tuple[int, str]] = set()
    maps = Path("/proc/self/maps")  # on Linux only
    mapped = maps.read_text(errors="replace") if maps.exists() else ""
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # glob's own descriptor is closed by now
            number, name = int(path.name), os.readlink(path)
            kind, flags = os.stat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL)
            has_position = stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
            is_in_memory = name.startswith("/memfd:") or f" {name}\n" in mapped
            if has_position and not is_in_memory and not flags & os.O_WRONLY:
                opened.add((number, name))
    return opened


def threads() -> list[str]:
    """Return the names of the threads of this process on Linux, including threads of C code."""
    tasks = Path("/proc/self/task")
    if threading.active_count() == 1:  # a thread that Python has joined may still be ending
        wait_until(lambda: len([*tasks.iterdir()]) == 1, 0.5, 0.01)
    names = []
    for path in tasks.glob("*/comm"):
        with suppress(OSError):  # the thread has ended since
            names.append(path.read_text().strip())
    return names


def count_in_child(count: Callable[[], int]) -> int:
    """Call a function that counts GPUs, in a child process; return its result.

    torch asks NVML or the CUDA driver, and both leave a thread in the process that asks; a process
    with a second thread is not forked (start_method).
    """
    if sys.platform != "linux" or len(threads()) > 1:
        return count()
    if not (child := os.fork()):
        gpus = 0
        try:
            gpus = count()
        finally:
            os._exit(gpus)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def reap_orphans(own: set[int]) -> None:
    """Reap ended orphans, which this process has adopted as a subreaper.

    Args:
        own: pids that are left out, since multiprocessing waits for them.
    """
    with suppress(ChildProcessError):  # this process has no children
        options = os.WEXITED | os.WNOHANG
        while (ended := os.waitid(os.P_ALL, 0, options | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitid(os.P_PID, ended.si_pid, options)


def kill_all(workers: Iterable[Any]) -> None:
    """Kill processes and all their descendants, including those whose parent has ended."""
    pids = {worker.pid for worker in workers}
    running = psutil.Process().children(recursive=True)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([process for process in running if process.pid not in pids], 10)
    for worker in workers:
        worker.join(10)


def _work(function: Callable[[], object], environment: dict[str, str], parent: int) -> None:
    """Call a function in a new process; set its environment and stdin; reset signal handlers."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.getppid() != parent:
        return
    os.setsid()  # Ctrl-C in a terminal signals the launcher only
    os.environ.clear()
    os.environ.update(environment)
    prctl(PR_SET_NAME, f"rank {environment.get('RANK', '0')}".encode())  # ps -o comm shows it
    if environment.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # for pdb: multiprocessing has replaced stdin by an empty file
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
    import torch

    # torch read OMP_NUM_THREADS when it was imported, before the fork
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        function()
    except Exception as error:
        failures.report_once(error)
        raise
