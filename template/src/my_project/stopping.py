"""Preemption, the watchdog, and failure reports. Early stopping is in state.py.

runs/<run_name>/errors/ gathers, for all nodes, one file for each rank that failed.
"""

import faulthandler
import fcntl
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import psutil
import torch

from . import failures
from .config import Config, ConfigError, seconds_of
from .files import wait_until
from .process import LAUNCHER
from .run_folder import Run
from .safety.redaction import mask
from .stack_traces import current_line, is_in_debugger, stacks
from .state import NotFiniteError

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SECOND_SIGNAL_AFTER_SECONDS = 5.0  # seconds
REPORT_WAIT_SECONDS = 2.0  # seconds
ABORT_WAIT_SECONDS = 5.0  # seconds; their watchdogs look once a second


# ---- preemption ----------------------------------------------------------------------------------
class StopRequest:
    """A request to stop, made by a signal, by config.stop_after or by the end of the launcher.

    The loop votes for a stop in the step's all-reduce, so all ranks exit after the same step. A
    second signal ends the process at once; it counts only 5 s after the first, since launchers pass
    on to their workers what the terminal or the scheduler has sent them already.
    """

    def __init__(self, config: Config) -> None:
        self.reason = ""
        self._first: float | None = None  # when the first signal came
        self._stop_after = config.stop_after
        self._stop_at = float("inf")
        if config.stop_after:
            # since the start of the process, before the imports; by a clock that nobody can set
            age = time.time() - psutil.Process().create_time()
            self._stop_at = time.monotonic() - age + seconds_of(config.stop_after)
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether this process has been asked to stop."""
        if not self.reason and time.monotonic() > self._stop_at:
            self.reason = f"stop_after {self._stop_after} has elapsed"
        if not self.reason and LAUNCHER.is_gone:
            self.reason = "the launcher has exited"
        return bool(self.reason)

    def loop_begins(self) -> None:
        """From now on, save before exiting when the launcher has exited."""
        LAUNCHER.ends_process = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._first is None:
            self.reason = self.reason or name
            self._first = time.monotonic()
            note = f"{name}: will save and exit after this step; again in 5 s to exit at once\n"
            os.write(2, note.encode())  # print may be what was interrupted
        elif time.monotonic() - self._first > SECOND_SIGNAL_AFTER_SECONDS:
            raise KeyboardInterrupt(f"second signal, {name}")

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            numbers = SIGNALS
            # sent by a closed terminal (ignored under nohup), or forwarded by torchrun
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            if not is_ignored or "TORCHELASTIC_RUN_ID" in os.environ:
                numbers += (signal.SIGHUP,)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        LAUNCHER.leave_at = float("inf")
        LAUNCHER.ends_process = True
        for number, handler in self._before.items():
            signal.signal(number, handler)


# ---- the watchdog --------------------------------------------------------------------------------
class Watchdog:
    """End this process, and report where it stalled, when it has made no progress for too long.

    The long limit holds for startup, evaluations, saves and the end of a run; the short one for
    steps, once one has been completed since. Time in which the process was stopped (Ctrl-Z) or
    waited for a command to pdb does not count. The limit does not depend on the backend, so a
    loader or storage that hangs is noticed too.
    """

    def __init__(self, run: Run) -> None:
        options = run.config.distributed
        self.run = run
        self.short = options.timeout_seconds
        self.long = max(self.short, options.startup_timeout_seconds)
        self.limit = self.long
        self._has_progress = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def step_done(self) -> None:
        """Note that a step has been completed."""
        self._has_progress = True
        self.limit = self.short

    def allow_long_limit(self) -> None:
        """Allow the long limit until a step has been completed."""
        self._has_progress = True
        self.limit = self.long

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        waited, interval = 0.0, min(1.0, self.short / 4)
        while not self._ended.wait(interval):
            waited = 0.0 if self._has_progress or is_in_debugger() else waited + interval
            self._has_progress = False
            # If C code holds the GIL, this thread cannot run, but faulthandler's own thread can.
            faulthandler.dump_traceback_later(self.limit + 30, exit=True, file=2)
            if waited >= self.limit:
                self._abort(waited)

    def _abort(self, waited: float) -> None:
        no_progress = f"no progress for {waited:.0f} s"
        place, waits = current_line(sys._current_frames()[threading.main_thread().ident or 0])
        stack = stacks()
        print(
            f"{self.run.process_label}: {no_progress}; this process stalled at {place}\n{stack}",
            file=sys.__stderr__,
            flush=True,
        )
        waits &= len(self.run.hosts) > 1
        state = "waits for other ranks" if waits else "stalled"
        main = sys._current_frames()[threading.main_thread().ident or 0]
        frames = [
            failures.frame(f.filename, f.lineno or 0, f.name, f.line or "")
            for f in traceback.extract_stack(main)
        ]
        self.run.record_error(
            failures.record(
                reason=f"{no_progress}; {state} at {place}",
                cause="waiting" if waits else "stalled",
                frames=frames,
                details=stack,
            )
        )
        save_nccl_trace(self.run)
        fail_with_cause(self.run, no_progress, ABORT_WAIT_SECONDS)
        os._exit(1)


def turn_on_flight_recorder(config: Config) -> None:
    """Let NCCL keep its last collectives in memory, and write them when one takes too long."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    trace = config.folder.absolute() / "errors" / "nccl_trace_rank_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(trace))


