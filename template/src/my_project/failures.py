"""What a process that fails leaves behind: an error file, read by the launcher and the tools.

docs/run-folder.md describes its fields. It is in <run folder>/errors/ and, under the launcher, in
the log folder of the start, there from before the run folder is open, and in a temporary folder.
The same is written for torchrun, whose last block shows the first failure of all processes.
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
from typing import Any, NoReturn

from .files import ConfigError, write_atomically
from .process import LAUNCHER, LOGS, START, world
from .safety.redaction import mask
from .words import say, short_path

FOLDER = "LAUNCH_ERRORS"  # the variable with the folder in which the launcher looks for error files
CONSEQUENCES = ("lost contact", "waiting")  # causes that follow from the failure of another rank
OUT_OF_MEMORY = ("out of memory", "out of host memory")  # of the device, and of the host
LATE_SECONDS = 2.0  # a watchdog looks once a second
# As printed in the message of an exception that a loader worker passed on.
FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)(?:\n    (\S.*))?')
WORKER_TRACEBACK = "Original Traceback (most recent call last):"
# What libraries say, where no type or number tells the cause.
SENTENCES = {
    # torch's tensors and NCCL's buffers, in /dev/shm
    "full shared memory": re.compile(
        r"file </torch_.*\(28\)|out of shared memory|creating shared memory segment"
    ),
    # gloo, of a size that it did not expect
    "mismatched collectives": re.compile("collective mismatch"),
    # safetensors passes on only the text of the error
    "full disk": re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b"),
    # the second by torch, where a loader worker passes a tensor on
    "too many open files": re.compile("Too many open files|received 0 items of ancdata"),
    # CUDA and cuBLAS outside of torch's allocator, which has a type for it
    "out of memory": re.compile(r"(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    "device error": re.compile("device-side assert|illegal memory access|CUDA error"),
    # torch's allocator for the CPU, fork, and C++
    "out of host memory": re.compile("[Cc]an(no|')t allocate memory|std::bad_alloc"),
    # torch's DataLoader: when its queue fails, or from the signal of a child that has ended
    "loader worker": re.compile("DataLoader worker .*(exited unexpectedly|killed by signal)"),
    # gloo and NCCL
    "lost contact": re.compile("gloo/transport|Connection (closed|reset) by peer|NCCL"),
}
TYPES = {  # by name, since this module imports no torch
    "NotFiniteError": "not finite",
    "KeyboardInterrupt": "stopped",
    "MemoryError": "out of host memory",
    "OutOfMemoryError": "out of memory",
    **dict.fromkeys(("DistStoreError", "DistNetworkError", "DistBackendError"), "lost contact"),
}
FULL_DISK = ("ENOSPC", "EDQUOT")
PYTHON = ("<", os.path.dirname(os.__file__))  # how the names of its own files begin
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
        """Return the frame in words: "a.py, line 3, in loss: x = 1"."""
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
    next_micro_batch_size: int | None = None  # that the launcher tries
    frames: tuple[Frame, ...] = ()
    details: str = ""
    # null unless the cause is "not finite"
    skipped_from: int | None = None
    skipped_to: int | None = None
    num_items: float | None = None
    loss_is_finite: bool | None = None
    source: Path | None = None  # the file that it was read from, which does not have this field

    def to_json(self) -> dict[str, Any]:
        """Return the content of the error file."""
        content = asdict(self)
        del content["source"]
        return content

    @property
    def idle_seconds(self) -> float:
        """Return how long the rank had made no progress when it failed, by its host's clock."""
        return self.time - (self.progress_time or self.time)


# ---- which was first -----------------------------------------------------------------------------
def first_failure(failures: list[Failure]) -> Failure | None:
    """Return the failure that the others follow from, as far as is known; None without one.

    Of ranks that all skipped too many steps it is one whose own loss was not finite.

    Args:
        failures: of one launch.
    """
    failures = sorted(failures, key=lambda one: one.time)
    roots = [one for one in failures if one.cause not in CONSEQUENCES]
    roots.sort(key=lambda one: (one.cause == "stopped", bool(one.loss_is_finite)))
    return next(iter(roots or late(failures) or failures), None)


