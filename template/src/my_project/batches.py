"""Which samples form global batch k, on which process, in which micro-batch.

Step k is global batch k, always: one seeded permutation per epoch, cut into global batches, the
tail dropped. Micro-batch j of process r is slice j * processes + r of it, so the samples of a step
are the same for any split, and so are those of each micro-batch. A start at any step costs nothing.
Data without length or index, a stream, is read in lanes instead: see Stream.

Where torch's generators draw (augmentation, collate, dropout) they are seeded from the sample or
the micro-batch, so what is drawn depends neither on the process nor on where a run was resumed.
"""

import hashlib
import io
import math
import os
import pickle
import random
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from .config import BatchesConfig, Config, ConfigError
from .faults import heed_only_the_parent
from .recipe import optional


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a global batch is divided: global = micro x processes x accumulation."""

    global_batch_size: int  # samples per optimizer step
    micro_batch_size: int  # samples per forward and process
    processes: int
    accumulation: int  # micro-batches per step and process


def split(config: BatchesConfig, processes: int) -> Split:
    """Derive the accumulation, or refuse with the arithmetic."""
    total = config.global_batch_size
    micro = config.micro_batch_size or total // processes
    accumulation = total // (micro * processes) if micro else 0
    if accumulation * micro * processes != total:
        raise ConfigError(
            f"batches.global_batch_size {total} does not split into micro-batches of"
            f" {max(micro, 1)} on {processes} process(es): {total} / ({max(micro, 1)} x"
            f" {processes}) = {total / (max(micro, 1) * processes):g}. Lower"
            " batches.micro_batch_size, or choose a global batch size that is a multiple of"
            " micro_batch_size x processes."
        )
    return Split(
        global_batch_size=total,
        micro_batch_size=micro,
        processes=processes,
        accumulation=accumulation,
    )


def is_stream(data: Any) -> bool:
    """Tell whether a data set is read in lanes."""
    return hasattr(data, "lanes") and callable(getattr(data, "lane", None))


def lengths(train_set: Any, validation_sets: dict[str, Any]) -> dict[str, int]:
    """Count the samples of each dataset, or the lanes of a stream."""
    is_lanes = is_stream(train_set)
    of_train = {"the lanes of the stream": train_set.lanes} if is_lanes else {
        "the training set": len(train_set)
    }  # fmt: skip
    return of_train | {
        f"validation set {name}": len(data) for name, data in validation_sets.items()
    }


def total_steps(config: Config, train_set: Any, split: Split) -> int:
    """Count the optimizer steps of the whole run; refuse data that makes no global batch."""
    size = config.batches.global_batch_size
    if is_stream(train_set):
        return _total_steps_of_stream(config, train_set.lanes, split)
    steps_per_epoch = len(train_set) // size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"the training set has {len(train_set)} samples, fewer than one global batch of {size};"
            " lower batches.global_batch_size."
        )
    if config.steps is not None:
        return config.steps
    return max(1, round((config.epochs or 0) * steps_per_epoch))


def _total_steps_of_stream(config: Config, lanes: int, split: Split) -> int:
    if config.steps is None:
        raise ConfigError("a stream has no length that epochs could be counted in; set steps.")
    if lanes < 1 or split.global_batch_size % lanes:
        raise ConfigError(
            f"the stream's {lanes} lanes must divide batches.global_batch_size"
            f" {split.global_batch_size}: each feeds the same number of its places."
        )
    micro_batches = split.processes * split.accumulation
    if lanes % micro_batches:
        raise ConfigError(
            f"{split.processes} process(es) x accumulation {split.accumulation} must divide the"
            f" stream's {lanes} lanes; choose a multiple of {micro_batches} lanes, or a greater"
            " batches.micro_batch_size."
        )
    return config.steps


def seed_of(*parts: Any) -> int:
    """Hash the parts into a 64-bit seed, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class SliceSampler:
    """Yield the (epoch, index) pairs of one process, a list per micro-batch.

    The epoch travels with the index, since persistent loader workers learn of it no other way.
    """

    def __init__(
        self, samples: int, split: Split, rank: int, seed: int, first_step: int, last_step: int
    ) -> None:
        self.samples, self.split, self.rank, self.seed = samples, split, rank, seed
        self.first_step, self.last_step = first_step, last_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Start at the first step, in whichever epoch it lies."""
        steps_per_epoch = self.samples // self.split.global_batch_size
        micro = self.split.micro_batch_size
        order_of, order = -1, torch.empty(0)
        for step in range(self.first_step, self.last_step):
            epoch, batch = divmod(step, steps_per_epoch)
            if epoch != order_of:
                generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
                order_of, order = epoch, torch.randperm(self.samples, generator=generator)
            for j in range(self.split.accumulation):
                start = batch * self.split.global_batch_size
                start += (j * self.split.processes + self.rank) * micro
                yield [(epoch, index) for index in order[start : start + micro].tolist()]

    def __len__(self) -> int:
        """Count the micro-batches."""
        return (self.last_step - self.first_step) * self.split.accumulation


class Fetch:
    """Fetch and collate one micro-batch, drawing from generators seeded by its samples.

    All of it happens in `__getitems__`, which a DataLoader calls once per micro-batch, in a worker
    or here; the generators of this process are put back as they were, dropout draws from them.
    """

    def __init__(self, data: Any, collate: Callable | None, seed: int, seed_samples: bool) -> None:
        self.data, self.seed, self.seed_samples = data, seed, seed_samples
        self.collate = collate or default_collate
        self.is_first = True

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        batch = self._fetch(keys)
        if self.is_first:
            check_sendable(batch)
            self.is_first = False
        return batch

    def _fetch(self, keys: Sequence[tuple[int, int]]) -> Any:
        if not self.seed_samples:
            indices = [index for _, index in keys]
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(indices))
            return self.collate([self.data[index] for index in indices])
        with generators_kept():
            samples = []
            for epoch, index in keys:
                seed_generators(seed_of(self.seed, "sample", epoch, index))
                samples.append(self.data[index])
            return self.collate(samples)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put torch's, Python's and NumPy's generators back as they were."""
    numpy = sys.modules.get("numpy")  # who has not imported it does not draw from it
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def seed_generators(seed: int) -> None:
    """Seed them for what is drawn next."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 78
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _unchanged(batch: Any) -> Any:
    return batch  # Fetch has collated it; a lambda could not be sent to a worker


def _start_worker(also: Callable | None, worker: int) -> None:
    heed_only_the_parent()
    if also:
        also(worker)


def cpus_per_process() -> float:
    """Count the CPUs that this process may use, by affinity and by the container's quota."""
    cpus: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and not (parts := quota.read_text().split())[0].startswith("max"):
        cpus = min(cpus, int(parts[0]) / int(parts[1]))
    return cpus / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def make_loader(config: BatchesConfig, data: Any, device: torch.device, **how: Any) -> DataLoader:
    """Build the DataLoader of data that collates by itself, with the config's options."""
    workers = config.workers
    if workers is None:
        workers = min(8, max(0, math.floor(cpus_per_process()) - 1))
    workers = min(workers, how.pop("most_workers", workers))
    options: dict[str, Any] = {
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
    }
    options |= config.loader
    options["worker_init_fn"] = partial(_start_worker, config.loader.get("worker_init_fn"))
    try:
        return DataLoader(
            data,
            num_workers=workers,
            collate_fn=_unchanged,
            generator=torch.Generator().manual_seed(0),  # else it draws from dropout's
            **options | how,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"batches.loader {config.loader}: {error}.") from error