def save_nccl_trace(run: Run) -> None:
    """Write what the flight recorder holds, as JSON; nothing where there is no NCCL."""
    distributed = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(distributed, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_available():
        return
    try:
        trace = dump(includeCollectives=True, onlyActive=False)
        path = run.folder / "errors" / f"nccl_trace_rank_{run.rank:05d}.json"
        path.write_bytes(trace if isinstance(trace, bytes) else str(trace).encode())
    except (OSError, RuntimeError, TypeError) as error:
        print(f"{run.process_label}: no NCCL trace: {error}", file=sys.__stderr__, flush=True)


# ---- failures ------------------------------------------------------------------------------------
# by torch's DataLoader: when its queue fails, or from the signal of a child that has ended
WORKER_EXITED = re.compile(r"DataLoader worker .*(exited unexpectedly|killed by signal: Killed)")
LOST_CONTACT = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


@contextmanager
def failures_recorded(run: Run) -> Iterator[None]:
    """Record the exception that ends the run, with rank, host and step, and raise it again."""
    try:
        try:
            yield
        except BaseException:
            ignore_ended_workers()
            raise
    except ConfigError as error:
        run.record_error(failures.record_of(error))
        setattr(error, "is_reported", True)  # noqa: B010 - see failures.report_once
        run.fail(str(error))
        raise
    except torch.OutOfMemoryError as error:
        error.add_note(
            "Lower batches.micro_batch_size: accumulation rises to match, so the curve is the same."
        )
        _record(run, error, "out of memory")
        raise
    except BaseException as error:
        if isinstance(error, SystemExit):
            place = traceback.extract_tb(error.__traceback__)[-1]
            error.add_note(f"(called in {place.filename}, line {place.lineno})")
        if not isinstance(error, GeneratorExit):
            _record(run, error)
        raise


def ignore_ended_workers() -> None:
    """Take torch's SIGCHLD handler out, which raises for each loader worker that has died.

    The signal often comes after the queue has failed: the handler would raise in the middle of the
    report, and the record of why the run failed would be lost.
    """
    while True:
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
        except RuntimeError:  # by that handler: the signal came just now
            continue


def _record(run: Run, error: BaseException, cause: str = "") -> None:
    reason = failures.reason_of(error)
    # torch raises RuntimeErrors; a ConnectionError is a loader worker's or the user's
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_CONTACT)
    if lost:
        cause = "lost contact"
        reason = f"lost contact with another process ({str(error).split('. ')[0]})"
    elif isinstance(error, NotFiniteError):
        cause = "not finite"
        reason = str(error)
    elif _is_of_multiprocessing(error) or WORKER_EXITED.search(str(error)):
        cause = "loader worker"
        reason = f"a loader worker exited, perhaps killed for lack of memory ({reason})"
    failure = failures.record_of(error, cause=cause) | {"reason": mask(reason)}
    if cause == "not finite":  # where the loop noticed it says nothing
        failure["frames"] = []
    run.record_error(failure)
    setattr(error, "is_reported", True)  # noqa: B010
    if lost and run.hosts:
        fail_with_cause(run, reason, REPORT_WAIT_SECONDS)
    else:
        run.fail(reason)


