"""The contents of a report, from top to bottom."""

import json
import shlex
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...files import read_own
from ...words import PACKAGE, format_seconds
from ..goodput import PARTS, goodput
from ..reader import NOT_COMPARED, format_number, valid_time
from ..spikes import spikes
from .charts import Axis, Line, chart, key, step_axis
from .history import PHASES, History, number, text
from .page import Html, escape, table

MAX_METRICS = 12  # charts of results; the same number of charts of the recipe's scalars
MAX_EVENTS = 25  # evaluations (the newest are shown), their results, findings, pictures
MAX_WORDS = 500  # of a list of texts, such as a command
PICTURE_BYTES, PICTURES_BYTES = 100_000, 150_000  # limits of one picture, and of all together
REMARKS = {
    "running": "This page shows the run as it was when the page was written.",
    "interrupted": "The run was killed, or its machine is down. The same command continues it.",
    "preempted": "The run saved and stopped. The same command continues it.",
}
SPEED = (  # title, column, factor
    ("Samples per second", "samples_per_second", 1),
    ("Items per second", "items_per_second", 1),
    ("Model FLOPs utilization (MFU), %", "mfu", 100),
    ("Peak memory of a rank, GiB", "peak_memory_bytes", 2**-30),
    ("Data wait of rank 0, % of the time", "data_share", 100),
    ("Time to the end of the last forward pass, slowest rank, s", "rank_seconds_max", 1),
    ("Time to the end of the last forward pass, median rank, s", "rank_seconds_median", 1),
    ("GPU utilization, mean of the ranks, %", "gpu_utilization", 1),
)


