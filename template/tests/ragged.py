"""A recipe for tests: samples of unequal length, so that averaging micro-batch means is wrong."""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# B: samples in a micro-batch, T: positions in a sample, of which the first `length` have a target
QUIET = {"changes_curve": False}  # a run that met a fault may continue without it


@dataclass(frozen=True, kw_only=True)
class Ragged:
    samples: int = 70
    validation_samples: int = 23
    dtype: str = "float32"
    dropout: float = 0.0
    noise: float = 0.0  # standard deviation of random numbers that are drawn when a sample is read
    explode_at: tuple[int, ...] = ()  # steps whose loss is not finite
    empty_at: tuple[int, ...] = ()  # steps with num_items 0
    fault: str = field(default="", metadata=QUIET)  # a fault of strike(), or nan
    fault_in: str = field(default="loss", metadata=QUIET)  # the method that meets the fault
    fault_at: int = field(default=-1, metadata=QUIET)  # its step, for methods that get the step
    fault_on_rank: int = field(default=1, metadata=QUIET)
    bad_sample: int = -1  # index of a sample that cannot be read, or causes the fault
    seconds: float = 0.0  # added to the time of each micro-batch
    slow_rank: int = -1  # the only rank whose micro-batches take longer; -1: all
    unused_parameter: bool = False
    batch_norm: bool = False

    def meets_fault(self, method: str, step: int | None = None) -> bool:
        rank = int(os.environ.get("RANK", "0"))
        is_here = (method, rank) == (self.fault_in, self.fault_on_rank)
        return is_here and step in (None, self.fault_at)

    def strike(self, method: str, step: int | None = None) -> None:
        """Cause the fault, if this is its place."""
        if self.meets_fault(method, step):
            strike(self.fault)

    def prepare_data(self) -> dict[str, Any]:
        self.strike("prepare_data")
        return {"features": 6}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.strike("build_datasets")
        train = Samples(self.samples, data_info["features"], self.dtype, 1, self.noise)
        train.bad_sample, train.fault = self.bad_sample, self.fault
        if self.validation_samples == 0:
            return train, {}
        validation = Samples(self.validation_samples, data_info["features"], self.dtype, 2, 0.0)
        return train, {"validation": validation}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        self.strike("build_model")
        layers: list[nn.Module] = [nn.Linear(data_info["features"], 8)]
        if self.batch_norm:
            layers.append(Norm(8))
        model = nn.Sequential(*layers, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))
        if self.unused_parameter:
            model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
        return model.to(getattr(torch, self.dtype))

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        self.strike("loss", step)
        if self.slow_rank in (-1, int(os.environ.get("RANK", "0"))):
            time.sleep(self.seconds)
        counts = batch["counts"]  # (B, T)
        if step in self.empty_at:
            counts = torch.zeros_like(counts)
        error = (model(batch["x"])[..., 0] - batch["y"]) ** 2 * counts
        loss_sum = error.sum()
        if step in self.explode_at:
            loss_sum = loss_sum * float("inf")
        if self.fault == "nan" and self.meets_fault("loss", step):
            loss_sum = loss_sum * float("nan")
        return loss_sum, counts.sum()

    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

        self.strike("build_metrics")
        # the state of BinaryAUROC is a list of tensors
        return {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()}

    def update_metrics(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        self.strike("update_metrics")
        score = model(batch["x"])[:, 0, 0].sigmoid()
        for metric in metrics.values():
            metric.update(score, batch["label"])

    def predict(self, model: nn.Module, data_info: dict[str, Any], argument: str) -> str:
        x = torch.full(
            (1, 1, data_info["features"]), float(argument), dtype=next(model.parameters()).dtype
        )
        return f"{model(x).item():.6f}"


@dataclass(frozen=True, kw_only=True)
class Noting(Ragged):
    """Records scalars of the training; one of them is 2 by definition."""

    misnames: str = ""  # the name of a scalar differs between "steps" or "ranks", or is "loss"

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> Any:
        loss_sum, num_items = super().loss(model, batch, step)
        names = {"steps": f"at {step}", "ranks": f"of {os.environ.get('RANK')}", "loss": "loss"}
        name = names.get(self.misnames, "root")
        return loss_sum, num_items, {name: loss_sum.sqrt(), "twice": 2 * num_items.item()}


class Block(nn.Module):
    """A block that FSDP gathers, with one buffer that checkpoints contain and one they do not."""

    gain: Tensor
    shift: Tensor

    def __init__(self, width: int, draws: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.register_buffer("gain", torch.linspace(0.5, 1.0, width))
        shift = torch.rand(width) if draws else torch.linspace(0.0, 1.0, width)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * self.gain + self.shift


class Tower(nn.Module):
    """Blocks between an input and an output layer that share a weight, and a frozen layer."""

    def __init__(self, features: int, width: int, blocks: int, draws: bool = False) -> None:
        super().__init__()
        self.input = nn.Linear(features, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, draws) for _ in range(blocks))
        self.output = nn.Linear(features, width, bias=False)
        self.output.weight = self.input.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.input(x))
        for block in self.blocks:
            x = block(x)
        return (x @ self.output.weight).sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Deep(Ragged):
    """The samples of Ragged, for a model of blocks."""

    width: int = 8
    blocks: int = 2
    draws: bool = False  # draw the buffers that checkpoints do not contain

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model = Tower(data_info["features"], self.width, self.blocks, self.draws)
        return model.to(getattr(torch, self.dtype))


def strike(fault: str) -> None:
    if fault == "raise":
        raise ValueError("this rank was told to fail")
    if fault == "out_of_memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if fault == "device_error":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if fault == "exit":
        sys.exit(0)
    if fault in ("leave", "preempt"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "leave" else signal.SIGTERM)
    while fault == "hang":
        time.sleep(1)


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class Samples(torch.utils.data.Dataset):
    def __init__(self, length: int, features: int, dtype: str, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 9, features, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(-1)
        lengths = torch.randint(1, 10, (length, 1), generator=generator)
        self.counts = (torch.arange(9)[None] < lengths).to(torch.float64)
        self.dtype = getattr(torch, dtype)
        self.noise = noise
        self.bad_sample, self.fault = -1, ""

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.bad_sample:
            strike(self.fault)
            raise ValueError(f"sample {index} cannot be read")
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.randn(x.shape, dtype=torch.float64)
        return {
            "x": x.to(self.dtype),
            "y": self.y[index].to(self.dtype),
            "counts": self.counts[index].to(self.dtype),
            "label": (self.y[index, 0] > 0).long(),
            "index": torch.tensor(index),
        }
