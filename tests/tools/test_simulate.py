"""The simulated step, compared with hand calculations, torch's memory and real processes."""

import gc
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import PROJECT
from my_project.config import ConfigError
from my_project.loading.layout import BatchLayout
from my_project.optim import build_optimizer
from my_project.settings import parse
from my_project.tools.simulate import SHARDED_SINCE, Simulation, Simulator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.torch_version import TorchVersion
from world import run_world


class Layer(nn.Module):
    """A layer that is large enough for a gather of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True, kw_only=True)
class Layers:
    width: int = 512
    depth: int = 6
    places: int = 128
    dtype: str = "float32"  # of the weights
    reads_value: bool = False

    def prepare_data(self) -> dict[str, Any]:
        return {}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return [torch.zeros(self.places, self.width) for _ in range(64)], {}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        layers = (Layer(self.width) for _ in range(self.depth))
        before, dtype = torch.get_default_dtype(), getattr(torch, self.dtype)
        torch.set_default_dtype(dtype)
        try:
            return nn.Sequential(nn.Linear(self.width, self.width), *layers)
        finally:
            torch.set_default_dtype(before)

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        total = model(batch).float().square().sum()
        if self.reads_value and total.item() < 0:
            raise AssertionError
        return total, torch.tensor(len(batch))


def arguments(folder: Path, *settings: str) -> list[str]:
    path = folder / "layers.yaml"
    path.write_text(
        "recipe: {class_path: test_simulate.Layers}\nsteps: 1\n"
        "batches: {global_batch_size: 4096, micro_batch_size: 8}\n"
        f"runs_folder: {folder}\n"
    )
    return ["--config", str(path), *settings]


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)


OLD_TORCH = TorchVersion(torch.__version__) < SHARDED_SINCE


def simulated(folder: Path, where: str, nodes: int, gpus: int, *settings: str) -> Simulation:
    if OLD_TORCH and where.endswith(("fsdp2", "hsdp")):
        pytest.skip(f"needs torch {SHARDED_SINCE}")
    words = arguments(folder, *settings)
    return Simulator(words).step(where, nodes, gpus)


def tracked_peak(config: Any) -> int:
    """Take two real steps; return the peak memory of torch, all kinds together, in bytes."""
    from torch.distributed._tools.mem_tracker import MemTracker

    recipe = config.recipe
    model = recipe.build_model({})
    optimizer = build_optimizer(config.optim, recipe, model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for step in range(2):
            batch = torch.zeros(config.batches.global_batch_size, recipe.places, recipe.width)
            recipe.loss(model, batch, step)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("1", id="at the gradients"),
        pytest.param("32", id="at the activations", marks=pytest.mark.slow),
    ],
)
def test_memory_is_what_torch_allocates(tmp_path, size):
    settings = ["--batches.global_batch_size", size, "--batches.micro_batch_size", "0"]
    settings += ["--precision", "no"]
    found = simulated(tmp_path, "gpu", 1, 1, *settings)
    real = tracked_peak(parse(arguments(tmp_path, *settings)))
    assert found.peak_bytes == pytest.approx(real, rel=0.01)


@dataclass(frozen=True, kw_only=True)
class Read(Layers):
    """Has real weights, like weights that are read from a file."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        with unset_fake_temporarily():
            return super().build_model(data_info)


@pytest.mark.slow
def test_weights_that_are_read_need_the_same_memory(tmp_path):
    settings = ["--batches.global_batch_size", "16", "--recipe.depth", "1", "--recipe.class_path"]
    fake, real = (
        simulated(tmp_path, "fsdp2", 1, 2, *settings, f"test_simulate.{name}")
        for name in ("Layers", "Read")
    )
    assert real == fake


def test_flops_are_six_per_parameter_and_position(tmp_path):
    found = simulated(tmp_path, "gpu", 1, 1, "--batches.global_batch_size", "16")
    assert found.accumulation == 2
    # the first layer's input needs no gradient; otherwise it would be exactly 6
    assert found.flops_per_sample == pytest.approx(6 * found.parameters * 128, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [(["--optim.ema_decay", "0.9"], 16), (["--optim.class_path", "torch.optim.SGD"], 4)],
)
def test_the_state_is_weights_what_the_optimizer_keeps_and_averages(tmp_path, settings, wanted):
    found = simulated(tmp_path, "gpu", 1, 1, "--batches.global_batch_size", "8", *settings)
    assert found.memory_bytes["state"] / found.parameters == pytest.approx(wanted, abs=0.1)


