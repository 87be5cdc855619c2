"""The process and its launcher: rank, world size, where output goes, when the launcher ends.

A launcher that is killed sends no signal. So each of its processes watches the pipe that Python's
multiprocessing keeps open to the launcher, polls whether the launcher is still its parent (torchrun
has no pipe), and exits if it is not: no orphan keeps training. A process that was started without a
launcher does not watch its parent. This module does not import torch, since the launcher may be
killed during that import.
"""

import ctypes
import gc
import io
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from .files import open_own

LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
PREEMPTED = 75  # the exit code of a run that saved and stopped: the same command continues it


def world() -> tuple[int, int]:
    """Return (world_size, rank) from the launcher's variables; needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def process_name() -> str:
    """Return the rank and host of this process; needs no process group."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"


PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def prctl(option: int, value: int | bytes) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if LIBC:
        LIBC.prctl(option, value)


def end_children() -> None:
    """Kill all descendants of this process: loader workers, for example, outlive os._exit."""
    with suppress(Exception):
        import psutil  # not at the top: importing psutil would delay the watch over the launcher

        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def attempts() -> dict[str, int]:
    """Return attempt numbers by launch name: of our launcher or torchrun, and of the Slurm job.

    A number rises when our launcher or torchrun restarts the command in place, and when Slurm
    requeues the job. Outside Slurm, the result is empty if there is no launcher, or if `accelerate
    launch` has started only one process, which it does without torchrun.
    """
    environment = os.environ
    launch, _, count = environment.get(START, "").rpartition(".")
    numbers = {launch: count} if launch else {}
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT")
    if restarts and not launch:
        # <folder of this torchrun>/attempt_<n>/<local rank>/error.json; TORCHELASTIC_RUN_ID may be
        # "none", which names no launch
        folder = environment.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0]
        numbers = {f"torchrun {socket.gethostname()} {folder or os.getppid()}": restarts}
    if job := environment.get("SLURM_JOB_ID"):
        numbers |= {f"Slurm job {job}": environment.get("SLURM_RESTART_COUNT") or "0"}
    return {name: int(number) for name, number in numbers.items()}


GARBAGE_OBJECTS = 10_000  # Python's own threshold is 700 to 2,000


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn Python's garbage collector off for imports, where it would take a quarter of the time.

    Importing torch creates some 350,000 objects, and almost none of them is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def garbage_collected_at_records() -> Iterator[None]:
    """Keep Python's garbage collector from pausing ranks at different steps of the block.

    A rank that pauses delays all ranks. So objects that exist now are not examined again (a full
    collection would take a tenth of a second), and records/recorder.py collects after the same step
    on all ranks. Between records, Python starts a collection only when the number of objects
    created, minus the number freed, exceeds GARBAGE_OBJECTS. If records are rare, these collections
    limit the number of reference cycles, which each step leaves.
    """
    limits = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(limits[0], GARBAGE_OBJECTS), *limits[1:])
    try:
        yield
    finally:
        gc.set_threshold(*limits)
        gc.unfreeze()  # otherwise C++ modules report frozen objects as leaked at exit


# How long the watchdog may take to act once its limit has passed. If it takes longer, C code holds
# the GIL.
HELD_SECONDS = 30.0


def stacks_file(logs: str, rank: int) -> Path:
    """Return the file in the log folder for the stacks of a rank that can no longer report."""
    return Path(logs, f"stacks_{rank:05d}.txt")


# Environment variables.
START = "LAUNCH_START"  # the name of this start in starts.jsonl
NODES = "LAUNCH_NODES"  # how many nodes take part, such as "3 of 4"
LOGS = "LAUNCH_LOGS"  # the folder for the output of this process
CODE = "LAUNCH_CODE"  # a hash of the code that the launcher imported, and that its forks run
BLAMED = "BLAMED_NODES"  # a file for the names of hosts at fault (launch/slurm.sbatch)
DRY_RUN = "LAUNCH_DRY_RUN"  # set in a dry run, in which each check prints a line

STDERR: list[int] = []  # a copy of the original descriptor 2, once a log file has replaced it


def note_blamed(hosts: Iterable[str]) -> None:
    """Write the names of hosts at fault to a file: a scheduler can leave them out of a retry."""
    if path := os.environ.get(BLAMED):
        with suppress(OSError), open_own(path, "ab") as file:
            file.write("".join(f"{host}\n" for host in hosts).encode())


