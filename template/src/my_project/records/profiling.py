"""Record the steps profile.steps of the ranks profile.ranks with torch.profiler.

Each of these ranks writes into the run folder

    profile/rank_00000_steps_20_25.json.gz   for https://ui.perfetto.dev or chrome://tracing
    profile/rank_00000_steps_20_25.txt       torch's table of the operators that took most time

A profile that is there already is kept: the next one of the same steps ends in -2. One step before
the first is a warm-up, which is not recorded. The profiler itself takes time, so the speed of an
interval with profiled steps says little. Nothing that fails here ends the run.
"""

import gzip
import logging
import os
import shutil
from collections.abc import Callable

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from ..files import write_atomically
from ..run_folder import Run

logger = logging.getLogger(__name__)
OPERATORS = 15  # in the table


class Profiler:
    """The profile of this rank; costs a comparison per step where there is nothing to do."""

    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.config = run.config.profile
        self.folder = run.folder / "profile"
        self.first, self.last = self.config.window or (0, 0)
        self.is_active = bool(self.config.window) and rank in self.config.chosen_ranks
        self.done = 0  # steps
        self.profile: torch.profiler.profile | None = None  # from the warm-up to the end

    def start(self, step: int) -> None:
        """Begin at this number of steps done: before the first step, or where a run continues."""
        if self.is_active and self.last <= step:
            logger.warning(
                "profile.steps is %s, but the run continues after step %d: nothing is profiled",
                self.config.steps,
                step,
            )
            self.is_active = False
        self.first = max(self.first, step + 1)
        self.step_ended(step)

    def step_ended(self, step: int) -> None:
        """Note that so many steps are done; called after every step."""
        if not self.is_active or step < self.first - 2:
            return
        self.done = step
        if step == self.last:
            self.stop()
        elif self.profile is None:
            self._try(lambda: self._begin(step + 1))
        else:
            if step == self.first - 1 and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels before are not recorded
            self._try(self.profile.step)

    def stop(self) -> None:
        """End, and write what there is; a run that fails or is stopped may be in any step."""
        profile, self.profile = self.profile, None
        self.is_active = False
        if profile:
            self._try(profile.stop)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, training is worth more
            logger.warning(
                "the profile of rank %d is left out of %s: %s", self.rank, self.folder, error
            )
            self.profile, self.is_active = None, False

    def _begin(self, step: int) -> None:
        """Let torch's profiler count from this step."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:  # else it reports on stderr that there is no GPU, as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")

        def action_in(number: int) -> ProfilerAction:  # torch asks for 0 before it knows the number
            is_before = max(number, step) < self.first
            return ProfilerAction.WARMUP if is_before else ProfilerAction.RECORD

        profile = torch.profiler.profile(
            activities=activities,
            schedule=action_in,
            on_trace_ready=self._write,
            with_stack=self.config.with_stack,
            acc_events=True,  # there is one cycle; without it torch 2.10 warns of others
        )
        profile.step_num = step  # the number in the name of a step's range in the trace
        self.profile = profile
        profile.start()

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace and the table, under names that no earlier profile has."""
        last = max(self.done, self.first)  # a run may fail in the first of the steps
        name = stem = f"rank_{self.rank:05d}_steps_{self.first}_{last}"
        number = 1
        while any(self.folder.glob(f"{stem}.*")):
            number += 1
            stem = f"{name}-{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{stem}.json"
        packed = self.folder / f".{stem}.json.gz"
        try:
            profile.export_chrome_trace(str(temporary))
            with temporary.open("rb") as source, gzip.open(packed, "wb", 6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
                source.seek(max(0, source.tell() - 16))
                if not source.read().rstrip().endswith(b"}"):  # torch reports no full disk
                    raise OSError("the trace is incomplete; is the disk full?")
            os.replace(packed, self.folder / f"{stem}.json.gz")
        finally:
            for path in self.folder.glob(f".{name}*"):  # also of a start that was killed
                path.unlink()
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        table = profile.key_averages().table(
            sort_by=f"self_{kind}_time_total", row_limit=OPERATORS, max_name_column_width=50
        )
        write_atomically(self.folder / f"{stem}.txt", table)
        if self.rank == 0:
            logger.info("%s\n%s", self.folder / f"{stem}.json.gz", table.rstrip())
