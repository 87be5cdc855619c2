"""The recipes that both loops train; their `loss` records when a micro-batch starts (rounds.py).

So the project's loop is timed without changing it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from my_project.recipes.image_classification import ImageClassification
from rounds import Rounds
from torch import Tensor, nn
from torch.nn import functional as F

ROUNDS: list[Rounds] = []  # the last one belongs to the running case


def record_start(model: nn.Module) -> None:
    """Record that the forward pass of a micro-batch of this thread's loop starts."""
    ROUNDS[-1].record_start(model)


class RandomVectors(torch.utils.data.Dataset):
    """Random vectors and labels in memory; a whole micro-batch is read at once."""

    def __init__(self, samples: int, features: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, features, generator=generator)
        self.y = torch.randint(classes, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return vectors (B, features) and labels (B,)."""
        return self.x[indices], self.y[indices]


@dataclass(frozen=True, kw_only=True)
class TinyMlp:
    """A model so small that the loop itself takes nearly all of a step."""

    features: int = 64
    width: int = 128
    classes: int = 10
    samples: int = 8192

    def prepare_data(self) -> dict[str, Any]:
        """Return no data_info; the data is random."""
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[RandomVectors, dict[str, Any]]:
        """Return random vectors for training, and no validation set."""
        return RandomVectors(self.samples, self.features, self.classes), {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build an MLP with two hidden layers."""
        return nn.Sequential(
            nn.Linear(self.features, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.classes),
        )

    def collate(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the micro-batch as it is; RandomVectors reads it whole."""
        return batch

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of a micro-batch, and its number of samples."""
        record_start(model)
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


@dataclass(frozen=True, kw_only=True)
class Digits(ImageClassification):
    """The recipe image_classification (handwritten digits, MiniResNet) without validation."""

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the training images, and no validation set."""
        return super().build_datasets(data_info)[0], {}

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of a micro-batch, and its number of samples."""
        record_start(model)
        return super().loss(model, batch, step)
