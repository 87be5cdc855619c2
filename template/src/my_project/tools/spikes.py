"""Mark a loss or a gradient norm that is far above its running median.

A value is marked if its distance above the median of the last values is greater than two limits:
DEVIATIONS times their standard deviation, which is estimated from the median absolute deviation,
and TAILS times the distance of their 95th percentile from the median, since small batches have long
upper tails. So the same rule serves smooth and noisy curves. A curve that falls, as at the start,
is below its median and is not marked. A curve that stays high after a jump is marked once: half a
window later, the median is high too.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median

WINDOW = 64  # values from which the median is computed
MIN_VALUES = 32  # nothing is marked before there are this many
DEVIATIONS = 8.0
TO_SIGMA = 1.4826  # the median absolute deviation times this is the sigma of a normal distribution
TAILS = 3.0
# The standard deviation is taken as at least this share of the median: that of a flat curve is near
# 0, and any noise would be marked.
MIN_RELATIVE = 0.02
MIN_ABSOLUTE = 1e-9  # the same for a median of 0
PAUSE = WINDOW // 2  # the smallest difference between the indices of two marked values


def spikes(values: Iterable[float]) -> Iterator[int]:
    """Yield the index of each value that is marked.

    Args:
        values: from the records of a run, in their order; values that are not finite are skipped.
    """
    window: deque[float] = deque()  # the last values, in their order
    ordered: list[float] = []  # the same values, sorted
    quiet_until = 0
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if index >= quiet_until and len(ordered) >= MIN_VALUES and is_far(value, ordered):
            quiet_until = index + PAUSE
            yield index
        if len(window) == WINDOW:
            del ordered[bisect_left(ordered, window.popleft())]
        window.append(value)
        insort(ordered, value)


def is_far(value: float, ordered: list[float]) -> bool:
    """Return whether a value is far above the median of sorted values."""
    half = len(ordered) // 2
    middle = (ordered[half] + ordered[-half - 1]) / 2
    tail = ordered[int(0.95 * len(ordered))] - middle
    min_deviation = max(MIN_RELATIVE * abs(middle), MIN_ABSOLUTE)
    if value <= middle + max(TAILS * tail, DEVIATIONS * min_deviation):
        return False  # for most values, so the median absolute deviation is seldom computed
    return value > middle + DEVIATIONS * TO_SIGMA * median(abs(x - middle) for x in ordered)
