"""Which samples form global batch k, by rank and micro-batch.

Step k is global batch k, always: one seeded permutation per epoch, cut into global batches, the
tail dropped. Micro-batch j of rank r is slice j * world_size + r of the global batch, so the
samples of a step are the same for any world size. A start at any step costs nothing.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Subset

from ..config import Config, ConfigError
from .layout import BatchLayout, is_stream
from .permutation import Permutation

BLOCK = 8192  # samples that are looked up at once


class SliceSampler:
    """Yield the (epoch, index) pairs of one process, a list per micro-batch.

    The epoch travels with the index, since persistent loader workers learn of it no other way.
    """

    def __init__(
        self, samples: int, layout: BatchLayout, rank: int, seed: int, steps: range
    ) -> None:
        self.samples = samples
        self.layout = layout
        self.rank = rank
        self.seed = seed
        self.steps = steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Start at the first step, in whichever epoch it lies."""
        size, micro = self.layout.global_batch_size, self.layout.micro_batch_size
        steps_per_epoch = self.samples // size
        slices = np.arange(self.layout.accumulation) * self.layout.world_size + self.rank
        places = slices[:, None] * micro + np.arange(micro)  # in a global batch
        step = self.steps.start
        while step < self.steps.stop:
            epoch, batch = divmod(step, steps_per_epoch)
            last = min(batch + max(1, BLOCK // places.size), steps_per_epoch)
            last = min(last, batch + self.steps.stop - step)
            starts = np.arange(batch, last) * size
            order = permutation(self.samples, self.seed, epoch)(starts[:, None, None] + places)
            for indices in order.reshape(-1, micro).tolist():
                yield [(epoch, index) for index in indices]
            step += last - batch

    def __len__(self) -> int:
        """Count the micro-batches."""
        return len(self.steps) * self.layout.accumulation


def permutation(samples: int, seed: int, epoch: int) -> Permutation:
    """Return the order of the samples in an epoch."""
    return Permutation(samples, seed, "order", epoch)


def first_batches(
    config: Config, train_set: Any, validation_sets: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Keep the samples of the first overfit_batches global batches, for validation too.

    They are those of the same steps of a run on all samples.

    Raises:
        ConfigError: the training set is a stream, or has too few samples.
    """
    batches, size = config.overfit_batches, config.batches.global_batch_size
    if batches is None:
        return train_set, validation_sets
    if is_stream(train_set):
        raise ConfigError(
            f"overfit_batches is {batches}, but the training set is a stream, which cannot be read"
            " again and again in part; let the recipe return a map-style dataset, or set it to"
            " null."
        )
    samples = len(train_set)
    if size <= samples < batches * size:  # with less than one global batch, total_steps refuses
        raise ConfigError(
            f"overfit_batches is {batches}, but the training set has {samples} samples, fewer than"
            f" {batches} global batches of {size}; lower overfit_batches to at most"
            f" {samples // size}."
        )
    indices = permutation(samples, config.seed, 0)(np.arange(min(batches * size, samples)))
    chosen = Subset(train_set, indices.tolist())
    return chosen, dict.fromkeys(validation_sets, chosen)