def late(failures: list[Failure]) -> list[Failure]:
    """Return the failures of ranks that went on when others had given up waiting for them.

    Such a rank was stopped, or cut off: it has lost contact after more time without progress than
    its watchdog allows, as it ran for a part of that time only.
    """
    waited = [one.idle_seconds for one in failures if one.cause == "waiting"]
    lost = [one for one in failures if one.cause == "lost contact"]
    return [one for one in lost if waited and one.idle_seconds > max(waited) + LATE_SECONDS]


# ---- frames --------------------------------------------------------------------------------------
def library_of(file: str) -> str | None:
    """Return the name of the installed package that a file belongs to; None for a user's own."""
    if file.startswith(PACKAGE_FOLDER):
        return None
    if found := INSTALLED.search(file):
        return found[1]
    return "python" if file.startswith(PYTHON) else None


def frames_of(error: BaseException) -> list[Frame]:
    """Return the frames of an exception; of one in a loader worker those in the worker."""
    message = str(error)
    if found := FRAME.findall(message.partition(WORKER_TRACEBACK)[2]):
        return [frame_at(file, int(line), name, code) for file, line, name, code in found]
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
    return next((one for one in reversed(frames) if not one.library), None)


def reason_of(error: BaseException) -> str:
    """Return an exception and its notes in one line; of a loader worker the exception in it."""
    message = str(error)
    if WORKER_TRACEBACK in message:
        message = message.strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
        message += " (in a loader worker)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    for note in getattr(error, "__notes__", []):
        text = f"{text.removesuffix('.')}. {note}"
    return text


def cause_of(error: BaseException) -> str:
    """Return the cause of an exception, as an error file names it."""
    if isinstance(error, ConfigError):
        return "setting"
    for kind in type(error).__mro__:
        if kind.__name__ in TYPES:
            return TYPES[kind.__name__]
    if errno_of(error) in FULL_DISK:
        return "full shared memory" if _is_of_semaphore(error) else "full disk"
    if errno_of(error) in ("EMFILE", "ENFILE"):
        return "too many open files"
    if _is_of_multiprocessing(error):
        return "loader worker"
    found = (cause for cause, pattern in SENTENCES.items() if pattern.search(str(error)))
    cause = next(found, "exception")
    # torch raises RuntimeErrors; a ConnectionError is the user's
    is_of_user = cause == "lost contact" and not isinstance(error, RuntimeError)
    return "exception" if is_of_user else cause


def is_transient(error: BaseException | None) -> bool:
    """Return whether a network or a disk was the cause, so that another try may succeed."""
    names, numbers = set(), set()
    while error:
        names |= {kind.__name__ for kind in type(error).__mro__}
        numbers.add(getattr(error, "errno", None))
        error = error.__cause__ or error.__context__
    libraries = {"ConnectError", "Timeout", "TimeoutException", "LocalEntryNotFoundError"}
    is_network = bool(names & (libraries | {"ConnectionError", "TimeoutError"}))
    is_network &= "OfflineModeIsEnabled" not in names
    return is_network or bool(numbers & {errno.EIO, errno.ESTALE})


def errno_of(error: BaseException) -> str | None:
    """Return the name of an operating system's error, such as ENOSPC, or of its cause's."""
    number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
    return errno.errorcode.get(number) if isinstance(number, int) else None


def _is_of_multiprocessing(error: BaseException) -> bool:
    """Return whether the connection to a loader worker broke, or its socket has gone with it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) or not frames:
        return False
    return os.path.basename(os.path.dirname(frames[-1].filename)) == "multiprocessing"


def _is_of_semaphore(error: BaseException) -> bool:
    """Return whether multiprocessing could not make a semaphore or a buffer, in /dev/shm."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename in (synchronize.__file__, shared_memory.__file__)


# ---- error files ---------------------------------------------------------------------------------
def record_of(error: BaseException) -> Failure:
    """Return the content of the error file for an exception before the run's first step."""
    cause, reason = cause_of(error), reason_of(error)
    if cause in ("setting", "not finite"):
        reason = str(error)
    elif cause == "lost contact":
        reason = f"lost contact with another process ({str(error).split('. ')[0]})"
    elif cause == "loader worker":
        reason = f"a loader worker exited, perhaps killed for lack of memory ({reason})"
    elif cause == "full shared memory":
        reason = f"/dev/shm is full ({reason}): make it larger, or set fewer batches.workers"
    would_repeat = cause == "exception" and not is_transient(error)
    found = record(
        reason=reason,
        cause=cause,
        frames=frames_of(error) if cause not in ("setting", "not finite") else [],
        details="".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ConfigError) else 1 + would_repeat,
    )
    at = None if cause == "loader worker" else found.at  # where the process noticed it
    has_facts = cause in ("not finite", *OUT_OF_MEMORY)
    facts = getattr(error, "facts", {}) if has_facts else {}
    return replace(found, at=at, errno=errno_of(error), **facts)


