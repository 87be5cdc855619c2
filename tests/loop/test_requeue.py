"""starts.py: whether a scheduler starts a run again."""

import json
from pathlib import Path

import pytest
from my_project import launch, starts
from test_launch import CONFIG


def checkpoint(folder: Path, step: int) -> None:
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("began", "newest", "code", "marks", "wanted"),
    [
        (-1, 20, 0, [], 0),
        (-1, 20, 2, [], 2),
        (20, 40, 2, [-1], 2),  # a wrong setting, met late
        (-1, 20, 1, [], 75),
        (20, 40, 1, [-1], 75),
        (20, 20, 1, [-1], 1),
        (-1, -1, 1, [], 1),
        (20, 40, 75, [20, 20], 75),
        (20, 20, 75, [-1, 20], 75),  # the launch before the last has written step 20
        (20, 20, 75, [0, 20, 20], 1),
        (-1, -1, 75, [-1], 75),
        (-1, -1, 75, [-1, -1], 1),
    ],
)
def test_a_run_is_started_again_only_where_it_can_get_further(
    began, newest, code, marks, wanted, tmp_path
):
    lines = []
    for number, mark in enumerate(marks):
        record = {"event": "start", "id": f"{number}.0", "launch": number, "time": 1.0 + number}
        record["checkpoint"] = None if mark < 0 else mark
        restart = {"id": f"{number}.1", "time": 1.5 + number, "checkpoint": 1000}
        lines += [record, record | {"event": "end"}, record | restart]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "starts.jsonl").write_text(text)
    if began >= 0:
        checkpoint(tmp_path, began)
    at_the_start = starts.marks(tmp_path)
    assert at_the_start == [*marks, began], "a restart in place belongs to its launch"
    if newest > began:
        checkpoint(tmp_path, newest)
    code, why = starts.requeue(tmp_path, at_the_start, code)
    assert code == wanted
    assert bool(why) == (code in (1, 75))


def test_the_longest_step_evaluation_and_save_are_summed(tmp_path):
    records = [
        {"kind": "interval", "step": 10, "step_seconds": 2.0},
        {"kind": "interval", "step": 20, "step_seconds": None},
        {"kind": "evaluation", "step": 20, "seconds": 30.0},
        {"kind": "checkpoint", "step": 10, "seconds": 4.0, "time": 1000.0},
        {"kind": "checkpoint", "step": 20, "seconds": 0.5, "time": 1000.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert starts.stop_seconds(tmp_path) == 36.0
    checkpoint(tmp_path, 20)  # training waited 0.5 s, but it was complete a long time after
    assert starts.stop_seconds(tmp_path) > 1e6


@pytest.mark.parametrize(("grace", "warns"), [("35", True), ("37", False), ("0", False)])
def test_a_stop_signal_that_comes_too_late_is_warned_of(
    grace, warns, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    monkeypatch.setattr(launch, "start", lambda _: 75)
    monkeypatch.setattr(starts, "stop_seconds", lambda _: 36.0)
    Path("tiny.yaml").write_text(CONFIG)
    Path("cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    flags = ["--config_file", "cpu.yaml", "--grace_seconds", grace, "--requeue"]
    assert launch.main([*flags, "-m", "my_project.train", "--config", "tiny.yaml"]) == 75
    shown = capsys.readouterr().out
    assert ("took 36 s together, but a stop signal leaves 35 s" in shown) == warns
    assert "to be started again: there is no checkpoint" in shown
