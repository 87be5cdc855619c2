"""The step's all-reduce, and reading its result one step late."""

from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor


class Reduction:
    """A sum over processes that is under way while the loop goes on."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.processes = accelerator.num_processes
        self.work: Any = None

    def start(self, tensor: Tensor) -> None:
        """Begin to sum the tensor over the processes, in place."""
        if self.processes > 1:
            self.work = torch.distributed.all_reduce(tensor, async_op=True)

    def wait(self) -> None:
        """Let what follows use the sum; on a GPU only the device waits."""
        if self.work is not None:
            self.work.wait()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Choose the type in which losses and weights are summed."""
    return torch.float32 if device.type == "mps" else torch.float64


class LateNumbers:
    """Hand the numbers of a step to the host one step later, when the device has them anyway."""

    def __init__(self) -> None:
        self.pending: tuple[int, Tensor, Any] | None = None

    def push(self, step: int, numbers: Tensor) -> tuple[int, list[float]] | None:
        """Start the copy of this step's numbers; return the step before and its numbers."""
        event = None
        if numbers.is_cuda:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = pinned.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        before = self.flush()
        self.pending = (step, numbers, event)
        return before

    def flush(self) -> tuple[int, list[float]] | None:
        """Return the step whose numbers have not been read yet, and them."""
        if self.pending is None:
            return None
        step, numbers, event = self.pending
        self.pending = None
        if event is not None:
            event.synchronize()
        return step, numbers.tolist()
