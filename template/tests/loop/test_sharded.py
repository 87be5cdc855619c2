"""Sharded weights and optimizer state, by torch's own fully_shard on CPU processes.

Accelerate shards on GPUs only, see test_gpu.py; what is saved and read is the same.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import make_config
from world import run_world

from my_project import export, files, optim, sharding
from my_project.checkpoint import saving
from my_project.config import Config, ConfigError, OptimConfig
from my_project.run_folder import Run
from my_project.state import TrainState


class Tied(torch.nn.Module):
    """Odd sizes, which no number of processes divides; an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 5)
        self.hidden = torch.nn.Linear(5, 5)
        self.output = torch.nn.Linear(5, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.output(torch.tanh(self.hidden(self.embedding(tokens))))


def build(sharded: bool, replicas: int = 1) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied().double()
    if sharded:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])
    return model, optim.build_optimizer(OptimConfig(lr=0.01), None, model)


def train_steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps on the same tokens on every process, with the project's own parts."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (6,), generator=draw)
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1), reduction="sum")
        loss.backward()
        gradients = optim.gradients(dict(model.named_parameters()))
        scale = torch.tensor(1 / 6, dtype=torch.float64)
        norm = optim.normalize_and_clip_(gradients, scale, 0.5)
        optim.step_if_finite(optimizer, norm)
        optimizer.zero_grad()


def checkpoints_of(config: Config, rank: int, world: int, model: Any, optimizer: Any) -> Any:
    run = Run(config, rank)
    run.hosts = ["here"] * world
    return saving.Checkpoints(run, model, optimizer, None, optim.EMA(model, 0.9))


