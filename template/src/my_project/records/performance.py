"""Measure how fast a run is: its speed and MFU, and how its ranks differ."""

import math
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..blocks import blocks_are_recomputed
from ..config import Config
from ..contract import RecipeModule
from ..loading.layout import BatchLayout
from ..parallel import is_compiled
from ..recipe import Batch, optional
from ..run_files import Record
from ..run_folder import Run
from ..state import StepReport
from ..step_sums import HostCopy

PAUSES = ("evaluation", "saving")


class Performance:
    """Measure speed, pauses, waits for data and differences between ranks, for each interval."""

    def __init__(
        self, run: Run, accelerator: Accelerator, layout: BatchLayout, model: nn.Module
    ) -> None:
        """Begin the first interval.

        Args:
            run: the run folder.
            accelerator: this process's Accelerator.
            layout: the division of the global batch.
            model: the prepared model.
        """
        self.run = run
        self.layout = layout
        self.device = accelerator.device
        self.is_main = accelerator.is_main_process
        self.is_compiled = is_compiled(model)
        is_recomputed = False
        is_recomputed |= blocks_are_recomputed(model)
        # set by transformers' gradient_checkpointing_enable
        is_recomputed |= any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        self.throughput = Throughput(accelerator, run.config, layout, model)
        # as if they were counted already: compiled kernels are not operators, which are what is
        # counted, and recomputed operators would count twice
        self.throughput.is_counted |= self.is_compiled or is_recomputed
        # by step: when it ended, and how long it waited for data; only for steps that are not
        # observed yet, since the numbers of a step come one step later
        self.ended: dict[int, tuple[float, float]] = {}
        self.data_seconds = 0.0  # how long the current step has waited for data
        self.reports: RankReports  # on the newest interval that has ended
        self.clock = time.perf_counter()  # when the interval's last observed step or pause ended
        self._begin_interval()

    def write(self, record: Record) -> None:
        """Begin the first interval at the record "start": trackers may take seconds before that."""
        if record.kind == "start":
            self.interval_began = time.perf_counter()

    def wrap_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass the micro-batches on, and measure how long the step waits for each."""
        began = time.perf_counter()
        for batch in batches:
            self.data_seconds += time.perf_counter() - began
            if not self.throughput.is_counted and self.is_main:
                self.throughput.begin_counting()
            yield batch
            self.throughput.end_counting()  # an optimizer step ends it too
            began = time.perf_counter()

    def step_ended(self, step: int) -> None:
        """Note when a step ended.

        Args:
            step: the number of steps done.
        """
        self.ended[step] = time.perf_counter(), self.data_seconds
        self.data_seconds = 0.0

    def resume(self, kind: str, seconds: float) -> None:
        """Leave the time of an evaluation or a save out of the throughput."""
        self.interval_seconds[kind] += seconds
        self.clock = time.perf_counter()

    def observe(self, report: StepReport) -> None:
        """Count a finished step."""
        self.clock, data_seconds = self.ended.pop(report.step + 1)
        self.interval_steps += 1
        self.interval_items += report.num_items
        self.interval_own_seconds += report.own_seconds
        self.interval_seconds["data"] += data_seconds

    def stop(self) -> None:
        """End the count of FLOPs, which an exception may have interrupted."""
        self.throughput.end_counting()

    def _begin_interval(self) -> None:
        self.interval_began = self.clock
        self.interval_steps = 0  # steps that this process has observed
        self.interval_items = 0.0  # num_items of all ranks
        self.interval_own_seconds = 0.0  # time until this rank needed the others
        self.interval_seconds: dict[str, float] = dict.fromkeys(("data", *PAUSES), 0.0)
        self.compilations_before = compilations() if self.is_compiled else 0

    def end_interval(self) -> dict[str, float]:
        """Return this rank's fields; begin to gather the ranks' reports; begin a new interval."""
        steps, seconds = self.interval_steps, self.interval_seconds
        whole = self.clock - self.interval_began
        without_pauses = whole - sum(seconds[name] for name in PAUSES)
        fields = self.throughput.add(steps, self.interval_items, without_pauses)
        fields |= {f"{name}_share": part / whole for name, part in seconds.items()}
        if self.is_compiled:
            fields["compilations"] = compilations() - self.compilations_before
        own, data = self.interval_own_seconds / steps, seconds["data"] / steps
        self.reports = RankReports(own, data, self.layout.world_size, self.device)
        self._begin_interval()
        return fields

    def gathered(self) -> dict[str, float | str]:
        """Wait for the other ranks' reports of the interval that has ended; return its fields.

        Called on all ranks.
        """
        return self.reports.summarize(self.run.hosts)

    def of_run(self) -> dict[str, float]:
        """Return what a finished run's status says about its speed."""
        return self.throughput.of_run()


