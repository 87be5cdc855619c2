"""Read a run folder, as docs/run-folder.md describes it, and format its times and numbers.

The run may be under way, come from someone else or be damaged: what is missing or damaged is left
out, and named in `problems`.
"""

import argparse
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from inspect import cleandoc
from pathlib import Path
from typing import Any

from ..failures import Failure, exit_with_error
from ..files import ConfigError, read_yaml
from ..run_files import (
    RUN_FORMAT,
    RunInfo,
    Status,
    each_record,
    flat,
    is_locked,
    read_failure,
    read_info,
    read_status,
)
from ..words import PACKAGE

PARTS_OF_A_RUN = ("config.yaml", "status.json", "run.json", "metrics.jsonl", "checkpoints")
LATEST = 100  # records that tell what a run does now
NOT_COMPARED = {"run_name", "runs_folder", "resume", "stop_after"}  # they name or place a run


@dataclass(kw_only=True)
class Run:
    """What a run folder holds."""

    folder: Path
    status: Status
    state: str  # its outcome; interrupted: it says running, and no process holds the run; damaged
    info: RunInfo
    settings: dict[str, Any]  # config.yaml by dotted name, such as optim.lr; recipe: its class
    problems: list[str] = field(default_factory=list)  # what is missing or damaged: a sentence each

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, in its order, without damaged lines."""
        return list(self._sound_records())

    @cached_property
    def skimmed(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the newest records, and those of checks; a run may have a million others."""
        newest: deque[dict[str, Any]] = deque(maxlen=LATEST)
        checks = []
        for record in self._sound_records():
            newest.append(record)
            if "problem" in record:
                checks.append(record)
        return list(newest), checks

    @property
    def step(self) -> int:
        """Return the steps done, of which status.json knows those of a running start late."""
        return max(self.status.step, *(one["step"] for one in self.skimmed[0][-1:]), 0)

    def _sound_records(self) -> Iterator[dict[str, Any]]:
        is_damaged = False
        for record in self.each_record():
            if record:
                yield record
            is_damaged |= not record
        if is_damaged:
            self.problems.append("metrics.jsonl has damaged lines, which are left out.")

    @cached_property
    def failures(self) -> dict[str, list[Failure]]:
        """Return the error files by launch, each list sorted by time."""
        found: dict[str, list[Failure]] = {}
        for path in sorted((self.folder / "errors").glob("*_rank_*_step_*.json")):
            if failure := read_failure(path):
                found.setdefault(failure.launch, []).append(failure)
            else:
                self.problems.append(f"errors/{path.name} is damaged, so it is left out.")
        return {launch: sorted(of, key=lambda one: one.time) for launch, of in found.items()}

    def each_record(self, name: str = "metrics.jsonl") -> Iterator[dict[str, Any]]:
        """Yield the records of a file one by one; {} for a damaged line."""
        path = self.folder / name
        try:
            yield from each_record(path)
        except OSError:
            yield from [{}] * os.path.lexists(path)  # a link, a folder, no permission


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: it is none.
    """
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not a run folder; give the path of one such as runs/image_classification."
        )
    return read_folder(folder)


def read_folder(folder: Path) -> Run:
    """Read a folder that may be less than a run, such as that of a start that failed early."""
    status, info = read_status(folder), read_info(folder)
    state = status.outcome or "damaged"
    if state == "running" and is_locked(folder) is False:
        state = "interrupted"
    run = Run(folder=folder, status=status, state=state, info=info, settings={})
    with suppress(ConfigError):
        run.settings = flat(read_yaml(folder / "config.yaml", follow=False))
    damaged = {
        "config.yaml": not run.settings,
        "status.json": status.is_damaged,
        "run.json": info.is_damaged,
    }
    for name, is_damaged in damaged.items():
        if is_damaged:
            run.problems.append(f"{name} is missing or damaged, so what it says is not known.")
    if not info.is_damaged and info.format != RUN_FORMAT:
        problem = f"run.json has format {info.format} of a run folder, and this version reads"
        run.problems.append(f"{problem} {RUN_FORMAT}: what it does not know is left out.")
    return run


def read_records(run: str | Path) -> list[dict[str, Any]]:
    """Read the records of a run, finished or not: `pandas.DataFrame(read_records(run))`.

    Args:
        run: the run folder.

    Returns:
        The records of metrics.jsonl, in its order, as docs/run-folder.md describes them.

    Raises:
        ConfigError: this is not a run folder.
    """
    return read_run(Path(run)).records


def time_of(record: dict[str, Any]) -> float:
    """Return when a record was written, in seconds since 1970; 0 where it does not say it."""
    value = record.get("time")
    return value if isinstance(value, (int, float)) and 0 < value < 1e11 else 0.0


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a part of a run."""
    return any((folder / name).exists() for name in PARTS_OF_A_RUN)


def parser_of(tool: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a tool's command line."""
    return argparse.ArgumentParser(
        prog=f"python -m {PACKAGE} {tool}",
        description=cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run_tool(main: Callable[[], None]) -> None:
    """Run a tool; what cannot be read, or a run that there is not, ends in a sentence."""
    try:
        main()
    except ConfigError as error:
        exit_with_error(error)
    except OSError as error:
        exit_with_error(ConfigError(f"{error.filename}: {error.strerror}."))


# ---- how numbers and times are shown -------------------------------------------------------------
def format_number(value: float | None) -> str:
    """Format a number in four digits: 0.4312, 3021, 31.2k, 1.21M; NaN and None: not finite."""
    if value is None or not math.isfinite(value):
        return "not finite"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def print_table(title: str, rows: list[list[str]]) -> None:
    """Print a table whose first row has the names of the columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