def in_group(function, *arguments: Any) -> Any:
    import os

    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return function(0, 1, *arguments)
    dist.init_process_group("gloo")
    try:
        return function(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


def train_and_save(rank: int, world: int, config: Config, replicas: int = 1) -> dict[str, Any]:
    model, optimizer = build(world > 1, replicas)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    train_steps(model, optimizer, range(3))
    checkpoints.ema.update()
    checkpoints.save(TrainState(step=3, items_per_micro_batch=1.0))
    train_steps(model, optimizer, range(3, 6))
    checkpoints.wait()
    return whole(model)


def load_and_train(rank: int, world: int, config: Config, folder: Path, shard: bool = True) -> Any:
    model, optimizer = build(sharded=world > 1 and shard)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    state = checkpoints.load(folder)
    train_steps(model, optimizer, range(state["step"], 6))
    return whole(model)


def whole(model: torch.nn.Module) -> dict[str, Any]:
    """Gather the weights, as arrays: those can be sent."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().numpy()
        for name, t in model.state_dict().items()
    }


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            torch.as_tensor(value), torch.as_tensor(theirs[name]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_sharded_state_is_saved_in_shards_and_read_by_any_number(tmp_path, background):
    config = make_config(tmp_path, checkpoints__background=background)
    # one process, nothing sharded: the reference
    (reference,) = run_world(1, in_group, train_and_save, make_config(tmp_path / "one"))
    results = run_world(2, in_group, train_and_save, config)
    for result in results:
        assert_close(result, reference)
    folder = config.folder / "checkpoints" / "step_00000003"
    assert files.find_damage(folder) == ""
    kinds = ("ema", "model", "optimizer")
    shards = {f"{kind}.rank_{rank:05d}.safetensors" for kind in kinds for rank in (0, 1)}
    assert {p.name for p in folder.iterdir()} == shards | {"manifest.json", "state.json"}
    sizes = [(folder / f"model.rank_{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 0.8 * sum(sizes), "each process writes its part"
    for processes, shard in ((1, True), (2, True), (3, True), (4, True), (2, False)):
        for result in run_world(processes, in_group, load_and_train, config, folder, shard):
            assert_close(result, reference)


@pytest.mark.slow
def test_of_replicated_shards_one_copy_is_written(tmp_path):
    """As with HSDP: shards inside a node, copies across nodes."""
    one, four = make_config(tmp_path / "one"), make_config(tmp_path / "four")
    (reference,) = run_world(1, in_group, train_and_save, one)
    for result in run_world(4, in_group, train_and_save, four, 2):
        assert_close(result, reference)
    folder = four.folder / "checkpoints" / "step_00000003"
    assert {p.name for p in folder.glob("model*")} == {
        "model.rank_00000.safetensors", "model.rank_00001.safetensors",
    }  # fmt: skip
    for result in run_world(2, in_group, load_and_train, four, folder):
        assert_close(result, reference)


def test_a_whole_checkpoint_is_read_into_shards_and_shards_are_merged(tmp_path):
    one, two = make_config(tmp_path / "one"), make_config(tmp_path / "two")
    (reference,) = run_world(1, in_group, train_and_save, one)
    run_world(2, in_group, train_and_save, two)
    whole_folder = one.folder / "checkpoints" / "step_00000003"
    for result in run_world(2, in_group, load_and_train, two, whole_folder):
        assert_close(result, reference)
    from argparse import Namespace

    from safetensors.torch import load_file

    merged = []
    for folder in (whole_folder, two.folder / "checkpoints" / "step_00000003"):
        path = tmp_path / f"{folder.parents[1].parent.name}.safetensors"
        export.merge(Namespace(folder=str(folder), file=str(path), ema=False))
        merged.append(load_file(path))
    assert_close(merged[0], merged[1])
    assert torch.equal(merged[1]["output.weight"], merged[1]["embedding.weight"])
    Tied().double().load_state_dict(merged[1])


def test_a_shard_that_is_missing_or_damaged_is_noticed(tmp_path):
    config = make_config(tmp_path)
    run_world(2, in_group, train_and_save, config)
    folder = config.folder / "checkpoints" / "step_00000003"
    shard = folder / "optimizer.rank_00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "optimizer.rank_00001.safetensors is damaged" in files.find_damage(folder)
    shard.unlink()
    assert "optimizer.rank_00001.safetensors is missing" in files.find_damage(folder)
    # also where a manifest was made for what is left
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    del manifest["files"][shard.name]
    (folder / "manifest.json").write_text(files.manifest_text(manifest))
    model, optimizer = build(sharded=False)
    with pytest.raises(ConfigError, match="holds only a part of optimizer"):
        checkpoints_of(config, 0, 1, model, optimizer).load(folder)


def save_twice(rank: int, world: int, config: Config) -> dict[str, Any]:
    """Save after 2 and 3 steps; return the weights after 2."""
    model, optimizer = build(sharded=True)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    weights = {}
    for step in (2, 3):
        train_steps(model, optimizer, range(0 if step == 2 else 2, step))
        weights[step] = whole(model)
        checkpoints.save(TrainState(step=step, items_per_micro_batch=1.0))
    checkpoints.wait()
    return weights[2]


def resume(rank: int, world: int, config: Config, shard: bool) -> Any:
    """Resume on these processes; return the step, the weights, and the files read whole."""
    from accelerate import Accelerator

    model, optimizer = build(sharded=shard)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    real, read = saving.Checkpoints._damage, []

    def damage(self: Any, *arguments: Any) -> str:
        read.append(sorted(self._hashes))
        return real(self, *arguments)

    saving.Checkpoints._damage = damage  # type: ignore[method-assign]
    newest = config.folder / "checkpoints" / "step_00000003"
    folder, state = checkpoints.resume(Accelerator(cpu=True), newest)
    assert files.step_of(folder) == state["step"]
    return state["step"], whole(model), read[0]


def test_each_rank_hashes_the_shards_that_it_reads_and_all_go_back(tmp_path):
    config = make_config(tmp_path)
    (weights, _) = run_world(2, in_group, save_twice, config)
    folder = config.folder / "checkpoints" / "step_00000003"
    found = run_world(2, in_group, resume, config, True)
    for rank, (step, _, read) in enumerate(found):
        assert step == 3
        assert read == [f"{k}.rank_{rank:05d}.safetensors" for k in ("ema", "model", "optimizer")]
    shard = folder / "optimizer.rank_00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    for processes, sharded in ((2, True), (1, False), (3, True)):
        for step, ours, read in run_world(processes, in_group, resume, config, sharded):
            assert step == 2
            assert_close(ours, weights)
            assert processes < 3 or shard.name not in read, "no rank reads it whole"
        shutil.rmtree(folder.with_name("step_00000003.old-1"))
        shutil.copytree(kept, folder)


def fail_to_write(rank: int, world: int, config: Config) -> list[bool]:
    """Let the second process fail in its first save."""
    model, optimizer = build(sharded=True)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    save_shards, failed = saving.save_shards, []

    def failing(shards: Any, path: Path) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return save_shards(shards, path)

    for step, write in enumerate((failing, save_shards), start=1):
        saving.save_shards = write  # type: ignore[assignment]
        train_steps(model, optimizer, range(step - 1, step))
        checkpoints.save(TrainState(step=step, items_per_micro_batch=1))
        checkpoints.wait()
        failed.append(checkpoints.failure is not None)
    return failed


def test_a_process_that_cannot_write_its_shard_makes_the_save_fail_not_hang(tmp_path):
    config = make_config(tmp_path)
    assert run_world(2, in_group, fail_to_write, config) == [[True, False]] * 2
    left = [path.name for path in (config.folder / "checkpoints").iterdir()]
    assert left == ["step_00000002"]


class Loss:
    """Of a recipe for `Tied`, as far as evaluate asks for one."""

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        return model(batch % 11).sum(), len(batch)


def evaluate_ema(rank: int, world: int, config: Config) -> list[bool]:
    """Evaluate the EMA; then train on with the weights."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    from my_project.evaluate import evaluate
    from my_project.sharding import RecipeModule

    model, _ = build(sharded=False)
    call = fully_shard(RecipeModule(model), reshard_after_forward=False)
    ema = optim.EMA(model, 0.9)
    for tensor in ema.averages:
        tensor.zero_()
    tokens = torch.arange(4)
    before = call(torch.nn.Module.__call__, tokens).detach().clone()
    object.__setattr__(config, "recipe", Loss())
    with ema.swapped_in():
        results = evaluate(Accelerator(cpu=True), config, call, {"set": tokens})
    after = call(torch.nn.Module.__call__, tokens).detach()
    return [results["set/loss"] == 0.0, torch.equal(before, after)]


def test_training_goes_on_with_the_weights_after_the_ema_was_evaluated(tmp_path):
    """Sharded modules may keep gathered weights after a forward."""
    config = make_config(tmp_path, batches__micro_batch_size=2)
    assert run_world(2, in_group, evaluate_ema, config) == [[True, True]] * 2


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(5, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(x)


class Deep(torch.nn.Module):
    """Layers in a ModuleList, an output tied to the embedding, and weights of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 5)
        self.layers = torch.nn.ModuleList([Layer(5), Layer(5)])
        self.tower = torch.nn.Sequential(Layer(5), torch.nn.Linear(5, 5))
        self.head = Head()
        self.head.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.tower(x))


def test_blocks_can_be_called_and_hold_tied_weights_whole():
    assert sharding.sharded_blocks(Deep(), 20) == (["Layer"], [30] * 3, 55 + 30)
    assert sharding.sharded_blocks(Deep(), 31) == ([], [], 55 + 4 * 30)
    in_one_of_two = torch.nn.Sequential(Deep(), Layer(1))
    assert sharding.sharded_blocks(in_one_of_two, 60) == (["Deep"], [55 + 4 * 30], 2)
    assert sharding.sharded_blocks(torch.nn.Sequential(Deep()), 60) == ([], [], 55 + 4 * 30)
    another = type("Layer", (Layer,), {})(5)
    twice_named = torch.nn.Sequential(Deep(), another)
    assert sharding.sharded_blocks(twice_named, 20)[0] == ["Deep"]


def shard_as_accelerate_does() -> tuple[list[str], float]:
    """Shard by accelerate's own function, and compare a gradient with that of the plain model."""
    import torch.distributed as dist
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    def prepare(call: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        whole = list(call.parameters())
        call = fsdp2_prepare_model(accelerator, call)
        into = dict(zip(whole, call.parameters(), strict=True))
        for group in optimizer.param_groups:  # as accelerate does, there by name
            group["params"] = [into[parameter] for parameter in group["params"]]
        return call, optimizer

    dist.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=20
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=["shard"]),
        mixed_precision="no",
        is_main_process=True,
        prepare=prepare,
        unwrap_model=lambda call, **_: call,
    )
    torch.manual_seed(0)
    plain, model = Deep(), Deep()
    model.load_state_dict(plain.state_dict())
    call, _ = sharding.prepare(accelerator, model, torch.optim.SGD(model.parameters()))
    tokens = torch.arange(6)
    call(lambda model, tokens: model(tokens).square().sum(), tokens).backward()
    plain(tokens).square().sum().backward()
    difference = max(
        float((ours.grad.full_tensor() - theirs.grad).abs().max())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return [
        name for name, part in model.named_modules() if isinstance(part, FSDPModule)
    ], difference


def test_accelerate_shards_models_with_lists_of_layers_and_tied_weights():
    for blocks, difference in run_world(2, shard_as_accelerate_does):
        assert blocks == ["layers.0", "layers.1", "tower.0"]
        assert difference < 1e-5
