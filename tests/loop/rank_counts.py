"""Counts, for tests of what grows with the number of processes."""

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def counted(module: Any, name: str, note: Any) -> Iterator[None]:
    """Call note with the arguments of each call of a function, for the block."""
    real = getattr(module, name)

    def call(*arguments: Any, **options: Any) -> Any:
        note(*arguments)
        return real(*arguments, **options)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, real)


@contextmanager
def objects_counted() -> Iterator[Counter[str]]:
    """Count the Python objects that this rank receives, and the bytes of those that it sends."""
    found: Counter[str] = Counter()

    def sent(value: Any) -> None:
        found["bytes sent"] += len(pickle.dumps(value))

    def all_gather(values: list[Any], value: Any, *_: Any) -> None:
        found["received"] += len(values)
        found["gathered everywhere"] += 1
        sent(value)

    def gather(value: Any, values: list[Any] | None = None) -> None:
        found["received"] += len(values or [])
        sent(value)

    def broadcast(values: list[Any], *_: Any) -> None:
        found["received"] += len(values)

    of_torch = partial(counted, torch.distributed)
    with (
        of_torch("all_gather_object", all_gather),
        of_torch("gather_object", gather),
        of_torch("broadcast_object_list", broadcast),
    ):
        yield found


def check_received(found: dict[int, list[int]], each: int) -> None:
    """Check that only rank 0 receives more objects from more ranks: each sends `each`.

    Args:
        found: the number of objects that each rank has received, by the number of processes.
        each: the number of objects that a rank sends to rank 0.
    """
    few, many = sorted(found)
    for rank in range(1, few):
        assert found[many][rank] == found[few][rank]
    assert found[many][0] - found[few][0] == each * (many - few)
