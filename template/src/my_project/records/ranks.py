"""What differs between ranks: one small gather per record, read one step later."""

import math
import resource
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from ..step_sums import HostCopy


@dataclass(kw_only=True)
class RankReport:
    """What a rank reports of an interval; NaN for what it does not know."""

    rank_seconds: float  # per step: data wait and forward pass
    data_seconds: float  # per step
    peak_memory_bytes: float
    gpu_utilization: float  # percent


class Gather:
    """The reports of all ranks, on their way."""

    def __init__(self, report: RankReport, world_size: int, device: torch.device) -> None:
        """Start to gather; on a GPU nothing waits for the device."""
        everywhere = torch.tensor([[*vars(report).values()]])
        self.work: Any = None
        if world_size > 1:
            if device.type == "cuda":  # else the copy to the device would wait for it
                self.mine = everywhere = everywhere.pin_memory()
            mine = everywhere.to(device, non_blocking=True)
            everywhere = mine.new_empty(world_size, mine.shape[1])
            self.work = torch.distributed.all_gather_into_tensor(everywhere, mine, async_op=True)
            if device.type == "cuda":
                self.work.wait()  # blocks the CUDA stream, not the host
                self.work = None
        self.copy = HostCopy(everywhere)

    def read(self) -> list[RankReport]:
        """Wait for the reports, and return them by rank."""
        if self.work:
            self.work.wait()
        names = RankReport.__dataclass_fields__
        return [
            RankReport(**dict(zip(names, values, strict=True))) for values in self.copy.tolist()
        ]


def summarize(reports: list[RankReport], hosts: list[str]) -> dict[str, Any]:
    """Return the fields of a record that tell of all ranks; those that nobody knows are left out.

    Args:
        reports: by rank.
        hosts: by rank.
    """
    fields: dict[str, Any] = {}
    for name in ("rank_seconds", "data_seconds"):
        values = [getattr(report, name) for report in reports]
        fields[f"{name}_min"] = min(values)
        fields[f"{name}_median"] = statistics.median(values)
        fields[f"{name}_max"] = max(values)
    slowest = max(range(len(reports)), key=lambda rank: reports[rank].rank_seconds)
    fields["slowest_rank"] = slowest
    fields["slowest_host"] = hosts[slowest] if slowest < len(hosts) else None
    for name, combine in {
        "peak_memory_bytes": lambda values: int(max(values)),
        "gpu_utilization": statistics.fmean,
    }.items():
        known = [value for r in reports if not math.isnan(value := getattr(r, name))]
        if known:
            fields[name] = combine(known)
    return fields


def gpu_utilization(device: torch.device) -> float:
    """Return the percentage of the last moments in which a kernel ran; NaN where not known."""
    try:
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else math.nan
    except Exception:  # no NVML, a part of a GPU (MIG), or one that has fallen off the bus
        return math.nan


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
