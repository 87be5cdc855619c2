"""The micro-batches of one rank, from a map-style dataset or a stream."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

from ..config import Config
from ..recipe import optional
from .layout import BatchLayout, is_stream
from .loader import Fetch, make_loader, on_device
from .sampler import SliceSampler
from .streams import Position, StreamBatches


class IndexedBatches:
    """The micro-batches of one rank, read from a map-style dataset."""

    is_short = False  # see StreamBatches, also for the epoch
    epoch = 0

    def __init__(
        self,
        config: Config,
        data: Any,
        layout: BatchLayout,
        steps: range,
        accelerator: Accelerator,
    ) -> None:
        """Start at steps.start; the arguments are those of StreamBatches."""
        rank, device = accelerator.process_index, accelerator.device
        sampler = SliceSampler(len(data), layout, rank, config.seed, steps)
        collate = optional(config.recipe, "collate")
        how = config.batches.seed_samples
        fetch = Fetch(data, collate, config.seed, how, restore_rng=False)
        loader = make_loader(config.batches, fetch, device, batch_sampler=sampler)
        self.batches = on_device(loader, device)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def end_epoch_after(self, step: int) -> None:
        """Do nothing: only a stream can run short."""

    def position(self) -> Position:
        """Return that of no stream: the step is enough."""
        return 0, 0, []


def train_batches(
    config: Config,
    data: Any,
    layout: BatchLayout,
    steps: range,
    accelerator: Accelerator,
    position: Position,
) -> IndexedBatches | StreamBatches:
    """Iterate over the micro-batches of one rank for these steps, already on the device.

    Args: those of StreamBatches.
    """
    if is_stream(data):
        return StreamBatches(config, data, layout, steps, accelerator, position)
    return IndexedBatches(config, data, layout, steps, accelerator)