def _is_of_multiprocessing(error: BaseException) -> bool:
    """Return whether the connection to a loader worker broke, or its socket has gone with it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) or not frames:
        return False
    return os.path.basename(os.path.dirname(frames[-1].filename)) == "multiprocessing"


def fail_with_cause(run: Run, reason: str, seconds: float) -> None:
    """Record a failure that another rank may have caused, and name that rank as far as is known.

    Some ranks notice only when others exit, so later reports are more complete. One rank at a time
    reads the error files: if each read all of them, N ranks would read N^2 files at every poll. The
    others wait for what it writes.
    """
    reason = mask(reason)
    # at once: there may be little time
    run.fail(reason, unexplained=f"{run.process_label}: {reason}")
    if not run.hosts:  # not connected yet
        return

    def is_explained() -> bool:
        status = run.status()
        is_failed = status.get("outcome") == "failed"  # a full disk may still say running
        return is_failed and status.get("reason") != status.get("unexplained")

    cause = _look_for_cause(run, seconds)
    if not cause and not wait_until(is_explained, seconds + 1, poll_seconds=0.5):
        cause = _look_for_cause(run, seconds)  # the rank that looked has been killed
    if not cause:
        status = run.status()
        cause = status.get("reason", "").removeprefix(f"{status.get('unexplained')}. ")
    print(f"{run.process_label}: {reason}. {cause}", file=sys.__stderr__, flush=True)


def _look_for_cause(run: Run, seconds: float) -> str:
    """Write the likely cause into the status, and return it; "" if another rank is looking."""
    cause = ""
    seen = -1
    # Again if a rank has reported since: it may have found that this one was still looking.
    while not cause or len(run.errors()) > seen:
        with looking_alone(run) as is_alone:
            if not is_alone:
                break
            wait_until(lambda: len(run.errors()) >= len(run.hosts), seconds, poll_seconds=0.1)
            reports = run.errors()
            seen = len(reports)
            cause = likely_cause(run, reports)
            status = run.status()
            if first := status.get("unexplained"):
                step = status.get("step", run.step)
                run.write_status("failed", f"{first}. {cause}", step=step, unexplained=first)
    return cause


@contextmanager
def looking_alone(run: Run) -> Iterator[bool]:
    """Yield whether this rank alone looks at the error files; a lock ends with its process."""
    is_alone = os.environ.get("LOCAL_RANK", "0") == "0"  # on a file system without locks
    with ExitStack() as opened:
        try:
            file = opened.enter_context((run.folder / "errors" / ".looking").open("a"))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except (BlockingIOError, PermissionError):
            is_alone = False
        except OSError:
            logger.debug("no file locks in %s", run.folder)
        yield is_alone


def likely_cause(run: Run, reports: dict[int, dict[str, Any]]) -> str:
    """Name the ranks to look at: those without a report, or those that wait for no other.

    Args:
        run: the run folder.
        reports: the error files of this launch, by rank.
    """
    names = [f"rank {rank} on {host}" for rank, host in enumerate(run.hosts)]
    if silent := [name for rank, name in enumerate(names) if rank not in reports]:
        return f"No report from {', '.join(silent)}: killed, stopped or cut off; look there first."
    stalled = [rank for rank in sorted(reports) if reports[rank]["cause"] == "stalled"]
    if 0 < len(stalled) < len(names):
        places = {rank: reports[rank]["reason"].partition("stalled at ")[2] for rank in stalled}
        found = "; ".join(f"{names[rank]} stalled at {places[rank]}" for rank in stalled)
        return f"Likely cause, for which the other ranks wait: {found}."
    return f"Every rank has reported: see {run.folder / 'errors'}."
