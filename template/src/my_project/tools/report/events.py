"""The events of a report: evaluations, starts and how they ended, checkpoints, spikes."""

import math
import time
from base64 import b64encode
from collections import Counter
from pathlib import Path

from ...records.outcome import checkpoints
from .axes import brief
from .charts import timeline
from .history import History, Start
from .page import details, escape, table

MOST_ROWS, MOST_COLUMNS = 25, 20  # of a table
PICTURE_BYTES, PICTURES_BYTES = 100_000, 150_000  # of one, and of all


# ---- evaluations ---------------------------------------------------------------------------------
def evaluations(runs: list[History]) -> str:
    """Return the evaluations of runs, their samples and pictures; of several, first the last."""
    parts = []
    for run in runs:
        content = results(run) + samples(run) + pictures(run)
        if content:
            parts.append(details(run.name, content) if len(runs) > 1 else content)
    if len(runs) > 1 and parts:
        last = {run.short: run.evaluations[-1] for run in runs if run.evaluations}
        names = list(dict.fromkeys(name for one in last.values() for name in one.results))
        names = names[:MOST_COLUMNS]
        cells = [
            [escape(name), f"{one.step:,}", *(_value(one.results.get(name)) for name in names)]
            for name, one in last.items()
        ]
        head = ["last evaluation", "step", *(escape(name, 80) for name in names)]
        parts.insert(0, table(head, cells, numbers=range(1, len(head))))
    return "".join(parts)


def results(run: History) -> str:
    """Return a table of the newest evaluations of a run, and the best."""
    shown, best = run.evaluations[: -MOST_ROWS - 1 : -1], run.best
    if not shown:
        return ""
    if best and best not in shown:
        shown.append(best)
    names = list(dict.fromkeys(name for one in shown for name in one.results))
    left, names = len(names[MOST_COLUMNS:]), names[:MOST_COLUMNS]
    rows = [
        [
            f"<b>{one.step:,}</b>" if one is best else f"{one.step:,}",
            *(
                _value(one.results.get(name), one is best and name == run.best_metric)
                for name in names
            ),
            f"{brief(one.seconds)} s" if math.isfinite(one.seconds) else "",
        ]
        for one in shown
    ]
    head = ["step", *(escape(name, 80) for name in names), "took"]
    if not any(row[-1] for row in rows):  # in records of older versions
        head, rows = head[:-1], [row[:-1] for row in rows]
    count, note = len(run.evaluations), ""
    if count > len(shown):
        note = f"The newest {MOST_ROWS} of {count:,} evaluations, and the best. "
    note += f"Bold: the best {run.best_metric}. " if best else ""
    note += f"{left} more metrics are left out." if left else ""
    small = f'<p class="soft">{escape(note)}</p>' if note else ""
    return small + table(head, rows, numbers=range(len(head)))


def _value(value: float | None, is_best: bool = False) -> str:
    shown = "" if value is None else "not a number" if math.isnan(value) else brief(value, 4)
    return f"<b>{shown}</b>" if is_best else shown


def samples(run: History) -> str:
    """Return what the recipe sampled in the newest evaluations."""
    shown = [
        f"<h3>Sample at step {step:,}</h3><pre>{escape(sample, 4000)}</pre>"
        for step, sample in run.samples
    ]
    older = details("Older samples", "".join(shown[1:])) if shown[1:] else ""
    return "".join(shown[:1]) + older


def pictures(run: History) -> str:
    """Return the pictures of the newest evaluation that has some."""
    left, parts, said = PICTURES_BYTES, [], []
    for name in run.pictures:
        data = read_picture(run.folder, name)
        if isinstance(data, str):
            said.append(f"{name} is not shown: {data}.")
        elif len(data) > left:
            said.append(
                f"{name} is not shown: the pictures here have {PICTURES_BYTES // 1000} kB at most."
            )
        else:
            left -= len(data)
            kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
            source = f"data:image/{kind};base64,{b64encode(data).decode()}"
            parts.append(f'<img src="{source}" alt="{escape(name)}">')
    notes = "".join(f'<p class="soft">{escape(line)}</p>' for line in said[:10])
    if not parts and not notes:
        return ""
    title = f"<h3>Pictures at step {run.pictures_step:,}</h3>"
    return f'{title}<div class="pictures">{"".join(parts)}</div>{notes}'


