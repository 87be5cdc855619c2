"""What an expert writes by hand for one task: plain PyTorch, and only what the task needs."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import stamp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Order:
    """A permutation per epoch; micro-batch j of rank r is slice j * world + r of a global batch."""

    def __init__(
        self, samples: int, micro: int, accumulation: int, steps: int, rank: int, world: int,
        order_seed: Callable[[int], int], with_epoch: bool,
    ) -> None:  # fmt: skip
        self.samples, self.micro, self.accumulation, self.steps = (
            samples,
            micro,
            accumulation,
            steps,
        )
        self.rank, self.world = rank, world
        self.order_seed, self.with_epoch = order_seed, with_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        global_batch = self.micro * self.world * self.accumulation
        step, epoch = 0, 0
        while True:
            generator = torch.Generator().manual_seed(self.order_seed(epoch))
            order = torch.randperm(self.samples, generator=generator).tolist()
            for batch in range(0, self.samples - global_batch + 1, global_batch):
                for j in range(self.accumulation):
                    start = batch + (j * self.world + self.rank) * self.micro
                    indices = order[start : start + self.micro]
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
    world: int,
) -> None:
    """Train the model in place. The process group is there already."""
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
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else None
    call = ddp or model
    running = torch.zeros((), device=device)
    started = time.perf_counter()
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
                    stamp(model)
                    loss = F.cross_entropy(call(x), y) / accumulation  # all weights are equal
                    loss.backward()
                running += loss.detach()
            norm = nn.utils.clip_grad_norm_(params, clip_norm)
            optimizer.step()
            optimizer.zero_grad()

            if (step + 1) % log_every == 0:
                if world > 1:
                    dist.all_reduce(running)
                now = time.perf_counter()
                record = {
                    "step": step + 1,
                    "loss": running.item() / (log_every * world),
                    "learning_rate": rate,
                    "gradient_norm": norm.item(),
                    "samples_per_second": log_every * samples_per_step / (now - started),
                }
                running.zero_()
                started = now
                if rank == 0:
                    print(json.dumps(record), file=log, flush=True)
                    print(" ".join(f"{name} {value:.4g}" for name, value in record.items()))


def identity(batch: Any) -> Any:
    """Leave a micro-batch that was fetched whole as it is."""
    return batch
