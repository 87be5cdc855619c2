"""The state of torchmetrics' metrics, merged over all ranks on rank 0."""

from typing import Any, NamedTuple

import torch
import torch.distributed
from accelerate import Accelerator
from torch import Tensor

from .collectives import gather_on_main, on_main_then_broadcast
from .config import ConfigError

Kind = tuple[torch.Size, torch.dtype]


class State(NamedTuple):
    """What rank 0 receives of one metric of one rank."""

    updates: int
    summed: dict[str, Kind]  # states to be reduced, by name
    others: dict[str, Any]  # states themselves: tensors, or lists of tensors


def merge_on_main(accelerator: Accelerator, metrics: dict[str, Any]) -> None:
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

    if accelerator.num_processes == 1:
        return
    parts = [
        part
        for name in sorted(metrics)
        for part in metrics[name].modules()
        if isinstance(part, Metric)
    ]
    everywhere = gather_on_main(accelerator, [_state_of(part) for part in parts])
    # of ranks with samples: the others hold defaults, whose shape may be another
    states = [[rank[i] for rank in everywhere if rank[i].updates] for i in range(len(parts))]
    agreed = on_main_then_broadcast(
        accelerator, lambda: [_agreed(*pair) for pair in zip(parts, states, strict=True)]
    )
    sums = _reduce(accelerator, parts, agreed)
    if accelerator.is_main_process:
        for one in zip(parts, states, agreed, sums, strict=True):
            _set_merged(*one)


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


def _reduce(
    accelerator: Accelerator, parts: list[Any], agreed: list[dict[str, Kind]]
) -> list[dict[str, Tensor]]:
    """Return each metric's sums over all ranks; on other ranks than 0, these are no sums.

    One reduction for all integers, and one for all floats, in float64: float32 sums then hardly
    depend on the order of ranks.
    """
    of_type: dict[torch.dtype, list[tuple[int, str, Tensor]]] = {}
    for i, part in enumerate(parts):
        for name, (shape, dtype) in agreed[i].items():
            is_exact = not (dtype.is_floating_point or dtype.is_complex)
            wide = torch.promote_types(dtype, torch.int64 if is_exact else torch.float64)
            state = getattr(part, name) if part._update_count else torch.zeros(shape)
            state = state.detach().to(accelerator.device, wide)
            of_type.setdefault(wide, []).append((i, name, state))
    sums: list[dict[str, Tensor]] = [{} for _ in parts]
    for states in of_type.values():
        flat = torch.cat([state.flatten() for _, _, state in states])
        torch.distributed.reduce(flat, dst=0)
        totals = flat.split([state.numel() for _, _, state in states])
        for (i, name, state), total in zip(states, totals, strict=True):
            sums[i][name] = total.view(state.shape)
    return sums


def _set_merged(
    part: Any, states: list[State], agreed: dict[str, Kind], sums: dict[str, Tensor]
) -> None:
    """Set a metric's state to that of all ranks."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    part._to_sync = False  # compute() is to take this state as it is
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
