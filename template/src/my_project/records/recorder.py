"""Write the records of a run into metrics.jsonl and the log, and pass them on to the outputs.

This module only records; state.py and the loop decide when to evaluate, save and stop.
docs/run-folder.md describes the records. A start drops records that are newer than its checkpoint;
after that, lines are only appended.

An output is a class in OUTPUTS that receives every record. It has __init__(run, accelerator,
layout, model), and as many of the following methods as it needs; start, write and of_run are called
only on rank 0:

    check(config)               a static method: refuse settings, before anything is written
    start(step, newest)         before the first record; for `newest` see RecordFile
    wrap_batches(batches)       return the micro-batches of all steps; called once
    step_ended(step)            this many steps are done
    observe(report)             receive the numbers of a step, one step late or before a pause
    end_interval()              return fields of an interval's record; may start a collective for
                                the fields that gathered() returns
    gathered()                  return more fields, one step later or at a pause, on all ranks
    pause(kind)                 training waits for "evaluation" or "saving"
    resume(kind, seconds)       training has waited this long for it
    write(record)               a Record (run_files.py), as it is in metrics.jsonl
    of_run()                    return fields for the status of a finished run
    stop()                      no step follows, but records may
    failed()                    an exception ends the run
    close()                     training has ended; called on the outputs in reverse order

After close(), finish() in train.py may still call of_run(), or write() with the record "stop".

To delete an output, delete its file, its import and its name in OUTPUTS below, its settings in
config.py, and the lines of the tests that name these settings:

    Performance: records/performance.py, telemetry.peak_tflops
    Trackers: records/trackers.py, telemetry.trackers
    Screen: records/screen.py, which has no settings
    Profiler: records/profiling.py, the class ProfileConfig, and the field of Config

train.py calls records/samples.py itself: delete that file, the two lines of train.py that name it,
and evaluation.samples.
"""

import gc
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..config import Config
from ..files import Json, finite, open_own, unused_name, writing
from ..loading.layout import BatchLayout
from ..optim import learning_rate
from ..recipe import Batch
from ..run_files import Record, each_record_backward
from ..run_folder import Run
from ..state import NotFiniteError, StepReport, TrainState
from .log import log_record
from .performance import Performance
from .profiling import Profiler
from .screen import Screen
from .trackers import Trackers

logger = logging.getLogger(__name__)
OUTPUTS: tuple[type, ...] = (  # in the order in which their methods are called
    Performance,
    Trackers,
    Screen,
    Profiler,
)


def check_outputs(config: Config) -> None:
    """Let the outputs refuse settings, before anything is written."""
    call(OUTPUTS, "check", config)


def call(outputs: Iterable[Any], name: str, *arguments: Any) -> list[Any]:
    """Call a method of each output that has it; return the results."""
    return [getattr(output, name)(*arguments) for output in outputs if hasattr(output, name)]


