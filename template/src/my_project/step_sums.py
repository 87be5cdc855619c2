"""All-reduce the sums of a step, and read the result one step late."""

import math
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor

from .config import ConfigError
from .ranks import agree
from .state import StepReport

Timestamp: TypeAlias = float | torch.cuda.Event
GRAD_NORM, OWN_LOSS, LOSS, ITEMS, STOP_VOTES, SAVE_VOTES = range(6)  # in the order of StepReport


def read_on_host(tensor: Tensor) -> list[float]:
    """Return the values of a tensor as a list; a GPU may first have to wait for other ranks.

    If the watchdog finds a process waiting here, it blames other ranks, not this process's code.
    """
    return tensor.reshape(-1).tolist()


def dtype_of_sums(device: torch.device) -> torch.dtype:
    """Return the dtype of the sums on a device."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


class StepSums:
    """The sums of one step over its micro-batches and, by one all-reduce, over all ranks.

    The sums are one tensor. Its first six elements are grad_norm to save_votes of StepReport, of
    which grad_norm and own_loss_sum are not all-reduced. Then come the recipe's scalars, whose
    names are known after its first loss, and numbers that the host does not read
    (DelayedReader.make_room).
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Allocate the memory, without room for scalars."""
        device = accelerator.device
        self.world_size = accelerator.num_processes
        self.work: torch.distributed.Work | None = None
        self.began: Timestamp = 0.0  # when the step begins
        self.ready: Timestamp = 0.0  # when this rank starts the all-reduce
        self.allocate(torch.zeros(6, dtype=dtype_of_sums(device), device=device))

    def allocate(self, memory: Tensor, names: tuple[str, ...] = ()) -> None:
        """Keep the sums in this tensor from now on.

        Args:
            memory: has an element for each sum, then one for each scalar, and may have more. The
                elements for sums and scalars must be zero.
            names: the names of the scalars.
        """
        self.tensor = memory
        self.over_all_ranks = memory[LOSS:]
        self.numbers = memory[: 6 + len(names)]
        self.rest = memory[6 + len(names) :]
        # on a CPU, Python adds the numbers in place, which is faster than torch's kernels
        self.sums: Any = self.numbers.numpy().data if memory.is_cpu else [*self.numbers.unbind()]
        self.indices = {name: index for index, name in enumerate(names, SAVE_VOTES + 1)}

    def add_to(self, index: int, value: Tensor | float) -> None:
        """Add to one of the sums, which are zero when a step begins."""
        if isinstance(value, Tensor):
            value = value.item() if self.tensor.is_cpu else value.detach()
        self.sums[index] += value

    def add(
        self,
        loss_sum: Tensor,
        num_items: Tensor | float,
        scalars: Mapping[str, Tensor | float] = {},
    ) -> None:
        """Add what the recipe's loss returned for a micro-batch.

        Raises:
            ConfigError: the scalars have other names than those of the first step.
        """
        self.add_to(LOSS, loss_sum)
        self.add_to(ITEMS, num_items)
        if scalars.keys() != self.indices.keys():
            raise ConfigError(
                f"loss returned the scalars {sorted(scalars)}, but {sorted(self.indices)} in the"
                " first step of this process; return the same names each time, with 0.0 where"
                " there is nothing to add."
            )
        for name, value in scalars.items():
            self.add_to(self.indices[name], value)

    def start_all_reduce(self, wants_stop: bool, wants_save: bool) -> None:
        """Start the all-reduce of sums and votes; on a GPU it overlaps with the backward pass."""
        self.ready = timestamp(self.tensor)
        if wants_stop or wants_save:  # this is rare: almost no step launches these kernels
            self.add_to(STOP_VOTES, wants_stop)
            self.add_to(SAVE_VOTES, wants_save)
        self.add_to(OWN_LOSS, self.sums[LOSS])
        if self.world_size > 1:
            self.work = torch.distributed.all_reduce(self.over_all_ranks, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce: on a GPU this blocks the CUDA stream, not the host."""
        if self.work is not None:
            self.work.wait()

    @property
    def num_items(self) -> Tensor | float:
        """Return the number of items to divide by: a tensor, or on a CPU a number (NaN for 0)."""
        return (self.sums[ITEMS] or math.nan) if self.tensor.is_cpu else self.sums[ITEMS]


def timestamp(tensor: Tensor) -> Timestamp:
    """Return a CUDA event if the tensor is on a GPU, otherwise the host's time in seconds."""
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two timestamps; the device must have passed both."""
    if isinstance(began, float):
        return float(ended) - began
    return float(began.elapsed_time(ended)) / 1000


class HostCopy:
    """A tensor that a GPU copies to the host asynchronously; a CPU's tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.event: torch.cuda.Event | None = None
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
    """Read the sums of a step one step later, when the device has finished them anyway."""

    def __init__(self, accelerator: Accelerator) -> None:
        # the sums of this step, then the sums of the step before, which have not been read
        self.both = [StepSums(accelerator), StepSums(accelerator)]
        self.accelerator = accelerator
        self.pending: tuple[int, HostCopy, Timestamp, Timestamp] | None = None

    def set_names(self, names: tuple[str, ...]) -> None:
        """Make room for the recipe's scalars; call it after the first forward, before StepSums.add.

        Raises:
            ConfigError: another rank has other names.
        """
        agree(self.accelerator, {"what loss returns": names})
        for sums in self.both if names else ():
            memory = sums.tensor.new_zeros(len(sums.tensor) + len(names))
            memory[6 + len(names) :] = sums.rest  # statistics of BatchNorm, from the first forward
            sums.allocate(memory, names)

    def make_room(self, size: int) -> None:
        """Make room for `size` numbers to sum over ranks, which the host does not read."""
        for sums in self.both:
            sums.allocate(sums.tensor.new_zeros(len(sums.tensor) + size))

    def begin(self) -> StepSums:
        """Begin a step: return its sums, which are zero."""
        self.both.reverse()
        self.both[0].tensor.zero_()
        self.both[0].began = timestamp(self.both[0].tensor)
        return self.both[0]

    def push(self, step: int, sums: StepSums, grad_norm: Tensor | float) -> StepReport | None:
        """Start to copy a step's sums to the host; return the report of the step before."""
        sums.add_to(GRAD_NORM, grad_norm)
        copy = HostCopy(sums.numbers)
        previous = self.flush()
        self.pending = (step, copy, sums.began, sums.ready)
        return previous

    def flush(self) -> StepReport | None:
        """Return the report of the step that has not been read yet, if there is one."""
        if self.pending is None:
            return None
        step, copy, began, ready = self.pending
        self.pending = None
        values = copy.tolist()
        scalars = dict(zip(self.both[0].indices, values[6:], strict=True))
        own_seconds = seconds_between(began, ready)
        return StepReport(step, *values[:6], scalars=scalars, own_seconds=own_seconds)
