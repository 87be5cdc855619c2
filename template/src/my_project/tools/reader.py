"""Read a run folder, as docs/run-folder.md describes it, and format numbers and tables.

The run may be under way, come from someone else or be damaged. What is missing or damaged is left
out and named in `problems`.
"""

import json
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..failures import Failure, exit_with_error
from ..files import ConfigError, Json, is_number, read_yaml
from ..run_files import (
    RUN_FORMAT,
    Record,
    RunInfo,
    Status,
    each_record,
    flat,
    is_locked,
    read_failure,
    read_info,
    read_status,
)

PARTS_OF_A_RUN = ("config.yaml", "status.json", "run.json", "metrics.jsonl", "checkpoints")
LATEST = 100  # records that show what a run is doing now
# Settings for the location of a run, and for how it begins and ends.
NOT_COMPARED = {"run_name", "runs_folder", "resume", "stop_after"}


@dataclass(kw_only=True)
class Run:
    """What a run folder holds."""

    folder: Path
    status: Status
    # the outcome in status.json; "interrupted" if it is "running" but no process holds the lock;
    # "damaged" if there is no outcome
    state: str
    info: RunInfo
    settings: dict[str, Any]  # config.yaml by dotted name (optim.lr); recipe: the class's name
    problems: list[str] = field(default_factory=list)  # sentences on what is missing or damaged

    @cached_property
    def skimmed(self) -> tuple[list[Record], list[Record]]:
        """Return the newest records, and all records of checks, without keeping the others.

        A run may have a million records.
        """
        newest: deque[Record] = deque(maxlen=LATEST)
        checks = []
        for record in self.intact_records():
            newest.append(record)
            if "problem" in record.values:
                checks.append(record)
        return list(newest), checks

    @property
    def step(self) -> int:
        """Return the number of steps done; during a run, the records are ahead of status.json."""
        return max(self.status.step, *(record.step for record in self.skimmed[0][-1:]), 0)

    @property
    def last_record_time(self) -> float:
        """Return when the newest record was written, in seconds since 1970; 0 if not known."""
        return max([0.0, *(valid_time(record.time) for record in self.skimmed[0][-1:])])

    def intact_records(self) -> Iterator[Record]:
        """Yield the records of metrics.jsonl; note in `problems` if a line is damaged."""
        is_damaged = False
        for record in self.each_record():
            if not record.is_damaged:
                yield record
            is_damaged |= record.is_damaged
        if is_damaged:
            self.problems.append("metrics.jsonl has damaged lines, which are left out.")

    @cached_property
    def failures(self) -> dict[str, list[Failure]]:
        """Return the error files by launch, each list sorted by time."""
        by_launch: dict[str, list[Failure]] = {}
        for path in sorted((self.folder / "errors").glob("*_rank_*_step_*.json")):
            if failure := read_failure(path):
                by_launch.setdefault(failure.launch, []).append(failure)
            else:
                self.problems.append(f"errors/{path.name} is damaged, so it is left out.")
        for failures in by_launch.values():
            failures.sort(key=lambda failure: failure.time)
        return by_launch

    def each_record(self, name: str = "metrics.jsonl") -> Iterator[Record]:
        """Yield the records of a file one by one, damaged ones too."""
        path = self.folder / name
        try:
            yield from each_record(path)
        except OSError:
            if os.path.lexists(path):  # a link, a folder, or a file that cannot be read
                yield Record()  # as a damaged line


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not a run folder; give the path of one such as runs/image_classification."
        )
    return read_folder(folder)


def read_folder(folder: Path) -> Run:
    """Read a run folder in which files may be missing, for example after an early failure."""
    status, info = read_status(folder), read_info(folder)
    state = status.outcome or "damaged"
    if state == "running" and is_locked(folder) is False:
        state = "interrupted"
    run = Run(folder=folder, status=status, state=state, info=info, settings={})
    # TypeError, RecursionError: what JSON cannot represent, such as a date as key, or a list that
    # contains itself
    with suppress(ConfigError, TypeError, ValueError, RecursionError):
        settings = read_yaml(folder / "config.yaml", follow=False)
        json.dumps(settings, default=str)
        run.settings = flat(settings)
    damaged = {
        "config.yaml": not run.settings,
        "status.json": not status.outcome,
        "run.json": not info.launch,
    }
    for name, is_damaged in damaged.items():
        if is_damaged:
            run.problems.append(f"{name} is missing or damaged, so its content is not known.")
    if info.launch and info.format != RUN_FORMAT:
        run.problems.append(
            f"run.json says that the run folder has format {info.format}, but this version of the"
            f" project reads format {RUN_FORMAT}: unknown fields are left out."
        )
    return run


def read_records(run: str | Path) -> list[dict[str, Json]]:
    """Read the records of a run, finished or not: `pandas.DataFrame(read_records(run))`.

    Args:
        run: the run folder.

    Returns:
        The records of metrics.jsonl, in its order, as docs/run-folder.md describes them.

    Raises:
        ConfigError: this is not a run folder.
    """
    return [record.to_json() for record in read_run(Path(run)).intact_records()]


def valid_time(seconds: Any) -> float:
    """Return a time in seconds since 1970; 0 if it is not a possible time."""
    return seconds if is_number(seconds) and 0 < seconds < 1e11 else 0.0


def is_run(folder: Path) -> bool:
    """Return whether a folder holds any part of a run."""
    return any(os.path.exists(folder / name) for name in PARTS_OF_A_RUN)  # False if not permitted


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool; exit with a sentence if a file cannot be read or a run does not exist."""
    # end without a message if the reader of the output, such as `head`, has ended
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except ConfigError as error:
        exit_with_error(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        exit_with_error(ConfigError(f"{where}{error.strerror or error}."))


# ---- how numbers and times are shown -------------------------------------------------------------
def format_number(value: float | None) -> str:
    """Round to four digits: 0.4312, 3021, 31.2k, 1.21M; "not finite" for NaN, infinity or None."""
    if value is None or not math.isfinite(value):
        return "not finite"
    value = float(f"{value:.4g}")
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def print_table(title: str, rows: list[list[str]]) -> None:
    """Print a table; its first row holds the names of the columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