class Recorder:
    """Aggregate the step reports, and write a record every telemetry.every_steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        layout: BatchLayout,
        state: TrainState,
        model: nn.Module,
    ) -> None:
        """Continue the records of a run at state.step.

        Args:
            accelerator: this process's Accelerator.
            run: the run folder.
            layout: the division of the global batch.
            state: the training state, with the sums since the last record.
            model: the prepared model.
        """
        self.run = run
        self.every_steps = run.config.telemetry.every_steps
        self.layout = layout
        self.state = state
        self.is_main = accelerator.is_main_process
        samples = run.lengths.get("the training set", 0)  # a stream has no length
        self.steps_per_epoch = samples // layout.global_batch_size
        self.file = RecordFile(run)
        self.outputs = [kind(run, accelerator, layout, model) for kind in OUTPUTS]
        self.last_pause = 0.0  # the length of the last pause, in seconds
        # the last step of this interval that was observed, and its learning rate
        self.last: StepReport | None = None
        self.rate = 0.0
        # the step and the values of an interval, which wait for the other ranks
        self.pending: tuple[int, dict[str, Json]] | None = None

    # ---- start and end ---------------------------------------------------------------------------
    def __enter__(self) -> "Recorder":
        if self.is_main:
            self.file.drop_newer(self.state)
            call(self.outputs, "start", self.state.step, self.file.newest)
            start = {
                "world_size": self.layout.world_size,
                "micro_batch_size": self.layout.micro_batch_size,
                "hosts": self.run.hosts,
                "resumed_from": self.run.continued_from,
            }
            self.write("start", start)
            self._write_pending()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        has_failed = True
        try:
            call(self.outputs, "stop")
            if kind is NotFiniteError and self.last:  # record the steps that ended the run
                self._end_interval(self.last)
            self._write_pending(wait=kind is None)  # after an error, ranks may be gone
            has_failed = kind is not None
        finally:
            if has_failed:
                call(self.outputs, "failed")
            call(reversed(self.outputs), "close")

    def write(self, kind: str, values: dict[str, Json], step: int | None = None) -> None:
        """Write a record to file, outputs and log, on rank 0; by default, `step` is state.step."""
        if not self.is_main:
            return
        step = self.state.step if step is None else step
        record = Record(
            kind=kind,
            step=step,
            epoch=round(step / self.steps_per_epoch, 4) if self.steps_per_epoch else None,
            elapsed_seconds=round(self.file.elapsed_before + time.monotonic() - self.run.began, 3),
            time=round(time.time(), 3),
            values=finite(values),
        )
        self.file.append(record)
        call(self.outputs, "write", record)
        log_record(record, self.run.total_steps)

    def write_evaluation(self, results: dict[str, float], samples: dict[str, Json]) -> None:
        """Record the results of the evaluation for which training has just paused."""
        if results or samples:  # there may be no validation set
            is_best = self.state.best is not None and self.state.best_step == self.state.step
            values = rounded({"seconds": self.last_pause}) | {"is_best": is_best}
            self.write("evaluation", values | results | samples)
        if self.last and self.state.end_reason(self.run):  # early stopping
            self._end_interval(self.last)
            self._write_pending()

    # ---- the step --------------------------------------------------------------------------------
    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass the micro-batches on; an output may measure how long the step waits for each."""
        for output in self.outputs:
            if hasattr(output, "wrap_batches"):
                batches = output.wrap_batches(batches)
        return iter(batches)

    def step_ended(self, step: int) -> None:
        """Note that a step ended; its numbers come after the next step or before a pause.

        Args:
            step: the step, counted from 0.
        """
        call(self.outputs, "step_ended", step + 1)
        if self.run.first_step_time is None:
            self.run.first_step_ended(step)

    @contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """Measure an evaluation or a save ("evaluation", "saving"), and record a save."""
        self._write_pending()
        call(self.outputs, "pause", kind)
        start = time.perf_counter()
        yield
        self.last_pause = time.perf_counter() - start
        self.run.paused_seconds += self.last_pause
        if kind == "saving":
            self.write("checkpoint", rounded({"seconds": self.last_pause}))
        call(self.outputs, "resume", kind, self.last_pause)

    # ---- the interval ----------------------------------------------------------------------------
    def observe(self, report: StepReport) -> None:
        """Count a finished step, and record the interval that ends with it."""
        self._write_pending()
        self.last = report
        self.rate = learning_rate(
            report.step, self.run.total_steps, self.run.config.optim, self.state.lr_reductions
        )
        call(self.outputs, "observe", report)
        done = report.step + 1
        if done % self.every_steps == 0 or done == self.run.total_steps:
            self._end_interval(report)
            if self.layout.world_size == 1:
                self._write_pending()

    def _end_interval(self, report: StepReport) -> None:
        """Begin the record of an interval, which is written once other ranks' reports have arrived.

        Args:
            report: the report of the interval's last step.
        """
        state = self.state
        items = state.interval_num_items or math.nan
        values: dict[str, Json] = {
            "steps": state.interval_steps,
            "skipped": state.interval_skipped_steps,
            "skipped_steps": state.skipped_steps,
            "loss": state.interval_loss_sum / items,
            **{f"train/{name}": value / items for name, value in state.interval_scalars.items()},
            "learning_rate": self.rate,
            "gradient_norm": report.grad_norm,
            **rounded(self.fields("end_interval")),
        }
        self.pending = report.step + 1, values
        gc.collect()  # after the same step on all ranks: a rank that pauses delays all others
        self.last = None
        state.begin_interval()

    def _write_pending(self, *, wait: bool = True) -> None:
        """Write the record that is waiting for the other ranks' reports, and the run's notes.

        Args:
            wait: whether to wait for these reports; if so, all ranks have to call this.
        """
        if self.pending:
            (step, values), self.pending = self.pending, None
            if wait:
                values |= rounded(self.fields("gathered"))
            self.write("interval", values, step)
        while self.run.notes:
            self.write(*self.run.notes.pop(0))

    def fields(self, name: str) -> dict[str, Any]:
        """Call a method of every output that has it; return the fields of all outputs in one dict.

        Args:
            name: "end_interval", "gathered", or "of_run" for the status of a finished run.
        """
        return {k: value for fields in call(self.outputs, name) for k, value in fields.items()}


