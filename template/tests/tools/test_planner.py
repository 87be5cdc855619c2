"""What the planner concludes from simulated steps; those are tested in test_simulate.py."""

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from documents import PROJECT, blocks, text_of
from test_simulate import OLD_TORCH, SHARDED_SINCE, arguments

from my_project.command_line import parse
from my_project.config import ConfigError
from my_project.tools import planner
from my_project.tools.simulate import Collective, Simulation, Simulator

CLUSTER = planner.Cluster(
    nodes=4, gpus_per_node=8, gpu_bytes=80e9, reserved_bytes=2e9, in_node=300e9, over_nodes=40e9,
    latency_seconds=0.0, samples_per_second=100.0,
)  # fmt: skip


def steps_of(parameters: int) -> planner.TakeStep:
    """Return steps of a model with AdamW in 20 blocks and 1 GB of activations per sample."""

    def take(kind: str, nodes: int, gpus: int, micro_batch: int, accumulation: int) -> Simulation:
        world_size = nodes * gpus
        shards = {"DDP": 1, "HSDP": gpus, "FSDP2": world_size}[kind]
        per_node = min(shards, gpus)

        def collective(operation: str, size: int, per_node: int, number: int, bytes_: int) -> Any:
            return Collective(
                operation=operation, group="", group_size=size, group_per_node=per_node,
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
            where="", nodes=nodes, gpus_per_node=gpus, precision="bf16", micro_batch=micro_batch,
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

    limits: dict[Any, float] = {}
    step = planner.largest_that_fits(take, "DDP", CLUSTER, 32 * 64, limits)
    assert step
    assert (step.micro_batch, step.accumulation) == (32, 2)
    assert tried == [64, 32], "16 GB of state and 64 of activations leave no more than 62"
    two = replace(CLUSTER, nodes=2)
    assert planner.largest_that_fits(take, "DDP", two, 32 * 64, limits)
    assert tried == [64, 32, 32], "where 128 and 64 need no step"
    tried.clear()
    limits.clear()
    step = planner.largest_that_fits(take, "DDP", replace(CLUSTER, gpu_bytes=15e9), 32 * 64, limits)
    assert step
    assert (step.micro_batch, tried) == (1, [64, 1])
    assert planner.largest_that_fits(take, "DDP", two, 32 * 64, limits) is None


def test_a_model_is_sharded_only_when_it_has_to_be():
    def kind(parameters: int, cluster: planner.Cluster, global_batch: int) -> str | None:
        plans = planner.scaling(steps_of(parameters), cluster, global_batch)
        return plans[-1]["best"] and plans[-1]["best"]["kind"]

    assert kind(10**9, replace(CLUSTER, over_nodes=300e9), 32 * 64) == "DDP"
    assert kind(30 * 10**9, CLUSTER, 32 * 8) == "HSDP"
    assert kind(60 * 10**9, CLUSTER, 32) == "FSDP2"
    assert kind(10**12, CLUSTER, 32) is None


def test_a_model_that_is_sharded_starts_in_the_host_memory_of_one_node():
    plans = planner.scaling(steps_of(30 * 10**9), CLUSTER, 32 * 8)
    ddp, hsdp, _ = plans[-1]["kinds"]
    assert (ddp["host_bytes"], hsdp["host_bytes"]) == (8 * 120e9, 120e9)
    said = planner.advice(plans, 0)
    assert "The start takes 120 GB of host memory on the first node." in said


def test_more_gpus_are_faster_and_less_efficient():
    plans = planner.scaling(steps_of(10**9), CLUSTER, 32 * 64)
    sizes = [(plan["nodes"], plan["gpus_per_node"]) for plan in plans]
    assert sizes == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8)]
    assert [len(plan["kinds"]) for plan in plans] == [1, 1, 1, 1, 1, 3], "one is enough for fewer"
    steps = [plan["best"]["step"] for plan in plans]
    assert steps == sorted(steps, reverse=True)
    efficiencies = [plan["best"]["efficiency"] for plan in plans]
    assert max(efficiencies) <= 1
    assert efficiencies[0] > efficiencies[-2] > efficiencies[-1] > 0
    choice, ratio, *_ = planner.advice(plans, 0)
    assert choice.startswith("Choose accelerate_configs/multi_node")
    assert ratio == f"32 GPUs are {steps[0] / steps[-1]:.3g} times as fast as one."


def test_the_seconds_of_a_step_by_hand():
    """1 G parameters, micro-batch 8: HSDP's rings over nodes share the link of a node."""
    step = steps_of(10**9)("HSDP", 4, 8, 8, 2)
    seconds = planner.step_seconds("HSDP", step, CLUSTER)
    in_node = 7 / 8 * (8e9 + 4e9) / 300e9
    network = 8 * (2 * 3 / 4 * 4e9 / 8) / 40e9
    assert seconds["compute"] == pytest.approx(16 / 100)
    assert seconds["communicate"] == pytest.approx(in_node + network)
    shown = seconds["compute"] + seconds["communicate"] / 20
    assert planner.step_seconds("HSDP", step, replace(CLUSTER, samples_per_second=1))[
        "step"
    ] == pytest.approx(shown - 0.16 + 16), "one block of 20 is not hidden"
    late = replace(CLUSTER, latency_seconds=1e-3)
    more = planner.step_seconds("HSDP", step, late)["communicate"] - seconds["communicate"]
    assert more == pytest.approx(1e-3 * (60 * 3 + 20 * 2))


