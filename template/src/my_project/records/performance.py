"""Measure how fast a run is: speed and MFU, and what ranks differ in."""

import math
import re
import resource
import statistics
import sys
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import blocks, parallel
from ..config import Config
from ..contract import RecipeModule
from ..loading.layout import BatchLayout
from ..recipe import optional
from ..step_sums import HostCopy

# ---- speed ---------------------------------------------------------------------------------------
# Peak TFLOP/s of a device without sparsity, from the makers' data sheets: 16 bit (bf16; fp16 where
# there is no bf16), TF32, float32. The first that stands in the device's name as a word decides.
PEAK_TFLOPS = {
    "B200": (2250, 1125, 75),
    "GB200": (2500, 1250, 80),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "H100": (989, 494, 67),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "GH200": (989, 494, 67),
    "H20": (148, 74, 44),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "A10": (125, 62.5, 31.2),
    "A40": (149.7, 74.8, 37.4),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "V100-SXM2": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
    "MI300X": (1307, 653, 163),
    "MI325X": (1307, 653, 163),
    "MI355X": (2517, 157, 157),  # TF32 runs as float32
}


def peak_tflops(device: Any, precision: str, *, tf32: bool) -> float | None:
    """Return the peak TFLOP/s of a GPU by its name; None for one that is not known.

    Args:
        device: a torch.device.
        precision: no, bf16 or fp16.
        tf32: whether float32 matrix products may use TF32.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(MIG|Laptop|Max-Q|D|Ti)\b", name):  # parts and other editions of a GPU
        return None
    for part, peaks in PEAK_TFLOPS.items():
        if re.search(rf"(?<![\w-]){part}(?!\w)", name):
            return peaks[0 if precision != "no" else 1 if tf32 else 2]
    return None


class Throughput:
    """How fast an interval was: in samples, in items of the loss, and of the device's peak."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        layout: BatchLayout,
        model: Any,
    ) -> None:
        """Ask the recipe for the FLOPs of an item (flops_per_item).

        Args:
            accelerator: this process's Accelerator.
            config: the run's config.
            layout: the global batch's division.
            model: prepared.
        """
        self.layout = layout
        self.steps = 0  # since this process started
        self.seconds = 0.0  # of these steps, without evaluations and saves
        self.peak_tflops = config.telemetry.peak_tflops or peak_tflops(
            accelerator.device, accelerator.mixed_precision, tf32=config.tf32
        )
        self.flops_per_sample = self.flops_per_item = 0.0  # one of them is known, or none
        if flops_per_item := optional(config.recipe, "flops_per_item"):
            wrapped = next(m for m in model.modules() if isinstance(m, RecipeModule))
            self.flops_per_item = float(flops_per_item(wrapped.model))
        # compiled kernels are no operators that are counted, and recomputed ones would count twice
        cannot_count = parallel.is_compiled(model) or blocks.are_recomputed(model)
        self.is_counted = not self.peak_tflops or bool(self.flops_per_item) or cannot_count
        self.counter: Any = None

    def begin_counting(self) -> None:
        """Count the FLOPs of what follows: the first micro-batch, forward and backward."""
        from torch.utils.flop_counter import FlopCounterMode

        self.is_counted = True
        self.hook = register_optimizer_step_pre_hook(lambda *_: self.end_counting())
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def end_counting(self) -> None:
        """End the count, if there is one."""
        if self.counter is not None:
            self.hook.remove()
            self.counter.__exit__(None, None, None)
            flops = self.counter.get_total_flops()
            self.flops_per_sample = flops / self.layout.micro_batch_size
            self.counter = None

    def add(self, steps: int, items: float, seconds: float) -> dict[str, float]:
        """Count the steps of an interval; return the fields of its record."""
        self.steps += steps
        self.seconds += seconds
        samples = steps * self.layout.global_batch_size
        fields = {
            "samples_per_second": samples / seconds,
            "items_per_second": items / seconds,
            "step_seconds": seconds / steps,
        }
        flops = items * self.flops_per_item + samples * self.flops_per_sample
        if self.peak_tflops and flops:
            fields["mfu"] = flops / seconds / (self.peak_tflops * 1e12 * self.layout.world_size)
        return fields

    def of_run(self) -> dict[str, float]:
        """Return the samples per second since this process started; {} before the first record."""
        samples = self.steps * self.layout.global_batch_size
        return {"samples per second": samples / self.seconds} if self.steps else {}


# ---- all ranks -----------------------------------------------------------------------------------
class RankReports:
    """What all ranks report of an interval, on its way to each of them."""

    def __init__(
        self, own_seconds: float, data_seconds: float, world_size: int, device: torch.device
    ) -> None:
        """Start to gather; on a GPU nothing waits for the device.

        Args:
            own_seconds: of this rank, per step, until it needs the other ranks.
            data_seconds: of these, the wait for data.
            world_size: the number of ranks.
            device: of this rank.
        """
        sensors = peak_memory_bytes(device), gpu_utilization(device)
        is_cuda = device.type == "cuda"  # a copy from memory that is not pinned would wait for it
        everywhere = torch.tensor([[own_seconds, data_seconds, *sensors]], pin_memory=is_cuda)
        self.work: Any = None
        if world_size > 1:
            mine = everywhere.to(device, non_blocking=True)
            everywhere = mine.new_empty(world_size, mine.shape[1])
            self.work = torch.distributed.all_gather_into_tensor(everywhere, mine, async_op=True)
            if is_cuda:
                self.work.wait()  # blocks the CUDA stream, not the host
        self.copy = HostCopy(everywhere)

    def summarize(self, hosts: list[str]) -> dict[str, Any]:
        """Wait for the reports; return the fields of a record that tell of all ranks.

        Args:
            hosts: by rank.
        """
        if self.work:
            self.work.wait()
        rank_seconds, data_seconds, memory, utilization = zip(*self.copy.tolist(), strict=True)
        fields: dict[str, Any] = {}
        for name, seconds in (("rank_seconds", rank_seconds), ("data_seconds", data_seconds)):
            fields[f"{name}_min"] = min(seconds)
            fields[f"{name}_median"] = statistics.median(seconds)
            fields[f"{name}_max"] = max(seconds)
        slowest = rank_seconds.index(max(rank_seconds))
        fields["slowest_rank"] = slowest
        fields["slowest_host"] = hosts[slowest]
        fields["peak_memory_bytes"] = int(max(memory))
        if known := [value for value in utilization if not math.isnan(value)]:
            fields["gpu_utilization"] = statistics.fmean(known)
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
