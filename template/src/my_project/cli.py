"""The commands: `python -m my_project` lists them and runs them.

The console script `my-project` does the same, from any folder, which it does not import from.
Each is a module that can be run by itself too, such as `python -m my_project.evaluate`.
Launchers do so where several processes take part.
"""

import argparse
import logging
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from .config import ConfigError, exit_with_sentence
from .launcher import world
from .safety.redaction import MaskedFormatter

COMMANDS = (
    "launch",
    "evaluate",
    "predict",
    "export",
    "records.logs",
    "cluster.planner",
    "cluster.preflight",
    "cluster.hosts",
)
FOLDER = Path(__file__).parent

logger = logging.getLogger(__name__)


def main() -> None:
    """Run the command that is named first, or list all with the first line of their docstrings."""
    files = {name: FOLDER / f"{name.replace('.', '/')}.py" for name in COMMANDS}
    modules = {name.rpartition(".")[2]: name for name in COMMANDS if files[name].exists()}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(f"usage: python -m {__package__} COMMAND ...; COMMAND --help says more\n")
        for name, module in modules.items():
            text = files[module].read_text(encoding="utf-8")
            print(f"  {name:10} {text.split(chr(10))[0].strip(chr(34))}")
        return
    if command not in modules:
        meant = get_close_matches(command, modules, n=1)
        remedy = f"is {meant[0]} meant?" if meant else f"choose one of {', '.join(modules)}."
        exit_with_sentence(ConfigError(f"there is no command {command}; {remedy}"))
    del sys.argv[1]
    runpy.run_module(f"{__package__}.{modules[command]}", run_name="__main__", alter_sys=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of the command that runs."""
    return argparse.ArgumentParser(
        prog=f"python -m {__package__} {Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Run a command that is one process; exit with its code, or with a sentence."""
    try:
        raise SystemExit(main(*arguments) or 0)
    except ConfigError as error:
        exit_with_sentence(error)


def run_on_all_ranks(main: Callable[[Any], int], argument: Any) -> NoReturn:
    """Run main and exit: 2 with a sentence for what a user can mend, 1 with rank and traceback."""
    set_up_logging()
    code = 1
    try:
        code = main(argument)
    except ConfigError as error:
        exit_with_sentence(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except (Exception, SystemExit):  # no recipe ends a run with sys.exit(0)
        logger.exception(
            "process %d of %d failed on %s", world()[1], world()[0], socket.gethostname()
        )
    if code == 75 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # else the launcher would start a preempted run again, in place
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, 75):
        os._exit(code)  # teardown could wait for processes that are gone
    raise SystemExit(code)


def set_up_logging() -> None:
    """Log from the main process as it is, from the others warnings and errors with their rank."""
    size, rank = world()
    prefix = f"[rank {rank} on {socket.gethostname()}] " if size > 1 and rank else ""
    handler = logging.StreamHandler(sys.stdout)
    text = f"{prefix}%(levelname)s %(message)s" if prefix else "%(message)s"
    handler.setFormatter(MaskedFormatter(text))
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("accelerate", "torch", "httpx", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="No device id is provided")
