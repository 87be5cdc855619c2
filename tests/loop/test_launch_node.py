"""launch.py: what it makes of the arguments, signals and outcomes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import test_launch
from documents import PROJECT
from my_project import command_line, failures, launch
from my_project.config import ConfigError
from my_project.end_block import Ending
from my_project.files import TransientError
from test_launch import CONFIG, outcome

WHERE = str(PROJECT / "accelerate_configs")
TRAIN = ("-m", "my_project.train", "--config", "tiny.yaml")


def parsed(*flags: str, where: str = "multi_node_cpu") -> launch.Launch:
    return launch.parse(["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN])[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config_file", f"{WHERE}/cpu.yaml"], "there is no -m with a module"),
        (["--config_file", "cpu.yaml", "-m", "trian"], "no module trian"),
        (list(TRAIN), "give --config_file"),
        (
            ["--config_file", f"{WHERE}/multi_node.yaml", "--num_machines", "3", *TRAIN],
            "--num_processes is 16, but must be a multiple of --num_machines 3",
        ),
        (
            ["--config_file", f"{WHERE}/multi_node.yaml", "--machine_rank", "2", *TRAIN],
            "--machine_rank is 2, but must be between 0 and 1",
        ),
    ],
)
def test_a_wrong_launch_is_refused_with_a_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        launch.parse(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--run_name=o=ther", "--runs_folder", "/elsewhere"],
        ["--run_name", "before", "--config", "named.yaml"],
    ],
)
def test_the_run_folder_is_the_one_that_the_run_will_use(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    Path("named.yaml").write_text("run_name: named\nruns_folder: there\n")
    arguments = ["--config", "tiny.yaml", *arguments]
    launched = launch.parse(["--config_file", f"{WHERE}/cpu.yaml", "-m", launch.TRAIN, *arguments])
    assert launched[1].run_folder == command_line.parse(arguments).folder


@pytest.mark.parametrize(
    ("status", "before", "code", "wanted"),
    [
        ("finished", "running", 0, 0),
        ("finished", "finished", 0, 0),  # again: it only shows the result
        ("finished", "running", 1, 0),  # trouble after the end
        ("preempted", "running", 1, 75),
        ("preempted", "preempted", 1, 1),  # refused before it began, that is not this run's word
        ("preempted", "running", 0, 75),  # with restarts the workers end with 0
        ("failed", "running", 1, 1),
        ("running", "running", 1, 1),
        ("running", "", -9, 1),
        ("", "", 2, 2),
    ],
)
def test_the_exit_code_is_the_runs_outcome(status, before, code, wanted, tmp_path):
    setting_error = failures.record_of(ConfigError("lr is -1."))
    about = Ending(
        folder=tmp_path,
        logs=tmp_path,
        status={"outcome": status},
        is_new=status != before,
        is_first_node=True,
        failures=[setting_error] if code == 2 else [],
        stop_signal="",
        stop_signal_time=float("inf"),
        was_killed=False,
        command="",
        code=1 if code == 2 else code,
    )
    assert about.exit_code == wanted


def test_what_a_scheduler_set_does_not_reach_torchrun(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "1")
    launch.prepare_environment()
    left = {name for name in os.environ if re.match(r".*RANK|WORLD|MASTER|PET_N", name)}
    assert not left
    assert os.environ["PET_MONITOR_INTERVAL"] == "1", "what a user may want stays"


class FakeChild:
    """Stands for accelerate launch in a test of what launch.py makes of its end."""

    def __init__(self, torchrun: bool) -> None:
        self.torchrun = torchrun
        self.stop_signal = ""
        self.stop_signal_at: float | None = None
        self.stop_signal_time = float("inf")
        self.was_killed = False


@pytest.mark.parametrize(
    ("arguments", "code", "error", "wanted"),
    [
        (("train",), 0, None, 1),  # a recipe called os._exit(0)
        (("evaluate",), 0, None, 0),  # of a run that is under way
        (("train",), 1, None, 1),
        (("train",), 1, TransientError("a node is late."), 1),
        (("train",), 1, ConfigError("lr is -1."), 2),
        (("train",), 0, ConfigError("lr is -1."), 1),  # of a start before the last, with restarts
    ],
)
def test_the_exit_code_where_no_process_wrote_how_the_run_ended(
    arguments, code, error, wanted, tmp_path, monkeypatch, capsys
):
    class LeavesRunning(FakeChild):
        def __init__(self, *, torchrun: bool) -> None:
            super().__init__(torchrun)

        def run(self, command: list[str], log: Path | None = None) -> int:
            (tmp_path / "runs/tiny").mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs/tiny/status.json").write_text('{"outcome": "running"}')
            if error:
                with pytest.raises(SystemExit, match=str(error.exit_code)):
                    failures.exit_with_error(error)
            return code

    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launch, "Child", LeavesRunning)
    where = f"{WHERE}/cpu.yaml"
    (module,) = arguments
    flags = ["--config_file", where, "-m", f"my_project.{module}"]
    assert launch.main([*flags, "--config", "tiny.yaml"]) == wanted
    said = capsys.readouterr().err
    assert ("some code in them called os._exit" in said) == (module == "train" and code == 0)
    if code and error:
        assert said == f"error: {error}\n" * 2, "the process says it, and then the launcher"


@pytest.mark.parametrize(
    ("before", "after", "code", "stopped", "wanted"),
    [
        ("", "", 0, None, 1),  # os._exit(0) before the run began
        ("preempted", "preempted", 0, None, 1),
        ("finished", "finished", 0, None, 0),  # its result was shown
        ("running", "failed", 1, None, 1),
        ("running", "failed", 1, 5.0, 75),  # of processes that leave in start-up, one by one
    ],
)
def test_only_a_run_that_says_so_has_ended_well(
    before, after, code, stopped, wanted, tmp_path, monkeypatch
):
    path = tmp_path / "runs/tiny/status.json"

    def says(outcome: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lost = {"silent": []} if outcome == "failed" else {}
        path.write_text(json.dumps({"outcome": outcome} | lost) if outcome else "")

    class Says(FakeChild):
        def __init__(self, *, torchrun: bool) -> None:
            super().__init__(torchrun)

        def run(self, command: list[str], log: Path | None = None) -> int:
            self.stop_signal_at = stopped
            self.stop_signal = "SIGTERM" if stopped else ""
            says(after)
            return code

    says(before)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launch, "Child", Says)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN]) == wanted


def about(folder: Path, **known) -> Ending:
    """How a run of node 0 ended that failed with exit code 1, unless something else is known."""
    defaults = {
        "folder": folder, "logs": folder / "logs", "status": {"outcome": "failed", "reason": "x"},
        "is_new": True, "is_first_node": True, "failures": [], "stop_signal": "",
        "stop_signal_time": float("inf"), "was_killed": False, "command": "", "code": 1,
    }  # fmt: skip
    return Ending(**defaults | known)


def failure(reason: str, at: float = 0.0, **known) -> dict:
    record = failures.record_of(RuntimeError(reason))
    return record | {"time": at, "frames": []} | known


def test_a_signal_after_a_failure_does_not_hide_it(tmp_path):
    """As when srun ends the other nodes."""
    status = {"outcome": "failed", "reason": "x", "silent": [1]}
    known = {"status": status, "stop_signal": "SIGTERM", "failures": [failure("it failed", 5.0)]}
    assert about(tmp_path, **known, stop_signal_time=9.0).exit_code == 1
    assert about(tmp_path, **known, stop_signal_time=2.0).exit_code == 75


def test_another_node_shows_its_own_failure_in_one_line(tmp_path, capsys):
    here = failure("no such package", host="gpu-b")
    about(tmp_path, is_first_node=False, is_new=False, failures=[here]).print()
    shown = capsys.readouterr().out
    assert "failed: RuntimeError: no such package" in shown
    assert str(tmp_path / "logs") in shown


def test_the_block_names_the_first_cause_and_no_command_where_none_is_known(tmp_path, capsys):
    lost = failure("connection closed", 1.0, cause="lost contact", rank=0)
    bug = failure("a bug", 2.0, rank=1)
    about(tmp_path, failures=[lost, bug]).print()
    shown = capsys.readouterr().err
    assert "RuntimeError: a bug" in shown
    assert "connection closed" not in shown


def test_error_files_of_earlier_attempts_are_not_read(tmp_path):
    for attempt in (0, 1):
        one = failure(f"attempt {attempt}", attempt=attempt)
        (tmp_path / f"{attempt}.json").write_text(json.dumps(one))
    assert [one["reason"] for one in launch.read_failures(tmp_path)] == ["RuntimeError: attempt 1"]


def test_one_process_cannot_be_two():
    with pytest.raises(ConfigError, match=r"--num_processes is 2, but .*cpu.yaml starts one"):
        parsed("--num_processes", "2", where="cpu")


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
    for whom in ("my_project.checked_launch", "my_project.launch"):
        before = steps(project)
        with start(project, "cpu_2_processes", *long) as run:
            while steps(project) < before + 3:
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.1)
            pids = test_launch.processes_with(run.mark)
            (victim,) = [
                pid for pid in pids
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2] == whom.encode()
            ]  # fmt: skip
            os.kill(victim, signal.SIGKILL)
            run.communicate(timeout=600)
        assert run.returncode != 0
        if run.returncode == 75:  # on a busy machine the launcher's processes have time to save
            assert outcome(project)["outcome"] == "preempted"
    assert outcome(project)["outcome"] == "preempted", "told to stop by its parent's death"