def can_redraw() -> bool:
    """Return whether stdout is a terminal on which the last line can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class _DroppingFile(io.FileIO):
    """A file that drops data that cannot be written: its reader may be gone, or its disk full."""

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        with suppress(OSError):
            while left:
                left = left[super().write(left) or len(left) :]  # None: the write would block
        return len(data)


def never_fail_to_print() -> None:
    """Keep print from raising an error if the reader is gone or the encoding is ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # a test or a notebook may have replaced it
            # unbuffered: if a signal interrupted the writing of a buffer, it would be written twice
            raw = _DroppingFile(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


class CopiedStream:
    """A text stream whose output is also written to a file."""

    def __init__(self, stream: TextIO, file: IO[bytes]) -> None:
        self.stream = stream
        self.file = file

    def write(self, text: str) -> int:
        """Write to file and stream; a full disk or a closed terminal must not end the run."""
        with suppress(OSError):
            self.file.write(text.encode(errors="replace"))
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def write_logs() -> None:
    """Write the output of this process to its own log file, if it runs under the launcher.

    The terminal shows only what rank 0 prints, and a line for each warning of rank 0
    (exits.Warned). The stderr of rank 0 and all output of the other ranks go to their log files
    only, except for the progress bars of prepare_data (stderr_on_terminal). What C code of rank 0
    writes to stdout (NCCL_DEBUG) goes to the terminal only.
    """
    folder = os.environ.get(LOGS)
    if not folder:
        return
    rank = world()[1]
    try:
        file = open_own(os.path.join(folder, f"rank_{rank:05d}.log"), "ab", buffering=0)
    except OSError:  # a full disk, which the start of the run reports
        return
    STDERR[:] = [os.dup(2)]
    _set_stderr(file.fileno())
    if rank == 0:
        sys.stdout = CopiedStream(sys.stdout, file)
    else:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        if isinstance(sys.stdout, io.TextIOWrapper):  # line by line, since os._exit flushes nothing
            sys.stdout.reconfigure(line_buffering=True)


def _set_stderr(descriptor: int) -> None:
    sys.stderr.flush()
    os.dup2(descriptor, 2)


@contextmanager
def stderr_on_terminal() -> Iterator[None]:
    """Send stderr to the terminal for the block, so that a download's progress bar is shown."""
    log = os.dup(2)
    _set_stderr(STDERR[0])
    try:
        yield
    finally:
        _set_stderr(log)
        os.close(log)


POLL_SECONDS = 1.0
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
# How long a process that gets a stop signal during startup may take to reach the loop, which saves.
# It may never reach the loop: a collective with a rank that has exited does not return.
REACH_LOOP_SECONDS = 30.0
# Set by accelerate and torchrun. Users may export accelerate's other variables, such as that of the
# precision, so those do not show that a launcher has started this process.
SET_BY_LAUNCHERS = ("ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID")


class Launcher:
    """The parent of this process, if a launcher started it."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.ends_process = True  # False in the training loop, which saves first (StopRequest)
        self.leave_at = float("inf")  # time.monotonic() at which to exit after a stop signal
        self.stop_signal = ""  # the name of the first signal that told the run to stop
        self._signals = -1  # the pipe into which Python writes the number of each handled signal
        self._pipe: list[int] = []  # the pipe to the parent: readable once the parent has ended

    @property
    def is_gone(self) -> bool:
        """Return whether a launcher started this process and has ended."""
        return self.pid is not None and os.getppid() != self.pid

    def watch(self, pid: int | None = None) -> None:
        """Exit this process when the launcher has ended, or when one of STOP_SIGNALS has no effect.

        Args:
            pid: the pid of the launcher, which may have ended already; by default, the parent's.
        """
        if self.pid is None and any(name in os.environ for name in SET_BY_LAUNCHERS):
            self.pid = pid or os.getppid()
            parent = multiprocessing.parent_process()
            self._pipe = [parent.sentinel] if parent else []
            # signal handlers run in the main thread, which a collective may block
            self._signals, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while not (self.ends_process and (self.is_gone or time.monotonic() > self.leave_at)):
            readable, _, _ = select.select([self._signals, *self._pipe], [], [], POLL_SECONDS)
            if self._pipe and self._pipe[0] in readable:
                self._pipe = []
                time.sleep(0.1)  # the kernel closes the pipe before it changes the parent
            if self._signals in readable and STOP_SIGNALS & set(os.read(self._signals, 4096)):
                self.leave_at = min(self.leave_at, time.monotonic() + REACH_LOOP_SECONDS)
        reason = "the launcher has exited" if self.is_gone else "told to stop before the first step"
        message = f"rank {os.environ.get('RANK', '0')}: {reason}, so this process exits\n"
        with suppress(OSError):  # the reader of stderr may be gone too
            os.write(2, message.encode())
        end_children()
        os._exit(1)


LAUNCHER = Launcher()
