"""Let several loops run in one process, in turn, a few steps each, and note when steps start.

Each loop has a thread of its own; only one runs at a time. A loop calls `stamp` where the forward
of a micro-batch begins, and is held there until its turn comes.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Turns:
    """The ring of loops, by name, in the order of their turns."""

    def __init__(
        self, loops: list[str], *, accumulation: int, steps_per_turn: int, check_step: int
    ) -> None:
        """Keep the weights of every loop as they are after 0 and after check_step steps."""
        self.loops, self.accumulation, self.check_step = loops, accumulation, check_step
        self.micro_batches_per_turn = accumulation * steps_per_turn
        self.gates = {loop: threading.Semaphore(0) for loop in loops}
        self.stamps: dict[str, list[list[float]]] = {
            loop: [[]] for loop in loops
        }  # seconds, by turn
        self.weights: dict[str, list[dict[str, Tensor]]] = {loop: [] for loop in loops}
        self.micro_batches = dict.fromkeys(loops, 0)
        self.running = list(loops)
        self.errors: list[BaseException] = []

    def run(self, functions: dict[str, Callable[[], Any]]) -> None:
        """Run all loops to their end; the last one in this thread, which takes the signals."""

        def in_turn(loop: str) -> None:
            threading.current_thread().name = loop
            self.gates[loop].acquire()
            try:
                functions[loop]()
            except BaseException as error:
                self.errors.append(error)
            finally:
                following = self._following(loop)
                self.running.remove(loop)
                self.gates[following].release()

        for loop in self.loops[:-1]:
            threading.Thread(target=in_turn, args=(loop,), daemon=True).start()
        self.gates[self.loops[0]].release()
        in_turn(self.loops[-1])
        if self.errors:
            raise self.errors[0]

    def stamp(self, model: nn.Module) -> None:
        """Note that the forward of a micro-batch starts now; after a turn, wait for the next."""
        loop = threading.current_thread().name
        count = self.micro_batches[loop]
        self.micro_batches[loop] += 1
        turn_ends = count % self.micro_batches_per_turn == 0
        if turn_ends and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what this loop has queued is no work of the next
        self.stamps[loop][-1].append(time.perf_counter())
        if turn_ends:
            self.gates[self._following(loop)].release()
            self.gates[loop].acquire()
            if self.errors:
                raise RuntimeError("another loop failed")
            self.stamps[loop].append([time.perf_counter()])
        if count in (0, self.check_step * self.accumulation):
            self.weights[loop].append({k: v.cpu().clone() for k, v in model.state_dict().items()})

    def _following(self, loop: str) -> str:
        return self.running[(self.running.index(loop) + 1) % len(self.running)]

    def step_seconds(self, loop: str, *, drop_turns: int, drop_steps: int) -> list[float]:
        """Return the mean step time of each turn, without the first turns and steps of a turn."""
        turns = [
            stamps for stamps in self.stamps[loop] if len(stamps) > self.micro_batches_per_turn
        ]
        seconds = []
        for stamps in turns[drop_turns:]:
            starts = stamps[:: self.accumulation][drop_steps:]
            seconds.append((starts[-1] - starts[0]) / (len(starts) - 1))
        return seconds

    def ratios(self, loop: str, other: str, **drop: int) -> list[float]:
        """Divide the step times of one loop by those of another, turn by turn."""
        pairs = zip(self.step_seconds(loop, **drop), self.step_seconds(other, **drop), strict=True)
        return [a / b for a, b in pairs]

    def weights_differ(self, loop: str, other: str) -> float:
        """Compare the weights after check_step steps.

        Returns:
            The largest difference of any weight, as a fraction of the largest change since step 0.
        """
        before, after = self.weights[loop]
        _, after_other = self.weights[other]
        change = max((after[name] - before[name]).abs().max().item() for name in after)
        difference = max((after[name] - after_other[name]).abs().max().item() for name in after)
        return difference / change
