"""Random numbers that follow from the sample or the micro-batch, not from the process.

So they depend neither on the number of processes nor on where a run was resumed.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

KNOWN_SEED = 20_261_122  # any number that nobody else is likely to take
FROM_KNOWN_SEED = random.Random(KNOWN_SEED).random()
NUMPY_FROM_KNOWN_SEED = np.random.RandomState(KNOWN_SEED).random_sample()
SeedSamples = Literal["auto", True, False]  # see BatchesConfig.seed_samples


def derive_seed(*parts: Any) -> int:
    """Hash the parts into a 64-bit seed, the same on every machine."""
    return int.from_bytes(_hash("/".join(map(str, parts))).digest(), "little")


def _hash(text: str) -> Any:
    return hashlib.blake2b(text.encode(), digest_size=8)


def seed_rng(seed: int) -> None:
    """Seed the random state of torch (CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 78
    random.seed(seed)
    np.random.seed(seed % 2**32)


class SampleSeeds:
    """Seed the global generators for each sample, those of Python and NumPy only where needed.

    With "auto" these two are set to a known state before a micro-batch. If the next number that one
    gives afterwards is not the one that follows from that state, something has been drawn from it:
    the micro-batch has to be read once more, and from then on both are seeded for each sample.
    torch's is always seeded, so torch.initial_seed() is the seed of the sample.
    """

    def __init__(self, seed: int, mode: SeedSamples) -> None:
        """Seed nothing yet; a mode of False never does."""
        self.seed = seed
        self.mode = mode
        self.epoch: Any = None
        self.of_epoch: Any = None  # the hash of what its seeds have in common
        self.torch_state: Any = None  # before samples that are read at once

    def each(self, keys: Iterable[tuple[Any, int]]) -> Iterator[int]:
        """Seed the generators for each sample, by derive_seed(seed, "sample", epoch, index).

        Args:
            keys: a micro-batch, as (epoch, index); the epoch may be a lane, or an evaluation.

        Yields:
            The index, while the generators are those of this sample.
        """
        seed_torch, mode = torch.default_generator.manual_seed, self.mode
        if mode == "auto":
            random.seed(KNOWN_SEED)
            np.random.seed(KNOWN_SEED)
        for epoch, index in keys:
            if mode:
                if epoch != self.epoch:
                    self.epoch, self.of_epoch = epoch, _hash(f"{self.seed}/sample/{epoch}/")
                hashed = self.of_epoch.copy()
                hashed.update(b"%d" % index)
                derived = int.from_bytes(hashed.digest(), "little")
                seed_torch(derived)
                if mode is True:
                    random.seed(derived)
                    np.random.seed(derived % 2**32)
            yield index

    def at_once(self, keys: Sequence[tuple[Any, int]]) -> list[int]:
        """Seed for a micro-batch whose samples are read at once, as for its first sample."""
        next(self.each(keys))
        self.torch_state = torch.default_generator.get_state()
        return [index for _, index in keys]

    def missed_a_draw(self) -> bool:
        """Return whether a generator was used that was not seeded for each sample."""
        if self.mode != "auto":
            return False
        missed = random.random() != FROM_KNOWN_SEED
        missed |= np.random.random_sample() != NUMPY_FROM_KNOWN_SEED
        if self.torch_state is not None:
            missed |= not torch.equal(torch.default_generator.get_state(), self.torch_state)
            self.torch_state = None
        self.mode = True if missed else "auto"
        return missed


def seed_forward(seed: int, step: int | str, micro_batch: int, device: torch.device) -> None:
    """Seed the random state that the model uses (dropout) in one micro-batch.

    Args:
        seed: of the run.
        step: of training, or the name of an evaluation.
        micro_batch: its number, counted over all ranks.
        device: of the model.
    """
    derived = derive_seed(seed, "model", step, micro_batch)
    seed_rng(derived)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(derived)
