"""Where the time of a step goes: data wait, forward, backward, optimizer.

On a GPU the phases are the intervals between CUDA events, read one step late, so that nothing waits
for the device: a phase takes as long as the device spends in it, idle time included. Elsewhere they
are taken from the clock.
"""

import time
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

PHASES = ("data", "forward", "backward", "optimizer")
Phases = list[float]  # seconds, in the order of PHASES
DATA, FORWARD, BACKWARD, OPTIMIZER = range(4)
NO_PHASE = -1


class Anatomy:
    """The phases of the current step, by the clock."""

    def __init__(self) -> None:
        self.seconds: Phases = [0.0] * len(PHASES)
        self.phase = NO_PHASE
        self.since = 0.0

    def enter(self, phase: int) -> None:
        """End the current phase, if there is one, and begin another."""
        now = time.perf_counter()
        if self.phase != NO_PHASE:
            self.seconds[self.phase] += now - self.since
        self.phase = phase
        self.since = now

    def step_ended(self) -> Any:
        """End the current phase and the step; return what read() takes."""
        self.enter(NO_PHASE)
        ended, self.seconds = self.seconds, [0.0] * len(PHASES)
        return ended

    def read(self, ended: Any) -> Phases:
        """Return the seconds of each phase of a step that has ended."""
        return ended


class CudaAnatomy(Anatomy):
    """The phases of the current step, by CUDA events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, Any]] = []
        self.unused: list[Any] = []

    def enter(self, phase: int) -> None:
        """End the current phase, if there is one, and begin another."""
        event = self.unused.pop() if self.unused else torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((phase, event))

    def step_ended(self) -> Any:
        """End the current phase and the step; return what read() takes."""
        self.enter(NO_PHASE)
        ended, self.events = self.events, []
        return ended

    def read(self, ended: Any) -> Phases:
        """Return the seconds of each phase of a step that has ended on the device too."""
        seconds = [0.0] * len(PHASES)
        ended[-1][1].synchronize()  # one step late, so it is there
        for (phase, event), (_, following) in pairwise(ended):
            if phase != NO_PHASE:
                seconds[phase] += event.elapsed_time(following) / 1000
        self.unused += [event for _, event in ended]
        return seconds


def make_anatomy(device: torch.device) -> Anatomy:
    """Return the phases of a step on this device."""
    return CudaAnatomy() if device.type == "cuda" else Anatomy()


def exposed_communication(model: Any) -> float | None:
    """Return the seconds per step in which DDP's all-reduces did not overlap with the backward.

    DDP measures it in the first ten steps and then in every hundredth, and averages over these.
    None without DDP, and before the first such step.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    measured = model._get_ddp_logging_data()
    total = measured.get("avg_backward_comm_time", 0)
    hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, total - hidden) / 1e9 if total else None
