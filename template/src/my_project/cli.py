"""How a process that trains or evaluates runs: its exit code, and what it logs."""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from .config import ConfigError
from .failures import exit_with_error, library_of, record_of, report_once
from .process import PREEMPTED, process_name, world, write_logs
from .safety.redaction import MaskedFormatter


def run_on_all_ranks(main: Callable[[Any], int], argument: Any) -> NoReturn:
    """Run main on this rank and exit with its code.

    A ConfigError, which the user can fix, exits with a message and its own code; any other
    exception exits with 1, after an error file is written (failures.py) and the traceback logged.
    """
    gc.enable()  # parse_command_line has turned it off for the imports
    write_logs()
    set_up_logging()
    code = 1
    try:
        code = main(argument)
    except ConfigError as error:
        exit_with_error(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except (Exception, SystemExit) as error:  # a recipe's sys.exit(0) is no success
        report_once(error)
        text = record_of(error)["details"]
        logging.getLogger(OUTPUT).error("%s failed\n%s", process_name(), text)
    if code == PREEMPTED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # on another code torchrun would restart the preempted run at once
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, PREEMPTED):
        os._exit(code)  # the normal teardown may wait for ranks that have exited
    raise SystemExit(code)


OUTPUT = "stderr"  # the logger of what only the log file shows under launch.py


def _is_of_project(record: logging.LogRecord) -> bool:
    """Return whether the project's own code logs this, and not a library or Python's warnings."""
    is_library = library_of(record.pathname) is not None
    return not is_library and record.name not in (OUTPUT, "py.warnings")


class _Screen(logging.StreamHandler):
    """Log to sys.stdout as it is at the time: `evaluate --json` keeps it for the JSON."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the current sys.stdout."""
        return sys.stdout


def set_up_logging() -> None:
    """Log all messages of rank 0; of other ranks only warnings and errors, with the rank.

    What libraries log goes to stderr: under launch.py, which ends a run in one block, to the log
    file only.
    """
    rank = world()[1]
    prefix = f"[{process_name()}] %(levelname)s " if rank else ""
    shown, kept = _Screen(), logging.StreamHandler(sys.stderr)
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
