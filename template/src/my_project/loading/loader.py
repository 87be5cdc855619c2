"""Load the micro-batches of one rank: fetch, collate, and move them to the device."""

import io
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from ..config import BatchesConfig, Config, ConfigError
from ..process import PR_SET_PDEATHSIG, prctl
from ..recipe import Batch, Dataset, optional
from .layout import BatchLayout
from .seeding import Key, SampleSeeds, SeedSamples, derive_seed, sample_keys, seed_rng


def read_batches(
    config: Config, data: Dataset, layout: BatchLayout, steps: range, accelerator: Accelerator
) -> Iterator[Any]:
    """Return the micro-batches of this rank for these steps, from a map-style dataset.

    Args:
        config: the run's config.
        data: a map-style dataset.
        layout: how the global batch is divided.
        steps: the steps to train.
        accelerator: gives this process's rank and device.
    """
    rank, device = accelerator.process_index, accelerator.device
    keys = sample_keys(len(data), layout, rank, config.seed, steps)
    collate = optional(config.recipe, "collate")
    fetch = Fetch(data, collate, config.seed, config.batches.seed_samples)
    loader = make_loader(config.batches, fetch, device, batch_sampler=keys)
    return on_device(loader, device)


class Fetch:
    """Fetch and collate one micro-batch, with the random state seeded by its samples.

    All of it happens in `__getitems__`, which a DataLoader calls once per micro-batch, in a worker
    or in the training process. In the training process, the random state of the last sample
    remains; this does not matter, because each forward pass is seeded separately.
    """

    def __init__(
        self, data: Any, collate: Callable | None, seed: int, seed_samples: SeedSamples
    ) -> None:
        """Read from map-style data.

        Args:
            data: the samples.
            collate: the recipe's function; None for torch's default_collate.
            seed: the run's seed.
            seed_samples: see BatchesConfig.
        """
        self.data = data
        self.seeds = SampleSeeds(seed, seed_samples)
        self.collate = collate or default_collate
        # read a whole micro-batch in one call, as long as it draws no random numbers
        self.reads_batches = seed_samples is not True and has_getitems(data)
        self.reads_rows = collate is None and is_tensor_dataset(data)  # it draws no random numbers
        self.is_first = True

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        if self.reads_rows:
            batch = read_rows(self.data, [index for _, index in keys])
        else:
            epoch = keys[0][0]  # the same for all samples of a micro-batch
            tell_epoch(self.data, epoch if isinstance(epoch, int) else 0, self.seeds.seed)
            batch = self._read(keys)
            if self.seeds.missed_a_draw():
                self.reads_batches = False
                batch = self._read(keys)
        if self.is_first:
            check_sendable(batch)
            self.is_first = False
        return batch

    def _read(self, keys: Sequence[Key]) -> Any:
        if self.reads_batches:
            return self.collate(self.data.__getitems__(self.seeds.seed_together(keys)))
        samples = []
        for index in self.seeds.each(keys):  # a comprehension would add a frame to tracebacks
            samples.append(self.data[index])
        return self.collate(samples)


def has_getitems(data: Any) -> bool:
    """Return whether a dataset has a `__getitems__` that reads several samples in one call."""
    while isinstance(data, Subset):  # a Subset calls the __getitems__ of its dataset, if any
        data = data.dataset
    return callable(getattr(data, "__getitems__", None))


def tell_epoch(data: Any, epoch: int, seed: int) -> None:
    """Call the `set_epoch` of a dataset, if it has one and was last told a different epoch.

    Random numbers that `set_epoch` draws depend on the epoch. The last epoch is kept in the dataset
    itself, since training and evaluations may share a dataset, and each worker has a copy of it.
    """
    if callable(set_epoch := getattr(data, "set_epoch", None)):
        attributes = getattr(data, "__dict__", {})
        if attributes.get("_told_epoch") != epoch:
            seed_rng(derive_seed(seed, "epoch", epoch))
            set_epoch(epoch)
            attributes["_told_epoch"] = epoch
    elif isinstance(data, Subset):
        tell_epoch(data.dataset, epoch, seed)
    elif isinstance(data, torch.utils.data.ConcatDataset):
        for part in data.datasets:
            tell_epoch(part, epoch, seed)


def is_tensor_dataset(data: Any) -> bool:
    """Return whether this is exactly a TensorDataset or a Subset of one.

    A subclass does not count, because it may draw random numbers.
    """
    while type(data) is Subset:
        data = data.dataset
    return type(data) is TensorDataset and all(t.layout is torch.strided for t in data.tensors)


def read_rows(data: Any, indices: Sequence[int]) -> list[Tensor]:
    """Read and collate samples of a TensorDataset, by indexing each tensor once."""
    while type(data) is Subset:
        indices = [data.indices[index] for index in indices]
        data = data.dataset
    rows = torch.from_numpy(np.array(indices))  # a fifth of the time of torch.tensor
    return [tensor[rows] for tensor in data.tensors]


