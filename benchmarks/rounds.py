"""Let training loops take turns, each in its own processes, and time their optimizer steps.

All loops are alive at the same time. The processes of one loop train for a round of steps while
those of the others wait, so other load on the machine affects all loops, and each loop has its own
process, process group and main thread. Turns change in a hook that torch calls after each optimizer
step; loops, recipes and libraries run unchanged.
"""

import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS_PER_ROUND = 12
DROP_STEPS = 2  # first steps of a round, not timed: the caches hold another loop's data
DROP_ROUNDS = 2  # first rounds of a loop, not timed
CHECK_STEP = 20  # the weights of the loops are compared after this step


def steps_of(rounds: int) -> int:
    """Return the number of optimizer steps of a loop with this number of timed rounds."""
    return 1 + (DROP_ROUNDS + rounds) * STEPS_PER_ROUND  # the first step ends the setup


class Turns:
    """Passes the turn from loop to loop; every process of a case has a copy."""

    def __init__(self, loops: list[str], processes: int) -> None:
        """Let loops take turns in the order of their names; each has `processes` processes."""
        context = multiprocessing.get_context("spawn")
        self.loops = loops
        self.processes = processes
        self.everyone = context.Barrier(len(loops) * processes)
        self.turns = {loop: [context.Semaphore(0) for _ in range(processes)] for loop in loops}

    def begin(self, loop: str, rank: int) -> None:
        """Wait until all loops are set up, and then for the first turn."""
        self.everyone.wait()
        if loop != self.loops[0]:
            self._wait(loop, rank)

    def pass_on(self, loop: str, rank: int) -> None:
        """Give the turn to the next loop; return when it is this loop's turn again."""
        self._release_next(loop)
        self._wait(loop, rank)

    def end(self, loop: str) -> None:
        """Give the turn to the next loop; return when the last loop has ended its rounds."""
        self._release_next(loop)
        self.everyone.wait()

    def _release_next(self, loop: str) -> None:
        for semaphore in self.turns[self.loops[(self.loops.index(loop) + 1) % len(self.loops)]]:
            semaphore.release()

    def _wait(self, loop: str, rank: int) -> None:
        for _ in range(self.processes):  # each process of the previous loop releases once
            self.turns[loop][rank].acquire()


class Recorder:
    """Times the optimizer steps of this process, and waits for the turns of its loop."""

    def __init__(self, turns: Turns, loop: str, rank: int, steps: int) -> None:
        """Begin to record; `steps` is the number of optimizer steps of the loop."""
        self.turns = turns
        self.loop = loop
        self.rank = rank
        self.last_step = steps - 1
        self.step = 0
        # per round, the clocks at its start and after each step: (wall time, CPU time) in seconds
        self.rounds: list[list[tuple[float, float]]] = []
        self.weights: list[list[torch.Tensor]] = []  # after step 0 and after CHECK_STEP
        register_optimizer_step_post_hook(self._step_ended)

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        round_ends = self.step % STEPS_PER_ROUND == 0
        if round_ends and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # no kernel of this loop may run in the round of another loop
        if self.rounds:
            self._read_clocks()
        if self.step in (0, CHECK_STEP):
            groups = optimizer.param_groups
            self.weights.append([p.detach().cpu().clone() for g in groups for p in g["params"]])
        if round_ends:
            if self.step == 0:
                self.turns.begin(self.loop, self.rank)
            elif self.step < self.last_step:
                self.turns.pass_on(self.loop, self.rank)
            else:
                self.turns.end(self.loop)
            self.rounds.append([])
            self._read_clocks()
        self.step += 1

    def _read_clocks(self) -> None:
        self.rounds[-1].append((time.perf_counter(), time.process_time()))

    def save(self, path: Path) -> None:
        """Write the times and the weights for `Times`.

        Raises:
            RuntimeError: the loop did not take the expected number of steps.
        """
        if self.step != self.last_step + 1:
            raise RuntimeError(f"{self.loop} took {self.step} steps, not {self.last_step + 1}")
        torch.save({"rounds": self.rounds[:-1], "weights": self.weights}, path)


class Times:
    """The times of a loop's steps by round, as its recorders saved them."""

    def __init__(self, paths: list[Path]) -> None:
        """Read the files of all ranks: wall time of rank 0, CPU time as the mean of the ranks."""
        ranks = [torch.load(path) for path in paths]
        self.weights: list[list[torch.Tensor]] = ranks[0]["weights"]
        self.wall = self._step_seconds(ranks[0]["rounds"], 0)
        cpu = [self._step_seconds(rank["rounds"], 1) for rank in ranks]
        self.cpu = [statistics.mean(times) for times in zip(*cpu, strict=True)]

    @staticmethod
    def _step_seconds(rounds: list[list[tuple[float, float]]], clock: int) -> list[float]:
        """Return the mean seconds of a step in each round."""
        steps = STEPS_PER_ROUND - DROP_STEPS
        return [(r[-1][clock] - r[DROP_STEPS][clock]) / steps for r in rounds[DROP_ROUNDS:]]

    def weights_differ(self, other: "Times") -> float:
        """Return the largest difference between the weights of two loops after CHECK_STEP.

        It is relative to the largest change of a weight since step 0.
        """

        def largest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
            return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))

        before, after = self.weights
        return largest(after, other.weights[1]) / largest(after, before)


def ratios(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of the rounds' ratios."""
    pairs = zip(times, others, strict=True)
    low, median, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return low, median, high
