"""Axes of charts: where values lie, and what stands beside them."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
LOG_DECADES = 1.7  # a wider span, 50 times, is drawn on a log scale
TIME_STEPS = [  # seconds
    *(1e-3, 1e-2, 0.1, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800),
    *(21_600, 43_200, 86_400, 172_800, 432_000, 864_000, 2_592_000, 8_640_000),
]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ends of an axis, and its labels."""

    low: float
    high: float
    labels: list[tuple[float, str]]
    is_log: bool = False

    def at(self, values: Values) -> np.ndarray:
        """Return where values lie on the axis, from 0 to 1; those outside of it at its ends."""
        found, low, high = np.asarray(values, float), self.low, self.high
        if self.is_log:
            found = np.log10(np.maximum(found, low))
            low, high = math.log10(low), math.log10(high)
        return np.clip((found - low) / (high - low), 0, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return where the labels lie, from 0 to 1, and their texts."""
        places = self.at([value for value, _ in self.labels])
        return [(float(at), text) for at, (_, text) in zip(places, self.labels, strict=True)]


def brief(value: float, digits: int = 3) -> str:
    """Format a number with few characters: 12.5k, 0.03, 2e-5."""
    if not math.isfinite(value):
        return "none"
    size = abs(value)
    if value and (size < 1e-3 or size >= 1e15):
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4):
            return f"{_rounded(value / unit, digits)}{name}"
    return _rounded(value, digits)


def _rounded(value: float, digits: int) -> str:
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{float(f'{value:.{digits}g}'):g}"


def duration(seconds: float) -> str:
    """Format a time on an axis in its largest unit: 30 s, 5 min, 1.5 h, 2 d."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{_rounded(seconds / unit, 3)} {name}"
    return f"{_rounded(seconds, 3)} s"


def round_step(span: float, count: int) -> float:
    """Return the power of 10, or 2 or 5 times one, that divides a span into at most so many."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next((power * n for n in (1, 2, 5) if power * n * count >= span), power * 10)


def linear(
    low: float, high: float, *, count: int = 4, is_padded: bool = True, least: float = 0.0
) -> Axis:
    """Return a linear axis.

    Args:
        low: the least value.
        high: the largest value.
        count: about how many labels to have.
        is_padded: whether to move the ends to labels.
        least: the least distance of labels.
    """
    size = max(abs(low), abs(high))
    if size < 1e-250:  # zeros
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * size:  # one value
        low, high = low - size / 10, high + size / 10
    step = max(round_step(high - low, count), least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if is_padded:
        low, high = first * step, last * step
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    is_short = decimals <= 4 and max(abs(low), abs(high)) < 1e4
    values = [i * step for i in range(first, last + 1) if low <= i * step <= high]
    texts = [f"{value:.{decimals}f}" if is_short else brief(value, 4) for value in values]
    return Axis(low=low, high=high, labels=list(zip(values, texts, strict=True)))


def logarithmic(low: float, high: float) -> Axis:
    """Return a log axis, labeled at powers of 10; where there are few of them, in between too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, round((last - first) / 5))
    factors = (1, 3) if last - first <= 3 else (1,)
    values = [10.0**power * n for power in range(first, last + 1, every) for n in factors]
    labels = [(value, brief(value)) for value in values if low <= value <= high]
    return Axis(low=low, high=high, labels=labels, is_log=True)


def value_axis(values: np.ndarray, *, from_zero: bool) -> Axis:
    """Return the axis of values: a log scale where positive ones span many decades.

    Args:
        values: at least one of them finite.
        from_zero: begin at 0, and never use a log scale.
    """
    values = values[np.isfinite(values)]
    positive = values[values > 1e-290]
    if not from_zero and len(positive) >= 0.99 * len(values):  # a few zeros lie at the lower end
        low, high = float(positive.min()), float(positive.max())
        if math.log10(high) - math.log10(low) > LOG_DECADES:
            return logarithmic(low / 1.2, high * 1.2)
    low, high = float(values.min()), float(values.max())
    return linear(min(low, 0.0) if from_zero else low, high)


def step_axis(steps: np.ndarray) -> Axis:
    """Return the axis of steps; it begins at 0 unless they begin late."""
    low, high = float(steps.min()), float(steps.max())
    low = 0.0 if low < high / 4 or low == high else low
    axis = linear(low, max(high, low + 1), count=5, is_padded=False, least=1.0)
    (first, text), *rest = axis.labels
    return dataclasses.replace(axis, labels=[(first, f"step {text}"), *rest])


def time_axis(seconds: float) -> Axis:
    """Return the axis of the time since the start."""
    seconds = max(seconds, 1e-3)
    step = next((step for step in TIME_STEPS if seconds / step <= 5), seconds)
    times = [i * step for i in range(math.floor(seconds / step + 1e-9) + 1)]
    return Axis(low=0, high=seconds, labels=[(time, duration(time)) for time in times])
