"""The launcher of this process: rank, world size, where output goes, whether it still runs.

A launcher that is killed sends no signal, so each of its processes watches the pipe that Python's
multiprocessing holds to it, polls whether it is still its parent (torchrun has no pipe), and exits
if not: no orphan keeps training. A process that was started without a launcher outlives its shell.
Imports no torch, since a launcher may be killed while its processes import.
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
from typing import Any

from .files import open_own

LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
PREEMPTED = 75  # the exit code of a run that was stopped and saved: the same command continues it


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
    """Kill all descendants of this process, such as loader workers, which would outlive os._exit.

    Imports psutil here: a process may be ended while it imports.
    """
    with suppress(Exception):
        import psutil

        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def attempts() -> dict[str, int]:
    """Return the number of this attempt in each launch that this process belongs to, by its name.

    A launch starts the same command again with a higher number: the launcher and torchrun in place,
    Slurm when it requeues a job. accelerate launch of one process, and no launcher, never do.
    """
    names = os.environ
    launch, _, count = names.get(START, "").rpartition(".")
    found = {launch: count} if launch else {}
    restarts = names.get("TORCHELASTIC_RESTART_COUNT")
    if restarts and not launch:
        # <folder of this torchrun>/attempt_<n>/<local rank>/error.json; its run ID may be "none"
        folder = names.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0]
        found = {f"torchrun {socket.gethostname()} {folder or os.getppid()}": restarts}
    if job := names.get("SLURM_JOB_ID"):
        found |= {f"Slurm job {job}": names.get("SLURM_RESTART_COUNT") or "0"}
    return {name: int(count) for name, count in found.items()}


GARBAGE_OBJECTS = 10_000  # Python's own limit is 700 to 2,000


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn Python's garbage collector off for imports, a quarter of whose time it would take.

    Importing torch makes some 350,000 objects, nearly none of them garbage.
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
    """Keep Python's garbage collector from pausing ranks at different steps, for the block.

    Any rank that pauses delays all of them. So what exists now is not looked at again (a full
    collection would take a tenth of a second), records/recorder.py collects after the same step on
    all ranks, and between these calls a collection starts by itself only when the objects that were
    made, less those freed, exceed GARBAGE_OBJECTS: reference cycles made in every step stay
    bounded where records are rare.
    """
    limits = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(limits[0], GARBAGE_OBJECTS), *limits[1:])
    try:
        yield
    finally:
        gc.set_threshold(*limits)
        gc.unfreeze()  # C++ modules report what is left at the end as leaked


HELD_SECONDS = 30.0  # after a watchdog's limit, before it is taken for stuck itself


def stacks_file(logs: str, rank: int) -> Path:
    """Return the file in the log folder for the stacks of a rank that cannot report any more."""
    return Path(logs, f"stacks_{rank:05d}.txt")


START = "LAUNCH_START"  # the variable with the name of this start in starts.jsonl
NODES = "LAUNCH_NODES"  # the variable that says how many nodes take part: "3 of 4"
LOGS = "LAUNCH_LOGS"  # the variable with the folder into which this process writes its output
BLAMED = "BLAMED_NODES"  # the variable with a file for hosts to leave out, see slurm.sbatch
DRY_RUN = "LAUNCH_DRY_RUN"  # the variable that is set in a dry run, in which each check has a line
STDERR: list[int] = []  # a copy of the terminal's, once a log file has taken its place


def note_blamed(hosts: Iterable[str]) -> None:
    """Write down hosts that are at fault, for a scheduler that can leave them out of a next try."""
    if path := os.environ.get(BLAMED):
        with suppress(OSError), open_own(path, "ab") as file:
            file.write("".join(f"{host}\n" for host in hosts).encode())


def can_redraw() -> bool:
    """Return whether stdout is a terminal on which the last line can be drawn again."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say_that_it_imports() -> None:
    """Say on a terminal what the first seconds of a command are spent on."""
    if can_redraw():
        print("importing torch and the recipe", flush=True)


