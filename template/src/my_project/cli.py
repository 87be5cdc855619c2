"""How a command runs: its parser, its exit code, what it logs."""

import argparse
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

from .config import ConfigError
from .failures import exit_with_error, library_of, record_of, report_once, text_of
from .process import PREEMPTED, process_name, world, write_logs
from .safety.redaction import MaskedFormatter

logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with the error."""
        exit_with_error(ConfigError(f"{message}; --help lists all options."))


def make_parser(description: str | None, command: str = "") -> Parser:
    """Return an argument parser for a command; its name is by default that of its module."""
    return Parser(
        prog=f"python -m {__package__} {command or Path(sys.argv[0]).stem}",
        description=cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def refuse_module(command: str) -> NoReturn:
    """End `python -m` of a module that was a command in earlier versions, and name the new one."""
    use = f"use python -m {__package__} {command}, also behind accelerate launch"
    exit_with_error(ConfigError(f"{__package__}.{command} is no command any more; {use}."))


def run(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Run a single-process command and exit with its code, or with a ConfigError and its code."""
    try:
        raise SystemExit(main(*arguments) or 0)
    except ConfigError as error:
        exit_with_error(error)
    except Exception as error:
        report_once(error)
        print(text_of(record_of(error)), file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def run_on_all_ranks(
    main: Callable[[Any], int], argument: Any, *, is_run: bool = False
) -> NoReturn:
    """Run main on this rank and exit with its code.

    A ConfigError, which the user can fix, exits with a message and its own code; any other
    exception exits with 1, after an error file is written (failures.py) and the traceback logged.
    """
    gc.enable()  # parse_command_line has turned it off for the imports
    write_logs(is_run=is_run)
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
        logging.getLogger(OUTPUT).error("%s failed\n%s", process_name(), text_of(record_of(error)))
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
    """Log to sys.stdout as it is at the time: above the bar, while there is one."""

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
