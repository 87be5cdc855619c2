"""Spikes: what is marked in a curve, and what is not."""

import math
import random
import statistics

import pytest

from my_project.records.spikes import LEAST, PAUSE_STEPS, WINDOW, Spikes

# Loss and gradient norm of each step of configs/image_classification.yaml, on one CPU process.
IMAGES = (
    """
2.39 2.29 2.26 2.17 2.11 2 2.1 1.88 1.88 1.72 1.68 1.6 1.71 1.32 1.5 1.52 1.28 1.31 1.05 1.06 0.986
0.854 0.977 0.795 0.837 0.778 0.716 0.584 0.62 0.609 0.696 0.645 0.594 0.334 0.789 0.761 0.396 0.416
0.397 0.38 0.456 0.343 0.35 0.347 0.3 0.252 0.209 0.262 0.513 0.314 0.341 0.46 0.475 0.27 0.489
0.562 0.516 0.336 0.359 0.239 0.385 0.421 0.435 0.407 0.367 0.361 0.449 0.187 0.268 0.295 0.278
0.296 0.281 0.393 0.206 0.36 0.288 0.342 0.253 0.36 0.155 0.221 0.272 0.172 0.254 0.215 0.141 0.199
0.243 0.184 0.234 0.202 0.263 0.33 0.157 0.272 0.294 0.147 0.176 0.22 0.127 0.217 0.132 0.194 0.331
0.116 0.191 0.253 0.0857 0.15 0.0721 0.227 0.166 0.259 0.105 0.131 0.141 0.158 0.0658 0.116 0.224
0.18 0.0481 0.118 0.153 0.0725 0.195 0.195 0.137 0.223 0.184 0.198 0.124 0.133 0.133 0.0904 0.129
0.0445 0.0793 0.09 0.0869 0.0414 0.0858 0.108 0.0624 0.128 0.228 0.0898 0.19 0.0596 0.316 0.151
0.163 0.227 0.161 0.0706 0.0793 0.0424 0.0913 0.0524 0.114 0.0391 0.0624 0.0875 0.0195 0.124 0.0425
0.119 0.111 0.0235 0.0873 0.185 0.128 0.13 0.0454 0.112 0.0742 0.0596 0.0574 0.0541 0.202 0.0154
0.102 0.06 0.0131 0.124 0.0484 0.1 0.127 0.0475 0.0526 0.098 0.0793 0.0814 0.0286 0.0283 0.0332
0.0299 0.057 0.0326 0.0276 0.106 0.0599 0.057 0.0378 0.0559 0.136 0.11 0.0603 0.0241 0.0962 0.0775
0.0973 0.114 0.0395 0.0509 0.0789 0.0737 0.0694 0.0112 0.00782 0.0313 0.0117 0.0446 0.122 0.173
0.0351 0.0805 0.0104 0.0931 0.179 0.0201 0.0923 0.0759 0.0649 0.079 0.032 0.0175 0.00709 0.00981
0.0487 0.171 0.051 0.0208 0.0142 0.0111 0.0599 0.0284 0.0432 0.0145 0.0483 0.0365 0.0974 0.00758
0.0712 0.0183 0.109 0.0133 0.0163 0.0838 0.0287 0.0115 0.0466 0.0186 0.0146 0.0128 0.0149 0.0138
0.0504 0.0139 0.016 0.0267 0.0167 0.0445 0.0164 0.0278 0.0406 0.0145 0.0206 0.0623 0.00761 0.0254
0.0122 0.0419 0.025 0.00756 0.0236 0.00861 0.0148 0.0199 0.0679 0.0217 0.00845 0.0253 0.0137 0.0237
0.0384 0.0394 0.00656 0.0174 0.0132 0.00561 0.019 0.0041 0.0292 0.0214 0.0266 0.0334 0.00703 0.0446
0.0139 0.00519 0.0159 0.0257 0.0266 0.0254 0.0104 0.00262 0.0112 0.0255 0.011 0.0105 0.00647 0.0293
0.00765 0.0242 0.0189 0.00989 0.0092 0.00728
""",
    """
2.92 2.64 2.61 2.72 2.57 2.47 2.53 2.37 2.38 2.21 2.22 2.25 2.5 2.15 2.05 2.36 1.88 2.24 2.06 2.06
2.05 2.09 2.35 2.29 2.49 2.4 2.17 2.51 2.42 2.83 2.61 3.41 2.33 1.56 2.73 3.13 2.59 2.56 2.75 2.39
1.97 1.92 1.82 1.87 1.56 1.29 1.4 1.34 2.29 1.65 2.16 2.37 2.41 1.68 2.46 2.33 2.19 1.92 1.62 1.71
1.64 1.86 2.32 2.3 2.08 1.9 2.07 1.21 1.58 2.03 1.56 1.35 1.54 2.18 1.24 1.96 1.35 1.77 1.39 1.35
0.943 1.22 1.14 1.11 1.82 1.06 0.863 1.36 1.69 1.08 1.25 0.956 1.64 1.56 1.17 1.66 1.44 1.02 1.09
1.21 0.947 1.27 1 1.3 1.73 0.933 1.55 1.19 0.903 1.13 0.702 1.24 0.88 1.43 0.941 1.07 1.07 1.6 0.827
0.894 1.1 1 0.583 1.18 1.12 0.625 1.2 1.18 1.1 1.68 1.15 1.2 1.14 1.18 0.915 0.578 0.932 0.644 1.03
0.815 0.877 0.426 0.738 0.883 0.594 1.25 1.98 0.82 1.15 0.715 1.6 1.91 1.51 1.51 1.36 0.89 0.906 0.5
0.844 0.555 0.977 0.519 0.605 1.21 0.309 0.765 0.557 1.48 0.977 0.367 0.858 1.35 1.44 1.18 0.641
0.782 0.933 0.769 0.519 0.774 1.75 0.217 1.11 0.721 0.222 1.03 0.801 0.966 0.905 0.632 0.559 0.942
0.715 0.739 0.437 0.461 0.526 0.533 0.616 0.36 0.366 1 0.892 0.716 0.506 0.749 1.17 0.828 0.836
0.362 0.655 0.979 0.921 1.3 0.468 0.829 0.74 1.16 1.06 0.157 0.0861 0.439 0.158 0.633 0.653 0.953
0.487 0.726 0.12 1.07 0.985 0.265 1.14 0.689 0.725 1.15 0.45 0.348 0.123 0.175 0.674 1.21 0.611
0.448 0.137 0.185 0.883 0.358 0.812 0.186 0.586 0.562 0.719 0.105 0.501 0.298 0.787 0.223 0.313 1.11
0.455 0.2 0.681 0.526 0.19 0.2 0.203 0.254 0.746 0.198 0.36 0.419 0.322 0.702 0.285 0.412 0.588
0.205 0.421 1.01 0.132 0.435 0.237 0.664 0.547 0.0806 0.36 0.131 0.242 0.676 0.845 0.359 0.132 0.636
0.224 0.491 0.589 0.595 0.128 0.35 0.223 0.167 0.554 0.0619 0.428 0.322 0.578 1.04 0.104 0.827 0.26
0.0897 0.209 0.489 0.334 0.312 0.21 0.0359 0.207 0.475 0.173 0.248 0.0855 0.645 0.155 0.589 0.319
0.128 0.14 0.0932
""",
)
# Loss and gradient norm of each step of configs/causal_lm.yaml, on one CPU process.
LANGUAGE = (
    """
5.25 5.19 5.08 4.97 4.85 4.78 4.62 4.55 4.42 4.3 4.17 3.98 3.85 3.8 3.56 3.38 3.35 3.2 3.15 3.1 3.04
3.03 2.97 2.97 2.94 2.89 2.74 2.78 2.83 2.76 2.66 2.69 2.7 2.61 2.66 2.54 2.55 2.5 2.59 2.43 2.49
2.53 2.37 2.46 2.46 2.36 2.29 2.41 2.37 2.38 2.33 2.41 2.38 2.31 2.29 2.33 2.24 2.29 2.32 2.24 2.28
2.33 2.32 2.36 2.29 2.32 2.27 2.22 2.2 2.16 2.18 2.2 2.21 2.17 2.15 2.16 2.13 2.13 2.15 2.16 2.11
2.08 2.05 2.08 2.17 2.04 2.06 2.04 2.08 1.99 1.99 2.07 1.97 1.95 2.13 2.06 1.95 2.12 2.1 2 1.94 2.01
1.93 1.86 1.86 2.08 1.99 2.01 1.93 1.94 1.88 1.92 1.85 1.87 1.9 1.87 1.96 1.91 1.84 1.81 1.93 1.86
1.92 1.9 1.9 1.92 1.91 1.88 1.8 1.87 1.88 1.93 1.85 1.74 1.86 1.82 1.85 1.85 1.8 1.84 1.66 1.85 1.81
1.82 1.75 1.76 1.86 1.81 1.77 1.71 1.76 1.67 1.79 1.82 1.81 1.72 1.81 1.73 1.69 1.72 1.72 1.76 1.66
1.68 1.71 1.64 1.6 1.78 1.6 1.72 1.66 1.61 1.67 1.69 1.73 1.64 1.57 1.65 1.57 1.62 1.63 1.64 1.61
1.5 1.59 1.53 1.58 1.73 1.49 1.64 1.57 1.61 1.64 1.56 1.61 1.56 1.61 1.6 1.55 1.62
""",
    """
3.93 3.27 2.97 2.83 2.88 2.8 3.13 2.89 2.94 2.85 2.7 2.76 2.76 2.62 2.22 2.2 1.78 1.71 1.24 1.35
1.03 0.95 3.83 0.882 1.07 0.861 0.883 0.52 0.83 0.784 1.51 1.19 0.719 0.701 1.34 0.677 0.59 0.754
0.442 0.466 0.404 0.696 0.414 0.702 1.25 0.804 1.15 0.633 0.847 0.514 0.631 0.584 0.49 0.563 0.516
0.652 0.975 0.849 0.587 0.934 0.384 0.53 0.694 0.592 0.719 0.538 0.485 0.525 0.539 0.653 0.825 0.662
0.547 0.557 0.694 0.463 0.718 0.546 0.71 0.529 0.536 0.738 0.775 0.7 0.585 1.01 0.823 0.496 0.693
0.65 0.891 0.814 0.512 0.845 0.626 0.663 0.571 0.672 0.716 0.745 0.624 0.698 0.713 0.706 0.678 0.889
0.857 0.591 0.744 0.66 0.779 0.647 0.725 0.654 0.698 0.585 0.638 0.611 0.712 0.557 0.612 0.863 0.728
0.732 0.864 0.591 0.672 0.593 0.767 0.835 0.608 0.689 0.765 0.749 0.951 0.794 0.788 0.928 0.656
0.866 1.02 0.782 0.977 0.824 0.674 0.784 0.712 0.654 0.709 0.586 0.589 0.715 0.574 0.75 0.669 0.656
0.756 0.752 0.664 0.827 0.594 0.746 0.54 0.68 0.548 0.663 0.506 0.544 0.681 0.62 0.576 0.639 0.671
0.547 0.642 0.63 0.577 0.616 0.594 0.667 0.627 0.627 0.598 0.59 0.645 0.57 0.608 0.634 0.51 0.6
0.589 0.58 0.521 0.567 0.554 0.581 0.527 0.514 0.463 0.499
""",
)
CURVES = {
    "images": [[*map(float, text.split())] for text in IMAGES],
    "language": [[*map(float, text.split())] for text in LANGUAGE],
}


