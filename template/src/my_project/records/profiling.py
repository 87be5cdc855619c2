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
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from ..files import write_atomically
from ..run_folder import Run

logger = logging.getLogger(__name__)
STEP = "ProfilerStep#"  # the range of a step, by the name that other tools for traces look for
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
        self.profile: Any = None  # torch's, from the warm-up to the end
        self.range: Any = None  # of the step under way

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
        try:
            if self.profile is None:
                self.profile = self._prepared()
            if step == self.first - 1:
                if self.device.type == "cuda":  # kernels of the steps before are not recorded
                    torch.cuda.synchronize(self.device)
                self.profile.start_trace()
            self._end_range()
            if self.first - 1 <= step < self.last:
                self.range = record_function(f"{STEP}{step + 1}")
                self.range.__enter__()
        except (RuntimeError, ValueError) as error:
            self._warn(f"is left out: {error}")
            self.profile, self.is_active = None, False
        if step == self.last:
            self.stop()

    def stop(self) -> None:
        """End, and write what there is; a run that fails or is stopped may be in any step."""
        profile, self.profile = self.profile, None
        self.is_active = False
        if profile is None:
            return
        is_recording = self.done >= self.first - 1
        try:
            if not is_recording:  # the warm-up, which cannot be ended in another way
                profile.start_trace()
            self._end_range()
            profile.stop_trace()
            if is_recording:
                self._write(profile)
        except Exception as error:  # whatever it is, training is worth more
            self._warn(f"cannot be written to {self.folder}: {error}")

    def _prepared(self) -> Any:
        """Return torch's profiler in its warm-up."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:  # else it reports on stderr that there is no GPU, as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        profile = torch.profiler.profile(
            activities=activities,
            with_stack=self.config.with_stack,
            acc_events=True,  # there is one cycle; without it torch 2.10 warns of others
        )
        profile.prepare_trace()
        return profile

    def _warn(self, problem: str) -> None:
        logger.warning("the profile of rank %d %s", self.rank, problem)

    def _end_range(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None

    def _write(self, profile: Any) -> None:
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
