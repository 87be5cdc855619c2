"""The list of runs: what it says of each, in a terminal and in a pipe, and reading records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from my_project.config import Config, ConfigError, to_yaml
from my_project.files import TransientError
from my_project.run_folder import Run
from my_project.tools.reader import read_records
from my_project.tools.runs import differences, list_runs, summarize
from ragged import Ragged
from runs import change, make_config, records, train
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
run._lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_only_a_run_whose_lock_is_held_is_running(tmp_path):
    config = write_run(tmp_path, "one", "running", EVALUATED)
    assert summarize(config.folder).state == "interrupted"
    held = [sys.executable, "-c", HOLD, str(config.folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(held, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        for _ in range(2):
            assert summarize(config.folder).state == "running"
        with pytest.raises(TransientError, match=f"in use by process {holder.pid} "):
            Run(config, rank=0)
        holder.communicate()
    assert summarize(config.folder).state == "interrupted"
    Run(config, rank=0)


def test_step_and_best_are_those_of_the_records_while_a_run_is_under_way(tmp_path):
    found = summarize(write_run(tmp_path, "one", "running", EVALUATED).folder)
    assert (found.step, found.steps, found.best) == (9, 10, 0.75)
    least = write_run(tmp_path, "least", "running", EVALUATED, evaluation__best_mode="min")
    assert summarize(least.folder).best == 0.5
    early = summarize(write_run(tmp_path, "early", "preempted").folder)
    assert (early.state, early.step, early.best) == ("preempted", 4, None)


def test_a_run_is_compared_with_the_first_of_its_recipe(tmp_path):
    write_run(tmp_path, "b", "finished", recipe=Ragged(dropout=0.5), optim__lr=0.1)
    write_run(tmp_path, "a", "finished")
    write_run(tmp_path, "c", "failed", epochs=2.0, resume="never", stop_after="1h")
    runs = list_runs(tmp_path)
    assert [summary.name for summary in runs] == ["a", "b", "c"]
    assert differences(runs) == [
        [], ["optim.lr=0.1", "recipe.dropout=0.5"], ["epochs=2.0", "steps=None"],
    ]  # fmt: skip
    path = tmp_path / "0/config.yaml"
    path.parent.mkdir()
    path.write_text("recipe: {class_path: other.Recipe, init_args: {width: 3}}")
    assert differences(list_runs(tmp_path))[:2] == [[], []]


def damage(folder: Path) -> None:
    """Damage one file of each run in another way."""
    for name, file, content in (
        ("status", "status.json", '{"outcome": 3}'),
        ("config", "config.yaml", "recipe: [\x1b"),
        ("list", "config.yaml", "- 1"),
        ("metrics", "metrics.jsonl", "\0{[\n[3]\n"),
    ):
        config = write_run(folder, name, "finished")
        (config.folder / file).write_text(content)
    for name in ("config.yaml", "status.json", "metrics.jsonl"):
        (folder / "folders" / name).mkdir(parents=True)
    (folder / "notes").mkdir()
    (folder / "notes.txt").write_text("no run")


def test_a_damaged_run_is_listed_as_such(tmp_path):
    damage(tmp_path)
    runs = {summary.name: summary for summary in list_runs(tmp_path)}
    states = {name: summary.state for name, summary in runs.items()}
    assert states == dict.fromkeys(("config", "list", "metrics"), "finished") | dict.fromkeys(
        ("folders", "status"), "damaged"
    )
    for name, summary in runs.items():
        assert ("config.yaml" in " ".join(summary.problems)) == (not summary.settings), name
    assert runs["metrics"].step == 4


def test_a_terminal_gets_a_table_without_control_characters(tmp_path):
    write_run(tmp_path, "a", "finished", EVALUATED)
    write_run(tmp_path, "\x1b[31mred", "preempted", seed=1)
    terminal = Terminal(["runs", str(tmp_path)], tmp_path, 80)
    assert terminal.end()[1] == 0
    assert "\x1b[31mred" not in terminal.text
    lines = [line.split() for line in terminal.shown.splitlines()]
    assert ["a", "finished", "9/10"] in [line[:3] for line in lines]
    assert ["?[31mred", "preempted", "4/10"] in [line[:3] for line in lines]


def test_a_pipe_gets_one_line_for_each_run(tmp_path):
    damage(tmp_path)
    config = write_run(tmp_path, "very_long" * 25, "failed", EVALUATED, optim__lr=0.25)
    command = [sys.executable, "-m", "my_project", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["run", "state", "step", "best", "age", "differs"]
    assert len(lines) == 6
    (line,) = (line for line in lines if line.startswith(config.run_name))
    assert line.split()[1:4] == ["failed", "9/10", "validation/auroc=0.75"]
    assert "optim.lr=0.25" in line
    assert "list: config.yaml is missing or damaged" in done.stderr
    command[-1] = str(config.folder)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is itself a run" in refused.stderr


def test_a_folder_without_runs_is_refused(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="give the folder that holds"):
            list_runs(folder)
    with pytest.raises(ConfigError, match="is not a run folder"):
        read_records(tmp_path)


def test_records_are_read_as_a_table(tmp_path):
    config = make_config(tmp_path, steps=3, evaluation__every_steps=2)
    train(config)
    found = read_records(str(config.folder))
    assert [(record["kind"], record["step"]) for record in found] == [
        ("start", 0), ("interval", 1), ("interval", 2), ("evaluation", 2), ("interval", 3),
        ("checkpoint", 3), ("evaluation", 3),
    ]  # fmt: skip
    assert [record for record in found if "loss" in record] == records(config)
    assert read_records(write_run(tmp_path, "new", "running").folder) == []
    assert summarize(config.folder).best is None, "this run has no best_metric"
    train(change(config, steps=4, evaluation__best_metric="validation/auroc"))
    assert summarize(config.folder).best == max(
        record["validation/auroc"] for record in records(config, "validation/auroc")
    )
