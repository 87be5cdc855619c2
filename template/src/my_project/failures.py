"""Error files: a process that fails writes one, which the launcher and the tools read.

docs/run-folder.md describes its fields. The file is written to <run folder>/errors/. Under the
launcher it is also written to the log folder of the launch and to a temporary folder: both exist
before the run folder is open. In the log folder, the error file of a later start replaces it.
Another file is written for torchrun, whose summary shows the first failure.
"""

import errno
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing import shared_memory, synchronize
from pathlib import Path
from typing import NoReturn

from .files import ConfigError, Json, write_atomically
from .process import LAUNCHER, LOGS, START, world
from .safety.redaction import mask
from .words import say, short_path

FOLDER = "LAUNCH_ERRORS"  # the variable with the folder from which the launcher reads error files
CONSEQUENCES = ("lost contact", "waiting")  # causes that follow from the failure of another rank
OUT_OF_MEMORY = ("out of memory", "out of host memory")  # on the device; on the host
LATE_SECONDS = 2.0  # tolerance in `late`: more than the watchdog's interval of one second
# A frame in the message of an exception that a loader worker has passed on.
FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)(?:\n    (\S.*))?')
WORKER_TRACEBACK = "Original Traceback (most recent call last):"
# The messages of libraries, by cause, for errors whose type and errno do not identify the cause.
SENTENCES = {
    # torch's tensors and NCCL's buffers in /dev/shm
    "full shared memory": re.compile(
        r"file </torch_.*\(28\)|out of shared memory|creating shared memory segment"
    ),
    # gloo, when the sizes of tensors differ between ranks
    "mismatched collectives": re.compile("collective mismatch"),
    # safetensors, which passes on only the text of the error
    "full disk": re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b"),
    # the second message is torch's, when a loader worker passes on a tensor
    "too many open files": re.compile("Too many open files|received 0 items of ancdata"),
    # CUDA and its libraries; torch's allocator raises OutOfMemoryError
    "out of memory": re.compile(
        r"(CUDA|HIP) (error: )?out of memory"
        r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(\w+_DEVICE_)?ALLOC(ATION)?_FAILED"
    ),
    "device error": re.compile("device-side assert|illegal memory access|CUDA error"),
    # torch's allocator for the CPU, fork, and C++
    "out of host memory": re.compile("[Cc]an(no|')t allocate memory|std::bad_alloc"),
    # torch's DataLoader, when its queue fails or a signal has killed a child
    "loader worker": re.compile("DataLoader worker .*(exited unexpectedly|killed by signal)"),
    # gloo and NCCL
    "lost contact": re.compile("gloo/transport|Connection (closed|reset) by peer|NCCL"),
}
TYPES = {  # causes by the name of the exception's type, since this module imports no torch
    "NotFiniteError": "not finite",
    "KeyboardInterrupt": "stopped",
    "MemoryError": "out of host memory",
    "OutOfMemoryError": "out of memory",
    **dict.fromkeys(("DistStoreError", "DistNetworkError", "DistBackendError"), "lost contact"),
}
FULL_DISK = ("ENOSPC", "EDQUOT")
PYTHON = ("<", os.path.dirname(os.__file__))  # prefixes of the paths of Python's own files
PACKAGE_FOLDER = os.path.dirname(__file__)
INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame of a traceback or stack."""

    file: str
    line: int
    function: str
    code: str = ""
    library: str | None = None  # the installed package that the file belongs to; None: the user's

    @property
    def place(self) -> str:
        """Return the frame as text, such as "a.py, line 3, in loss: x = 1"."""
        place = f"{short_path(self.file)}, line {self.line}, in {self.function}"
        return f"{place}: {self.code}" if self.code else place


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The content of an error file; docs/run-folder.md describes the fields."""

    rank: int
    host: str
    step: int | None = None
    launch: str = ""
    time: float
    progress_time: float | None = None
    reason: str
    cause: str
    at: Frame | None = None
    signal: str | None = None
    errno: str | None = None
    exit_code: int
    attempt: int = 0
    next_micro_batch_size: int | None = None  # the size that the launcher tries next
    frames: tuple[Frame, ...] = ()
    details: str = ""
    # None unless the cause is "not finite"
    skipped_from: int | None = None
    skipped_to: int | None = None
    num_items: float | None = None
    loss_is_finite: bool | None = None
    source: Path | None = None  # the error file that was read; not a field of that file

    def to_json(self) -> dict[str, Json]:
        """Return the content of the error file."""
        content = asdict(self)
        del content["source"]
        return content

    @property
    def idle_seconds(self) -> float:
        """Return how long the rank had made no progress when it failed, by its host's clock."""
        return self.time - (self.progress_time or self.time)


