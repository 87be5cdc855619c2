"""What NVML and the allocator tell of a GPU: utilization and memory."""

import math
import resource
import sys
from typing import Any

import torch


class GpuMonitor:
    """Reads the utilization of one GPU; NaN without a GPU, and where NVML cannot be had."""

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

    def utilization(self) -> float:
        """Return the percentage of the last moments in which a kernel ran."""
        try:
            return float(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)
        except Exception:  # no NVML, or this GPU lacks the sensor or has fallen off the bus
            return math.nan


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU, or on the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