def test_every_collective_of_a_step_of_512_ranks_by_hand(tmp_path):
    found = simulated(tmp_path, "multi_node_hsdp", 64, 8, "--batches.micro_batch_size", "2")
    assert (found.micro_batch, found.accumulation) == (2, 4)
    w = 512
    layer = 8 * w * w + 4 * w + w + 2 * w
    root = w * w + w
    assert found.parameters == 6 * layer + root
    seen = {
        (c.operation, c.group_size, c.group_per_node): (c.number, c.size_bytes)
        for c in found.collectives
    }
    assert seen == {
        # each micro-batch gathers a layer in forward and in backward, the root once, in bf16, and
        # scatters the sums of its gradients in float32; the last adds up those of all nodes
        ("all-gather", 8, 8): (4 * (2 * 6 + 1), 4 * 2 * (2 * 6 * layer + root)),
        ("reduce-scatter", 8, 8): (4 * 7, 4 * 4 * found.parameters),
        ("all-reduce", 64, 1): (7, 4 * found.parameters // 8),
        ("all-reduce", 8, 8): (1, 4 * (6 * 6 + 2)),  # norms of the gradients
        ("all-reduce", 512, 8): (1, 4 * 8),  # the step's sums
    }
    assert found.memory_bytes["state"] == pytest.approx(12 * found.parameters / 8, rel=1e-3)
    assert found.memory_bytes["gradients"] < 2 * found.parameters, "no rank holds all of them"


@pytest.mark.slow
def test_ddp_reduces_once_a_step_in_buckets_of_25_mb_or_in_16_bit(tmp_path):
    settings = ["--batches.global_batch_size", "1024"]  # 4 micro-batches
    plain = simulated(tmp_path, "multi_node", 4, 8, *settings)
    assert plain.accumulation == 4
    (reduced,) = plain.collectives
    assert (reduced.group_size, reduced.group_per_node) == (32, 8)
    assert reduced.size_bytes == pytest.approx(4 * plain.parameters, rel=1e-4)
    assert reduced.number == 1 + 3, "the step's sums; buckets of 1 MB, 25 MB, and the rest"
    assert plain.memory_bytes["gradients"] >= 4 * plain.parameters, "the buckets"
    hook = ["--distributed.ddp", "{comm_hook: bf16}"]
    half = simulated(tmp_path, "multi_node", 4, 8, *settings, *hook)
    assert half.collectives[0].size_bytes == pytest.approx(2 * plain.parameters, rel=1e-4)


def test_ddp_sends_gradients_in_the_dtype_of_the_weights(tmp_path):
    settings = ["--batches.global_batch_size", "16", "--recipe.places", "1", "--recipe.depth", "1"]
    plain, half = (
        simulated(tmp_path, "multi_gpu", 1, 2, *settings, "--recipe.dtype", dtype)
        for dtype in ("float32", "bfloat16")
    )
    sums = 4 * 8
    assert plain.collectives[0].size_bytes == sums + 4 * plain.parameters
    assert half.collectives[0].size_bytes == sums + 2 * half.parameters


def test_the_model_of_a_simulated_step_can_be_collected(tmp_path, monkeypatch):
    calls = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    simulated(tmp_path, "gpu", 1, 1, "--batches.global_batch_size", "1", "--recipe.depth", "1")
    assert calls == ["freeze", "unfreeze"]


def collectives_of_a_real_step(folder: str) -> tuple[int, dict[str, int]]:
    """Take a step with fully_shard on real processes; return peak memory and collectives."""
    from my_project.contract import RecipeModule
    from my_project.optim import gradients, normalize_and_clip_
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    init_process_group("gloo")
    config = parse(arguments(Path(folder)))
    model = config.recipe.build_model({})
    mesh = init_device_mesh("cpu", (2,))
    for layer in model[1:]:
        fully_shard(layer, mesh=mesh)
    wrapped: Any = fully_shard(RecipeModule(model), mesh=mesh)
    optimizer = build_optimizer(config.optim, config.recipe, model)
    batch = torch.zeros(8, 128, 512)
    for step in range(2):
        tracker = FSDPMemTracker(wrapped, optimizer)
        counted = CommDebugMode()
        with tracker, counted:
            wrapped(config.recipe.loss, batch, step)[0].backward()
            normalize_and_clip_(gradients(model.parameters()), 1.0, None)
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    counts = {str(name): number for name, number in counted.get_comm_counts().items()}
    destroy_process_group()
    return peak, counts


@pytest.mark.slow
def test_the_simulated_step_is_that_of_real_processes(tmp_path):
    """The same units on two real ranks: the same collectives, and the same peak of memory."""
    peak, counts = run_world(2, collectives_of_a_real_step, str(tmp_path))[0]
    settings = ["--batches.global_batch_size", "16", "--precision", "no"]
    found = simulated(tmp_path, "fsdp2", 1, 2, *settings)
    numbers = {c.operation: c.number for c in found.collectives}

    def real(name: str) -> int:
        return sum(number for key, number in counts.items() if name in key)

    assert numbers["all-gather"] == real("allgather")
    assert numbers["reduce-scatter"] == real("reduce_scatter")
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)