# ---- the root cause ------------------------------------------------------------------------------
def first_failure(failures: list[Failure]) -> Failure | None:
    """Return the failure that most likely caused the others; None if there are none.

    If all ranks skipped too many steps, prefer the failure of a rank whose own loss was not finite.

    Args:
        failures: the failures of one launch.
    """
    failures = sorted(failures, key=lambda failure: failure.time)
    roots = [failure for failure in failures if failure.cause not in CONSEQUENCES]
    roots.sort(key=lambda failure: (failure.cause == "stopped", bool(failure.loss_is_finite)))
    return next(iter(roots or late(failures) or failures), None)


def late(failures: list[Failure]) -> list[Failure]:
    """Return the failures of ranks that lost contact after others had given up waiting for them.

    Such a rank was suspended or cut off. It made no progress for longer than its watchdog allows,
    but the watchdog did not end it, since it counts only the time during which the rank ran.
    """
    waited = [failure.idle_seconds for failure in failures if failure.cause == "waiting"]
    limit = max(waited, default=float("inf")) + LATE_SECONDS
    lost = [failure for failure in failures if failure.cause == "lost contact"]
    return [failure for failure in lost if failure.idle_seconds > limit]


# ---- frames --------------------------------------------------------------------------------------
def library_of(file: str) -> str | None:
    """Return the name of the installed package or module that a file belongs to.

    Return None for a file of the user, and "python" for one of Python itself.
    """
    if file.startswith(PACKAGE_FOLDER + os.sep):
        return None
    if match := INSTALLED.search(file):
        return match[1]
    return "python" if file.startswith(PYTHON) else None


def exception_frames(error: BaseException) -> list[Frame]:
    """Return the frames of an exception; if it comes from a loader worker, the worker's frames."""
    message = str(error)
    if frames := FRAME.findall(message.partition(WORKER_TRACEBACK)[2]):
        return [frame_at(file, int(line), name, code) for file, line, name, code in frames]
    return frames_in(traceback.extract_tb(error.__traceback__))


def frame_at(file: str, line: int, function: str, code: str = "") -> Frame:
    """Return a frame, with the library that its file belongs to."""
    library = library_of(file)
    return Frame(file=file, line=line, function=function, code=code.strip(), library=library)


