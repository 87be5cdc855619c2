"""Data without length or index, read in lanes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ..config import Config, ConfigError
from ..recipe import optional
from .layout import Split
from .loader import make_loader, on_device, started
from .seeding import generators_kept, seed_generators, seed_of
from .workers import check_sendable


# ---- streams -------------------------------------------------------------------------------------
class LaneReader(IterableDataset):
    """Yield, for each micro-batch of a process, the samples of this worker's lanes.

    A worker reads its own lanes only, so that no data is read twice. What it yields is {lane:
    samples}, or None when one of its lanes has ended.
    """

    def __init__(
        self, stream: Any, lanes: Sequence[Sequence[int]], per_step: int, seed: int, epoch: int,
        start: int, seed_samples: bool,
    ) -> None:  # fmt: skip
        """Begin at a position of the lanes.

        Args:
            stream: what has `lane(i, epoch, start, seed)`.
            lanes: of each micro-batch of a step.
            per_step: samples that a lane gives to each step.
            seed: of the run.
            epoch: of the stream.
            start: samples of each lane that are passed over.
            seed_samples: whether to seed the generators before each sample.
        """
        self.stream, self.lanes, self.per_step, self.seed = stream, lanes, per_step, seed
        self.epoch, self.start, self.seed_samples = epoch, start, seed_samples

    def __iter__(self) -> Iterator[dict[int, list[Any]] | None]:
        """Read until the first of the lanes ends."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = sorted(lane for lanes in self.lanes for lane in lanes)[worker::workers]
        open_lanes = {i: iter(self.stream.lane(i, self.epoch, self.start, self.seed)) for i in mine}
        position = self.start
        while True:
            for lanes in self.lanes:
                part = {i: self._read(open_lanes[i], i, position) for i in lanes if i in open_lanes}
                if any(len(samples) < self.per_step for samples in part.values()):
                    yield None
                    return
                if position == self.start:
                    check_sendable(part)
                yield part
            position += self.per_step

    def _read(self, samples: Iterator[Any], lane: int, position: int) -> list[Any]:
        if not self.seed_samples:
            return list(islice(samples, self.per_step))
        read = []
        with generators_kept():
            for place in range(position, position + self.per_step):
                seed_generators(seed_of(self.seed, "sample", self.epoch, lane, place))
                read += islice(samples, 1)
        return read


class Stream:
    """The micro-batches of one process, read from the lanes of a stream.

    Lane i feeds the places i * n to (i + 1) * n - 1 of every global batch, n being the global batch
    over the lanes. So which sample stands where follows from the step, for any number of processes
    that the lanes allow, and a process reads its own lanes only.

    The first lane that ends, ends the epoch for all, before the step that it cannot feed. For that
    each process reads two steps ahead and says in the small sum of step k (train.py) that it cannot
    feed step k + 2. The host reads that sum one step late, which is in time, and waits for nothing.
    """

    def __init__(
        self, config: Config, data: Any, split: Split, rank: int, steps: range,
        device: torch.device, state: dict[str, Any], smallest: Callable[[int], int],
    ) -> None:  # fmt: skip
        """Begin at steps.start.

        Args:
            config: of the run.
            data: the stream.
            split: of the global batch.
            rank: of this process.
            steps: those to be trained.
            device: where the micro-batches go.
            state: of the run; its "epoch" and "epoch_start" (a step) are kept up to date here.
            smallest: returns the smallest of what all processes give; called when an epoch begins.
        """
        self.config, self.data, self.split, self.rank = config, data, split, rank
        self.steps, self.device, self.state, self.smallest = steps, device, state, smallest
        self.collate = optional(config.recipe, "collate") or default_collate
        per_micro_batch = data.lanes // (split.processes * split.accumulation)
        self.per_step = split.global_batch_size // data.lanes
        self.lanes = [
            range(m * per_micro_batch, (m + 1) * per_micro_batch)
            for m in range(rank, split.processes * split.accumulation, split.processes)
        ]
        self.ahead: deque[list[Any]] = deque()  # steps that have been read
        self.is_short = False  # of lanes for the step after the next
        self.epoch_end: int | None = None  # the step that the next epoch begins with, once known
        self.batches = on_device(self._batches(), device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def note_short(self, step: int) -> None:
        """Note that in this step some process was short of lanes."""
        if self.epoch_end is None and step >= self.opened_at:
            self.epoch_end = step + 2

    def _batches(self) -> Iterator[Any]:
        self._open(self.steps.start)
        for step in self.steps:
            if step == self.epoch_end:
                self._next_epoch(step)
            self._read_ahead(step, 3)
            batches = self.ahead.popleft()
            self.is_short = len(self.ahead) < 2
            yield from batches

    def _open(self, step: int) -> None:
        """Open the epoch's lanes where this step needs them."""
        start = (step - self.state["epoch_start"]) * self.per_step
        reader = LaneReader(
            self.data, self.lanes, self.per_step, self.config.seed, self.state["epoch"], start,
            self.config.batches.seed_samples,
        )  # fmt: skip
        lanes = sum(map(len, self.lanes))
        loader = make_loader(
            self.config.batches, reader, self.device, batch_size=None, most_workers=lanes,
            pin_memory=False, persistent_workers=False,
        )  # fmt: skip
        self.readers, self.parts = max(1, loader.num_workers), started(loader)
        self.ahead.clear()
        self.opened_at, self.has_more, self.epoch_end = step, True, None
        self._read_ahead(step, 2)
        fed = self.smallest(len(self.ahead))
        if fed == 1:
            self.epoch_end = step + 1
        elif fed == 0 and start > 0:  # resumed just where the epoch ended
            self._next_epoch(step)
        elif fed == 0:
            raise ConfigError(
                f"epoch {self.state['epoch']} of the stream ends before its first global batch: one"
                f" of its {self.data.lanes} lanes has fewer than {self.per_step} samples; use fewer"
                " lanes or more data."
            )

    def _next_epoch(self, step: int) -> None:
        self.state |= {"epoch": self.state["epoch"] + 1, "epoch_start": step}
        self._open(step)

    def _read_ahead(self, step: int, count: int) -> None:
        """Have so many steps from this one on read, or as many as there are."""
        while self.has_more and len(self.ahead) < count:
            batches = self._read_step(step + len(self.ahead))
            self.has_more = batches is not None
            if batches is not None:
                self.ahead.append(batches)

    def _read_step(self, step: int) -> list[Any] | None:
        """Join what the workers read into the micro-batches of a step; None if a lane has ended."""
        batches = []
        for j, lanes in enumerate(self.lanes):
            samples: dict[int, list[Any]] = {}
            for _ in range(self.readers):  # a DataLoader asks its workers in turn
                part = next(self.parts, None)
                if part is None:
                    return None
                samples |= part
            with generators_kept():
                seed_generators(
                    seed_of(self.config.seed, "collate", step, j * self.split.processes + self.rank)
                )
                batch = self.collate([sample for lane in lanes for sample in samples[lane]])
            if self.device.type == "cuda":
                batch = recursively_apply(torch.Tensor.pin_memory, batch)
            batches.append(batch)
        return batches
