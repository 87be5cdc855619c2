"""List and run the commands: `python -m my_project`.

Each command is a module that can also be run directly (`python -m my_project.evaluate`).
Launchers do so for commands that run on several processes.
The console script `my-project` does the same, without adding the current folder to sys.path.
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

from .config import ConfigError, exit_with_error
from .process import world
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
    """Run the command given as the first argument, or list all commands."""
    files = {name: FOLDER / f"{name.replace('.', '/')}.py" for name in COMMANDS}
    modules = {name.rpartition(".")[2]: name for name in COMMANDS if files[name].exists()}
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(f"usage: python -m {__package__} COMMAND ...; COMMAND --help lists its options\n")
        for name, module in modules.items():
            text = files[module].read_text(encoding="utf-8")
            print(f"  {name:10} {text.split(chr(10))[0].strip(chr(34))}")
        return
    if command not in modules:
        similar = get_close_matches(command, modules, n=1)
        remedy = f"did you mean {similar[0]}?" if similar else f"use one of {', '.join(modules)}."
        exit_with_error(ConfigError(f"there is no command {command}; {remedy}"))
    del sys.argv[1]
    runpy.run_module(f"{__package__}.{modules[command]}", run_name="__main__", alter_sys=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the name of the current command."""
    return argparse.ArgumentParser(
        prog=f"python -m {__package__} {Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(main: Callable[..., int | None], *arguments: Any) -> NoReturn:
    """Run a single-process command and exit with its code, or with a ConfigError and its code."""
    try:
        raise SystemExit(main(*arguments) or 0)
    except ConfigError as error:
        exit_with_error(error)


def run_on_all_ranks(main: Callable[[Any], int], argument: Any) -> NoReturn:
    """Run main on this rank and exit with its code.

    A ConfigError, which the user can fix, exits with a message and its own code; any other
    exception exits with 1, after the rank and the traceback are logged.
    """
    set_up_logging()
    code = 1
    try:
        code = main(argument)
    except ConfigError as error:
        exit_with_error(error)
    except KeyboardInterrupt as error:
        print(f"interrupted {error}".strip(), file=sys.stderr)
        code = 130
    except (Exception, SystemExit):  # also SystemExit: a recipe's sys.exit(0) is no success
        world_size, rank = world()
        logger.exception("rank %d of %d failed on %s", rank, world_size, socket.gethostname())
    if code == 75 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # on another code torchrun would restart the preempted run at once
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, 75):
        os._exit(code)  # the normal teardown may wait for ranks that have exited
    raise SystemExit(code)


def set_up_logging() -> None:
    """Log all messages of rank 0; of other ranks only warnings and errors, with the rank."""
    world_size, rank = world()
    prefix = f"[rank {rank} on {socket.gethostname()}] " if world_size > 1 and rank else ""
    handler = logging.StreamHandler(sys.stdout)
    text = f"{prefix}%(levelname)s %(message)s" if prefix else "%(message)s"
    handler.setFormatter(MaskedFormatter(text))
    level = logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("accelerate", "torch", "httpx", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", message="No device id is provided")
