"""The micro-batches of one process, from a map-style dataset or a stream."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..config import Config
from ..recipe import optional
from .layout import Split, is_stream
from .loader import Fetch, SliceSampler, make_loader, on_device
from .streams import Stream


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


def train_batches(
    config: Config, data: Any, split: Split, rank: int, steps: range, device: torch.device,
    state: dict[str, Any], smallest: Callable[[int], int],
) -> Indexed | Stream:  # fmt: skip
    """Iterate over the micro-batches of one process for these steps, already on the device."""
    if is_stream(data):
        return Stream(config, data, split, rank, steps, device, state, smallest)
    return Indexed(config, data, split, rank, steps, device)
