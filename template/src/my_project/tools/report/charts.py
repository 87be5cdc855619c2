"""Charts for the report: SVG for what is drawn, HTML for text, no script. They know no run.

The SVG of a plot is stretched to the width of the page, which strokes do not follow
(vector-effect), and its labels are HTML placed in percent: so text has the same size on a phone and
on a desk. Colors, dashes and sizes are in the style sheet of page.py.

Many points are drawn in groups: a line through their means, and a band from the lowest to the
highest value of each group, so that no spike is lost.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .axes import Axis, Values, brief, linear, round_step, step_axis, time_axis, value_axis
from .page import escape

# A run on an axis of time: its name, and rows of a name, the class of its marks, and their times.
Lane = tuple[str, Sequence[tuple[str, str, Sequence[float]]]]
WIDTH, HEIGHT = 1000, 10_000  # units of a plot: integers, so that a path is short
VISIBLE = 0.005  # of the height of a plot; a band that is thinner everywhere is left out


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve; NaN where there is no value."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None  # the band around it
    high: np.ndarray | None = None
    band: str = ""  # what it is
    look: str = "c0"  # classes of the style sheet: the color c0 to c7, the dash d1 to d7
    has_dots: bool = False  # at its points, as for evaluations


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What is marked in a chart besides its lines."""

    restarts: Values = ()  # steps
    spikes: list[tuple[float, float]] = field(default_factory=list)  # steps and values
    are_named: bool = False  # in the legend


# ---- paths ---------------------------------------------------------------------------------------
def path(x: np.ndarray, y: np.ndarray) -> str:
    """Return a path through points from 0 to 1, with a gap where y is NaN.

    Its numbers are pairs of differences, so that it is short and a script can read it.
    """
    text, before, is_gap = [], (0, 0), True
    for px, py in zip((x * WIDTH).tolist(), ((1 - y) * HEIGHT).tolist(), strict=True):
        if math.isnan(py):
            is_gap = True
            continue
        point = round(px), round(py)
        moved = f"{point[0] - before[0]} {point[1] - before[1]}"
        text.append(f"m{moved}l0 0" if is_gap else f" {moved}")  # one point alone is a dot
        before, is_gap = point, False
    return "".join(text).replace(" -", "-")