def body(runs: list[History], title: str) -> str:
    """Return the body of the page."""
    x = step_axis(max(run.last.step for run in runs))
    groups = max(80, 400 // len(runs))  # of points; fewer for many runs, to keep the page small
    curves, rates = learning(runs, x, groups), speed(runs, x, groups)
    parts = [f"<h1>{escape(title)}</h1>{summary(runs)}"]
    parts += [section("Curves", curves), section("Speed", rates)]
    for run in runs:
        part = section("Evaluations", evaluations(run, PICTURES_BYTES // len(runs)))
        part += section("Starts", starts(run))
        rows = [[name, as_typed(value)] for name, value in run.run.settings.items()]
        part += section("Settings", table([], rows)) + section("Provenance", provenance(run))
        head = f"<summary>More of {escape(run.name)}</summary>"
        parts.append(part if len(runs) == 1 else f"<details>{head}{part}</details>")
    footer = f"A curve of more than {2 * groups} records shows mean and range of {groups} groups. "
    footer += time.strftime("Written %Y-%m-%d %H:%M UTC.", time.gmtime())
    return f"{''.join(parts)}<footer>{footer}</footer>"


def section(title: str, content: str, level: str = "h2") -> str:
    """Return content below a title; "" if the content is empty."""
    return f"<{level}>{title}</{level}>{content}" if content else ""


def paragraphs(*texts: str) -> str:
    """Return each text that is not empty as a paragraph."""
    return "".join(f"<p>{escape(line, 2000)}</p>" for line in texts if line)


# ---- the top -------------------------------------------------------------------------------------
def by_run(runs: list[str], columns: list[dict[str, str]]) -> str:
    """Return a table with a column for each run. Empty rows are left out; one run has no head."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    heads = [Html(key(f"c{i}") + escape(name)) for i, name in enumerate(runs)]
    content = table(["", *heads] * (len(runs) > 1), [row for row in rows if any(row[1:])])
    return f'<div class="runs">{content}</div>'


def summary(runs: list[History]) -> str:
    """Return the differing settings, main numbers, command and remarks of each run."""
    typed = [{name: as_typed(value) for name, value in run.run.settings.items()} for run in runs]
    intact = [settings for settings in typed if settings]  # their config.yaml is readable
    names = {name: None for settings in intact for name in settings if name not in NOT_COMPARED}
    differing = [name for name in names if len({settings.get(name) for settings in intact}) > 1]
    columns = [
        {name: settings.get(name, "") for name in differing} | facts(run)
        for settings, run in zip(typed, runs, strict=True)
    ]
    parts = [by_run([run.name for run in runs], columns)]
    for i, run in enumerate(runs):
        parts.append(f"<p>{key(f'c{i}') * (len(runs) > 1)}{command(run)}</p>{remarks(run)}")
    return "".join(parts)


def facts(run: History) -> dict[str, str]:
    """Return the outcome and the main numbers of a run by title, as far as they are known."""
    status, state, (metric, best) = run.run.status, run.run.state, run.best
    elapsed = number(run.last.elapsed_seconds)
    badge = state if state in ("finished", "failed", *REMARKS) else "damaged"
    rows = {
        "Outcome": Html(f'<span class="state {badge}">{escape(state, 30)}</span>'),
        "Steps": f"{max(run.last.step, status.step):,} of {status.steps:,}",
    }
    if best:
        result = format_number(best.results[metric])
        rows[f"Best {metric}"] = f"{result} at step {best.record.step:,}"
    if elapsed > 0:
        rows["Duration, without repeated steps"] = format_seconds(elapsed)
    for start in run.starts[-1:]:
        rows["Processes"] = f"{start.world_size}, hosts: {len(start.hosts)}"
    for title, name, factor in SPEED[:3]:
        if name in run.curves:
            median = float(np.nanmedian(run.curves[name]) * factor)
            rows[f"{title}, median"] = format_number(median)
    return rows


def remarks(run: History) -> str:
    """Return paragraphs: what the outcome means, the reason, damaged files, findings of checks."""
    reason, state = text(run.run.status.reason), run.run.state
    lines = [REMARKS.get(state, ""), reason * (state == "preempted"), *run.run.problems]
    findings = (f"Step {one.step:,}: {text(one.values.get('problem'))}" for one in run.checks)
    lines += [*dict.fromkeys(findings)][:MAX_EVENTS]
    if state != "failed":
        return paragraphs(*lines)
    doctor = shlex.join(["python", "-m", PACKAGE, "doctor", str(run.run.folder)])
    lines = paragraphs(reason or "The reason is not known.", *lines)
    return f'<b class="failed">{lines}</b>More: <code>{escape(doctor, 1000)}</code>'


def command(run: History) -> str:
    """Return the command of the launcher, or else of rank 0; lines break only between words."""
    typed = words(run.run.info.launcher or run.run.info.command)
    typed = [Path(word).name for word in typed[:1]] + typed[1:]
    spans = (f"<span>{escape(shlex.quote(word), 2000)}</span>" for word in typed)
    return f"<code>{' '.join(spans)}</code>"


def words(value: Any) -> list[str]:
    """Return the texts of a list, such as a recorded command; [] for anything else."""
    return [text(word) for word in value[:MAX_WORDS]] if isinstance(value, (list, tuple)) else []


# ---- charts --------------------------------------------------------------------------------------
def column(runs: list[History], name: str, label: str = "", factor: float = 1) -> list[Line]:
    """Return a line for each run with this column; `label` names the line of a single run."""
    return [
        Line(label if len(runs) == 1 else run.short, run.steps, run.curves[name] * factor, color)
        for color, run in enumerate(runs)
        if name in run.curves
    ]


def results(runs: list[History], name: str, first_color: int = 0) -> list[Line]:
    """Return a line for each run, from one result of its evaluations."""
    lines = []
    for color, run in enumerate(runs, first_color):
        known = [evaluation for evaluation in run.evaluations if name in evaluation.results]
        steps = np.array([evaluation.record.step for evaluation in known], float)
        values = np.array([evaluation.results[name] for evaluation in known])
        lines.append(Line(name if len(runs) == 1 else run.short, steps, values, color))
    return lines


def steps_to_mark(runs: list[History], name: str) -> dict[str, list[float]]:
    """Return the steps to mark in the chart of a column, by a key of charts.RULES.

    The report of several runs has only the marks of skipped steps and spikes.
    """
    marks = {"skipped": [step for run in runs for step in run.skipped], "spike": []}
    for run in runs:
        marked = spikes(run.curves.get(name, np.zeros(0)).tolist())
        marks["spike"] += [run.steps[index] for index in marked]
    if len(runs) == 1:
        marks["restart"] = [start.record.step for start in runs[0].starts[1:]]
        marks["checkpoint"] = [record.step for record in runs[0].checkpoints]
        marks["check"] = [record.step for record in runs[0].checks]
    return marks


def learning(runs: list[History], x: Axis, groups: int) -> str:
    """Return the charts of the loss, the results, the gradient norm and the learning rate."""
    evaluations = [evaluation for run in runs for evaluation in run.evaluations]
    names = list(dict.fromkeys(name for one in evaluations for name in one.results))
    losses = [name for name in names if name.endswith("/loss")][: 7 * (len(runs) == 1)]
    names = [name for name in names if name not in losses]
    loss = column(runs, "loss", "training")
    for color, name in enumerate(losses, 1):
        loss += results(runs, name, color)
    lines = {"Loss": loss} | {name: results(runs, name) for name in names[:MAX_METRICS]}
    scalars = list(dict.fromkeys(name for run in runs for name in run.curves if "/" in name))
    lines |= {name: column(runs, name) for name in scalars[:MAX_METRICS]}
    lines["Gradient norm"] = column(runs, "gradient_norm", "before clipping")
    columns = {"Loss": "loss", "Gradient norm": "gradient_norm"}
    marks = {title: steps_to_mark(runs, name) for title, name in columns.items()}
    charts = [chart(name, line, x, groups, marks.get(name, {})) for name, line in lines.items()]
    charts.append(chart("Learning rate", column(runs, "learning_rate"), x, groups, from_zero=True))
    notes = [skipped(run) for run in runs]
    notes.append("Nothing is recorded yet." * (not any(charts)))
    for kind, all_names in (("metrics", names), ("scalars of the recipe", scalars)):
        if not_drawn := ", ".join(all_names[MAX_METRICS:]):
            notes.append(f"Not drawn, since a page shows {MAX_METRICS} {kind}: {not_drawn}.")
    return f'{paragraphs(*notes)}<div class="charts">{"".join(charts)}</div>'


def skipped(run: History) -> str:
    """Return a sentence that says how many steps were skipped, and which records are marked."""
    steps = [f"{step:,.0f}" for step in run.skipped[:MAX_EVENTS]]
    steps += ["..."] * (len(run.skipped) > MAX_EVENTS)
    count = np.nanmax(run.curves.get("skipped_steps", np.zeros(1)))
    total = f"{run.short}: skipped steps (gradient not finite, or no items): {count:,.0f}"
    where = f"records with skipped steps or without a finite loss: {', '.join(steps)}"
    return f"{total}; {where}." if steps else ""


def speed(runs: list[History], x: Axis, groups: int) -> str:
    """Return a table of where the time went, and the charts of throughput, memory and ranks."""
    charts = [
        chart(title, column(runs, name, "", factor), x, groups, from_zero=True)
        for title, name, factor in SPEED
    ]
    top = by_run([run.short for run in runs], [goodput_rows(r) | phase_rows(r) for r in runs])
    return f'{top}<div class="charts">{"".join(charts)}</div>' if any(charts) else top


def goodput_rows(run: History) -> dict[str, str]:
    """Return the shares of the time since the first launch, by title."""
    if not (shares := goodput(run.run.folder)):
        return {"Starts not in starts.jsonl": "all"}
    calendar, launcher, unknown = (shares[n] for n in ("calendar", "launcher", "unknown_starts"))
    rows = {"Time since the first launch": format_seconds(calendar["seconds"])}
    parts = {name: calendar[name] for name in (*PARTS, "down")}
    rows |= {name: f"{share:.1%}" * (share >= 0.0005) for name, share in parts.items()}
    rows["Time with a launcher"] = format_seconds(launcher["seconds"])
    rows["kept, of the time with a launcher"] = f"{launcher['kept']:.1%}"
    return rows | {"Starts not in starts.jsonl": str(unknown or "")}


def phase_rows(run: History) -> dict[str, str]:
    """Return the share of each phase in the time of rank 0, by title."""
    elapsed = run.curves.get("elapsed_seconds", np.zeros(len(run.steps)))
    began = [number(start.record.elapsed_seconds) for start in run.starts[:1]]
    seconds = np.nan_to_num(np.diff(elapsed, prepend=began or elapsed[:1])).clip(0) + 1e-9
    rows = {}
    for name in PHASES:
        values = run.curves.get(f"{name}_share", np.zeros(0))
        kept = np.flatnonzero(np.isfinite(values))
        share = np.average(values[kept], weights=seconds[kept]) if len(kept) else None
        rows[f"Rank 0: {name}"] = "" if share is None else f"{share:.1%}"
    return rows


# ---- events --------------------------------------------------------------------------------------
def evaluations(run: History, max_bytes: int) -> str:
    """Return a table of the newest evaluations, and the newest samples.

    Args:
        run: the run.
        max_bytes: maximum size of all pictures together.
    """
    (_, best), newest = run.best, run.evaluations[: -MAX_EVENTS - 1 : -1]
    names = list(dict.fromkeys(name for one in newest for name in one.results))[:MAX_EVENTS]
    rows = []
    for one in newest:
        values = [format_number(one.results[n]) if n in one.results else "" for n in names]
        marks = " (best)" * (one is best) + " (beside training)" * one.is_followed
        rows.append([f"{one.record.step:,}{marks}", *values])
    parts = [table([f"Step (newest of {len(run.evaluations):,})", *names], rows)]
    for one in [evaluation for evaluation in newest if not evaluation.is_followed][:1]:
        sample = escape(one.record.text("sample"), 4000)
        samples = f"<pre>{sample}</pre>" * bool(sample)
        names = words(one.record.values.get("pictures"))[:MAX_EVENTS]
        samples += pictures(run.run.folder, names, max_bytes)
        parts.append(section(f"Samples of step {one.record.step:,}", samples, "h3"))
    return "".join(parts)


def pictures(folder: Path, names: list[str], max_bytes: int) -> str:
    """Return pictures of a run folder, up to a number of bytes in all."""
    parts = []
    for name in names:
        data = read_picture(folder, name, min(max_bytes, PICTURE_BYTES))
        max_bytes -= len(data)
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        source = f"data:image/{kind};base64,{b64encode(data).decode()}"
        image = f'<img src="{source}" alt="{escape(name)}">'
        parts.append(image if data else paragraphs(f"{name} is not shown."))
    return "".join(parts)


def read_picture(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a PNG or JPEG file in the run folder; b"" for other or larger files."""
    # ValueError: a zero byte in the name; RuntimeError: a link that leads to itself
    with suppress(OSError, ValueError, RuntimeError):
        path = (folder / name).resolve()
        is_inside = path.is_relative_to(folder.resolve()) and path.is_file()
        data = read_own(path, most=max_bytes) if is_inside else b""
        return data if data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) else b""
    return b""


def starts(run: History) -> str:
    """Return a table of the starts of a run, newest first, with changes of its numerics."""
    rows = []
    for start in run.starts:
        began = valid_time(start.record.time)
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)) * bool(began)
        hosts = ", ".join(f"{host} x {count}" for host, count in start.hosts.items())
        is_last = start is run.starts[-1]
        end = start.end or (run.run.state if is_last else "not recorded")
        steps = f"{start.record.step:,} to {start.last:,}"
        rows.append([when, steps, start.world_size, hosts, start.changed, end])
    return table(["When", "Steps", "Processes", "Hosts", "Changed", "How it ended"], rows[::-1])


# ---- settings and provenance ---------------------------------------------------------------------
def as_typed(value: Any) -> str:
    """Return a setting as it is typed on a command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def provenance(run: History) -> str:
    """Return a table of run.json: commit, packages, commands, hosts, environment."""
    rows = []
    for group, content in asdict(run.run.info).items():
        for name, value in content.items() if isinstance(content, dict) else [("", content)]:
            is_list = isinstance(value, (list, tuple))
            cell = shlex.join(words(value)) if is_list else as_typed(value)
            rows.append([f"{group} {name}", cell])
    return table([], rows)
