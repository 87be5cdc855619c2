"""Sharded weights and optimizer state, by torch's own fully_shard on CPU processes.

Accelerate shards on GPUs only, see test_gpu.py; what is saved and read is the same.
"""

import gc
import json
import os
import shutil
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project import commands, export, files, optim
from my_project.checkpoint import exporting, resuming, saving
from my_project.config import Config, ConfigError, OptimConfig
from my_project.run_folder import Run
from my_project.state import TrainState
from ragged import Ragged
from runs import make_config
from safetensors.torch import load_file, load_model
from world import run_world


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
        gradients = optim.gradients(model.parameters())
        scale = torch.tensor(1 / 6, dtype=torch.float64)
        norm = optim.normalize_and_clip_(gradients, scale, 0.5)
        optim.step_if_finite(optimizer, norm)
        optimizer.zero_grad()


def checkpoints_of(config: Config, rank: int, world: int, model: Any, optimizer: Any) -> Any:
    run = Run(config, rank)
    run.hosts = ["here"] * world
    return saving.Checkpoints(run, model, optimizer, None, optim.EMA(model, 0.9))


def in_group(function, *arguments: Any) -> Any:
    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return function(0, 1, *arguments)
    dist.init_process_group("gloo")
    try:
        return function(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


def train_and_save(rank: int, world: int, config: Config) -> dict[str, Any]:
    model, optimizer = build(world > 1)
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
def test_shards_and_whole_checkpoints_are_read_by_any_number_of_processes_and_merged(tmp_path):
    one, two = make_config(tmp_path / "one"), make_config(tmp_path / "two")
    # one process, nothing sharded: the reference
    (reference,) = run_world(1, in_group, train_and_save, one)
    for result in run_world(2, in_group, train_and_save, two):
        assert_close(result, reference)
    whole_folder, folder = (c.folder / "checkpoints/step_00000003" for c in (one, two))
    assert files.find_damage(folder) == ""
    kinds = ("ema", "model", "optimizer")
    shards = {f"{kind}.rank_{rank:05d}.safetensors" for kind in kinds for rank in (0, 1)}
    assert {p.name for p in folder.iterdir()} == shards | {"manifest.json"}
    sizes = [(folder / f"model.rank_{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 0.8 * sum(sizes), "each process writes its part"
    for processes, shard in ((1, True), (2, True), (3, True), (4, True), (2, False)):
        for result in run_world(processes, in_group, load_and_train, two, folder, shard):
            assert_close(result, reference)
    for result in run_world(2, in_group, load_and_train, two, whole_folder):
        assert_close(result, reference)
    merged = []
    for source in (whole_folder, folder):
        path = tmp_path / f"{len(merged)}.safetensors"
        commands.write_one_file(Namespace(folder=str(source), file=str(path), ema=False))
        merged.append(load_file(path))
    assert_close(merged[0], merged[1])
    for held in (merged[1], load_file(whole_folder / "model.safetensors")):
        assert "output.weight" not in held, "a tied weight is written once"
    tied = Tied().double()
    load_model(tied, path)
    assert torch.equal(tied.output.weight, merged[1]["embedding.weight"])


def test_a_shard_that_is_missing_is_noticed(tmp_path):
    config = make_config(tmp_path)
    run_world(2, in_group, train_and_save, config)
    folder = config.folder / "checkpoints" / "step_00000003"
    shard = folder / "optimizer.rank_00001.safetensors"
    shard.unlink()
    assert "No such file or directory" in files.find_damage(folder)
    # also where a manifest was made for what is left
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    del manifest["files"][shard.name]
    (folder / "manifest.json").write_text(files.manifest_text(manifest))
    model, optimizer = build(sharded=False)
    with pytest.raises(ConfigError, match="holds only a part of optimizer"):
        checkpoints_of(config, 0, 1, model, optimizer).load(folder)
    del manifest["files"]["model.rank_00001.safetensors"]
    (folder / "manifest.json").write_text(files.manifest_text(manifest))
    arguments = Namespace(folder=str(folder), file=str(tmp_path / "merged"), ema=False)
    with pytest.raises(ConfigError, match="holds only a part of model"):
        commands.write_one_file(arguments)
    assert not list(tmp_path.glob("*merged*")), "no incomplete file is left"


def save_twice(rank: int, world: int, config: Config) -> dict[str, Any]:
    """Save after 2 and 3 steps; return the weights after 2."""
    files.PIECE_BYTES = 256
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
    """Resume on these processes; return the step, the weights, and the pieces that were hashed."""
    from accelerate import Accelerator

    model, optimizer = build(sharded=shard)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    files.PIECE_BYTES = 256
    real, hashed = files._hash_piece, []

    def hash_piece(path: Path, number: int) -> str:
        hashed.append((path.name, number))
        return real(path, number)

    files._hash_piece = hash_piece
    folder = resuming.choose(Accelerator(cpu=True), checkpoints.run)
    state = checkpoints.resume(folder)
    assert files.step_of(folder) == state["step"]
    return state["step"], whole(model), hashed


@pytest.mark.slow
def test_each_rank_hashes_a_share_of_the_pieces_and_all_go_back(tmp_path):
    config = make_config(tmp_path)
    (weights, _) = run_world(2, in_group, save_twice, config)
    folder = config.folder / "checkpoints" / "step_00000003"
    hashed = [read for *_, read in run_world(2, in_group, resume, config, True)]
    pieces = Counter(piece for of_rank in hashed for piece in of_rank)
    assert {*pieces.values()} == {1}
    assert abs(len(hashed[0]) - len(hashed[1])) <= 1
    listed = files.read_manifest(folder)["files"].items()
    assert {*pieces} == {(name, i) for name, f in listed for i in range(-(-f["size"] // 256))}
    shard = folder / "optimizer.rank_00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    for processes, sharded in ((2, True), (1, False), (3, True)):
        for step, ours, _ in run_world(processes, in_group, resume, config, sharded):
            assert step == 2
            assert_close(ours, weights)
        shutil.rmtree(folder.with_name("step_00000003.old-1"))
        shutil.copytree(kept, folder)


def fail_to_write(rank: int, world: int, config: Config) -> list[bool]:
    """Let the second process fail in its first save."""
    model, optimizer = build(sharded=True)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    save_shards, failed = saving.save_shards, []

    def failing(shards: Any, path: Path, aliases: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return save_shards(shards, path, aliases)

    for step, write in enumerate((failing, save_shards), start=1):
        saving.save_shards = write  # type: ignore[assignment]
        train_steps(model, optimizer, range(step - 1, step))
        checkpoints.save(TrainState(step=step, items_per_micro_batch=1))
        checkpoints.wait()
        failed.append("checkpoint" in checkpoints.failures)
    return failed


def test_a_process_that_cannot_write_its_shard_makes_the_save_fail_not_hang(tmp_path):
    config = make_config(tmp_path)
    assert run_world(2, in_group, fail_to_write, config) == [[True, False]] * 2
    left = [path.name for path in (config.folder / "checkpoints").iterdir()]
    assert left == ["step_00000002"]


# ---- exports -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class OfTied(Ragged):
    def build_model(self, data_info: Any) -> Any:
        return Tied().double()


def start_exports(config: Config, rank: int, world: int, replicas: int = 1) -> Any:
    model, optimizer = build(sharded=True, replicas=replicas)
    train_steps(model, optimizer, range(2))
    return model, optimizer, checkpoints_of(config, rank, world, model, optimizer)


def bytes_held() -> int:
    """Return the bytes of the tensors that this process holds, also through arrays and views."""
    sizes = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def replace(name: str, checkpoints: Any, model: Any) -> None:
    exporting.export(checkpoints.run, {"features": 6}, model, checkpoints, name)


def export_counted(rank: int, world: int, config: Config) -> tuple[Any, list[int], list[int]]:
    """Export; return the weights, and what was held before each whole tensor and with it."""
    model, _, checkpoints = start_exports(config, rank, world)
    before, peaks = [], []

    def counted(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            before.append(bytes_held() - held)
            whole = real(*arguments)
            peaks.append(bytes_held() - held)
            return whole

        return call

    replace("export", checkpoints, model)  # makes the buffers
    checkpoints.run.step += 1
    saving.TensorReader.read = counted(saving.TensorReader.read)
    gc.collect()
    held = bytes_held()
    replace("export", checkpoints, model)
    replace("best", checkpoints, model)
    checkpoints.wait()
    return whole(model), before, peaks


def read_export(folder: Path) -> dict[str, Any]:
    reader = saving.TensorReader(folder, "model")
    return {name: reader.read(name) for name in reader.shapes}


def test_a_rank_holds_one_whole_tensor_while_a_large_model_is_exported(tmp_path):
    config = make_config(tmp_path, OfTied())
    found = run_world(2, in_group, export_counted, config)
    (weights, before, peaks), (_, *on_rank_1) = found
    assert len(before) == 2 * 4, "each of 4 tensors, read for export/ and for best/"
    assert max(before) == 0, "none is held when the next is read"
    assert max(peaks) == 440, "the largest tensor, the tied embedding; all have 688"
    assert on_rank_1 == [[], []]
    for name in ("export", "best"):
        folder = config.folder / name
        _, _, loaded = export.load(folder, ["test_sharded.OfTied"])
        assert_close(whole(loaded), weights)
        assert_close(read_export(folder), weights)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
            export.load(folder, ["test_sharded.OfTied"])


def export_in_background(
    rank: int, world: int, config: Config, replicas: int
) -> tuple[Any, list[str]]:
    """Write best/ while training goes on; return the weights, and the threads that wrote files."""
    model, optimizer, checkpoints = start_exports(config, rank, world, replicas)
    weights = whole(model)
    real, threads = exporting.save_tensors, []

    def late(*arguments: Any) -> None:
        threads.append(saving.threading.current_thread().name)
        trained.wait(600)
        real(*arguments)

    trained = saving.threading.Event()
    exporting.save_tensors = late
    replace("best", checkpoints, model)
    train_steps(model, optimizer, range(2, 4))
    trained.set()
    checkpoints.wait()
    return weights, threads


@pytest.mark.parametrize("replicas", [1, 2])
def test_best_of_a_sharded_model_is_written_while_training_goes_on(tmp_path, replicas):
    """Of 2 replicas a mesh of one process shards: what it holds is the whole live weight."""
    config = make_config(tmp_path, OfTied())
    found = run_world(2, in_group, export_in_background, config, replicas)
    (weights, threads), (_, on_rank_1) = found
    assert (threads, on_rank_1) == (["checkpoint"], [])
    assert_close(read_export(config.folder / "best"), weights)
    assert not list(config.folder.glob(".[!l]*")), "the files of the shards"


def export_saved(rank: int, world: int, config: Config) -> Any:
    """Save and export; return the averages."""
    model, optimizer = build(sharded=world > 1)
    model.hidden.requires_grad_(False)
    optimizer = optim.build_optimizer(OptimConfig(lr=0.01), None, model)
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    train_steps(model, optimizer, range(3))
    checkpoints.ema.update()
    checkpoints.save(TrainState(step=3, items_per_micro_batch=1.0))
    checkpoints.run.step = 3
    checkpoints._copied = None  # no shards are written for best/
    with checkpoints.ema.swapped_in():
        replace("best", checkpoints, model)
        averages = whole(model)
    train_steps(model, optimizer, range(3, 6))
    checkpoints.wait()
    return averages


@pytest.mark.parametrize("processes", [1, 2])
def test_best_is_read_from_the_checkpoint_of_its_step(tmp_path, processes):
    """Also a tied weight, with one average and two names, and a frozen one, which has none."""
    config = make_config(tmp_path, OfTied())
    averages, *_ = run_world(processes, in_group, export_saved, config)
    assert_close(read_export(config.folder / "best"), averages)
    reader = saving.TensorReader(config.folder / "checkpoints/step_00000003", "model")
    live = reader.read("output.weight")
    assert not torch.equal(live, torch.as_tensor(averages["output.weight"]))


def export_with_failures(rank: int, world: int, config: Config) -> list[Any]:
    """Export five times, each time other weights.

    The second time the disk is full on rank 0, which writes the files; the fourth time on rank 1,
    which writes its shards.
    """
    model, optimizer, checkpoints = start_exports(config, rank, world)
    save_tensors, save_shards, outcomes = exporting.save_tensors, saving.save_shards, []

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for i in range(5):
        exporting.save_tensors = full if i == 1 else save_tensors
        saving.save_shards = full if (i, rank) == (3, 1) else save_shards  # type: ignore
        train_steps(model, optimizer, range(2 + i, 3 + i))
        checkpoints.run.step = 3 + i
        replace("best", checkpoints, model)
        replace("export", checkpoints, model)
        failed = sorted(checkpoints.failures)
        names = ("best", "export") if rank == 0 else ()  # which rank 0 replaces meanwhile
        read = (read_export(config.folder / name) for name in names)
        found = [{key: tensor.numpy() for key, tensor in one.items()} for one in read]
        outcomes.append((failed, whole(model), found))
    return outcomes


def test_an_export_that_fails_leaves_the_one_before_and_no_rank_waits(tmp_path):
    config = make_config(tmp_path, OfTied(), distributed__startup_timeout_seconds=30)
    written, others = run_world(2, in_group, export_with_failures, config)
    both = ["best", "export"]
    assert [failed for failed, *_ in written] == [[], both, [], both, []]
    assert [failed for failed, *_ in others] == [[], [], [], both, []]
    for i, newest in ((0, (0, 0)), (1, (0, 0)), (2, (2, 2)), (3, (2, 2)), (4, (4, 4))):
        for found, j in zip(written[i][2], newest, strict=True):
            assert_close(found, written[j][1])
    assert not list(config.folder.glob(".[!l]*"))


def buffer_of_rank_0(rank: int, world: int, config: Config) -> list[float]:
    """Broadcast a buffer that is not contiguous."""
    from accelerate import Accelerator
    from my_project.evaluate import broadcast_buffers

    model = torch.nn.Linear(1, 1)
    model.register_buffer("strided", torch.full((2, 4), float(rank + 1))[:, ::2])
    broadcast_buffers(Accelerator(cpu=True), model)
    return model.strided.flatten().tolist()


def test_an_evaluation_takes_a_buffer_that_is_not_contiguous_from_rank_0(tmp_path):
    found = run_world(2, in_group, buffer_of_rank_0, make_config(tmp_path))
    assert found == [[1.0] * 4] * 2
