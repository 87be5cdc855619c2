"""End a run that makes no progress: stacks, NCCL traces, exit."""

import ctypes
import faulthandler
import os
import signal
import struct
import sys
import threading
import time
import traceback
from contextlib import closing, suppress
from typing import Any

import torch
import torch.distributed
from torch.autograd import graph
from torch.cuda import streams
from torch.nn.parallel import distributed as ddp

from . import failures, step_sums
from .config import Config
from .files import open_own
from .process import HELD_SECONDS, LIBC, LOGS, end_children, process_name, stacks_file, world
from .run_folder import Run

# The watchdogs of other ranks, which check once a second, need this time to report too: when this
# process exits, its launcher ends them.
ABORT_WAIT_SECONDS = 5.0
# A process whose innermost frame is in one of these modules or packages waits for other ranks.
WAITING = (torch.distributed, ddp, graph, streams, step_sums)
WAITING_FILES = tuple(
    file for module in WAITING for file in getattr(module, "__path__", [module.__file__])
)


class LastResort:
    """End this process if the watchdog cannot run because C code holds Python's lock (the GIL).

    A kernel timer sends SIGVTALRM twice, unless the timer is set again before that. The first
    signal only removes the signal's handler (System V semantics); the second finds no handler and
    ends the process. While a process is suspended (Ctrl-Z, a scheduler), the kernel keeps only one
    signal, so a suspension never ends the process. Shortly before the end, stacks are written to a
    file in the log folder or, without one, to stderr. A suspension may cause stacks to be written
    too; `set` then removes them. Without glibc, faulthandler ends the process, and suspended time
    counts too.
    """

    def __init__(self, rank: int) -> None:
        self.timer = ctypes.c_void_p()
        self.has_timer = hasattr(LIBC, "sysv_signal") and hasattr(LIBC, "timer_create")
        if self.has_timer:  # struct sigevent: SIGEV_SIGNAL is 0, CLOCK_MONOTONIC 1
            event = struct.pack("Pii48x", 0, signal.SIGVTALRM, 0)
            LIBC.timer_create(1, event, ctypes.byref(self.timer))
        self.dumps_at = float("inf")
        self.stacks: Any = 2
        with suppress(KeyError, OSError):  # without the launcher; on a full disk
            self.stacks = stacks_file(os.environ[LOGS], rank).open("ab")

    def set(self, seconds: float) -> None:
        """End this process after `seconds`; a suspension may count as up to half of them."""
        if self.has_timer:  # first: what follows may fail, and the earlier setting must not stay
            LIBC.sysv_signal(signal.SIGVTALRM, LIBC.abs)  # a function that does nothing
            half = int(seconds / 2), int(seconds / 2 % 1 * 1e9)  # seconds, nanoseconds
            LIBC.timer_settime(self.timer, 0, struct.pack("4l", *half, *half), None)
        dumps_before, self.dumps_at = self.dumps_at, time.monotonic() + 0.9 * seconds
        if time.monotonic() > dumps_before and self.stacks != 2:
            self.stacks.truncate(0)
        faulthandler.dump_traceback_later(0.9 * seconds, exit=not self.has_timer, file=self.stacks)

    def close(self) -> None:
        """Cancel the timer, and remove the file for the stacks."""
        faulthandler.cancel_dump_traceback_later()
        if self.has_timer:
            LIBC.timer_delete(self.timer)
        if self.stacks != 2:
            self.stacks.close()
            os.unlink(self.stacks.name)


class Watchdog:
    """End this process when it has made no progress for too long, and report where it stalled.

    The long limit applies to startup, saves, each micro-batch of an evaluation and the end of a
    run, and also to a step that follows startup, a save or an evaluation. The short limit applies
    to all other steps. Time in which the process was suspended (Ctrl-Z) does not count; when pdb
    waits for a command, the count starts at 0 again. The limit does not depend on the backend, so a
    loader or storage that hangs is noticed too.
    """

    def __init__(self, run: Run) -> None:
        name_nccl_traces(run.config)
        options = run.config.distributed
        self.run = run
        self.short = options.timeout_seconds
        self.long = max(self.short, options.startup_timeout_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(LastResort(self.run.rank)) as last_resort:
            waited, interval, before = 0.0, min(1.0, self.short / 4), self.run.progress_time
            while not self._ended.wait(interval):
                progress_time = self.run.progress_time
                has_progress, before = progress_time != before, progress_time
                waited = 0.0 if has_progress or is_in_debugger() else waited + interval
                limit = self.short if self.run.is_stepping else self.long
                # OSError: the storage of the log fails; RuntimeError: no thread can be started
                with suppress(OSError, RuntimeError):
                    last_resort.set(limit + HELD_SECONDS)
                if waited >= limit:
                    self._abort(waited)

    def _abort(self, waited: float) -> None:
        try:
            self._report(waited)
        finally:  # even if the report fails
            end_children()
            os._exit(1)

    def _report(self, waited: float) -> None:
        main = sys._current_frames()[threading.main_thread().ident or 0]
        frames = failures.frames_in(traceback.extract_stack(main))
        at = failures.own_frame(frames) or frames[-1]
        waits = world()[0] > 1 and waits_for_others(frames[-1].file)
        place = f"{at.function} ({at.file}, line {at.line})"
        state = "waits for other ranks" if waits else "stalled"
        failure = failures.record(
            reason=f"no progress for {waited:.0f} s; {state} at {place}",
            cause="waiting" if waits else "stalled",
            frames=frames,
            details=stacks(),
        )
        report = f"{process_name()}: {failure.reason}\n{failure.details}"
        print_safely(report)
        failure = self.run.record_error(failure)
        self.run.fail(failure)
        save_nccl_trace(self.run)
        if world()[0] > 1:
            time.sleep(ABORT_WAIT_SECONDS)


def print_safely(text: str) -> None:
    """Print to stderr, whose reader may be gone or whose disk may be full."""
    with suppress(OSError):
        print(text, file=sys.__stderr__, flush=True)


def waits_for_others(file: str) -> bool:
    """Return whether a process whose innermost frame is in this file waits for other ranks."""
    return any(file == path or file.startswith(f"{path}{os.sep}") for path in WAITING_FILES)


def is_in_debugger() -> bool:
    """Return whether the main thread waits for a command in pdb or a debugger derived from it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        if frame.f_code.co_name == "interaction" and frame.f_globals.get("__name__") == "pdb":
            return True
        frame = frame.f_back
    return False


def stacks() -> str:
    """Return the Python stacks of all other threads as text, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != threading.get_ident()
    )


def name_nccl_traces(config: Config) -> None:
    """Set the path prefix of the files to which NCCL writes its last collectives if one fails."""
    trace = config.folder.absolute() / "errors" / "nccl_trace_rank_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(trace))


def save_nccl_trace(run: Run) -> None:
    """Write the content of NCCL's flight recorder as JSON; do nothing without NCCL."""
    distributed = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(distributed, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_available():
        return
    try:
        trace = dump(includeCollectives=True, onlyActive=False)
        path = run.folder / "errors" / f"nccl_trace_rank_{run.rank:05d}.json"
        with open_own(path, "wb") as file:
            file.write(trace if isinstance(trace, bytes) else str(trace).encode())
    except (OSError, RuntimeError, TypeError) as error:
        print_safely(f"{process_name()}: no NCCL trace: {error}")
