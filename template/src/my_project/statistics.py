"""Keep BatchNorm's running statistics as if one process saw all micro-batches in order.

At each call of a layer, torch moves the running statistics r to (1 - m) r + m s: m is the layer's
momentum, s are the statistics of the micro-batch. On several ranks, each rank would have its own r,
and update it only with its own micro-batches. But the update is linear: after the micro-batches
0 to n - 1 of a step, r is (1 - m)^n r + sum_k (1 - m)^(n - 1 - k) m s_k. So each micro-batch begins
with the r that the step began with. The r that torch then writes, minus (1 - m) r, is m s_k. Each
rank sums these parts, weighted by (1 - m)^(n - 1 - k), and the sums are part of the step's
all-reduce. With one process, torch alone updates the statistics. A skipped step leaves them as they
were.

This is exact if all micro-batches of a step call a layer equally often. If some micro-batches call
it more often than others, or not at all, it is an approximation: if a micro-batch called the layer
c times, its part is weighted as if each later micro-batch had also called the layer c times. The
weights are then normalized. The result is equal for any number of processes above one. A layer that
no micro-batch has called keeps the statistics that the recipe has written into it. Not handled
here: SyncBatchNorm, InstanceNorm, and layers with momentum None, which average over all calls.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .loading.layout import BatchLayout
from .step_sums import DelayedReader, StepSums, dtype_of_sums


def exact_statistics(
    accelerator: Accelerator, model: nn.Module, layout: BatchLayout, reader: DelayedReader
) -> "RunningStatistics | None":
    """Return the RunningStatistics of a prepared model, or None if no layer has any."""
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        and not isinstance(layer, nn.SyncBatchNorm)
        and None not in (layer.running_mean, layer.num_batches_tracked, layer.momentum)
    ]
    return RunningStatistics(accelerator, model, layers, layout, reader) if layers else None


class RunningStatistics:
    """The running statistics of L BatchNorm layers in one step: C values and L counters."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        layers: list[Any],
        layout: BatchLayout,
        reader: DelayedReader,
    ) -> None:
        """Prepare the sums, and stop DDP from broadcasting the statistics of rank 0."""
        self.reader = reader
        device = accelerator.device
        self.dtype = dtype_of_sums(device)
        self.model = model
        self.layers = layers
        self.layout = layout
        self.rank = accelerator.process_index
        self.micro_batch = self.rank  # this rank's next micro-batch, numbered over all ranks
        self.buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        self.counters = [layer.num_batches_tracked for layer in layers]
        self.sizes = [len(buffer) for buffer in self.buffers]
        lengths = torch.tensor(self.sizes).view(-1, 2).sum(1)
        self.layer_indices = torch.arange(len(layers)).repeat_interleave(lengths).to(device)  # (C,)
        self.part_sizes = [len(self.layer_indices), len(layers), len(layers)]
        # several ranks also sum weighted statistics (C,), weights (L,) and calls (L,) over the
        # micro-batches; these sums follow the step's sums and share their all-reduce
        self.has_parts = layout.world_size > 1
        if self.has_parts:
            reader.make_room(sum(self.part_sizes))
        self.momenta: list[float] = []
        if isinstance(model, DistributedDataParallel):
            # DDP still broadcasts buffers of frozen layers, which the recipe may write itself
            moving = {id(b) for layer in layers if layer.training for b in layer.buffers()}
            named = model.module.named_buffers()
            model.parameters_to_ignore |= {name for name, b in named if id(b) in moving}
            model._assign_modules_buffers()

    def forward(self, *arguments: Any) -> Any:
        """Call the model with a micro-batch, and add its part of the statistics."""
        if self.micro_batch == self.rank:  # the first micro-batch of a step
            self.before = self.start = self._read()
        else:
            self._write(*self.start)
        returned = self.model(*arguments)
        # read now: the backward pass may compute the forward again, which must not count
        statistics, calls = self._read()
        if not self.has_parts:
            self.start = statistics, calls
        elif self.micro_batch < self.layout.micro_batches:  # not one that only fills up the step
            self._add(self.reader.both[0].rest, statistics, calls)
        self.micro_batch += self.layout.world_size
        return returned

    def finish(self, sums: StepSums, norm: Tensor | float) -> None:
        """Update the statistics with a step's micro-batches; restore them if it was skipped."""
        before, calls_before = self.before
        after, calls = self.start
        if self.has_parts:
            parts, weights, added = sums.rest.split(self.part_sizes)
            mean = parts / weights[self.layer_indices]
            moved = torch.lerp(after, mean, 1 - self._decay(added)[self.layer_indices])
            after = torch.where((weights > 0)[self.layer_indices], moved, after)
            calls = calls + added.long()
        is_finite = torch.as_tensor(norm, device=calls.device).isfinite()
        moves = is_finite | (calls == calls_before)
        after = torch.where(moves[self.layer_indices], after, before)
        self._write(after, torch.where(moves, calls, calls_before))
        self.micro_batch = self.rank

    def _add(self, parts: Tensor, statistics: Tensor, calls: Tensor) -> None:
        """Add a micro-batch's part to the sums of this rank."""
        before, calls_before = self.start
        calls = calls - calls_before
        # if a layer was not called, only the recipe can have written its statistics
        before = torch.where((calls == 0)[self.layer_indices], statistics, before)
        self.start = before, calls_before
        decay = self._decay(calls)
        weight = decay ** (self.layout.micro_batches - 1 - self.micro_batch)
        part = statistics - decay[self.layer_indices] * before
        parts += torch.cat([part * weight[self.layer_indices], weight * (1 - decay), calls])

    def _read(self) -> tuple[Tensor, Tensor]:
        """Return copies of the statistics (C,) and of the number of calls (L,)."""
        return torch.cat(self.buffers).to(self.dtype), torch.stack(self.counters)

    def _write(self, statistics: Tensor, calls: Tensor) -> None:
        values = statistics.to(self.buffers[0].dtype).split(self.sizes)
        torch._foreach_copy_(self.buffers, values)  # type: ignore[attr-defined]
        torch._foreach_copy_(self.counters, calls.unbind())  # type: ignore[attr-defined]

    def _decay(self, calls: Tensor) -> Tensor:
        """Return the share of its old statistics that each layer keeps after its calls (L,)."""
        momenta = [layer.momentum for layer in self.layers]
        # a recipe may change the momenta; copy only then, since a copy to a GPU makes the host wait
        if momenta != self.momenta:
            self.momenta = momenta
            self.kept = 1 - torch.tensor(momenta, dtype=self.dtype, device=calls.device)
        return self.kept**calls
