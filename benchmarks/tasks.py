"""What both loops train: recipes whose `loss` tells when a micro-batch starts (turns.py).

So the loop of the project is timed as it is, by what it calls anyway.
"""

from dataclasses import dataclass
from typing import Any

import torch
from my_project.recipes.image_classification import ImageClassification
from torch import Tensor, nn
from torch.nn import functional as F
from turns import Turns

TURNS: list[Turns] = []  # of the case that is under way


def stamp(model: nn.Module) -> None:
    """Tell that the forward of a micro-batch of this loop starts now."""
    TURNS[-1].stamp(model)


class RandomVectors(torch.utils.data.Dataset):
    """Vectors and labels in memory, fetched a micro-batch at a time."""

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
    """A model so small that nearly all of a step is the loop itself."""

    features: int = 64
    width: int = 128
    classes: int = 10
    samples: int = 8192

    def prepare_data(self) -> dict[str, Any]:
        """Nothing to prepare."""
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[RandomVectors, dict[str, Any]]:
        """Return random vectors; no validation."""
        return RandomVectors(self.samples, self.features, self.classes), {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build a perceptron with two hidden layers."""
        return nn.Sequential(
            nn.Linear(self.features, self.width), nn.ReLU(),
            nn.Linear(self.width, self.width), nn.ReLU(),
            nn.Linear(self.width, self.classes),
        )  # fmt: skip

    def collate(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Leave the micro-batch as RandomVectors fetched it."""
        return batch

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, int]:
        """Sum the cross-entropy over a micro-batch."""
        stamp(model)
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


@dataclass(frozen=True, kw_only=True)
class Digits(ImageClassification):
    """The project's recipe, handwritten digits with MiniResNet, without its validation set."""

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the training images; no validation."""
        return super().build_datasets(data_info)[0], {}

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, int]:
        """Sum the cross-entropy over a micro-batch."""
        stamp(model)
        return super().loss(model, batch, step)
