"""launch.py: what it makes of the arguments, signals and outcomes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import test_launch
from documents import PROJECT
from my_project import failures, launch
from my_project.config import ConfigError
from my_project.end_block import Ending
from my_project.files import TransientError
from test_launch import CONFIG, outcome

WHERE = str(PROJECT / "accelerate_configs")
TRAIN = ("-m", "my_project.train", "--config", "tiny.yaml")


@pytest.mark.parametrize(
    ("where", "flags", "sentence"),
    [
        ("multi_node", ["--num_machines", "3"], "16, but must be a multiple of --num_machines 3"),
        ("multi_node", ["--machine_rank", "2"], "--machine_rank is 2, but must be between 0 and 1"),
        ("cpu", ["--num_processes", "2"], "--num_processes is 2, but "),
    ],
)
def test_a_wrong_launch_is_refused(where, flags, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        launch.parse(["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN])


def test_what_a_scheduler_set_does_not_reach_torchrun(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "1")
    launch.prepare_environment()
    left = {name for name in os.environ if re.match(r".*RANK|WORLD|MASTER|PET_N", name)}
    assert not left
    assert os.environ["PET_MONITOR_INTERVAL"] == "1", "what a user may want stays"


WRONG = ConfigError("lr is -1.")
LATE = TransientError("a node is late.")


@pytest.mark.parametrize(
    ("module", "before", "after", "code", "error", "stopped", "wanted"),
    [
        ("train", "running", "finished", 0, None, None, 0),
        ("train", "finished", "finished", 0, None, None, 0),  # again: it only shows the result
        ("train", "running", "finished", 1, None, None, 0),  # trouble after the end
        ("train", "running", "preempted", 1, None, None, 75),
        ("train", "running", "preempted", 0, None, None, 75),  # of workers with restarts
        ("train", "preempted", "preempted", 1, None, None, 1),  # refused before it began
        ("train", "running", "failed", 1, None, None, 1),
        ("train", "running", "failed", 1, None, 5.0, 75),  # they leave in start-up, one by one
        ("train", "", "running", -9, None, None, 1),
        ("train", "running", "running", 0, None, None, 1),  # a recipe called os._exit(0)
        ("train", "", "", 0, None, None, 1),  # the same, before the run began
        ("evaluate", "running", "running", 0, None, None, 0),  # of a run that is under way
        ("train", "", "running", 1, LATE, None, 1),
        ("train", "", "", 1, WRONG, None, 2),
        ("train", "", "running", 0, WRONG, None, 1),  # of a start before the last, with restarts
    ],
)
def test_the_exit_code_is_the_runs_outcome(
    module, before, after, code, error, stopped, wanted, tmp_path, monkeypatch
):
    path = tmp_path / "runs/tiny/status.json"
    path.parent.mkdir(parents=True)

    def write_status(outcome: str) -> None:
        lost = {"silent": []} if outcome == "failed" else {}
        path.write_text(json.dumps({"outcome": outcome} | lost) if outcome else "")

    class FakeChild:
        """Stands for accelerate launch."""

        def __init__(self, *, torchrun: bool) -> None:
            self.torchrun = torchrun
            self.stop_signal = "SIGTERM" if stopped else ""
            self.stop_signal_at = stopped
            self.stop_signal_time = float("inf")
            self.was_killed = False

        def run(self, command: list[str], log: Path | None = None) -> int:
            write_status(after)
            if error:
                with pytest.raises(SystemExit, match=str(error.exit_code)):
                    failures.exit_with_error(error)
            return code

    write_status(before)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launch, "Child", FakeChild)
    flags = ["--config_file", f"{WHERE}/cpu.yaml", "-m", f"my_project.{module}"]
    assert launch.main([*flags, "--config", "tiny.yaml"]) == wanted


def failure(reason: str, at: float, **known) -> dict:
    record = failures.record_of(RuntimeError(reason))
    return record | {"time": at, "frames": []} | known


def test_a_signal_after_a_failure_does_not_hide_it(tmp_path):
    """As when srun ends the other nodes."""
    for signal_time, wanted in ((9.0, 1), (2.0, 75)):
        ending = Ending(
            folder=tmp_path, logs=tmp_path, is_new=True, is_first_node=True, was_killed=False,
            status={"outcome": "failed", "reason": "x", "silent": [1]}, command="", code=1,
            failures=[failure("it failed", 5.0)], stop_signal="SIGTERM",
            stop_signal_time=signal_time,
        )  # fmt: skip
        assert ending.exit_code == wanted


def test_error_files_of_earlier_attempts_are_not_read(tmp_path):
    for attempt in (0, 1):
        one = failure(f"attempt {attempt}", 0.0, attempt=attempt)
        (tmp_path / f"{attempt}.json").write_text(json.dumps(one))
    assert [one["reason"] for one in launch.read_failures(tmp_path)] == ["RuntimeError: attempt 1"]


# ---- for real ------------------------------------------------------------------------------------
@pytest.fixture
def project(tmp_path):
    for name in ("src", "accelerate_configs", "launch"):
        (tmp_path / name).symlink_to(PROJECT / name)
    return tmp_path


def steps(folder: Path) -> int:
    path = folder / "runs/tiny/metrics.jsonl"
    return path.read_text().count('"interval"') if path.exists() else 0


def start(project: Path, where: str, *arguments: str):
    """Start launch.py; at the end, every process of it must be gone."""
    launcher = "my_project.launch"
    return test_launch.launch(project, *arguments, launcher=launcher, where=where)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "cpu_2_processes"])
def test_a_signal_saves_and_leaves_with_75_and_the_next_start_goes_on(project, where):
    long = ("--steps", "100000", "--telemetry.every_steps", "1")
    with start(project, where, *long) as run:
        while steps(project) < 3:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        run.send_signal(signal.SIGUSR1)
        run.communicate(timeout=600)
    assert run.returncode == 75
    left = outcome(project)
    assert left["outcome"] == "preempted"
    with start(project, where, "--steps", str(left["step"] + 2)) as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    assert f"step_{left['step']:08d}" in shown


@pytest.mark.slow
def test_whoever_is_killed_nothing_keeps_training(project):
    """SIGKILL for accelerate's launcher, then for launch.py itself."""
    long = ("--steps", "100000", "--telemetry.every_steps", "1")
    for whom in ("accelerate", "launcher"):
        before = steps(project)
        with start(project, "cpu_2_processes", *long) as run:
            while steps(project) < before + 3:
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.1)
            (child,) = psutil.Process(run.pid).children()
            victim = child.pid if whom == "accelerate" else run.pid
            os.kill(victim, signal.SIGKILL)
            run.communicate(timeout=600)
        assert run.returncode != 0
    assert outcome(project)["outcome"] == "preempted", "told to stop by its parent's death"
