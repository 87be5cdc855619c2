"""List the runs in a folder: state, step, best result, goodput, age, settings that differ.

    python -m my_project runs
    python -m my_project runs /shared/runs | grep failed
    python -m my_project runs --reproduce runs/table

Goodput is the share of the time since the first launch that trained steps which were kept; it is
not known of a run under way, nor of starts by accelerate launch or torchrun.

The settings of each run are compared with those of the first, by name, of the runs with the same
recipe. A run under way is read without disturbing it.
"""

import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import ConfigError, open_own
from ..run_files import parse_record
from ..words import format_seconds, printable, say
from . import reproduce
from .reader import NOT_COMPARED, Run, format_number, is_run, parser_of, read_run, run_tool

COLUMNS = ("run", "state", "step", "best", "goodput", "age", "differs from the first")
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
COLORS = {"finished": "green", "running": "cyan", "failed": "red", "damaged": "red"}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is listed of a run."""

    run: Run
    step: int  # of the newest record or, if that is later, of status.json
    best: float | None
    goodput: float | None  # over the calendar, as status.json has it since the last launch ended
    age_seconds: float  # since the newest record or change of state


def summarize(folder: Path) -> Summary:
    """Read what is listed of a run."""
    run = read_run(folder)
    step, values = _read_results(folder / "metrics.jsonl", best_metric(run))
    choose = min if run.settings.get("evaluation.best_mode") == "min" else max
    paths = (folder / "status.json", folder / "metrics.jsonl")
    changes = [path.stat().st_mtime for path in paths if path.exists()]
    return Summary(
        run=run,
        step=max(step, run.status.step),
        best=choose(values, default=None),
        goodput=run.status.calendar.get("kept"),
        age_seconds=max(0, time.time() - max(changes, default=folder.stat().st_mtime)),
    )


def best_metric(run: Run) -> str:
    """Return the name of the result that decides; "" where none is known."""
    return str(run.settings.get("evaluation.best_metric") or "")


def _read_results(path: Path, metric: str) -> tuple[int, list[float]]:
    """Return the step of the last record, and all values of a metric.

    Only lines that name the metric are parsed: a long run has hundreds of thousands.
    """
    try:
        with open_own(path) as file:
            lines = file.read().splitlines()
    except OSError:
        return 0, []
    last = next((record for line in reversed(lines) if (record := parse_record(line))), {})
    name = f'"{metric}":'.encode()
    values = [parse_record(line).get(metric) for line in lines if name in line]
    return last.get("step", 0), [value for value in values if isinstance(value, (int, float))]


def list_runs(folder: Path) -> list[Summary]:
    """Read all runs of a folder, by name.

    Raises:
        ConfigError: there are none.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder that holds the runs.")
    if is_run(folder):
        raise ConfigError(f"{folder} is itself a run; give the folder that holds it.")
    folders = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    if not (runs := [summarize(path) for path in folders if path.is_dir() and is_run(path)]):
        raise ConfigError(f"{folder} holds no runs; give the folder that holds them.")
    return runs


def differences(runs: list[Summary]) -> list[list[str]]:
    """List for each run its settings that differ from the first run with the same recipe."""
    ignored = (*NOT_COMPARED, "telemetry.", "checkpoints.")
    first: dict[Any, dict[str, Any]] = {}
    listed = []
    for settings in (summary.run.settings for summary in runs):
        reference = first.setdefault(settings.get("recipe"), settings)
        names = [name for name in settings | reference if not name.startswith(ignored)]
        differing = [name for name in names if settings.get(name) != reference.get(name)]
        listed.append([f"{name}={settings.get(name)}" for name in sorted(differing)])
    return listed


def print_runs(runs: list[Summary]) -> None:
    """Print a table; in a terminal that is too narrow for it, three lines for each run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    # a width that no line reaches, so that what reads the lines finds them whole
    width = None if is_terminal else 10_000
    console = Console(soft_wrap=True, width=width, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    rows = [row_of(one, differing) for one, differing in zip(runs, differences(runs), strict=True)]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    is_narrow = sum(widths) + 2 * len(widths) > console.width
    for (name, state, *parts, differing), one in zip(rows, runs, strict=True):
        color = COLORS.get(one.run.state, "yellow")
        table.add_row(name, Text(state, color), *parts, Text(differing, "dim"))
        if is_narrow:
            step, best, goodput, age = parts
            console.print(Text(name, "bold"))
            says = filter(None, (step, best, goodput and f"goodput {goodput}", f"{age} ago"))
            console.print(Text("  ").append(state, color).append(f"  {'  '.join(says)}"))
            for line in textwrap.wrap(differing, console.width - 2, **WHOLE_WORDS):
                console.print(Text(f"  {line}", "dim"))
    if not is_narrow:
        console.print(table)


def row_of(one: Summary, differing: list[str]) -> list[str]:
    """Return what the columns say of a run."""
    run, best = one.run, one.best
    return [
        printable(run.folder.name),
        printable(run.state),
        printable(f"{one.step}/{run.status.steps or '?'}"),
        "" if best is None else printable(f"{best_metric(run)}={format_number(best)}"),
        "" if one.goodput is None else f"{one.goodput:.0%}",
        format_seconds(one.age_seconds),
        printable(", ".join(differing)),
    ]


def main() -> None:
    """List the runs."""
    parser = parser_of("runs", __doc__)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--reproduce", type=Path, help="print what runs a run again")
    arguments = parser.parse_args()
    if arguments.reproduce:
        raise SystemExit(reproduce.print_commands(arguments.reproduce))
    print_runs(runs := list_runs(arguments.folder))
    for run in (summary.run for summary in runs):
        for problem in run.problems:
            say(f"{run.folder.name}: {problem}", to=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
