"""How a command runs: its parser, its exit code, its error messages and its log."""

import gc
import logging
import mmap
import os
import re
import signal
import sys
import textwrap
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from .config import ConfigError
from .failures import library_of, report_once, say_error
from .process import (
    LOGS,
    PREEMPTED,
    STDERR,
    STOP_SIGNALS,
    can_redraw,
    end_children,
    process_name,
    world,
    write_logs,
)
from .safety.redaction import MaskedFormatter, mask
from .words import printable, say, short_path


@dataclass
class Outcome:
    """How a command ends."""

    code: int | None = 1


@contextmanager
def errors_reported(outcome: Outcome, failures: Any = Exception) -> Iterator[None]:
    """Report an exception of the block, and turn it into an exit code.

    A ConfigError, which the user can fix, gives a message and the error's exit code. A
    KeyboardInterrupt gives one line and code 130. Any other exception gives an error file
    (failures.py), the traceback, and code 2 if a retry would fail too, else 1. This is a context
    manager, so it adds no frame to the traceback of a command.
    """
    try:
        yield
    except ConfigError as error:
        outcome.code = say_error(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        outcome.code = 130
    except failures as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:  # skip frames of this file
            frames = frames.tb_next
        failure = report_once(error.with_traceback(frames))
        name = f"[{process_name()}] " * (world()[0] > 1)
        say(f"{name}{failure.details}", to=sys.stderr)
        outcome.code = failure.exit_code


def run(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Run a command and exit with its code."""
    outcome = Outcome()
    with errors_reported(outcome):
        outcome.code = main(*arguments)
    raise SystemExit(outcome.code or 0)


def run_on_all_ranks(main: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run a command as a rank of a launch, and exit with the command's code."""
    with on_all_ranks() as outcome:
        outcome.code = main(*arguments)
    raise AssertionError("on_all_ranks ends the process")


@contextmanager
def on_all_ranks() -> Iterator[Outcome]:
    """Run the block as a rank of a launch, with a log file; exit with the code of the outcome."""
    gc.enable()  # parse_command_line turned collection off for the imports
    write_logs()
    set_up_logging()
    outcome = Outcome()
    with errors_reported(outcome, (Exception, SystemExit)):  # a recipe's sys.exit(0) is no success
        yield outcome
    code = outcome.code or 0
    if code == PREEMPTED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # torchrun would restart the preempted run after any other code
    if threading.current_thread() is threading.main_thread():
        # a signal during teardown must not change the outcome
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, PREEMPTED):
        end_children()
        os._exit(code)  # the normal teardown may wait for ranks that have exited
    raise SystemExit(code)


_TRAINING = threading.Lock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Refuse a run while another thread of this process trains another run.

    Both would draw from the same random generators, and share accelerate's global state.
    """
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "another thread of this process is training another run, and both would draw from the"
            " same random generators: train one after the other, or each in its own process."
        )
    try:
        yield
    finally:
        _TRAINING.release()


FOR_DEVELOPERS = re.compile("(Deprecation|Future|Resource)Warning$")
# The format of warnings.formatwarning: file, line, category, message, line of code.
PYTHON_WARNING = re.compile(r"(.+?:\d+): (\w+): (.*?)(?:\n  [^\n]*)?\n", re.DOTALL)
MAX_WARNING_LENGTH = 300  # in characters, on the screen


class Warned:
    """The warnings of Python and libraries in rank 0, counted once per line of code that warns.

    Under the launcher, where stderr is a log file, the terminal shows a line for each warning too.
    Warnings for developers, such as those about deprecations, are only counted.
    """

    def __init__(self) -> None:
        # a byte for each hash of a line of code, 1 if that line has warned; shared with loader
        # workers
        self.lines: Any = b""

    @property
    def count(self) -> int:
        """Return how many lines of code have warned."""
        return len(self.lines) - self.lines[:].count(b"\0")

    def start(self) -> None:
        """Start to count warnings.

        Each is counted when its log record is made, since not every logger propagates records.
        """
        if not self.lines:  # a notebook may call this again
            logging.setLogRecordFactory(partial(self._note, logging.getLogRecordFactory()))
        self.lines = mmap.mmap(-1, 1 << 16)

    def _note(self, make: Callable, *arguments: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = make(*arguments, **options)
        with suppress(Exception):  # a message that cannot be formatted, a closed terminal
            is_warning = record.levelno >= logging.WARNING and not _is_from_project(record)
            if is_warning and is_printed(record.name):
                place, kind = f"{record.pathname}:{record.lineno}", record.name
                text = record.getMessage()
                if kind == "py.warnings" and (match := PYTHON_WARNING.fullmatch(text)):
                    place, kind, text = match.groups()
                index = zlib.crc32(f"{kind} {place}".encode()) % len(self.lines)
                is_new, self.lines[index] = not self.lines[index], 1
                if is_new and LOGS in os.environ and not FOR_DEVELOPERS.search(kind):
                    show_warning(kind, text, place)
        return record


WARNED = Warned()


def show_warning(kind: str, text: str, place: str) -> None:
    """Write a warning to the terminal alone, in place of the bar, which the next step redraws."""
    text = printable(textwrap.shorten(mask(text), MAX_WARNING_LENGTH, placeholder="..."))
    place = short_path(re.sub(".*/(site|dist)-packages/", "", place))
    erased = "\r\x1b[K" * can_redraw()
    os.write(1, f"{erased}warning: {kind}: {text} ({place})\n".encode())


def is_printed(name: str) -> bool:
    """Return whether a logger's records go to stderr, by its own handlers or those of the root."""
    logger = logging.getLogger(name)
    while logger.propagate and logger.parent:
        logger = logger.parent
    streams = [getattr(handler, "stream", None) for handler in logger.handlers]
    return logger is logging.getLogger() or any(map(_is_stderr, streams))


def _is_stderr(stream: Any) -> bool:
    """Return whether a stream writes to stderr; a library may have kept an old sys.stderr."""
    with suppress(Exception):  # None, or a stream without a file
        return stream is sys.stderr or stream.fileno() == 2
    return False


def _is_from_project(record: logging.LogRecord) -> bool:
    """Return whether the project's own code logs this, not a library or Python's own warning."""
    return library_of(record.pathname) is None and record.name != "py.warnings"


def set_up_logging() -> None:
    """Log messages of rank 0 from INFO on; of other ranks only warnings and errors, with the rank.

    For some talkative libraries, only warnings and errors are logged on any rank. Messages of
    libraries go to stderr. Under the launcher, stderr is the log file, and the terminal shows a
    line for each warning of rank 0 too.
    """
    rank = world()[1]
    prefix = f"[{process_name()}] %(levelname)s " if rank else ""
    # a copy, which still goes to the log file while prepare_data sends stderr to the terminal
    stderr = open(os.dup(2), "w") if STDERR else sys.stderr  # noqa: SIM115
    on_stdout, on_stderr = logging.StreamHandler(sys.stdout), logging.StreamHandler(stderr)
    on_stdout.addFilter(_is_from_project)
    on_stderr.addFilter(lambda record: not _is_from_project(record))
    for handler in (on_stdout, on_stderr):
        handler.setFormatter(MaskedFormatter(f"{prefix}%(message)s"))
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, handlers=[on_stdout, on_stderr], force=True)
    for library in ("accelerate", "torch", "httpx", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="No device id is provided")
    if rank == 0:
        WARNED.start()
