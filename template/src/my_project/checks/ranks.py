"""Check that all ranks hold the same weights and buffers, and that a forward changes no weights.

Ranks are not compared within a step. After the first step of a start and at each save, two numbers
for each tensor are compared, by all-reduce. Hashes would not do: a rank on another type of CPU
rounds differently, which does no harm.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ..contract import RecipeModule
from ..step_sums import dtype_of_sums, read_on_host
from .findings import Findings

# Differences relative to the norm. Up to ROUNDING, they are ignored. Up to MAX_DIFFERENCE, and for
# buffers, the check only warns.
ROUNDING, MAX_DIFFERENCE = 1e-5, 1e-3
CHUNK = 2**18  # the number of elements of a tensor that are converted together

REMEDY = (
    "Only the optimizer may change a parameter. If its initial value depends on samples, read these"
    " in build_model. Instead of limiting a weight, as nn.Embedding's max_norm does, use a limited"
    " copy of it in the forward."
)
UNEQUAL = (
    "after step {step} the ranks differ in these {kind}s: {names}, by up to {worst:.1e} of the norm"
)
UNEQUAL_MESSAGES = {
    "parameter": f"{UNEQUAL}. {REMEDY}",
    "buffer": f"{UNEQUAL}. Each rank has computed its own values, and those of rank 0 are saved."
    " Gather new values from all ranks (docs/how-to/state-in-a-buffer.md).",
}
CHANGED = "a forward has changed these parameters: {names}. " + REMEDY
UNFROZEN = (
    "{names}: requires_grad was False when this start began. It is True now, which has no effect:"
    " set it to True in build_model, or start another run from the weights."
)
NOT_TRAINING = (
    "the recipe's loss has left the model in evaluation mode ({names} is False), without dropout:"
    " call model.train() again after model.eval()."
)


Group: TypeAlias = ProcessGroup | None  # None: all ranks


class EqualRanks:
    """Compare weights and buffers between the ranks; watch what the first forwards change."""

    def __init__(self, findings: Findings, model: RecipeModule, accelerator: Accelerator) -> None:
        """Note what to compare. Called after weights were loaded, with the model in training mode.

        Args:
            findings: the findings of this run.
            model: the prepared model, without DDP (contract.RecipeModule).
            accelerator: this process's Accelerator.
        """
        self.findings = findings
        self.accelerator = accelerator
        self.wrapper: nn.Module = model
        self.model: nn.Module = model.model
        parameters = dict(self.model.named_parameters())
        self.trained = {name for name, p in parameters.items() if p.requires_grad}
        self.was_training = self.model.training
        # listed only here: if only one rank added a buffer later, its all-reduce would differ
        modules = self.model.modules()
        # cumulative averages: each rank averages over its own calls, as in torch (statistics.py)
        left_out = {
            id(buffer)
            for module in modules
            if isinstance(module, _BatchNorm) and module.momentum is None
            for buffer in module.buffers()
        }
        named = self.model.named_buffers()
        buffers = [name for name, buffer in named if id(buffer) not in left_out]
        self.compared: dict[str, tuple[list[str], Group]] = {"buffer": (buffers, None)}
        meshes = [p.device_mesh for p in parameters.values() if isinstance(p, DTensor)]
        if not meshes:
            self.compared["parameter"] = [*parameters], None
        elif meshes[0].ndim > 1:  # HSDP: compare replicas; without HSDP, no shard has a replica
            self.compared["parameter"] = [*parameters], meshes[0].get_group(0)
        self.reported: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.before: dict[str, Tensor] = {}  # sketches of the weights before a forward
        self.changed: list[set[str]] = []  # the weights that each checked forward has changed
        self.hooks: list[RemovableHandle] = []
        is_watched = findings.is_on("ranks") and not findings.is_restart_in_place
        if is_watched and meshes:
            self._watch_gathered()
        elif is_watched and accelerator.num_processes == 1:
            self._note_before("", model)

    def after_forward(self) -> None:
        """Check which weights the first forward of a step has changed, in the first two steps.

        A weight that changed in the first but not in the second, such as one that is set from the
        first batch, is reported, and so is a weight with a max_norm that changed in any of them. A
        weight that changed in both, such as one that is clipped, is not. This is for a single
        process; several ranks compare their weights.
        """
        if self.hooks or not self.before:
            return
        self._note_changed("", self.wrapper)
        if len(self.changed) == 2:
            modules = self.model.named_modules()
            limited = {f"{name}.weight" for name, m in modules if getattr(m, "max_norm", None)}
            once, again = self.changed
            self._report(CHANGED, (once - again) | ((once | again) & limited))

    def after_step(self) -> None:
        """Compare weights and buffers after the first step of this start; raises as at_save."""
        if self.findings.is_restart_in_place:  # saves still compare
            return
        if self.hooks:
            self._report(CHANGED, set().union(*self.changed))
        elif self.before:
            self._note_before("", self.wrapper)
        for hook in self.hooks:
            hook.remove()
        self.at_save()

    def at_save(self) -> None:
        """Compare weights and buffers between the ranks; warn of what is not trained.

        Raises:
            ConfigError: weights differ by more than MAX_DIFFERENCE, and checks.ranks is end.
        """
        if not self.findings.is_on("ranks"):
            return
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._report(UNFROZEN, trained - self.trained)
        if self.was_training and not self.model.training:
            self._report(NOT_TRAINING, ["model.training"])
        for kind, (names, group) in self.compared.items():
            if self.accelerator.num_processes > 1 and names:
                differences = self._differences(names, group)
                unequal = [name for name, value in differences.items() if value > ROUNDING]
                worst = max(differences.values())
                level = "" if kind == "parameter" and worst > MAX_DIFFERENCE else "warn"
                values = {"kind": kind, "worst": worst, "step": self.findings.run.step}
                self._report(UNEQUAL_MESSAGES[kind], unequal, level, **values)

    def _differences(self, names: list[str], group: Group) -> dict[str, float]:
        """Return, for each tensor, the difference within a group, relative to the norm."""
        device = self.accelerator.device
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        gone = torch.zeros(1)  # a buffer may be None now
        numbers = torch.stack([sketch(tensors.get(name, gone)).to(device) for name in names])
        largest = torch.stack([numbers, -numbers])  # one all-reduce also finds the smallest
        torch.distributed.all_reduce(largest, ReduceOp.MAX, group)
        spread = (largest.sum(0) / largest[0, :, :1].clamp(min=1e-30)).amax(1)
        torch.distributed.all_reduce(spread, ReduceOp.MAX)  # over all groups
        return dict(zip(names, read_on_host(spread), strict=True))

    # ---- what a forward changes ------------------------------------------------------------------
    def _watch_gathered(self) -> None:
        """Watch the first step of a sharded model, which has whole weights only in a forward."""
        named = self.wrapper.named_modules()
        sharded: list[Any] = [pair for pair in named if isinstance(pair[1], FSDPModule)]
        compiled = [m for m in self.wrapper.modules() if m._compiled_call_impl is not None]
        inside = {id(part) for module in compiled for part in module.modules()}
        for prefix, module in sharded:
            # hooks would make compiled code compile twice more: with them, then without
            if id(module) not in inside:
                before = partial(self._note_before, prefix)
                after = partial(self._note_changed, prefix)
                self.hooks.append(module.register_forward_pre_hook(before))
                self.hooks.append(module.register_forward_hook(after, prepend=True))

    def _note_before(self, prefix: str, module: nn.Module, *_: object) -> None:
        self.before |= self._weights(prefix, module)

    def _note_changed(self, prefix: str, module: nn.Module, *_: object) -> None:
        before, after = self.before, self._weights(prefix, module)
        names = after.keys() & before.keys()
        changes = {name: abs(after[name] - before[name])[1] for name in names}
        self.changed.append({name for name, by in changes.items() if by > 1e-6 * before[name][0]})

    def _weights(self, prefix: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the sketches of the trained parameters that are not in shards, by full name."""
        return {
            f"{prefix}.{name}".lstrip(".").removeprefix("model."): sketch(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        }

    def _report(
        self, problem: str, names: Iterable[str], level: str = "warn", **values: float | str
    ) -> None:
        """Report a problem with these names; each name is reported once per problem and level."""
        reported = self.reported[problem, level]
        if new := sorted({*names} - reported):
            reported.update(new)
            text = ", ".join(new[:5]) + f" and {len(new) - 5} more" * (len(new) > 5)
            self.findings.add("ranks", problem.format(names=text, **values), level=level)


# ---- two numbers of a tensor ---------------------------------------------------------------------
@cache
def fixed_numbers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return fixed numbers between -1 and 1, in no order.

    Signs alone would not do: two values that are multiplied by the same sign could swap places
    without changing the product.
    """
    return torch.arange(CHUNK, dtype=torch.float64).square().cos().to(device, dtype)


@torch.no_grad()
def sketch(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, and its dot product with fixed numbers.

    Each chunk is multiplied by the same numbers, and the chunk's product by a further number, so
    that chunks that swap places are noticed. Integers are compared exactly: their norm is set to 1.
    """
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = dtype_of_sums(tensor.device)
    is_float = tensor.is_floating_point()
    # float32 within a chunk takes half the time, and loses less than ROUNDING
    narrow = torch.float32 if is_float and tensor.element_size() <= 4 else wide
    fixed = fixed_numbers(tensor.device, narrow)
    chunks = (chunk.to(narrow) for chunk in tensor.reshape(-1).split(CHUNK))
    with torch.autocast(tensor.device.type, enabled=False):  # a checked forward may use it
        numbers = [torch.stack([chunk.norm(), chunk @ fixed[: len(chunk)]]) for chunk in chunks]
    norms, products = torch.stack(numbers).to(wide).unbind(1)
    norm = norms.norm() if is_float else torch.ones_like(norms[0])
    product = products @ fixed_numbers(tensor.device, wide)[: len(products)]
    return torch.stack([norm, product]).nan_to_num(1e30, 1e30, 1e30)  # for example, a mask of -inf
