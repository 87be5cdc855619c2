"""The doctor's answers to what real faults leave behind: what is known and what is likely."""

import json
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from my_project import failures, run_folder
from my_project.config import Config, ConfigError
from my_project.files import read_json, writing
from my_project.process import START
from my_project.run_files import Record
from my_project.run_folder import Run
from my_project.tools import doctor, reader
from my_project.tools.doctor import diagnose
from my_project.tools.report.report import write_report
from my_project.tools.runs import list_runs
from ragged import Ragged
from runs import change, make_config, train
from test_damage import KINDS
from test_launch_node import launched_in_fork
from test_stopping import fails, with_fault
from world import run_world

HERE = socket.gethostname()


def text_of(folder: Path, capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    doctor.print_diagnosis(diagnose(folder))
    return capsys.readouterr().out


# ---- runs of two processes -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> Config:
    config = with_fault(tmp_path_factory.mktemp("raised"), "raise", checkpoints__every_steps=2)
    fails(config)
    return config


def test_an_exception_is_told_with_rank_host_line_and_file(raised, capsys):
    found = diagnose(raised.folder)
    first = found["first"]
    assert (found["cause"], found["certainty"]) == ("exception", "known")
    assert (first["rank"], first["host"], first["step"]) == (1, HERE, 3)
    assert first["what"] == "ValueError: this rank was told to fail"
    assert re.search(r"ragged\.py, line \d+, in strike: raise ValueError", first["at"])
    assert read_json(Path(first["says"]))["rank"] == 1
    shown = text_of(raised.folder, capsys).splitlines()
    assert "the same command continues from step 2" in shown[-1], "the remedy is the last line"


@pytest.mark.parametrize(
    ("fault", "settings", "cause", "said"),
    [
        ("nan", {"optim__max_skipped_steps": 1}, "not finite", "the loss on this rank is nan"),
        pytest.param(*("hang", {}, "stalled", "in strike: time.sleep(1)"), marks=pytest.mark.slow),
        ("leave", {}, "no report", ""),
        ("out_of_memory", {}, "out of memory", "a smaller --batches.micro_batch_size (now 4)"),
    ],
)
def test_a_fault_is_told_with_its_rank(tmp_path, fault, settings, cause, said):
    config = with_fault(tmp_path, fault, **settings)
    fails(config)
    found = diagnose(config.folder)
    assert (found["cause"], found["certainty"]) == (cause, "known" if said else "likely")
    assert (found["first"]["rank"], found["first"]["host"]) == (1, HERE)
    assert said in str(found)
    assert said or found["known"] == [], "nothing is claimed"


# ---- finished, preempted, repaired ---------------------------------------------------------------
def test_a_repaired_run_is_not_blamed_for_what_failed_before(raised, tmp_path, capsys):
    config = change(raised, runs_folder=str(tmp_path))
    shutil.copytree(raised.folder, config.folder)  # one process has no rank 1, so no fault
    assert run_world(1, train, change(config, stop_after="0s")) == [75]
    found = diagnose(config.folder)
    assert (found["outcome"], found["cause"], found["first"]) == ("preempted", "", None)
    assert found["earlier_failures"] == 1
    assert run_world(1, train, config) == [0]
    found = diagnose(config.folder)
    assert (found["outcome"], found["cause"], found["remedy"]) == ("finished", "", [])
    assert "told to fail" not in text_of(config.folder, capsys)


# ---- what the real functions write, for hosts that are not here ----------------------------------
def begin(folder: Path, monkeypatch, hosts: tuple[str, ...] = (HERE,), **settings: Any) -> Run:
    """Open a run of one process for each of these hosts, as rank 0 does."""
    monkeypatch.setenv("WORLD_SIZE", str(len(hosts)))
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[0])
    run = Run(make_config(folder, **settings), rank=0)
    run.total_steps = 10
    run.hosts = [*hosts]
    run.begin()
    assert run.lock
    run.lock.close()  # as if its processes had ended
    return run


