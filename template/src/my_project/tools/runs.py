"""List the runs in a folder: state, step, best result, age, and settings that differ.

    python -m my_project runs
    python -m my_project runs /shared/runs | grep failed

Each run is compared with the first, by name, of those with the same recipe. A run under way is read
without disturbing it.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import cli
from ..files import ConfigError, flat, is_locked, parse_record, printable, read_status, read_yaml
from ..records.outcome import format_metric
from .reader import format_problem, is_run

# These settings name and place a run, or say how it starts and stops.
NOT_COMPARED = {"run_name", "runs_folder", "resume", "stop_after"}
WIDE = 100  # columns of a terminal from which on the settings have a column of their own
STYLES = {
    "finished": "green",
    "running": "cyan",
    "preempted": "yellow",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
}


# ---- the runs of a folder ------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is listed of a run."""

    name: str
    state: str  # a key of STYLES
    step: int  # of the newest record or, if that is later, of status.json
    steps: int  # of the whole run; 0 until the data is known
    best_metric: str
    best: float | None
    age_seconds: float  # since the newest record or change of state
    settings: dict[str, Any]  # by dotted name
    problem: str  # why the settings are unknown; empty if they are known


def summarize(folder: Path) -> Summary:
    """Read what is listed of a run."""
    status = read_status(folder)
    settings: dict[str, Any] = {}
    problem = ""
    try:
        settings = compared(flat(read_yaml(folder / "config.yaml")))
    except ConfigError:
        problem = "config.yaml is missing or damaged"
    best_metric = str(settings.get("evaluation.best_metric") or "")
    step, values = _read_results(folder / "metrics.jsonl", best_metric)
    choose = min if settings.get("evaluation.best_mode") == "min" else max
    return Summary(
        name=folder.name,
        state=state_of(folder, status),
        step=max(step, status.get("step", 0)),
        steps=status.get("steps", 0),
        best_metric=best_metric,
        best=choose(values, default=None),
        age_seconds=time.time() - _last_change(folder),
        settings=settings,
        problem=problem,
    )


def state_of(folder: Path, status: dict[str, Any]) -> str:
    """Return the outcome in a status.json, or what has become of the run since."""
    state = status.get("outcome", "damaged")
    return "interrupted" if state == "running" and is_locked(folder) is False else state


def _read_results(path: Path, metric: str) -> tuple[int, list[float]]:
    """Return the step of the last record, and all values of a metric.

    Only lines that name the metric are parsed: a long run has hundreds of thousands.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return 0, []
    last = next((record for line in reversed(lines) if (record := parse_record(line))), {})
    name = json.dumps(metric).encode() + b":"
    values = [parse_record(line).get(metric) for line in lines if name in line]
    return last.get("step", 0), [value for value in values if isinstance(value, (int, float))]


def _last_change(folder: Path) -> float:
    """Return when a run was last written to, as seconds since the epoch."""
    paths = [path for name in ("status.json", "metrics.jsonl") if (path := folder / name).exists()]
    return max(path.stat().st_mtime for path in paths or [folder])


def compared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings by which runs are told apart."""
    about = (*NOT_COMPARED, "telemetry.", "checkpoints.")
    return {name: value for name, value in settings.items() if not name.startswith(about)}


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
    first: dict[Any, dict[str, Any]] = {}
    listed = []
    for summary in runs:
        settings = summary.settings
        if summary.problem:
            listed.append([summary.problem])
            continue
        reference = first.setdefault(settings.get("recipe"), settings)
        names = sorted(settings.keys() | reference.keys())
        differing = [name for name in names if settings.get(name) != reference.get(name)]
        listed.append([f"{name}={settings.get(name)}" for name in differing])
    return listed


# ---- the table -----------------------------------------------------------------------------------
def print_runs(runs: list[Summary]) -> None:
    """Print a table that fits the terminal; where there is none, one line per run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    # a width that no line reaches, so that what reads the lines finds them whole
    console = Console(soft_wrap=not is_terminal, width=None if is_terminal else 10_000)
    is_wide = not is_terminal or console.width >= WIDE
    metrics = {summary.best_metric for summary in runs if summary.best is not None}
    common = metrics.pop() if is_terminal and len(metrics) == 1 else ""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("step", no_wrap=True, justify="right")
    table.add_column("best", overflow="fold", justify="right")
    table.add_column("age", no_wrap=True, justify="right")
    if is_wide:
        table.add_column("differs", overflow="fold")
    for summary, differing in zip(runs, differences(runs), strict=True):
        name = Text(printable(summary.name))
        differs = Text(printable(", ".join(differing)), "dim")
        if differing and not is_wide:
            name = name.append("\n  ").append(differs)
        best = "" if summary.best is None else format_metric(summary.best)
        if best and summary.best_metric != common:
            best = f"{summary.best_metric}={best}"
        row = [
            name,
            Text(printable(summary.state), STYLES.get(summary.state, "")),
            Text(f"{summary.step}/{summary.steps or '?'}"),
            Text(printable(best)),
            Text(_age(summary.age_seconds)),
        ]
        table.add_row(*row, *([differs] if is_wide else []))
    console.print(table)
    if common:
        console.print(Text(f"best: {printable(common)}", "dim"))


def _age(seconds: float) -> str:
    seconds = max(0, seconds)
    for unit, unit_seconds, least in (("d", 86400, 2), ("h", 3600, 1), ("m", 60, 1)):
        if seconds >= least * unit_seconds:
            return f"{int(seconds / unit_seconds)}{unit}"
    return f"{int(seconds)}s"


def main(arguments: argparse.Namespace) -> None:
    """List the runs."""
    folder = Path(arguments.folder)
    print_runs(runs := list_runs(folder))
    for problem in filter(None, (format_problem(folder / one.name) for one in runs)):
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    parser = cli.make_parser(__doc__)
    parser.add_argument("folder", nargs="?", default="runs", help="the folder of the runs (runs)")
    cli.run(main, parser.parse_args())
