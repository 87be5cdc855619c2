"""What NVML and the allocator tell of a GPU: utilization, temperature, power, memory."""

import math
import resource
import sys
from typing import Any

import torch


class GpuMonitor:
    """Reads the sensors of one GPU; without NVML, or without a GPU, every value is NaN."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        self.handle: Any = None
        if device.type == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                # by UUID: CUDA_VISIBLE_DEVICES may have changed the order
                uuid = torch.cuda.get_device_properties(device).uuid
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                self.nvml = pynvml
            except Exception:  # no library, no driver, a part of a GPU (MIG), ROCm
                self.nvml = None

    def read(self) -> tuple[float, float, float]:
        """Return utilization (percent), temperature (degrees Celsius) and power (watts)."""
        if self.nvml is None:
            return math.nan, math.nan, math.nan
        return (
            self._get(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu),
            self._get(lambda nvml: nvml.nvmlDeviceGetTemperature(self.handle, 0)),
            self._get(lambda nvml: nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000),
        )

    def _get(self, read: Any) -> float:
        try:
            return float(read(self.nvml))
        except Exception:  # this GPU lacks the sensor, or it has fallen off the bus
            return math.nan


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def allocator_retries(device: torch.device) -> float:
    """Return how often the allocator had to free its cache to serve a request; NaN on a CPU."""
    if device.type != "cuda":
        return math.nan
    return torch.cuda.memory_stats(device)["num_alloc_retries"]
