"""The list of runs, in a terminal and in a pipe: its states, steps, results and differences."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from my_project.config import Config, to_yaml
from my_project.files import TransientError
from my_project.run_folder import Run
from my_project.tools.doctor import diagnose
from my_project.tools.reader import format_number, run_tool
from my_project.tools.runs import differences, list_runs, summarize
from ragged import Ragged
from runs import make_config
from terminal import Terminal


def write_run(folder: Path, name: str, outcome: str, lines: str = "", **settings: Any) -> Config:
    """Write the files that a run has while it is under way, and when it has ended."""
    config = make_config(
        folder, run_name=name, evaluation__best_metric="validation/auroc", **settings
    )
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(to_yaml(config))
    status = {"outcome": outcome, "step": 4, "steps": 10, "reason": ""}
    (config.folder / "status.json").write_text(json.dumps(status))
    (config.folder / "metrics.jsonl").write_text(lines)
    return config


EVALUATED = """{"step": 6, "loss": 0.5, "samples_per_second": 9.0}
{"step": 6, "validation/auroc": 0.75, "validation/accuracy": 0.9}
{"step": 8, "validation/auroc": null}
{"step": 9, "validation/auroc": 0.5}
{"step": 9, "validation/au"""

HOLD = """
import sys
from pathlib import Path
from my_project.run_folder import Run
run = Run.__new__(Run)
run.rank, run.folder = 0, Path(sys.argv[1])
lock = run._lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_only_a_run_whose_lock_is_held_is_running(tmp_path):
    config = write_run(tmp_path, "one", "running", EVALUATED)
    assert summarize(config.folder).run.state == "interrupted"
    held = [sys.executable, "-c", HOLD, str(config.folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(held, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        assert summarize(config.folder).run.state == "running"
        late = diagnose(config.folder, time.time() + 7200)
        assert (late["outcome"], late["cause"], late["likely"]) == ("running", "", [])
        assert (late["first"], late["remedy"]) == (None, [])
        with pytest.raises(TransientError, match=f"in use by process {holder.pid} "):
            Run(config, rank=0)
        holder.communicate()
    assert summarize(config.folder).run.state == "interrupted"
    found = diagnose(config.folder)
    assert (found["outcome"], found["cause"]) == ("interrupted", "interrupted")
    assert found["certainty"] == "likely"
    Run(config, rank=0)


def test_step_and_best_are_those_of_the_records_while_a_run_is_under_way(tmp_path):
    found = summarize(write_run(tmp_path, "one", "running", EVALUATED).folder)
    assert (found.step, found.run.status.steps, found.best) == (9, 10, 0.75)
    least = write_run(tmp_path, "least", "running", EVALUATED, evaluation__best_mode="min")
    assert summarize(least.folder).best == 0.5


def test_the_best_value_of_a_metric_whose_name_json_escapes_is_found(tmp_path):
    line = json.dumps({"step": 6, "validation/größe": 0.75}) + "\n"
    config = write_run(tmp_path, "one", "finished", line)
    path = config.folder / "config.yaml"
    path.write_text(path.read_text().replace("validation/auroc", "validation/größe"))
    assert summarize(config.folder).best == 0.75


def test_a_folder_that_may_not_be_entered_is_left_out(tmp_path, monkeypatch):
    write_run(tmp_path, "one", "finished")
    (tmp_path / "closed").mkdir()
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if "/closed/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert [one.run.folder.name for one in list_runs(tmp_path)] == ["one"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(999_960, "1M"), (9_999.6, "10k"), (3021, "3021"), (31_200, "31.2k"), (-0.43126, "-0.4313")],
)
def test_a_number_is_rounded_before_its_unit_is_chosen(value, text):
    assert format_number(value) == text


def test_an_error_without_a_file_is_told_as_a_sentence(capsys, monkeypatch):
    def fail() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        run_tool(fail)
    assert capsys.readouterr().err == "error: Input/output error.\n"


@pytest.mark.parametrize("command", ["runs", "report", "doctor"])
def test_a_tool_ends_without_a_message_if_the_reader_of_its_output_has_ended(tmp_path, command):
    run = write_run(tmp_path, "a", "finished").folder
    read, write = os.pipe()
    os.close(read)
    words = ["-m", "my_project", command, str(tmp_path if command == "runs" else run)]
    done = subprocess.run(
        [sys.executable, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_run_is_compared_with_the_first_of_its_recipe(tmp_path):
    write_run(tmp_path, "b", "finished", recipe=Ragged(dropout=0.5), optim__lr=0.1)
    write_run(tmp_path, "a", "finished")
    write_run(tmp_path, "c", "failed", epochs=2.0, resume="never", stop_after="1h")
    (tmp_path / "notes").mkdir()
    runs = list_runs(tmp_path)
    assert [summary.run.folder.name for summary in runs] == ["a", "b", "c"]
    assert differences(runs) == [
        [], ["optim.lr=0.1", "recipe.dropout=0.5"], ["epochs=2.0", "steps=None"],
    ]  # fmt: skip


def test_a_pipe_gets_one_line_for_each_run(tmp_path):
    write_run(tmp_path, "a", "finished")
    name = "a\x1b[31m" + "very_long" * 25
    config = write_run(tmp_path, name, "failed", EVALUATED, optim__lr=0.25)
    command = [sys.executable, "-m", "my_project", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "very_long" in line)
    assert line.startswith("a?[31mvery"), "no control character"
    assert line.split()[1:4] == ["failed", "9/10", "validation/auroc=0.75"]
    assert "optim.lr=0.25" in line
    command[-1] = str(config.folder)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, ""), "it is itself a run"


@pytest.mark.parametrize("columns", [60, 80, 250])
def test_a_terminal_shows_names_and_settings_whole(tmp_path, columns):
    name = "image_classification-lr=0.003-width=96-label=several_words"
    write_run(tmp_path, "a", "finished")
    settings = {"optim__lr": 0.25, "optim__weight_decay": 0.125, "epochs": 2.0, "steps": None}
    write_run(tmp_path, name, "failed", EVALUATED, **settings)
    shown = Terminal(["runs", str(tmp_path)], tmp_path, columns).read()
    for text in (name, "failed", "9/10", "validation/auroc=0.75", "optim.weight_decay=0.125"):
        assert text in shown
    listed = shown.partition("a: run.json")[0]
    assert max(map(len, listed.splitlines())) <= columns