class Lanes:
    lanes = 8

    def __len__(self) -> int:
        raise AssertionError

    def lane(self, i: int, start: int, seed: int) -> Any:
        return iter([torch.zeros(128, 512)] * 9)


@dataclass(frozen=True, kw_only=True)
class Stream(Layers):
    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return Lanes(), {}


@dataclass(frozen=True, kw_only=True)
class Empty(Layers):
    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return [], {}


def test_layouts_that_training_refuses_are_known(tmp_path):
    def accepts(kind: str, *settings: str, parts: int = 8, size: int = 64) -> bool:
        layout = BatchLayout(global_batch_size=size, micro_batches=parts, world_size=4)
        return Simulator(arguments(tmp_path, *settings)).accepts(kind, layout)

    stream = ("--recipe.class_path", "test_simulate.Stream")
    assert accepts("DDP", *stream)
    assert not accepts("HSDP", *stream, parts=16)
    assert not accepts("DDP", *stream, size=68)
    static = ("--distributed.ddp", "{static_graph: true}")
    assert accepts("DDP", *static, parts=4)
    assert not accepts("DDP", *static)
    assert accepts("FSDP2", *static)


def test_gradients_that_accumulate_outside_the_buckets_are_counted(tmp_path):
    settings = ["--batches.global_batch_size", "32", "--recipe.places", "1"]  # 2 micro-batches
    plain = simulated(tmp_path, "multi_gpu", 1, 2, *settings)
    unused = ["--distributed.ddp", "{find_unused_parameters: true}"]
    found = simulated(tmp_path, "multi_gpu", 1, 2, *settings, *unused)
    assert plain.memory_bytes["gradients"] == pytest.approx(4 * plain.parameters, rel=0.01)
    assert found.memory_bytes["gradients"] == pytest.approx(8 * plain.parameters, rel=0.01)


@pytest.mark.parametrize(
    ("where", "nodes", "gpus", "settings", "message"),
    [
        ("multi_node", 1024, 8, [], "4096 gives .*, fewer than 8192 processes"),
        ("cpu", 1, 2, [], "starts one process"),
        ("multi_node", 1, 8, ["--recipe.class_path", "test_simulate.Empty"], "no samples"),
        ("multi_node", 1, 8, ["--recipe.class_path", "test_simulate.Stream"], "lanes do not fit"),
        ("multi_node_hsdp", 2, 8, ["--recipe.reads_value", "true"], "scalar"),
    ],
)
def test_a_launch_that_would_not_start_is_refused(tmp_path, where, nodes, gpus, settings, message):
    before, is_available = dict(os.environ), torch.accelerator.is_available
    with pytest.raises((ConfigError, RuntimeError), match=message):
        simulated(tmp_path, where, nodes, gpus, *settings)
    assert dict(os.environ) == before
    assert torch.accelerator.is_available is is_available
    assert not torch.distributed.is_initialized()
