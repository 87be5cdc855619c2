"""How long a run has been going, and how long it will take. Imports no torch."""

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from ..run_folder import Run

WARM_UP_STEPS = 3  # of each start: compilation, caches and allocators take their time once
INTERVALS = 30  # over which the time of a step is measured
PAUSES = 5  # evaluations, and saves, over which their time is measured
PAUSED_BY = {"evaluation": "evaluation", "checkpoint": "saving"}  # by kind of record


class Mark(NamedTuple):
    """The end of a step, in one object: another thread reads it."""

    step: int  # steps done
    seconds: float  # by the clock
    paused_seconds: float  # until then, in this start


class Pace:
    """The time of a run's steps, evaluations and saves; all that is kept per step is one mark."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = run.total_steps
        self.every_steps = {
            "evaluation": run.config.evaluation.every_steps,
            "checkpoint": run.config.checkpoints.every_steps,
        }
        self.clock = clock
        self.began = clock()  # of the run, if it had gone on without a break between its starts
        self.latest = Mark(0, self.began, 0.0)
        self.warm_step = 0  # from this step on, steps are measured
        self.marks: deque[Mark] = deque(maxlen=INTERVALS)
        self.pause = ""  # what training waits for: evaluation, saving
        self.pause_changed = self.began
        self.paused_seconds = 0.0
        self.seconds = {kind: deque[float](maxlen=PAUSES) for kind in PAUSED_BY}
        self.done_at = dict.fromkeys(PAUSED_BY, 0)  # the step of the last evaluation, and save

    def start(self, step: int) -> None:
        """Begin to measure; records of earlier starts have been observed."""
        self.pause_changed = self.clock()
        self.latest = Mark(step, self.pause_changed, self.paused_seconds)
        self.warm_step = step + WARM_UP_STEPS
        self.done_at = dict.fromkeys(PAUSED_BY, step)

    def step_ended(self, step: int) -> None:
        """Note when a step ended. Called after every step, so it does nothing else."""
        self.latest = Mark(step, self.clock(), self.paused_seconds)
        if step == self.warm_step:
            self.marks.append(self.latest)

    def set_pause(self, what: str) -> None:
        """Note what training waits for from now on; "" if it goes on."""
        now = self.clock()
        if self.pause:
            self.paused_seconds += now - self.pause_changed
        self.pause = what
        self.pause_changed = now

    def observe(self, kind: str, record: dict[str, Any]) -> None:
        """Take the times from a record, of this start or an earlier one."""
        if (elapsed := number(record, "elapsed_seconds")) is not None:
            self.began = self.clock() - elapsed
        if kind == "interval" and self.marks and self.latest.step > self.marks[-1].step:
            self.marks.append(self.latest)
        if kind in PAUSED_BY:
            self.done_at[kind] = record["step"]
            if (seconds := number(record, "seconds")) is not None:
                self.seconds[kind].append(seconds)

    # ---- read by the thread that draws -----------------------------------------------------------
    @property
    def elapsed_seconds(self) -> float:
        """Return how long the run has been going, over all of its starts."""
        return self.clock() - self.began

    @property
    def waited_seconds(self) -> float:
        """Return how long the step, or the pause, under way has taken so far."""
        return self.clock() - max(self.latest.seconds, self.pause_changed)

    @property
    def step_seconds(self) -> float | None:
        """Return the mean time of a step, without pauses; None in the first steps of a start."""
        latest = self.latest
        first = self.marks[0] if self.marks else latest
        if latest.step <= first.step:
            return None
        paused = latest.paused_seconds - first.paused_seconds
        return (latest.seconds - first.seconds - paused) / (latest.step - first.step)

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate what steps, evaluations and saves to come will take; None while not known.

        Those that have not been seen, in this start or an earlier one, are not counted.
        """
        if (step_seconds := self.step_seconds) is None:
            return None
        steps = self.total_steps - self.latest.step
        seconds = steps * step_seconds
        if steps and not self.pause:
            seconds -= min(self.waited_seconds, step_seconds)
        for kind, times in self.seconds.items():
            to_come = number_due(self.every_steps[kind], self.done_at[kind], self.total_steps)
            if times and to_come:
                mean = fmean(list(times))
                is_under_way = self.pause == PAUSED_BY[kind]
                seconds += mean * to_come - min(self.waited_seconds, mean) * is_under_way
        return seconds


def number(record: dict[str, Any], name: str) -> float | None:
    """Return a number of a record; None where there is none: records of a folder are untrusted."""
    value = record.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def number_due(every_steps: int | None, after: int, last: int) -> int:
    """Count the steps after one, up to the last, at which something is due; it is at the last."""
    if after >= last:
        return 0
    every = every_steps or last
    return last // every - after // every + (last % every > 0)


def format_time(seconds: float | None) -> str:
    """Format a time: 0:52, 12:04:11, 3 d 04 h; "-" if it is not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(seconds: float) -> str:
    """Format an age, in its largest unit: 12 s, 3 min, 2 h, 4 d."""
    for unit, unit_seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_seconds:
            return f"{int(seconds / unit_seconds)} {unit}"
    return f"{int(max(0, seconds))} s"
