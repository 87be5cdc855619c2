"""What the planner predicts, against what torch allocates and against arithmetic by hand."""

import ctypes
import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import PROJECT, blocks, text_of
from runs import change, make_config, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from world import run_world

from my_project import cost
from my_project.cluster import planner
from my_project.config import ConfigError
from my_project.optim import build_optimizer

CLUSTER = planner.Cluster(
    nodes=4, gpus_per_node=8, gpu_bytes=80e9, reserved_bytes=2e9, in_node=300e9, over_nodes=40e9,
    latency_seconds=0.0, samples_per_second=100.0,
)  # fmt: skip
GB_PER_SAMPLE = cost.Activations(bytes_per_sample=1_000_000_000)
MODEL = cost.Model(
    parameters=1_000_000_000, trained=1_000_000_000, block=50_000_000, blocks=19, root=0,
    two_blocks=100_000_000, buffer_bytes=0, optimizer_bytes=8.0, activations=GB_PER_SAMPLE,
    sharded_activations=GB_PER_SAMPLE, in_second_block=cost.Activations(),
    in_last_block=cost.Activations(), weight_bytes=2,
    flops_per_sample=6_000_000_000,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A transformer without attention: wide layers, so that weights and activations both count."""

    width: int = 256
    depth: int = 4
    places: int = 64
    looks_at_values: bool = False

    def prepare_data(self) -> dict[str, Any]:
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return [torch.randn(self.places, self.width) for _ in range(64)], {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        def block() -> nn.Module:
            w = self.width
            return nn.Sequential(
                nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w)
            )

        return nn.Sequential(*(block() for _ in range(self.depth)))

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        out = model(batch)
        if self.looks_at_values and float(out.sum().detach()) == 0:
            raise AssertionError
        return out.square().sum(), torch.tensor(len(batch))


def tracked_peak(config: Any, micro: int, steps: int = 2) -> int:
    """Take real steps; return the most that torch held at once, of every kind, in bytes."""
    from torch.distributed._tools.mem_tracker import MemTracker

    recipe = config.recipe
    model = recipe.build_model({})
    optimizer = build_optimizer(config.optim, recipe, model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for step in range(steps):
            batch = torch.randn(micro, recipe.places, recipe.width)
            recipe.loss(model, batch, step)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


ONE = replace(CLUSTER, nodes=1, gpus_per_node=1)


@pytest.mark.parametrize("micro", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("looks", [False, True], ids=["fake step", "real step"])
def test_memory_is_what_torch_allocates(tmp_path, micro, looks):
    config = make_config(tmp_path, Blocks(looks_at_values=looks))
    model = cost.inspect_recipe(config, "no")
    assert model.parameters == sum(p.numel() for p in config.recipe.build_model({}).parameters())
    predicted = planner.memory_bytes("DDP", model, ONE, micro)
    assert predicted == pytest.approx(tracked_peak(config, micro), rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_memory_is_what_the_gpu_allocates(tmp_path, precision):
    config = make_config(tmp_path, Blocks(width=1024, depth=8))
    predicted = planner.memory_bytes("DDP", cost.inspect_recipe(config, precision), ONE, 64)
    model = config.recipe.build_model({}).cuda()
    optimizer = build_optimizer(config.optim, config.recipe, model)
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            batch = torch.randn(64, config.recipe.places, config.recipe.width, device="cuda")
            total, _ = config.recipe.loss(model, batch, step)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)


@dataclass(frozen=True, kw_only=True)
class Measured(Blocks):
    """Blocks that note what the process holds, in bytes: first now, then at most, micro-batch by
    micro-batch."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        NOTED.append(process_bytes("VmRSS"))
        return super().build_model(data_info)

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        NOTED.append(process_bytes("VmHWM"))
        return super().loss(model, batch, step)


NOTED: list[int] = []


def process_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def most_held_by_a_run(config: Any) -> int:
    """Train by the real main; return the most that this process has held for it."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    train(config)
    return NOTED[-1] - NOTED[0]  # before the last micro-batch, so before the last save


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("processes", "accumulation", "options"),
    [(1, 1, {}), (2, 1, {}), (2, 4, {}), (2, 4, {"find_unused_parameters": True})],
)
def test_memory_is_what_a_run_holds(tmp_path, processes, accumulation, options):
    """One copy of the gradients more would be 4 bytes per parameter."""
    config = make_config(
        tmp_path, Measured(width=512, depth=8, places=4), steps=4, distributed__ddp=options,
        batches__micro_batch_size=16 // processes // accumulation,
    )  # fmt: skip
    held = max(run_world(processes, most_held_by_a_run, config))
    model = cost.inspect_recipe(config, "no")
    cluster = replace(ONE, gpus_per_node=processes)
    micro = config.batches.micro_batch_size
    predicted = planner.memory_bytes("DDP", model, cluster, micro, accumulation)
    # the rest, some 30 MB, is code that is read from the disk when it is first used
    assert 0 < (held - predicted) / model.parameters < 3


def sharded_state_bytes(folder: str) -> int:
    """Take a step with fully_shard; count the bytes of weights, gradients and optimizer state."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo")
    config = make_config(folder, Blocks())
    model = config.recipe.build_model({})
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(config.optim, config.recipe, model)
    config.recipe.loss(model, torch.randn(1, 64, 256), 0)[0].backward()
    optimizer.step()
    state = [s for states in optimizer.state.values() for s in states.values() if s.dim()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
    held = sum(t.to_local().numel() * 4 for t in tensors)
    destroy_process_group()
    return held


@pytest.mark.slow
def test_sharded_state_is_what_fully_shard_holds(tmp_path):
    model = cost.inspect_recipe(make_config(tmp_path, Blocks()), "no")
    two = replace(CLUSTER, nodes=1, gpus_per_node=2)
    assert model.blocks == 0
    for_a_while = (model.weight_bytes + 4) * model.root  # gathered, and its copied gradients
    model = replace(model, sharded_activations=cost.Activations())
    predicted = planner.memory_bytes("FSDP2", model, two, 1) - for_a_while
    held = run_world(2, sharded_state_bytes, str(tmp_path))
    assert predicted == pytest.approx(held[0], rel=0.01)


def test_activations_are_less_in_bf16_and_only_autocast_keeps_cast_weights(tmp_path):
    config = make_config(tmp_path, Blocks())
    full, half = (cost.inspect_recipe(config, precision) for precision in ("no", "bf16"))
    assert half.activations.bytes_per_sample < 0.8 * full.activations.bytes_per_sample
    gradient = 4 * (256 * 4 * 256)  # of the current layer
    assert full.activations.fixed_bytes < 1.1 * gradient
    assert half.activations.fixed_bytes >= 2 * 0.9 * half.parameters, "their copies in bf16"
    assert half.sharded_activations.fixed_bytes < 1.1 * gradient
    assert (full.weight_bytes, half.weight_bytes) == (4, 2)


@dataclass(frozen=True, kw_only=True)
class Read(Blocks):
    """Has real weights, as those that are read from a file, where others are fake."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        with unset_fake_temporarily():
            return super().build_model(data_info)


def test_weights_that_are_read_need_the_same_memory_with_fsdp(tmp_path, caplog):
    fake, real = (
        cost.inspect_recipe(make_config(tmp_path, recipe), "bf16") for recipe in (Blocks(), Read())
    )
    assert not caplog.records
    assert real.sharded_activations == fake.sharded_activations


def test_a_step_that_fails_with_fsdp_is_said_and_takes_the_activations_of_ddp(
    tmp_path, monkeypatch, caplog
):
    def refuse(*_: Any) -> None:
        raise RuntimeError("expected one dtype\nand more")

    monkeypatch.setattr(cost, "_cast_as_fsdp2", refuse)
    model = cost.inspect_recipe(make_config(tmp_path, Blocks()), "bf16")
    assert model.sharded_activations == model.activations
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("DDP's activations are taken: expected one dtype")


def test_flops_are_six_per_parameter_and_position(tmp_path):
    model = cost.inspect_recipe(make_config(tmp_path, Blocks()), "no")
    # the first layer's input needs no gradient, else it were 6 exactly
    assert model.flops_per_sample == pytest.approx(6 * model.parameters * 64, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 8),
        ({"optim__ema_decay": 0.9}, 12),
        ({"optim__class_path": "torch.optim.SGD"}, 0),
        (
            {"optim__class_path": "torch.optim.SGD", "optim__init_args": {"momentum": 0.9}},
            4,
        ),
    ],
)
def test_optimizers_are_asked_for_what_they_keep(tmp_path, settings, wanted):
    config = change(make_config(tmp_path), **settings)
    assert cost.optimizer_bytes(config) == pytest.approx(wanted, abs=0.01)


def test_traffic_by_hand():
    """1 G parameters on 4 nodes of 8."""
    ddp = planner.sent_bytes("DDP", MODEL, CLUSTER, accumulation=4)
    assert ddp["network"] == pytest.approx(2 * 31 / 32 * 4e9), "once a step"
    fsdp = planner.sent_bytes("FSDP2", MODEL, CLUSTER, accumulation=4)
    assert fsdp["network"] == pytest.approx(31 / 32 * (4 * 4e9 + 4e9)), "each micro-batch"
    hsdp = planner.sent_bytes("HSDP", MODEL, CLUSTER, accumulation=4)
    assert hsdp["in node"] == pytest.approx(7 / 8 * (4 * 4e9 + 4e9))
    assert hsdp["network"] == pytest.approx(2 * 3 / 4 * 4e9 / 8)
    alone = planner.sent_bytes("DDP", MODEL, replace(CLUSTER, nodes=1))
    assert alone["network"] == 0


def test_the_start_by_hand():
    """A model that does not fit a GPU starts where its shards and a block fit."""
    large = replace(MODEL, parameters=30_000_000_000, trained=30_000_000_000)
    ddp = planner.start_bytes("DDP", large, CLUSTER)
    assert ddp == {"gpu": 120e9, "host": 8 * 120e9}
    assert planner.start_bytes("FSDP2", large, CLUSTER) == {
        "gpu": pytest.approx(120e9 / 32 + 4 * 50e6), "host": 120e9
    }  # fmt: skip
    hsdp = planner.start_bytes("HSDP", large, CLUSTER)
    assert hsdp == {"gpu": pytest.approx(120e9 / 8 + 4 * 50e6), "host": 120e9}
    plans = [planner.choose(large, CLUSTER, 32 * 8)]
    said = " ".join(planner.advice(plans, 0))
    assert "The start takes 120 GB of host memory on the first node, and 15.2 GB per GPU." in said


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    micro, accumulation = planner.largest_micro_batch("DDP", MODEL, CLUSTER, 32 * 64)
    assert micro * accumulation == 64
    room = CLUSTER.gpu_bytes - CLUSTER.reserved_bytes
    assert planner.memory_bytes("DDP", MODEL, CLUSTER, micro, accumulation) <= room
    assert planner.memory_bytes("DDP", MODEL, CLUSTER, 2 * micro, accumulation // 2) > room
    assert micro == 32


def test_a_model_is_sharded_only_when_it_has_to_be():
    fast = replace(CLUSTER, over_nodes=300e9)
    assert planner.choose(MODEL, fast, 32 * 64)["best"]["kind"] == "DDP"
    large = replace(MODEL, parameters=30_000_000_000, trained=30_000_000_000)
    assert planner.choose(large, CLUSTER, 32 * 8)["best"]["kind"] == "HSDP"
    huge = replace(large, parameters=60_000_000_000, trained=60_000_000_000)
    assert planner.choose(huge, CLUSTER, 32)["best"]["kind"] == "FSDP2"
    too_large = replace(huge, parameters=10**12, trained=10**12)
    assert planner.choose(too_large, CLUSTER, 32)["best"] is None


def test_more_gpus_are_faster_and_less_efficient():
    plans = planner.scaling(MODEL, CLUSTER, 32 * 64)
    sizes = [(plan["nodes"], plan["gpus_per_node"]) for plan in plans]
    assert sizes == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8)]
    steps = [plan["best"]["step"] for plan in plans]
    assert steps == sorted(steps, reverse=True)
    efficiencies = [plan["best"]["efficiency"] for plan in plans]
    assert max(efficiencies) <= 1
    assert efficiencies[0] > efficiencies[-2] > efficiencies[-1] > 0
    choice, ratio, *_ = planner.advice(plans, 0)
    assert choice.startswith("Choose accelerate_configs/multi_node")
    assert ratio == f"32 GPUs are {steps[0] / steps[-1]:.3g} times as fast as one."


@pytest.mark.parametrize(
    ("parameters", "speed", "network", "batch", "config", "sentence"),
    [
        (10**5, 1e7, 40e9, 64, "gpu", "A second GPU would not help: per step, 2 GPUs in place"),
        (10**9, 100, 1e9, 64, "multi_gpu", "A second node would not help: per step, 16 GPUs in"),
        (10**9, 100, 40e9, 2048, "multi_node", ""),
    ],
)
def test_it_says_where_more_gpus_would_not_help(
    parameters, speed, network, batch, config, sentence
):
    model = replace(MODEL, parameters=parameters, trained=parameters)
    cluster = replace(CLUSTER, over_nodes=network, latency_seconds=20e-6, samples_per_second=speed)
    choice, *others = planner.advice(planner.scaling(model, cluster, batch), 0)
    assert choice.removeprefix("Choose accelerate_configs/").startswith(f"{config}.yaml")
    told = [text for text in others if "help" in text]
    assert len(told) == bool(sentence)
    assert all(text.startswith(sentence) for text in told)
    assert any("waits for Python" in text for text in others) == (parameters == 10**5)


def test_the_advice_types_the_micro_batch_only_where_the_config_has_another():
    plans = planner.scaling(MODEL, CLUSTER, 32 * 64)
    assert plans[-1]["best"]["micro_batch"] == 32
    for given, typed in ((32, ""), (64, " with --batches.micro_batch_size 32"), (0, None)):
        wanted = " with --batches.micro_batch_size 32" if typed is None else typed
        assert planner.advice(plans, given)[0].endswith(f"multi_node.yaml{wanted}.")
    larger = replace(MODEL, parameters=10**13, trained=10**13)
    assert planner.advice(planner.scaling(larger, CLUSTER, 32), 0)[0].startswith("No config fits")


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="60 is not a multiple of 4 nodes x 8 GPUs = 32"):
        planner.scaling(MODEL, CLUSTER, 60)


def test_the_command_prints_and_uses_what_preflight_measured(tmp_path, capsys):
    (tmp_path / "preflight.json").write_text(
        json.dumps({"in_node_bytes_per_second": 2e11, "over_nodes_bytes_per_second": 1e10})
    )
    (tmp_path / "tiny.yaml").write_text(
        "recipe: {class_path: test_planner.Blocks}\nbatches: {global_batch_size: 64}\nsteps: 1\n"
        f"runs_folder: {tmp_path}\n"
    )
    arguments = ["--config", str(tmp_path / "tiny.yaml"), "--nodes", "2", "--gpus-per-node", "4",
                 "--measured", str(tmp_path / "preflight.json")]  # fmt: skip
    planner.main(*planner.parser().parse_known_args([*arguments, "--json"]))
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["over_nodes"] == 1e10
    sizes = [(plan["nodes"], plan["gpus_per_node"]) for plan in told["plans"]]
    assert sizes == [(1, 1), (1, 2), (1, 4), (2, 4)]
    planner.main(*planner.parser().parse_known_args([*arguments, "--recipe.init_args.depth", "2"]))
    shown = capsys.readouterr().out
    assert "Choose accelerate_configs/gpu.yaml" in shown
    assert "40% of 989 TFLOPS, assumed" in shown
    assert max(map(len, shown.splitlines())) <= 80


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