class _Trial(ForkingPickler):
    """Pickle as the queue of a loader worker does, but for the contents of tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Put a number in the place of a tensor that can be sent."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise TypeError("a tensor that is part of a graph; detach() it")
        return int, (0,)


def check_sendable(batch: Any) -> None:
    """Refuse, in a loader worker, what cannot be sent from it: its queue would drop it, silently.

    The training process would wait for it until the watch ends the run.
    """
    if get_worker_info() is None:
        return
    try:
        _Trial(io.BytesIO()).dump(batch)
    except Exception as error:  # what pickle raises has many types
        raise ConfigError(
            f"a loader worker cannot send what the dataset or collate returned: {error}; return"
            " tensors, numbers, strings, or lists and dictionaries of these, or set batches.workers"
            " to 0."
        ) from error


def started(batches: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate: a DataLoader starts its workers, which may need the data sent to them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Got pickle error")  # said below
            return iter(batches)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(frame.filename.endswith("reduction.py") for frame in frames):
            raise  # not from multiprocessing's pickling, whose messages differ between Pythons
        raise ConfigError(
            f"the dataset or collate cannot be sent to a loader worker: {error}; define its"
            " functions and classes at the top level of a module, or set batches.workers to 0."
        ) from error


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Move each micro-batch to the device, without waiting for the copy."""
    try:
        for batch in started(batches):
            is_there = device.type == "cpu"
            yield batch if is_there else send_to_device(batch, device, non_blocking=True)
    except ConfigError as error:  # of a loader worker, which puts its traceback before it
        raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error


class Indexed:
    """The micro-batches of one process, read from a map-style data set."""

    is_short = False  # see Stream

    def __init__(
        self, config: Config, data: Any, split: Split, rank: int, steps: range, device: torch.device
    ) -> None:
        """Begin at steps.start; the arguments are those of Stream."""
        sampler = SliceSampler(len(data), split, rank, config.seed, steps.start, steps.stop)
        fetch = Fetch(
            data, optional(config.recipe, "collate"), config.seed, config.batches.seed_samples
        )
        loader = make_loader(config.batches, fetch, device, batch_sampler=sampler)
        self.batches = on_device(loader, device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def note_short(self, step: int) -> None:
        """Take no notice."""


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


def train_batches(
    config: Config, data: Any, split: Split, rank: int, steps: range, device: torch.device,
    state: dict[str, Any], smallest: Callable[[int], int],
) -> Indexed | Stream:  # fmt: skip
    """Iterate over the micro-batches of one process for these steps, already on the device."""
    if is_stream(data):
        return Stream(config, data, split, rank, steps, device, state, smallest)
    return Indexed(config, data, split, rank, steps, device)
