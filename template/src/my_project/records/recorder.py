"""Write the records of a run: metrics.jsonl, trackers, the terminal.

It only records; state.py and the loop decide. docs/run-folder.md describes the records. A start
drops those that are newer than its checkpoint; while a run goes on, lines are only appended.
"""

import gc
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accelerate import Accelerator

from ..blocks import compilations
from ..files import finite, open_own, unused_name, write_atomically, writing
from ..loading.layout import BatchLayout
from ..parallel import is_compiled
from ..run_files import each_record, kind_of
from ..run_folder import Run
from ..state import NotFiniteError, StepReport, TrainState
from . import performance
from .profiling import Profiler
from .screen import Screen
from .trackers import Trackers

logger = logging.getLogger(__name__)
PAUSES = ("evaluation", "saving")


class MetricsWriter:
    """Aggregate the step reports, and write a record every telemetry.every_steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        layout: BatchLayout,
        state: TrainState,
        model: Any,
    ) -> None:
        """Continue the records of a run at state.step.

        Args:
            accelerator: this process's Accelerator.
            run: the run folder.
            layout: the global batch's division.
            state: the sums since the last record are part of the checkpoint.
            model: prepared.
        """
        self.run = run
        self.config = run.config
        self.layout = layout
        self.state = state
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        samples = run.lengths.get("the training set", 0)  # a stream has none
        self.steps_per_epoch = samples // layout.global_batch_size
        self.file = RecordFile(run)
        self.trackers = Trackers(run)
        self.screen = Screen(run)
        self.throughput = performance.Throughput(accelerator, run.config, layout, model)
        self.is_compiled = is_compiled(model)
        self.profiler: Profiler | None = None
        self.last_pause = 0.0  # seconds
        # of steps that have ended and are not observed yet, since their numbers come one step
        # later: the clock, the wait for data, and their learning rate
        self.ended: dict[int, tuple[float, float, float]] = {}
        self.data_seconds = 0.0  # of the current step
        self.last: Any = None  # the report of the last step that was observed
        self.last_rate = 0.0  # the learning rate of that
        self._begin_interval(time.perf_counter())
        # a record that is not yet written, and the reports of all ranks for it
        self.gathering: tuple[dict[str, Any], performance.RankReports] | None = None

    # ---- start and end ---------------------------------------------------------------------------
    def __enter__(self) -> "MetricsWriter":
        if self.is_main:
            self.file.drop_newer(self.state)
            self.trackers.start(self.state.step, self.file.newest)
            start = {
                "kind": "start",
                "world_size": self.layout.world_size,
                "micro_batch_size": self.layout.micro_batch_size,
                "hosts": self.run.hosts,
                "resumed_from": self.run.continued_from,
            }
            self.write(start)
            self._write_gathered()
            self.screen.start(self.state.step)
            self.interval_began = time.perf_counter()  # trackers may take seconds to start
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.throughput.end_counting()
            if self.profiler:
                self.profiler.stop()
            if kind is NotFiniteError and self.interval_steps:  # the steps that ended the run
                self._end_interval(self.last, time.perf_counter())
            self._write_gathered(wait=kind is None)  # another rank may be gone
        finally:
            self.screen.stop()
            self.trackers.finish(has_failed=kind is not None)

    def write(self, record: dict[str, Any]) -> None:
        """Write a record everywhere, on rank 0, with what all records have."""
        if not self.is_main:
            return
        step = record.get("step", self.state.step)
        about = {"kind": record["kind"], "step": step}
        if self.steps_per_epoch:
            about["epoch"] = round(step / self.steps_per_epoch, 4)
        written = self.file.append(about | record)
        self.trackers.log(written)
        self.screen.show(written)

    def write_evaluation(self, results: dict[str, float], **more: Any) -> None:
        """Record the results of the evaluation that was the last pause."""
        if results or more:  # there may be no validation set
            is_best = self.state.best is not None and self.state.best_step == self.state.step
            about = rounded({"seconds": self.last_pause}) | {"is_best": is_best}
            self.write({"kind": "evaluation"} | about | results | more)
        if self.interval_steps and self.state.end_reason(self.run):  # early stopping
            self._end_interval(self.last, time.perf_counter())
            self._write_gathered()

    # ---- the step --------------------------------------------------------------------------------
    def timed(self, batches: Any) -> Iterator[Any]:
        """Pass the micro-batches on, and measure how long the step waits for each."""
        profile = self.config.profile
        if profile.window and self.run.rank in profile.ranks:
            self.profiler = Profiler(self.run, self.device, self.state.step)
        began = time.perf_counter()
        for batch in batches:
            self.data_seconds += time.perf_counter() - began
            if not self.throughput.is_counted and self.is_main:
                self.throughput.begin_counting()
            yield batch
            self.throughput.end_counting()  # with accumulation: of the first micro-batch
            began = time.perf_counter()

    def step_ended(self, step: int, rate: float) -> None:
        """Note when a step ended, since its numbers come after the next one or before a save.

        Args:
            step: counted from 0.
            rate: its learning rate.
        """
        self.ended[step] = time.perf_counter(), self.data_seconds, rate
        self.data_seconds = 0.0
        if self.run.first_step_time is None:
            self.run.first_step_ended(step)
        self.screen.step_ended(step + 1)
        if self.profiler:
            self.profiler.step_ended(step + 1)

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Leave the time of an evaluation or a save (one of PAUSES) out of the throughput."""
        self._write_gathered()
        self.screen.pause(what)
        start = time.perf_counter()
        yield
        self.last_pause = time.perf_counter() - start
        self.interval_seconds[what] += self.last_pause
        self.run.paused_seconds += self.last_pause
        if what == "saving":
            self.write({"kind": "checkpoint"} | rounded({"seconds": self.last_pause}))
        self.screen.pause("")

    # ---- the interval ----------------------------------------------------------------------------
    def observe(self, report: StepReport) -> None:
        """Count a finished step, and record the interval that ends with it."""
        self._write_gathered()
        clock, data_seconds, self.last_rate = self.ended.pop(report.step)
        self.last = report
        self.interval_steps += 1
        self.interval_items += report.num_items
        self.interval_own_seconds += report.own_seconds
        self.interval_seconds["data"] += data_seconds
        done = report.step + 1
        if done % self.config.telemetry.every_steps == 0 or done == self.run.total_steps:
            self._end_interval(report, clock)
            if self.layout.world_size == 1:
                self._write_gathered()

    def _begin_interval(self, clock: float) -> None:
        self.interval_began = clock
        self.interval_steps = 0  # of this process
        self.interval_items = 0.0  # of all ranks
        self.interval_own_seconds = 0.0  # until this rank needed the others
        self.interval_seconds: dict[str, float] = dict.fromkeys(("data", *PAUSES), 0.0)
        self.compilations_before = compilations() if self.is_compiled else 0

    def _end_interval(self, report: StepReport, clock: float) -> None:
        """Begin the record of an interval, which is written with the other ranks' part.

        Args:
            report: of its last step.
            clock: when that ended.
        """
        state, steps, seconds = self.state, self.interval_steps, self.interval_seconds
        whole = clock - self.interval_began
        without_pauses = whole - sum(seconds[name] for name in PAUSES)
        rates = self.throughput.add(steps, self.interval_items, without_pauses)
        shares = {f"{name}_share": part / whole for name, part in seconds.items()}
        items = state.interval_num_items or math.nan
        record = {
            "kind": "interval",
            "step": report.step + 1,
            "steps": state.interval_steps,
            "skipped": state.interval_skipped_steps,
            "skipped_steps": state.skipped_steps,
            "loss": state.interval_loss_sum / items,
            **{f"train/{name}": value / items for name, value in state.interval_scalars.items()},
            "learning_rate": self.last_rate,
            "gradient_norm": report.grad_norm,
            **rounded(rates | shares),
        }
        if self.is_compiled:
            record["compilations"] = compilations() - self.compilations_before
        own, data = self.interval_own_seconds / steps, seconds["data"] / steps
        reports = performance.RankReports(own, data, self.layout.world_size, self.device)
        self.gathering = record, reports
        gc.collect()  # after the same step on all ranks, since a rank that pauses delays all
        self._begin_interval(clock)
        state.begin_interval()

    def _write_gathered(self, *, wait: bool = True) -> None:
        """Write the record that waits for the reports of the other ranks, and the run's notes.

        Args:
            wait: for their reports, which they send where this is called on all ranks.
        """
        if self.gathering:
            record, reports = self.gathering
            self.gathering = None
            if wait:
                record |= rounded(reports.summarize(self.run.hosts))
            self.write(record)
        while self.run.notes:
            self.write(self.run.notes.pop(0))


