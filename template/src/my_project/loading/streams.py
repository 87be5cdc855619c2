"""Data without length or index: a stream, read in lanes.

A lane is a logical shard of the stream (the canonical nodes of MosaicML's streaming serve the same
end): it always feeds the same positions of a global batch, whatever rank reads it.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from .. import contract
from ..collectives import gather_on_main
from ..config import Config, ConfigError
from ..recipe import optional
from .layout import BatchLayout, lanes_of
from .loader import check_sendable, make_loader, on_device
from .seeding import SampleSeeds, SeedSamples, derive_seed, seed_rng

# Of a stream: its epoch, the step at which that began, and the state of each lane (None for a lane
# without state_dict); an empty list if no lane has one, or the checkpoint is of an earlier version.
Position = tuple[int, int, list[Any]]


class LaneReader(IterableDataset):
    """Yield, for each micro-batch of a rank, the samples of this worker's lanes.

    A worker reads its own lanes only, so that no data is read twice. What it yields is {lane:
    (samples, state)}, or None when one of its lanes has ended. The state is that of the lane after
    these samples, as JSON, so that what is read ahead does not change it; None if the lane has no
    state_dict.
    """

    def __init__(
        self,
        stream: Any,
        lanes: Sequence[Sequence[int]],
        per_step: int,
        seed: int,
        epoch: int,
        start: int,
        seed_samples: SeedSamples,
        states: Mapping[int, Any],
    ) -> None:
        """Store the arguments; lanes are opened in the process that reads them.

        Args:
            stream: an object with `lane(i, epoch, start, seed)`.
            lanes: the lanes of each micro-batch of a step.
            per_step: samples per lane and step.
            seed: the run's seed.
            epoch: the stream's epoch.
            start: the number of samples to skip in each lane.
            seed_samples: see BatchesConfig.
            states: of the lanes that have one after `start` samples, which are then not read.
        """
        self.stream = stream
        self.lanes = lanes
        self.per_step = per_step
        self.seed = seed
        self.epoch = epoch
        self.start = start
        self.seeds = SampleSeeds(seed, seed_samples)
        self.states = states

    def __iter__(self) -> Iterator[dict[int, tuple[list[Any], str | None]] | None]:
        """Read until the first of the lanes ends."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = sorted(lane for lanes in self.lanes for lane in lanes)[worker::workers]
        opened = {i: OpenLane(self, i, self.states.get(i)) for i in mine}
        position = self.start
        while True:
            for lanes in self.lanes:
                part = {}
                for i in lanes:
                    if i not in opened:
                        continue
                    samples = opened[i].read(position)
                    if len(samples) < self.per_step:
                        yield None
                        return
                    part[i] = samples, opened[i].state
                if position == self.start:
                    check_sendable(part)
                yield part
            position += self.per_step


