"""Which samples form global batch k, by rank and micro-batch.

Step k is global batch k, always: one seeded permutation per epoch, cut into global batches, the
tail dropped. Micro-batch j of rank r is slice j * world_size + r of the global batch, so the
samples of a step are the same for any world size. A start at any step costs nothing.
"""

from collections.abc import Iterator

import torch

from .layout import BatchLayout
from .seeding import derive_seed


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
        steps_per_epoch = self.samples // self.layout.global_batch_size
        micro = self.layout.micro_batch_size
        order_of, order = -1, torch.empty(0)
        for step in self.steps:
            epoch, batch = divmod(step, steps_per_epoch)
            if epoch != order_of:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
                order_of, order = epoch, torch.randperm(self.samples, generator=generator)
            for j in range(self.layout.accumulation):
                start = batch * self.layout.global_batch_size
                start += (j * self.layout.world_size + self.rank) * micro
                yield [(epoch, index) for index in order[start : start + micro].tolist()]

    def __len__(self) -> int:
        """Count the micro-batches."""
        return len(self.steps) * self.layout.accumulation
