"""Write a report of one or several runs: one HTML file that needs no network.

    python -m my_project report runs/image_classification
    python -m my_project report runs/a runs/b --output compared.html

The report of one run is written into its folder as report.html; that of several runs into the
folder that holds them. The runs may be under way: the same command writes the report again.
"""

import argparse
import math
import os
import shlex
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from .. import cli
from ..config import ConfigError
from ..failures import own_frame
from ..files import write_atomically
from ..records.outcome import format_seconds
from ..records.runs import check_run
from .axes import brief
from .curves import learning, speed
from .events import evaluations, timeline_of
from .history import History, number, read_history, text
from .page import GENERATOR, escape, page, table
from .provenance import configuration, provenance

MOST_RUNS = 8  # colors that one can tell apart
LONG_NAME = 20  # characters
PACKAGE = (__package__ or "").rpartition(".")[0]
REMARKS = {
    "running": "The run is under way; this page shows it as it was when the page was written.",
    "interrupted": "The process is gone: killed, or its machine is down. The same command as before"
    " continues the run.",
    "preempted": "The run saved and stopped. The same command as before continues it.",
    "damaged": "The outcome is not known.",
}


# ---- the file ------------------------------------------------------------------------------------
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


def _name(runs: list[History]) -> None:
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


# ---- the page ------------------------------------------------------------------------------------
def body(runs: list[History], *, written: str, command: str) -> str:
    """Return the body of the page."""
    found = {
        "Curves": learning(runs),
        "Evaluations": evaluations(runs),
        "Speed": speed(runs),
        "Timeline": timeline_of(runs),
        "Configuration": configuration(runs),
        "Provenance": provenance(runs),
    }
    head = one_run(runs[0]) if len(runs) == 1 else several_runs(runs)
    names = [name for name, part in found.items() if part]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in names)
    parts = [
        f'<section id="{name.lower()}"><h2>{name}</h2>{found[name]}</section>' for name in names
    ]
    again = f"Written {written}. To write it again: <code>{escape(command, 3000)}</code>"
    return f"<header>{head}<nav>{links}</nav></header>{''.join(parts)}<footer>{again}</footer>"


# ---- the top -------------------------------------------------------------------------------------
def one_run(run: History) -> str:
    """Return the name and outcome of a run, its main numbers, and what went wrong."""
    facts = [
        ("Steps", *steps_of(run)),
        result_of(run),
        ("Duration", *time_of(run)),
        ("Samples per second", *speed_of(run)),
        ("Processes", *world_of(run)),
    ]
    tiles = "".join(
        f"<div><dt>{escape(name, 80)}</dt><dd>{escape(value)} <small>{escape(small)}</small></dd>"
        "</div>"
        for name, value, small in facts
        if value
    )
    return (
        f"<small>Report of a run</small><h1>{escape(run.name)} {state(run)}</h1>"
        f'<dl class="facts">{tiles}</dl>{remarks(run)}'
    )


def several_runs(runs: list[History]) -> str:
    """Return a table of the runs, and what went wrong."""
    metrics = {run.best_metric for run in runs if run.best}
    rows = []
    for i, run in enumerate(runs):
        key = f'<path class="line c{i} d{i}" d="M1 4h20"/>'
        what, value, at = result_of(run)
        value = f"{value} {at}" if len(metrics) == 1 else f"{what}: {value} {at}"
        steps = f"{run.step:,} of {run.status.get('steps') or '?':,}"
        cells = [steps, value, time_of(run)[0], speed_of(run)[0], world_of(run)[0]]
        name = f'<svg class="key" viewBox="0 0 22 8">{key}</svg>{escape(run.name)}'
        rows.append([name, state(run), *map(escape, cells)])
    best = f"best {metrics.pop()}" if len(metrics) == 1 else "result"
    head = ["run", "outcome", "steps", escape(best, 80), "duration", "samples/s", "processes"]
    notes = "".join(
        f"<h3>{escape(run.name)}</h3>{remark}" for run in runs if (remark := remarks(run))
    )
    return f"<small>Report</small><h1>{len(runs)} runs compared</h1>{table(head, rows)}{notes}"


