"""Collectives in which only rank 0 receives from all ranks: Python objects, metrics."""

import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from .config import ConfigError


# ---- Python objects ------------------------------------------------------------------------------
def on_main_then_broadcast(accelerator: Accelerator, function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only, and return its result on every rank.

    Raises:
        ConfigError: on every rank, what the function raised on rank 0, of the same type.
    """
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome = [function(), None]
        except ConfigError as error:
            outcome = [None, error]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather_on_main(accelerator: Accelerator, value: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, by rank; [] on the others.

    In place of accelerate's gather_object where only rank 0 needs them: that one sends every value
    to every rank, so all ranks together would receive and unpickle N^2 of them.
    """
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(value, values)
    return values or []


def agree(accelerator: Accelerator, facts: dict[str, Any]) -> list[str]:
    """Return the host of each rank, if the facts are equal on all of them.

    Raises:
        ConfigError: they differ.
    """
    everywhere = gather_on_main(accelerator, (socket.gethostname(), facts))
    return on_main_then_broadcast(accelerator, lambda: _hosts_if_equal(everywhere))


def _hosts_if_equal(everywhere: list[tuple[str, dict[str, Any]]]) -> list[str]:
    hosts = [host for host, _ in everywhere]
    for name in sorted({name for _, facts in everywhere for name in facts}):
        values = [facts.get(name) for _, facts in everywhere]
        if different := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise ConfigError(
                f"{name} on rank(s) {different} ({hosts[different[0]]}) differs from that on"
                f" rank 0 ({hosts[0]}): give all nodes the same files and arguments."
            )
    return hosts


# ---- metrics -------------------------------------------------------------------------------------
Kind = tuple[torch.Size, torch.dtype]


class State(NamedTuple):
    """What rank 0 receives of one metric of one rank."""

    updates: int
    summed: dict[str, Kind]  # states to be reduced, by name
    others: dict[str, Any]  # states themselves: tensors, or lists of tensors


def merge_metrics_on_main(accelerator: Accelerator, metrics: dict[str, Any]) -> None:
    """Merge the metrics' state of all ranks on rank 0, which alone can then compute them.

    Sums and means are reduced, so that rank 0 receives the size of one state, however many ranks
    there are: a confusion matrix of 1,000 classes has 8 MB. Other states are gathered on rank 0:
    lists hold each sample once; a maximum is small, and gloo's reduction of it drops a NaN.

    In place of torchmetrics' own gathering, which brings the state of all ranks to every rank, and
    aborts the process when one rank holds a list of values and another, without samples, an empty
    one.

    Raises:
        ConfigError: a sum has different shapes or types on ranks with samples.
    """
    from torchmetrics import Metric

    parts = [
        part
        for name in sorted(metrics)
        for part in metrics[name].modules()
        if isinstance(part, Metric)
    ]
    for part in parts:
        part._to_sync = False  # compute() is to take the state as it is, also in a group of one
    if accelerator.num_processes == 1:
        return
    everywhere = gather_on_main(accelerator, [_state_of(part) for part in parts])
    # of ranks with samples: the others hold defaults, whose shape may be another
    states = [[rank[i] for rank in everywhere if rank[i].updates] for i in range(len(parts))]
    agreed = on_main_then_broadcast(
        accelerator, lambda: [_agreed(*pair) for pair in zip(parts, states, strict=True)]
    )
    for part, of_ranks, kinds in zip(parts, states, agreed, strict=True):
        sums = {name: _sum_on_main(accelerator, part, name, kinds[name]) for name in kinds}
        if accelerator.is_main_process:
            _set_merged(part, of_ranks, kinds, sums)


def _state_of(part: Any) -> State:
    """Return a metric's state, with the shapes and types of sums in place of the sums."""
    from torchmetrics.utilities import dim_zero_mean, dim_zero_sum

    summed: dict[str, Kind] = {}
    others: dict[str, Any] = {}
    for name, reduce in part._reductions.items():
        state = getattr(part, name)
        if reduce in (dim_zero_sum, dim_zero_mean) and isinstance(state, Tensor):
            summed[name] = (state.shape, state.dtype)
        else:
            others[name] = _to_cpu(state)
    return State(part._update_count, summed, others)


def _to_cpu(state: Tensor | list[Tensor]) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    return [torch.atleast_1d(tensor.detach().cpu()) for tensor in state]


def _agreed(part: Any, states: list[State]) -> dict[str, Kind]:
    """Return the shape and type of each sum of a metric; {} if no rank has samples."""
    for name in states[0].summed if states else ():
        kinds = {state.summed.get(name) for state in states}
        if len(kinds) > 1:
            raise ConfigError(
                f"the state {name} of the metric {type(part).__name__} differs between ranks"
                f" ({', '.join(sorted(map(str, kinds)))}): it is summed over them, so let"
                " update() leave its shape and type as in add_state."
            )
    return states[0].summed if states else {}


def _sum_on_main(accelerator: Accelerator, part: Any, name: str, kind: Kind) -> Tensor:
    """Return the sum of a state over all ranks; on other ranks than 0 it is no sum.

    In float64 or int64: float32 sums then hardly depend on the order of ranks.
    """
    shape, dtype = kind
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    wide = torch.promote_types(dtype, torch.int64 if is_exact else torch.float64)
    state = getattr(part, name).detach() if part._update_count else torch.zeros(shape)
    total = state.to(accelerator.device, wide, copy=True).contiguous()
    torch.distributed.reduce(total, dst=0)
    return total


def _set_merged(
    part: Any, states: list[State], agreed: dict[str, Kind], sums: dict[str, Tensor]
) -> None:
    """Set a metric's state to that of all ranks."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    part._update_count = sum(state.updates for state in states)
    for name, total in sums.items():
        is_mean = part._reductions[name] is dim_zero_mean
        merged = total / len(states) if is_mean else total
        dtype = agreed[name][1]
        kept = dtype if dtype.is_floating_point else merged.dtype  # integers become int64
        setattr(part, name, merged.to(part.device, kept))
    for name in states[0].others if states else ():
        reduce = part._reductions[name]
        values = [state.others[name] for state in states]
        if isinstance(values[0], list):
            joined = [tensor.to(part.device) for value in values for tensor in value]
            is_cat = reduce is dim_zero_cat
            setattr(part, name, [torch.cat(joined)] if joined and is_cat else joined)
        else:
            stacked = torch.stack([value.to(part.device) for value in values])
            setattr(part, name, reduce(stacked) if reduce else stacked)
