"""Send Python objects between ranks, and check what all ranks must agree on."""

import socket
from collections.abc import Callable, Hashable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

import accelerate
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .config import ConfigError, to_dict
from .loading.seeding import derive_seed
from .run_folder import Run, not_shared

T = TypeVar("T")


def on_main_then_broadcast(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on every rank.

    Raises:
        ConfigError: the function raised it on rank 0; every rank then raises the same error.
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


def gather_on_main(accelerator: Accelerator, value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on rank 0; [] on other ranks.

    accelerate's gather_object would send every value to every rank: N ranks together would receive
    and unpickle N^2 values.
    """
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(value, values)
    return values or []


def agree(accelerator: Accelerator, facts: Mapping[str, Hashable]) -> list[str]:
    """Return the host of each rank if the facts are equal on all ranks.

    Raises:
        ConfigError: the facts differ.
    """
    everywhere = gather_on_main(accelerator, (socket.gethostname(), facts))
    return on_main_then_broadcast(accelerator, lambda: _hosts_if_equal(everywhere))


def _hosts_if_equal(everywhere: list[tuple[str, Mapping[str, Hashable]]]) -> list[str]:
    hosts = [host for host, _ in everywhere]
    for name in sorted({name for _, facts in everywhere for name in facts}):
        values = [facts.get(name) for _, facts in everywhere]
        if different := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise ConfigError(
                f"{name} on rank(s) {different} ({hosts[different[0]]}) differs from that on"
                f" rank 0 ({hosts[0]}): give all nodes the same files and arguments."
            )
    return hosts


def open_run(
    accelerator: Accelerator, run: Run, must_agree: Mapping[str, object], lengths: dict[str, int]
) -> None:
    """Open the run folder on all ranks together.

    Args:
        accelerator: this process's Accelerator.
        run: the run folder.
        must_agree: values that must be equal on all ranks, by name.
        lengths: the length of each dataset; must be equal on all ranks.

    Raises:
        ConfigError: `must_agree`, versions, run.numerics or the lengths of datasets differ between
            ranks; or a node does not see the run folder that rank 0 wrote to. If nodes may have
            folders of their own, this is refused only if some other node does see the folder of
            rank 0. Also raised by Run.begin.
    """
    # the repr of a dataclass may contain a set or an address, whose text differs between processes
    plain = {n: to_dict(value) if is_dataclass(value) else value for n, value in must_agree.items()}
    facts: dict[str, Hashable] = {name: derive_seed(value) for name, value in plain.items()}
    facts |= {f"the length of {name}": length for name, length in lengths.items()}
    facts["the version of torch or accelerate"] = str(torch.__version__), accelerate.__version__
    run.hosts = agree(accelerator, facts | run.numerics)
    run.lengths = lengths
    token = on_main_then_broadcast(accelerator, run.begin)
    seen = gather_on_main(accelerator, run.sees(token))
    sharing, apart = (
        {host for host, sees in zip(run.hosts, seen, strict=False) if sees is value}
        for value in (True, False)
    )
    # if only some nodes share a disk, several ranks would move and remove the same files
    hosts, is_mixed = on_main_then_broadcast(
        accelerator, lambda: (", ".join(sorted(apart)), len(sharing) > 1)
    )
    run.is_shared, may_be_apart = not hosts, False
    # if you remove the setting that the next line reads, delete the line
    may_be_apart = bool(run.config.checkpoints.mirror)
    if hosts and (is_mixed or not may_be_apart):
        raise ConfigError(not_shared(run.folder, hosts, run.hosts[0]))
