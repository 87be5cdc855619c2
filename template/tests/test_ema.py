"""The average of the weights. Delete this file together with ema.py (AGENTS.md)."""

import pytest
import torch
from ragged import Ragged
from runs import change, make_config, train, weights
from world import run_world

from my_project.config import ConfigError
from my_project.ema import ema_problem


def test_the_average_of_the_weights_is_what_is_exported(tmp_path):
    every = {"checkpoints__every_steps": 1, "checkpoints__keep": 9}
    averaged = make_config(tmp_path, steps=3, optim__ema_decay=0.5, **every)
    still = change(averaged, run_name="still", optim__ema_decay=1.0)
    for config in (averaged, still):
        run_world(1, train, config)
    initial = weights(still.folder / "export")
    steps = [weights(averaged.folder / f"checkpoints/step_{n:08d}") for n in (1, 2, 3)]
    for key, value in weights(averaged.folder / "export").items():
        first, second, last = (step[key] for step in steps)
        average = initial[key] / 8 + first / 8 + second / 4 + last / 2
        torch.testing.assert_close(value, average)


def test_weights_in_bfloat16_have_no_average_since_it_would_never_move(tmp_path):
    config = make_config(tmp_path, Ragged(dtype="bfloat16"), optim__ema_decay=0.9999)
    with pytest.raises(ConfigError, match=r"weight is in torch\.bfloat16.* build the model in"):
        train(config)


@pytest.mark.parametrize("steps", [1, 10, 4000, 100_000])
def test_the_decay_that_the_warning_names_is_not_warned_of(steps):
    limit = float(ema_problem(0.9999999, steps).rpartition("at most ")[2].rstrip("."))
    assert not ema_problem(limit, steps)
    assert limit > 0.05 ** (1 / steps) - 0.01 / steps