def identity(batch: Batch) -> Batch:
    """Return a batch unchanged; not a lambda, since workers unpickle it."""
    return batch


def number_of_workers(config: BatchesConfig) -> int:
    """Return the number of loader workers of this process."""
    if config.workers is not None:
        return config.workers
    return min(8, max(0, math.floor(cpus_per_process()) - 1))


def make_loader(config: BatchesConfig, data: Any, device: torch.device, **extra: Any) -> DataLoader:
    """Build a DataLoader that does not collate, with the config's options."""
    workers = number_of_workers(config)
    if workers and (name := open_file_in(data)):
        raise ConfigError(
            f"the dataset has an open file or database ({name}). The loader workers of each process"
            f" ({workers}) would share its offset and read wrong samples: open it when the first"
            " sample is read, or set batches.workers to 0."
        )
    workers = min(workers, extra.pop("max_workers", workers))
    defaults: dict[str, Any] = {
        "persistent_workers": workers > 0,
        "pin_memory": device.type == "cuda",
    }
    try:
        return DataLoader(
            data,
            collate_fn=identity,
            # otherwise the DataLoader draws from torch's generator, which dropout uses
            generator=torch.Generator().manual_seed(0),
            in_order=True,  # otherwise a step would get whichever samples are read first
            num_workers=workers,
            worker_init_fn=ignore_signals_except_parents,
            **defaults | config.loader | extra,
        )
    except (TypeError, ValueError) as error:  # also if batches.loader sets one of these arguments
        raise ConfigError(f"batches.loader {config.loader}: {error}.") from error


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Move each micro-batch to the device, without waiting for the copy."""
    on_cpu = device.type == "cpu"
    try:
        for batch in batches:
            yield batch if on_cpu else send_to_device(batch, device, non_blocking=True)
    except ConfigError as error:  # from a loader worker, which puts its traceback first
        raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error


# ---- the processes that load data ----------------------------------------------------------------
def cpus_per_process() -> float:
    """Return this process's share of the CPUs that affinity and cgroup v2's quota allow."""
    cpus: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and not (parts := quota.read_text().split())[0].startswith("max"):
        cpus = min(cpus, int(parts[0]) / int(parts[1]))
    return cpus / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ignore_signals_except_parents(_: int) -> None:
    """Ignore signals in a loader worker: the training process handles them.

    A SIGTERM from the training process still ends the worker. If the parent (the training process
    or its fork server) ends without sending one (killed, os._exit), the kernel kills the worker,
    which otherwise could hang.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    parent = getattr(multiprocessing.parent_process(), "pid", os.getppid())

    def wait_for_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    # A program that a dataset starts with Popen inherits the blocked signal: its terminate() has no
    # effect, and its kill() does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait_for_parent, name="signals", daemon=True).start()


MAX_OBJECTS, MAX_PARTS = 10_000, 100  # objects to examine in a dataset, and parts of each object


def open_file_in(data: object) -> str:
    """Return the dotted name of an open file or database in a dataset; "" if there is none."""
    queue, seen = deque([("", data)]), set()
    while queue and len(seen) < MAX_OBJECTS:
        name, value = queue.popleft()
        if id(value) in seen or isinstance(value, (type, ModuleType)):
            continue
        seen.add(id(value))
        if has_position(value):
            return name.removeprefix(".")
        parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        named = enumerate(value) if isinstance(value, (list, tuple)) else parts.items()
        queue += [(f"{name}.{key}", part) for key, part in islice(named, MAX_PARTS)]
    return ""


def has_position(value: object) -> bool:
    """Return whether this is an open file, pipe or database that forked processes would share.

    A file in memory does not count, nor does one that is only written to, such as a log.
    """
    if isinstance(value, io.IOBase):
        try:
            return value.readable() and value.fileno() > 2  # not stdin
        except (OSError, ValueError):  # it is in memory, or closed
            return False
        except AttributeError:  # a member of a tar archive, which shares the archive's position
            return True
    return "sqlite3" in sys.modules and isinstance(value, sys.modules["sqlite3"].Connection)


class _TrialPickler(ForkingPickler):
    """Pickle as the queue of a loader worker does, but without the contents of tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a number in place of a tensor that can be sent."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise TypeError("a tensor that is part of a graph; detach() it")
        return int, (0,)


def check_sendable(batch: object) -> None:
    """In a loader worker, refuse a batch that the queue to the training process would drop.

    It would drop the batch silently, and the training process would wait for the batch until the
    watchdog ends the run.
    """
    if get_worker_info() is None:
        return
    try:
        _TrialPickler(io.BytesIO()).dump(batch)
    except Exception as error:  # pickle raises exceptions of many types
        raise ConfigError(
            f"a loader worker cannot send what the dataset or collate returned: {error}; return"
            " tensors, numbers, strings, or lists and dictionaries of these, or set batches.workers"
            " to 0."
        ) from error