def frames_in(stack: traceback.StackSummary) -> list[Frame]:
    """Return the frames of a traceback or stack."""
    return [frame_at(f.filename, f.lineno or 0, f.name, f.line or "") for f in stack]


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame that is not in a library."""
    return next((frame for frame in reversed(frames) if not frame.library), None)


def exception_reason(error: BaseException) -> str:
    """Return an exception and its notes in one line; if a loader worker failed, its exception."""
    message = str(error)
    if WORKER_TRACEBACK in message:
        # the message begins at the last line that starts with the type, and may have several lines
        raised = re.search(r"(?s)Caught (\w+) .*\n(?:[\w.]+\.)?(\1\b.*)", message)
        message = raised[2] if raised else message.strip().splitlines()[-1]
        message = message.removeprefix(f"{type(error).__name__}: ") + " (in a loader worker)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    for note in getattr(error, "__notes__", []):
        text = f"{text.removesuffix('.')}. {note}"
    return " ".join(text.split())


def exception_cause(error: BaseException) -> str:
    """Return the cause of an exception, as error files name it."""
    if isinstance(error, ConfigError):
        return "setting"
    for kind in type(error).__mro__:
        if kind.__name__ in TYPES:
            return TYPES[kind.__name__]
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""  # the file that raised it
    if errno_name(error) in FULL_DISK:
        is_shared = file in (synchronize.__file__, shared_memory.__file__)  # these use /dev/shm
        return "full shared memory" if is_shared else "full disk"
    if errno_name(error) in ("EMFILE", "ENFILE"):
        return "too many open files"
    is_multiprocessing = os.path.dirname(file) == os.path.dirname(synchronize.__file__)
    if is_multiprocessing and isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        return "loader worker"  # the connection to a worker broke, or its socket is gone
    causes = (cause for cause, pattern in SENTENCES.items() if pattern.search(str(error)))
    cause = next(causes, "exception")
    # when torch loses contact, it raises a RuntimeError; a ConnectionError is the user's
    is_users_error = cause == "lost contact" and not isinstance(error, RuntimeError)
    return "exception" if is_users_error else cause


def is_transient(error: BaseException | None) -> bool:
    """Return whether the network or a disk was the cause, so that a retry may succeed."""
    names, numbers, seen = set(), set(), set()
    while error and id(error) not in seen:  # a chain may be a cycle
        seen.add(id(error))
        names |= {kind.__name__ for kind in type(error).__mro__}
        numbers.add(getattr(error, "errno", None))
        error = error.__cause__ or error.__context__
    libraries = {"ConnectError", "Timeout", "TimeoutException", "LocalEntryNotFoundError"}
    is_network = bool(names & (libraries | {"ConnectionError", "TimeoutError"}))
    is_network &= "OfflineModeIsEnabled" not in names
    return is_network or bool(numbers & {errno.EIO, errno.ESTALE})


def errno_name(error: BaseException) -> str | None:
    """Return the name of the errno of an exception or of its cause, such as ENOSPC."""
    number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
    return errno.errorcode.get(number) if isinstance(number, int) else None


# ---- error files ---------------------------------------------------------------------------------
def exception_failure(error: BaseException) -> Failure:
    """Return an exception as a failure; run_folder.py adds the step and the start."""
    cause, reason = exception_cause(error), exception_reason(error)
    if cause in ("setting", "not finite"):
        reason = str(error)
    elif cause == "lost contact":
        reason = f"lost contact with another process ({str(error).split('. ')[0]})"
    elif cause == "loader worker":
        # torch may name the signal or the exit code only in the cause
        is_other = re.search(r"exit code|Segmentation|Aborted", f"{error} {error.__cause__}")
        end = "exited" if is_other else "exited, perhaps killed for lack of memory"
        reason = f"a loader worker {end} ({reason})"
    elif cause == "full shared memory":
        reason = f"/dev/shm is full ({reason}): make it larger, or lower batches.workers"
    would_repeat = cause == "exception" and not is_transient(error)
    failure = record(
        reason=reason,
        cause=cause,
        frames=exception_frames(error) if cause not in ("setting", "not finite") else [],
        details="".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ConfigError) else 1 + would_repeat,
    )
    # if a loader worker is lost, the frame is only where this process noticed the loss
    at = None if cause == "loader worker" else failure.at
    has_facts = cause in ("not finite", *OUT_OF_MEMORY)
    facts = getattr(error, "facts", {}) if has_facts else {}
    return replace(failure, at=at, errno=errno_name(error), **facts)


def record(
    *,
    reason: str,
    cause: str,
    frames: Sequence[Frame] = (),
    details: str = "",
    exit_code: int = 1,
) -> Failure:
    """Return a failure of this process at this moment, with secrets masked."""
    frames = tuple(replace(frame, code=mask(frame.code)) for frame in frames)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Failure(
        rank=world()[1],
        host=socket.gethostname(),
        time=time.time(),
        reason=mask(reason),
        cause=cause,
        at=own_frame(frames),
        signal=LAUNCHER.stop_signal or None,
        exit_code=exit_code,
        attempt=int(os.environ.get(START, "").rpartition(".")[2] or restarts),
        frames=frames,
        details=mask(details),
    )


def reason_in_status(failure: Failure, silent: Sequence[str] = ()) -> str:
    """Return the reason that status.json gives for a failed run.

    Args:
        failure: the first failure.
        silent: the names of the ranks that left no error file.
    """
    reason = f"rank {failure.rank} on {failure.host}, step {failure.step}: {failure.reason}"
    if silent and failure.cause in CONSEQUENCES:
        names = ", ".join(silent)
        reason += f". No report from {names}: killed, stopped or cut off; look there first."
    return reason


def write_error(folder: Path, failure: Failure) -> None:
    """Write an error file to errors/ in a run folder; the file names sort by time."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    name = f"{now}_rank_{failure.rank:05d}_step_{failure.step or 0:08d}.json"
    (folder / "errors").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "errors" / name, json.dumps(failure.to_json(), indent=1) + "\n")


