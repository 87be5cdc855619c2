"""Run several training loops alternately in one process, a few steps each, and time their steps.

Each loop has its own thread, and one thread runs at a time. A loop calls `record_start` before the
forward pass of each micro-batch; at the end of its round it waits there for its next round.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Rounds:
    """The loops by name, in the order in which they run."""

    def __init__(
        self, loops: list[str], *, accumulation: int, steps_per_round: int, check_step: int
    ) -> None:
        """Store the weights of every loop after 0 and after check_step steps."""
        self.loops = loops
        self.accumulation = accumulation
        self.check_step = check_step
        self.micro_batches_per_round = accumulation * steps_per_round
        self.semaphores = {loop: threading.Semaphore(0) for loop in loops}
        # per loop and round, the start of each micro-batch in seconds
        self.starts: dict[str, list[list[float]]] = {loop: [[]] for loop in loops}
        self.weights: dict[str, list[dict[str, Tensor]]] = {loop: [] for loop in loops}
        self.micro_batches = dict.fromkeys(loops, 0)
        self.running = list(loops)
        self.errors: list[BaseException] = []

    def run(self, functions: dict[str, Callable[[], Any]]) -> None:
        """Run all loops to their end; the last one in this thread, which receives the signals."""

        def run_alternately(loop: str) -> None:
            threading.current_thread().name = loop
            self.semaphores[loop].acquire()
            try:
                functions[loop]()
            except BaseException as error:
                self.errors.append(error)
            finally:
                next_loop = self._next(loop)
                self.running.remove(loop)
                self.semaphores[next_loop].release()

        for loop in self.loops[:-1]:
            threading.Thread(target=run_alternately, args=(loop,), daemon=True).start()
        self.semaphores[self.loops[0]].release()
        run_alternately(self.loops[-1])
        if self.errors:
            raise self.errors[0]

    def record_start(self, model: nn.Module) -> None:
        """Record the start of a micro-batch's forward pass; after a round, wait for the next."""
        loop = threading.current_thread().name
        count = self.micro_batches[loop]
        self.micro_batches[loop] += 1
        round_ends = count % self.micro_batches_per_round == 0
        if round_ends and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # this loop's kernels must not run in the next round
        self.starts[loop][-1].append(time.perf_counter())
        if round_ends:
            self.semaphores[self._next(loop)].release()
            self.semaphores[loop].acquire()
            if self.errors:
                raise RuntimeError("another loop failed")
            self.starts[loop].append([time.perf_counter()])
        if count in (0, self.check_step * self.accumulation):
            self.weights[loop].append({k: v.cpu().clone() for k, v in model.state_dict().items()})

    def _next(self, loop: str) -> str:
        return self.running[(self.running.index(loop) + 1) % len(self.running)]

    def step_seconds(self, loop: str, *, drop_rounds: int, drop_steps: int) -> list[float]:
        """Return the mean step time of each round, without the first rounds and steps (warm-up)."""
        complete = [
            starts for starts in self.starts[loop] if len(starts) > self.micro_batches_per_round
        ]
        seconds = []
        for starts in complete[drop_rounds:]:
            step_starts = starts[:: self.accumulation][drop_steps:]
            seconds.append((step_starts[-1] - step_starts[0]) / (len(step_starts) - 1))
        return seconds

    def ratios(self, loop: str, other: str, **drop: int) -> list[float]:
        """Return the step time of one loop divided by that of another, for each round."""
        pairs = zip(self.step_seconds(loop, **drop), self.step_seconds(other, **drop), strict=True)
        return [a / b for a, b in pairs]

    def weights_differ(self, loop: str, other: str) -> float:
        """Return the largest difference between the weights of two loops after check_step steps.

        It is relative to the largest change of a weight since step 0.
        """
        before, after = self.weights[loop]
        _, after_other = self.weights[other]
        change = max((after[name] - before[name]).abs().max().item() for name in after)
        difference = max((after[name] - after_other[name]).abs().max().item() for name in after)
        return difference / change
