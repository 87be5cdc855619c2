"""A run continues where it stopped, in the middle of an epoch, on any number of processes."""

import dataclasses
import os
import shutil
import time
from pathlib import Path

import pytest
from ragged import Ragged
from runs import (
    assert_same_weights,
    averaged,
    change,
    make_config,
    quick,
    records,
    status,
    train,
    values,
)
from world import run_world

from my_project import files
from my_project.checkpoint import saving
from my_project.config import Config, ConfigError
from my_project.run_files import checkpoints
from my_project.run_folder import Run

# An epoch has 4 steps; step 6 is in the middle of the second.
FIRST = 6


def train_then_again(first: Config, second: Config) -> tuple[int, int]:
    """Train, then continue in the same processes."""
    return train(first), train(second)


def interrupted_at(config: Config, step: int, rank: int = 1) -> Config:
    """Change a config so that a process gets SIGTERM while it computes the given step."""
    fault = {"fault": "preempt", "fault_at": step, "fault_on_rank": rank}
    return change(config, recipe=dataclasses.replace(config.recipe, **fault))


def assert_same(run: Config, reference: Config, tolerance: float) -> None:
    assert_same_weights(run, reference, tolerance)
    assert [r["step"] for r in records(run)] == list(range(1, 11))
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert values(run, name) == pytest.approx(
            values(reference, name), rel=max(tolerance, 1e-12)
        )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Config:
    recipe = Ragged(dtype="float64", dropout=0.2, noise=0.1)
    saves = {"checkpoints__every_steps": FIRST, "checkpoints__keep": 9}
    config = make_config(tmp_path_factory.mktemp("runs"), recipe, **averaged(0.8), **saves)
    run_world(2, train, config)
    return config


@pytest.mark.parametrize(
    ("processes", "tolerance", "newest"),
    quick(2, [(2, 0.0, 6), (3, 1e-9, 6), (1, 1e-9, 6), (4, 1e-9, 6), (2, 0.0, 10)]),
)
def test_resume_equals_uninterrupted_run(tmp_path, uninterrupted, processes, tolerance, newest):
    """The run was killed at step 8, or at its end; `newest` is its newest checkpoint's step."""
    config = change(uninterrupted, runs_folder=str(tmp_path))
    shutil.copytree(uninterrupted.folder, config.folder)
    if newest == FIRST:
        shutil.rmtree(config.folder / "checkpoints" / "step_00000010")
    shutil.rmtree(config.folder / "export")
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 8, "steps": 10}')
    run_world(processes, train, config)
    assert_same(config, uninterrupted, tolerance)
    results = [status(run)["result"]["validation/auroc"] for run in (config, uninterrupted)]
    assert results[0] == pytest.approx(results[1])


@pytest.mark.slow
def test_a_run_is_resumed_on_any_numbers_of_processes_in_turn(tmp_path):
    recipe = Ragged(dtype="float64", dropout=0.2, noise=0.1)
    settings = averaged(0.8) | {"batches__micro_batch_size": 2}
    whole = make_config(tmp_path, recipe, run_name="whole", **settings)
    assert run_world(1, train, whole) == [0]
    config = change(whole, run_name="resumed")
    for processes, step in ((4, 0), (3, 2), (7, 4), (2, 6)):
        stopped = interrupted_at(config, step)
        assert run_world(processes, train, stopped) == [75] * processes
        assert status(config)["step"] == step + 2
    assert run_world(1, train, config) == [0]
    assert_same(config, whole, 1e-9)


def test_signal_on_one_process_stops_all_and_the_same_command_continues(tmp_path, uninterrupted):
    config = change(uninterrupted, runs_folder=str(tmp_path))
    assert run_world(2, train, interrupted_at(config, 4)) == [75, 75]
    left = status(config)
    # the request in step 4 is read after step 5: six steps are done
    assert (left["outcome"], left["step"]) == ("preempted", 6)
    assert run_world(2, train, config) == [0, 0]
    assert_same(config, uninterrupted, 0.0)


def make_disk_slow() -> None:
    flush = files.flush_to_disk

    def slowly(path: Path) -> None:
        time.sleep(0.5)
        flush(path)

    files.flush_to_disk = saving.flush_to_disk = slowly


def checkpoints_at_exit(config: Config) -> list[str]:
    """Train with a slow disk; list the checkpoints when main returns."""
    make_disk_slow()
    assert train(config) == 75
    return [folder.name for folder in checkpoints(config.folder)]


@pytest.mark.slow
def test_no_process_leaves_before_the_state_is_saved(tmp_path):
    """The launcher ends the others soon after the first exits, even in the middle of a save."""
    config = interrupted_at(make_config(tmp_path), 4)
    assert run_world(2, checkpoints_at_exit, config) == [["step_00000006"]] * 2


def test_a_finished_run_shows_its_result_and_a_longer_one_goes_on(tmp_path, capsys):
    config = make_config(tmp_path, steps=4)
    assert run_world(1, train_then_again, config, config) == [(0, 0)]
    before = os.stat(config.folder / "metrics.jsonl").st_mtime_ns
    assert train(config) == 0
    shown = capsys.readouterr().out
    assert "validation/accuracy" in shown
    assert str(config.run_name) in shown
    assert os.stat(config.folder / "metrics.jsonl").st_mtime_ns == before, "nothing is trained"
    shutil.rmtree(config.folder / "export")
    assert train(config) == 0
    assert (config.folder / "export/model.safetensors").is_file(), "it is exported again"
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4]
    run_world(1, train, change(config, steps=6))
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5, 6]


def test_a_changed_config_is_refused_with_the_keys_and_two_remedies(tmp_path):
    config = make_config(tmp_path, steps=2)
    run_world(1, train, config)
    changed = change(config, optim__lr=0.01, recipe__dropout=0.5, telemetry__every_steps=2)
    with pytest.raises(ConfigError) as refusal:
        train(changed)
    message = str(refusal.value)
    assert "optim.lr (0.05 there, 0.01 here)" in message
    assert "recipe.dropout (0.0 there, 0.5 here)" in message
    assert "telemetry" not in message
    assert "--run_name" in message
    assert "--resume never" in message


def test_resume_from_a_path_that_is_not_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/run.json").touch()
    for name, problem in {
        "nowhere": "it does not exist",
        "other": "it is a run folder; the checkpoints of a run are in its checkpoints/",
        "empty": "it has no manifest.json, so it is not a complete checkpoint",
    }.items():
        sentence = f"{name} cannot be used: {problem}; give another checkpoint, auto or never"
        with pytest.raises(ConfigError, match=sentence):
            train(make_config(tmp_path, resume=str(tmp_path / name)))


def open_run(config: Config) -> None:
    Run(config, rank=0)


def test_two_launches_cannot_use_one_run_folder(tmp_path):
    config = make_config(tmp_path)
    mine = Run(config, rank=0)
    with pytest.raises(RuntimeError, match="is in use by process") as refusal:
        run_world(1, open_run, config)
    assert mine.lock
    assert "choose another --run_name" in str(refusal.value)
    assert "TransientError" in str(refusal.value), "exit code 1: the other process may end soon"


@pytest.mark.slow
def test_the_launchers_logs_stay_in_place_when_a_run_begins_again(tmp_path):
    config = make_config(tmp_path, steps=2, resume="never")
    log = config.folder / "logs/node_0/stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("of this launch")
    assert train(config) == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [config.run_name]
    assert train(config) == 0
    assert log.read_text() == "of this launch"
    assert (tmp_path / f"{config.run_name}.old-1/export").is_dir()
    assert not (tmp_path / f"{config.run_name}.old-1/logs").exists()
