"""`evaluate --follow` evaluates each checkpoint during training. Delete this with follow.py."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ragged import Ragged
from runs import averaged, change, make_config, records, train, weights
from safetensors import safe_open
from torch import UntypedStorage
from world import TESTS, World, run_world

from my_project import follow
from my_project.checkpoint import shards
from my_project.config import Config, ConfigError
from my_project.files import TransientError
from my_project.run_files import checkpoints

SETTINGS = {"checkpoints__every_steps": 2, "checkpoints__keep": 99, **averaged(0.9)}
FIELDS = {"kind", "step", "epoch", "time", "seconds", "checkpoint", "weights", "host"}


def follow_folder(folder: Path | str) -> int:
    trusted = ["ragged.Ragged", "ragged.Deep"]
    arguments = argparse.Namespace(folder=str(folder), trust=trusted, json=True)
    return follow.follow_run(arguments, sys.stdout)


def lines(config: Config) -> list[dict[str, Any]]:
    """Read evaluations.jsonl, whose lines are whole at any time."""
    path = config.folder / "evaluations.jsonl"
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def wait_for(condition: Callable[[], Any], *worlds: World) -> None:
    """Wait until something holds, while all processes of these worlds run."""
    deadline = time.monotonic() + 120
    while not condition():
        dead = [worker for world in worlds for worker in world.workers if not worker.is_alive()]
        assert not dead or condition(), "a process has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Config:
    """A finished run with the checkpoints of steps 2, 4 and 6, evaluated by training."""
    settings = SETTINGS | {"steps": 6, "evaluation__every_steps": 2}
    config = make_config(tmp_path_factory.mktemp("finished"), Ragged(), **settings)
    assert run_world(1, train, config) == [0]
    return config


@pytest.fixture
def run(finished, tmp_path) -> Config:
    """A copy of that run."""
    shutil.copytree(finished.folder, tmp_path / finished.run_name)
    return change(finished, runs_folder=str(tmp_path))


def test_a_follower_has_the_results_of_training_and_changes_no_file(run):
    """On two processes, whose number does not change exact metrics."""

    def state() -> dict[str, tuple[int, int]]:
        files = (path for path in run.folder.rglob("*") if path.name != "evaluations.jsonl")
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}

    before = state()
    assert run_world(2, follow_folder, run.folder) == [0, 0]
    assert state() == before
    wanted = records(run, "validation/accuracy")
    assert [line["step"] for line in lines(run)] == [2, 4, 6]
    for line, record in zip(lines(run), wanted, strict=True):
        results = {name for name in line if "/" in name}
        assert line.keys() - results == FIELDS
        assert results == {name for name in record if name.startswith("validation/")}
        for name in ("epoch", *results):
            assert line[name] == pytest.approx(record[name], rel=1e-6), name
        assert line["checkpoint"] == f"checkpoints/step_{line['step']:08d}"
    assert run_world(1, follow_folder, run.folder) == [0], "nothing is evaluated again"
    assert len(lines(run)) == 3


def test_a_killed_follower_and_a_killed_training_go_on(tmp_path):
    """Each checkpoint is evaluated once, whichever is killed, and both end by themselves."""
    recipe = Ragged(seconds=0.05, dropout=0.1)
    config = make_config(tmp_path, recipe, steps=24, **SETTINGS)
    worlds = [World(1, train, config)]
    try:
        wait_for((config.folder / "run.json").exists, worlds[0])
        worlds.append(World(1, follow_folder, config.folder))
        wait_for(lambda: lines(config), *worlds)
        worlds[1].close()  # SIGKILL
        seen = len(lines(config))
        with (config.folder / "evaluations.jsonl").open("a") as file:
            file.write('{"kind": "evaluation", "st')  # what another kill could leave
        worlds.append(World(1, follow_folder, config.folder))
        path = config.folder / "evaluations.jsonl"
        wait_for(lambda: path.read_text().count("\n") > seen, worlds[0], worlds[2])
        worlds[0].close()
        newest = checkpoints(config.folder)[-1].name
        wait_for(lambda: newest in path.read_text(), worlds[2])
        assert len(checkpoints(config.folder)) < 12, "the training was killed before its end"
        worlds.append(World(1, train, config))
        assert worlds[3].results() == worlds[2].results() == [0]
    finally:
        for world in worlds:
            world.close()
    assert [line["step"] for line in lines(config)] == [*range(2, 25, 2)]


def test_checkpoints_that_training_removes_are_passed_over(tmp_path):
    config = make_config(tmp_path, steps=150, checkpoints__every_steps=1, checkpoints__keep=1)
    training = World(1, train, config)
    try:
        wait_for((config.folder / "run.json").exists, training)
        follower = World(1, follow_folder, config.folder)
        assert follower.results() == training.results() == [0]
    finally:
        training.close()
    steps = [line["step"] for line in lines(config)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 150, "the last one stays"


def test_one_removed_while_it_is_read_costs_no_other_and_no_warning(run, monkeypatch, caplog):
    """Between the check of its hashes and the read of its weights."""
    gone = checkpoints(run.folder)[1]
    monkeypatch.setattr(
        follow.weights,
        "refuse_trained_view",
        lambda folder: shutil.rmtree(folder) if folder == gone else None,
    )
    assert follow_folder(run.folder) == 0
    assert [line["step"] for line in lines(run)] == [2, 6]
    assert "is skipped" not in caplog.text


def test_other_data_than_in_the_training_is_a_warning(run, capsys):
    (run.folder / "export/data_info.json").write_text('{"features": 6, "mean": 0.5}')
    assert follow_folder(run.folder) == 0
    assert "warning: the weights were trained on other data" in capsys.readouterr().err


def test_one_removed_before_torch_maps_it_is_passed_over(run, monkeypatch):
    gone = checkpoints(run.folder)[1]

    def open_file(path: Path, framework: str) -> Any:
        if path.parent == gone:
            shutil.rmtree(gone)
            UntypedStorage.from_file(str(path), shared=False, nbytes=8)  # raises a RuntimeError
        return safe_open(path, framework)

    monkeypatch.setattr(shards, "safe_open", open_file)
    assert follow_folder(run.folder) == 0
    assert [line["step"] for line in lines(run)] == [2, 6]


def test_too_little_memory_to_map_a_file_is_no_damage(run, monkeypatch):
    def open_file(path: Path, framework: str) -> Any:
        raise RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(shards, "safe_open", open_file)
    with pytest.raises(RuntimeError, match="Cannot allocate"):
        shards.TensorReader(checkpoints(run.folder)[1], "model")


def test_a_damaged_checkpoint_is_named_and_skipped(run, caplog):
    path = checkpoints(run.folder)[1] / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 64
    path.write_bytes(content)
    assert follow_folder(run.folder) == 0
    assert [line["step"] for line in lines(run)] == [2, 6]
    assert caplog.text.count("step_00000004 is skipped: model.safetensors is damaged") == 1


def test_each_checkpoint_of_a_mirror_is_evaluated_one_copy_at_a_time(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (checkpoints(run.folder)[1] / "model.safetensors").write_bytes(b"damaged")
    for expected in ([2, 6], [2, 6]):  # nothing is evaluated again
        assert follow_folder(f"file://{run.folder}") == 0
        assert [line["step"] for line in lines(run)] == expected, "uploaded to the mirror"
    copies = [*tmp_path.glob("tmp/**/manifest.json")]
    assert len(copies) == 1


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_request_that_fails_ends_no_follower(run, tmp_path, monkeypatch, caplog, failing):
    """Each manifest in the mirror is read once; a fetch that fails is repeated."""
    from my_project.mirror.store import Store

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    (tmp_path / "tmp").mkdir()
    reads, looks = [], []

    def read_json(store: Any, name: str) -> dict[str, Any]:
        reads.extend([name] * ("/manifest.json" in name))
        return read(store, name)

    def fetch(store: Any, name: str, path: Path) -> None:
        if len(looks) == failing:
            raise OSError("a time-out")
        get(store, name, path)

    def look(results: follow.Evaluations) -> Any:
        looks.append(1)
        return look_(results)

    read, get, look_ = Store.read_json, Store.fetch, follow.Evaluations.look
    monkeypatch.setattr(Store, "read_json", read_json)
    monkeypatch.setattr(Store, "fetch", fetch)
    monkeypatch.setattr(follow.Evaluations, "look", look)
    assert follow_folder(f"file://{run.folder}") == 0
    assert [line["step"] for line in lines(run)] == [2, 4, 6]
    assert caplog.text.count("a time-out") == 1
    assert max(map(reads.count, reads)) <= 4, "by one look, by the fetch, and by one that failed"


def test_hosts_that_follow_a_url_in_turn_keep_each_others_lines(run, tmp_path, monkeypatch):
    """The first one comes back with its older copy of the file; a checkpoint is gone meanwhile."""
    saved = checkpoints(run.folder)
    for folder in saved:
        folder.rename(tmp_path / folder.name)
    for host, folder, expected in zip("aba", saved, ([2], [2, 4], [2, 4, 6]), strict=True):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / host))
        (tmp_path / host).mkdir(exist_ok=True)
        shutil.copytree(tmp_path / folder.name, folder)
        assert follow_folder(f"file://{run.folder}") == 0
        assert [line["step"] for line in lines(run)] == expected
        shutil.rmtree(folder)


def test_a_url_is_followed_by_processes_on_one_host(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="is a URL: follow it with processes on one host"):
        follow_folder(f"file://{run.folder}")


def test_a_step_that_was_trained_again_is_evaluated_again(run, finished, tmp_path):
    assert follow_folder(run.folder) == 0
    other = change(finished, runs_folder=str(tmp_path / "other"), seed=1)
    assert run_world(1, train, other) == [0]
    newest = checkpoints(run.folder)[-1]
    shutil.rmtree(newest)
    shutil.copytree(checkpoints(other.folder)[-1], newest)
    assert follow_folder(run.folder) == 0
    assert [line["step"] for line in lines(run)] == [2, 4, 6, 6]
    first, again = lines(run)[2:]
    assert first["weights"] != again["weights"]
    assert first["validation/auroc"] != again["validation/auroc"]
    assert weights(newest).keys() == weights(run.folder / "export").keys()


def test_what_cannot_be_followed_is_one_sentence(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no run has begun in .*export; give the folder of"):
        follow_folder(run.folder / "export")
    with follow.Evaluations(given=str(run.folder), run=run.folder, config=run) as results:
        with pytest.raises(RuntimeError, match=r"TransientError: another process is .*: end"):
            run_world(1, follow_folder, run.folder)
        os.rename(run.folder / "evaluations.jsonl", tmp_path / "aside")  # as --resume never does
        with pytest.raises(TransientError, match="was moved, removed or started over"):
            results.look()


def test_a_checkpoint_that_does_not_fit_ends_the_follower(run):
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("batch_norm: false", "batch_norm: true"))
    with pytest.raises(ConfigError, match="does not fit the model"):
        follow_folder(run.folder)


def test_the_command_says_once_that_it_waits_for_a_stopped_run(run, monkeypatch, caplog):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    status, look, looks = run.folder / "status.json", follow.Evaluations.look, []
    text = status.read_text()

    def stop_then_finish(results: follow.Evaluations) -> Any:
        looks.append(1)
        status.write_text(text.replace('"finished"', '"failed"') if len(looks) < 7 else text)
        return look(results)

    monkeypatch.setattr(follow.Evaluations, "look", stop_then_finish)
    with caplog.at_level("INFO"):
        assert follow_folder(run.folder) == 0
    assert len(looks) == 7
    assert caplog.text.count("run: failed; waiting") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_without_a_partial_line(run, number, code):
    """It waits for the next checkpoint then. With --json it prints the lines that it writes."""
    status = run.folder / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"preempted"'))
    words = ["evaluate", run.folder, "--follow", "--json"]
    command = [sys.executable, "-m", "my_project", *words]
    process = subprocess.Popen(
        [*command, "--trust", "ragged.Ragged"], cwd=TESTS, text=True, stdout=subprocess.PIPE,
        # tests that run in a shell's background ignore SIGINT, and so would what they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    with process:
        wait_for(lambda: len(lines(run)) == 3 or process.poll() is not None)
        process.send_signal(number)
        shown, _ = process.communicate(timeout=120)
    assert process.returncode == code
    assert [json.loads(line) for line in shown.splitlines()] == lines(run)
