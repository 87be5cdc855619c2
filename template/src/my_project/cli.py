"""How a command runs: its exit code, what it says of an error, and what it logs."""

import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from .config import ConfigError
from .failures import exit_with_error, library_of, record_of, report_once
from .process import PREEMPTED, process_name, world, write_logs
from .safety.redaction import MaskedFormatter


def run(main: Callable[..., int | None], *arguments: Any, failures: Any = Exception) -> NoReturn:
    """Run a command and exit with its code.

    A ConfigError, which the user can fix, exits with a message and its own code; any other
    exception exits with 1, after an error file is written (failures.py) and the traceback printed.
    """
    code = 1
    try:
        code = main(*arguments) or 0
    except ConfigError as error:
        exit_with_error(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except failures as error:
        report_once(error)
        name = f"[{process_name()}] " * (world()[0] > 1)
        print(f"{name}{record_of(error)['details']}", file=sys.stderr)
    raise SystemExit(code)


def run_on_all_ranks(main: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run a command that each rank of a launch runs."""
    gc.enable()  # parse_command_line has turned it off for the imports
    write_logs()
    set_up_logging()
    try:
        run(main, *arguments, failures=(Exception, SystemExit))  # a sys.exit(0) is no success
    except SystemExit as end:
        code: Any = end.code
    if code == PREEMPTED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # on another code torchrun would restart the preempted run at once
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, PREEMPTED):
        os._exit(code)  # the normal teardown may wait for ranks that have exited
    raise SystemExit(code)


_TRAINING = threading.Lock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Refuse a run while this process trains another one, in another thread.

    Both would draw from one set of random generators, and share accelerate's global state.
    """
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "this process trains another run in another thread, and both would draw from the same"
            " random generators: train one after the other, or each in a process of its own."
        )
    try:
        yield
    finally:
        _TRAINING.release()


def _is_of_project(record: logging.LogRecord) -> bool:
    """Return whether the project's own code logs this, and not a library or Python's warnings."""
    return library_of(record.pathname) is None and record.name != "py.warnings"


def set_up_logging() -> None:
    """Log all messages of rank 0; of other ranks only warnings and errors, with the rank.

    What libraries log goes to stderr: under launch.py, which ends a run in one block, to the log
    file only.
    """
    rank = world()[1]
    prefix = f"[{process_name()}] %(levelname)s " if rank else ""
    shown, kept = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    shown.addFilter(_is_of_project)
    kept.addFilter(lambda record: not _is_of_project(record))
    for handler in (shown, kept):
        handler.setFormatter(MaskedFormatter(f"{prefix}%(message)s"))
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, handlers=[shown, kept], force=True)
    for library in ("accelerate", "torch", "httpx", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="No device id is provided")
