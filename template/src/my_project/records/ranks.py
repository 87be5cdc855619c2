"""What differs between ranks: one small gather per record, read one step later; stragglers."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from ..step_sums import HostCopy

SLOW_FACTOR = 1.3  # times the median of the other ranks
SLOW_SECONDS = 0.002  # and so much longer per step
SLOW_RECORDS = 3  # in a row
# the others may wait for a rank in the forward pass, so the data wait counts by itself too
CAUSES = {"data_seconds": "data wait", "rank_seconds": "forward pass"}


@dataclass(kw_only=True)
class RankReport:
    """What a rank reports of an interval; NaN for what it does not know."""

    rank_seconds: float  # per step: data wait and forward pass
    data_seconds: float  # per step
    peak_memory_bytes: float
    allocator_retries: float
    gpu_utilization: float  # percent
    gpu_temperature: float  # degrees Celsius
    gpu_power_watts: float


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
        "peak_memory_bytes": max,
        "allocator_retries": sum,
        "gpu_utilization": statistics.fmean,
        "gpu_temperature": max,
        "gpu_power_watts": statistics.fmean,
    }.items():
        known = [value for r in reports if not math.isnan(value := getattr(r, name))]
        if known:
            fields[name] = combine(known)
    for name in ("peak_memory_bytes", "allocator_retries"):
        if name in fields:
            fields[name] = int(fields[name])
    return fields


class Stragglers:
    """Finds a rank that stays slower than the others over several records."""

    def __init__(self) -> None:
        self.slow_records: dict[int, int] = {}  # by rank: in how many records in a row

    def observe(self, reports: list[RankReport]) -> list[dict[str, Any]]:
        """Return what is recorded of each rank that has become a straggler with these reports."""
        found = []
        # sorted once: a median of the others for each rank would be of the order of N^2
        by_size = {name: sorted(getattr(report, name) for report in reports) for name in CAUSES}
        for rank, report in enumerate(reports if len(reports) > 1 else ()):
            slow = slowness(report, by_size)
            self.slow_records[rank] = self.slow_records.get(rank, 0) + 1 if slow else 0
            if self.slow_records[rank] == SLOW_RECORDS:
                found.append({"rank": rank} | slow)
        return found


def slowness(report: RankReport, by_size: dict[str, list[float]]) -> dict[str, Any]:
    """Return in what a rank is far slower than the median of the others; {} if it is not.

    Args:
        report: of the rank.
        by_size: for each of CAUSES the values of all ranks, this one included, in rising order.
    """
    for name, cause in CAUSES.items():
        own = getattr(report, name)
        values = by_size[name]
        # the higher median of the others: a rank above it has no part in the values before
        usual = values[(len(values) - 1) // 2]
        if own > SLOW_FACTOR * usual and own > usual + SLOW_SECONDS:
            return {"seconds": own, "median": usual, "cause": cause}
    return {}