def area(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """Return the path around an area."""
    kept = np.isfinite(low) & np.isfinite(high)
    edge = np.concatenate([high[kept], low[kept][::-1]])
    return path(np.concatenate([x[kept], x[kept][::-1]]), edge) + "z"


def dots(x: np.ndarray, y: np.ndarray) -> str:
    """Return a path of lines without length, which round caps make dots of any size in pixels."""
    places = zip((x * WIDTH).tolist(), ((1 - y) * HEIGHT).tolist(), strict=True)
    points = {(round(px), round(py)) for px, py in places if not math.isnan(py)}
    return "".join(f"M{px} {py}h0" for px, py in sorted(points))


def rules(x: np.ndarray, height: int) -> str:
    """Return a path of vertical lines at places from 0 to 1."""
    return "".join(f"M{at} 0v{height}" for at in sorted({round(at * WIDTH) for at in x.tolist()}))


def in_groups(x: np.ndarray, columns: Sequence[np.ndarray], groups: int) -> list[np.ndarray]:
    """Return where groups of points are, and the mean, lowest and highest value of each.

    Args:
        x: places from 0 to 1.
        columns: the values, and the low and the high end of their band.
        groups: equal parts of the axis; those without points are left out.
    """
    kept = np.flatnonzero(np.isfinite(columns[0]))
    kept = kept[np.argsort(x[kept], kind="stable")]
    x, values, low, high = (column[kept] for column in (x, *columns))
    number = np.minimum((x * groups).astype(int), groups - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    sizes = np.diff(first, append=len(number))
    means = [np.add.reduceat(column, first) / sizes for column in (x, values)]
    return [*means, np.fmin.reduceat(low, first), np.fmax.reduceat(high, first)]


# ---- charts --------------------------------------------------------------------------------------
def figure(title: str, content: str, *, note: str = "", is_wide: bool = False) -> str:
    """Return a figure with a title and a note."""
    kind = "chart wide" if is_wide else "chart"
    small = f" <small>{escape(note)}</small>" if note else ""
    head = f'<figure class="{kind}"><figcaption>{escape(title)}{small}</figcaption>'
    return f"{head}{content}</figure>"


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a legend; an entry is the class of its key, a name and a value."""
    items = [
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><path class="{kind}"'
        f' d="M3 4h16"/></svg>{escape(name, 80)} <b>{escape(value)}</b></li>'
        for kind, name, value in entries
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def plot(content: str, x: Axis, y: Axis, *, label: str, about: str = "") -> str:
    """Return a plot: a grid, its content, and the labels of both axes."""
    grid = "".join(f"M0 {(1 - at) * HEIGHT:.0f}h{WIDTH}" for at, _ in y.ticks())
    texts = [f'<i class="y" style="top:{1 - at:.2%}">{escape(text)}</i>' for at, text in y.ticks()]
    texts += [f'<i class="x" style="left:{at:.2%}">{escape(text)}</i>' for at, text in x.ticks()]
    return (
        f'<div class="plot"{about}><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' preserveAspectRatio="none" aria-label="{escape(label)}"><path class="grid" d="{grid}"/>'
        f"{content}</svg>{''.join(texts)}</div>"
    )


def chart(
    title: str,
    lines: Iterable[Line],
    *,
    groups: int,
    from_zero: bool = False,
    marks: Marks | None = None,
    is_wide: bool = False,
) -> str:
    """Return a chart of lines over steps; "" if no line has a value.

    Args:
        title: what is shown, with its unit.
        lines: the curves.
        groups: into how many groups many points are collected.
        from_zero: let the y axis begin at 0, and never use a log scale.
        marks: restarts and spikes.
        is_wide: use the whole width of the page.
    """
    lines = [line for line in lines if np.isfinite(line.values).any()]
    if not lines:
        return ""
    parts = [part for line in lines for part in (line.values, line.low, line.high)]
    y = value_axis(
        np.concatenate([part for part in parts if part is not None]), from_zero=from_zero
    )
    x = step_axis(np.concatenate([line.steps for line in lines]))
    bands, strokes, keys = [], [], []
    for line in lines:
        values, low, high, places = line.values, line.low, line.high, x.at(line.steps)
        keys.append((f"line {line.look}", line.name, brief(values[np.isfinite(values)][-1], 4)))
        if len(values) > 2 * groups:
            band = [values if end is None else end for end in (low, high)]
            places, values, low, high = in_groups(places, [values, *band], groups)
        ends = None if low is None or high is None else (y.at(low), y.at(high))
        if ends and np.nan_to_num(ends[1] - ends[0]).max() > VISIBLE:
            around = area(places, *ends)
            bands.append(f'<path class="band {line.look}" d="{around}"/>')
        if line.band:
            keys.append((f"patch around {line.look}", line.band, ""))
        drawn, name = path(places, y.at(values)), escape(line.name, 80)
        strokes.append(f'<path class="line {line.look}" data-name="{name}" d="{drawn}"/>')
        if len(values) <= (groups / 2 if line.has_dots else 2):  # one point alone has no line
            drawn = dots(places, y.at(values))
            strokes.append(f'<path class="dots {line.look}" d="{drawn}"/>')
    marks = marks or Marks()
    if len(marks.restarts):
        bands.append(f'<path class="restart" d="{rules(x.at(marks.restarts), HEIGHT)}"/>')
        keys += [("restart", "restart", "")] * marks.are_named
    if marks.spikes:
        steps, values = np.array(marks.spikes).T
        strokes.append(f'<path class="spike" d="{dots(x.at(steps), y.at(values))}"/>')
        keys.append(("spike", "spike", ""))
    label = f"{title}: " + ", ".join(f"{name} {value}".strip() for _, name, value in keys)
    unit = max(1.0, round_step(x.high - x.low, WIDTH))  # to which a place can be read
    about = f' data-x="{x.low!r} {x.high!r} {unit!r}" data-y="{y.low!r} {y.high!r} {y.is_log:d}"'
    drawing = plot("".join([*bands, *strokes]), x, y, label=label, about=about)
    return figure(title, legend(keys) + drawing, note="log scale" * y.is_log, is_wide=is_wide)


def stack(
    title: str, steps: np.ndarray, parts: list[tuple[str, np.ndarray]], *, groups: int, keys: str
) -> str:
    """Return a chart of stacked shares of a whole over steps.

    Args:
        title: what is shown.
        steps: where the shares are.
        parts: the color and the shares of each part, from 0 to 1.
        groups: into how many groups many points are collected.
        keys: the legend.
    """
    x, y, drawn = step_axis(steps), linear(0, 100), []
    places, below = x.at(steps), 0.0
    for look, values in parts:
        if len(steps) > 2 * groups:
            places, values, _, _ = in_groups(x.at(steps), [values] * 3, groups)
        above = below + 100 * values
        around = area(places, y.at(below + 0 * values), y.at(above))
        drawn.append(f'<path class="part {look}" d="{around}"/>')
        below = above
    return figure(title, keys + plot("".join(drawn), x, y, label=title), is_wide=True)


def bars(rows: Iterable[tuple[str, list[tuple[str, str, float]]]]) -> str:
    """Return a bar per row, of its name and the name, color and share of each part."""
    items = []
    for name, parts in rows:
        label = ", ".join(f"{part} {share:.0%}" for part, _, share in parts)
        spans = "".join(
            f'<span class="{look}" style="flex:{share:.4f}"></span>' for _, look, share in parts
        )
        items.append(
            f"<li>{escape(name, 80)} <small>{escape(label)}</small>"
            f'<div aria-hidden="true">{spans}</div></li>'
        )
    return f'<ul class="bars">{"".join(items)}</ul>'


def timeline(lanes: Iterable[Lane], seconds: float) -> str:
    """Return rows of marks on one axis of time.

    Args:
        lanes: the runs.
        seconds: the end of the axis.
    """
    axis, items = time_axis(seconds), []
    for lane, rows in lanes:
        items += [f"<h4>{escape(lane, 80)}</h4>"] * bool(lane)
        for name, kind, times in rows:
            marks = rules(axis.at(times), 10)
            items.append(
                f'<div class="row"><span>{escape(name)}</span><svg viewBox="0 0 {WIDTH} 10"'
                f' preserveAspectRatio="none" role="img" aria-label="{len(times)}">'
                f'<path class="{kind}" d="{marks}"/></svg></div>'
            )
    texts = [f'<i class="x" style="left:{at:.2%}">{escape(text)}</i>' for at, text in axis.ticks()]
    return f'<div class="timeline">{"".join(items)}<div class="hours">{"".join(texts)}</div></div>'