def compilations() -> int:
    """Return how many times torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


# ---- speed ---------------------------------------------------------------------------------------
# Peak TFLOP/s of a device without sparsity, from the makers' data sheets: 16 bit (bf16, or fp16 if
# there is no bf16), TF32, float32. The first entry that is a word of the device's name is used.
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


def peak_tflops(device: torch.device, precision: str, *, tf32: bool) -> float | None:
    """Return the peak TFLOP/s of a GPU by its name; None for an unknown one.

    Args:
        device: the GPU.
        precision: no, bf16 or fp16.
        tf32: whether float32 matrix products may use TF32.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(MIG|Laptop|Max-Q|D|Ti)\b", name):  # partitions and other editions of a GPU
        return None
    for part, peaks in PEAK_TFLOPS.items():
        if re.search(rf"(?<![\w-]){part}(?!\w)", name):
            return peaks[0 if precision != "no" else 1 if tf32 else 2]
    return None


class Throughput:
    """Compute the speed of intervals: samples and loss items per second, and the MFU."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        layout: BatchLayout,
        model: nn.Module,
    ) -> None:
        """Ask the recipe for the FLOPs per item (flops_per_item).

        Args:
            accelerator: this process's Accelerator.
            config: the run's config.
            layout: the division of the global batch.
            model: the prepared model.
        """
        self.layout = layout
        self.steps = 0  # steps since this process started
        self.seconds = 0.0  # duration of these steps, without evaluations and saves
        self.peak_tflops = config.telemetry.peak_tflops or peak_tflops(
            accelerator.device, accelerator.mixed_precision, tf32=config.tf32
        )
        self.flops_per_sample = self.flops_per_item = 0.0  # at most one is not 0
        if flops_per_item := optional(config.recipe, "flops_per_item"):
            wrapped = next(m for m in model.modules() if isinstance(m, RecipeModule))
            self.flops_per_item = float(flops_per_item(wrapped.model))
        self.is_counted = not self.peak_tflops or bool(self.flops_per_item)
        self.counter: Any = None

    def begin_counting(self) -> None:
        """Count the FLOPs of the next micro-batch, from its forward to the end of its backward.

        Operators that a recipe recomputes by torch.utils.checkpoint count twice; a recipe with
        flops_per_item avoids that.
        """
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
            self.flops_per_sample = flops / len(self.layout.positions(0))
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
    """Gather the numbers that each rank reports about an interval, on all ranks."""

    def __init__(
        self, own_seconds: float, data_seconds: float, world_size: int, device: torch.device
    ) -> None:
        """Start to gather; the host does not wait for a GPU.

        Args:
            own_seconds: seconds per step until this rank needs the other ranks.
            data_seconds: seconds per step in which this rank waits for data.
            world_size: the number of ranks.
            device: this rank's device.
        """
        sensors = peak_memory_bytes(device), gpu_utilization(device)
        is_cuda = device.type == "cuda"  # a copy from unpinned memory would wait for the GPU
        numbers = [[own_seconds, data_seconds, *sensors]]
        # a recipe may have set torch's default dtype to float16, which cannot hold so many bytes
        reports = torch.tensor(numbers, dtype=torch.float32, pin_memory=is_cuda)
        self.work: Any = None
        if world_size > 1:
            own_report = reports.to(device, non_blocking=True)
            reports = own_report.new_empty(world_size, own_report.shape[1])
            self.work = torch.distributed.all_gather_into_tensor(reports, own_report, async_op=True)
            if is_cuda:
                self.work.wait()  # blocks the CUDA stream, not the host
        self.copy = HostCopy(reports)

    def summarize(self, hosts: list[str]) -> dict[str, float | str]:
        """Wait for the reports; return the fields of a record about all ranks.

        Args:
            hosts: the host of each rank.
        """
        if self.work:
            self.work.wait()
        rank_seconds, data_seconds, memory, utilization = zip(*self.copy.tolist(), strict=True)
        fields: dict[str, float | str] = {}
        for name, seconds in (("rank_seconds", rank_seconds), ("data_seconds", data_seconds)):
            fields[f"{name}_min"] = min(seconds)
            fields[f"{name}_median"] = statistics.median(seconds)
            fields[f"{name}_max"] = max(seconds)
        slowest = rank_seconds.index(max(rank_seconds))
        fields["slowest_rank"] = slowest
        fields["slowest_host"] = hosts[slowest]
        fields["peak_memory_bytes"] = int(max(memory))
        if measured := [value for value in utilization if not math.isnan(value)]:
            fields["gpu_utilization"] = statistics.fmean(measured)
        return fields


def gpu_utilization(device: torch.device) -> float:
    """Return the percentage of recent time in which a kernel ran; NaN if unknown."""
    try:
        return float(torch.cuda.utilization(device)) if device.type == "cuda" else math.nan
    except Exception:  # no NVML, a part of a GPU (MIG), or a GPU that has fallen off the bus
        return math.nan


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
