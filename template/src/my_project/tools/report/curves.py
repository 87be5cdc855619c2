"""The curves of a report: what is learned, and how fast."""

import numpy as np

from .charts import Line, Marks, bars, chart, figure, legend, stack
from .history import SHARES, History, text
from .page import escape, table

MOST_METRICS = 12  # charts of results
MOST_SPIKES = 200
GIB = 2**30
PARTS = {  # of a step, in their order, with their colors
    "data": ("data wait", "c4"),
    "forward": ("forward", "c5"),
    "backward": ("backward", "c0"),
    "communication": ("communication", "c1"),
    "optimizer": ("optimizer", "c2"),
    "evaluation": ("evaluation", "c3"),
    "saving": ("saving", "c7"),
    "other": ("other", "c6"),
}


def groups_for(runs: list[History]) -> int:
    """Return into how many groups many points are drawn, so that the page stays small."""
    return max(80, 400 // len(runs))


# ---- lines ---------------------------------------------------------------------------------------
def column(
    runs: list[History], name: str, label: str, *, scale: float = 1.0, has_band: bool = False
) -> list[Line]:
    """Return the lines of a column of the intervals, one for each run that has it.

    Args:
        runs: the runs.
        name: the column; with a band its median, between its minimum and its maximum.
        label: the name of the line where there is one run.
        scale: to multiply the values by.
        has_band: whether there are a minimum, a median and a maximum over the ranks.
    """
    lines = []
    for number, run in enumerate(runs):
        names = [f"{name}_{end}" for end in ("median", "min", "max")] if has_band else [name]
        found = [run.curves[one] * scale for one in names if one in run.curves]
        if len(found) == len(names):
            low, high = found[1:] if has_band else (None, None)
            is_one = len(runs) == 1
            lines.append(
                Line(
                    name=label if is_one else run.short,
                    steps=run.steps,
                    values=found[0],
                    low=low,
                    high=high,
                    band="all ranks" if is_one and has_band else "",
                    look=f"c{number} d{number}",
                )
            )
    return lines


def result(runs: list[History], name: str, label: str, *, color: int = 0) -> list[Line]:
    """Return the lines of a result of the evaluations, one for each run that has it.

    Args:
        runs: the runs.
        name: the result.
        label: the name of the line where there is one run; added to the run's name where not.
        color: the first color.
    """
    lines = []
    for number, run in enumerate(runs, color):
        found = [one for one in run.evaluations if name in one.results]
        if found:
            lines.append(
                Line(
                    name=label if len(runs) == 1 else f"{run.short} {label}".strip(),
                    steps=np.array([one.step for one in found], float),
                    values=np.array([one.results[name] for one in found]),
                    look=f"c{number % 8} d{number % 8 if len(runs) > 1 else 0}",
                    has_dots=True,
                )
            )
    return lines


def marks_of(runs: list[History], spiked: str = "") -> Marks:
    """Return the spikes of a column, and the restarts where there is one run."""
    spikes = [
        (float(one.step), one.value)
        for run in runs
        for one in run.spikes
        if one.name == spiked and np.isfinite(one.value)
    ]
    restarts = [float(start.begin.step) for start in runs[0].starts[1:]] if len(runs) == 1 else []
    spikes = sorted(spikes, key=lambda one: -one[1])[:MOST_SPIKES]
    return Marks(restarts=restarts, spikes=spikes, are_named=spiked == "loss")


def metrics_of(runs: list[History]) -> dict[str, list[str]]:
    """Return the names of all results by metric: loss: [validation/loss, test/loss]."""
    metrics: dict[str, list[str]] = {}
    names = dict.fromkeys(name for run in runs for one in run.evaluations for name in one.results)
    for name in names:
        metrics.setdefault(name.rpartition("/")[2], []).append(name)
    return metrics


# ---- learning ------------------------------------------------------------------------------------
def learning(runs: list[History]) -> str:
    """Return the charts of the loss, the results, the learning rate and the gradient norm."""
    if not any(run.last for run in runs):
        return '<p class="soft">Nothing is recorded yet.</p>'
    groups, metrics, is_one = groups_for(runs), metrics_of(runs), len(runs) == 1
    losses = metrics.pop("loss", [])
    lines = column(runs, "loss", "training")
    for number, name in enumerate(losses if is_one else losses[:1]):
        lines += result(runs, name, set_of(name), color=number + 1 if is_one else 0)
    charts = [chart("Loss", lines, groups=groups, marks=marks_of(runs, "loss"), is_wide=True)]
    if not is_one:  # more validation sets have their own charts, or the first would be crowded
        names = [*losses[1:], *(name for group in metrics.values() for name in group)]
        metrics = {name: [name] for name in names}
    for metric, names in list(metrics.items())[:MOST_METRICS]:
        title = names[0] if len(names) == 1 else metric
        lines = []
        for number, name in enumerate(names[:8]):
            lines += result(runs, name, set_of(name) if is_one else "", color=number)
        charts.append(chart(title, lines, groups=groups, marks=marks_of(runs)))
    if left := list(metrics)[MOST_METRICS:]:
        line = f"{len(left)} more metrics are not drawn: {', '.join(left[:20])}"
        charts.append(f'<p class="wide soft">{escape(line, 1000)}</p>')
    rate = column(runs, "learning_rate", "learning rate")
    norm = column(runs, "gradient_norm", "before clipping")
    marks = marks_of(runs)
    charts.append(chart("Learning rate", rate, groups=groups, from_zero=True, marks=marks))
    marks = marks_of(runs, "gradient_norm")
    charts.append(chart("Gradient norm", norm, groups=groups, marks=marks))
    return how_drawn(runs) + skipped(runs) + _together(charts)


def skipped(runs: list[History]) -> str:
    """Return how many steps were skipped, in words."""
    texts = []
    for run in runs:
        count = np.nanmax(run.curves.get("skipped_steps", [0]))
        if count > 0:
            name = f"Skipped in {run.short}" if len(runs) > 1 else "Skipped"
            texts.append(f"{name}: {count:,.0f} steps (gradient not finite, or no items).")
    return "".join(f"<p>{escape(line)}</p>" for line in texts)


def how_drawn(runs: list[History]) -> str:
    """Return how curves of many records are drawn."""
    groups, most = groups_for(runs), max(len(run.steps) for run in runs)
    if most <= 2 * groups:
        return ""
    return (
        f'<p class="soft">Drawn: {groups} groups of {most:,} records. The line is the mean of a'
        " group, the band goes from its lowest to its highest value.</p>"
    )


def set_of(name: str) -> str:
    """Return the validation set of a result."""
    return name.rpartition("/")[0] or "evaluation"


def _together(charts: list[str]) -> str:
    found = "".join(charts)
    return f'<div class="charts">{found}</div>' if found else ""


# ---- speed ---------------------------------------------------------------------------------------
def speed(runs: list[History]) -> str:
    """Return the charts of throughput, step anatomy, ranks, memory and GPUs."""
    groups, marks = groups_for(runs), marks_of(runs)

    def one(title: str, name: str, label: str, scale: float = 1.0, has_band: bool = False) -> str:
        lines = column(runs, name, label, scale=scale, has_band=has_band)
        return chart(title, lines, groups=groups, from_zero=True, marks=marks)

    has_retries = any(np.nansum(run.curves.get("allocator_retries", [0])) > 0 for run in runs)
    throughput = [
        one("Samples per second", "samples_per_second", "all ranks"),
        one("Tokens per second", "tokens_per_second", "all ranks"),
        one("Model FLOPs utilization (MFU), %", "mfu", "MFU", 100),
    ]
    if len(runs) == 1:
        ranks = [
            one("Time of a rank by itself, ms per step", "rank_seconds", "median rank", 1000, True),
            one("Wait for data, ms per step", "data_seconds", "median rank", 1000, True),
        ]
    else:  # a band for each run would hide those of the others
        ranks = [
            one("Time of the slowest rank by itself / of the median rank", "rank_skew", ""),
            one("Wait for data of the slowest rank, ms per step", "data_seconds_max", "", 1000),
        ]
    memory = [one("Peak memory, GiB", "peak_memory_bytes", "largest rank", 1 / GIB)]
    gpu = [
        one("Allocator retries", "allocator_retries", "sum over ranks") if has_retries else "",
        one("GPU utilization, %", "gpu_utilization", "mean"),
    ]
    where = anatomy(runs)
    parts = [how_drawn(runs), _together([*throughput, *memory, where, *ranks, slowest(runs), *gpu])]
    wanted = {"step anatomy": where, "rank skew": "".join(ranks), "GPUs": "".join(gpu)}
    left_out = [name for name, part in wanted.items() if not part]
    if left_out and any(len(run.steps) for run in runs):
        names = " and ".join([", ".join(left_out[:-1]), left_out[-1]][len(left_out) == 1 :])
        parts.append(f'<p class="soft">Not recorded: {names}.</p>')
    return "".join(parts)


def slowest(runs: list[History]) -> str:
    """Return which ranks were the slowest, in words."""
    rows = []
    for run in runs:
        total = sum(run.slowest.values())
        ranks = [
            f"rank {rank}{f' on {text(host)}' * bool(host)} in {count / total:.0%}"
            for (rank, host), count in run.slowest.most_common(3)
        ]
        if ranks:
            rows.append([run.short, f"{', '.join(ranks)} of the intervals"])
    if len(runs) == 1:
        shown = "".join(f"<p>The slowest was {escape(line, 600)}.</p>" for _, line in rows)
    else:
        cells = [[escape(name), escape(line, 600)] for name, line in rows]
        shown = table(["run", "slowest rank"], cells, kind="long")
    return f'<div class="wide">{shown}</div>' if rows else ""


def shares(run: History) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
    """Return the steps of the intervals, the shares of their time by part, and those of the run.

    The run's are weighted by the time of each interval, where that is known.
    """
    if "forward_share" not in run.curves:
        return np.zeros(0), {}, {}
    kept = np.isfinite(run.curves["forward_share"])
    nothing = np.full(len(kept), np.nan)
    parts = {
        part: np.clip(np.nan_to_num(run.curves.get(f"{part}_share", nothing)[kept]), 0, 1)
        for part in SHARES
    }
    parts["communication"] = np.minimum(parts["communication"], parts["backward"])
    parts["backward"] = parts["backward"] - parts["communication"]
    total = sum(parts.values(), np.zeros(int(kept.sum())))
    parts["other"] = np.clip(1 - total, 0, 1)
    seconds = run.curves.get("steps", nothing) * run.curves.get("step_seconds", nothing)
    training = np.clip(1 - parts["evaluation"] - parts["saving"], 0.01, 1)
    weights = seconds[kept] / training
    if not (np.isfinite(weights).all() and weights.sum() > 0):
        weights = np.ones(len(weights))
    whole = {part: float(np.average(values, weights=weights)) for part, values in parts.items()}
    return run.steps[kept], parts, whole


def anatomy(runs: list[History]) -> str:
    """Return where the time goes: over the steps of one run, or a bar for each of several."""
    title = "Where the time of rank 0 goes, %"
    found = [(run.short, *shares(run)) for run in runs]
    found = [one for one in found if one[3]]
    if not found:
        return ""
    if len(runs) == 1:
        ((_, steps, parts, whole),) = found
        keys = [(f"patch {PARTS[part][1]}", PARTS[part][0], f"{whole[part]:.1%}") for part in whole]
        drawn = [(PARTS[part][1], values) for part, values in parts.items()]
        return stack(title, steps, drawn, groups=groups_for(runs) // 2, keys=legend(keys))
    keys = [(f"patch {look}", name, "") for name, look in PARTS.values()]
    rows = [
        (name, [(PARTS[part][0], PARTS[part][1], share) for part, share in whole.items()])
        for name, _, _, whole in found
    ]
    return figure(title, legend(keys) + bars(rows), is_wide=True)
