"""One record per interval, by rank 0: metrics.jsonl, trackers, a bar or plain lines.

It only records; state.py and the loop decide.
"""

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from ..files import finite, move_aside, write_atomically
from ..loading.layout import BatchLayout
from ..optim import learning_rate
from ..recipe import optional
from ..run_folder import Run
from ..state import StepReport, TrainState
from .display import Progress
from .runs import parse_records
from .trackers import Trackers

logger = logging.getLogger(__name__)


class Clock(NamedTuple):
    """Seconds since the start: in total, waiting for data, and paused (evaluations, saves)."""

    total: float
    data: float
    paused: float


class MetricsWriter:
    """Aggregate the step reports, and write a record every telemetry.every_steps."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        layout: BatchLayout,
        state: TrainState,
        model: torch.nn.Module,
    ) -> None:
        """Continue the records of a run at state.step; newer ones are discarded."""
        self.run = run
        self.config = run.config
        self.layout = layout
        self.state = state  # the sums since the last record are part of the checkpoint
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        count = optional(run.config.recipe, "per_sample")
        self.per_sample: dict[str, float] = count(model) if count else {}
        self.path = run.folder / "metrics.jsonl"
        self.unwritten = ""  # lines that a full disk has not taken yet
        self.trackers = Trackers(accelerator, run)
        self.progress = Progress(run)
        self.data_seconds = 0.0
        self.paused_seconds = 0.0
        self.run_seconds = 0.0
        self.run_steps = 0
        self.interval_steps = 0
        self.ended: dict[int, Clock] = {}  # when a step ended that is not observed yet
        self.recorded = self._clock()  # when the last recorded step ended

    def __enter__(self) -> "MetricsWriter":
        if not self.is_main:
            return self
        if os.path.lexists(self.path):
            records, damaged = parse_records(self.run.folder)
            if damaged:
                move_aside(self.path)
            kept = [record for record in records if self._is_kept(record)]
            write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        if changed := self.run.changed_numerics:  # not for trackers, which take numbers
            self._append(json.dumps({"step": self.state.step, "changed": changed}) + "\n")
        self.trackers.start(self.state.step)
        self.progress.start(self.state.step)
        self.recorded = self._clock()  # trackers may take seconds to start
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.trackers.finish()

    def _is_kept(self, record: dict[str, Any]) -> bool:
        """Return whether a record is kept: not newer than the state, nor to be written again."""
        step, is_evaluation = self.state.step, "samples_per_second" not in record
        if "changed" in record:  # one at this step is written again, if it still applies
            return record["step"] < step
        to_come = is_evaluation and self.state.evaluated_step != step
        return record["step"] < step or (record["step"] == step and not to_come)

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Pass the micro-batches on, adding up the seconds spent waiting for them."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.data_seconds += time.perf_counter() - start
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a save out of the throughput."""
        start = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - start
        self.run.paused_seconds = self.paused_seconds

    def _clock(self) -> Clock:
        return Clock(time.perf_counter(), self.data_seconds, self.paused_seconds)

    def step_ended(self, step: int) -> None:
        """Note when a step ended, since its numbers come after the next one or before a save."""
        self.ended[step] = self._clock()

    def observe(self, report: StepReport) -> None:
        """Count a finished step, and record the interval that ends with it."""
        self.interval_steps += 1
        ended = self.ended.pop(report.step)
        done = report.step + 1
        if done % self.config.telemetry.every_steps == 0 or done == self.run.total_steps:
            self._record(report, ended)

    def _record(self, report: StepReport, ended: Clock) -> None:
        passed = Clock(*(now - then for now, then in zip(ended, self.recorded, strict=True)))
        seconds = passed.total - passed.paused
        samples_per_second = self.interval_steps * self.layout.global_batch_size / seconds
        self.run_steps += self.interval_steps
        self.run_seconds += seconds
        state, config = self.state, self.config
        num_items = state.interval_num_items
        self.write(
            {
                "step": report.step + 1,
                "loss": state.interval_loss_sum / num_items if num_items else None,
                "learning_rate": learning_rate(report.step, self.run.total_steps, config.optim),
                "gradient_norm": report.grad_norm if math.isfinite(report.grad_norm) else None,
                "samples_per_second": samples_per_second,
                **self._rates(samples_per_second),
                "data_seconds": passed.data,
                "peak_memory_bytes": peak_memory_bytes(self.device),
                "skipped_steps": state.skipped_steps,
            }
        )
        self.recorded = ended
        self.interval_steps = 0
        state.interval_loss_sum = 0.0
        state.interval_num_items = 0.0

    def _rates(self, samples_per_second: float) -> dict[str, float]:
        """Return the throughput in the recipe's units, and the model FLOPs utilization (MFU)."""
        rates = {}
        if "tokens" in self.per_sample:
            rates["tokens_per_second"] = samples_per_second * self.per_sample["tokens"]
        if (peak := self.config.telemetry.peak_tflops) and "flops" in self.per_sample:
            flops_per_second = samples_per_second * self.per_sample["flops"]
            rates["mfu"] = flops_per_second / (peak * 1e12 * self.layout.world_size)
        return rates

    @property
    def throughput(self) -> dict[str, float]:
        """Return the samples per second since this process started, without evaluations and saves.

        Nothing where no step was recorded.
        """
        samples = self.run_steps * self.layout.global_batch_size
        return {"samples per second": samples / self.run_seconds} if self.run_steps else {}

    def write(self, record: dict[str, Any]) -> None:
        """Write one record everywhere."""
        if not self.is_main or len(record) == 1:  # there may be no validation set
            return
        record = finite(record)
        self._append(json.dumps(record, allow_nan=False) + "\n")
        values = {name: value for name, value in record.items() if value is not None}
        self.trackers.log(values, values.pop("step"))
        self.progress.show(record)

    def _append(self, line: str) -> None:
        """Append to metrics.jsonl; lines that fail (full disk) are retried with the next record."""
        is_first_failure = not self.unwritten
        self.unwritten += line
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self.unwritten)
            self.unwritten = ""
        except OSError as error:
            if is_first_failure:
                logger.error("%s cannot be written, so records are kept: %s", self.path, error)
            if self.path.exists():
                os.truncate(self.path, size)  # drop the partial line


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
