"""An exponential moving average of the weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint.shards import TensorReader, plain_name
from .config import Config, ConfigError
from .optim import has_two_views


def build_ema(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> "EMA | None":
    """Return the average that the config asks for, or None.

    Raises:
        ConfigError: the optimizer averages the weights itself, or trains them in half precision.
    """
    if not config.optim.ema_decay:
        return None
    if has_two_views(optimizer):
        raise ConfigError(
            f"optim.ema_decay is {config.optim.ema_decay}, but {config.optim.class_path} averages"
            " the weights itself, for its eval(): set optim.ema_decay to null."
        )
    weights = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    if half := [(name, dtype) for name, dtype in weights if torch.finfo(dtype).bits < 32]:
        raise ConfigError(
            f"optim.ema_decay is {config.optim.ema_decay}, but {plain_name(half[0][0])} is in"
            f" {half[0][1]}, in which an average would round its small updates away: build the"
            " model in float32 (with mixed_precision bf16 it computes in bfloat16), or set"
            " optim.ema_decay to null."
        )
    return EMA(model, config.optim.ema_decay)


class EMA:
    """An exponential moving average of the trained weights, in their order and dtype."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages toward the weights by 1 - decay."""
        torch._foreach_lerp_(self.averages, self.weights, 1.0 - self.decay)  # type: ignore

    def named(self) -> dict[str, Tensor]:
        """Return the averages by the names that checkpoints use."""
        return dict(zip(map(plain_name, self.names), self.averages, strict=True))

    def reader(
        self, folder: Path, read_weight: Callable[[str], Tensor], first_names: dict[str, str]
    ) -> Callable[[str], Tensor]:
        """Return a function that reads a tensor's average, or its weight if it has no average.

        Args:
            folder: the checkpoint.
            read_weight: reads a tensor of the model by its name.
            first_names: maps each name of a parameter to its first name; a tied one has several.
        """
        averages = TensorReader(folder, "ema")

        def read(name: str) -> Tensor:
            first = first_names.get(name, "")
            return averages.read(first) if first in averages.shapes else read_weight(name)

        return read

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the averages in place of the weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()


def load_ema(folder: Path, model: nn.Module) -> None:
    """Fill a plain or a sharded module with the averages of a checkpoint."""
    averages = TensorReader(folder, "ema")
    named = {plain_name(name): p.detach() for name, p in model.named_parameters()}
    averages.fill({name: p for name, p in named.items() if name in averages.shapes})


MAX_SHARE = 0.05  # maximum share of the initial weights in an average


def ema_problem(decay: float | None, steps: int) -> str:
    """Return why a decay is too high for a run of this many steps; "" if it is not."""
    share = (decay or 0.0) ** steps
    if share <= MAX_SHARE:
        return ""
    digits = 10 ** (len(str(steps)) + 2)
    limit = math.floor(MAX_SHARE ** (1 / steps) * digits) / digits  # not rounded up
    return (
        f"optim.ema_decay is {decay} and the run has {steps} steps, so {share:.0%} of the"
        f" export would be the initial weights: lower it to at most {limit}."
    )