class OpenLane:
    """A lane that is being read."""

    def __init__(self, reader: LaneReader, i: int, state: Any) -> None:
        """Open the lane at the state that a checkpoint has, else after reader.start samples."""
        self.reader = reader
        self.i = i
        self.state: str | None = None if state is None else json.dumps(state)
        self._open(reader.start)

    def _open(self, position: int) -> None:
        stream, epoch, seed = self.reader.stream, self.reader.epoch, self.reader.seed
        lane = None
        if self.state is not None:
            lane = stream.lane(self.i, epoch, 0, seed)
            if contract.has_state(lane):
                lane.load_state_dict(json.loads(self.state))
            else:
                lane, self.state = None, None
        self.lane = stream.lane(self.i, epoch, position, seed) if lane is None else lane
        self.has_state = contract.has_state(self.lane)
        self.samples = iter(self.lane)

    def read(self, position: int) -> list[Any]:
        """Read the samples of a step; fewer at the end of the lane."""
        samples = self._read(position)
        # as Fetch does, but what an iterator has yielded is read again by opening it again
        while self.reader.seeds.is_on and self.reader.seeds.missed_a_draw():
            self._open(position)
            samples = self._read(position)
        if self.has_state:
            self.state = contract.lane_state(self.lane)
        return samples

    def _read(self, position: int) -> list[Any]:
        reader = self.reader
        if not reader.seeds.is_on:
            return list(islice(self.samples, reader.per_step))
        reader.seeds.begin()
        place = f"{reader.epoch}/{self.i}"
        keys = ((place, index) for index in range(position, position + reader.per_step))
        return [sample for _ in reader.seeds.each(keys) for sample in islice(self.samples, 1)]


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
        position: Position,
    ) -> None:
        """Start at steps.start.

        Args:
            config: the run's config.
            data: the stream.
            layout: the global batch's division.
            steps: the steps to train.
            accelerator: gives this process's rank and device.
            position: of the stream at steps.start.
        """
        self.config = config
        self.data = data
        self.layout = layout
        self.steps = steps
        self.accelerator = accelerator
        self.rank = accelerator.process_index
        self.device = accelerator.device
        self.epoch, self.epoch_start, states = position
        self.collate = optional(config.recipe, "collate") or default_collate
        self.per_step = layout.global_batch_size // data.lanes
        self.lanes = lanes_of(layout, data.lanes, self.rank)
        own = [i for lanes in self.lanes for i in lanes]
        if len(states) != data.lanes:  # of a stream that was divided differently, or none
            states = [None] * data.lanes
        self.states = {i: json.dumps(states[i]) for i in own if states[i] is not None}
        # of each step that has been read: its micro-batches, and the states of the lanes after it
        self.ahead: deque[tuple[list[Any], dict[int, str]]] = deque()
        self.is_short = False  # the lanes cannot feed the step after the next
        self.epoch_end: int | None = None  # the first step of the next epoch, once known
        self.batches = on_device(self._batches(), self.device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def end_epoch_after(self, step: int) -> None:
        """End the epoch after step + 1: in this step some rank voted that its lanes are short."""
        if self.epoch_end is None and step >= self.opened_at:
            self.epoch_end = step + 2

    def position(self) -> Position:
        """Return the position after the last step that was trained. Called by every rank.

        The states of the lanes are those of all ranks on rank 0, which saves them; [] elsewhere.
        """
        states: dict[int, str] = {}
        for of_rank in gather_on_main(self.accelerator, self.states):
            states |= of_rank
        parsed = [json.loads(states.get(i, "null")) for i in range(self.data.lanes)]
        return self.epoch, self.epoch_start, parsed if states else []

    def _batches(self) -> Iterator[Any]:
        self._open(self.steps.start, {i: json.loads(state) for i, state in self.states.items()})
        for step in self.steps:
            if step == self.epoch_end:
                self._next_epoch(step)
            self._read_ahead(step, 3)
            batches, self.states = self.ahead.popleft()
            self.is_short = len(self.ahead) < 2
            yield from batches

    def _open(self, step: int, states: Mapping[int, Any]) -> None:
        """Open the epoch's lanes at the position of this step, or at these states of it."""
        start = (step - self.epoch_start) * self.per_step
        reader = LaneReader(
            self.data,
            self.lanes,
            self.per_step,
            self.config.seed,
            self.epoch,
            start,
            self.config.batches.seed_samples,
            states,
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
        self.parts = iter(loader)
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
        self._open(step, {})

    def _read_ahead(self, step: int, count: int) -> None:
        """Read up to `count` steps, starting with this one; fewer at the end of the epoch."""
        while self.has_more and len(self.ahead) < count:
            read = self._read_step(step + len(self.ahead))
            self.has_more = read is not None
            if read is not None:
                self.ahead.append(read)

    def _read_step(self, step: int) -> tuple[list[Any], dict[int, str]] | None:
        """Return the micro-batches of a step and the lanes' states; None if a lane has ended."""
        batches = []
        states: dict[int, str] = {}
        for j, lanes in enumerate(self.lanes):
            samples: dict[int, list[Any]] = {}
            for _ in range(self.readers):  # a DataLoader asks its workers in turn
                part = next(self.parts, None)
                if part is None:
                    return None
                for lane, (read, state) in part.items():
                    samples[lane] = read
                    if state is not None:
                        states[lane] = state
            micro_batch = j * self.layout.world_size + self.rank
            seed_rng(derive_seed(self.config.seed, "collate", step, micro_batch))
            batch = self.collate([sample for lane in lanes for sample in samples[lane]])
            if self.device.type == "cuda":
                batch = recursively_apply(torch.Tensor.pin_memory, batch)
            batches.append(batch)
        return batches, states
