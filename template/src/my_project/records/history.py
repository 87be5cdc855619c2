"""What the records of a run have said so far, and the lines of text that say it.

Imports no torch.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..run_folder import Run
from .outcome import format_metric
from .pace import Pace, format_age, format_time, number
from .runs import kind_of, printable

EVALUATIONS = 10  # as many are kept
SAMPLE_CHARACTERS = 500  # of the text of the recipe, in a log
# Of an evaluation; its other numbers are results.
NOT_RESULTS = {"kind", "step", "epoch", "elapsed_seconds", "time", "seconds", "is_best"}


class History:
    """The newest interval, the last evaluations, the best, the checkpoint, the restarts."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = run.total_steps
        self.folder = run.folder
        self.best_metric: str | None = run.config.evaluation.best_metric
        self.pace = Pace(run, clock)
        self.interval: dict[str, Any] = {}  # of this start
        self.straggler_found: dict[str, Any] = {}  # its record, while it is the slowest rank
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS)
        self.best: dict[str, Any] = {}  # its record
        self.saving: tuple[int, float] | None = None  # step and time of the last save that began
        self.saved_at: float | None = None  # of a complete checkpoint, by the clock of the pace
        self.restarts = 0
        self.epoch_at: tuple[float | None, int] = (
            None,
            0,
        )  # of the newest record that knows it; its step

    def start(self, step: int, records: list[dict[str, Any]]) -> None:
        """Continue a run at a step, after the records of its earlier starts."""
        for record in records:
            self.add(record)
        self.interval = {}
        self.straggler_found = {}
        self.restarts = sum(kind_of(record) == "start" for record in records[1:])
        self.pace.start(step)

    def add(self, record: dict[str, Any]) -> None:
        """Take a record."""
        kind = kind_of(record)
        self.pace.observe(kind, record)
        if (epoch := number(record, "epoch")) is not None:
            self.epoch_at = (epoch, record["step"])
        if kind == "interval":
            self.interval = record
            if record.get("slowest_rank") != self.straggler_found.get("rank"):
                self.straggler_found = {}
        elif kind == "straggler":
            self.straggler_found = record
        elif kind == "evaluation":
            self.evaluations.append(record)
            if record.get("is_best") is True:
                self.best = record
        elif kind == "checkpoint":
            written = number(record, "time")
            age = time.time() - written if written else 0.0
            self.saving = (record["step"], self.pace.clock() - max(0.0, age))

    # ---- read by the thread that draws -----------------------------------------------------------
    @property
    def epoch(self) -> str:
        """Return the epoch now, from that of the newest record; "" before the first interval."""
        epoch, step = self.epoch_at
        if isinstance(epoch, float):  # a stream has an integer
            epoch = epoch * self.pace.latest.step / step if step > 0 else None
        return format_epoch(epoch)

    @property
    def saved(self) -> str:
        """Return how old the newest checkpoint is; a save may still go on, or have failed."""
        if self.saving:
            step, began = self.saving
            path = self.folder / "checkpoints" / f"step_{step:08d}"
            if is_complete(path):
                self.saving, self.saved_at = None, began
        if self.saved_at is None:
            return "not saved yet"
        return f"saved {format_age(self.pace.clock() - self.saved_at)} ago"

    @property
    def straggler(self) -> str:
        """Name the rank that all wait for, if there is one: rank 3 (node-2) 1.8x as slow."""
        names = ("rank", "seconds", "median")
        rank, seconds, median = (number(self.straggler_found, name) for name in names)
        if rank is None or not seconds or not median:
            return ""
        host = printable(str(self.straggler_found.get("host")))
        return f"rank {rank} ({host}) {seconds / median:.1f}x as slow"

    @property
    def times(self) -> tuple[str, str]:
        """Return the time that the run has taken, and what is left."""
        left = format_time(self.pace.remaining_seconds)
        return format_time(self.pace.elapsed_seconds), f"{left} left"

    def line(self, record: dict[str, Any]) -> str:
        """Return what a log says of a record; "" if that is said elsewhere."""
        kind, says = kind_of(record), ""
        if kind == "interval":
            norm = number(record, "gradient_norm")
            parts = [*numbers(record).values(), f"gradient norm {norm:.4g}" if norm else ""]
            elapsed, left = self.times
            parts += [format_epoch(number(record, "epoch")), f"{elapsed} elapsed", left]
            says = ", ".join(filter(None, parts))
        elif kind == "evaluation":
            parts = [f"{name} {format_metric(value)}" for name, value in results(record).items()]
            seconds = number(record, "seconds")
            took = "" if seconds is None else f"in {seconds:.3g} s"
            best = "the best so far" if record.get("is_best") is True else ""
            sample = record.get("sample")
            parts = parts or ["a sample" if sample else "no results"]
            says = ", ".join(filter(None, [*parts, best, took]))
            if isinstance(sample, str):
                lines = sample[:SAMPLE_CHARACTERS].splitlines()
                says += "".join(f"\n  {printable(line)}" for line in lines)
        elif kind == "checkpoint":
            says = f"a save, for which training waited {number(record, 'seconds') or 0:.2g} s"
        elif kind == "spike":
            name = printable(str(record.get("name")).replace("_", " "))
            value, median = (format_metric(number(record, n)) for n in ("value", "median"))
            says = f"{name} {value}, a spike: its median was {median}"
        return f"step {record['step']} of {self.total_steps}: {says}" if says else ""


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has been written to its end."""
    return (checkpoint / "manifest.json").exists()


def results(record: dict[str, Any]) -> dict[str, float | None]:
    """Return the results of an evaluation by name; None for what is not finite."""
    names = [name for name in record if name not in NOT_RESULTS]
    return {
        printable(name): number(record, name)
        for name in names
        if record[name] is None or number(record, name) is not None
    }


def numbers(interval: dict[str, Any]) -> dict[str, str]:
    """Return what is said of an interval, by name; "" for what is not known or not to be said."""
    rate, per_second = number(interval, "learning_rate"), number(interval, "tokens_per_second")
    unit = "tokens/s"
    if per_second is None:
        unit, per_second = "samples/s", number(interval, "samples_per_second")
    mfu, data = number(interval, "mfu"), number(interval, "data_share")
    skipped = number(interval, "skipped_steps")
    if skipped == number(interval, "skipped"):  # the loss says so
        skipped = None
    return {
        "loss": loss(interval),
        "learning rate": "" if rate is None else f"lr {rate:.1e}",
        "speed": "" if per_second is None else f"{format_speed(per_second)} {unit}",
        "mfu": "" if mfu is None else f"MFU {mfu:.0%}",
        "data": "" if data is None else f"data {data:.0%}",
        "skipped": f"{skipped:.0f} steps skipped in all" if skipped else "",
    }


def is_finite(interval: dict[str, Any]) -> bool:
    """Return whether all steps of an interval changed the weights."""
    return interval.get("loss") is not None and not interval.get("skipped")


def loss(interval: dict[str, Any]) -> str:
    """Return the loss of an interval, and how many of its steps were skipped."""
    value = number(interval, "loss")
    says = "loss not finite" if value is None else f"loss {value:#.4g}".removesuffix(".")
    if skipped := number(interval, "skipped"):
        says += f", {skipped:.0f} of {number(interval, 'steps') or 0:.0f} steps skipped"
    return says


def format_epoch(epoch: float | None) -> str:
    """Format an epoch: a fraction, or of a stream an integer."""
    if epoch is None:
        return ""
    return f"epoch {epoch}" if isinstance(epoch, int) else f"epoch {epoch:.2f}"


def format_speed(per_second: float) -> str:
    """Format a number per second in at most five characters: 9.31, 3021, 312k, 1.21M."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if per_second >= 100 * unit or per_second >= 1e6:
            return f"{per_second / unit:.3g}{suffix}"
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
