"""Derive the samples of each step, and all random numbers, from the run's seed.

Step k is always global batch k: each epoch is one seeded permutation, cut into global batches; an
incomplete last batch is dropped. Each global batch is cut into micro-batches, which the ranks take
in turn (layout.py), so the samples of a step are the same for any world size. A run can start at
any step without delay. For weighted sampling, a recipe returns a dataset that does the sampling
itself (docs/how-to).

Random numbers depend on the sample or the micro-batch, not on the process. So they are the same
after a resume at any step and, unless batches.micro_batch_size is 0, for any number of processes.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from .layout import BatchLayout

BLOCK = 8192  # samples that are looked up together
ROUNDS = 12  # with 8, the 120 orders of five samples are not equally frequent
KNOWN_SEED = 20_261_122  # a number that other code is unlikely to use
FROM_KNOWN_SEED = random.Random(KNOWN_SEED).random()
NUMPY_FROM_KNOWN_SEED = np.random.RandomState(KNOWN_SEED).random_sample()
SeedSamples = Literal["auto", True, False]  # see BatchesConfig.seed_samples
# (epoch, index) of a sample; a lane or an evaluation puts its name in place of the epoch
Key = tuple[int | str, int]


def derive_seed(*parts: object) -> int:
    """Hash the parts into a 64-bit seed, the same on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# ---- the samples of each step --------------------------------------------------------------------
class Permutation:
    """A random order of the integers below `size`, any part of which is computed without the rest.

    Each integer is equally likely at every position. The order is a keyed bijection, like a block
    cipher: a Feistel network over the bits of a position. A result of `size` or more is put through
    the network again until it is below `size` (cycle walking; Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). The round function is the finalizer of SplitMix64 (Steele, Lea
    and Flood, "Fast Splittable Pseudorandom Number Generators", 2014). All arithmetic is on
    integers modulo 2**64, so the order is the same on every machine. For comparison, a
    torch.randperm of 1e8 samples takes 3.7 s and 760 MB per process.
    """

    def __init__(self, size: int, *seed: int | str) -> None:
        """Derive the keys of one order.

        Args:
            size: the number of samples, at most 2**63.
            seed: parts of the seed, as for derive_seed.
        """
        self.size = np.uint64(size)
        bits = max(1, (size - 1).bit_length())
        self.low_bits = np.uint64((bits + 1) // 2)
        self.masks = [np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** ((bits + 1) // 2) - 1)]
        self.keys = [np.uint64(derive_seed(*seed, number)) for number in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions: integers below `size`, in any shape."""
        flat = self._encrypt(positions.astype(np.uint64).ravel())
        while len(beyond := np.flatnonzero(flat >= self.size)):
            flat[beyond] = self._encrypt(flat[beyond])
        return flat.reshape(positions.shape)

    def _encrypt(self, numbers: np.ndarray) -> np.ndarray:
        """Permute the numbers below the next power of two."""
        halves = [numbers >> self.low_bits, numbers & self.masks[1]]
        for number, key in enumerate(self.keys):
            changed = number % 2
            halves[changed] ^= _mix(halves[1 - changed] + key) & self.masks[changed]
        return halves[0] << self.low_bits | halves[1]


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of each number: flipping one input bit flips about half of the output bits."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


def permutation(samples: int, seed: int, epoch: int) -> Permutation:
    """Return the order of the samples in an epoch."""
    return Permutation(samples, seed, "order", epoch)


def sample_keys(
    samples: int, layout: BatchLayout, rank: int, seed: int, steps: range
) -> Iterator[list[tuple[int, int]]]:
    """Yield the samples of a rank in these steps as (epoch, index), a list per micro-batch.

    The epoch is sent with the index, since persistent loader workers cannot learn it otherwise.
    """
    size = layout.global_batch_size
    slices = [layout.positions(number) for number, _ in layout.passes(rank)]
    positions = np.concatenate([np.arange(s.start, s.stop) for s in slices])  # in a global batch
    bounds = [*pairwise(np.cumsum([0, *map(len, slices)]).tolist())]
    steps_per_epoch = samples // size
    step = steps.start
    while step < steps.stop:
        epoch, batch = divmod(step, steps_per_epoch)
        last = min(batch + max(1, BLOCK // positions.size), steps_per_epoch)
        last = min(last, batch + steps.stop - step)
        starts = np.arange(batch, last) * size
        for row in permutation(samples, seed, epoch)(starts[:, None] + positions).tolist():
            for begin, end in bounds:
                yield [(epoch, index) for index in row[begin:end]]
        step += last - batch


# ---- random numbers ------------------------------------------------------------------------------
def seed_rng(seed: int) -> None:
    """Seed the random state of torch (CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 78
    random.seed(seed)
    np.random.seed(seed % 2**32)


class SampleSeeds:
    """Seed the global generators for each sample, those of Python and NumPy only if needed.

    With mode "auto", the generators of Python and NumPy are set to a known state before each
    micro-batch. If afterward the next number from either is not the first that this state yields, a
    sample has drawn from that generator. The micro-batch must then be read again, and from then on
    both are seeded for each sample. Except in mode False, torch's generator is seeded for each
    sample, or with the first one's seed for a micro-batch that is read in one call;
    torch.initial_seed() returns this seed.
    """

    def __init__(self, seed: int, mode: SeedSamples) -> None:
        """Seed nothing yet; with mode False, no generator is ever seeded."""
        self.seed = seed
        self.mode = mode
        self.torch_state: torch.Tensor | None = None  # before samples were read in one call

    def each(self, keys: Iterable[Key]) -> Iterator[int]:
        """Seed the generators for each sample, with derive_seed(seed, "sample", epoch, index).

        Args:
            keys: the samples of a micro-batch as (epoch, index); a lane or an evaluation may stand
                in for the epoch.

        Yields:
            The index of each sample, right after the generators are seeded for it.
        """
        seed_torch, mode = torch.default_generator.manual_seed, self.mode
        if mode == "auto":
            random.seed(KNOWN_SEED)
            np.random.seed(KNOWN_SEED)
        for epoch, index in keys:
            if mode:
                derived = derive_seed(self.seed, "sample", epoch, index)
                seed_torch(derived)
                if mode is True:
                    random.seed(derived)
                    np.random.seed(derived % 2**32)
            yield index

    def seed_together(self, keys: Sequence[Key]) -> list[int]:
        """Seed for a micro-batch that is read in one call; return the indices of its samples.

        The generators are seeded only once, as `each` seeds them for the first sample.
        """
        next(self.each(keys))
        self.torch_state = torch.default_generator.get_state()
        return [index for _, index in keys]

    def missed_a_draw(self) -> bool:
        """Return whether samples drew from a generator that was not seeded for each sample."""
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
        seed: the run's seed.
        step: the training step, or the name of an evaluation.
        micro_batch: its number, counted over all ranks.
        device: the model's device; besides the CPU, only CUDA devices are seeded.
    """
    derived = derive_seed(seed, "model", step, micro_batch)
    seed_rng(derived)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(derived)
