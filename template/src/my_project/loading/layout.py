"""Divide a global batch into micro-batches, and compute the number of steps of a run.

Micro-batch m of a step goes to rank m % world size. If the world size does not divide the number of
micro-batches, some ranks have one micro-batch fewer. They repeat their first one with weight 0,
because DDP and FSDP2 need the same number of forward and backward passes on every rank.
"""

from dataclasses import dataclass
from typing import TypeGuard

from ..config import BatchesConfig, Config, ConfigError
from ..recipe import Dataset, Datasets, Stream
from ..words import processes


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The division of a global batch into the micro-batches of all ranks."""

    global_batch_size: int  # samples per optimizer step
    micro_batches: int  # per step, over all ranks
    world_size: int

    @property
    def micro_batch_size(self) -> int:
        """Samples in the largest micro-batch, and so in the largest forward pass."""
        return -(-self.global_batch_size // self.micro_batches)

    @property
    def accumulation(self) -> int:
        """Passes per step on each rank, including the pass that repeats a micro-batch, if any."""
        return -(-self.micro_batches // self.world_size)

    @property
    def is_uneven(self) -> bool:
        """Whether micro-batches differ in size, or ranks in their number of micro-batches."""
        passes = self.accumulation * self.world_size
        return self.global_batch_size != self.micro_batch_size * passes

    def __str__(self) -> str:
        """Describe the layout in words."""
        size, accumulation = self.micro_batch_size, f"accumulation {self.accumulation}"
        total, ranks = f"global batch {self.global_batch_size}", processes(self.world_size)
        if not self.is_uneven:
            return f"{total} = micro-batch {size} x {ranks} x {accumulation}"
        # the share of all ranks' passes that repeat a micro-batch
        share = 1 - self.micro_batches / (self.accumulation * self.world_size)
        idle = f", idle {share:.0%}" if share else ""
        number = f"{self.micro_batches} micro-batches of at most {size}"
        return f"{total} = {number} on {ranks}, {accumulation}{idle}"

    def passes(self, rank: int) -> list[tuple[int, bool]]:
        """Return (micro-batch, whether it is a repeat) for each pass of a rank in a step.

        Micro-batches are numbered over all ranks. A repeat is the rank's first one, with weight 0.
        """
        numbers = range(rank, self.accumulation * self.world_size, self.world_size)
        count = self.micro_batches
        return [(number, False) if number < count else (rank, True) for number in numbers]

    def positions(self, micro_batch: int) -> range:
        """Return the positions of a micro-batch's samples in the global batch."""
        first, last = (
            self.global_batch_size * m // self.micro_batches for m in (micro_batch, micro_batch + 1)
        )
        return range(first, last)


def max_processes(config: BatchesConfig) -> int:
    """Return the maximum number of processes: one per micro-batch.

    Without `micro_batch_size`, a micro-batch can be a single sample.
    """
    return -(-config.global_batch_size // (config.micro_batch_size or 1))


def batch_layout(config: BatchesConfig, world_size: int) -> BatchLayout:
    """Divide the global batch into micro-batches.

    If `micro_batch_size` is set, the micro-batches are the same for any number of processes;
    otherwise each process has one.

    Raises:
        ConfigError: there are fewer micro-batches than processes.
    """
    total, size = config.global_batch_size, config.micro_batch_size
    if (limit := max_processes(config)) < world_size:
        parts = (
            f"{limit} micro-batch{'es' * (limit != 1)} of at most {size} sample{'s' * (size > 1)}"
            if size
            else f"{total} samples"
        )
        smaller = f", or set batches.micro_batch_size to at most {total // world_size}"
        raise ConfigError(
            f"batches.global_batch_size {total} gives {parts}, fewer than {processes(world_size)}:"
            f" start at most {limit}{smaller if size and total >= world_size else ''}."
        )
    micro_batches = limit if size else world_size
    return BatchLayout(global_batch_size=total, micro_batches=micro_batches, world_size=world_size)


def is_stream(data: Dataset) -> TypeGuard[Stream]:
    """Return whether a dataset is a stream, which is read in lanes."""
    return hasattr(data, "lanes") and callable(getattr(data, "lane", None))  # of a stream


def lengths(train_set: Dataset, validation_sets: Datasets) -> dict[str, int]:
    """Count the samples of each dataset, or its lanes."""
    counts = {f"validation set {name}": len(data) for name, data in validation_sets.items()}
    if is_stream(train_set):
        return {"the lanes of the stream": train_set.lanes} | counts  # lanes of a stream
    return {"the training set": len(train_set)} | counts


def evenly_spaced(data: Dataset, count: int) -> list[int]:
    """Return the indices of `count` evenly spaced samples, or of all if there are fewer."""
    count = min(count, len(data))
    return [i * len(data) // count for i in range(count)]


def total_steps(config: Config, train_set: Dataset, layout: BatchLayout) -> int:
    """Count the optimizer steps of the whole run; refuse fewer samples than one global batch."""
    from .streams import steps_of_stream

    if is_stream(train_set):
        return steps_of_stream(config, train_set, layout)
    size = layout.global_batch_size
    if len(train_set) < size:
        raise ConfigError(
            f"the training set has {len(train_set)} samples, fewer than one global batch of {size};"
            " lower batches.global_batch_size."
        )
    if config.steps is not None:
        return config.steps
    return max(1, round((config.epochs or 0) * (len(train_set) // size)))
