"""A training loop in plain PyTorch, as an expert writes it for a single task."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from my_project.loading.seeding import permutation
from tasks import Settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter


class Sampler:
    """A permutation per epoch; micro-batch j of rank r is slice j * world_size + r of a batch."""

    def __init__(self, settings: Settings, samples: int, rank: int, world_size: int) -> None:
        self.settings = settings
        self.samples = samples
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[list[int]]:
        size, accumulation = self.settings.micro_batch_size, self.settings.accumulation
        global_batch_size = size * self.world_size * accumulation
        epoch = 0
        while True:
            # the same order as in the project
            shuffled = permutation(self.samples, self.settings.seed, epoch)
            order = shuffled(np.arange(self.samples)).tolist()
            for batch_start in range(0, self.samples - global_batch_size + 1, global_batch_size):
                for j in range(accumulation):
                    start = batch_start + (j * self.world_size + self.rank) * size
                    yield order[start : start + size]
            epoch += 1


def train(settings: Settings) -> None:
    """Train to the end, on the process group and devices that the environment specifies."""
    rank, world_size = int(os.environ.get("RANK", "0")), settings.processes
    on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    if not on_cpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("gloo" if on_cpu else "nccl")
    torch.set_float32_matmul_precision("high")
    recipe, accumulation, steps = settings.recipe, settings.accumulation, settings.steps
    data_info = recipe.prepare_data()
    data = recipe.build_datasets(data_info)[0]
    sampler: Any = Sampler(settings, len(data), rank, world_size)
    batches = iter(DataLoader(data, batch_sampler=sampler, pin_memory=not on_cpu))

    torch.manual_seed(settings.seed)
    model: nn.Module = recipe.build_model(data_info).to(device).train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        fused=True,
    )
    if settings.compile == "regional":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else None
    wrapped: Any = ddp or model
    if settings.compile == "whole":
        wrapped = torch.compile(wrapped)
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    samples_per_step = settings.micro_batch_size * world_size * accumulation
    loss_sum = torch.zeros((), device=device)
    interval_start = time.perf_counter()
    with SummaryWriter(settings.folder / "tensorboard") if rank == 0 else nullcontext() as log:
        for step in range(steps):
            if step < settings.warmup_steps:
                rate = settings.lr * (step + 1) / settings.warmup_steps
            else:
                progress = (step - settings.warmup_steps) / (steps - settings.warmup_steps)
                rate = settings.lr * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for j in range(accumulation):
                batch = [part.to(device, non_blocking=True) for part in next(batches)]
                is_last = j == accumulation - 1
                with nullcontext() if ddp is None or is_last else ddp.no_sync():
                    with bf16:
                        loss = recipe.mean_loss(wrapped, batch)
                    (loss / accumulation).backward()  # micro-batches of equal size
                loss_sum += loss.detach()
            norm = nn.utils.clip_grad_norm_(params, settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()

            if (step + 1) % settings.log_every == 0:
                if world_size > 1:
                    dist.all_reduce(loss_sum)
                now = time.perf_counter()
                record = {
                    "loss": loss_sum.item() / (settings.log_every * accumulation * world_size),
                    "learning_rate": rate,
                    "gradient_norm": norm.item(),
                    "samples_per_second": settings.log_every
                    * samples_per_step
                    / (now - interval_start),
                }
                loss_sum.zero_()
                interval_start = now
                if log:
                    for name, value in record.items():
                        log.add_scalar(name, value, step + 1)
                    print(step + 1, *(f"{name} {value:.4g}" for name, value in record.items()))
    if world_size > 1:
        dist.destroy_process_group()
