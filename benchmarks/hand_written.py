"""A training loop in plain PyTorch, as an expert writes it for one task and no other."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import record_start
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Sampler:
    """A permutation per epoch; micro-batch j of rank r is slice j * world_size + r of a batch."""

    def __init__(
        self,
        *,
        samples: int,
        micro_batch_size: int,
        accumulation: int,
        steps: int,
        rank: int,
        world_size: int,
        epoch_seed: Callable[[int], int],
        with_epoch: bool,
    ) -> None:
        self.samples = samples
        self.micro_batch_size = micro_batch_size
        self.accumulation = accumulation
        self.steps = steps
        self.rank = rank
        self.world_size = world_size
        self.epoch_seed = epoch_seed
        self.with_epoch = with_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        global_batch_size = self.micro_batch_size * self.world_size * self.accumulation
        step, epoch = 0, 0
        while True:
            generator = torch.Generator().manual_seed(self.epoch_seed(epoch))
            order = torch.randperm(self.samples, generator=generator).tolist()
            for batch_start in range(0, self.samples - global_batch_size + 1, global_batch_size):
                for j in range(self.accumulation):
                    slice_index = j * self.world_size + self.rank
                    start = batch_start + slice_index * self.micro_batch_size
                    indices = order[start : start + self.micro_batch_size]
                    yield [(epoch, i) for i in indices] if self.with_epoch else indices
                step += 1
                if step == self.steps:
                    return
            epoch += 1


def train(
    model: nn.Module,
    loader: DataLoader,
    *,
    steps: int,
    accumulation: int,
    samples_per_step: int,
    lr: float,
    weight_decay: float,
    warmup_steps: int,
    clip_norm: float,
    log_every: int,
    log_path: Path,
    device: torch.device,
    rank: int,
    world_size: int,
) -> None:
    """Train the model in place; the process group must be initialized."""
    model.to(device).train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        fused=True,
    )
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else None
    wrapped = ddp or model
    loss_sum = torch.zeros((), device=device)
    interval_start = time.perf_counter()
    batches = iter(loader)
    with log_path.open("w") as log:
        for step in range(steps):
            if step < warmup_steps:
                rate = lr * (step + 1) / warmup_steps
            else:
                progress = (step - warmup_steps) / (steps - warmup_steps)
                rate = lr * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for j in range(accumulation):
                x, y = next(batches)
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                is_last = j == accumulation - 1
                with nullcontext() if ddp is None or is_last else ddp.no_sync():
                    record_start(model)
                    loss = (
                        F.cross_entropy(wrapped(x), y) / accumulation
                    )  # micro-batches of equal size
                    loss.backward()
                loss_sum += loss.detach()
            norm = nn.utils.clip_grad_norm_(params, clip_norm)
            optimizer.step()
            optimizer.zero_grad()

            if (step + 1) % log_every == 0:
                if world_size > 1:
                    dist.all_reduce(loss_sum)
                now = time.perf_counter()
                record = {
                    "step": step + 1,
                    "loss": loss_sum.item() / (log_every * world_size),
                    "learning_rate": rate,
                    "gradient_norm": norm.item(),
                    "samples_per_second": log_every * samples_per_step / (now - interval_start),
                }
                loss_sum.zero_()
                interval_start = now
                if rank == 0:
                    print(json.dumps(record), file=log, flush=True)
                    print(" ".join(f"{name} {value:.4g}" for name, value in record.items()))


def identity(batch: Any) -> Any:
    """Return a micro-batch that was read whole as it is."""
    return batch