def read_picture(folder: Path, name: str) -> bytes | str:
    """Return a PNG or JPEG file inside the run folder, or why it is not shown."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            return "it is outside of the run folder"
        if not path.is_file():
            return "there is no such file"
        if path.stat().st_size > PICTURE_BYTES:
            return f"it has more than {PICTURE_BYTES // 1000} kB"
        data = path.read_bytes()
    except (OSError, ValueError):  # a zero byte in the name
        return "it cannot be read"
    is_picture = data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))
    return data if is_picture else "it is neither PNG nor JPEG"


# ---- the time axis -------------------------------------------------------------------------------
def timeline_of(runs: list[History]) -> str:
    """Return what happened when: starts, stops, kills, checkpoints, evaluations, spikes."""
    known = [run for run in runs if run.last and math.isfinite(run.last.elapsed)]
    parts = []
    if known:
        ends = [run.last.elapsed for run in known if run.last]
        parts.append(
            timeline([(run.short * (len(runs) > 1), rows(run)) for run in known], max(ends))
        )
        parts.append('<p class="soft">Time that the run was running, over all of its starts.</p>')
    elif any(run.last for run in runs):
        parts.append('<p class="soft">Not recorded: when things happened.</p>')
    for run in runs:
        content = starts(run) + checkpoints_of(run) + spikes(run) + numerics(run)
        if content:
            parts.append(details(run.name, content) if len(runs) > 1 else content)
    return "".join(parts)


def rows(run: History) -> list[tuple[str, str, list[float]]]:
    """Return the rows of a run on the time axis: name, color, and times."""
    kinds = {
        "starts": ("c0", [start.begin for start in run.starts]),
        "preempted": ("c4", [start.stop for start in run.starts if start.stop]),
        "no stop": ("c1", [start.begin for start in run.kills]),
        "checkpoints": ("c2", run.checkpoints),
        "evaluations": ("c3", run.evaluations),
        "spikes": ("c7", run.spikes),
    }
    found = []
    for name, (look, events) in kinds.items():
        times = [one.elapsed for one in events if math.isfinite(one.elapsed)]
        found += [(name, look, times)] if times else []
    return found


def starts(run: History) -> str:
    """Return a table of the starts of a run, the newest first."""
    if not run.last or not run.starts or not math.isfinite(run.starts[0].begin.time):
        return ""
    table_rows = [
        [
            str(number + 1),
            moment(start.begin.time),
            f"{start.begin.step:,} to {start.end.step:,}",
            str(start.world_size or ""),
            escape(hosts(start), 200),
            escape(ended(run, number), 300),
        ]
        for number, start in enumerate(run.starts)
    ]
    head = ["start", "when", "steps", "processes", "hosts", "how it ended"]
    count, table_rows = len(table_rows), table_rows[: -MOST_ROWS - 1 : -1]
    note = f"<p class=soft>The newest {MOST_ROWS} of {count:,}.</p>" if count > MOST_ROWS else ""
    if run.kills:
        note += (
            f'<p class="soft">No stop: killed, failed, or extended after its end. {len(run.kills)}'
            f" of {count - 1} restarts followed such an end.</p>"
        )
    return f"<h3>Starts</h3>{note}{table(head, table_rows, numbers=[0, 3], kind='long')}"


def ended(run: History, number: int) -> str:
    """Return how a start ended."""
    start = run.starts[number]
    if start.stop:
        return f"preempted: {start.stop.name}" if start.stop.name else "preempted"
    return run.state if number == len(run.starts) - 1 else "no stop"


def hosts(start: Start) -> str:
    """Return the hosts of a start with their numbers of processes."""
    counts = Counter(start.hosts).items()
    return ", ".join(f"{host} x {count}" if count > 1 else host for host, count in counts)


def moment(seconds: float) -> str:
    """Return a time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "not known"


def checkpoints_of(run: History) -> str:
    """Return how many checkpoints were saved, how long training waited, and which are left."""
    there = [path.name for path in checkpoints(run.folder)]
    seconds = [one.seconds for one in run.checkpoints if math.isfinite(one.seconds)]
    lines = []
    if run.checkpoints:
        count = len(run.checkpoints)
        line = f"{count:,} checkpoint{'s' * (count > 1)} saved"
        if seconds:
            line += f"; training waited {sum(seconds):.3g} s for them, {max(seconds):.3g} s at most"
        lines.append(f"{line}.")
    if there:
        kept = ", ".join(there[-10:])
        more = f"{len(there)}, of which the newest: " if len(there) > 10 else ""
        lines.append(f"In the folder now: {more}{kept}.")
    shown = "".join(f"<p>{escape(line, 1000)}</p>" for line in lines)
    return f"<h3>Checkpoints</h3>{shown}" if lines else ""


def spikes(run: History) -> str:
    """Return a table of the newest spikes."""
    shown = [
        [f"{one.step:,}", escape(one.name, 80), brief(one.value, 4)]
        for one in run.spikes[: -MOST_ROWS - 1 : -1]
    ]
    count = len(run.spikes)
    title = f"Spikes: the newest {MOST_ROWS} of {count:,}" if count > MOST_ROWS else "Spikes"
    return (
        f"<h3>{title}</h3>{table(['step', 'of', 'value'], shown, numbers=[0, 2])}" if shown else ""
    )


def numerics(run: History) -> str:
    """Return which numerics changed at a restart."""
    lines = [f"At step {step:,}: {change}." for step, change in run.numerics[-10:]]
    shown = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<h3>Changed numerics</h3>{shown}" if lines else ""
