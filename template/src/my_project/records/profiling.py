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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from ..files import write_atomically
from ..run_folder import Run

logger = logging.getLogger(__name__)
NEVER = float("inf")
STEP = "ProfilerStep#"  # the range of a step, by the name that other tools for traces look for
OPERATORS = 15  # in the table


class Profiler:
    """The profile of this rank; costs a comparison per step where there is nothing to do."""

    def __init__(self, run: Run, rank: int, device: torch.device) -> None:
        self.run = run
        self.rank = rank
        self.device = device
        self.config = run.config.profile
        self.first, self.last = self.config.window or (0, 0)
        self.next: float = NEVER  # steps done when there is something to do
        self.done = 0  # steps
        self.profile: Any = None  # torch's, from the warm-up to the end
        self.is_recording = False
        self.range: Any = None  # of the step under way

    def start(self, step: int) -> None:
        """Begin at this number of steps done: before the first step, or where a run continues."""
        if not self.config.window:
            return
        if self.last <= step:
            if self.rank == 0:
                logger.warning(
                    "profile.steps is %s, but the run continues after step %d: nothing is profiled",
                    self.config.steps,
                    step,
                )
            return
        self.first = max(self.first, step + 1)
        if self.rank == 0:
            logger.info(
                "torch.profiler will record steps %d to %d of rank %s into %s",
                self.first,
                self.last,
                ", ".join(map(str, self.config.chosen_ranks)),
                self.folder,
            )
        if self.rank in self.config.chosen_ranks:
            self.next = max(step, self.first - 2)
            self.step_ended(step)

    def step_ended(self, step: int) -> None:
        """Note that so many steps are done; called after every step."""
        if step >= self.next:
            self._act(step)

    def stop(self) -> None:
        """End, and write what there is; a run that fails or is stopped may be in any step."""
        profile, self.profile = self.profile, None
        self.next = NEVER
        if profile is None:
            return
        try:
            if not self.is_recording:  # the warm-up, which cannot be ended in another way
                profile.start_trace()
            self._end_range()
            profile.stop_trace()
            if self.is_recording:
                self._write(profile)
        except Exception as error:  # whatever it is, training is worth more
            self._warn(f"cannot be written to {self.folder}: {error}")

    @property
    def folder(self) -> Path:
        """Return the folder of the profiles."""
        return self.run.folder / "profile"

    def _act(self, step: int) -> None:
        """Go on to what the next step needs: the warm-up, a range, or the end."""
        self.done, self.next = step, step + 1
        try:
            if self.profile is None:
                self.profile = self._prepared()
            if step < self.first - 1:
                return
            if not self.is_recording:
                if self.device.type == "cuda":  # kernels of the steps before are not recorded
                    torch.cuda.synchronize(self.device)
                self.profile.start_trace()
                self.is_recording = True
            self._end_range()
            if step < self.last:
                self.range = record_function(f"{STEP}{step + 1}")
                self.range.__enter__()
        except (RuntimeError, ValueError) as error:
            self._warn(f"is left out: {error}")
            self.profile, self.next = None, NEVER
        if step == self.last:
            self.stop()

    def _prepared(self) -> Any:
        """Return torch's profiler in its warm-up."""
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):  # it would be spoiled
            raise ValueError("another profiler is active in this process")
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
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_temporary()  # of a start that was killed
        stem = self._unused(f"rank_{self.rank:05d}_steps_{self.first}_{last}")
        temporary = self.folder / f".{stem}.json"
        packed = self.folder / f".{stem}.json.gz"
        try:
            profile.export_chrome_trace(str(temporary))
            with temporary.open("rb") as source, gzip.open(packed, "wb", 6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
                source.seek(max(0, source.tell() - 16))
                if not source.read().rstrip().endswith(b"}"):  # torch reports no full disk
                    raise OSError("the trace is incomplete; is the disk full?")
            kind = "cuda" if self.device.type == "cuda" else "cpu"
            table = profile.key_averages().table(
                sort_by=f"self_{kind}_time_total", row_limit=OPERATORS, max_name_column_width=50
            )
            os.replace(packed, self.folder / f"{stem}.json.gz")
            write_atomically(self.folder / f"{stem}.txt", table)
        finally:
            self._remove_temporary()
        if self.rank == 0:
            logger.info("%s\n%s", self.folder / f"{stem}.json.gz", table.rstrip())

    def _remove_temporary(self) -> None:
        """Remove the files that are not complete, those of torch too."""
        for path in self.folder.glob(f".rank_{self.rank:05d}_*"):
            with suppress(OSError):
                path.unlink()

    def _unused(self, name: str) -> str:
        """Return the name, with a number if there is a profile of this name."""
        found = [path.name for path in self.folder.iterdir()]
        number, stem = 1, name
        while any(f"{stem}.{ending}" in found for ending in ("json.gz", "txt")):
            number += 1
            stem = f"{name}-{number}"
        return stem