def fail(run: Run, monkeypatch, rank: int, error: BaseException) -> None:
    """Let a rank of a run fail with an exception, inside the real context of the loop."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(socket, "gethostname", lambda: run.hosts[rank])
    run.rank, run.step = rank, 3
    with pytest.raises(type(error)), run_folder.failures_recorded(run):
        raise error


def hang(folder: Path, monkeypatch, *causes: str, last_in: str = "train.py") -> Run:
    """Leave the error files that watchdogs write, of one rank for each cause.

    The last rank was in another file, if that is given.
    """
    run = begin(folder, monkeypatch, (HERE,) * len(causes))
    files = ["train.py"] * (len(causes) - 1) + [last_in]
    for run.rank, (cause, file) in enumerate(zip(causes, files, strict=True)):
        frames = [failures.frame_at(f"/src/{file}", 3, "main")]
        reason = "no progress for 4 s"
        run.record_error(failures.record(reason=reason, cause=cause, frames=frames))
    run.write_status("failed", "")
    return run


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer")
NCCL = RuntimeError("NCCL error: unhandled system error")


@pytest.mark.parametrize(
    ("reporting", "cause", "rank", "host"),
    [(2, "lost node", None, "gpu-b"), (3, "no report", 3, "gpu-b"), (4, "network", 0, "gpu-a")],
)
def test_ranks_that_lost_contact_point_to_those_that_do_not_report(
    tmp_path, monkeypatch, reporting, cause, rank, host
):
    run = begin(tmp_path, monkeypatch, ("gpu-a", "gpu-a", "gpu-b", "gpu-b"))
    for of_rank in range(reporting):
        fail(run, monkeypatch, of_rank, NCCL if of_rank == 3 else LOST)
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == (cause, "likely")
    assert (found["first"]["rank"], found["first"]["host"]) == (rank, host)


def test_a_host_that_is_not_known_is_not_named(tmp_path, monkeypatch, capsys):
    run = begin(tmp_path, monkeypatch, ("gpu-a", ""))
    fail(run, monkeypatch, 0, LOST)
    assert "host" not in text_of(run.folder, capsys).split("first")[1].split(":")[0]


@pytest.mark.parametrize(
    ("hosts", "stale"),
    [
        # node 1 was lost, and the other nodes went on
        (("gpu-a", "gpu-c"), {("node_1", 1), ("node_2", 2)}),
        # then node 1 came back
        (("gpu-a", "gpu-b", "gpu-c"), {("node_2", 1)}),
    ],
)
def test_ranks_of_an_earlier_attempt_with_other_nodes_are_told_apart(
    tmp_path, monkeypatch, hosts, stale
):
    run = begin(tmp_path, monkeypatch, hosts=hosts)
    stamp = time.strftime("%Y%m%dT%H%M%S_1", time.gmtime())
    for node, ranks in {"node_0": (0,), "node_1": (1,), "node_2": (2, 1)}.items():
        folder = run.folder / "logs" / node / stamp
        folder.mkdir(parents=True)
        for rank in ranks:
            path = folder / f"rank_{rank:05d}.log"
            path.write_text(f"of {node}")
            written = time.time() - (20 if (node, rank) in stale else 10)
            os.utime(path, (written, written))
    start = doctor.newest_start(doctor.read_folder(run.folder), None)
    assert start.silent == [*range(len(hosts))]
    assert start.logs[1].read_text() == ("of node_2" if len(hosts) == 2 else "of node_1")


def test_a_rank_that_went_on_after_the_others_gave_up_was_likely_stopped(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch, (HERE, HERE))
    for run.rank, cause, idle_seconds in ((0, "waiting", 10), (1, "lost contact", 30)):
        failure = failures.record(reason="", cause=cause)
        run.progress_time = failure.time - idle_seconds
        failure = run.record_error(failure)
    run.fail(failure)
    found = diagnose(run.folder)
    assert (found["cause"], found["first"]["rank"]) == ("stalled", 1)
    assert "SIGSTOP" in found["likely"][0]


def test_the_newest_of_several_failures_is_told(tmp_path, monkeypatch):
    for rank, error in enumerate((KeyError("labels"), MemoryError())):
        run = begin(tmp_path, monkeypatch, (HERE, HERE))
        fail(run, monkeypatch, rank, error)
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("out of host memory", "known")
    assert found["first"]["rank"] == 1
    assert found["earlier_failures"] == 1


@pytest.mark.parametrize(
    ("workers", "place", "said", "not_said"),
    [
        (0, {}, [], ["workers", "micro_batch_size"]),
        (3, {}, ["fewer batches.workers (now 3)"], ["micro_batch_size"]),
        (None, {}, ["workers (now one fewer than the CPUs, at most 8)"], []),
        (0, {"ACCELERATE_USE_CPU": "True"}, ["a smaller --batches.micro_batch_size (now 4)"], []),
        (0, {"CUDA_VISIBLE_DEVICES": "-1,-1"}, ["a smaller --batches.micro_batch_size"], []),
    ],
)
def test_for_host_memory_it_advises_what_can_be_changed(
    tmp_path, monkeypatch, workers, place, said, not_said
):
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    run = begin(tmp_path, monkeypatch, batches__workers=workers)
    fail(run, monkeypatch, 0, MemoryError())
    (remedy, _) = diagnose(run.folder)["remedy"]
    assert all(text in remedy for text in (*said, "more memory for the job"))
    assert not any(text in remedy for text in not_said)


def test_a_limit_of_open_files_is_a_cause_with_its_remedy(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch)
    fail(run, monkeypatch, 0, OSError(24, "Too many open files", "a.npy"))
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("too many open files", "known")
    assert "ulimit -n" in found["remedy"][0]


@pytest.mark.parametrize(("workers", "said"), [(3, "fewer batches.workers (now 3)"), (0, "")])
def test_each_cause_has_a_remedy_for_a_run(tmp_path, monkeypatch, workers, said):
    run = begin(tmp_path, monkeypatch, batches__workers=workers)
    values = doctor._values(doctor.Start(run=reader.read_run(run.folder)), {})
    texts = {cause: " ".join(row).format_map(values) for cause, row in doctor.CAUSES.items()}
    assert said in texts["full shared memory"]
    assert said or not any("batches.workers" in text for text in texts.values())


def test_a_full_disk_is_told_also_where_nothing_else_was_reported(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
        found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("full disk", "likely")
    with pytest.raises(ConfigError) as raised, writing(Path("runs/a")):
        raise OSError(28, "No space left on device")
    fail(run, monkeypatch, 0, raised.value)
    assert diagnose(run.folder)["cause"] == "full disk"


@pytest.mark.parametrize(
    ("note", "is_full"),
    [
        ("step_00000003 could not be saved: OSError: No space left on device", True),
        ("the mirror could not be brought up to date: no network", False),
    ],
)
def test_the_remedy_for_a_save_that_failed_fits_its_error(tmp_path, monkeypatch, note, is_full):
    run = begin(tmp_path, monkeypatch)
    run.write_status("finished", "", note=note)
    found = diagnose(run.folder)
    assert (found["known"], "free some space" in str(found["remedy"])) == ([note], is_full)


def test_steps_that_overflowed_and_steps_without_items_are_told_apart(tmp_path, monkeypatch):
    from my_project.state import NotFiniteError

    facts = {"skipped_from": 398, "skipped_to": 410, "loss_is_finite": True}
    for number, items in enumerate((5.0, 0.0)):
        run = begin(tmp_path / str(number), monkeypatch)
        fail(run, monkeypatch, 0, NotFiniteError("skipped", num_items=items, **facts))
        found = diagnose(run.folder)
        assert found["known"] == ["steps 398 to 410 were skipped"]
        assert found["cause"] == ("not finite" if items else "no items")
        assert ("overflowed" in str(found["likely"])) == bool(items)
        assert ("--precision no" in str(found["remedy"])) == bool(items)
        about = read_json(run.folder / "run.json") | {"numerics": {"precision": "no"}}
        (run.folder / "run.json").write_text(json.dumps(about))
        assert "--precision" not in str(diagnose(run.folder)["remedy"])


def interval(rank: int, lead: float, step: float = 0.4) -> Record:
    seconds = {"rank_seconds_min": 0.01, "rank_seconds_max": 0.01 + lead, "step_seconds": step}
    values = {**seconds, "slowest_rank": rank, "slowest_host": "gpu-a"}
    return Record(kind="interval", step=9, values=values)


@pytest.mark.parametrize(
    ("records", "is_slow"),
    [
        ([Record(step=9, values={"rank_seconds_max": "1"}), *[interval(1, 0.3)] * 5], True),
        ([interval(1, 0.3)] * 4, False),  # too few records
        ([interval(1, 0.3), interval(0, 0.3)] * 5, False),  # no rank is slow in most records
        ([interval(1, 0.08)] * 9, False),  # less than a quarter of a step of 0.4 s
        ([interval(1, 0.008, 0.01)] * 9, False),  # noise of a short step
    ],
)
def test_a_rank_is_slow_if_others_wait_for_it_in_most_records(records, is_slow):
    assert [line[:15] for line in doctor.slow_rank(records)] == ["rank 1 on gpu-a"] * is_slow


def test_of_a_long_run_the_newest_records_are_kept_in_memory(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch)
    problem = {
        "kind": "check",
        "step": 7,
        "problem": "ranks differ",
        "elapsed_seconds": 1,
        "time": 2,
    }
    records = [{"kind": "interval", "step": step, "time": 1.0} for step in range(1, 2001)]
    lines = [json.dumps(one) + "\n" for one in (*records[:7], problem, *records[7:])]
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    found = doctor.read_folder(run.folder)
    newest, checks = found.skimmed
    assert [one.step for one in newest] == [*range(1901, 2001)]
    assert [one.to_json() for one in checks] == [problem]
    told = diagnose(run.folder)
    assert "from step 7 on: ranks differ" in told["known"]
    assert told["step"] == 2000, "status.json of a run under way has an earlier one"


def test_what_checks_have_found_is_told_once_with_its_first_step():
    found = [Record(step=step, values={"problem": what}) for step, what in enumerate("abacd")]
    lines = doctor.check_findings([Record(kind="interval", step=9), *found])
    assert [re.findall(r"step (\d+) .*: (\w)$", line)[0] for line in lines] == [
        ("0", "a"), ("1", "b"), ("3", "c"), ("4", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last_in", "cause", "blamed"),
    [
        ("train.py", "hang", 0),
        ("sharding.py", "mismatched collectives", 0),
        ("ragged.py", "mismatched collectives", 1),  # in the recipe
    ],
)
def test_ranks_that_wait_in_other_lines_likely_called_other_collectives(
    tmp_path, monkeypatch, last_in, cause, blamed
):
    found = diagnose(hang(tmp_path, monkeypatch, "waiting", "waiting", last_in=last_in).folder)
    assert (found["cause"], found["certainty"], found["first"]["rank"]) == (cause, "likely", blamed)
    assert len(found["known"]) == len({"train.py", last_in}), "a sentence for each line"


# ---- ended without a word ------------------------------------------------------------------------
def test_a_run_that_was_told_to_stop_and_killed_before_it_saved_is_told(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    logs = run.folder / f"logs/node_0/{stamp}_7"
    logs.mkdir(parents=True)
    monkeypatch.setenv("LAUNCH_LOGS", str(logs))
    monkeypatch.setattr(failures.LAUNCHER, "stop_signal", "")
    failures.note_signal("SIGTERM")
    found = diagnose(run.folder)
    assert (found["outcome"], found["cause"]) == ("interrupted", "stopped")
    assert "it was told to stop (SIGTERM)" in found["known"][0]


def launched(folder: Path, monkeypatch, *hosts: str, start: str = "abc.0") -> tuple[Run, Path]:
    """Open a run, as rank 0 does in a start of a launcher; return it and the log folder."""
    monkeypatch.setenv(START, start)
    run = begin(folder, monkeypatch, hosts)
    logs = run.folder / "logs/node_0" / time.strftime("%Y%m%dT%H%M%S_7", time.gmtime())
    logs.mkdir(parents=True)
    return run, logs


def end_logs(logs: Path, **ended: Any) -> None:
    (logs / "launcher.json").write_text(json.dumps({"time": time.time()} | ended))


@pytest.mark.parametrize(("code", "cause"), [(-9, "killed"), (-6, "mismatched collectives")])
def test_a_mismatch_in_the_log_is_told_only_of_a_rank_that_aborted(
    tmp_path, monkeypatch, code, cause
):
    run, logs = launched(tmp_path, monkeypatch, HERE)
    (logs / "rank_00000.log").write_text("collective mismatch: of this or an earlier start")
    end_logs(logs, exit_codes={"0": code}, killed=[], restarts=0)
    assert diagnose(run.folder)["cause"] == cause


@pytest.mark.parametrize(("restarts", "cause"), [(0, "interrupted"), (1, "killed")])
def test_what_ended_an_earlier_start_of_the_launch_is_not_blamed(
    tmp_path, monkeypatch, restarts, cause
):
    run, logs = launched(tmp_path, monkeypatch, HERE, HERE, start="abc.1")
    end_logs(logs, exit_codes={"1": -9}, killed=[], restarts=restarts)
    found = diagnose(run.folder)
    assert found["cause"] == cause, "the restart was killed with its launcher"


@pytest.mark.parametrize("is_earlier", [True, False])
def test_a_signal_to_an_earlier_start_of_the_launch_is_not_told(tmp_path, monkeypatch, is_earlier):
    run, logs = launched(tmp_path, monkeypatch, HERE, start="abc.1")
    line = {"event": "start", "id": "abc.1", "time": time.time()}
    (run.folder / "starts.jsonl").write_text(json.dumps(line) + "\n")
    note = {"signal": "SIGUSR1", "time": line["time"] + (-9 if is_earlier else 9)}
    (logs / "signal_rank_00000.json").write_text(json.dumps(note))
    assert diagnose(run.folder)["cause"] == ("interrupted" if is_earlier else "stopped")


def log_failure(logs: Path, rank: int, cause: str, attempt: int) -> None:
    """Leave the error file of a rank that failed before its start opened the run folder."""
    failure = failures.record(reason="told to fail", cause=cause)
    failure = replace(failure, rank=rank, attempt=attempt)
    (logs / f"rank_{rank:05d}.json").write_text(json.dumps(failure.to_json()))


@pytest.mark.parametrize("how", ["exception", "killed"])
def test_a_restart_that_fails_before_it_opens_the_run_folder_is_told(tmp_path, monkeypatch, how):
    run, logs = launched(tmp_path, monkeypatch, HERE, HERE)
    for rank in (0, 1):
        fail(run, monkeypatch, rank, LOST)
    log_failure(logs, 1, "lost contact", attempt=0)
    if how == "exception":
        log_failure(logs, 0, how, attempt=1)
    end_logs(logs, exit_codes={"0": 2 if how == "exception" else -9}, killed=[], restarts=1)
    run.write_status("failed", "of the start before it")
    found = diagnose(run.folder)
    assert (found["outcome"], found["cause"], found["first"]["rank"]) == ("failed", how, 0)
    assert found["earlier_failures"] == 1


def test_a_rank_that_failed_before_an_earlier_start_opened_the_folder_is_not_blamed(
    tmp_path, monkeypatch
):
    run, logs = launched(tmp_path, monkeypatch, HERE, HERE, start="abc.1")
    log_failure(logs, 1, "lost contact", attempt=0)
    assert diagnose(run.folder)["cause"] == "interrupted"


def test_a_failed_launch_on_fewer_nodes_is_told(tmp_path, monkeypatch):
    run, logs = launched(tmp_path, monkeypatch, HERE, "gpu-b")
    stopped = run.folder / "logs/node_1" / logs.name
    stopped.mkdir(parents=True)
    end_logs(stopped, exit_codes={"1": 75}, killed=[], restarts=0)
    run.write_status("preempted", "saved")
    stamp = time.strftime("%Y%m%dT%H%M%S_8", time.gmtime(time.time() + 60))
    (run.folder / "logs/node_0" / stamp).mkdir()
    log_failure(run.folder / "logs/node_0" / stamp, 0, "exception", attempt=0)
    found = diagnose(run.folder)
    assert (found["outcome"], found["cause"]) == ("failed", "exception")


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_start_that_a_stop_signal_ended_before_the_loop_was_stopped(
    tmp_path, monkeypatch, restarts
):
    run, logs = launched(tmp_path, monkeypatch, HERE)
    if restarts:
        run.write_status("failed", "of the start before it")
    else:
        (run.folder / "run.json").unlink()
    end_logs(logs, exit_codes={"0": -10}, killed=[], restarts=restarts, signal="SIGUSR1")
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("stopped", "known")
    assert found["first"]["what"] == "no process reported why it ended"


def test_a_rank_that_was_killed_comes_before_one_that_aborted_on_another_node(
    tmp_path, monkeypatch
):
    run, logs = launched(tmp_path, monkeypatch, "gpu-a", "gpu-b")
    other = run.folder / "logs/node_1" / logs.name
    other.mkdir(parents=True)
    end_logs(logs, exit_codes={"0": -6}, killed=[], restarts=0)
    end_logs(other, exit_codes={"1": -9}, killed=[], restarts=0)
    found = diagnose(run.folder)
    assert (found["cause"], found["first"]["rank"]) == ("killed", 1)


def test_a_rank_that_only_its_launcher_reports_is_told(tmp_path, monkeypatch):
    run, logs = launched(tmp_path, monkeypatch, HERE)
    (run.folder / "run.json").unlink()
    end_logs(logs, exit_codes={"3": 7}, killed=[], restarts=0)
    found = diagnose(run.folder)
    assert (found["cause"], found["first"]["rank"]) == ("exited", 3)


def test_all_hosts_of_ranks_that_ended_together_are_named(tmp_path, monkeypatch):
    run, logs = launched(tmp_path, monkeypatch, "gpu-a", "gpu-b", "gpu-c")
    end_logs(logs, exit_codes={"1": -9, "2": -9}, killed=[], restarts=0)
    assert diagnose(run.folder)["first"]["host"] == "gpu-b, gpu-c"


def test_a_file_that_is_removed_while_the_doctor_reads_is_left_out(tmp_path, monkeypatch):
    run, _ = launched(tmp_path, monkeypatch, HERE)
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: [*real(self), self / ".launcher.json.7"])
    assert diagnose(run.folder)["cause"] == "interrupted"


@pytest.mark.parametrize("limit", ["null", "soon"])
def test_a_damaged_time_limit_does_not_end_the_doctor(tmp_path, monkeypatch, limit):
    run = begin(tmp_path, monkeypatch)
    path = run.folder / "config.yaml"
    path.write_text(re.sub("( timeout_seconds:).*", rf"\1 {limit}", path.read_text()))
    for module in (doctor, reader):
        monkeypatch.setattr(module, "is_locked", lambda folder: True)
    found = diagnose(run.folder, time.time() + 3600)
    assert (found["outcome"], "after 600 s" in found["happened"]) == ("running", True)


# ---- damage, secrets -----------------------------------------------------------------------------
def test_a_damaged_config_is_to_be_restored_before_the_command_continues(raised, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(raised.folder, folder)
    (folder / "checkpoints/step_00000001").mkdir(parents=True)
    (folder / "checkpoints/step_00000001/manifest.json").write_text("{}")
    assert not any("config.yaml" in line for line in diagnose(folder)["remedy"])
    (folder / "config.yaml").write_text("")
    assert "restore config.yaml (best/ and export/ have copies)" in diagnose(folder)["remedy"]


MISSED = [("metrics.jsonl", "empty"), ("metrics.jsonl", "missing"), ("errors", "missing")]


@pytest.mark.parametrize(
    "name", ["status.json", "run.json", "config.yaml", "metrics.jsonl", "errors"]
)
@pytest.mark.parametrize("kind", [*KINDS, "missing", "folder"])
def test_no_damage_ends_a_tool_and_it_is_named(raised, tmp_path, name, kind, capsys):
    folder = tmp_path / "run"
    shutil.copytree(raised.folder, folder)
    path = folder / name
    if name == "errors":
        path = next(path.glob("*_rank_00001_*"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind in KINDS:
        path.write_bytes(KINDS[kind])

    page = write_report([folder]).read_text()
    assert name == "errors" or f"{name} is missing or damaged" in page
    assert ("<figcaption>Loss" in page) == (name != "metrics.jsonl")
    (listed,) = list_runs(tmp_path)
    known = ("damaged", 2) if name == "status.json" else ("failed", 3)  # the last record is of 2
    assert (listed.run.state, listed.step) == known

    found = diagnose(folder)
    assert text_of(folder, capsys)
    assert found["outcome"] == "failed"
    if (name, kind) not in MISSED:
        assert [one for one in found["damaged"] if path.name in one], found["damaged"]
    if name == "errors":
        assert found["first"]["says"].endswith("status.json")
    assert (found["cause"], found["first"]["rank"]) == ("exception", 1)
    assert found["first"]["what"] == "ValueError: this rank was told to fail"


def test_without_any_intact_report_it_says_that_it_does_not_know(tmp_path, monkeypatch):
    run = begin(tmp_path, monkeypatch)
    (run.folder / "status.json").write_bytes(b"")
    found = diagnose(run.folder)
    assert (found["outcome"], found["cause"]) == ("unknown", "interrupted")
    assert "status.json" in found["damaged"][0]
    run.write_status("failed", "of an earlier attempt")
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("unknown", "unknown")
    assert (found["first"]["rank"], found["first"]["what"]) == (None, "of an earlier attempt")


def test_what_is_printed_holds_no_secret_and_no_control_character(tmp_path, monkeypatch, capsys):
    run = begin(tmp_path, monkeypatch)
    secret = f"GET http://me:pw123@host\x1b[31m\nhub_token='S3cr3t' {'long ' * 300}"
    fail(run, monkeypatch, 0, ValueError(secret))
    shown = text_of(run.folder, capsys) + json.dumps(diagnose(run.folder), ensure_ascii=False)
    assert "GET http://***@host?[31m hub_token='***'" in " ".join(shown.split())
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown)
    for secret in ("S3cr3t", "pw123"):
        assert secret not in shown


# ---- no run, or a start that did not become one --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoData(Ragged):
    def build_datasets(self, data_info):
        raise KeyError("labels")


def train_with_logs(config: Config, folder: Path) -> None:
    """Train as under the launcher, with a log folder."""
    from my_project import exits

    folder.mkdir(parents=True)
    os.environ["LAUNCH_LOGS"] = str(folder)
    exits.run_on_all_ranks(train, config)


def test_a_start_that_fails_before_the_run_is_open_is_told_from_its_log(tmp_path):
    config = make_config(tmp_path, NoData())
    logs = config.folder / "logs/node_0"
    with pytest.raises(RuntimeError, match="the process died"):
        run_world(1, train_with_logs, config, logs / "20260101T000000_7")
    found = diagnose(config.folder)
    assert (found["outcome"], found["cause"]) == ("failed", "exception")
    assert (found["first"]["rank"], found["first"]["host"]) == (0, HERE)
    assert found["first"]["what"] == "KeyError: 'labels'"
    assert re.search(r"test_doctor\.py, line \d+, in build_datasets: raise", found["first"]["at"])
    assert found["first"]["says"].endswith("rank_00000.json")
    assert train(change(config, recipe=Ragged(), steps=2)) == 0
    assert diagnose(config.folder)["outcome"] == "finished", "what failed is older"
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(time.time() + 60))
    with pytest.raises(RuntimeError, match="the process died"):
        run_world(1, train_with_logs, change(config, resume="never"), logs / f"{stamp}_8")
    found = diagnose(config.folder)
    assert (found["outcome"], found["cause"]) == ("failed", "exception")


def test_a_failure_is_told_also_after_a_start_that_has_left_nothing(raised, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(raised.folder, folder)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(time.time() + 60))
    (folder / f"logs/node_0/{stamp}_8").mkdir(parents=True)
    (folder / f"logs/node_0/{stamp}_8/launcher.json").write_text("{}")
    found = diagnose(folder)
    assert (found["cause"], found["first"]["rank"]) == ("exception", 1)
    assert found["earlier_failures"] == 0
    end_logs(folder / f"logs/node_0/{stamp}_8", exit_codes={"0": 7})
    found = diagnose(folder)
    assert (found["cause"], found["earlier_failures"]) == ("exited", 1)


# ---- through the real launcher -------------------------------------------------------------------


RECIPE = """
import ctypes, os, signal, time
import torch.distributed as dist
from ragged import Ragged, torch

