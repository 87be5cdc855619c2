"""Records: what they say of throughput, and of what a run is continued with."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import make_config, records

from my_project import batches, telemetry
from my_project.run import Run


class Clock:
    """Stands still until it is told to go on."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def read(self, seconds: float) -> Iterator[int]:
        """Make batches, each of which takes so long."""
        while True:
            self.now += seconds
            yield 0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(telemetry, "time", clock)
    return clock


def telemetry_of(folder: Path, steps: int, **settings: Any) -> telemetry.Telemetry:
    config = make_config(folder, steps=steps, **settings)
    run = Run(config, steps, rank=0)
    run.folder.mkdir()
    accelerator: Any = SimpleNamespace(
        is_main_process=True, device=torch.device("cpu"), trackers=[],
        log=lambda values, step: None,
    )  # fmt: skip
    watch: Any = SimpleNamespace(pause=lambda: None, step_done=lambda: None)
    state = {
        "step": 0, "weight_per_micro_batch": 1.0, "interval_loss": 0.0, "interval_weight": 0.0,
        "skipped_steps": 0, "nonfinite_in_a_row": 0,
    }  # fmt: skip
    split = batches.split(config.batches, 1)
    return telemetry.Telemetry(
        accelerator, config, run, split, state, watch, torch.nn.Linear(1, 1), None
    )


def test_a_record_has_the_time_of_its_own_steps(tmp_path, clock):
    """Seconds of each step; a record every two; a save or an evaluation after steps 4, 5 and 7."""
    log = telemetry_of(tmp_path, steps=8, telemetry__every_steps=2)
    with log.paused():  # the sanity check
        clock.now += 1000
    samples = log.timed(clock.read(0.25))
    for step, seconds in enumerate([1, 3, 2, 6, 4, 4, 0.5, 1.5]):
        next(samples)
        clock.now += seconds - 0.25
        log.push(step, torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]))
        if step + 1 in (4, 5, 7, 8):
            log.flush()
            with log.paused():
                clock.now += 100
            clock.now += 10 if step + 1 == 4 else 0  # not in a pause: part of the next interval
    seen = [
        (r["step"], 32 / r["samples_per_second"], r["data_seconds"]) for r in records(log.config)
    ]
    assert seen == [(2, 4, 0.5), (4, 8, 0.5), (6, 18, 0.5), (8, 2, 0.5)]
    assert log.samples_per_second == 8 * 16 / (4 + 8 + 18 + 2)
