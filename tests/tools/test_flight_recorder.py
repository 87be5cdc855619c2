"""Dumps of NCCL's flight recorder: the first collective in which ranks differ."""

import json
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project.tools.doctor import diagnose
from my_project.tools.flight_recorder import compare, read
from test_doctor import hang
from world import run_world

GROUP = ["0", "default_pg"]


def entry(number: int, name: str = "all_reduce", size: int = 1024, **more: Any) -> dict[str, Any]:
    """Make an entry as FlightRecorder::dump_json does; its collective is not completed."""
    sizes = more.pop("sizes", [[size]])
    fields = {
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number - 1,
        "pg_id": 0, "process_group": GROUP, "profiling_name": f"nccl:{name}", "is_p2p": False,
        "thread_id": "139653054966656", "thread_name": "pt_autograd_0", "timeout_ms": 600000,
        "input_dtypes": ["Float"], "input_sizes": [[size]],
        "output_dtypes": ["Float"], "output_sizes": sizes,
        "state": "started", "retired": False,
        "time_discovered_started_ns": 1, "time_discovered_completed_ns": 0,
    }  # fmt: skip
    return fields | more


def done(number: int, name: str = "all_reduce", size: int = 1024, **more: Any) -> dict[str, Any]:
    return entry(number, name, size, state="completed", retired=True, **more)


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], ranks: int = 2) -> Path:
    """Write a dump as stopping.save_nccl_trace does."""
    members = str([*range(ranks)])
    content: dict[str, Any] = {
        "version": "2.10", "comm_lib_version": "2.27.5", "nccl_comm_state": {},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": members}},
        "pg_status": {"0": {"last_enqueued_collective": "3"}},
    }  # fmt: skip
    if entries:
        now = time.time_ns()
        content["entries"] = [{"time_created_ns": now + i} | one for i, one in enumerate(entries)]
    path = folder / "errors" / f"nccl_trace_rank_{rank:05d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def find(folder: Path, *ranks: list[dict[str, Any]]) -> Any:
    for rank, entries in enumerate(ranks):
        dump(folder, rank, entries, len(ranks))
    return compare(read(folder, 0.0))


# ---- what is compared ----------------------------------------------------------------------------
TENSOR = {"process_group": ["3", "tensor"]}
SENT = entry(1, "send 0->1", is_p2p=True, p2p_seq_id=1)
TIMED_OUT = entry(2, retired=True)
HALF = {"input_dtypes": ["Half"], "output_dtypes": ["Half"]}


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ([[done(1), entry(2)], [done(1), entry(2, "barrier")]], ("mismatch", 2)),
        ([[entry(1)], [entry(1, size=7)]], ("mismatch", 1)),
        ([[entry(1)], [entry(1, **HALF)]], ("mismatch", 1)),
        # the recorder keeps only the last collectives, and rank 1 has called more of them
        ([[done(1, "broadcast"), done(2), entry(3)], [done(2), entry(3, "barrier")]],
         ("mismatch", 3)),
        ([[entry(1, "broadcast"), done(2)], [done(2)]], None),
        # each group has its own numbers, and sends do not count
        ([[done(1), SENT, entry(4, "broadcast", **TENSOR)],
          [done(1), entry(4, "barrier", **TENSOR)]], ("mismatch", 4)),
        # sizes that may differ
        ([[done(1, "all_to_all", 3, sizes=[[9]])], [done(1, "all_to_all", 9, sizes=[[3]])]], None),
        ([[done(1, "gather", sizes=[[4], [4]])], [done(1, "gather", sizes=[])]], None),
        ([[done(1, "scatter", input_sizes=[[4], [4]])], [done(1, "scatter", input_sizes=[])]],
         None),
        ([[done(1, "a_new_one", 3)], [done(1, "a_new_one", 4)]], None),
        # all ranks made the same calls
        ([[done(1), entry(2)], [done(1), entry(2)]], ("incomplete", 2)),
        ([[done(1), TIMED_OUT], [done(1), TIMED_OUT]], ("incomplete", 2)),
        ([[done(1)], [done(1), done(2)]], None),
        # a time that no float represents
        ([[done(1), entry(2, time_created_ns=10**400)], [done(1)]], None),
    ],
)  # fmt: skip
def test_the_first_collective_in_which_ranks_differ_is_found(tmp_path, ranks, wanted):
    found = find(tmp_path, *ranks)
    assert (found and (found.kind, found.number)) == wanted


def test_who_called_what_and_who_did_not_is_named(tmp_path):
    one, other = [done(1), entry(2)], [done(1), entry(2, "_all_gather_base", 16, sizes=[[64]])]
    found = find(tmp_path, one, other, one, one)
    assert found.calls == {
        "all_reduce of Float [1024]": [0, 2, 3],
        "_all_gather_base of Float [16] to Float [64]": [1],
    }
    assert found.differing == [1]
    found = find(tmp_path, one, one[:1], one, [])
    assert (found.kind, found.number, found.missing) == ("missing", 2, [1, 3])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 3}', '{"entries": []}'])