def remove_old_errors(folder: Path, limit: int) -> None:
    """Remove the oldest error files of a run folder: a thousand restarts would leave millions."""
    for path in sorted((folder / "errors").glob("*_rank_*_step_*.json"))[:-limit]:
        with suppress(OSError):
            path.unlink()


def report_once(error: BaseException) -> Failure:
    """Report an exception, unless the run has reported it in more detail; return its failure."""
    failure: Failure | None = getattr(error, "failure", None)
    if failure is None:
        failure = exception_failure(error)
        report(failure)
    return failure


def report(failure: Failure) -> None:
    """Write the error files for the launcher or torchrun, whichever started this process."""
    write_to_logs("rank", failure.to_json())
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            path = Path(folder, f"{failure.time:017.6f}_{os.getpid()}.json")
            write_atomically(path, json.dumps(failure.to_json()))
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun shows the py_callstack of the failure with the smallest timestamp, in whole
        # seconds; a consequence gets a timestamp a minute later, so that it does not hide its cause
        shown = f"{failure.details}\n{failure.reason}"
        if failure.cause == "setting":
            shown = f"error: {failure.reason}"  # the user needs no traceback
        when = int(failure.time) + 60 * (failure.cause in CONSEQUENCES)
        extra = {"py_callstack": shown, "timestamp": str(when)}
        content = {"message": {"message": failure.reason, "extraInfo": extra}}
        with suppress(OSError):
            if not Path(file).exists():
                write_atomically(Path(file), json.dumps(content))


def note_signal(name: str) -> None:
    """Write to the logs that this process was told to stop: it may be killed before it reports."""
    LAUNCHER.stop_signal = name
    note = {"rank": world()[1], "host": socket.gethostname(), "signal": name, "time": time.time()}
    write_to_logs("signal_rank", note)


def write_to_logs(kind: str, content: dict[str, Json]) -> None:
    """Write a JSON file of this process to the log folder of the launcher, if there is one."""
    if folder := os.environ.get(LOGS):
        with suppress(OSError):
            path = Path(folder, f"{kind}_{world()[1]:05d}.json")
            write_atomically(path, json.dumps(content, indent=1) + "\n")


def say_error(error: ConfigError) -> int:
    """Print an error; return its exit code.

    All processes of a launch raise most of these errors. Local rank 0 prints its error immediately;
    the others print theirs only if the launcher has not ended them within 5 s. torchrun returns 1
    for any exit code of its processes; our launcher reads the code and message from the error file.
    """
    report_once(error)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    say(mask(f"error: {error}"), to=sys.stderr)
    return error.exit_code


def exit_with_error(error: ConfigError) -> NoReturn:
    """Print an error, and exit with its code."""
    raise SystemExit(say_error(error))
