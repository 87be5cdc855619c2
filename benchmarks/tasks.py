"""The recipes that all loops train, written as a user writes one: plain datasets, no collate.

In addition to the methods of a recipe they have `mean_loss`, which all loops but the project's
call.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from my_project.recipes.causal_lm import GPT
from my_project.recipes.image_classification import ImageClassification
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# B: samples in a micro-batch, T: tokens in a sequence, V: vocabulary size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every loop."""

    recipe: Any  # an instance of a class of this module
    steps: int
    processes: int
    micro_batch_size: int
    accumulation: int
    precision: str  # no or bf16
    compile: str  # no, whole, or regional: block by block
    folder: Path  # for the loop's logs
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup_steps: int = 30
    clip_norm: float = 1.0
    log_every: int = 10  # steps
    seed: int = 0


class OwnDataset(TensorDataset):
    """A dataset of its own class, which is read sample by sample."""


@dataclass(frozen=True, kw_only=True)
class TinyMlp:
    """Random vectors for a model so small that the loop itself takes nearly all of a step."""

    features: int = 64
    width: int = 128
    classes: int = 10
    samples: int = 8192
    own_class: bool = False  # use OwnDataset, whose __getitem__ the loop does not know

    def prepare_data(self) -> dict[str, Any]:
        """Return no data_info; the data is random."""
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[TensorDataset, dict[str, Any]]:
        """Return random vectors and labels for training, and no validation set."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, self.features, generator=generator)
        y = torch.randint(self.classes, (self.samples,), generator=generator)
        return (OwnDataset if self.own_class else TensorDataset)(x, y), {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build an MLP with two hidden layers."""
        return nn.Sequential(
            nn.Linear(self.features, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.classes),
        )

    def loss(self, model: nn.Module, batch: list[Tensor], step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of a micro-batch, and its number of samples."""
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def mean_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy of a micro-batch."""
        x, y = batch
        return F.cross_entropy(model(x), y)


@dataclass(frozen=True, kw_only=True)
class Digits(ImageClassification):
    """The recipe image_classification (handwritten digits, MiniResNet) without validation."""

    width: int = 16  # as in the recipe's config

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the training images, and no validation set."""
        return super().build_datasets(data_info)[0], {}

    def mean_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy of a micro-batch."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Random tokens for the GPT of the recipe causal_lm; by default 0.9 M parameters."""

    vocabulary: int = 257
    sequence_length: int = 128
    width: int = 128
    depth: int = 4
    heads: int = 4
    activation: str = "swiglu"
    samples: int = 2048

    def prepare_data(self) -> dict[str, Any]:
        """Return no data_info; the data is random."""
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[TensorDataset, dict[str, Any]]:
        """Return random sequences (T + 1) for training, and no validation set."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.samples, self.sequence_length + 1)
        return TensorDataset(torch.randint(self.vocabulary, shape, generator=generator)), {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the GPT."""
        return GPT(self.vocabulary, self.width, self.depth, self.heads, self.activation, 0.0)

    def loss(self, model: nn.Module, batch: list[Tensor], step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of the next tokens, and their number."""
        return self._loss(model, batch, "sum"), batch[0][:, 1:].numel()

    def mean_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        return self._loss(model, batch, "mean")

    def _loss(self, model: nn.Module, batch: list[Tensor], reduction: str) -> Tensor:
        (tokens,) = batch  # (B, T + 1)
        logits = model(tokens[:, :-1])  # (B, T, V)
        labels = tokens[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction=reduction)
