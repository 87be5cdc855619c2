"""The order of an epoch: every sample once, each order equally likely, the same everywhere."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from my_project.loading.seeding import Permutation, permutation, sample_keys


def order_of(size: int, seed: int) -> list[int]:
    return Permutation(size, seed)(np.arange(size)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 70, 1000, 65536, 65537])
def test_every_sample_once(size):
    for seed in range(3):
        assert sorted(order_of(size, seed)) == list(range(size))


def chi_square(counts: np.ndarray) -> float:
    """Return how far counts are from equal, in standard deviations of the chi-square statistic."""
    mean, freedom = counts.mean(), counts.size - 1
    return ((counts - mean) ** 2 / mean).sum() / math.sqrt(2 * freedom) - math.sqrt(freedom / 2)


def test_all_orders_of_few_samples_are_equally_frequent():
    """The seeds are fixed, so each run has the same counts; by chance 5 is never reached."""
    for size in (2, 3, 4, 5):
        seen = Counter(tuple(order_of(size, seed)) for seed in range(1000))
        counts = np.array([seen[order] for order in permutations(range(size))])
        assert abs(chi_square(counts)) < 5, size


def test_the_order_is_the_same_on_every_machine():
    """Numbers written down once, of sizes with halves of equal and of different length."""
    assert order_of(10, 0) == [1, 2, 4, 5, 9, 3, 8, 0, 6, 7]
    positions = np.array([0, 1, 2**40, 2**41 + 4])
    assert Permutation(2**41 + 5, 7, "order", 3)(positions).tolist() == [
        1203615445783,
        1608415733206,
        1937278159248,
        1902800120512,
    ]


def test_the_first_step_of_a_huge_dataset_is_found_at_once():
    """Its order would not fit into memory, nor be made within the time limit of a test."""
    from my_project.loading.layout import BatchLayout

    layout = BatchLayout(global_batch_size=8, micro_batches=2, world_size=2)
    samples, step = 10**15, 10**14
    (keys,) = sample_keys(samples, layout, 1, 0, range(step, step + 1))
    wanted = permutation(samples, 0, 0)(np.arange(step * 8 + 4, step * 8 + 8)).tolist()
    assert keys == [(0, index) for index in wanted]
