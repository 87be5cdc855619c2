"""Mark a loss or a gradient norm that is far above its running median.

Far is meant by what the last steps have shown, so that the same rule serves a smooth curve and a
noisy one: more than DEVIATIONS times the median absolute deviation above the median, and more than
TAILS times as far as the 95th percentile, since small batches have long tails upward. A curve that
falls, as at the start, is below its median and marks nothing. A curve that stays high after a jump
is marked once: half a window later the median is there too.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median

WINDOW = 64  # values that the median is of
LEAST = 32  # values, before which nothing is marked
DEVIATIONS = 8.0
TO_SIGMA = 1.4826  # the median absolute deviation times this is the sigma of a normal distribution
TAILS = 3.0
LEAST_RELATIVE = 0.02  # deviation relative to the median: below it is noise, even on a flat curve
LEAST_ABSOLUTE = 1e-9  # deviation, for a median of 0
PAUSE = WINDOW // 2  # values after a mark, in which none is marked again


def spikes(values: Iterable[float]) -> Iterator[tuple[int, float]]:
    """Yield the index of each value that is marked, and the median of the values before it.

    Args:
        values: of the records of a run, in their order; those that are not finite are passed over.
    """
    window: deque[float] = deque()  # the last values, in the order in which they came
    ordered: list[float] = []  # the same, sorted
    quiet_until = 0
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if index >= quiet_until and len(ordered) >= LEAST and is_far(value, ordered):
            quiet_until = index + PAUSE
            yield index, median(ordered)
        if len(window) == WINDOW:
            del ordered[bisect_left(ordered, window.popleft())]
        window.append(value)
        insort(ordered, value)


def is_far(value: float, ordered: list[float]) -> bool:
    """Return whether a value is far above the median of sorted values."""
    half = len(ordered) // 2
    middle = (ordered[half] + ordered[-half - 1]) / 2
    tail = ordered[int(0.95 * len(ordered))] - middle
    least = max(LEAST_RELATIVE * abs(middle), LEAST_ABSOLUTE)
    if value <= middle + max(TAILS * tail, DEVIATIONS * least):
        return False  # almost always, so that the deviation is seldom computed
    return value > middle + DEVIATIONS * TO_SIGMA * median(abs(one - middle) for one in ordered)