def record(
    *,
    reason: str,
    cause: str,
    frames: Sequence[Frame] = (),
    details: str = "",
    exit_code: int = 1,
) -> Failure:
    """Return a failure of this process now; secrets are masked."""
    frames = tuple(replace(one, code=mask(one.code)) for one in frames)
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
    """Return what status.json says of the first failure.

    Args:
        failure: the first.
        silent: the ranks that left no error file.
    """
    reason = f"rank {failure.rank} on {failure.host}, step {failure.step}: {failure.reason}"
    if silent and failure.cause in CONSEQUENCES:
        names = ", ".join(silent)
        reason += f". No report from {names}: killed, stopped or cut off; look there first."
    return reason


def write_error(folder: Path, failure: Failure) -> None:
    """Write an error file into errors/ of a run folder; the names sort by time."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    name = f"{now}_rank_{failure.rank:05d}_step_{failure.step or 0:08d}.json"
    (folder / "errors").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "errors" / name, json.dumps(failure.to_json(), indent=1) + "\n")


def remove_old_errors(folder: Path, most: int) -> None:
    """Remove the oldest error files of a run folder: a thousand restarts leave millions."""
    for path in sorted((folder / "errors").glob("*_rank_*_step_*.json"))[:-most]:
        with suppress(OSError):
            path.unlink()


def report_once(error: BaseException) -> Failure:
    """Report an exception, unless the run has, which knows more; return what was reported."""
    failure: Failure | None = getattr(error, "failure", None)
    if failure is None:
        failure = record_of(error)
        report(failure)
    return failure


def report(failure: Failure) -> None:
    """Write an error file for the launcher or torchrun, whichever started this process."""
    write_to_logs("rank", failure.to_json())
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            path = Path(folder, f"{failure.time:017.6f}_{os.getpid()}.json")
            write_atomically(path, json.dumps(failure.to_json()))
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun shows py_callstack of the failure with the smallest timestamp, in whole seconds:
        # a minute later, so that what follows from the failure of another rank does not hide it
        shown = f"{failure.details}\n{failure.reason}"
        if failure.cause == "setting":
            shown = f"error: {failure.reason}"  # a sentence is enough
        when = int(failure.time) + 60 * (failure.cause in CONSEQUENCES)
        extra = {"py_callstack": shown, "timestamp": str(when)}
        content = {"message": {"message": failure.reason, "extraInfo": extra}}
        with suppress(OSError):
            if not Path(file).exists():
                write_atomically(Path(file), json.dumps(content))


def note_signal(name: str) -> None:
    """Note that this process has been told to stop: it may be killed before it can report."""
    LAUNCHER.stop_signal = name
    told = {"rank": world()[1], "host": socket.gethostname(), "signal": name, "time": time.time()}
    write_to_logs("signal_rank", told)


def write_to_logs(kind: str, content: dict[str, Any]) -> None:
    """Write what this process reports into the log folder that the launcher has made, if any."""
    if folder := os.environ.get(LOGS):
        with suppress(OSError):
            path = Path(folder, f"{kind}_{world()[1]:05d}.json")
            write_atomically(path, json.dumps(content, indent=1) + "\n")


def say_error(error: ConfigError) -> int:
    """Print the error; return its exit code.

    All processes of a launch meet the same error. Local rank 0 prints it immediately; the others
    print it only if the launcher has not ended them within 5 s. Launchers return 1 for any exit
    code of their processes, so the launcher reads code and message from the error file.
    """
    report_once(error)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    say(mask(f"error: {error}"), to=sys.stderr)
    return error.exit_code


def exit_with_error(error: ConfigError) -> NoReturn:
    """Print the error, and exit with its code."""
    raise SystemExit(say_error(error))
