"""Nodes without shared storage: each has its own disk, and the mirror exchanges their files."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from my_project.run_files import checkpoint_step, checkpoints
from ragged import Deep
from runs import assert_same_weights, change, make_config, quick, records, status, train
from test_fsdp_on_cpu import train_sharded
from world import run_world


def deep(folder: Path, **settings):
    more = {
        "checkpoints__every_steps": 2,
        "checkpoints__mirror": f"file://{folder}/mirror",
        "evaluation__every_steps": 4,
        "evaluation__best_metric": "validation/accuracy",
        "optim__ema_decay": 0.9,
        "batches__micro_batch_size": 4,
        "run_name": "here",
        "runs_folder": "runs",
        "steps": 8,
    }
    return make_config(folder, Deep(dtype="float64", width=6), **more | settings)


def disk(folder: Path, host: int) -> Path:
    return folder / f"disk{host}"


def on_own_disk(folder: Path, train_it: Callable, config) -> int:
    """Train one process of a host, in the host's own current folder."""
    host = int(os.environ.get("RANK", "0"))
    disk(folder, host).mkdir(exist_ok=True)
    os.chdir(disk(folder, host))
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    socket.gethostname = lambda: f"host{host}"
    return train_it(config)


@pytest.mark.parametrize("train_it", quick(1, [train_sharded, train]))
def test_a_disk_is_lost_with_its_host_and_the_run_goes_on(tmp_path, train_it):
    config = deep(tmp_path)
    whole = change(config, runs_folder=str(tmp_path / "whole"), checkpoints__mirror=None)
    assert run_world(2, train_it, whole) == [0, 0]
    fault = change(config.recipe, fault="preempt", fault_at=3, fault_on_rank=1)
    assert run_world(2, on_own_disk, tmp_path, train_it, change(config, recipe=fault)) == [75, 75]
    here = change(config, runs_folder=str(disk(tmp_path, 0) / "runs"))
    saved = status(here)["step"]
    assert 4 <= saved < 8
    assert not checkpoints(disk(tmp_path, 1) / "runs/here")
    for lost in (1, 0):  # the second time the disk of rank 0
        shutil.rmtree(disk(tmp_path, lost))
        stops = change(config, recipe=change(fault, fault_at=saved)) if lost else config
        assert run_world(2, on_own_disk, tmp_path, train_it, stops) == [75 if lost else 0] * 2
        assert status(here)["from_step"] >= saved
        saved = status(here)["step"]
    assert_same_weights(here, whole)
    assert_same_weights(here, whole, part="best")
    assert [record["step"] for record in records(here)] == [*range(1, 9)]
    assert not list((tmp_path / "mirror/here").glob("parts/*/*"))
    assert not list(disk(tmp_path, 1).glob("runs/here/checkpoints/.step*"))


def test_nodes_with_other_checkpoints_go_on_from_the_newest_that_all_have(tmp_path, capfd):
    """Rank 0 was killed before its newest one was uploaded, so the other node cannot have it."""
    config = deep(tmp_path)
    fault = change(config.recipe, fault="preempt", fault_at=5, fault_on_rank=1)
    assert run_world(2, on_own_disk, tmp_path, train, change(config, recipe=fault)) == [75, 75]
    here, mirrored = disk(tmp_path, 0) / "runs/here", tmp_path / "mirror/here"
    newest = checkpoints(here)[-1]
    shutil.rmtree(mirrored / "checkpoints" / newest.name)
    assert run_world(2, on_own_disk, tmp_path, train, config) == [0, 0]
    at = change(config, runs_folder=str(here.parent))
    assert status(at)["from_step"] == checkpoint_step(checkpoints(mirrored)[0]) or (
        status(at)["from_step"] < checkpoint_step(newest)
    )
    assert (newest.parent / f"{newest.name}.old-1").is_dir()
    assert "is skipped" not in capfd.readouterr().err, "it is not damaged"
