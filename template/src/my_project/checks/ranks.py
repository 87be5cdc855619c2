"""Whether all ranks hold the same weights and buffers, and whether a forward changes weights.

Nothing is compared in a step. After the first step of a start and at each save, two numbers of each
tensor are compared, by one all-reduce. A digest would not do: on a CPU of another type a rank
rounds differently, harmlessly.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from .findings import Findings

ROUNDING, MOST = 1e-5, 1e-3  # relative to the norm: equal up to the first, unequal above the second
WIDTH = 4096  # of the rows into which a tensor is cut
LARGE = 2**16  # elements; a norm of all takes a second pass over the memory, and loses digits

REMEDY = (
    "Only the optimizer may change a parameter: a weight that its first batch sets, or nn.Embedding"
    " with max_norm, depends on how samples are divided into micro-batches. Set it in build_model,"
    " from samples read there, or leave it as it is and compute from it what the forward uses."
)
UNEQUAL = {
    "parameter": "after {step} steps the ranks differ in the parameter {names}, by {worst:.1e} of"
    f" its norm (rounding: less than {ROUNDING:.0e}). {REMEDY}",
    "buffer": "after {step} steps the ranks differ in the buffer {names}, by {worst:.1e} of its"
    f" norm (rounding: less than {ROUNDING:.0e}): each rank computes with its own, and rank 0's is"
    " saved. Gather its new value from all ranks (docs/how-to/state-in-a-buffer.md).",
}
CHANGED = "a forward has changed the parameter {names}. " + REMEDY
DISCARDED = "a forward has changed the parameter {names}, which FSDP discards. " + REMEDY
UNFROZEN = (
    "{names}: requires_grad was False when this start began and is True now, which trains nothing,"
    " since the optimizer was built before. Let it be True in build_model, or start another run"
    " from the weights."
)
NOT_TRAINING = (
    "the recipe's loss has left the model in evaluation mode ({names} is False), without dropout"
    " and with BatchNorm's running statistics: call model.train() where it has called model.eval()."
)


class EqualRanks:
    """Compare weights and buffers between the ranks; watch what the first forwards change."""

    def __init__(self, findings: Findings, model: Any, accelerator: Accelerator) -> None:
        """Begin a start, with its weights in place and the model in training mode.

        Args:
            findings: of this run.
            model: prepared, without DDP (sharding.RecipeModule).
            accelerator: this process's Accelerator.
        """
        self.findings = findings
        self.accelerator = accelerator
        self.wrapper = model
        self.model: nn.Module = model.model
        parameters = dict(self.model.named_parameters())
        self.trained = {name for name, p in parameters.items() if p.requires_grad}
        self.was_training = self.model.training
        # named once: a buffer that only one rank adds later would change its all-reduce
        statistics = (m.buffers() for m in self.model.modules() if isinstance(m, _BatchNorm))
        left_out = {id(buffer) for buffers in statistics for buffer in buffers}
        named = self.model.named_buffers()
        self.names = {"buffer": [name for name, buffer in named if id(buffer) not in left_out]}
        # the shards of one place in HSDP hold the same; FSDP2 alone has each once
        meshes = [p.device_mesh for p in parameters.values() if isinstance(p, DTensor)]
        self.mesh = meshes[0] if meshes else None
        self.has_replicas = self.mesh is None or self.mesh.ndim > 1
        self.names["parameter"] = [*parameters] if self.has_replicas else []
        self.said: dict[str, set[str]] = defaultdict(set)
        self.before: dict[str, Tensor] = {}
        self.changed: list[set[str]] = []  # in each forward that was looked at
        self.hooks: list[Any] = []
        if findings.is_on("ranks") and self.mesh:
            self._watch_gathered()
        elif findings.is_on("ranks") and accelerator.num_processes == 1:
            self.before = self._weights(model)

    def after_forward(self) -> None:
        """Look at what the first forward of the first two steps has changed, on one process.

        A weight that is brought within limits, whatever the data, changes in each step; one that
        the first batch sets changes once. Several ranks compare their weights instead.
        """
        if not self.before or self.hooks or len(self.changed) == 2:
            return
        self._note_changed(self.wrapper)
        if len(self.changed) == 2:
            modules = self.model.named_modules()
            limited = {f"{name}.weight" for name, m in modules if getattr(m, "max_norm", None)}
            once, again = self.changed
            self._report(CHANGED, (once - again) | ((once | again) & limited))

    def after_step(self) -> None:
        """Compare after the first step of this start."""
        if self.hooks:
            self._report(DISCARDED, set().union(*self.changed))
        elif self.before:
            self.before = self._weights(self.wrapper)
        self.at_save()

    def at_save(self) -> None:
        """Compare weights and buffers between the ranks; look for what is not trained."""
        if not self.findings.is_on("ranks"):
            return
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._report(UNFROZEN, trained - self.trained)
        if self.was_training and not self.model.training:
            self._report(NOT_TRAINING, ["model.training"])
        if self.accelerator.num_processes == 1:
            return
        apart = self._differences()
        for kind, names in self.names.items():
            found = {name: apart[name] for name in names if apart[name] > ROUNDING}
            worst = max(found.values(), default=0.0)
            level = "" if kind == "parameter" and worst > MOST else "warn"
            step = self.findings.run.step
            self._report(UNEQUAL[kind], found, level=level, step=step, worst=worst)

    def _differences(self) -> dict[str, float]:
        """Return how far apart the ranks' values of each tensor are, relative to its norm."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        names = [name for of_kind in self.names.values() for name in of_kind]
        if not names:
            return {}
        device, mesh = self.accelerator.device, self.mesh
        numbers = torch.stack([sketch(tensors[n]).to(device, torch.float64) for n in names])
        shards, shard = (
            (mesh.size(1), mesh.get_local_rank(1)) if mesh and self.has_replicas else (1, 0)
        )
        places = [shard * isinstance(tensors[name], DTensor) for name in names]
        largest = numbers.new_full((2, shards, *numbers.shape), -math.inf)
        largest[0, places, range(len(names))] = numbers
        largest[1, places, range(len(names))] = -numbers  # the smallest, by the same all-reduce
        torch.distributed.all_reduce(largest, ReduceOp.MAX)
        spread = largest.sum(0) / largest[0, ..., :1].clamp(min=1e-30)
        return dict(zip(names, spread.amax((0, 2)).tolist(), strict=True))

    # ---- what a forward changes ------------------------------------------------------------------
    def _watch_gathered(self) -> None:
        """Watch the first forward of a sharded model, whose weights are whole only within it."""
        named = self.wrapper.named_modules()
        sharded: list[Any] = [pair for pair in named if isinstance(pair[1], FSDPModule)]
        for prefix, module in sharded:
            # compiled code would be compiled again, with the hooks and then without
            if module._compiled_call_impl is None:
                begun, done = (partial(hook, prefix) for hook in (self._begun, self._done))
                self.hooks.append(module.register_forward_pre_hook(begun))
                self.hooks.append(module.register_forward_hook(done, prepend=True))

    def _begun(self, prefix: str, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.before |= self._weights(module, prefix)

    def _done(self, prefix: str, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._note_changed(module, prefix)
            for hook in () if prefix else self.hooks:  # the root's forward is the last
                hook.remove()

    def _weights(self, module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
        """Return the numbers of the trained parameters, but for those in shards, by full name."""
        return {
            f"{prefix}.{name}".lstrip(".").removeprefix("model."): sketch(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        }

    def _note_changed(self, module: nn.Module, prefix: str = "") -> None:
        after, before = self._weights(module, prefix), self.before
        apart = {name: abs(now - before[name])[1] for name, now in after.items()}
        limits = {name: 1e-6 * before[name][0] for name in after}
        self.changed.append({name for name in after if apart[name] > limits[name]})

    def _report(
        self, problem: str, names: Iterable[str], *, level: str = "warn", **values: Any
    ) -> None:
        """Say what is true of these names, of each once at a level."""
        said = self.said[problem + level]
        if new := sorted({*names} - said):
            said |= {*new}
            text = ", ".join(new[:5]) + f" and {len(new) - 5} more" * (len(new) > 5)
            self.findings.add("ranks", problem.format(names=text, **values), level=level)


# ---- two numbers of a tensor ---------------------------------------------------------------------
@cache
def fixed_numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers between -1 and 1 in no order.

    Not signs: two values with the same sign could change places and leave the product as it was.
    """
    return torch.arange(count, dtype=torch.float64).square().cos().to(device, dtype)


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Return about the norm of a tensor, and its product with fixed numbers, by one pass over it.

    Rows of the tensor are multiplied by the same numbers, and their products by others, so that
    rows that change places are noticed too. Integers are compared exactly: their norm is 1.
    """
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    is_wide = not tensor.is_floating_point() or tensor.element_size() > 4
    dtype = torch.float64 if is_wide else torch.float32
    fixed = partial(fixed_numbers, dtype=dtype, device=tensor.device)
    flat = tensor.reshape(-1)
    whole = len(flat) // WIDTH * WIDTH
    rows, rest = flat[:whole].view(-1, WIDTH), flat[whole:].to(dtype)
    with torch.autocast(tensor.device.type, enabled=False):
        parts = [part.to(dtype) @ fixed(WIDTH) for part in rows.split(WIDTH)]
        products = torch.cat([*parts, (rest @ fixed(len(rest)))[None]])
        norm = torch.linalg.vector_norm(products if len(flat) > LARGE else flat.to(dtype))
        norm = norm if tensor.is_floating_point() else torch.ones_like(norm)
        product = products @ fixed(len(products))
    return torch.stack([norm, product]).nan_to_num(1e30, 1e30, 1e30)  # as of a mask of -inf
