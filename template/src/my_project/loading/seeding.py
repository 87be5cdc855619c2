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
import torch.distributed


def seed_of(*parts: Any) -> int:
    """Hash the parts into a 64-bit seed, the same on every machine."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put torch's, Python's and NumPy's generators back as they were."""
    numpy = sys.modules.get("numpy")  # who has not imported it does not draw from it
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def seed_generators(seed: int) -> None:
    """Seed them for what is drawn next."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 78
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def seed_draws(seed: int, step: int, micro_batch: int, device: torch.device) -> None:
    """Seed what the model draws (dropout) for one micro-batch of one step.

    So the draws are the same for any split into processes, and after any resume.
    """
    draw = seed_of(seed, "model", step, micro_batch)
    torch.default_generator.manual_seed(draw)
    random.seed(draw)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(draw % 2**32)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(draw)
