"""starts.jsonl, and how it accounts for the time of a run: in folders made without training."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from my_project import failures
from my_project.launching import attempts, launch
from my_project.launching.attempts import Starts
from my_project.run_files import Status, lines, newest_checkpoint
from test_launch import CONFIG

BEGAN = 1_790_000_000.0
ABOUT = {"nodes": 1, "world_size": 1}


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def line(event: str, name: str, time: float, **more: Any) -> dict[str, Any]:
    known = {"event": event, "id": name, "launch": name.partition(".")[0]}
    return known | {"time": BEGAN + time} | more


def record(kind: str, step: int, time: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": BEGAN + time, **more}


def end(name: str, time: float, first: float, outcome: str, *steps: int | None) -> dict[str, Any]:
    """Return an end line; steps: from_step, step, checkpoint."""
    known = dict(zip(("from_step", "step", "checkpoint"), steps, strict=True))
    return line("end", name, time, first_step_time=BEGAN + first, outcome=outcome, **known)


def save(folder: Path, step: int) -> None:
    path = folder / f"checkpoints/step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").touch()


def test_all_parts_of_the_time_are_named_and_add_up(tmp_path):
    """The first start is killed after its save at step 10; 30 s later the second one finishes.

    The second start takes 4 s for an evaluation, 2 s for a save, and waits for data for half of
    20 s and a quarter of 14 s.
    """
    tool = pytest.importorskip("my_project.tools.goodput")
    append(
        tmp_path / "starts.jsonl",
        line("start", "a.0", 0), end("a.0", 50, 10, "killed", 0, 18, 10),
        line("start", "b.0", 80), end("b.0", 130, 90, "finished", 10, 30, 30),
    )  # fmt: skip
    append(
        tmp_path / "metrics.jsonl",  # after the second start
        record("start", 0, 8), record("interval", 10, 28, data_share=0.0),
        record("checkpoint", 10, 30, seconds=2.0),
        record("start", 10, 88), record("interval", 20, 110, data_share=0.5),
        record("evaluation", 20, 114, seconds=4.0), record("interval", 30, 124, data_share=0.25),
        record("checkpoint", 30, 126, seconds=2.0),
    )  # fmt: skip
    found = tool.goodput(tmp_path)
    seconds = {name: share * 130 for name, share in found["calendar"].items() if name != "seconds"}
    wanted = {"kept": 18 + 16.5, "startup": 20, "lost": 20, "saving": 4, "evaluation": 4}
    wanted |= {"data": 13.5, "ending": 4, "down": 30}
    assert seconds == pytest.approx(wanted, abs=0.02)
    assert found["launcher"]["seconds"] == 100
    assert found["launcher"]["kept"] == pytest.approx(0.345)
    assert tool.in_words(Status(goodput=found)) == "27% of 2 min 10 s since the first launch"
    assert found["unknown_starts"] == 0


def test_steps_whose_checkpoint_was_damaged_are_lost_too(tmp_path):
    tool = pytest.importorskip("my_project.tools.goodput")
    append(
        tmp_path / "starts.jsonl",
        line("start", "a.0", 0), end("a.0", 20, 0.1, "preempted", 0, 20, 20),
        line("start", "b.0", 20), end("b.0", 40, 20.1, "finished", 5, 20, 20),
    )  # fmt: skip
    append(
        tmp_path / "metrics.jsonl",
        record("checkpoint", 5, 5.1, seconds=0.0), record("start", 5, 20),
        record("interval", 20, 40),
    )  # fmt: skip
    assert tool.goodput(tmp_path)["launcher"]["lost"] == pytest.approx(14.9 / 40, abs=1e-3)


def test_starts_by_accelerate_are_named_and_damaged_lines_left_out(tmp_path):
    tool = pytest.importorskip("my_project.tools.goodput")
    assert tool.goodput(tmp_path) == {}
    append(tmp_path / "metrics.jsonl", record("start", 0, -100), record("interval", 5, -90))
    append(tmp_path / "starts.jsonl", line("start", "a.0", 0), end("a.0", 9, 3, "failed", 5, 5, 5))
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"event": "start", "id": 3, "time": 1}\n[1]\n')
        file.write('{"event": "start", "id": "x", "time": "x"}\n{"event": "sta')
    assert tool.goodput(tmp_path)["unknown_starts"] == 1
    assert len(lines(tmp_path)) == 2


# ---- what the launcher writes --------------------------------------------------------------------
def begin(starts: Starts, step: int) -> None:
    """Begin a start, and write what its processes would write."""
    starts.begin()
    starts.folder.mkdir(exist_ok=True)
    (starts.folder / "run.json").write_text(json.dumps({"launch": starts.id}))
    now = starts._began + 1
    status = {"outcome": "running", "step": step + 1, "first_step_time": now, "from_step": step}
    (starts.folder / "status.json").write_text(json.dumps(status))
    append(starts.folder / "metrics.jsonl", {"kind": "start", "step": step, "time": now})
    starts.may_kill({0: None}, 0.0)


def test_the_line_of_a_start_comes_with_the_run_into_its_folder(tmp_path):
    """With --resume never the old run folder moves aside while the processes start."""
    folder = tmp_path / "run"
    old = Starts(folder=folder, limit=3, about=ABOUT)
    begin(old, 0)
    save(folder, 4)
    new = Starts(folder=folder, limit=3, about={"nodes": 2, "world_size": 4})
    new.begin()
    new.may_kill({0: None}, 0.0)
    folder.rename(tmp_path / "old")
    begin(new, 0)
    new.end({0: -9}, [], "")
    assert [line.id for line in lines(tmp_path / "old")] == [old.id] * 2
    first, *_, last = lines(folder)
    written = json.loads((folder / "starts.jsonl").read_text().splitlines()[0])
    assert (written["event"], written["nodes"], written["world_size"]) == ("start", 2, 4)
    assert first.checkpoint is None
    assert (last.outcome, last.cause, last.from_step) == ("killed", "SIGKILL", 0)


def test_a_start_whose_launcher_was_killed_is_ended_by_the_next(tmp_path):
    """Its last records are read before the processes drop them."""
    first = Starts(folder=tmp_path, limit=3, about=ABOUT)
    begin(first, 0)
    until = first._began + 100
    append(tmp_path / "metrics.jsonl", {"kind": "interval", "step": 9, "time": until})
    second = Starts(folder=tmp_path, limit=3, about=ABOUT)
    (tmp_path / "metrics.jsonl").unlink()
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"event": "sta')  # killed while it wrote
    begin(second, 5)
    events = lines(tmp_path)
    assert [event.event for event in events] == ["start", "end", "start"]
    assert (events[1].id, events[1].step, events[1].time) == (first.id, 9, until)
    assert events[1].outcome == "killed"


def test_what_an_earlier_start_saved_does_not_end_a_later_one(tmp_path):
    """With --min_machines a start saves and stops, so that the next one takes in another node."""
    starts = Starts(folder=tmp_path, limit=3, about=ABOUT)
    begin(starts, 0)
    (tmp_path / "status.json").write_text('{"outcome": "preempted"}')
    assert launch.has_ended(starts)
    starts.count += 1
    assert not launch.has_ended(starts)


def test_of_attempts_before_the_run_only_a_failed_one_is_in_the_summary(tmp_path):
    """A refusal is not, nor is an attempt that only showed the result of a finished run."""
    for code, cause, written in (
        (2, "setting", []),
        (0, "", []),
        (1, "exception", ["start", "end"]),
    ):
        starts = Starts(folder=tmp_path, limit=3, about=ABOUT)
        starts.begin()
        starts.end({0: code}, [failures.record(reason="", cause=cause)] * bool(cause), "")
        assert lines(tmp_path) == []
        starts.write()
        assert [line.event for line in lines(tmp_path)] == written
    assert lines(tmp_path)[1].cause == "exception"


def test_a_refused_start_leaves_the_lines_that_a_full_disk_has_held_back(tmp_path):
    starts = Starts(folder=tmp_path, limit=3, about=ABOUT)
    for code, cause in ((1, "exception"), (2, "setting")):
        starts.begin()
        starts.end({0: code}, [failures.record(reason="", cause=cause)], "")
        starts.count += 1
    starts.write()
    assert [line.id for line in lines(tmp_path)] == [f"{starts.launch}.0"] * 2


# ---- whether a scheduler starts a run again ------------------------------------------------------
@pytest.mark.parametrize(
    ("began", "newest", "code", "steps", "wanted"),
    [
        (-1, 20, 0, [], 0),
        (-1, 20, 2, [], 2),
        (20, 40, 2, [-1], 2),  # a wrong setting that was found late
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
    began, newest, code, steps, wanted, tmp_path
):
    lines = []
    for number, step in enumerate(steps):
        record = {
            "event": "start",
            "id": f"{number}.0",
            "launch": f"{number}",
            "time": 1.0 + number,
        }
        record["checkpoint"] = None if step < 0 else step
        restart = {"id": f"{number}.1", "time": 1.5 + number, "checkpoint": 1000}
        lines += [record, record | {"event": "end"}, record | restart]
    append(tmp_path / "starts.jsonl", *lines)
    if began >= 0:
        save(tmp_path, began)
    at_the_start = attempts.steps_at_launches(tmp_path)
    assert at_the_start == [*steps, began], "a restart in place belongs to its launch"
    if newest > began:
        save(tmp_path, newest)
    code, why = attempts.requeue(newest_checkpoint(tmp_path), at_the_start, code)
    assert code == wanted
    assert bool(why) == (code in (1, 75))


def test_the_launcher_says_why_a_scheduler_starts_a_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    monkeypatch.setattr(launch, "Workers", object)
    monkeypatch.setattr(launch, "get_ready", lambda _: 75)
    Path("tiny.yaml").write_text(CONFIG)
    Path("cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    words = ["--config_file", "cpu.yaml", "--requeue", "-m", "my_project.train"]
    assert launch.main([*words, "--config", "tiny.yaml"]) == 75
    assert "starts the run again: there is no checkpoint" in capsys.readouterr().out


def test_an_older_run_is_no_reason_to_start_a_launch_again_that_never_began(tmp_path, monkeypatch):
    """With --resume never, the older run would be moved aside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    monkeypatch.setattr(launch, "Workers", object)
    monkeypatch.setattr(launch, "get_ready", lambda _: 1)
    Path("tiny.yaml").write_text(CONFIG)
    Path("cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    save(tmp_path / "runs/tiny", 1000)
    words = ["--config_file", "cpu.yaml", "--requeue", "-m", "my_project.train"]
    assert launch.main([*words, "--config", "tiny.yaml", "--resume", "never"]) == 1


@pytest.mark.parametrize(("newest", "wanted"), [(500, 1), (600, 75)])
def test_a_fetched_checkpoint_is_no_reason_to_start_a_run_again(
    tmp_path, monkeypatch, newest, wanted
):
    """A new machine has an empty folder, and a fetch brings what earlier launches have saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    monkeypatch.setattr(launch, "Workers", object)
    monkeypatch.setattr(launch, "get_ready", lambda _: None)
    Path("tiny.yaml").write_text(CONFIG)
    Path("cpu.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    folder = tmp_path / "runs/tiny"

    def run(*_):
        starts = Starts(folder=folder, limit=0, about=ABOUT)
        starts.begin()
        save(folder, 500)
        append(
            folder / "starts.jsonl", line("start", "a.0", 0), end("a.0", 9, 5, "killed", 0, 9, 5)
        )
        (folder / "run.json").write_text(json.dumps({"launch": starts.id}))
        starts.may_kill({0: None}, -1.0)  # it is polled, and writes the line of this start
        if newest > 500:
            save(folder, newest)
        starts.end({0: 1}, [], "")
        return SimpleNamespace(tell=lambda: 1, is_new=True, status=Status())

    monkeypatch.setattr(launch, "run", run)
    words = ["--config_file", "cpu.yaml", "--requeue", "-m", "my_project.train"]
    assert launch.main([*words, "--config", "tiny.yaml"]) == wanted
