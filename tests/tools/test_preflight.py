"""The preflight: its measurements are correct, and it names what is wrong."""

import contextlib
import io
import json
import os
import re
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from my_project.config import ConfigError
from my_project.process import note_blamed
from my_project.tools import preflight
from runs import change, make_config, quick
from world import run_world


def all_reduce_that_errs(rank, size, reduce, tensor, *arguments, **options):
    """Sum like the real all-reduce; on one rank, tensors of one size get a wrong value."""
    result = reduce(tensor, *arguments, **options)
    if torch.distributed.get_rank() == rank and tensor.numel() == size:
        tensor[7] += 1
    return result


def product_that_errs(multiply, left, right, *, out):
    """Multiply like torch.matmul; on rank 1, one value is wrong."""
    multiply(left, right, out=out)
    out[3, 4] += 512 * torch.distributed.get_rank()


def check(folder, fault: str = "") -> tuple[int, str, str]:
    """Run the preflight in a process of a world; return its exit code and output."""
    if fault == "sum":
        reduce = partial(all_reduce_that_errs, 1, 4_000_000, torch.distributed.all_reduce)
        torch.distributed.all_reduce = reduce
    if fault == "product":
        torch.matmul = partial(product_that_errs, torch.matmul)
    if fault == "hang":
        sys.stderr = (folder / f"said_{os.environ['RANK']}").open("w")
        if os.environ["RANK"] == "1":
            preflight.code_digest = lambda config: time.sleep(60)
        preflight.SECONDS = 2.0
        return preflight.main(make_config(folder)), "", ""
    if fault == "version":
        other = os.environ["RANK"] == "1"
        preflight.installed = lambda: {"torch": "1", "torchmetrics": "0.0.1" if other else "1"}
        preflight.code_digest = lambda config: str(other)
    config = make_config(folder)
    if fault == "no shared storage":
        own = folder / os.environ["RANK"]
        own.mkdir()
        os.chdir(own)
        config = change(config, runs_folder="runs", checkpoints__mirror=f"file://{folder}/mirror")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = preflight.main(config)
    return code, out.getvalue(), err.getvalue()


def test_two_processes_pass_and_what_was_measured_is_kept(tmp_path):
    (code, shown, _), (other_code, *_) = run_world(2, check, tmp_path)
    assert (code, other_code) == (0, 0)
    assert "preflight passed" in shown
    kept = json.loads((tmp_path / "preflight.json").read_text())
    assert kept["in_node_bytes_per_second"] > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["preflight.json"], "nothing else is left"


def test_with_a_mirror_the_run_folder_need_not_be_shared(tmp_path):
    (code, shown, said), (other_code, *_) = run_world(2, check, tmp_path, "no shared storage")
    assert (code, other_code) == (0, 0), said
    assert "preflight passed" in shown


FAULTS = [
    ("sum", r"rank 1 \(.+\) got 1 wrong value in a product or an all-reduce"),
    ("product", r"rank 1 \(.+\) got 1 wrong value in a product or an all-reduce"),
    ("version", "torchmetrics differs: 1 on"),
]


@pytest.mark.parametrize(("fault", "sentence"), quick(1, FAULTS))
def test_what_is_wrong_on_one_process_is_named(tmp_path, fault, sentence):
    (code, _, said), (other_code, *_) = run_world(2, check, tmp_path, fault)
    assert (code, other_code) == (1, 1)
    assert re.search(sentence, said)
    assert "rank 0 (" not in said
    assert "torch differs" not in said
    assert ("code differs" in said) == (fault == "version")
    assert not (tmp_path / "preflight.json").exists()


@pytest.mark.slow
def test_a_stalled_check_ends_with_its_name(tmp_path):
    with pytest.raises(RuntimeError, match=r"the process died|closed by peer"):
        run_world(2, check, tmp_path, "hang", seconds=30)
    assert "'versions and products' on rank 1 on " in (tmp_path / "said_1").read_text()


