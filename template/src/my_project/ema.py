"""An exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """An exponential moving average of the weights, in their own order and precision."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages toward the weights by 1 - decay."""
        torch._foreach_lerp_(self.averages, self.weights, 1.0 - self.decay)  # type: ignore

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the averages in for the weights, for the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()