def test_a_damaged_dump_is_listed_and_the_others_are_compared(tmp_path, content):
    for rank in (0, 1, 2):
        path = dump(tmp_path, rank, [entry(1, "barrier" if rank else "all_reduce")], 3)
    path.write_text(content)
    dumps = read(tmp_path, time.time())
    assert dumps.notes == ["errors/nccl_trace_rank_00002.json is damaged, so it is left out"]
    assert compare(dumps).calls.keys() == {"all_reduce of Float [1024]", "barrier of Float [1024]"}


# ---- the real form -------------------------------------------------------------------------------
def dump_of_torch() -> str:
    import torch.distributed as dist

    make = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    found = make(includeCollectives=True, onlyActive=False) if make else "{}"
    dist.destroy_process_group()
    return found.decode() if isinstance(found, bytes) else found


def test_the_dumps_of_these_tests_have_the_form_of_torch(tmp_path, monkeypatch):
    """This is gloo's recorder: NCCL's needs GPUs, and the same function writes its dumps."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    real = json.loads(run_world(2, dump_of_torch)[1])
    if not real.get("entries"):
        pytest.skip("this torch records only NCCL")
    (one,) = real["entries"]
    ours = json.loads(dump(tmp_path, 1, [entry(1)]).read_text())
    assert ours.keys() == real.keys()
    assert ours["entries"][0].keys() == one.keys()
    for name, value in ours["entries"][0].items():
        assert type(one[name]) is type(value), name
    path = dump(tmp_path, 0, [])
    path.write_text(json.dumps(real))
    dumps = read(tmp_path, time.time())
    assert [*dumps.calls["0 (default_pg)"]] == [1]


# ---- what the doctor concludes from them ---------------------------------------------------------
MISMATCH = [entry(1)], [entry(1, "barrier")]
ARRIVED_ALONE = [done(1), entry(2)], [done(1)]
OLD = {"time_created_ns": 0}


@pytest.mark.parametrize(
    ("causes", "calls", "wanted"),
    [
        # of three ranks the one that differs is likely at fault; of two, neither
        (["waiting"] * 3, [*MISMATCH, [entry(1)]], ("mismatched collectives", "known", 1)),
        (["waiting"] * 2, MISMATCH, ("mismatched collectives", "known", None)),
        # that a rank has not called the collective supports its watchdog's report
        (["waiting", "stalled"], ARRIVED_ALONE, ("stalled", "known", 1)),
        # the same calls on all ranks point to the network
        (["waiting"] * 3, [[entry(1)], [entry(1)]], ("hang", "likely", 0)),
        # dumps of an earlier start
        (["waiting"] * 2, [[entry(1, **OLD)], [entry(1, "barrier", **OLD)]], ("hang", "likely", 0)),
    ],
)
def test_what_the_dumps_show_decides_the_cause_of_a_hang(
    tmp_path, monkeypatch, causes, calls, wanted
):
    run = hang(tmp_path, monkeypatch, *causes)
    for rank, entries in enumerate(calls):
        dump(run.folder, rank, entries, len(causes))
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"], found["first"]["rank"]) == wanted


def test_a_rank_without_a_report_is_blamed_before_one_that_is_missing_in_the_dumps(
    tmp_path, monkeypatch
):
    run = hang(tmp_path, monkeypatch, *["waiting"] * 3)
    for path in (run.folder / "errors").glob("*_rank_00002_*.json"):
        path.unlink()
    for rank, entries in enumerate(ARRIVED_ALONE):
        dump(run.folder, rank, entries, 3)
    found = diagnose(run.folder)
    assert (found["cause"], found["first"]["rank"]) == ("no report", 2)


def test_of_several_calls_all_but_the_most_frequent_differ(tmp_path):
    one, two, three = ([entry(1, name)] for name in ("all_reduce", "barrier", "broadcast"))
    assert find(tmp_path, one, two, one, three).differing == [1, 3]
    assert find(tmp_path, one, two, three, one, two).differing == []


def test_a_rank_that_the_dumps_blame_is_told_with_its_own_host_and_file(tmp_path, monkeypatch):
    run = hang(tmp_path, monkeypatch, "waiting", "waiting", "waiting", last_in="sharding.py")
    for path in (run.folder / "errors").glob("*_rank_00002_*.json"):
        path.write_text(path.read_text().replace(socket.gethostname(), "gpu-b"))
    for rank, entries in enumerate([[entry(1)], [entry(1)], [entry(1, "barrier")]]):
        dump(run.folder, rank, entries, 3)
    first = diagnose(run.folder)["first"]
    assert (first["rank"], first["host"]) == (2, "gpu-b")
    assert "_rank_00002_" in first["says"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_dumps_of_nccl_itself_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = hang(tmp_path, monkeypatch, "waiting", "waiting")
    for rank in (0, 1):  # DebugInfoWriter adds the rank to TORCH_FR_DUMP_TEMP_FILE
        (run.folder / f"errors/nccl_trace_rank_{rank}").write_bytes(pickle.dumps(Bomb()))
    diagnose(run.folder)
    assert not (tmp_path / "exploded").exists()
