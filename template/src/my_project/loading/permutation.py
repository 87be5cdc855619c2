"""The order of the samples in an epoch, any part of it without the rest.

The order is a bijection of the numbers below n with a key, as a block cipher is of its blocks: a
Feistel network over the bits of a position, whose results of n or more are put through it again
until they are below n (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", 2014). All of it is integer arithmetic modulo 2**64, so the order
is the same on every machine. A torch.randperm of 1e8 samples takes 3.7 s and 760 MB per process.
"""

import numpy as np

from .seeding import derive_seed

ROUNDS = 12  # with 8, the 120 orders of five samples are not equally frequent


class Permutation:
    """A random order of the numbers below size; equally likely for every sample and position."""

    def __init__(self, size: int, *seed: int | str) -> None:
        """Choose one of the orders.

        Args:
            size: of the order, at most 2**63.
            seed: parts of the seed, as for derive_seed.
        """
        self.size = np.uint64(size)
        bits = max(1, (size - 1).bit_length())
        self.low_bits = np.uint64((bits + 1) // 2)
        self.masks = [np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** ((bits + 1) // 2) - 1)]
        self.keys = [np.uint64(derive_seed(*seed, number)) for number in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions, integers of any shape and below size."""
        flat = self._encrypt(positions.astype(np.uint64).ravel())
        while len(beyond := np.flatnonzero(flat >= self.size)):
            flat[beyond] = self._encrypt(flat[beyond])
        return flat.reshape(positions.shape)

    def _encrypt(self, numbers: np.ndarray) -> np.ndarray:
        """Map the numbers below the next power of two onto each other."""
        halves = [numbers >> self.low_bits, numbers & self.masks[1]]
        for number, key in enumerate(self.keys):
            changed = number % 2
            halves[changed] ^= _mix(halves[1 - changed] + key) & self.masks[changed]
        return halves[0] << self.low_bits | halves[1]


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of each number: any of them changes about half of all."""
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
