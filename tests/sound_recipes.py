"""Correct recipes that a check might report by mistake; for faults.py --sound."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ragged import Ragged
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

# B: samples in a micro-batch, T: positions, as in ragged.py


class Sound(Ragged):
    """Has the mean loss as its only metric."""

    build_metrics = update_metrics = predict = None  # type: ignore[assignment]


class Vae(Sound):
    def build_model(self, data_info: Any) -> nn.Module:
        return nn.ModuleDict({"encoder": nn.Linear(6, 4), "decoder": nn.Linear(2, 6)})

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        x = batch["x"][:, 0]  # (B, 6)
        mean, log_variance = model["encoder"](x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        return ((model["decoder"](code) - x) ** 2).sum() + divergence, len(x)


class Ddpm(Sound):
    def build_model(self, data_info: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 6))

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        x = batch["x"][:, 0]
        time, noise = torch.rand(len(x), 1, device=x.device), torch.randn_like(x)
        noisy = time.cos() * x + time.sin() * noise
        return ((model(torch.cat([noisy, time], 1)) - noise) ** 2).mean(1).sum(), len(x)


class Translation(Sound):
    """A sequence-to-sequence model with dropout; only tokens that are not padding count."""

    def build_model(self, data_info: Any) -> nn.Module:
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path does not support autocast
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 16}
        transformer = nn.Transformer(8, 2, **sizes, dropout=0.1, batch_first=True)
        parts = {"tokens": nn.Embedding(32, 8), "body": transformer, "head": nn.Linear(8, 32)}
        return nn.ModuleDict(parts)

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        tokens, padding = (batch["x"][..., 0].abs() * 9).long() % 32, batch["counts"] == 0
        source, target = model["tokens"](tokens), model["tokens"](tokens.roll(1, 1))
        mask = nn.Transformer.generate_square_subsequent_mask(9) < 0
        decoded = model["body"](source, target, tgt_mask=mask, src_key_padding_mask=padding)
        losses = F.cross_entropy(model["head"](decoded).transpose(1, 2), tokens, reduction="none")
        return (losses * batch["counts"]).sum(), batch["counts"].sum()


class Detection(Sound):
    """A batch is a list of dicts with different numbers of boxes."""

    def collate(self, samples: Any) -> Any:
        counts = [int(item["counts"].sum()) for item in samples]
        pairs = zip(samples, counts, strict=True)
        return [{"image": item["x"][0], "boxes": item["x"][:count, :4]} for item, count in pairs]

    def build_model(self, data_info: Any) -> nn.Module:
        return nn.Linear(6, 4)

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        errors = [(model(sample["image"]) - sample["boxes"]).abs().sum() for sample in batch]
        return torch.stack(errors).sum(), sum(len(sample["boxes"]) for sample in batch)


class Contrastive(Sound):
    compares_samples = True

    def build_model(self, data_info: Any) -> nn.Module:
        return nn.Linear(6, 8)

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        first, second = (F.normalize(model(batch["x"][:, i]), dim=1) for i in (0, 1))
        labels = torch.arange(len(first), device=first.device)
        return F.cross_entropy(first @ second.T / 0.1, labels, reduction="sum"), len(first)


class Paths(Ragged):
    """Samples contain file paths, whose folder differs between ranks, as on separate nodes."""

    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        return Named(train, f"cache_{os.environ.get('RANK', '0')}"), validation


class Named(torch.utils.data.Dataset):
    def __init__(self, samples: Any, folder: str) -> None:
        self.samples = samples
        self.folder = Path.cwd() / folder

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] | {"path": str(self.folder / f"{index}.png")}


class Taught(Ragged):
    """A mean teacher inside the model, and a layer whose buffers the forward pass changes."""

    def build_model(self, data_info: Any) -> nn.Module:
        model: Any = super().build_model(data_info)
        model[0] = spectral_norm(model[0])
        model[-1].register_buffer("teacher", model[-1].weight.detach().clone())
        model[-1].register_buffer("at", torch.tensor(-1))
        return model

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        loss_sum, items = super().loss(model, batch, step)
        head = model[-1]
        if model.training and head.at != step:
            head.at.fill_(step)
            head.teacher.lerp_(head.weight.detach(), 0.1)
        return loss_sum + ((head.weight - head.teacher) ** 2).sum() * items, items


@dataclass(frozen=True, kw_only=True)
class Frozen(Ragged):
    """A layer that is not trained, and BatchNorm."""

    batch_norm: bool = True

    def build_model(self, data_info: Any) -> nn.Module:
        model: Any = super().build_model(data_info)
        model[-1].requires_grad_(False)
        return model
