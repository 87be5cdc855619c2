"""The real launchers: what a user sees when a run succeeds, fails, stops or is killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from documents import PROJECT
from runs import assert_same_weights, change, train
from world import run_world

from my_project.files import wait_until
from my_project.settings import parse

CONFIG = """
run_name: tiny
recipe: {class_path: ragged.Ragged}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
steps: 8
telemetry: {every_steps: 2}
"""


@contextmanager
def launch(
    folder: Path,
    *arguments: str,
    flags: tuple[str, ...] = (),
    launcher: str = "accelerate.commands.launch",
    where: str = "cpu_2_processes",
) -> Iterator[subprocess.Popen]:
    """Start a run; check at the end that all of its processes have exited."""
    (folder / "tiny.yaml").write_text(CONFIG)
    mark = uuid.uuid4().hex
    config = ["--config_file", str(PROJECT / f"accelerate_configs/{where}.yaml")] * bool(where)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    process = subprocess.Popen(
        [sys.executable, "-m", launcher, *config, *flags,
         "-m", "my_project.train", "--config", "tiny.yaml", *arguments],
        cwd=folder, env=environment | {"TEST_MARK": mark}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    process.mark = mark  # type: ignore[attr-defined]
    try:
        yield process
        deadline = time.monotonic() + 600
        while (left := processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"still running: {left}"
    finally:
        kill_all(mark)
        process.wait()
        if process.stdout:
            process.stdout.close()


def kill_all(mark: str) -> None:
    """Kill the processes of a launch, some of which may have ended since they were listed."""
    for pid in processes_with(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(mark: str) -> list[int]:
    infos = (p.info for p in psutil.process_iter(["pid", "status", "environ"]))
    marked = (p for p in infos if (p["environ"] or {}).get("TEST_MARK") == mark)
    return [p["pid"] for p in marked if p["status"] != psutil.STATUS_ZOMBIE]


def outcome(folder: Path) -> dict:
    return json.loads((folder / "runs" / "tiny" / "status.json").read_text())


def test_two_processes_train_into_one_folder_and_show_the_result(tmp_path):
    with launch(tmp_path, launcher="my_project.launch") as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    assert "global batch 16 = micro-batch 4 x 2 processes x accumulation 2; 8 steps" in shown
    assert "2 processes on CPU, float32" in shown
    for line in ("step 2 of 8: loss", "validation/accuracy", "runs/tiny/metrics.jsonl"):
        assert shown.count(line) >= 1
    assert shown.count("step 4 of 8: loss") == 1, "only the main process reports"
    assert [p.name for p in (tmp_path / "runs").iterdir() if p.is_dir()] == ["tiny"]
    lines = (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("start") == 1, "only the main process records"
    about = json.loads((tmp_path / "runs/tiny/run.json").read_text())
    assert about["packages"]["torch"]
    assert "TEST_MARK" not in about["environment"], "the environment is not recorded"
    assert about["environment"]["CUDA_VISIBLE_DEVICES"] == "-1,-1", "a CPU config hides GPUs"


@pytest.mark.slow
def test_a_bad_setting_is_one_sentence_and_starts_nothing(tmp_path):
    with launch(tmp_path, "--optim.lrr", "3", launcher="my_project.launch") as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 2
    assert shown == "error: there is no setting --optim.lrr; did you mean --optim.lr?\n"
    assert not (tmp_path / "runs").exists()
    alone = subprocess.run(
        [sys.executable, "-m", "my_project.train",
         "--config", "tiny.yaml", "--optim.lrr", "3"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 2
    assert alone.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_names_it(tmp_path):
    with launch(
        tmp_path, "--recipe.init_args.fault", "raise", "--recipe.init_args.fault_at", "3"
    ) as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode != 0
    assert "[rank 1 on " in shown
    assert "ValueError: this rank was told to fail" in shown
    first = shown.split("Root Cause")[1]
    assert "ValueError: this rank was told to fail" in first, "torchrun's error block shows it"
    assert re.search(r'ragged\.py", line \d+, in strike', first)
    left = outcome(tmp_path)
    assert left["outcome"] == "failed"
    assert left["reason"].startswith("rank 1 on ")
    assert "this rank was told to fail" in left["reason"]


def wait_for_steps(folder: Path, steps: int, run: subprocess.Popen | None = None) -> None:
    """Wait until a run has taken so many steps; fail if its process, if given, ends before."""

    def has_them_or_ended() -> bool:
        return steps_done(folder) >= steps or bool(run and run.poll() is not None)

    assert wait_until(has_them_or_ended, 600), "the run did not get going"
    assert steps_done(folder) >= steps


# ---- told to stop, killed: through the real launcher ---------------------------------------------
LONG = ("--steps", "100000", "--telemetry.every_steps", "1", "--distributed.timeout_seconds", "4")


def workers(launcher: int) -> dict[int, int]:
    """Return the process ID of each rank that my_project.launch has forked."""
    infos = (p.info for p in psutil.process_iter(["pid", "ppid", "name"]))
    names = {p["name"]: p["pid"] for p in infos if p["ppid"] == launcher}
    return {int(name[5:]): pid for name, pid in names.items() if name.startswith("rank ")}


@pytest.mark.slow
@pytest.mark.timeout(900)  # five starts
def test_a_signal_saves_and_leaves_and_the_same_command_continues(tmp_path, monkeypatch):
    # without this variable SIGUSR1 kills torchrun, and leaves its workers behind
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    saved: list[str] = []
    for name, to, launcher in (
        ("SIGUSR1", "launcher", "accelerate.commands.launch"),
        ("SIGINT", "all", "accelerate.commands.launch"),  # as Ctrl-C in a terminal does
        ("SIGUSR1", "launcher", "my_project.launch"),
        ("SIGTERM", "worker", "my_project.launch"),
    ):
        with launch(tmp_path, *LONG, launcher=launcher) as run:
            wait_for_steps(tmp_path, steps_done(tmp_path) + 3)
            if to == "all":
                os.killpg(run.pid, getattr(signal, name))
            else:
                os.kill(run.pid if to == "launcher" else workers(run.pid)[1], getattr(signal, name))
            shown, _ = run.communicate(timeout=600)
        left = outcome(tmp_path)
        assert left["outcome"] == "preempted", shown
        if to == "all":
            traceback = shown.partition("Traceback")[2]
            assert "my_project" not in traceback, "no traceback of ours"
        if launcher == "my_project.launch":
            assert run.returncode == 75
        else:
            assert f"{name}: saving and exiting within two steps" in shown
        assert not saved or f"resumed from runs/tiny/checkpoints/{saved[-1]}" in shown
        saved.append(f"step_{left['step']:08d}")
        kept = sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints").iterdir())
        assert kept == saved[-2:], "one save for each signal"
    steps = ("--steps", str(left["step"] + 2))
    with launch(tmp_path, *steps, launcher="my_project.launch") as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    assert f"resumed from runs/tiny/checkpoints/{saved[-1]}" in shown


@pytest.mark.slow
def test_killed_twice_the_same_command_ends_with_the_same_weights(tmp_path):
    """Launcher and workers are killed together, as when a node loses its power."""
    arguments = (
        "--steps", "300", "--checkpoints.every_steps", "3", "--telemetry.every_steps", "1",
        "--recipe.init_args.dropout", "0.2", "--recipe.init_args.seconds", "0.01",
    )  # fmt: skip
    draw = random.Random(0)
    for _ in range(2):
        done = steps_done(tmp_path)
        with launch(tmp_path, *arguments, launcher="my_project.launch") as run:
            wait_for_steps(tmp_path, done + 10)
            time.sleep(draw.uniform(0, 0.3))
            kill_all(run.mark)
        assert outcome(tmp_path)["outcome"] == "running"
    with launch(tmp_path, *arguments, launcher="my_project.launch") as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    killed = parse(["--config", str(tmp_path / "tiny.yaml"), *arguments])
    whole = change(killed, runs_folder=str(tmp_path / "whole"))
    assert run_world(2, train, whole) == [0, 0]
    assert_same_weights(change(killed, runs_folder=str(tmp_path / "runs")), whole)


def steps_done(folder: Path) -> int:
    metrics = folder / "runs/tiny/metrics.jsonl"
    return metrics.read_text().count('"interval"') if metrics.exists() else 0
