"""A small MLP, trained by a plain PyTorch script for torchrun or as a recipe; for start.py.

Both call `note` at the beginning of each step; `note` writes what the process has used so far.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 20
MICRO_BATCH_SIZE = 32
LR = 1e-3


def build_data() -> torch.utils.data.TensorDataset:
    """Return random vectors (8192, 64) and labels (8192,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 64, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(10, (8192,), generator=generator))


def build_mlp() -> nn.Module:
    """Build an MLP with two hidden layers."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def note(step: int) -> None:
    """Write time, CPU time and memory to a file, when step 1 and the last step begin."""
    if step not in (1, STEPS - 1):
        return
    used: dict[str, Any] = {"time": time.time(), "cpu_seconds": time.process_time()}
    stat = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = sum(map(int, stat[11:15]))  # CPU time: the launcher, and its children that have ended
    used["launcher_cpu_seconds"] = ticks / os.sysconf("SC_CLK_TCK")
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon"):
            used[name] = int(rest.split()[0]) / 1000  # MB
    path = Path(os.environ["START_FOLDER"]) / f"{step}_{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(used), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The recipe."""

    def prepare_data(self) -> dict[str, Any]:
        """Return no data_info; the data is random."""
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return random vectors for training, and no validation set."""
        return build_data(), {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        """Build the MLP."""
        return build_mlp()

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, int]:
        """Return the summed cross-entropy of a micro-batch, and its number of samples."""
        note(step)
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def main() -> None:
    """Train as a plain script does: DDP, fused AdamW, clipping, a cosine schedule, a JSON log."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    data = build_data()
    sampler = torch.utils.data.DistributedSampler(data, seed=0, drop_last=True)
    loader = torch.utils.data.DataLoader(data, MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)
    model = nn.parallel.DistributedDataParallel(build_mlp(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    with (Path(os.environ["START_FOLDER"]) / f"log_{rank}.jsonl").open("w") as log:
        for step, (x, y) in zip(range(STEPS), loader, strict=False):
            note(step)
            rate = LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                torch.distributed.all_reduce(loss.detach())
                record = {"step": step + 1, "loss": loss.item(), "gradient_norm": norm.item()}
                print(json.dumps(record), file=log, flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
