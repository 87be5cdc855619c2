"""The body of a report, and its top: the outcome of each run, its main numbers, what went wrong."""

import math
import shlex
from typing import Any

from ...failures import own_frame
from ...records.outcome import format_seconds
from .axes import brief
from .curves import learning, speed
from .events import evaluations, timeline_of
from .history import History, number, text
from .page import escape, table
from .provenance import configuration, provenance

PACKAGE = (__package__ or "").removesuffix(".tools.report")
REMARKS = {
    "running": "The run is under way; this page shows it as it was when the page was written.",
    "interrupted": "The process is gone: killed, or its machine is down. The same command as before"
    " continues the run.",
    "preempted": "The run saved and stopped. The same command as before continues it.",
    "damaged": "The outcome is not known.",
}


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
