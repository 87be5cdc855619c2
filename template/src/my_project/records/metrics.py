"""One record per interval, on the main process: metrics.jsonl, trackers, a bar or plain lines."""

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..config import Config
from ..files import finite, move_aside, write_atomically
from ..loading.layout import Split
from ..optim import learning_rate
from ..recipe import optional
from ..run_folder import Run
from ..step_sums import LateNumbers
from ..stopping import Watch
from .trackers import report_tracker

logger = logging.getLogger(__name__)


class Telemetry:
    """Count what the steps did, and write it down every so often."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        run: Run,
        split: Split,
        state: dict[str, Any],
        watch: Watch,
        model: torch.nn.Module,
        feed: Any,
    ) -> None:
        """Continue the record of a run at state["step"]; what a kill has undone is dropped."""
        self.accelerator, self.config, self.run, self.split = accelerator, config, run, split
        self.watch, self.feed = watch, feed
        count = optional(config.recipe, "per_sample")
        self.per_sample: dict[str, float] = count(model) if count else {}
        self.unwritten = ""  # what a full disk did not take
        self.state = state  # its counters are part of the checkpoint
        self.is_main = accelerator.is_main_process
        self.path = run.folder / "metrics.jsonl"
        self.late = LateNumbers()
        self.stop_requested = False
        self.weight_unknown = state["step"] == 0  # which keeps what goes backward near a mean
        self.data_seconds = self.paused_seconds = self.run_seconds = 0.0
        self.run_steps = self.interval_steps = 0
        self.recorded = self.pushed = self._clock()  # when the last such step ended
        self.bar: Any = None

    def __enter__(self) -> "Telemetry":
        if not self.is_main:
            return self
        if os.path.lexists(self.path):
            records, damaged = read_records(self.run)
            if damaged:
                move_aside(self.path)
            kept = [r for r in records if self._is_kept(r)]
            write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        if changed := self.run.changed:  # not for trackers, which take numbers
            self._append(json.dumps({"step": self.state["step"], "changed": changed}) + "\n")
        self._start_trackers()
        if sys.stdout.isatty():
            from rich import progress

            self.bar = progress.Progress(
                "step", progress.MofNCompleteColumn(), progress.BarColumn(),
                progress.TimeRemainingColumn(), progress.TextColumn("{task.description}"),
            )  # fmt: skip
            self.task = self.bar.add_task(
                "", total=self.run.total_steps, completed=self.state["step"]
            )
            self.bar.start()
        self.recorded = self.pushed = self._clock()  # trackers may take seconds to start
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()
        self._each_tracker("finish", lambda tracker: tracker.finish())

    def _start_trackers(self) -> None:
        """Start each tracker by itself, so that one which cannot start is left out alone."""
        name, started = self.config.run_name, []
        init_kwargs = {  # a resumed run goes on in the same curves
            "tensorboard": {"purge_step": self.state["step"] + 1},
            "wandb": {"name": name, "id": self.run.id, "resume": "allow"},
        }
        for tracker in self.accelerator.log_with:
            is_wandb = str(tracker) == "wandb"  # there, one project holds all runs
            project = os.environ.get("WANDB_PROJECT") or __name__.partition(".")[0]
            self.accelerator.log_with, self.accelerator.trackers = [tracker], []
            try:
                self.accelerator.init_trackers(
                    project if is_wandb else name, init_kwargs=init_kwargs
                )
                started += self.accelerator.trackers
            except Exception as error:
                report_tracker(str(tracker), "start", error)
        self.accelerator.trackers = started

    def _each_tracker(self, what: str, function: Callable[[Any], Any]) -> None:
        """Call a function with each tracker; one that fails gets nothing more, the run goes on."""
        for tracker in [*self.accelerator.trackers]:
            try:
                function(tracker)
            except Exception as error:
                report_tracker(tracker.name, what, error)
                self.accelerator.trackers.remove(tracker)

    def _is_kept(self, record: dict[str, Any]) -> bool:
        """Return whether a record is not newer than the state: nor of an evaluation to come."""
        step, is_evaluation = self.state["step"], "samples_per_second" not in record
        if "changed" in record:  # this start writes that of its own step again, if it still holds
            return record["step"] < step
        to_come = is_evaluation and self.state["evaluated_step"] != step
        return record["step"] < step or (record["step"] == step and not to_come)

    def timed(self, feed: Iterable[Any]) -> Iterator[Any]:
        """Pass the batches on, adding up the seconds spent waiting for them."""
        batches = iter(feed)
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.data_seconds += time.perf_counter() - start
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a save out of the throughput."""
        self.watch.pause()
        start = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - start

    def _clock(self) -> tuple[float, float, float]:
        """Return the time, and what of it was spent on waiting for data and in pauses so far."""
        return time.perf_counter(), self.data_seconds, self.paused_seconds

    def push(self, step: int, sums: Tensor) -> None:
        """Note the numbers of a step; look at those of the one before.

        Args:
            step: its number.
            sums: over all processes loss, weight, who wants to stop, who is short of a stream's
                lanes; norm; this process's own loss.
        """
        ended = self._clock()  # now: the numbers are seen after the next step, or before a save
        self._observe(self.late.push(step, sums))
        self.pushed = ended
        self.watch.step_done()

    def flush(self) -> None:
        """Look at the newest step now."""
        self._observe(self.late.flush())

    def _observe(self, seen: tuple[int, list[float]] | None) -> None:
        if seen is None:
            return
        step, (loss_sum, weight, stop, short, norm, own_loss) = seen
        self.stop_requested |= stop > 0
        if short:
            self.feed.note_short(step)
        self.interval_steps += 1
        if self.weight_unknown and weight > 0:
            micro_batches = self.split.processes * self.split.accumulation
            self.state["weight_per_micro_batch"] = weight / micro_batches
            self.weight_unknown = False
        if math.isfinite(norm) and weight > 0:
            self.state["nonfinite_in_a_row"] = 0
            if math.isfinite(loss_sum):
                self.state["interval_loss"] += loss_sum
                self.state["interval_weight"] += weight
            else:
                logger.warning(
                    "step %d: the loss is %s, though its gradient is finite; it is left out of the"
                    " mean in metrics.jsonl", step, loss_sum,
                )  # fmt: skip
        else:
            self.state["skipped_steps"] += 1
            self.state["nonfinite_in_a_row"] += 1
            if not math.isfinite(own_loss):
                logger.warning("step %d: the loss of this process is %s; skipped", step, own_loss)
            if self.state["nonfinite_in_a_row"] >= self.config.optim.max_nonfinite_steps:
                count = f"in {self.state['nonfinite_in_a_row']} steps in a row, up to step {step}"
                raise RuntimeError(
                    f"nothing was learned {count}, where the recipe's loss counts no sample: check"
                    " the data, or raise optim.max_nonfinite_steps"
                    if weight == 0
                    else f"the gradient was not finite {count}, where the loss of this process is"
                    f" {own_loss}: lower optim.lr, check the data, or raise"
                    " optim.max_nonfinite_steps"
                )
        if (step + 1) % self.config.telemetry.every_steps == 0 or step + 1 == self.run.total_steps:
            self._record(step, norm)

    def _record(self, step: int, norm: float) -> None:
        weight = self.state["interval_weight"]
        passed, data_seconds, paused_seconds = (
            now - then for now, then in zip(self.pushed, self.recorded, strict=True)
        )
        seconds = passed - paused_seconds
        samples = self.interval_steps * self.split.global_batch_size
        self.run_steps += self.interval_steps
        self.run_seconds += seconds
        rate = samples / seconds
        self.write(
            {
                "step": step + 1,
                "loss": self.state["interval_loss"] / weight if weight else None,
                "learning_rate": learning_rate(step, self.run.total_steps, self.config.optim),
                "gradient_norm": norm if math.isfinite(norm) else None,
                "samples_per_second": rate,
                **self._rates(rate),
                "data_seconds": data_seconds,
                "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
                "skipped_steps": self.state["skipped_steps"],
            }
        )
        self.recorded = self.pushed
        self.interval_steps = 0
        self.state["interval_loss"] = self.state["interval_weight"] = 0.0

    def _rates(self, samples_per_second: float) -> dict[str, float]:
        """Say the throughput in the recipe's units, and what part of the hardware it uses."""
        rates = {}
        if "tokens" in self.per_sample:
            rates["tokens_per_second"] = samples_per_second * self.per_sample["tokens"]
        if (peak := self.config.telemetry.peak_tflops) and "operations" in self.per_sample:
            operations = samples_per_second * self.per_sample["operations"]
            rates["utilisation"] = operations / (peak * 1e12 * self.split.processes)
        return rates

    @property
    def throughput(self) -> dict[str, float]:
        """Return the samples per second since this process started, without evaluations and saves.

        Nothing where no step was recorded.
        """
        samples = self.run_steps * self.split.global_batch_size
        return {"samples per second": samples / self.run_seconds} if self.run_steps else {}

    def write(self, record: dict[str, Any]) -> None:
        """Write one record everywhere."""
        if not self.is_main or len(record) == 1:  # there may be no validation set
            return
        record = finite(record)
        self._append(json.dumps(record, allow_nan=False) + "\n")
        values = {name: value for name, value in record.items() if value is not None}
        step = values.pop("step")
        self._each_tracker("log", lambda tracker: tracker.log(dict(values), step=step))
        shown = " ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if name not in ("peak_memory_bytes", "data_seconds")
        )
        line = f"step {record['step']} of {self.run.total_steps}: {shown}"
        if not self.bar:
            logger.info(line)
        elif "samples_per_second" in record:
            brief = f"{record['samples_per_second']:.0f} samples/s, loss {record['loss'] or 0:.4g}"
            self.bar.update(self.task, completed=record["step"], description=brief)
        else:
            self.bar.console.print(line)

    def _append(self, line: str) -> None:
        """Append to metrics.jsonl; what a full disk does not take waits for the next time."""
        is_first_failure = not self.unwritten
        self.unwritten += line
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self.unwritten)
            self.unwritten = ""
        except OSError as error:
            if is_first_failure:
                logger.error("%s cannot be written, records wait: %s", self.path, error)
            if self.path.exists():
                os.truncate(self.path, size)  # no half line


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_records(run: Run) -> tuple[list[dict[str, Any]], bool]:
    """Read metrics.jsonl.

    Returns:
        The records, and whether there is anything else; a last line cut off by a kill is not.
    """
    try:
        lines = (run.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except OSError:  # a folder
        return [], True
    records, damaged = [], False
    for line in lines:
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            damaged |= line.endswith(b"\n") or not line.startswith(b"{")
    return records, damaged
