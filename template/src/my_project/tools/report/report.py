"""Write a report of one or several runs: one HTML file that needs no network.

    python -m my_project report runs/image_classification
    python -m my_project report runs/a runs/b --output compared.html

The report of one run is written into its folder as report.html; that of several runs into the
folder that holds them. The runs may be under way: the same command writes the report again.
"""

import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from ...files import ConfigError, open_own, write_atomically
from ...run_files import local_folder
from ...words import say
from ..reader import parser_of, run_tool
from .page import GENERATOR, page

MOST_RUNS = 8  # colors that one can tell apart
LONG_NAME = 20  # characters


def write_report(folders: list[Path], output: str | None = None) -> Path:
    """Read runs and write their report; return its path.

    Raises:
        ConfigError: a folder is not of a run, or the report cannot be written there.
    """
    from .history import read_history  # these import numpy
    from .sections import body

    # runs/* has the report of several runs in it, once that is written
    folders = list({path.resolve(): path for path in folders if not is_report(path)}.values())
    if not 0 < len(folders) <= MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are given; a report shows 1 to {MOST_RUNS}.")
    common = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    path = Path(output or (folders[0] if len(folders) == 1 else common) / "report.html")
    runs = [read_history(folder) for folder in folders]
    if os.path.lexists(path) and not is_report(path):
        raise ConfigError(f"{path} is not a report, so it is kept; give another --output.")
    names = [os.path.relpath(folder.resolve(), common) for folder in folders]
    for run, name, short in zip(runs, names, shorten(names), strict=True):
        run.name, run.short = name, short
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    try:
        write_atomically(path, page(title, body(runs, title)))
    except (OSError, RecursionError) as error:  # RecursionError: nested lists
        raise ConfigError(f"{path} cannot be written: {error}; give another --output.") from error
    return path


def is_report(path: Path) -> bool:
    """Return whether a file is a report, which may be replaced."""
    with suppress(OSError), open_own(path) as file:
        return GENERATOR.encode() in file.read(1000)
    return False


def shorten(names: list[str]) -> list[str]:
    """Return long names without the words that all of them begin or end with.

    A name that has no other words stays whole.
    """
    words = [re.findall(r"[-_/]?[^-_/]+|[-_/]", name) for name in names]
    for _ in range(2):  # from the end, then from the beginning
        same = takewhile(lambda column: len({*column}) == 1, zip(*words, strict=False))
        count = len(list(same))
        words = [one[count:][::-1] for one in words]
    short = ["".join(one).strip("-_/") or name for one, name in zip(words, names, strict=True)]
    is_clear = len({*short}) == len(names) > 1
    return short if is_clear and max(map(len, names)) > LONG_NAME else names


def main() -> None:
    """Write the report, and print its path and size."""
    parser = parser_of("report", __doc__)
    parser.add_argument("runs", nargs="+", help="the run folders, at most 8", metavar="run")
    parser.add_argument("--output", help="the file to write")
    given = parser.parse_args()
    path = write_report([local_folder(folder) for folder in given.runs], given.output)
    say(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    run_tool(main)
