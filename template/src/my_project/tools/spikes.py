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
    window = Window()
    quiet_until = 0
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if index >= quiet_until and window.is_far(value):
            quiet_until = index + PAUSE
            yield index, window.median
        window.add(value)


class Window:
    """The last values, in the order in which they came and sorted."""

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self.ordered: list[float] = []

    @property
    def median(self) -> float:
        """Return the median; for an even number the mean of the two in the middle."""
        ordered = self.ordered
        half = len(ordered) // 2
        return (ordered[half] + ordered[-half - 1]) / 2

    def add(self, value: float) -> None:
        """Take a value, and drop the oldest of a full window."""
        if len(self.values) == WINDOW:
            del self.ordered[bisect_left(self.ordered, self.values.popleft())]
        self.values.append(value)
        insort(self.ordered, value)

    def is_far(self, value: float) -> bool:
        """Return whether a value is far above the median."""
        if len(self.ordered) < LEAST:
            return False
        middle = self.median
        tail = self.ordered[int(0.95 * len(self.ordered))] - middle
        least = max(LEAST_RELATIVE * abs(middle), LEAST_ABSOLUTE)
        if value <= middle + max(TAILS * tail, DEVIATIONS * least):
            return False  # almost always, so that the deviation is seldom computed
        deviation = TO_SIGMA * median(abs(other - middle) for other in self.ordered)
        return value > middle + DEVIATIONS * deviation
