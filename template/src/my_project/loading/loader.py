"""The DataLoader: fetch, collate, start workers, move micro-batches to the device."""

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
from .seeding import derive_seed, fork_rng, seed_rng
from .workers import check_sendable, cpus_per_process, start_worker


class Fetch:
    """Fetch and collate one micro-batch, with the random state seeded by its samples.

    All of it happens in `__getitems__`, which a DataLoader calls once per micro-batch, in a worker
    or in the training process, whose random state is restored: dropout uses it.
    """

    def __init__(self, data: Any, collate: Callable | None, seed: int, seed_samples: bool) -> None:
        self.data = data
        self.seed = seed
        self.seed_samples = seed_samples
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
        with fork_rng():
            samples = []
            for epoch, index in keys:
                seed_rng(derive_seed(self.seed, "sample", epoch, index))
                samples.append(self.data[index])
            return self.collate(samples)


def identity(batch: Any) -> Any:
    """Return a batch as it is: Fetch has collated it, and a worker cannot unpickle a lambda."""
    return batch


def make_loader(config: BatchesConfig, data: Any, device: torch.device, **how: Any) -> DataLoader:
    """Build the DataLoader of data that collates by itself, with the config's options."""
    workers = config.workers
    if workers is None:
        workers = min(8, max(0, math.floor(cpus_per_process()) - 1))
    workers = min(workers, how.pop("max_workers", workers))
    options: dict[str, Any] = {
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
    }
    options |= config.loader
    options["worker_init_fn"] = partial(start_worker, config.loader.get("worker_init_fn"))
    try:
        return DataLoader(
            data,
            num_workers=workers,
            collate_fn=identity,
            # otherwise the DataLoader draws from torch's generator, which dropout uses
            generator=torch.Generator().manual_seed(0),
            **options | how,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"batches.loader {config.loader}: {error}.") from error


def start_iterating(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator; here a DataLoader starts its workers and may have to pickle the data."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Got pickle error")  # raised below
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
        for batch in start_iterating(batches):
            is_there = device.type == "cpu"
            yield batch if is_there else send_to_device(batch, device, non_blocking=True)
    except ConfigError as error:  # from a loader worker, which puts its traceback first
        raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error
