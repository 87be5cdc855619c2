"""Which samples form global batch k, on which process, in which micro-batch; and their DataLoader.

Step k is global batch k, always: one seeded permutation per epoch, cut into global batches, the
tail dropped. A start at any step costs nothing.
"""

import math
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, default_collate

from ..config import BatchesConfig, ConfigError
from .layout import Split
from .seeding import generators_kept, seed_generators, seed_of
from .workers import _start_worker, check_sendable, cpus_per_process


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


def _unchanged(batch: Any) -> Any:
    return batch  # Fetch has collated it; a lambda could not be sent to a worker


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
