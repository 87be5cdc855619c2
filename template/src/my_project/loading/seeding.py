"""Random numbers that follow from the sample or the micro-batch, not from the process.

So they depend neither on the number of processes nor on where a run was resumed.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def derive_seed(*parts: Any) -> int:
    """Hash the parts into a 64-bit seed, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the random state of torch (CPU), Python and NumPy at the end."""
    numpy = sys.modules.get("numpy")  # not imported, so not used
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def seed_rng(seed: int) -> None:
    """Seed the random state of torch (CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 78
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def seed_forward(seed: int, step: int, micro_batch: int, device: torch.device) -> None:
    """Seed the random state that the model uses (dropout) in one micro-batch of one step."""
    derived = derive_seed(seed, "model", step, micro_batch)
    seed_rng(derived)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(derived)
