"""Spikes: which values of a curve are marked, and which are not."""

import math
import random

from my_project.tools.spikes import MIN_VALUES, spikes


def marks(values: list[float]) -> list[int]:
    return [*spikes(values)]


def noisy(level: float, count: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [level * (1 + noise * generator.gauss(0, 1)) for _ in range(count)]


def falling(count: int) -> list[float]:
    return [5 * math.exp(-i / 100) * (1 + 0.1 * math.sin(i)) for i in range(count)]


def test_nothing_is_marked_in_sound_curves():
    generator = random.Random(0)
    bits = [2.0 + 2 * 2**-23 * (generator.randrange(50) == 0) for _ in range(500)]  # of float32
    curves = [falling(400), bits, [0.0] * 100]
    curves += [[generator.lognormvariate(0, noise) for _ in range(9000)] for noise in (0.1, 0.3)]
    for values in curves:
        assert marks(values) == []
    assert marks([*noisy(2.0, 100), 0.001, *noisy(2.0, 20)]) == [], "a value below the median"
    assert marks([*noisy(1.0, MIN_VALUES - 1), 50.0]) == [], "too few values before it"


def test_what_rises_far_above_the_median_is_marked():
    values = [2.0 + index % 2 / 10 for index in range(50)]
    assert marks([*values, 9.5]) == [50]
    assert marks([*falling(200), 20.0]) == [200]
    assert marks([*noisy(2.0, 100, noise=0.01), 2.4]) == [100], "a fifth more, on a smooth curve"
    assert marks([*noisy(2.0, 100, noise=0.05), 2.4]) == [], "and on a noisy one"


def test_a_plateau_after_a_jump_is_marked_once():
    jumped = [*noisy(1.0, 300), *noisy(5.0, 100, seed=1)]
    assert marks([*jumped, 9.0]) == [300, 400]


def test_what_is_not_finite_is_neither_marked_nor_kept():
    assert marks([*noisy(1.0, 100), *[math.nan] * 200, *noisy(1.0, 30, seed=1), 10.0]) == [330]
