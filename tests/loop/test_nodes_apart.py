"""Nodes without shared storage: each has its own disk, and the mirror exchanges their files."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from my_project.config import ConfigError
from my_project.manifest import manifest_text, read_manifest
from my_project.mirror import upload
from my_project.run_files import checkpoint_step, checkpoints, read_info, read_status
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
    """Train one process of a host, in the host's own current folder; host 1 has all other ranks."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host = min(rank, 1)
    disk(folder, host).mkdir(exist_ok=True)
    os.chdir(disk(folder, host))
    local = {"LOCAL_RANK": rank - host, "LOCAL_WORLD_SIZE": max(1, ranks - 1) if host else 1}
    os.environ |= {name: str(number) for name, number in local.items()}
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
    other = disk(tmp_path, 1) / "runs/here"
    assert not checkpoints(other)
    # by these, the launcher of the other node knows that its start has begun the run, and its end
    assert read_info(other) == read_info(here.folder)
    assert read_status(other).outcome == "preempted"
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


def stopped_at(folder: Path, step: int, config, ranks: int = 2) -> Path:
    """Train on disks of their own until a stop at a step; return rank 0's run folder."""
    fault = change(config.recipe, fault="preempt", fault_at=step, fault_on_rank=1)
    stops = change(config, recipe=fault)
    assert run_world(ranks, on_own_disk, folder, train, stops) == [75] * ranks
    return disk(folder, 0) / "runs/here"


def refused(config) -> str:
    with pytest.raises(ConfigError) as error:
        train(config)
    return str(error.value)


def on_partly_shared_disks(folder: Path, config) -> str:
    """Train one process per host; hosts 0 and 1 share a disk, and host 2 has its own."""
    host = int(os.environ["RANK"])
    disk(folder, host // 2).mkdir(exist_ok=True)
    os.chdir(disk(folder, host // 2))
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    socket.gethostname = lambda: f"host{host}"
    return refused(config)


def test_nodes_of_which_only_some_share_a_disk_are_refused(tmp_path):
    """Two ranks would move and remove the same files, and shards would be lost."""
    for message in run_world(3, on_partly_shared_disks, tmp_path, deep(tmp_path)):
        assert "on host2 is not the folder that rank 0 on host0 wrote to" in message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = deep(folder, runs_folder=str(folder), checkpoints__mirror=None)
    assert run_world(2, train, config) == [0, 0]
    return config


def test_rank_0_fetches_an_older_checkpoint_if_others_can_have_no_newer_one(tmp_path, whole):
    """Uploads are slower than two saves: rotation has removed the newest one in the mirror."""
    config = deep(tmp_path)
    here, uploaded = stopped_at(tmp_path, 3, config), tmp_path / "mirror/here/checkpoints"
    shutil.copytree(uploaded, tmp_path / "older")
    oldest = checkpoints(here)[-1]
    stopped_at(tmp_path, 6, config)
    shutil.rmtree(uploaded)
    shutil.rmtree(disk(tmp_path, 1))
    for folder in checkpoints(here):
        if checkpoint_step(folder) <= checkpoint_step(oldest):
            shutil.rmtree(folder)
    newer = checkpoints(here)
    assert newer
    for message in run_world(2, on_own_disk, tmp_path, refused, config):
        assert f"{newer[-1].name} on host0 is not on every node, and file://" in message
    assert checkpoints(here) == newer, "nothing starts over at step 0"
    (tmp_path / "older").rename(uploaded)
    assert run_world(2, on_own_disk, tmp_path, train, config) == [0, 0]
    at = change(config, runs_folder=str(here.parent))
    assert status(at)["from_step"] == checkpoint_step(oldest)
    assert (newer[-1].parent / f"{newer[-1].name}.old-1").is_dir()
    assert_same_weights(at, whole)
    assert_same_weights(at, whole, part="best")


@pytest.mark.parametrize("is_given", [False, True])
def test_a_checkpoint_of_the_same_name_but_other_content_is_not_loaded(tmp_path, whole, is_given):
    """It is of a branch of the run from which it was resumed at an earlier step."""
    config = deep(tmp_path)
    older, newest = checkpoints(stopped_at(tmp_path, 5, config))[-2:]
    other = disk(tmp_path, 1) / newest.relative_to(disk(tmp_path, 0))
    shutil.copytree(newest, other)
    content = read_manifest(other)
    (other / "manifest.json").write_text(manifest_text({**content, "provenance": {"other": 1}}))
    given = older if is_given else newest
    name = str(given.relative_to(disk(tmp_path, 0))) if is_given else "auto"
    assert run_world(2, on_own_disk, tmp_path, train, change(config, resume=name)) == [0, 0]
    at = change(config, runs_folder=str(disk(tmp_path, 0) / "runs"))
    assert status(at)["from_step"] == checkpoint_step(given)
    assert read_manifest(other.with_name(f"{other.name}.old-1"))["provenance"] == {"other": 1}
    assert_same_weights(at, whole)


def test_a_given_checkpoint_is_used_if_all_nodes_have_it_and_refused_otherwise(tmp_path):
    config = deep(tmp_path)
    newest = checkpoints(stopped_at(tmp_path, 5, config))[-1]
    given = newest.relative_to(disk(tmp_path, 0))
    branch = change(config, run_name="branch", resume=str(given))
    for message in run_world(2, on_own_disk, tmp_path, refused, branch):
        assert message.startswith(f"{given} on host0 is not on every node")
    assert not checkpoints(disk(tmp_path, 0) / "runs/branch")
    shutil.copytree(newest, disk(tmp_path, 1) / given)
    assert run_world(2, on_own_disk, tmp_path, train, branch) == [0, 0]
    at = change(branch, runs_folder=str(disk(tmp_path, 0) / "runs"))
    assert status(at)["from_step"] == checkpoint_step(newest)


def test_a_run_that_began_with_never_continues_on_all_nodes(tmp_path, whole):
    config = deep(tmp_path)
    stopped_at(tmp_path, 3, config)
    stopped_at(tmp_path, 5, config)  # the other node fetches the run
    here = stopped_at(tmp_path, 3, change(config, resume="never"))
    saved = checkpoint_step(checkpoints(here)[-1])
    assert run_world(2, on_own_disk, tmp_path, train, config) == [0, 0]
    at = change(config, runs_folder=str(here.parent))
    assert status(at)["from_step"] == saved
    assert_same_weights(at, whole)


def removed_by(config) -> list[str]:
    names: list[str] = []
    upload.remove = lambda folder: names.append(folder.name)
    train(config)
    return names


def test_one_rank_of_a_node_removes_what_a_fetch_or_an_earlier_start_left(tmp_path):
    config = deep(tmp_path, checkpoints__keep=1, evaluation__best_metric=None)
    here = stopped_at(tmp_path, 3, config, ranks=3)
    other = disk(tmp_path, 1) / "runs/here/checkpoints"
    shutil.copytree(checkpoints(here)[-1], other / "step_00000001")
    partial = other / ".step_00000001_0_abc.partial"
    partial.mkdir()
    names = run_world(3, on_own_disk, tmp_path, removed_by, config)
    assert names == [[], ["step_00000001"], []]
    assert not partial.exists()
