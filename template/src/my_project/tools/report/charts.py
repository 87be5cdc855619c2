"""Draw the charts of the report: lines are SVG, text is HTML.

The SVG of a plot is stretched to the width of the page, but its strokes are not (vector-effect).
Labels are HTML, positioned in percent, so that text has the same size on a phone and on a large
screen. Colors, dashes and sizes are in the style sheet of page.py.

Many points are drawn in groups: a line through the mean of each group, and a band from its lowest
to its highest value, so that no spike is lost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..reader import format_number
from .page import escape

WIDTH, HEIGHT = 1000, 10_000  # of a plot, in units; coordinates are integers, to keep paths short
MAX_DOTS = 40  # a curve with more points has no dots
LOG_RATIO = 50  # of the largest to the smallest value; above it, the scale is logarithmic
RULES = {  # vertical lines by kind: top and length
    "restart": (0, HEIGHT),
    "skipped": (0, HEIGHT // 15),
    "spike": (0, HEIGHT // 15),
    "check": (0, HEIGHT),
    "checkpoint": (HEIGHT - HEIGHT // 30, HEIGHT // 30),
}


class Line(NamedTuple):
    """A curve; a value is NaN where there is none."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    color: int  # c0 to c7 in the style sheet


# ---- axes ----------------------------------------------------------------------------------------
class Axis(NamedTuple):
    """The ends of an axis, and its labels."""

    low: float
    high: float
    labels: dict[float, str]
    is_log: bool = False

    def at(self, values: np.ndarray | Sequence[float]) -> np.ndarray:
        """Return the positions of values on the axis, clipped to the range from 0 to 1."""
        places, low, high = np.asarray(values, float), self.low, self.high
        if self.is_log:
            places = np.log10(np.maximum(places, low))
            low, high = math.log10(low), math.log10(high)
        return np.clip((places - low) / (high - low), 0, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the place of each label, from 0 to 1, and its text."""
        return list(zip(self.at([*self.labels]).tolist(), self.labels.values(), strict=True))


def linear_axis(low: float, high: float) -> Axis:
    """Return a linear axis that begins and ends at labels."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-250):  # all values are equal
        low, high = low - size / 10, high + (size / 10 or 1)
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * n for n in (1, 2, 5, 10) if 4 * power * n >= high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [number * step for number in range(first, last + 1)]
    labels = {value: f"{value:g}" if size < 1e5 else format_number(value) for value in values}
    return Axis(values[0], values[-1], labels)


def step_axis(last: int) -> Axis:
    """Return the axis of steps, from 0 to the last one."""
    labels = linear_axis(0, max(last, 4)).labels
    kept = {step: text for step, text in labels.items() if 0 < step <= last}
    return Axis(0, max(last, 1), {0: "step 0"} | kept)


def value_axis(values: np.ndarray, *, from_zero: bool) -> Axis:
    """Return the axis of values, with a log scale for a large range of positive values.

    Args:
        values: at least one of them is finite.
        from_zero: begin at 0, and never use a log scale.
    """
    values = values[np.isfinite(values)]
    positive = values[values > 1e-290]
    # up to 1% of the values may be zero or negative: they are drawn at the lower end
    is_log = not from_zero and len(positive) >= 0.99 * len(values)
    if not is_log or positive.max() <= LOG_RATIO * positive.min():
        low = float(values.min())
        return linear_axis(min(low, 0.0) if from_zero else low, float(values.max()))
    low, high = float(positive.min()) / 1.2, float(positive.max()) * 1.2
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**power for power in range(first, last, max(1, (last - first) // 5))]
    ticks = [tick for power in powers for tick in (power, 3 * power) if low <= tick <= high]
    return Axis(low, high, {tick: format_number(tick) for tick in ticks}, is_log=True)


# ---- paths ---------------------------------------------------------------------------------------
def path(x: np.ndarray, y: np.ndarray) -> str:
    """Return a path through points from 0 to 1, with a gap where y is NaN."""
    places = zip((x * WIDTH).tolist(), ((1 - y) * HEIGHT).tolist(), strict=True)
    points = [f"{px:.0f} {py:.0f}" if math.isfinite(py) else "" for px, py in places]
    pieces = [list(piece) for is_known, piece in groupby(points, bool) if is_known]
    return "".join(f"M{piece[0]}L{' '.join(piece)}" for piece in pieces)  # a single point is a dot


def dots(x: np.ndarray, y: np.ndarray) -> str:
    """Return a path of zero-length lines, which round caps turn into dots of a size in pixels."""
    kept = np.isfinite(y)
    points = zip((x[kept] * WIDTH).tolist(), ((1 - y[kept]) * HEIGHT).tolist(), strict=True)
    return "".join(f"M{px:.0f} {py:.0f}h0" for px, py in points)


def rules(x: np.ndarray, top: int, length: int) -> str:
    """Return a path of vertical lines."""
    places = sorted({round(place * WIDTH) for place in x.tolist()})
    return "".join(f"M{place} {top}v{length}" for place in places)


def in_groups(x: np.ndarray, values: np.ndarray, groups: int) -> list[np.ndarray]:
    """Return the mean position, and the mean, lowest and highest value, of each group of points.

    Args:
        x: positions from 0 to 1.
        values: NaN where there is none.
        groups: number of equal parts of the axis; parts without points are left out.
    """
    kept = np.flatnonzero(np.isfinite(values))
    kept = kept[np.argsort(x[kept], kind="stable")]
    x, values = x[kept], values[kept]
    first = np.flatnonzero(np.diff((x * groups).astype(int), prepend=-1))
    sizes = np.diff(first, append=len(x))
    means = [np.add.reduceat(column, first) / sizes for column in (x, values)]
    return [*means, np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)]


# ---- a chart -------------------------------------------------------------------------------------
def key(kind: str) -> str:
    """Return the sample line beside a name in a legend; kind is its CSS class."""
    drawn = f'<path class="{kind}" d="M3 4h16"/>'
    return f'<svg class="key" viewBox="0 0 22 8" aria-hidden="true">{drawn}</svg>'


def chart(
    title: str,
    lines: Iterable[Line],
    x: Axis,
    groups: int,
    marks: Mapping[str, Sequence[float]] | None = None,
    *,
    from_zero: bool = False,
) -> str:
    """Return a chart of lines over steps; "" if no line has a value.

    Args:
        title: what is shown, with its unit.
        lines: the curves.
        x: the axis of steps.
        groups: the number of groups, if there are many points.
        marks: the steps to mark, by a key of RULES.
        from_zero: let the y axis begin at 0, and never use a log scale.
    """
    lines = [line for line in lines if np.isfinite(line.values).any()]
    if not lines:
        return ""
    y = value_axis(np.concatenate([line.values for line in lines]), from_zero=from_zero)
    grid = "".join(f"M0 {(1 - at) * HEIGHT:.0f}h{WIDTH}" for at, _ in y.ticks())
    bands, drawn, legend = [f'<path class="grid" d="{grid}"/>'], [], {}
    for line in lines:
        name, color = escape(line.name, 80), f"c{line.color}"
        places, values = x.at(line.steps), line.values
        last = format_number(float(values[np.isfinite(values)][-1]))
        legend[color] = f"{name} {last}"
        if len(values) > 2 * groups:
            places, values, low, high = in_groups(places, values, groups)
            edge = np.concatenate([high, low[::-1]])
            around = path(np.concatenate([places, places[::-1]]), y.at(edge))
            bands.append(f'<path class="band {color}" d="{around}z"/>')
        values = y.at(values)
        drawn.append(f'<path class="{color}" data-name="{name}" d="{path(places, values)}"/>')
        if len(values) <= MAX_DOTS:
            drawn.append(f'<path class="dots {color}" d="{dots(places, values)}"/>')
    for kind, steps in (marks or {}).items():
        if steps:
            drawn.append(f'<path class="{kind}" d="{rules(x.at(steps), *RULES[kind])}"/>')
            legend[kind] = kind
    labels = [f'<i class="y" style="top:{1 - at:.2%}">{text}</i>' for at, text in y.ticks()]
    labels += [f'<i class="x" style="left:{at:.2%}">{text}</i>' for at, text in x.ticks()]
    names = "".join(f"<span>{key(kind)}{name}</span>" for kind, name in legend.items())
    return (
        f"<figure><figcaption>{escape(title)}{', log scale' * y.is_log}</figcaption>"
        f'<div class="legend">{names}</div>'
        f'<div class="plot" data-axes="{x.low!r} {x.high!r} {y.low!r} {y.high!r} {y.is_log:d}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}">{"".join([*bands, *drawn])}</svg>'
        f"{''.join(labels)}<output></output></div></figure>"
    )
