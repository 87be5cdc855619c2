"""The step's all-reduce of scalars, and reading its result one step late."""

import math
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor

from .state import StepReport


class StepSums:
    """The sums of one step over its micro-batches and, by one all-reduce, over all ranks.

    The fields are views of one tensor, scalars on the device, in the order of StepReport's.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Allocate the memory."""
        # MPS has no float64
        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self.tensor = torch.zeros(6, dtype=dtype, device=accelerator.device)
        (
            self.loss_sum,
            self.item_sum,
            self.stop_votes,
            self.save_votes,
            self.grad_norm,
            self.own_loss_sum,
        ) = self.tensor.unbind()
        self.over_all_ranks = self.tensor[:4]
        self.world_size = accelerator.num_processes
        self.work: Any = None

    @property
    def num_items(self) -> Tensor | float:
        """The items to divide by: on a CPU a number, since nothing waits; NaN for 0."""
        return (self.item_sum.item() or math.nan) if self.item_sum.is_cpu else self.item_sum

    def add(self, loss_sum: Tensor, num_items: Tensor | float) -> None:
        """Add what the recipe's loss returned for a micro-batch."""
        self.loss_sum.add_(loss_sum.detach())
        self.item_sum.add_(num_items)

    def start_all_reduce(self, wants_stop: bool, wants_save: bool) -> None:
        """Start the all-reduce of sums and votes; on a GPU it overlaps with the backward pass."""
        if wants_stop or wants_save:  # rare: almost no step launches these kernels
            self.stop_votes.fill_(wants_stop)
            self.save_votes.fill_(wants_save)
        self.own_loss_sum.copy_(self.loss_sum)
        if self.world_size > 1:
            self.work = torch.distributed.all_reduce(self.over_all_ranks, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce: on a GPU this blocks the CUDA stream, not the host."""
        if self.work is not None:
            self.work.wait()


class HostCopy:
    """A copy of a tensor on its way to the host; on a GPU nothing waits until it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.event: Any = None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor = pinned.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def tolist(self) -> list[Any]:
        """Wait for the copy, and return the values."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor.tolist()


class DelayedReader:
    """Read the sums of a step one step later, when the device has them anyway."""

    def __init__(self, accelerator: Accelerator) -> None:
        # of this step, and of the one before, which has not been read
        self.both = [StepSums(accelerator), StepSums(accelerator)]
        self.pending: tuple[int, HostCopy] | None = None

    def begin(self) -> StepSums:
        """Return the sums of a new step, which are zero."""
        self.both.reverse()
        self.both[0].tensor.zero_()
        return self.both[0]

    def push(self, step: int, sums: StepSums) -> StepReport | None:
        """Start to copy a step's sums to the host; return the report of the step before."""
        copy = HostCopy(sums.tensor)
        before = self.flush()
        self.pending = (step, copy)
        return before

    def flush(self) -> StepReport | None:
        """Return the report of the step that has not been read yet, if there is one."""
        if self.pending is None:
            return None
        step, copy = self.pending
        self.pending = None
        return StepReport(step, *copy.tolist())
