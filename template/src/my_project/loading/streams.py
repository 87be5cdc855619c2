"""Data without length or index: a stream, read in lanes that never end.

A lane is a logical shard of the stream (the canonical nodes of MosaicML's streaming serve the same
end): it always feeds the same positions of a global batch, whatever rank reads it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ..collectives import gather_on_main
from ..config import Config, ConfigError
from ..recipe import optional, source_location
from .layout import BatchLayout, lanes_of
from .loader import check_sendable, make_loader, on_device
from .seeding import SampleSeeds, derive_seed, seed_rng

MAX_STATE_CHARACTERS = 1_000_000  # of a lane, as JSON; it is taken at every step


@dataclass(kw_only=True)
class LaneReader(IterableDataset):
    """Yield, for each micro-batch of a rank, the samples of this worker's lanes.

    A worker reads its own lanes only, so that no data is read twice; they are opened in the process
    that reads them. What it yields is {lane: (samples, state)}. The state is that of the lane after
    these samples, as JSON, so that what is read ahead does not change it; None if the lane has no
    state_dict.
    """

    stream: Any  # an object with `lane(i, start, seed)`
    lanes: Sequence[Sequence[int]]  # of each micro-batch of a step
    per_step: int  # samples of a lane in a step
    seed: int  # the run's
    start: int  # samples to skip in each lane
    seeds: SampleSeeds  # its mode is not auto, which would have to read samples again
    states: Mapping[int, str]  # after `start` samples, of the lanes that have one

    def __iter__(self) -> Iterator[dict[int, tuple[list[Any], str | None]]]:
        """Read without end."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        own = sorted(lane for lanes in self.lanes for lane in lanes)[worker::workers]
        opened = {i: OpenLane(self, i) for i in own}
        for position in count(self.start, self.per_step):
            for lanes in self.lanes:
                part = {i: opened[i].read(position) for i in lanes if i in opened}
                if position == self.start:
                    check_sendable(part)
                yield part


class OpenLane:
    """A lane that is being read."""

    def __init__(self, reader: LaneReader, i: int) -> None:
        """Open the lane at its saved state, else after reader.start samples."""
        self.reader = reader
        self.i = i
        state = reader.states.get(i)
        with self._named():
            self.lane = reader.stream.lane(i, 0 if state else reader.start, reader.seed)
            self.has_state = hasattr(self.lane, "state_dict")
            if self.has_state != hasattr(self.lane, "load_state_dict"):
                self._refuse("needs both state_dict and load_state_dict, or neither")
            if state and self.has_state:
                self.lane.load_state_dict(json.loads(state))
            elif state:
                self.lane = reader.stream.lane(i, reader.start, reader.seed)
            self.samples = iter(self.lane)

    def read(self, position: int) -> tuple[list[Any], str | None]:
        """Read the samples of a step; return them and the state after them."""
        per_step, samples = self.reader.per_step, []
        keys = ((f"0/{self.i}", position + k) for k in range(per_step))
        with self._named():
            for _ in self.reader.seeds.each(keys):
                samples += islice(self.samples, 1)
            if len(samples) < per_step:
                self._refuse(
                    f"has ended after {position + len(samples)} samples, but a lane must never end:"
                    " let it begin again at its end (see recipe.py)"
                )
            return samples, self._state() if self.has_state else None

    def _state(self) -> str:
        state = self.lane.state_dict()
        try:
            text = json.dumps(state, allow_nan=False)
            if json.loads(text) != state:
                raise ValueError("tuples, and keys other than strings, are not")
        except (TypeError, ValueError, RecursionError) as error:
            self._refuse(f"must return plain JSON from its state_dict: {error}")
        if len(text) > MAX_STATE_CHARACTERS:
            self._refuse(
                f"has a state of {len(text):,} characters as JSON, but at most"
                f" {MAX_STATE_CHARACTERS:,} can be taken at every step; let its state_dict return"
                " a position, and no samples"
            )
        return text

    def _refuse(self, problem: str) -> NoReturn:
        place = source_location(self.reader.stream.lane)
        raise ConfigError(f"lane {self.i} of the stream ({place}) {problem}.")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the lane to the traceback of an error in it."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"This was lane {self.i} of the stream.")
            raise


class StreamBatches:
    """The micro-batches of one rank, read from the lanes of a stream.

    Lane i feeds positions i * n to (i + 1) * n - 1 of every global batch, n being the global batch
    size over the number of lanes. So the position of each sample follows from the step, for any
    world size that the lanes allow, and a rank reads its own lanes only.
    """

    def __init__(
        self,
        config: Config,
        data: Any,
        layout: BatchLayout,
        steps: range,
        accelerator: Accelerator,
        states: Sequence[Any],
    ) -> None:
        """Start at steps.start.

        Args:
            config: the run's config.
            data: the stream.
            layout: the global batch's division.
            steps: the steps to train.
            accelerator: gives this process's rank and device.
            states: of the lanes at steps.start, as lane_states has returned them.
        """
        self.config = config
        self.data = data
        self.layout = layout
        self.steps = steps
        self.accelerator = accelerator
        self.lanes = lanes_of(layout, data.lanes, accelerator.process_index)
        own = [i for lanes in self.lanes for i in lanes]
        if len(states) != data.lanes:  # of a stream that was divided differently, or none
            states = [None] * data.lanes
        # of this rank's lanes after the last micro-batch, as JSON
        self.states = {i: json.dumps(states[i]) for i in own if states[i] is not None}
        self.batches = on_device(self._batches(), accelerator.device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def lane_states(self) -> list[Any]:
        """Return the states of all lanes after the last step, on rank 0. Called by every rank.

        [] if the lanes have none, and on other ranks than 0, which saves them.
        """
        states: dict[int, str] = {}
        for of_rank in gather_on_main(self.accelerator, self.states):
            states |= of_rank
        parsed = [json.loads(states.get(i, "null")) for i in range(self.data.lanes)]
        return parsed if states else []

    def _batches(self) -> Iterator[Any]:
        config, device = self.config, self.accelerator.device
        collate = optional(config.recipe, "collate") or default_collate
        per_step = self.layout.global_batch_size // self.data.lanes
        reader = LaneReader(
            stream=self.data,
            lanes=self.lanes,
            per_step=per_step,
            seed=config.seed,
            start=self.steps.start * per_step,
            seeds=SampleSeeds(config.seed, bool(config.batches.seed_samples)),
            states=dict(self.states),
        )
        loader = make_loader(
            config.batches,
            reader,
            device,
            batch_size=None,
            max_workers=sum(map(len, self.lanes)),
            pin_memory=False,
            persistent_workers=False,
        )
        parts = iter(loader)
        for step in self.steps:
            for j, lanes in enumerate(self.lanes):
                samples: dict[int, list[Any]] = {}
                for _ in range(max(1, loader.num_workers)):  # which a DataLoader asks in turn
                    for lane, (read, state) in next(parts).items():
                        samples[lane] = read
                        if state is not None:
                            self.states[lane] = state
                micro_batch = j * self.layout.world_size + self.accelerator.process_index
                seed_rng(derive_seed(config.seed, "collate", step, micro_batch))
                batch = collate([sample for lane in lanes for sample in samples[lane]])
                if device.type == "cuda":
                    batch = recursively_apply(torch.Tensor.pin_memory, batch)
                yield batch
