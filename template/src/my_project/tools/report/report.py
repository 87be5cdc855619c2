"""Write a report of one or several runs: one HTML file that needs no network.

    python -m my_project report runs/image_classification
    python -m my_project report runs/a runs/b --output compared.html

The report of one run is written into its folder as report.html, and that of several runs into the
folder that holds them. The runs may be under way: run the same command again for a newer report.
"""

import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from ...files import ConfigError, open_own, write_atomically
from ...run_files import local_folder
from ...words import make_parser, say
from ..reader import is_run, run_tool
from .page import GENERATOR, page

MAX_RUNS = 8  # the number of colors that are easy to tell apart
LONG_NAME = 20  # characters; if no name is longer, all names stay whole


def write_report(folders: list[Path], output: str | None = None) -> Path:
    """Read runs and write their report; return its path.

    Raises:
        ConfigError: no run or too many are given, a folder is not a run folder, or the report
            cannot be written.
    """
    from .history import read_history  # both modules import numpy
    from .sections import body

    # runs/* includes an earlier report of several runs, and what trackers write
    folders = list({path.resolve(): path for path in folders if not is_report(path)}.values())
    others = [path for path in folders if path.exists() and not is_run(path)]
    if len(folders) > len(others) > 0:
        say(f"left out, since they are not runs: {', '.join(map(str, others))}")
        folders = [path for path in folders if path not in others]
    if not 0 < len(folders) <= MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs are given, but a report shows 1 to {MAX_RUNS}.")
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
    """If any name is long, leave out the first and last words that all names share.

    A name that has no other words stays whole. If two short names are equal, all names stay whole.
    """
    words = [re.findall(r"[-_/]?[^-_/]+|[-_/]", name) for name in names]
    for _ in range(2):  # cut the beginning and reverse the words, twice
        common = takewhile(lambda column: len({*column}) == 1, zip(*words, strict=False))
        count = len(list(common))
        words = [parts[count:][::-1] for parts in words]
    short = ["".join(parts).strip("-_/") or name for parts, name in zip(words, names, strict=True)]
    is_unique = len({*short}) == len(names) > 1
    return short if is_unique and max(map(len, names)) > LONG_NAME else names


def main() -> None:
    """Write the report, and print its path and size."""
    parser = make_parser(__doc__, "report")
    parser.add_argument("runs", nargs="+", help="the run folders, at most 8", metavar="run")
    parser.add_argument("--output", help="the file to write")
    arguments = parser.parse_args()
    path = write_report([local_folder(folder) for folder in arguments.runs], arguments.output)
    say(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    run_tool(main)