class _DroppingFile(io.FileIO):
    """A descriptor that drops what cannot be written: its reader may be gone, or its disk full."""

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        with suppress(OSError):
            while left:
                left = left[super().write(left) or len(left) :]  # None: it would block
        return len(data)


def never_fail_to_print() -> None:
    """Let no print of this process raise, whether its reader is gone or its encoding is ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # not where a test or a notebook has replaced it
            # not buffered: what is interrupted by a signal would be written again
            raw: Any = _DroppingFile(stream.fileno(), "w", closefd=False)
            how: Any = {"encoding": stream.encoding, "errors": "backslashreplace"}
            setattr(sys, name, io.TextIOWrapper(raw, **how, line_buffering=True))


class CopiedStream:
    """A text stream whose output is also written to a file."""

    def __init__(self, stream: Any, file: Any) -> None:
        self.stream = stream
        self.file = file

    def write(self, text: str) -> int:
        """Write to both: a full disk, or a terminal that was closed, must not end the run."""
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
    """Under the launcher, write the output of this process of a run to a file of its own.

    The terminal gets only what rank 0 prints, and a line for each of its warnings (exits.Warned);
    what it writes to stderr, and what other ranks write, goes to their files. What C code of rank 0
    writes to stdout (NCCL_DEBUG) is on the terminal only.
    """
    folder = os.environ.get(LOGS)
    if not folder:
        return
    rank = world()[1]
    try:
        file = open_own(os.path.join(folder, f"rank_{rank:05d}.log"), "ab", buffering=0)
    except OSError:  # a full disk: the start of the run says so
        return
    STDERR[:] = [os.dup(2)]
    _set_stderr(file.fileno())
    if rank == 0:
        sys.stdout = CopiedStream(sys.stdout, file)
    else:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        if isinstance(sys.stdout, io.TextIOWrapper):  # os._exit flushes nothing
            sys.stdout.reconfigure(line_buffering=True)


def _set_stderr(descriptor: int) -> None:
    sys.stderr.flush()
    os.dup2(descriptor, 2)


@contextmanager
def stderr_on_terminal() -> Iterator[None]:
    """Give stderr back to the terminal for the block, so that the bar of a download is seen."""
    log = os.dup(2)
    _set_stderr(STDERR[0])
    try:
        yield
    finally:
        _set_stderr(log)
        os.close(log)


POLL_SECONDS = 1.0
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
# After a stop signal in startup, how long a process may take to reach the loop, which saves. It
# may never reach it: a collective with a rank that has exited does not return.
REACH_LOOP_SECONDS = 30.0
SET_BY_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # accelerate, torchrun


class Launcher:
    """The parent of this process, if a launcher started it."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.ends_process = True  # False in the training loop, which saves first (StopRequest)
        self.leave_at = float("inf")  # time.monotonic()
        self.stop_signal = ""  # the name of the first signal that told this process to stop
        self._signals = -1  # a pipe that gets the number of each signal Python has a handler for
        self._pipe: list[int] = []  # readable once the parent has ended

    @property
    def is_gone(self) -> bool:
        """Return whether a launcher started this process and has ended."""
        return self.pid is not None and os.getppid() != self.pid

    def watch(self, pid: int | None = None) -> None:
        """Exit this process when the launcher has ended, or when a stop signal has no effect.

        Args:
            pid: of the launcher, which may have ended already; by default this process's parent.
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
                time.sleep(0.1)  # the kernel closes it before this process gets another parent
            if self._signals in readable and STOP_SIGNALS & set(os.read(self._signals, 4096)):
                self.leave_at = min(self.leave_at, time.monotonic() + REACH_LOOP_SECONDS)
        reason = "the launcher has exited" if self.is_gone else "told to stop before the first step"
        message = f"rank {os.environ.get('RANK', '0')}: {reason}, so this process exits\n"
        with suppress(OSError):  # the reader of stderr may be gone too
            os.write(2, message.encode())
        end_children()
        os._exit(1)


LAUNCHER = Launcher()