def test_a_slow_link_is_named_and_no_other_link_of_its_nodes():
    """Node 1 sends to node 2 slowly: both are late at distance 1; nodes 0 and 3 are not."""
    late = [[1.0, 1.0, 1.0] for _ in range(4)]
    late[1][0] = late[2][0] = 4.0
    speeds = preflight.link_speeds(late, 8)
    assert speeds == {(0, 1): 8, (0, 2): 8, (0, 3): 8, (1, 2): 2, (1, 3): 8, (2, 3): 8}
    (said,) = preflight.slow({str(pair): speed for pair, speed in speeds.items()}, 0.5, "B/s")
    assert said.startswith("(1, 2): 2B/s, but the median is 8B/s")


def process(**found: Any) -> dict[str, Any]:
    """Return what a process of a good node measures, with changes."""
    return {
        "host": "a", "agree": {"gpu": "H100"}, "wrong_values": 0, "folder_problem": "",
        "wrong_over_nodes": 0, "clock": 0.0, "flops": 7e14,
    } | found  # fmt: skip


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"clock": -6.0}, "the clock of b is 6.0 s behind"),
        ({"clock": 6.0}, "the clock of b is 6.0 s ahead"),
        ({"flops": 5e14}, "rank 2 (b): 500TFLOP/s, but the median is 700TFLOP/s"),
        ({"folder_problem": "not shared"}, "not shared"),
        ({"pinned_bytes": 65536}, "b limits pinned memory, which InfiniBand needs"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(found, sentence):
    assert preflight.judge([process(), process(pinned_bytes=-1), process()]) == {}
    ((problem, hosts),) = preflight.judge(
        [process(), process(), process(host="b", **found)]
    ).items()
    assert sentence in problem
    assert hosts == {"b"}


def test_a_wrong_sum_over_all_nodes_blames_no_host_since_it_reaches_every_rank():
    by_rank = [process(host=host, wrong_over_nodes=1) for host in "abc"]
    ((problem, hosts),) = preflight.judge(by_rank).items()
    assert "over all nodes gave 1 wrong value," in problem
    assert hosts == preflight.blamed(by_rank, {}) == set()
    by_rank[1]["wrong_values"] = 1
    ((problem, hosts),) = preflight.judge(by_rank).items()
    assert "rank 1 (b) got 1 wrong value in" in problem
    assert hosts == preflight.blamed(by_rank, {}) == {"b"}


def test_only_the_hosts_that_have_a_problem_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "nodes", lambda: [range(rank, rank + 1) for rank in range(3)])
    common = {"cpus": 1, "seconds": [1.0, 1.0], "in_node": 0.0, "over_nodes": 0.0}
    by_rank = [process(host=host, **common) for host in ("gpu-1", "gpu-10", "gpu-11")]
    by_rank[1]["agree"] = {"gpu": "A100"}
    assert preflight.report(by_rank, 8, make_config(tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line.split()[0]: line.split()[-1] for line in lines if "gpu-" in line}
    assert verdicts == {"gpu-1": "passed", "gpu-10": "failed", "gpu-11": "passed"}


def check_in_a_file(folder) -> str:
    (folder / "runs").write_text("not a folder")
    try:
        return str(preflight.main(make_config(folder / "runs")))
    except ConfigError as error:
        return str(error)


def test_a_runs_folder_that_cannot_be_written_to_is_told_on_every_rank(tmp_path):
    for said in run_world(2, check_in_a_file, tmp_path):
        assert "runs cannot be written to" in said


def test_hosts_at_fault_are_blamed_and_written_for_a_scheduler(tmp_path, monkeypatch):
    """A single slow link blames no host: either end may be slow."""
    hosts = [*"abcd"]
    good = [process(host=host) for host in hosts]
    links = {(a, b): 8.0 for a in hosts for b in hosts if a < b}
    one = links | {("a", "b"): 1.0}
    assert preflight.blamed(good, links) == preflight.blamed(good, one) == set()
    assert preflight.blamed(good, one | {("b", "c"): 1.0}) == {"b"}
    assert preflight.blamed([*good[:3], process(host="d", wrong_values=2)], links) == {"d"}
    assert preflight.blamed([*good[:3], process(host="d", flops=5e14)], links) == {"d"}
    note_blamed({"b"})  # nothing is written without a scheduler
    monkeypatch.setenv("BLAMED_NODES", str(tmp_path / "blamed"))
    for host in "bd":
        note_blamed({host})
    assert (tmp_path / "blamed").read_text() == "b\nd\n"
