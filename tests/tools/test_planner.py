"""The planner's conclusions from simulated steps, which test_simulate.py tests."""

import json
import math
import random
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from documents import PROJECT
from my_project.config import ConfigError
from my_project.tools import planner
from my_project.tools.simulate import Collective, Simulation, Simulator
from test_simulate import OLD_TORCH, arguments

KINDS = {"multi_node_hsdp": "HSDP", "multi_node_fsdp2": "FSDP2", "fsdp2": "FSDP2"}


def cluster(**options: Any) -> Namespace:
    """Return the options for 4 nodes with 8 GPUs of 100 samples per second each."""
    given = planner.parser().parse_args(["--config", "", "--nodes", "4", "--latency-us", "0"])
    return Namespace(**vars(given) | {"samples_per_second": 100.0} | options)


def steps_of(parameters: int) -> planner.TakeStep:
    """Return steps of a model of 20 blocks with AdamW, and 1 GB of activations per sample."""

    def take(where: str, nodes: int, gpus: int, micro_batch: int, accumulation: int) -> Simulation:
        kind = KINDS.get(where, "DDP")
        world_size = nodes * gpus
        shards = {"DDP": 1, "HSDP": gpus, "FSDP2": world_size}[kind]
        per_node = min(shards, gpus)

        def collective(operation: str, size: int, per_node: int, number: int, bytes_: int) -> Any:
            return Collective(
                operation=operation, group_size=size, group_per_node=per_node,
                number=number, size_bytes=bytes_,
            )  # fmt: skip

        collectives = []
        if world_size > 1 and kind == "DDP":
            buckets = parameters // 6_250_000 + 1
            collectives = [collective("all-reduce", world_size, gpus, buckets + 1, 4 * parameters)]
        elif world_size > 1:
            collectives = [
                collective("all-gather", shards, per_node, 40, 4 * parameters * accumulation),
                collective("reduce-scatter", shards, per_node, 20, 4 * parameters),
            ]
        if kind == "HSDP":
            collectives.append(collective("all-reduce", nodes, 1, 20, 4 * parameters // shards))
        return Simulation(
            nodes=nodes, gpus_per_node=gpus, precision="bf16", micro_batch=micro_batch,
            accumulation=accumulation, parameters=parameters, model_bytes=4 * parameters,
            flops_per_sample=1e9, collectives=collectives,
            memory_bytes={
                "state": 12 * parameters // shards,
                "gradients": 4 * parameters // (shards if accumulation == 1 else 1),
                "activations": micro_batch * 10**9,
            },
        )  # fmt: skip

    return take


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    tried = []

    def take(*words: Any) -> Simulation:
        tried.append(words[3])
        return steps_of(10**9)(*words)

    where = ("multi_node", 4, 8)
    step, limit = planner.fastest_that_fits(take, where, 2048, math.inf, 78e9)
    assert limit == 62
    assert (step.micro_batch, step.accumulation) == (32, 2)
    assert tried == [64, 32], "16 GB of state and 64 of activations leave no more than 62"
    tried.clear()
    step, _ = planner.fastest_that_fits(take, where, 2048, math.inf, 13e9)
    assert step.peak_bytes > 13e9
    assert tried == [64, 1], "since the state alone is larger"


@pytest.mark.parametrize(
    ("parameters", "speed", "network", "batch", "choice"),
    [
        # no more GPUs than are useful
        (10**5, 1e7, 40, 64, "accelerate_configs/gpu.yaml"),
        (10**9, 100, 1, 64, "accelerate_configs/multi_gpu.yaml"),
        (10**9, 100, 40, 2048, "accelerate_configs/multi_node.yaml"),
        # sharded only when it has to be
        (30 * 10**9, 100, 40, 256, "accelerate_configs/multi_node_hsdp.yaml"),
        (60 * 10**9, 100, 40, 32, "accelerate_configs/multi_node_fsdp2.yaml"),
        (10**12, 100, 40, 32, "None of these fits"),
    ],
)
def test_what_is_chosen_for_a_model_and_a_network(parameters, speed, network, batch, choice):
    given = cluster(over_nodes_gb_per_second=network, latency_us=20, samples_per_second=speed)
    rows = planner.plan(steps_of(parameters), given, batch)
    assert planner.advice(rows)[0].removeprefix("Choose ").startswith(choice)


def test_only_layouts_that_training_accepts_are_planned():
    def is_for_lanes(kind: str, layout: Any) -> bool:
        return 48 % layout.micro_batches == 0

    rows = planner.plan(steps_of(10**5), cluster(), 96, accepts=is_for_lanes)
    for row in rows:
        number = -(-96 // row["micro_batch"])
        assert 48 % number == 0, row
    assert {row["nodes"] * row["gpus_per_node"] for row in rows} == {1, 2, 4, 8, 16, 32}
    assert planner.plan(steps_of(10**5), cluster(), 96, accepts=lambda kind, layout: False) == []


def test_gpus_that_do_not_divide_the_batch_are_planned_with_what_idles():
    given = cluster(nodes=1, gpus_per_node=7, latency_us=0)
    rows = planner.plan(steps_of(10**9), given, 16)
    (row,) = [row for row in rows if row["gpus_per_node"] == 7 and row["kind"] == "DDP"]
    assert (row["micro_batch"], row["accumulation"]) == (1, 3)
    assert row["idle"] == pytest.approx(1 - 16 / 21)
    assert 0 < row["efficiency"] < 16 / 21


def test_the_seconds_of_a_step_by_hand():
    """1 G parameters, micro-batch 8: HSDP's rings over nodes share the link of a node."""
    step = steps_of(10**9)("multi_node_hsdp", 4, 8, 8, 2)
    in_node = 7 / 8 * (8e9 + 4e9) / 300e9
    network = 8 * (2 * 3 / 4 * 4e9 / 8) / 40e9
    compute, seconds = planner.step_seconds("HSDP", step, cluster(samples_per_second=1))
    assert compute == 16
    assert seconds == pytest.approx(16 + (in_node + network) / 20), "one block of 20 is not hidden"
    compute, seconds = planner.step_seconds("HSDP", step, cluster(samples_per_second=1e9))
    assert seconds == pytest.approx(in_node + network, rel=1e-3), "there is nothing to hide behind"
    late = cluster(samples_per_second=1e9, latency_us=1000)
    more = planner.step_seconds("HSDP", step, late)[1] - seconds
    assert more == pytest.approx(1e-3 * (60 * 3 + 20 * 2))
    known = cluster(samples_per_second=None, gpu_tflops=1.0, mfu=0.5)
    assert planner.step_seconds("HSDP", step, known)[0] == pytest.approx(16 * 1e9 / 0.5e12)
    with pytest.raises(ConfigError, match="add --samples-per-second"):
        planner.step_seconds("HSDP", replace(step, flops_per_sample=0.0), known)


def plan(capsys: Any, words: list[str]) -> list[dict[str, Any]]:
    planner.main(*planner.parser().parse_known_args([*words, "--json"]))
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.slow
def test_the_command_predicts_each_config_from_its_simulated_step(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(PROJECT)
    words = arguments(tmp_path, "--batches.global_batch_size", "64", "--batches.micro_batch_size")
    words += ["0", "--recipe.depth", "1", "--recipe.width", "64", "--nodes", "2"]
    words += ["--gpus-per-node", "2"]
    rows = plan(capsys, words)
    sizes = [(row["nodes"], row["gpus_per_node"]) for row in rows]
    wanted = ["DDP"] if OLD_TORCH else ["DDP", "HSDP", "FSDP2"]
    assert sizes == [(1, 1), (1, 2)] + [(2, 2)] * len(wanted)
    assert [row["kind"] for row in rows[2:]] == wanted
    for row in rows[2:]:
        step = Simulator(words[: words.index("--nodes")]).step(row["config"], 2, 2)
        assert row["peak_bytes"] == step.peak_bytes
        assert row["sent"] == step.sent_bytes()
    measured = {"in_node_bytes_per_second": 2e11, "over_nodes_bytes_per_second": 1e6}
    (tmp_path / "preflight.json").write_text(json.dumps(measured))
    slow = plan(capsys, [*words, "--measured", str(tmp_path / "preflight.json")])
    assert slow[2]["seconds"] > 10 * rows[2]["seconds"]


def test_failures_are_those_of_the_gpus_that_are_chosen_and_all_configs_are_read(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(Simulator, "step", lambda self, *where: steps_of(10**5)(*where))
    (tmp_path / "second.yaml").write_text("batches: {global_batch_size: 64}")
    words = [*arguments(tmp_path), "--config", str(tmp_path / "second.yaml")]
    words += ["--nodes", "4", "--save-seconds", "30", "--samples-per-second", "1e7", "--json"]
    planner.main(*planner.parser().parse_known_args(words))
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"][0]["micro_batch"] == 64, "the last config wins"
    assert "accelerate_configs/gpu.yaml" in printed["advice"][0]
    assert printed["advice"][-1].startswith("With 8.09e+03 h between failures")


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "0"),
        ("--gpus-per-node", "-1"),
        ("--mfu", "0"),
        ("--gpu-tflops", "nan"),
        ("--mfu", "inf"),
    ],
)
def test_numbers_that_are_not_positive_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        planner.parser().parse_args(["--config", "a.yaml", *words])
    assert (
        f"{words[0]}: {words[1]} must be a finite number greater than 0" in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [None, "", "[1]", '{"in_node_bytes_per_second": "fast"}'])
def test_a_damaged_file_of_bandwidths_is_refused(tmp_path, capsys, monkeypatch, content):
    monkeypatch.chdir(PROJECT)
    path = tmp_path / "preflight.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"is not a preflight\.json"):
        plan(capsys, arguments(tmp_path, "--measured", str(path)))


def test_a_long_interval_between_saves_is_printed_as_a_number():
    assert "every_minutes 990 loses" in planner.failure_advice(1, cluster(save_seconds=60.0))


def test_the_interval_between_saves_is_the_one_with_the_highest_goodput():
    save, restart, between = 2.0, 30.0, 3600.0
    found = planner.best_interval_seconds(save, between)
    best = planner.predicted_goodput(found, save, restart, between)
    for factor in (0.5, 0.8, 1.25, 2):
        assert planner.predicted_goodput(factor * found, save, restart, between) < best
    # failures at random instants, each of which loses the work since the last save
    draw, clock, kept, failure = random.Random(0), 0.0, 0.0, 0.0
    while kept < 20_000 * found:
        failure = clock + draw.expovariate(1 / between)
        done = int((failure - clock) // (found + save))
        clock, kept = failure, kept + done * found
        while (wait := draw.expovariate(1 / between)) < restart:
            clock += wait
        clock += restart
    assert kept / clock == pytest.approx(best, abs=0.01)


def test_more_gpus_than_samples_in_the_global_batch_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(PROJECT)
    words = arguments(tmp_path, "--batches.global_batch_size", "8", "--nodes", "2")
    with pytest.raises(ConfigError, match=r"8 gives 8 samples, fewer than 16 processes"):
        plan(capsys, words)