def marks(losses: list[float], norms: list[float] | None = None) -> list[tuple[int, str]]:
    """Return the steps and names of all marks; without norms the norm is always 1."""
    spikes, found = Spikes(), []
    for step, loss in enumerate(losses, 1):
        norm = norms[step - 1] if norms else 1.0
        found += [(step, mark["name"]) for mark in spikes.observe(step, loss, norm)]
    return found


@pytest.mark.parametrize("curve", CURVES)
def test_nothing_is_marked_in_the_curve_of_a_sound_run(curve):
    losses, norms = CURVES[curve]
    assert len(losses) >= 200
    assert marks(losses, norms) == []


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
@pytest.mark.parametrize("curve", CURVES)
def test_ten_times_a_value_is_marked_at_any_step(curve, name):
    """At steps whose value is not below the median: the loss of small batches varies by 1:10."""
    losses, norms = (list(values) for values in CURVES[curve])
    values = losses if name == "loss" else norms
    tried = 0
    for i in range(LEAST, len(values)):
        before = values[max(0, i - WINDOW) : i]
        if values[i] >= statistics.median(before) or (curve, name) == ("language", "loss"):
            changed = [*values[:i], 10 * values[i]]
            curves = (changed, norms) if name == "loss" else (losses, changed)
            assert marks(curves[0][: i + 1], curves[1][: i + 1]) == [(i + 1, name)], i + 1
            tried += 1
    assert tried >= 50