def result_of(run: History) -> tuple[str, str, str]:
    """Return the name, value and step of the best result; of the last one where none decides."""
    if best := run.best:
        name, value = run.best_metric, best.results[run.best_metric]
        return f"Best {name}", brief(value, 4), f"at step {best.step:,}"
    if run.evaluations and run.evaluations[-1].results:
        last = run.evaluations[-1]
        name, value = next(iter(last.results.items()))
        return f"Last {name}", brief(value, 4), f"at step {last.step:,}"
    return "", "", ""


def state(run: History) -> str:
    """Return the outcome of a run as a badge."""
    known = run.state if run.state in ("finished", "running", "failed", *REMARKS) else "damaged"
    return f'<span class="state {known}">{escape(run.state, 30)}</span>'


def steps_of(run: History) -> tuple[str, str]:
    """Return the steps done, and of how many; the epochs."""
    steps = run.status.get("steps", 0)
    parts = [f"of {steps:,}"] if steps else []
    if run.last and math.isfinite(run.last.epoch):
        parts.append(f"epoch {brief(run.last.epoch, 4)}")
    return f"{run.step:,}", ", ".join(parts)


def time_of(run: History) -> tuple[str, str]:
    """Return how long a run has been running, and in how many starts."""
    if run.last and math.isfinite(run.last.elapsed):
        starts = len(run.starts)
        return format_seconds(run.last.elapsed), f"in {starts} start{'s' * (starts != 1)}"
    seconds = number(run.status.get("seconds"))
    return (format_seconds(seconds), "in the last start") if seconds >= 0 else ("", "")


def speed_of(run: History) -> tuple[str, str]:
    """Return the median throughput in samples per second, and in tokens and FLOPs."""
    rate, tokens, mfu = map(run.median, ("samples_per_second", "tokens_per_second", "mfu"))
    more = [f"{brief(tokens)} tokens/s"] * math.isfinite(tokens)
    more += [f"MFU {mfu:.1%}"] * math.isfinite(mfu)
    return (brief(rate), ", ".join(["median", *more])) if math.isfinite(rate) else ("", "")


def world_of(run: History) -> tuple[str, str]:
    """Return the number of processes and hosts of the last start."""
    start = run.starts[-1] if run.starts else None
    if not start or not start.world_size:
        return "", ""
    hosts = len({*start.hosts})
    return str(start.world_size), f"on {hosts} host{'s' * (hosts != 1)}" if hosts else ""


def remarks(run: History) -> str:
    """Return what an outcome means, the first failure, and what could not be read."""
    parts = []
    if run.state == "failed":
        parts.append(f'<div class="box">{failure_of(run)}</div>')
    lines = [REMARKS[run.state]] if run.state in REMARKS else []
    if run.state == "preempted" and (reason := text(run.status.get("reason"))):
        lines[0] += f" Reason: {reason}."
    lines += [problem for problem in run.problems if problem not in lines]
    if lines:
        shown = "".join(f"<p>{escape(line, 1000)}</p>" for line in lines)
        parts.append(f'<div class="box mild">{shown}</div>')
    return "".join(parts)


def failure_of(run: History) -> str:
    """Return why a run failed, where, and the command that tells more."""
    failure = run.failure
    reason = text(failure.get("reason")) or text(run.status.get("reason")) or "for no known reason"
    lines = [f"<b>{escape(reason, 2000)}</b>"]
    if failure:
        place = f"Rank {failure['rank']} on {text(failure['host'])}"
        if isinstance(failure.get("step"), int):
            place += f", at step {failure['step']}"
        kinds = {"file": str, "line": int, "function": str, "library": (str, type(None))}
        frames: list[dict[str, Any]] = [
            one
            for one in failure["frames"]
            if isinstance(one, dict) and all(isinstance(one.get(k), kinds[k]) for k in kinds)
        ]
        if at := own_frame(frames):
            place += f", in {text(at['file'])}, line {at['line']}, in {text(at['function'])}"
        lines.append(f"{escape(place, 600)}.")
    command = shlex.join(["python", "-m", PACKAGE, "doctor", str(run.folder)])
    lines.append(f"More about the failure: <code>{escape(command, 1000)}</code>")
    return "".join(f"<p>{line}</p>" for line in lines)


def main(arguments: argparse.Namespace) -> None:
    """Write the report, and print its path and size."""
    path = write_report([Path(folder) for folder in arguments.runs], arguments.output)
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    parser = cli.make_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="the run folders, at most 8", metavar="run")
    parser.add_argument("--output", help="the file to write")
    cli.run(main, parser.parse_args())
