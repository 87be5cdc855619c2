"""The average of the weights. Delete this file together with ema.py (AGENTS.md)."""

import torch
from runs import change, make_config, train, weights
from world import run_world


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