@pytest.mark.parametrize(
    ("parameters", "speed", "network", "batch", "config", "sentence"),
    [
        (10**5, 1e7, 40e9, 64, "gpu", "More GPUs would not help: per step, 2 in place of 1 save"),
        (10**9, 100, 1e9, 64, "multi_gpu", "More GPUs would not help: per step, 16 in place of 8"),
        (10**9, 100, 40e9, 2048, "multi_node", ""),
    ],
)
def test_it_says_where_more_gpus_would_not_help(
    parameters, speed, network, batch, config, sentence
):
    cluster = replace(CLUSTER, over_nodes=network, latency_seconds=20e-6, samples_per_second=speed)
    plans = planner.scaling(steps_of(parameters), cluster, batch)
    choice, *others = planner.advice(plans, 0)
    assert choice.removeprefix("Choose accelerate_configs/").startswith(f"{config}.yaml")
    told = [text for text in others if "help" in text]
    assert len(told) == bool(sentence)
    assert all(text.startswith(sentence) for text in told)
    assert any("waits for Python" in text for text in others) == (parameters == 10**5)


def test_the_advice_types_the_micro_batch_only_where_the_config_has_another():
    plans = planner.scaling(steps_of(10**9), CLUSTER, 32 * 64)
    assert plans[-1]["best"]["micro_batch"] == 32
    option = " with --batches.micro_batch_size 32"
    for given, typed in ((32, ""), (64, option), (0, option)):
        assert planner.advice(plans, given)[0].endswith(f"multi_node.yaml{typed}.")
    plans = planner.scaling(steps_of(10**13), CLUSTER, 32)
    assert planner.advice(plans, 0)[0].startswith("No config fits")


def plan(capsys: Any, words: list[str]) -> dict[str, Any]:
    planner.main(*planner.parser().parse_known_args([*words, "--json"]))
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_and_uses_what_preflight_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(PROJECT)
    measured = {"in_node_bytes_per_second": 2e11, "over_nodes_bytes_per_second": 1e10}
    (tmp_path / "preflight.json").write_text(json.dumps(measured))
    words = arguments(tmp_path, "--batches.global_batch_size", "64", "--batches.micro_batch_size")
    words += ["0", "--recipe.depth", "1", "--recipe.width", "64", "--nodes", "2"]
    words += ["--gpus-per-node", "2", "--measured", str(tmp_path / "preflight.json")]
    told = plan(capsys, words)
    assert told["cluster"]["over_nodes"] == 1e10
    plans = told["plans"]
    sizes = [(plan["nodes"], plan["gpus_per_node"]) for plan in plans]
    assert sizes == [(1, 1), (1, 2), (2, 2)]
    wanted = ["DDP"] if OLD_TORCH else ["DDP", "HSDP", "FSDP2"]
    assert [row["kind"] for row in plans[-1]["kinds"]] == wanted
    typed = words[: words.index("--nodes")]
    for row in plans[-1]["kinds"]:
        step = Simulator(parse(typed), typed).step(row["config"], 2, 2)
        assert row["memory_bytes"] == step.peak_bytes
        assert row["sent"] == step.sent_bytes()
    planner.main(*planner.parser().parse_known_args(words))
    shown = capsys.readouterr().out
    assert "Choose accelerate_configs/gpu.yaml" in shown
    assert "40% of 989 TFLOPS, assumed" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_older_torch_plans_ddp_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr("torch.__version__", "2.10.0")
    words = arguments(tmp_path, "--batches.global_batch_size", "16", "--recipe.depth", "1")
    told = plan(capsys, [*words, "--nodes", "2", "--gpus-per-node", "1"])
    assert [row["kind"] for plan in told["plans"] for row in plan["kinds"]] == ["DDP", "DDP"]
    assert told["advice"][-1] == (
        f"FSDP2 and HSDP are not predicted: a sharded step is simulated by torch {SHARDED_SINCE} or"
        " later; this is 2.10.0, which would count too much memory: pip install -U torch."
    )


@pytest.mark.parametrize("nodes", ["3", "1024"], ids=["uneven", "more GPUs than samples"])
def test_a_batch_that_does_not_divide_is_refused(tmp_path, nodes):
    words = [*arguments(tmp_path), "--nodes", nodes]
    with pytest.raises(ConfigError, match=f"4096 does not split over {8 * int(nodes)} processes"):
        planner.main(*planner.parser().parse_known_args(words))


@pytest.mark.slow
@pytest.mark.skipif(not (PROJECT / "configs/causal_lm.yaml").exists(), reason="another recipe")
def test_the_example_of_the_readme_prints_what_stands_there(monkeypatch, capsys):
    texts = blocks(text_of("README.md"), "text")
    (example,) = (text for text in texts if " planner --config" in text)
    command, shown = re.fullmatch(r"\$ (.*?[^\\])\n(.*)", example, re.DOTALL).groups()
    monkeypatch.chdir(PROJECT)
    start, *words = shlex.split(command.replace("\\\n", ""))[2:]
    assert words.pop(0) == "planner", start
    planner.main(*planner.parser().parse_known_args(words))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == shown.splitlines()
    assert max(map(len, lines)) <= 80
