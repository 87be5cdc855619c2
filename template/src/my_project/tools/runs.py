"""List the runs in a folder: state, step, best result, goodput, age and differing settings.

    python -m my_project runs
    python -m my_project runs /shared/runs | grep failed
    python -m my_project runs --reproduce runs/table

Goodput is the share of the time since the first launch that was spent on steps that were kept. It
is not known for a run that is under way, nor for starts by accelerate launch or torchrun.

Each run's settings are compared with those of the first run in the list that has the same recipe. A
run that is under way is not disturbed.
"""

import json
import math
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import ConfigError, open_own
from ..run_files import parse_record
from ..words import format_seconds, make_parser, printable, say
from . import reproduce
from .goodput import calendar
from .reader import NOT_COMPARED, Run, format_number, is_run, read_run, run_tool

COLUMNS = ("run", "state", "step", "best", "goodput", "age", "differs from the first")
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
COLORS = {"finished": "green", "running": "cyan", "failed": "red", "damaged": "red"}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the list shows of a run."""

    run: Run
    step: int  # of the newest record or of status.json, whichever is later
    best: float | None
    goodput: float | None  # of the time since the first launch; from status.json
    age_seconds: float  # since the newest record or change of state


def summarize(folder: Path) -> Summary:
    """Read what the list shows of a run."""
    run = read_run(folder)
    step, values = _read_results(folder / "metrics.jsonl", best_metric(run))
    choose = min if run.settings.get("evaluation.best_mode") == "min" else max
    paths = (folder / "status.json", folder / "metrics.jsonl")
    changes = [path.stat().st_mtime for path in paths if path.exists()]
    return Summary(
        run=run,
        step=max(step, run.status.step),
        best=choose(values, default=None),
        goodput=calendar(run.status).get("kept"),
        age_seconds=max(0, time.time() - max(changes, default=folder.stat().st_mtime)),
    )


def best_metric(run: Run) -> str:
    """Return the name of the metric that decides which result is best; "" if it is not known."""
    return str(run.settings.get("evaluation.best_metric") or "")


def _read_results(path: Path, metric: str) -> tuple[int, list[float]]:
    """Return the step of the last record, and all values of a metric.

    Only the lines that name the metric are parsed: a long run has hundreds of thousands of lines.
    """
    try:
        with open_own(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return 0, []
    steps = (record.step for line in reversed(lines) if (record := parse_record(line)).step >= 0)
    name = f"{json.dumps(metric)}:".encode()
    values = [parse_record(line).number(metric) for line in lines if name in line]
    return next(steps, 0), [value for value in values if not math.isnan(value)]


def list_runs(folder: Path) -> list[Summary]:
    """Read all runs in a folder, sorted by name.

    Raises:
        ConfigError: the folder holds no runs.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder that holds the runs.")
    if is_run(folder):
        raise ConfigError(f"{folder} is itself a run; give the folder that holds it.")
    folders = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    if not (runs := [summarize(path) for path in folders if path.is_dir() and is_run(path)]):
        raise ConfigError(f"{folder} holds no runs; give the folder that holds the runs.")
    return runs


def differences(runs: list[Summary]) -> list[list[str]]:
    """Return for each run the settings that differ from those of the first run of its recipe."""
    ignored = (*NOT_COMPARED, "telemetry.", "checkpoints.")
    first_of_recipe: dict[Any, dict[str, Any]] = {}
    differing = []
    for settings in (summary.run.settings for summary in runs):
        reference = first_of_recipe.setdefault(str(settings.get("recipe")), settings)
        names = [name for name in settings | reference if not name.startswith(ignored)]
        names = sorted(name for name in names if settings.get(name) != reference.get(name))
        differing.append([f"{name}={settings.get(name)}" for name in names])
    return differing


def print_runs(runs: list[Summary]) -> None:
    """Print a table; in a terminal that is too narrow for it, print a few lines for each run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # in a pipe no line is wrapped, so that programs can read the output
    width = None if sys.stdout.isatty() else 10_000
    console = Console(soft_wrap=True, width=width, markup=False, emoji=False)
    rows = [table_row(*pair) for pair in zip(runs, differences(runs), strict=True)]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    if sum(widths) + 2 * len(widths) <= console.width:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in COLUMNS:
            table.add_column(name, no_wrap=True)
        for (name, state, *cells, differing), summary in zip(rows, runs, strict=True):
            color = COLORS.get(summary.run.state, "yellow")
            table.add_row(name, Text(state, color), *cells, Text(differing, "dim"))
        console.print(table)
        return
    for (name, state, *cells, differing), summary in zip(rows, runs, strict=True):
        color = COLORS.get(summary.run.state, "yellow")
        step, best, goodput, age = cells
        console.print(Text(name, "bold"))
        facts = filter(None, (step, best, goodput and f"goodput {goodput}", f"{age} ago"))
        console.print(Text("  ").append(state, color).append(f"  {'  '.join(facts)}"))
        for line in textwrap.wrap(differing, console.width - 2, **WHOLE_WORDS):
            console.print(Text(f"  {line}", "dim"))


def table_row(summary: Summary, differing: list[str]) -> list[str]:
    """Return the cells of a run."""
    run, best = summary.run, summary.best
    return [
        printable(run.folder.name),
        printable(run.state),
        printable(f"{summary.step}/{run.status.steps or '?'}"),
        "" if best is None else printable(f"{best_metric(run)}={format_number(best)}"),
        "" if summary.goodput is None else f"{summary.goodput:.0%}",
        format_seconds(summary.age_seconds),
        printable(", ".join(differing)),
    ]


def main() -> None:
    """List the runs."""
    parser = make_parser(__doc__, "runs")
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--reproduce", type=Path, help="print the commands that repeat this run")
    arguments = parser.parse_args()
    if arguments.reproduce:
        reproduce.print_commands(arguments.reproduce)
        return
    print_runs(runs := list_runs(arguments.folder))
    for run in (summary.run for summary in runs):
        for problem in run.problems:
            say(f"{run.folder.name}: {problem}", to=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
