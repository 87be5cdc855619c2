"""Write a report of one or several runs: one HTML file that needs no network.

    python -m my_project report runs/image_classification
    python -m my_project report runs/a runs/b --output compared.html

The report of one run is written into its folder as report.html; that of several runs into the
folder that holds them. The runs may be under way: the same command writes the report again.
"""

import argparse
import os
import shlex
import time
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ... import cli
from ...files import ConfigError, write_atomically
from ..reader import check_run
from .page import GENERATOR, page

if TYPE_CHECKING:
    from .history import History

MOST_RUNS = 8  # colors that one can tell apart
LONG_NAME = 20  # characters


def find_output(folders: list[Path], output: str | None) -> Path:
    """Return the path of the report; refuse one where there is something else."""
    path = Path(output) if output else _common(folders) / "report.html"
    if path.is_dir() or not path.name:
        raise ConfigError(f"{path} is a folder; give a file, such as --output {path}/report.html.")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} for the report; make it first.")
    if os.path.lexists(path) and not _is_report(path):
        raise ConfigError(
            f"{path} is there and is not a report, so it is kept; give another path with --output."
        )
    return path


def _common(folders: list[Path]) -> Path:
    """Return the run folder; of several runs the folder that they have in common."""
    if len(folders) == 1:
        return folders[0]
    common = os.path.commonpath([folder.resolve().parent for folder in folders])
    return Path(os.path.relpath(common))


def _is_report(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def write_report(folders: list[Path], output: str | None = None) -> Path:
    """Read runs and write their report; return its path.

    Raises:
        ConfigError: a folder is not of a run, or the report cannot be written there.
    """
    from .history import read_history  # these import numpy
    from .summary import PACKAGE, body

    # runs/* has the report of several runs in it, once that is written
    folders = [folder for folder in folders if not _is_report(folder)]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    if not folders:
        raise ConfigError("there is no run among the paths; give one such as runs/a.")
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are given, but a report shows at most {MOST_RUNS}: more curves"
            " cannot be told apart. Choose some of them; the command runs lists all."
        )
    for folder in folders:
        check_run(folder)
    path = find_output(folders, output)
    runs = [read_history(folder) for folder in folders]
    _name(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    words = ["python", "-m", PACKAGE, "report", *map(str, folders)]
    words += ["--output", output] if output else []
    content = body(runs, written=written, command=shlex.join(words))
    text = page(title, content, kind="many" if len(runs) > 4 else "")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); give another path with --output."
        ) from error
    return path


def _name(runs: "list[History]") -> None:
    """Name runs by their folders, with as much of the path as tells them apart.

    In legends, long names are shown without what they begin with in common.
    """
    if len({run.name for run in runs}) < len(runs):
        paths = [run.folder.resolve() for run in runs]
        common = os.path.commonpath(paths)
        for run, path in zip(runs, paths, strict=True):
            run.name = os.path.relpath(path, common)
    letters = zip(*(run.name for run in runs), strict=False)
    common = [same[0] for same in takewhile(lambda same: len({*same}) == 1, letters)]
    length = max((i + 1 for i, letter in enumerate(common) if letter in "-_/"), default=0)
    is_long = len(runs) > 1 and max(len(run.name) for run in runs) > LONG_NAME
    for run in runs:
        run.short = run.name[length:] if is_long else run.name


def main(arguments: argparse.Namespace) -> None:
    """Write the report, and print its path and size."""
    path = write_report([Path(folder) for folder in arguments.runs], arguments.output)
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    parser = cli.make_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="the run folders, at most 8", metavar="run")
    parser.add_argument("--output", help="the file to write")
    cli.run(main, parser.parse_args())
