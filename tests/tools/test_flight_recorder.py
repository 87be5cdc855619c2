"""Dumps of NCCL's flight recorder: the first collective in which ranks differ."""

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project import failures
from my_project.run_folder import Run
from my_project.tools.doctor import diagnose
from my_project.tools.flight_recorder import compare, read
from runs import make_config
from world import run_world

GROUP = ["0", "default_pg"]


def entry(number: int, name: str = "all_reduce", size: int = 1024, **more: Any) -> dict[str, Any]:
    """Make an entry as FlightRecorder::dump_json does; of one that is not completed by default."""
    sizes = more.pop("sizes", [[size]])
    fields = {
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "record_id": number - 1,
        "pg_id": 0, "process_group": GROUP, "profiling_name": f"nccl:{name}", "is_p2p": False,
        "thread_id": "139653054966656", "thread_name": "pt_autograd_0", "timeout_ms": 600000,
        "input_dtypes": ["Float"], "input_sizes": [[size]],
        "output_dtypes": ["Float"], "output_sizes": sizes,
        "state": "started", "retired": False,
        "time_created_ns": time.time_ns() + number, "time_discovered_started_ns": 1,
        "time_discovered_completed_ns": 0,
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
        content["entries"] = entries
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
        # the recorder keeps the last ones, and rank 1 has called more of them
        ([[done(1, "broadcast"), done(2), entry(3)], [done(2), entry(3, "barrier")]],
         ("mismatch", 3)),
        ([[entry(1, "broadcast"), done(2)], [done(2)]], None),
        # each group has numbers of its own, and sends do not count
        ([[done(1), SENT, entry(4, "broadcast", **TENSOR)],
          [done(1), entry(4, "barrier", **TENSOR)]], ("mismatch", 4)),
        # sizes that may differ
        ([[done(1, "all_to_all", 3, sizes=[[9]])], [done(1, "all_to_all", 9, sizes=[[3]])]], None),
        ([[done(1, "gather", sizes=[[4], [4]])], [done(1, "gather", sizes=[])]], None),
        ([[done(1, "scatter", input_sizes=[[4], [4]])], [done(1, "scatter", input_sizes=[])]],
         None),
        ([[done(1, "a_new_one", 3)], [done(1, "a_new_one", 4)]], None),
        # all called alike
        ([[done(1), entry(2)], [done(1), entry(2)]], ("incomplete", 2)),
        ([[done(1), TIMED_OUT], [done(1), TIMED_OUT]], ("incomplete", 2)),
        ([[done(1)], [done(1), done(2)]], None),
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
    found = find(tmp_path, one, one[:1], one, [])
    assert (found.kind, found.number, found.missing) == ("missing", 2, [1, 3])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 3}', '{"entries": []}'])
def test_a_damaged_dump_is_listed_and_the_others_are_compared(tmp_path, content):
    for rank in (0, 1, 2):
        path = dump(tmp_path, rank, [entry(1, "barrier" if rank else "all_reduce")], 3)
    path.write_text(content)
    dumps = read(tmp_path, time.time())
    assert dumps.notes == ["a damaged dump is left out: errors/nccl_trace_rank_00002.json"]
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
    """By the recorder of gloo: that of NCCL needs GPUs, and is written by the same function."""
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


# ---- what the doctor makes of them ---------------------------------------------------------------
def hang(folder: Path, monkeypatch, *causes: str, apart: bool = False) -> Run:
    """Leave the error files that watchdogs write, of one rank for each cause."""
    monkeypatch.setenv("WORLD_SIZE", str(len(causes)))
    run = Run(make_config(folder), rank=0)
    run.begin()
    for rank, cause in enumerate(causes):
        monkeypatch.setenv("RANK", str(rank))
        run.rank = rank
        place = failures.frame("/home/me/recipe.py", 3 + rank * apart, "loss", "x()")
        reason = "no progress for 2 s"
        run.record_error(failures.record(reason=reason, cause=cause, frames=[place], details=""))
    run.fail(failures.record(reason="no progress for 2 s", cause="waiting"))
    assert run.lock
    run.lock.close()
    return run


@pytest.mark.parametrize("ranks", [3, 2])
def test_a_mismatch_is_known_and_the_one_rank_that_differs_is_likely_at_fault(
    tmp_path, monkeypatch, ranks
):
    run = hang(tmp_path, monkeypatch, *["waiting"] * ranks)
    for rank in range(ranks):
        calls = [done(1), entry(2, "barrier" if rank == 1 else "all_reduce")]
        dump(run.folder, rank, calls, ranks)
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("mismatched collectives", "known")
    assert found["first"]["rank"] == (1 if ranks == 3 else None), "of two none is blamed"


def test_a_rank_that_has_not_arrived_supports_what_its_watchdog_says(tmp_path, monkeypatch):
    run = hang(tmp_path, monkeypatch, "waiting", "stalled")
    dump(run.folder, 0, [done(1), entry(2)])
    dump(run.folder, 1, [done(1)])
    found = diagnose(run.folder)
    assert (found["cause"], found["first"]["rank"]) == ("stalled", 1)


def test_a_collective_that_all_called_alike_points_to_the_network(tmp_path, monkeypatch):
    run = hang(tmp_path, monkeypatch, "waiting", "waiting", "waiting")
    for rank in (0, 1):
        dump(run.folder, rank, [entry(1)], 3)
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("hang", "likely")


def test_ranks_that_wait_in_different_lines_have_likely_called_different_collectives(
    tmp_path, monkeypatch
):
    run = hang(tmp_path, monkeypatch, "waiting", "waiting", apart=True)
    found = diagnose(run.folder)
    assert (found["cause"], found["certainty"]) == ("mismatched collectives", "likely")
    assert len(found["known"]) == 2, "a sentence for each line"


def test_dumps_of_an_earlier_start_are_left_out(tmp_path, monkeypatch):
    run = hang(tmp_path, monkeypatch, "waiting", "waiting")
    old = {"time_created_ns": time.time_ns() - 10**12}
    dump(run.folder, 0, [entry(1, **old)])
    dump(run.folder, 1, [entry(1, "barrier", **old)])
    assert diagnose(run.folder)["cause"] == "hang"


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
