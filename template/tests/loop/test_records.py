"""Records: what they say of throughput, and of what a run is continued with."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from ragged import Ragged
from runs import change, make_config, records, train
from world import run_world

from my_project import devices
from my_project.config import Config
from my_project.loading.layout import batch_layout
from my_project.records import metrics
from my_project.run_folder import Run
from my_project.state import StepReport, TrainState


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
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def writer_of(folder: Path, steps: int, **settings: Any) -> metrics.MetricsWriter:
    config = make_config(folder, steps=steps, **settings)
    run = Run(config, rank=0)
    run.total_steps = steps
    run.folder.mkdir()
    accelerator: Any = SimpleNamespace(
        is_main_process=True, device=torch.device("cpu"), trackers=[],
        log=lambda values, step: None,
    )  # fmt: skip
    layout = batch_layout(config.batches, 1)
    state = TrainState(items_per_micro_batch=1.0)
    return metrics.MetricsWriter(accelerator, run, layout, state, torch.nn.Linear(1, 1))


def test_a_record_has_the_time_of_its_own_steps(tmp_path, clock):
    """Seconds of each step; a record every two; a save or an evaluation after steps 4, 5 and 7."""
    log = writer_of(tmp_path, steps=8, telemetry__every_steps=2)
    with log.paused():  # the sanity check
        clock.now += 1000
    samples = log.timed(clock.read(0.25))
    unread: list[StepReport] = []
    for step, seconds in enumerate([1, 3, 2, 6, 4, 4, 0.5, 1.5]):
        next(samples)
        clock.now += seconds - 0.25
        log.step_ended(step)
        unread.append(StepReport(step, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0))
        if len(unread) > 1:  # the numbers of a step come after the next one
            log.observe(unread.pop(0))
        if step + 1 in (4, 5, 7, 8):
            log.observe(unread.pop())
            with log.paused():
                clock.now += 100
            clock.now += 10 if step + 1 == 4 else 0  # not in a pause: part of the next interval
    seen = [
        (r["step"], 32 / r["samples_per_second"], r["data_seconds"]) for r in records(log.config)
    ]
    assert seen == [(2, 4, 0.5), (4, 8, 0.5), (6, 18, 0.5), (8, 2, 0.5)]
    assert log.throughput == {"samples per second": 8 * 16 / (4 + 8 + 18 + 2)}


def numerics(config: Config) -> dict[str, Any]:
    return json.loads((config.folder / "run.json").read_text())["numerics"]


def test_what_a_run_is_continued_with_is_recorded_and_a_change_told(tmp_path, caplog):
    config = make_config(tmp_path, Ragged(validation_samples=0), steps=2)
    plain = {
        "precision": "no", "tf32": True, "deterministic": False, "sharding": "none",
        "comm_hook": "no",
    }  # fmt: skip
    train(config)
    assert numerics(config) == plain
    assert records(config, "changed") == []
    other = change(
        config, steps=4, precision="bf16", tf32=False, distributed__ddp={"comm_hook": "bf16"}
    )
    changed = {
        "precision": ["no", "bf16"], "tf32": [True, False], "comm_hook": ["no", "bf16"],
    }  # fmt: skip
    run_world(2, train, other)
    assert records(config, "changed") == [{"step": 2, "changed": changed}]
    assert numerics(config) == plain | {name: now for name, (_, now) in changed.items()}
    newest = config.folder / "checkpoints/step_00000004"
    assert json.loads((newest / "state.json").read_text())["numerics"] == numerics(config)

    again = change(other, steps=6, distributed__ddp={})  # alone, hence without a hook
    assert "curve may differ" not in caplog.text
    with caplog.at_level(logging.WARNING):
        train(again)
    told = "step_00000004 was trained with comm_hook bf16 (now"
    assert caplog.text.count("curve may differ") == caplog.text.count(told) == 1
    assert [r["step"] for r in records(config, "changed")] == [2, 4]

    for step in (4, 6):  # continued from step 2, so the later changes never were
        shutil.rmtree(config.folder / f"checkpoints/step_{step:08d}")
    train(change(config, steps=8))
    assert records(config, "changed") == []
    assert [r["step"] for r in records(config)] == [*range(1, 9)]


@pytest.mark.parametrize(
    ("kind", "mesh", "wanted"),
    [
        (DistributedType.MULTI_GPU, None, "none"),
        (DistributedType.FSDP, None, "FSDP2"),
        (DistributedType.FSDP, ParallelismConfig(dp_shard_size=8), "FSDP2"),
        (DistributedType.FSDP, ParallelismConfig(dp_replicate_size=2, dp_shard_size=4), "HSDP"),
    ],
)
def test_the_kind_of_sharding_is_told(tmp_path, kind, mesh, wanted):
    accelerator: Any = SimpleNamespace(
        num_processes=8, distributed_type=kind, parallelism_config=mesh, mixed_precision="bf16"
    )
    assert devices.numerics(accelerator, make_config(tmp_path))["sharding"] == wanted
