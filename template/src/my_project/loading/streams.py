"""Read a stream, which has neither a length nor an index, in lanes that never end.

A lane is a logical shard of the stream, like a canonical node of MosaicML's streaming: it always
feeds the same positions of a global batch, whatever rank reads it.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from ..config import Config, ConfigError
from ..files import Json
from ..ranks import gather_on_main
from ..recipe import Stream, optional, source_location
from ..words import processes
from .layout import BatchLayout
from .loader import check_sendable, make_loader, on_device
from .seeding import SampleSeeds, derive_seed, seed_rng


def steps_of_stream(config: Config, stream: Stream, layout: BatchLayout) -> int:
    """Return the number of steps, which the config must set; refuse lanes that do not fit."""
    size, lanes = layout.global_batch_size, stream.lanes
    if lanes < 1 or size % lanes or lanes % layout.micro_batches:
        numbers = [n for n in range(layout.world_size, lanes + 1) if lanes % n == size % lanes == 0]
        sizes = ", ".join(str(size // n) for n in reversed(numbers))
        raise ConfigError(
            f"the stream's {lanes} lanes must divide batches.global_batch_size {size}, and be a"
            f" multiple of the {layout.micro_batches} micro-batches of a step: "
            + (
                f"with these lanes and {processes(layout.world_size)}, batches.micro_batch_size can"
                f" be {sizes}."
                if sizes
                else "choose a different number of lanes."
            )
        )
    if config.steps is None:
        raise ConfigError("a stream has no length, so epochs cannot be counted; set steps.")
    return config.steps


@dataclass(kw_only=True)
class LaneReader(IterableDataset):
    """Yield, for each micro-batch of a rank, the samples of this worker's lanes.

    A worker reads only its own lanes, so no data is read twice; lanes are opened in the process
    that reads them. Each item is {lane: (samples, state)}: the state is a copy of the lane's state
    after these samples, or None if the lane has no state_dict.
    """

    stream: Stream
    lanes: Sequence[Sequence[int]]  # the lanes of each micro-batch of a step
    per_step: int  # samples per lane and step
    start: int  # samples to skip in each lane
    seeds: SampleSeeds  # never with mode auto, which would have to read samples again
    states: Mapping[int, Json]  # by lane: its state after `start` samples, if it has one

    def __iter__(self) -> Iterator[dict[int, tuple[list, Json]]]:
        """Read without end."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        own_lanes = sorted(lane for lanes in self.lanes for lane in lanes)[worker::workers]
        opened = {i: self._read(i) for i in own_lanes}
        for number, lanes in enumerate(cycle(self.lanes)):
            part = {i: next(opened[i]) for i in lanes if i in opened}
            if number < len(self.lanes):
                check_sendable(part)
            yield part

    def _read(self, i: int) -> Iterator[tuple[list, Json]]:
        """Yield the samples of each step of a lane, and the state after them."""
        try:
            state = self.states.get(i)
            lane = self.stream.lane(i, self.start if state is None else 0, self.seeds.seed)
            has_state = hasattr(lane, "state_dict")
            if state is not None and has_state:
                lane.load_state_dict(state)
            elif state is not None:
                lane = self.stream.lane(i, self.start, self.seeds.seed)
            remaining = iter(lane)
            for position in count(self.start, self.per_step):
                samples: list[Any] = []
                for _ in self.seeds.each((f"0/{i}", position + k) for k in range(self.per_step)):
                    samples += islice(remaining, 1)
                if len(samples) < self.per_step:
                    raise ConfigError(
                        f"lane {i} of the stream ({source_location(self.stream.lane)}) has ended"
                        f" after {position + len(samples)} samples, but a lane must never end: let"
                        " it begin again at its end (see recipe.py)."
                    )
                yield samples, plain(lane.state_dict()) if has_state else None
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"This was lane {i} of the stream.")
            raise


def plain(state: Json) -> Json:
    """Copy a lane's state via JSON; refuse a state that JSON, and so a checkpoint, would change."""
    copied = json.loads(json.dumps(state))
    if copied != state:
        raise ValueError(
            "state_dict returned what JSON would change: return no tuples, NaNs or non-string keys"
        )
    return copied


class StreamBatches:
    """The micro-batches of one rank, read from the lanes of a stream.

    Lane i feeds positions i * n to (i + 1) * n - 1 of every global batch, where n is the global
    batch size divided by the number of lanes. So the position of each sample follows from the step,
    for any world size that the lanes allow, and a rank reads only its own lanes.
    """

    def __init__(
        self,
        config: Config,
        data: Stream,
        layout: BatchLayout,
        steps: range,
        accelerator: Accelerator,
        states: Sequence[Json],
    ) -> None:
        """Start at steps.start.

        Args:
            config: the run's config.
            data: the stream.
            layout: how the global batch is divided.
            steps: the steps to train.
            accelerator: gives this process's rank and device.
            states: the states of the lanes at steps.start, as returned by stream_states.
        """
        self.config = config
        self.data = data
        self.layout = layout
        self.steps = steps
        self.accelerator = accelerator
        per_micro_batch = data.lanes // layout.micro_batches
        own = range(accelerator.process_index, layout.micro_batches, layout.world_size)
        self.lanes = [range(m * per_micro_batch, (m + 1) * per_micro_batch) for m in own]
        if len(states) != data.lanes:  # the stream had a different number of lanes, or no states
            states = [None] * data.lanes
        # the states of this rank's lanes after the last micro-batch
        self.states = {i: states[i] for lanes in self.lanes for i in lanes if states[i] is not None}
        self.batches = on_device(self._batches(), accelerator.device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def stream_states(self) -> list[Json]:
        """Return the states of all lanes after the last step, on rank 0. Called by every rank.

        The list is empty if the lanes have no state. It is also empty on all ranks except rank 0,
        which saves the states.
        """
        states: dict[int, Json] = {}
        for rank_states in gather_on_main(self.accelerator, self.states):
            states |= rank_states
        has_states = any(state is not None for state in states.values())
        return [states.get(i) for i in range(self.data.lanes)] if has_states else []

    def _batches(self) -> Iterator[Any]:
        config, device = self.config, self.accelerator.device
        collate = optional(config.recipe, "collate") or default_collate
        per_step = self.layout.global_batch_size // self.data.lanes
        reader = LaneReader(
            stream=self.data,
            lanes=self.lanes,
            per_step=per_step,
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
        passes = self.layout.passes(self.accelerator.process_index)
        for step in self.steps:
            kept: list[Any] = []  # the samples of the first micro-batch, if it is repeated
            for j, (micro_batch, is_repeated) in enumerate(passes):
                samples: dict[int, list[Any]] = {}
                # one part from each worker, in the DataLoader's round-robin order
                for _ in range(0 if is_repeated else max(1, loader.num_workers)):
                    for lane, (read, state) in next(parts).items():
                        samples[lane] = read
                        self.states[lane] = state  # None replaces an older state
                read = [sample for lane in sorted(samples) for sample in samples[lane]] or kept
                if j == 0 and passes[-1][1]:
                    kept = copy.deepcopy(read)  # since collate may change its samples
                seed_rng(derive_seed(config.seed, "collate", step, micro_batch))
                batch = collate(read)
                if device.type == "cuda":
                    batch = recursively_apply(torch.Tensor.pin_memory, batch)
                yield batch
