"""Which samples form global batch k, on which process, in which micro-batch.

Step k is global batch k, always: one seeded permutation per epoch, cut into global batches, the
tail dropped. Micro-batch j of process r is slice j * processes + r of it, so the samples of a step
are the same for any split, and so are those of each micro-batch. A start at any step costs nothing.

Where torch's generators draw (augmentation, collate, dropout) they are seeded from the sample or
the micro-batch, so what is drawn depends neither on the process nor on where a run was resumed.
"""

import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, default_collate

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


def total_steps(config: Config, train_set: Any) -> int:
    """Count the optimizer steps of the whole run; refuse a data set that makes no global batch."""
    if not hasattr(train_set, "__len__"):
        raise ConfigError(
            f"the training set {type(train_set).__name__} has no length; a recipe's build_datasets"
            " must return map-style data sets (len(data) and data[index])."
        )
    steps_per_epoch = len(train_set) // config.batches.global_batch_size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"the training set has {len(train_set)} samples, fewer than one global batch of"
            f" {config.batches.global_batch_size}; lower batches.global_batch_size."
        )
    if config.steps is not None:
        return config.steps
    return max(1, round((config.epochs or 0) * steps_per_epoch))


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

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        if not self.seed_samples:
            indices = [index for _, index in keys]
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(indices))
            return self.collate([self.data[index] for index in indices])
        numpy = sys.modules.get("numpy")  # who has not imported it does not draw from it
        before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
        try:
            samples = []
            for epoch, index in keys:
                draw = seed_of(self.seed, "sample", epoch, index)
                torch.default_generator.manual_seed(draw)  # 1 us; torch.manual_seed takes 78
                random.seed(draw)
                if numpy:
                    numpy.random.seed(draw % 2**32)
                samples.append(self.data[index])
            return self.collate(samples)
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy:
                numpy.random.set_state(before[2])


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


def make_loader(
    config: BatchesConfig, fetch: Fetch, sampler: Any, device: torch.device
) -> DataLoader:
    """Build the DataLoader over a sampler that yields lists of (epoch, index)."""
    workers = config.workers
    if workers is None:
        workers = min(8, max(0, math.floor(cpus_per_process()) - 1))
    options: dict[str, Any] = {
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
    }
    options |= config.loader
    options["worker_init_fn"] = partial(_start_worker, config.loader.get("worker_init_fn"))
    try:
        return DataLoader(
            fetch,  # type: ignore[arg-type]  # it has what a batched fetch calls
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=_unchanged,
            generator=torch.Generator().manual_seed(fetch.seed),  # else it draws from dropout's
            **options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"batches.loader {config.loader}: {error}.") from error


def on_device(loader: DataLoader, device: torch.device) -> Iterator[Any]:
    """Move each micro-batch to the device, without waiting for the copy."""
    for batch in loader:
        yield batch if device.type == "cpu" else send_to_device(batch, device, non_blocking=True)


def train_batches(
    config: Config, data: Any, split: Split, rank: int, steps: range, device: torch.device
) -> Iterator[Any]:
    """Iterate over the micro-batches of one process for these steps, already on the device."""
    sampler = SliceSampler(len(data), split, rank, config.seed, steps.start, steps.stop)
    fetch = Fetch(
        data, optional(config.recipe, "collate"), config.seed, config.batches.seed_samples
    )
    return on_device(make_loader(config.batches, fetch, sampler, device), device)
