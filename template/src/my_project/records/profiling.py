"""Record the steps in profile.steps with torch.profiler, on the ranks in profile.ranks.

Each of these ranks writes into the run folder

    profile/rank_00000_steps_20_25.json.gz   for https://ui.perfetto.dev or chrome://tracing
    profile/rank_00000_steps_20_25.txt       torch's table of the operators that took the most time

The step before the profiled steps, if this start trains it, is a warm-up, which is not recorded.
Profiling takes time, so an interval with profiled steps is slower than others. An error here does
not end the run.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, schedule

from ..files import discard
from ..recipe import Batch
from ..run_folder import Run

logger = logging.getLogger(__name__)
OPERATORS = 15  # rows of the table


class Profiler:
    """Profile some steps of this rank, if profile.ranks names it."""

    def __init__(self, run: Run, accelerator: Accelerator, *_: object) -> None:
        self.run = run
        self.device = accelerator.device
        self.folder = run.folder / "profile"
        self.first = self.last = 0
        self.profile: torch.profiler.profile | None = None

    def wrap_batches(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Begin at the first micro-batch, so that no evaluation before it is profiled."""
        config = self.run.config.profile
        is_profiled = config.window and self.run.rank in config.ranks
        return self._profiled(batches) if is_profiled else batches

    def _profiled(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self._begin(self.run.step)
        yield from batches

    def _begin(self, step: int) -> None:
        """Begin to profile.

        Args:
            step: the number of steps done, in earlier starts of the run.
        """
        config = self.run.config.profile
        first, self.last = config.window or (0, 0)
        self.first = max(first, step + 1)
        steps, total = config.steps, self.run.total_steps
        if self.last <= step or first > total:
            text = "no step is profiled: profile.steps is %s, but this start trains %d:%d"
            logger.warning(text, steps, step + 1, total)
            return
        plan = schedule(wait=first - 1, warmup=1, active=self.last - first + 1, repeat=1)
        # otherwise Kineto prints an error to stderr on a machine without a GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        self.profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *on_gpu],
            # steps are numbered from 1, but torch asks for number 0 first
            schedule=lambda number: plan(max(number, step + 1)),
            on_trace_ready=self._write,
            with_stack=config.with_stack,
            acc_events=True,  # changes nothing for one cycle, but torch 2.10 warns without it
        )
        self.profile.step_num = step + 1
        self._try(self.profile.start)

    def step_ended(self, step: int) -> None:
        """Note that this many steps are done; called after every step."""
        if step == self.last:
            self.stop()
        elif self.profile:
            self._try(self.profile.step)

    def stop(self) -> None:
        """End the profile and write it; a run may fail or be stopped in any step."""
        profile, self.profile = self.profile, None
        if profile:
            self._try(profile.stop)
            if self.run.step + 1 < self.first:
                logger.warning("no step is profiled: the run ended before step %d", self.first)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of any kind: it must not end training
            logger.warning("%s lacks the profile of rank %d: %s", self.folder, self.run.rank, error)
            self.profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace and the table."""
        last = max(self.run.step, self.first)  # a run may fail in the first of these steps
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.run.rank:05d}_steps_{self.first}_{last}"
        for name in (f"{path}.json.gz", f"{path}.txt"):
            discard(Path(name))  # left by an earlier start, or an untrusted link
        profile.export_chrome_trace(f"{path}.json.gz")
        table = profile.key_averages().table(
            sort_by=f"self_{self.device.type}_time_total",
            row_limit=OPERATORS,
            max_name_column_width=50,
        )
        path.with_suffix(".txt").write_text(table, encoding="utf-8")
        if self.run.rank == 0:
            logger.info("%s.json.gz\n%s", path, table.rstrip())