def signal_me(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.1)

FAULTS = {
    "exit": lambda: os._exit(7),
    "leave": lambda: os._exit(0),
    "crash": lambda: ctypes.string_at(0),
    "stop": lambda: signal_me(signal.SIGSTOP),
    "preempt": lambda: signal_me(signal.SIGTERM, signal.SIGKILL),
    "call alone": lambda: dist.all_reduce(torch.ones(3)),
}

class Faulty(Ragged):
    def loss(self, model, batch, step):
        if (step, os.environ.get("RANK", "0")) == (3, os.environ["FAULT_ON"]):
            FAULTS[os.environ["FAULT"]]()
        return super().loss(model, batch, step)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "processes", "rank", "wanted"),
    [
        ("exit", 1, 0, ("exited", "known", "ended with exit code 7")),
        ("crash", 2, 1, ("crashed", "known", "ended by signal 11 (SIGSEGV)")),
        ("stop", 2, 1, ("no report", "likely", "no report from rank 1 on ")),
        ("leave", 1, 0, ("exited", "known", "ended with exit code 0")),
        ("leave", 2, 1, ("exited", "known", "ended with exit code 0")),
        ("call alone", 2, 0, ("mismatched collectives", "known", "(SIGABRT)")),
        ("preempt", 1, 0, ("killed", "known", "ended by signal 9 (SIGKILL)")),
    ],
)
def test_processes_that_leave_no_report_are_told(tmp_path, fault, processes, rank, wanted):
    (tmp_path / "own.py").write_text(RECIPE)
    path = ("--recipe.class_path", "own.Faulty", "--distributed.timeout_seconds", "4")
    more = {"flags": ("--max_restarts", "0"), "FAULT": fault, "FAULT_ON": str(rank)}
    code, _ = launched_in_fork(tmp_path, processes, *path, **more)
    assert code not in (0, 75)
    found = diagnose(tmp_path / "runs/tiny")
    assert found["outcome"] == "failed", "not interrupted: its launcher was still running"
    assert (found["cause"], found["certainty"]) == wanted[:2], found
    assert wanted[2] in found["first"]["what"]
    assert found["first"]["rank"] == rank
    if fault == "stop":
        assert "its launcher had to kill it" in found["likely"][0]
    if fault == "preempt":
        assert "it had been told to stop (SIGTERM), and had not saved" in found["likely"][0]
