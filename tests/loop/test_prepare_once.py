"""Who prepares the data first, and what the others do meanwhile."""

import errno
import multiprocessing
import os
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from my_project.files import wait_until
from my_project.loading import prepare as preparing
from my_project.loading.prepare import first_alone, in_turn, until_all_are_done
from runs import quick
from world import World, run_world


def wait_for(folder: Path, pattern: str, count: int) -> None:
    assert wait_until(lambda: len(list(folder.glob(pattern))) >= count, 600, 0.01), pattern


def come(folder: Path, nodes: int) -> int:
    """Come to the preparation as one of four ranks, after rank 0; return the rank."""
    rank = int(os.environ["RANK"])
    preparing.socket.gethostname = lambda: f"host{rank * nodes // 4}"  # type: ignore[attr-defined]
    if rank:
        wait_for(folder, "inside_0", 1)
        (folder / f"outside_{rank}").touch()
    return rank


def prepare(folder: Path, nodes: int) -> list[str]:
    """Return which locks this process was the first to hold."""
    firsts = []
    alone = preparing.first_alone

    @contextmanager
    def noted(path, work):
        with alone(path, work) as is_first:
            firsts.extend([path.name] * is_first)
            yield is_first

    preparing.first_alone = noted
    rank = come(folder, nodes)
    with in_turn(folder, "work"):
        (folder / f"inside_{rank}").touch()
        if rank == 0:
            wait_for(folder, "outside_*", 3)
            time.sleep(0.3)
            assert len(list(folder.glob("inside_*"))) == 1, "somebody came in meanwhile"
        if not firsts:  # where processes take turns, the others cannot come in
            wait_for(folder, "inside_*", 4)
    return firsts


@pytest.mark.parametrize("nodes", quick(1, [2, 1]))
def test_rank_0_prepares_alone_then_one_per_node_then_all_together(tmp_path, nodes):
    firsts = run_world(4, prepare, tmp_path, nodes)
    assert firsts[0] == [".prepare_data.host0.lock", ".prepare_data.lock"]
    if nodes == 2:
        of_the_other_node = firsts[2] + firsts[3]
        assert ".prepare_data.host1.lock" in of_the_other_node


def prepare_and_fail(folder: Path, how: str) -> int:
    """Fail on rank 0 of two nodes; return how many of the others are done when this one begins."""
    rank = come(folder, nodes=2)
    with suppress(KeyError), in_turn(folder, "work"):
        (folder / f"inside_{rank}").touch()
        if rank == 0:
            wait_for(folder, "outside_*", 3)
            time.sleep(0.5)
            if how == "die":
                os._exit(9)
            raise KeyError("no such token")
        done = len(list(folder.glob("done_*")))
        time.sleep(0.5)
        (folder / f"done_{rank}").touch()
        return done
    return -1


@pytest.mark.parametrize("how", quick(1, ["die", "raise"]))
def test_the_next_one_prepares_alone_where_the_first_has_failed(tmp_path, how):
    with closing(World(4, prepare_and_fail, tmp_path, how)) as world:
        done = []
        for pipe in world.pipes[1:]:
            assert pipe.poll(600)
            done.append(pipe.recv()[1])
    assert sorted(done)[:2] == [0, 1], "one alone, then the others"


def test_where_the_file_system_has_no_locks_each_process_prepares(tmp_path, monkeypatch, caplog):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(preparing.fcntl, "lockf", refuse)
    with in_turn(tmp_path, "work"), in_turn(tmp_path, "work"):
        pass
    assert "each process prepares the data itself" in caplog.text


def prepare_in_two_runs(folder: Path) -> int:
    """Prepare as rank 0 of one run, or as one of three ranks of another run; return who is inside.

    All others wait while rank 0 prepares its data.
    """
    rank = come(folder, nodes=1)
    with in_turn(folder, "other work" if rank else "work"):
        (folder / f"inside_{rank}").touch()
        if rank == 0:
            wait_for(folder, "outside_*", 3)
        time.sleep(0.5)
        inside = len(list(folder.glob("inside_*")))
        time.sleep(0.5)
    return inside


def test_a_run_that_waited_for_another_runs_data_prepares_its_own_alone(tmp_path):
    assert sorted(run_world(4, prepare_in_two_runs, tmp_path))[:2] == [1, 2]


def work(folder: Path) -> bool:
    """Rank 1 is done at once, rank 0 later; return whether that was seen."""
    rank = int(os.environ["RANK"])
    with until_all_are_done(folder, "run"):
        (folder / f"inside_{rank}").touch()
        wait_for(folder, "inside_*", 2)
        if rank == 0:
            time.sleep(0.5)
            (folder / "done").touch()
    return (folder / "done").exists()


def test_another_user_of_the_runs_folder_can_open_each_lock(tmp_path):
    before = os.umask(0o022)
    try:
        with until_all_are_done(tmp_path, "run"), in_turn(tmp_path, "work"):
            pass
    finally:
        os.umask(before)
    locks = [path for path in tmp_path.glob(".*") if path.suffix != ".finished"]
    assert len(locks) == 3
    assert {path.stat().st_mode & 0o777 for path in locks} == {0o666}


def test_a_node_that_is_done_waits_for_the_others(tmp_path):
    assert run_world(2, work, tmp_path) == [True, True]


def prepare_with_a_child(folder: Path) -> bool:
    """Rank 0 leaves a process behind, as a pool that was not closed."""
    if os.environ["RANK"] == "0":
        with first_alone(folder / "lock", "work"):
            child = multiprocessing.get_context("fork").Process(
                target=wait_for, args=(folder, "inside_1", 1), daemon=True
            )
            child.start()
        (folder / "left_0").touch()
        child.join()
        return child.exitcode == 0
    wait_for(folder, "left_0", 1)
    with first_alone(folder / "lock", "work") as is_first:
        (folder / "inside_1").touch()
        return is_first


def test_what_is_forked_while_the_data_is_prepared_keeps_no_lock(tmp_path):
    assert run_world(2, prepare_with_a_child, tmp_path) == [True, True]
