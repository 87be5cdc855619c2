"""The preflight: what it measures is right, and what it finds wrong it names."""

import contextlib
import io
import json
import os
import sys
import time
from collections import Counter
from functools import partial
from itertools import combinations

import pytest
import torch
from rank_counts import check_received, objects_counted
from runs import make_config
from world import run_world

from my_project.config import Config
from my_project.tools import preflight


def all_reduce_that_errs(rank, size, reduce, tensor, *arguments, **options):
    """Add up like the real one; on one rank, tensors of one size come out with a wrong value."""
    result = reduce(tensor, *arguments, **options)
    if torch.distributed.get_rank() == rank and tensor.numel() == size:
        tensor[7] += 1
    return result


def check(folder, fault: str = "") -> tuple[int, str, str]:
    """Run the preflight in a process of a world; return its exit code and what it printed."""
    if fault == "sum":
        reduce = partial(all_reduce_that_errs, 1, 4_000_000, torch.distributed.all_reduce)
        torch.distributed.all_reduce = reduce
    if fault == "hang":
        sys.stderr = (folder / f"said_{os.environ['RANK']}").open("w")
        if os.environ["RANK"] == "1":
            preflight.code_digest = lambda config: time.sleep(60)
        preflight.SECONDS["node properties"] = (2.0, 1.0)
        return preflight.main(make_config(folder)), "", ""
    if fault == "version":
        other = os.environ["RANK"] == "1"
        preflight.installed = lambda: {"torch": "1", "torchmetrics": "0.0.1" if other else "1"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = preflight.main(make_config(folder))
    return code, out.getvalue(), err.getvalue()


def test_two_processes_pass_and_what_was_measured_is_kept(tmp_path):
    (code, shown, _), (other_code, *_) = run_world(2, check, tmp_path)
    assert (code, other_code) == (0, 0)
    assert "0 to 1" in shown
    assert "all-reduce of 16 MB in each node" in shown
    assert "preflight passed" in shown
    kept = json.loads((tmp_path / "preflight.json").read_text())
    assert kept["in_node_bytes_per_second"] > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["preflight.json"], "nothing else is left"


def test_one_process_passes(tmp_path):
    ((code, shown, _),) = run_world(1, check, tmp_path)
    assert code == 0
    assert "all-reduce" not in shown


def test_a_sum_that_is_wrong_on_one_process_is_named(tmp_path):
    (code, shown, said), (other_code, *_) = run_world(2, check, tmp_path, "sum")
    assert (code, other_code) == (1, 1)
    assert "an all-reduce of 16 MB over ranks [0, 1] gave 1 wrong values on rank 1" in said
    assert "preflight failed" in shown
    assert not (tmp_path / "preflight.json").exists()


def test_unequal_versions_are_named_with_their_hosts(tmp_path):
    (code, _, said), _ = run_world(2, check, tmp_path, "version")
    assert code == 1
    assert "packages differs: torchmetrics 1 on" in said
    assert "torchmetrics 0.0.1 on" in said
    assert "torch 1" not in said, "what is equal is left out"


@pytest.mark.slow
def test_a_stalled_check_ends_with_its_name(tmp_path):
    with pytest.raises(RuntimeError, match="the process died"):
        run_world(2, check, tmp_path, "hang", seconds=30)
    for rank in (0, 1):
        said = (tmp_path / f"said_{rank}").read_text()
        assert f"stalled for 3 s at 'node properties', on rank {rank} of 2" in said
        assert "launch/network.sh" in said


def test_the_time_limits_grow_with_the_nodes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for nodes, seconds in {2: 70, 300: 1560}.items():
        monkeypatch.setenv("WORLD_SIZE", str(8 * nodes))
        assert preflight.seconds_for("pairs of nodes") == seconds


def test_bus_bandwidth_is_that_of_nccl_tests():
    """A ring of n sends 2 (n-1)/n of the size over each link."""
    assert preflight.bus_bandwidth(1_000, 4, 1.0) == 1_500


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 40])
def test_each_pair_of_nodes_meets_once_and_none_is_in_two_at_a_time(nodes):
    plan = preflight.rounds(nodes)
    met = [tuple(sorted(pair)) for pairs in plan for pair in pairs]
    assert sorted(met) == list(combinations(range(nodes), 2))
    for pairs in plan:
        at_once = [node for pair in pairs for node in pair]
        assert len(at_once) == len(set(at_once))
    assert len(plan) == nodes - 1 + nodes % 2


def test_a_slow_pair_is_named():
    speeds = dict.fromkeys(combinations(range(4), 2), 10e9)
    hosts = ["a", "b", "c", "d"]
    assert preflight.slow_pairs(speeds, hosts) == []
    (said,) = preflight.slow_pairs(speeds | {(1, 3): 4e9}, hosts)
    assert said.startswith("b and d exchange 4.00 GB/s, the median is 10.00")


@pytest.mark.parametrize(
    ("short", "sentence"),
    [
        ({"shm_bytes": 64_000_000, "gpu": "H100"}, "64 MB of /dev/shm"),
        ({"open_files": 256}, "256 open files"),
        ({"gpu": "H100", "gpu_free_bytes": 40e9}, "40.0 GB free of 80.0"),
        ({"cpus": 4}, "4 CPUs for 8 processes"),
    ],
)
def test_what_a_node_lacks_is_named(short, sentence):
    enough = {
        "host": "a", "gpu": "", "shm_bytes": 64e9, "open_files": 65536, "cpus": 64,
        "gpu_bytes": 80e9, "gpu_free_bytes": 79e9,
    }  # fmt: skip
    assert preflight.shortages(enough, 8) == ([], [])
    fails, slow = preflight.shortages(enough | short, 8)
    assert sentence in (fails + slow)[0]


def count(config: Config) -> Counter[str]:
    """Run the preflight with one process per node; return what this rank receives."""
    os.environ["LOCAL_RANK"] = "0"
    preflight.MB = 4096  # bytes: what it sends and writes is a multiple of it
    preflight.SLOW_FRACTION = 0.0  # the machine may be busy
    with objects_counted() as found, contextlib.redirect_stdout(io.StringIO()):
        assert preflight.main(config) == 0
    return found


def test_a_preflight_on_more_nodes_sends_its_results_to_rank_0_alone(tmp_path):
    config = make_config(tmp_path)
    found = {nodes: run_world(nodes, count, config) for nodes in (2, 4)}
    assert not any(one["gathered everywhere"] for of_rank in found.values() for one in of_rank)
    received = {nodes: [one["received"] for one in of_rank] for nodes, of_rank in found.items()}
    check_received(received, each=5)
