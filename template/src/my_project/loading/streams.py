"""Data without length or index: a stream, read in lanes.

A lane is a logical shard of the stream (the canonical nodes of MosaicML's streaming serve the same
end): it always feeds the same positions of a global batch, whatever rank reads it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ..config import Config, ConfigError
from ..recipe import optional
from .layout import BatchLayout, lanes_of
from .loader import make_loader, on_device, start_iterating
from .seeding import derive_seed, fork_rng, seed_rng
from .workers import check_sendable


class LaneReader(IterableDataset):
    """Yield, for each micro-batch of a rank, the samples of this worker's lanes.

    A worker reads its own lanes only, so that no data is read twice. What it yields is {lane:
    samples}, or None when one of its lanes has ended.
    """

    def __init__(
        self,
        stream: Any,
        lanes: Sequence[Sequence[int]],
        per_step: int,
        seed: int,
        epoch: int,
        start: int,
        seed_samples: bool,
    ) -> None:
        """Store the arguments; lanes are opened in the process that reads them.

        Args:
            stream: an object with `lane(i, epoch, start, seed)`.
            lanes: the lanes of each micro-batch of a step.
            per_step: samples per lane and step.
            seed: the run's seed.
            epoch: the stream's epoch.
            start: the number of samples to skip in each lane.
            seed_samples: whether to seed the random state before each sample.
        """
        self.stream = stream
        self.lanes = lanes
        self.per_step = per_step
        self.seed = seed
        self.epoch = epoch
        self.start = start
        self.seed_samples = seed_samples

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
        with fork_rng():
            for index in range(position, position + self.per_step):
                seed_rng(derive_seed(self.seed, "sample", self.epoch, lane, index))
                read += islice(samples, 1)
        return read


class StreamBatches:
    """The micro-batches of one rank, read from the lanes of a stream.

    Lane i feeds positions i * n to (i + 1) * n - 1 of every global batch, n being the global batch
    size over the number of lanes. So the position of each sample follows from the step, for any
    world size that the lanes allow, and a rank reads its own lanes only.

    When one lane is exhausted, the epoch ends on all ranks, before the first step that lacks
    samples. To agree on it without a sync, each rank reads two steps ahead and votes, in the
    all-reduce of step k, if it cannot feed step k + 2. The host reads the votes one step later,
    which is early enough.
    """

    def __init__(
        self,
        config: Config,
        data: Any,
        layout: BatchLayout,
        steps: range,
        accelerator: Accelerator,
        epoch: tuple[int, int],
    ) -> None:
        """Start at steps.start.

        Args:
            config: the run's config.
            data: the stream.
            layout: the global batch's division.
            steps: the steps to train.
            accelerator: gives this process's rank and device.
            epoch: the stream's epoch at steps.start, and the step at which it began.
        """
        self.config = config
        self.data = data
        self.layout = layout
        self.steps = steps
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.device = accelerator.device
        self.epoch, self.epoch_start = epoch
        self.collate = optional(config.recipe, "collate") or default_collate
        self.per_step = layout.global_batch_size // data.lanes
        self.lanes = lanes_of(layout, data.lanes, self.rank)
        self.ahead: deque[list[Any]] = deque()  # the micro-batches of steps that have been read
        self.is_short = False  # the lanes cannot feed the step after the next
        self.epoch_end: int | None = None  # the first step of the next epoch, once known
        self.batches = on_device(self._batches(), self.device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def end_epoch_after(self, step: int) -> None:
        """End the epoch after step + 1: in this step some rank voted that its lanes are short."""
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
        """Open the epoch's lanes at the position of this step."""
        start = (step - self.epoch_start) * self.per_step
        reader = LaneReader(
            self.data,
            self.lanes,
            self.per_step,
            self.config.seed,
            self.epoch,
            start,
            self.config.batches.seed_samples,
        )
        loader = make_loader(
            self.config.batches,
            reader,
            self.device,
            batch_size=None,
            max_workers=sum(map(len, self.lanes)),
            pin_memory=False,
            persistent_workers=False,
        )
        self.readers = max(1, loader.num_workers)
        self.parts = start_iterating(loader)
        self.ahead.clear()
        self.opened_at = step
        self.has_more = True
        self.epoch_end = None
        self._read_ahead(step, 2)
        ahead = torch.tensor([len(self.ahead)], device=self.device)
        everywhere: Any = self.accelerator.gather(ahead)
        fed = int(everywhere.min())  # steps that every rank can feed
        if fed == 1:
            self.epoch_end = step + 1
        elif fed == 0 and start > 0:  # resumed at the very end of an epoch
            self._next_epoch(step)
        elif fed == 0:
            raise ConfigError(
                f"epoch {self.epoch} of the stream ends before its first global batch: one"
                f" of its {self.data.lanes} lanes has fewer than {self.per_step} samples; use fewer"
                " lanes or more data."
            )

    def _next_epoch(self, step: int) -> None:
        self.epoch += 1
        self.epoch_start = step
        self._open(step)

    def _read_ahead(self, step: int, count: int) -> None:
        """Read up to `count` steps, starting with this one; fewer at the end of the epoch."""
        while self.has_more and len(self.ahead) < count:
            batches = self._read_step(step + len(self.ahead))
            self.has_more = batches is not None
            if batches is not None:
                self.ahead.append(batches)

    def _read_step(self, step: int) -> list[Any] | None:
        """Return the micro-batches of a step; None if a lane has ended."""
        batches = []
        for j, lanes in enumerate(self.lanes):
            samples: dict[int, list[Any]] = {}
            for _ in range(self.readers):  # a DataLoader asks its workers in turn
                part = next(self.parts, None)
                if part is None:
                    return None
                samples |= part
            with fork_rng():
                micro_batch = j * self.layout.world_size + self.rank
                seed_rng(derive_seed(self.config.seed, "collate", step, micro_batch))
                batch = self.collate([sample for lane in lanes for sample in samples[lane]])
            if self.device.type == "cuda":
                batch = recursively_apply(torch.Tensor.pin_memory, batch)
            batches.append(batch)
        return batches
