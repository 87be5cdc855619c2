"""How a global batch is divided into micro-batches, and how many steps a run has.

global batch = micro-batch x world size x accumulation.
"""

from dataclasses import dataclass
from typing import Any

from ..config import BatchesConfig, Config, ConfigError
from ..words import processes


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The division of a global batch into the micro-batches of all ranks."""

    global_batch_size: int  # samples per optimizer step
    micro_batch_size: int  # samples per forward pass on a rank
    world_size: int
    accumulation: int  # micro-batches per step on a rank

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per step over all ranks."""
        return self.world_size * self.accumulation


def batch_layout(config: BatchesConfig, world_size: int) -> BatchLayout:
    """Derive the micro-batch and the accumulation, or refuse with the arithmetic."""
    total = config.global_batch_size
    share = total // world_size  # samples per step and rank
    micro = min(config.micro_batch_size or share, share) or 1
    if total % (micro * world_size):
        raise ConfigError(
            f"batches.global_batch_size {total} does not split into micro-batches of {micro} on"
            f" {processes(world_size)}: {total} / ({micro} x {world_size}) ="
            f" {total / (micro * world_size):g}. Choose a number of processes that divides it, and"
            " a batches.micro_batch_size that divides the part of each, or 0 for all of it at once."
        )
    return BatchLayout(
        global_batch_size=total,
        micro_batch_size=micro,
        world_size=world_size,
        accumulation=share // micro,
    )


def is_stream(data: Any) -> bool:
    """Return whether a dataset is a stream, which is read in lanes."""
    return hasattr(data, "lanes") and callable(getattr(data, "lane", None))  # of a stream


def lengths(train_set: Any, validation_sets: dict[str, Any]) -> dict[str, int]:
    """Count the samples of each dataset, or its lanes."""
    counts = {f"validation set {name}": len(data) for name, data in validation_sets.items()}
    if is_stream(train_set):
        return {"the lanes of the stream": train_set.lanes} | counts  # of a stream
    return {"the training set": len(train_set)} | counts


def evenly_spaced(data: Any, count: int) -> list[int]:
    """Return the indices of so many samples of a dataset, or of all that it has."""
    count = min(count, len(data))
    return [i * len(data) // count for i in range(count)]


def total_steps(config: Config, train_set: Any, layout: BatchLayout) -> int:
    """Count the optimizer steps of the whole run; refuse data that makes no global batch."""
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