def test_a_mark_has_the_value_and_the_median_of_the_steps_before():
    spikes = Spikes()
    for step in range(1, 51):
        assert spikes.observe(step, 2.0 + step % 2 / 10, 1.0) == []
    (mark,) = spikes.observe(51, 9.5, 1.0)
    assert mark == {"name": "loss", "value": 9.5, "median": pytest.approx(2.05)}


def noisy(level: float, steps: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [level * (1 + noise * generator.gauss(0, 1)) for _ in range(steps)]


def test_a_fifth_more_is_marked_on_a_smooth_curve_and_not_on_a_noisy_one():
    assert marks([*noisy(2.0, 100, noise=0.01), 2.4]) == [(101, "loss")]
    assert marks([*noisy(2.0, 100, noise=0.05), 2.4]) == []


@pytest.mark.parametrize("level", [0.0, 1e-3, 2.0, -2.0, 1e6])
def test_noise_in_the_last_bits_of_a_constant_is_not_marked(level):
    generator = random.Random(0)
    bit = abs(level) * 2**-23 or 1e-12  # of float32
    for often in (2, 50):
        bits = [level + bit * (generator.randrange(often) == 0) for _ in range(500)]
        assert marks(bits, bits) == []


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_even_noise_is_not_marked_in_thirty_thousand_steps(noise):
    generator = random.Random(0)
    assert marks([generator.lognormvariate(0, noise) for _ in range(30_000)]) == []


def test_a_curve_that_falls_is_not_marked_but_what_rises_from_it_is():
    falling = [5 * math.exp(-i / 100) * (1 + 0.1 * math.sin(i)) for i in range(400)]
    assert marks(falling) == []
    assert marks([*falling[:200], 20.0]) == [(201, "loss")]
    assert marks([-value for value in falling]) == [], "a negative loss that rises slowly"
    assert marks([*noisy(-2.0, 100), 3.0]) == [(101, "loss")]


def test_values_below_are_not_marked():
    assert marks([*noisy(2.0, 100), 0.001, *noisy(2.0, 20)]) == []


def test_nothing_is_marked_before_there_are_enough_values():
    assert marks([*noisy(1.0, LEAST - 1), 50.0]) == []
    assert marks([*noisy(1.0, LEAST), 50.0]) == [(LEAST + 1, "loss")]


def test_a_plateau_after_a_jump_is_marked_once_and_is_the_new_median():
    jumped = [*noisy(1.0, 100), *noisy(5.0, 300, seed=1)]
    assert marks(jumped) == [(101, "loss")]
    assert marks([*jumped, 25.0]) == [(101, "loss"), (401, "loss")]


def test_marks_of_a_name_are_not_closer_than_the_pause_and_names_do_not_share_it():
    losses, norms = noisy(1.0, 300), noisy(1.0, 300, seed=1)
    for i in (100, 102, 110, 100 + PAUSE_STEPS):
        losses[i] = 40.0
    norms[104] = 40.0
    found = marks(losses, norms)
    assert found == [(101, "loss"), (105, "gradient_norm"), (101 + PAUSE_STEPS, "loss")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_neither_marked_nor_kept(value):
    losses = [*noisy(1.0, 100), *[value] * 200, *noisy(1.0, 30, seed=1)]
    assert marks(losses, losses) == []
    assert marks([*losses, 10.0]) == [(331, "loss")]


def test_the_median_is_that_of_the_last_values():
    generator = random.Random(0)
    spikes, values = Spikes(), []
    window = spikes.windows["loss"]
    for step in range(1000):
        values.append(float(generator.choice((1, 2, 2, 3, generator.random()))))
        spikes.observe(step, values[-1], math.nan)
        assert window.median == statistics.median(values[-WINDOW:])
    assert not spikes.windows["gradient_norm"].values