# ---- metrics.jsonl -------------------------------------------------------------------------------
class RecordFile:
    """The file metrics.jsonl; a disk that is full while the run trains does not end the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / "metrics.jsonl"
        self.unwritten = b""  # lines that could not be written yet
        self.elapsed_before = 0.0  # seconds in earlier starts of the run
        # by kind: the newest step of the records that drop_newer has read, from earlier starts
        self.newest: dict[str, int] = {}

    def drop_newer(self, state: TrainState) -> None:
        """Drop the records that are newer than the state, and a last line that a kill cut off.

        Only the end of the file is read and written. If a line there is damaged, the old file is
        kept as a copy.
        """
        if not os.path.lexists(self.path):
            return
        rewritten = {"numerics"}  # kinds of records that this start writes again at this step
        if state.evaluated_step != state.step:
            rewritten.add("evaluation")
        is_damaged = False
        kept: list[bytes] = []  # lines of the state's step, the last one first
        size = 0  # bytes of the older lines
        with writing(self.run.folder):
            for at, line, record in each_record_backward(self.path):
                if record.is_damaged:
                    is_damaged = True
                    continue
                kind, step = record.kind, record.step
                self.newest[kind] = max(step, self.newest.get(kind, 0))
                is_older = step < state.step
                if is_older or (step == state.step and kind not in rewritten):
                    self.elapsed_before = max(record.elapsed_seconds, self.elapsed_before)
                    if is_older:
                        size = at + len(line)
                        kept += [b"\n"] * (line[-1:] != b"\n")
                        break
                    kept.append(line.strip() + b"\n")
            if is_damaged:
                aside = unused_name(self.path, "damaged")
                shutil.copyfile(self.path, aside)
                logger.warning("%s has damaged lines; %s is a copy", self.path, aside.name)
            with open_own(self.path, "rb+") as file:
                file.seek(size)
                file.writelines(reversed(kept))
                file.truncate()

    def append(self, record: Record) -> None:
        """Append a record; if that fails (a full disk), its line is written with the next one."""
        if not self.run.is_current:
            return  # the file belongs to another launch, and the next save ends this launch
        self.unwritten += json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"
        size: int | None = None
        try:
            with open_own(self.path, "ab") as file:
                size = file.tell()
                file.write(self.unwritten)
            self.unwritten = b""
        except OSError as error:
            logger.error("%s cannot be written; records wait in memory: %s", self.path, error)
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)  # drop the partial line


def rounded(fields: dict[str, Json]) -> dict[str, Json]:
    """Round measurements to four digits, since a long run has hundreds of thousands of records."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in fields.items()
    }
