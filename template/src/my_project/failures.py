"""What a process that fails leaves behind: an error file, read by launch.py and other processes.

An error file is JSON, in <run folder>/errors/ and, under launch.py, in its own temporary folder:

    rank, host, step   the process, and the steps it had done; step is null before the first
    launch             the launch it belongs to, as in run.json; "" before the run folder is open
    time               when, in seconds since 1970
    reason             what happened, in one sentence
    cause              setting: an error that the user can fix;  exception: raised by the code
                       out of memory;  not finite: too many skipped steps;  loader worker: it ended
                       lost contact: with another process;  stalled: no progress on this rank
                       waiting: no progress, since another rank did not answer
    exit_code          of the process
    attempt            how often torchrun had restarted the processes
    frames             of the exception or of the main thread, the outermost first: file, line,
                       function, code, and library: the package it belongs to, or null
    details            the whole traceback, or the stacks of all threads

The same is written for torchrun, whose last block shows the first failure of all processes.
"""

import json
import os
import re
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .config import ConfigError
from .files import write_atomically
from .process import world
from .safety.redaction import mask
from .stack_traces import library_of

FOLDER = "LAUNCH_ERRORS"  # the variable with the folder in which launch.py looks for error files
CONSEQUENCES = ("lost contact", "waiting")  # causes that follow from the failure of another rank
# As printed in the message of an exception that a loader worker passed on.
FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)(?:\n    (\S.*))?')
WORKER_TRACEBACK = "Original Traceback (most recent call last):"


def first_failure(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the error file that the others follow from, as far as is known; {} without one.

    Args:
        failures: of one launch, sorted by time.
    """
    causes = [one for one in failures if one["cause"] not in CONSEQUENCES]
    return next(iter(causes or failures), {})


# ---- frames --------------------------------------------------------------------------------------
def frame(file: str, line: int, function: str, code: str = "") -> dict[str, Any]:
    """Return a frame as an error file has it."""
    return {
        "file": file,
        "line": line,
        "function": function,
        "code": code.strip(),
        "library": library_of(file),
    }


def frames_of(error: BaseException) -> list[dict[str, Any]]:
    """Return the frames of an exception; of one in a loader worker those in the worker."""
    message = str(error)
    if WORKER_TRACEBACK in message:
        found = FRAME.findall(message.split(WORKER_TRACEBACK, 1)[1])
        if found:
            return [frame(file, int(line), name, code) for file, line, name, code in found]
    frames = [
        frame(f.filename, f.lineno or 0, f.name, f.line or "")
        for f in traceback.extract_tb(error.__traceback__)
        if f.name != "failures_recorded"  # the context around the loop
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(frame(error.filename, error.lineno or 0, "<module>", error.text or ""))
    return frames


def own_frame(frames: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the innermost frame that is not in a library."""
    own = [one for one in frames if not one["library"]]
    return own[-1] if own else None


def short_path(file: str) -> str:
    """Return a path relative to the current folder, if it is below it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def folded(frames: list[dict[str, Any]]) -> list[str]:
    """Return a traceback as lines, in which the frames of libraries are folded into one."""
    lines: list[str] = []
    libraries: list[str] = []

    def fold() -> None:
        if libraries:
            names = ", ".join(dict.fromkeys(libraries))
            lines.append(f"  ... {len(libraries)} frame{'s' * (len(libraries) > 1)} in {names}")
            libraries.clear()

    for one in frames:
        if one["library"]:
            libraries.append(one["library"])
            continue
        fold()
        lines.append(f"  {short_path(one['file'])}, line {one['line']}, in {one['function']}")
        if one["code"]:
            lines.append(f"    {one['code']}")
    fold()
    return lines


def reason_of(error: BaseException) -> str:
    """Return an exception and its notes in one line; of a loader worker the exception in it."""
    message = str(error)
    if WORKER_TRACEBACK in message:
        message = message.strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
        message += " (in a loader worker)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return " ".join([text, *getattr(error, "__notes__", [])])


# ---- error files ---------------------------------------------------------------------------------
def record_of(error: BaseException, *, step: int | None = None, cause: str = "") -> dict[str, Any]:
    """Return the content of the error file for an exception."""
    is_setting = isinstance(error, ConfigError)
    return record(
        reason=str(error) if is_setting else reason_of(error),
        cause=cause or ("setting" if is_setting else "exception"),
        frames=[] if is_setting else frames_of(error),
        details="".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ConfigError) else 1,
        step=step,
    )


def record(
    *,
    reason: str,
    cause: str,
    frames: list[dict[str, Any]],
    details: str,
    exit_code: int = 1,
    step: int | None = None,
) -> dict[str, Any]:
    """Return the content of an error file; secrets are masked."""
    return {
        "rank": world()[1],
        "host": socket.gethostname(),
        "step": step,
        "launch": "",
        "time": time.time(),
        "reason": mask(reason),
        "cause": cause,
        "exit_code": exit_code,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "frames": [one | {"code": mask(one["code"])} for one in frames],
        "details": mask(details),
    }


def report_once(error: BaseException) -> None:
    """Report an exception, unless the run has: it knows more, as the step and the likely cause."""
    if not getattr(error, "is_reported", False):
        report(record_of(error))


def report(failure: dict[str, Any]) -> None:
    """Write an error file for launch.py, and one for torchrun, where these started this process."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            path = Path(folder, f"{failure['time']:017.6f}_{os.getpid()}.json")
            write_atomically(path, json.dumps(failure))
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = "\n".join([*folded(failure["frames"]), failure["reason"]])
        if failure["cause"] == "setting":
            shown = f"error: {shown}"
        # torchrun shows py_callstack of the failure with the smallest timestamp, in whole seconds:
        # a minute later, so that what follows from the failure of another rank does not hide it
        when = int(failure["time"]) + 60 * (failure["cause"] in CONSEQUENCES)
        extra = {"py_callstack": shown, "timestamp": str(when)}
        content = {"message": {"message": failure["reason"], "extraInfo": extra}}
        with suppress(OSError):
            if not Path(file).exists():
                write_atomically(Path(file), json.dumps(content))


def exit_with_exception(error: Exception) -> NoReturn:
    """Report an exception, print its traceback, and exit with 1."""
    report_once(error)
    failure = record_of(error)
    print(*folded(failure["frames"]), failure["reason"], sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(1)


def exit_with_error(error: ConfigError) -> NoReturn:
    """Print the error and exit with its code.

    All processes of a launch meet the same error. Local rank 0 prints it at once; the others print
    it only if the launcher has not ended them within 5 s. Launchers return 1 for any exit code of
    their processes, so launch.py reads code and message from the error file.
    """
    report_once(error)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
    print(mask(f"error: {error}"), file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)
