"""Mark a loss or a gradient norm that is far above its running median.

Far is meant by what the last steps have shown, so that the same rule serves a smooth curve and a
noisy one: more than DEVIATIONS times the median absolute deviation above the median, and more than
TAILS times as far as the 95th percentile, since small batches have long tails upward. A curve that
falls, as at the start, is below its median and marks nothing. A curve that stays high after a jump
is marked once: half a window later the median is there too.

It starts with an empty window at each start of a run, so the first steps of a start mark nothing.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from statistics import median
from typing import Any

WINDOW = 64  # values that the median is of
LEAST = 32  # values, before which nothing is marked
DEVIATIONS = 8.0
TO_SIGMA = 1.4826  # the median absolute deviation times this is the sigma of a normal distribution
TAILS = 3.0
LEAST_RELATIVE = 0.02  # deviation relative to the median: below it is noise, even on a flat curve
LEAST_ABSOLUTE = 1e-9  # deviation, for a median of 0
PAUSE_STEPS = WINDOW // 2  # after a mark, in which the same name is not marked again


class Spikes:
    """The running medians of the loss and of the gradient norm."""

    def __init__(self) -> None:
        self.windows = {"loss": Window(), "gradient_norm": Window()}

    def observe(self, step: int, loss: float, gradient_norm: float) -> list[dict[str, Any]]:
        """Take the numbers of a step, which may be not finite; return what is marked.

        Args:
            step: its number.
            loss: mean over the items of all ranks.
            gradient_norm: before clipping.

        Returns:
            For each spike name, value and the median of the steps before; almost always nothing.
        """
        found = []
        for name, value in (("loss", loss), ("gradient_norm", gradient_norm)):
            if not math.isfinite(value):  # reported as a skipped step
                continue
            window = self.windows[name]
            if window.is_far(step, value):
                found.append({"name": name, "value": value, "median": window.median})
            window.add(value)
        return found


class Window:
    """The last values, in the order in which they came and sorted."""

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self.ordered: list[float] = []
        self.quiet_until = 0  # the step from which on a value is marked again

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

    def is_far(self, step: int, value: float) -> bool:
        """Return whether a value is far above the median, and remember that it was marked."""
        if len(self.ordered) < LEAST or step < self.quiet_until:
            return False
        middle = self.median
        tail = self.ordered[int(0.95 * len(self.ordered))] - middle
        least = max(LEAST_RELATIVE * abs(middle), LEAST_ABSOLUTE)
        if value <= middle + max(TAILS * tail, DEVIATIONS * least):
            return False  # almost always, so that the deviation is seldom computed
        deviation = TO_SIGMA * median(abs(other - middle) for other in self.ordered)
        if value <= middle + DEVIATIONS * deviation:
            return False
        self.quiet_until = step + PAUSE_STEPS
        return True