# ---- metrics.jsonl -------------------------------------------------------------------------------
class RecordFile:
    """The records of a run on the disk; a full disk does not end the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / "metrics.jsonl"
        self.unwritten = b""  # lines that a full disk has not taken yet
        self.elapsed_before = 0.0  # seconds in earlier starts of the run
        self.newest: dict[str, int] = {}  # of an earlier start: the last step of each kind

    def drop_newer(self, state: TrainState) -> None:
        """Drop the records that are newer than the state, and a last line that a kill has cut.

        A file with other damage is kept aside.
        """
        if not self.path.exists():
            return
        again = {"numerics"}  # of the state's step this start writes these kinds again
        if state.evaluated_step != state.step:
            again.add("evaluation")
        is_damaged = False
        kept: list[str] = []
        with writing(self.run.folder):
            for record in each_record(self.path):
                if not record:
                    is_damaged = True
                    continue
                kind, step = kind_of(record), record["step"]
                self.newest[kind] = max(step, self.newest.get(kind, 0))
                if step < state.step or (step == state.step and kind not in again):
                    kept.append(json.dumps(record) + "\n")
                    elapsed = record.get("elapsed_seconds", 0.0)
                    self.elapsed_before = max(elapsed, self.elapsed_before)
            if is_damaged:
                aside = unused_name(self.path, "damaged")
                shutil.copyfile(self.path, aside)
                logger.warning("%s has damaged lines: kept aside as %s", self.path, aside.name)
            write_atomically(self.path, "".join(kept))

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append a record, with the time; return it as it was written.

        If that fails (a full disk), the line is written with the next record.
        """
        elapsed = self.elapsed_before + time.monotonic() - self.run.began
        now = {"elapsed_seconds": round(elapsed, 3), "time": round(time.time(), 3)}
        record = finite(record | now)
        if not (self.run.has_locks or self.run.is_current):
            return record  # the file is that of another launch, and the next save ends this one
        self.unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
        size: int | None = None
        try:
            with open_own(self.path, "ab") as file:
                size = file.tell()
                file.write(self.unwritten)
            self.unwritten = b""
        except OSError as error:
            logger.error("%s cannot be written, so records are kept: %s", self.path, error)
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)  # drop the partial line
        return record


def rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Round what was measured to four digits: a long run has hundreds of thousands of records."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in fields.items()
    }
