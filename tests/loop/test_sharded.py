"""What the ranks of a sharded run write and read: their shards, and exports of whole tensors."""

import gc
import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project import accelerator as accelerators
from my_project import commands
from my_project import manifest as manifests
from my_project.checkpoint import exporting, saving, shards
from my_project.config import Config, ConfigError
from my_project.evaluate import broadcast_buffers
from my_project.weights import load as load_export
from ragged import Deep
from runs import assert_same_weights, change, make_config, quick, records, status, train
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, load_model
from test_checkpoint import flip_one_bit, folder_of, limit_file_size, names
from test_fsdp_on_cpu import train_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from world import run_world


def odd(folder: Path, **settings: Any) -> Config:
    """Sizes that no number of processes divides, for any number of them; an average of weights."""
    recipe = Deep(dtype="float64", width=5, validation_samples=0)
    three: dict[str, Any] = {"steps": 3, "optim__ema_decay": 0.9, "checkpoints__keep": 9}
    batches = {"batches__global_batch_size": 12, "batches__micro_batch_size": 0}
    return make_config(folder, recipe, **three | batches | settings)


# ---- checkpoints ---------------------------------------------------------------------------------
@pytest.mark.slow
def test_any_number_of_processes_reads_shards_and_whole_checkpoints(tmp_path):
    one, two = (
        odd(tmp_path, run_name=name, steps=6, checkpoints__every_steps=3) for name in ("one", "two")
    )
    run_world(1, train, one)
    run_world(2, train_sharded, two)
    assert_same_weights(two, one, 1e-9)
    whole_folder, folder = (folder_of(config, 3) for config in (one, two))
    assert manifests.find_damage(folder) == ""
    kinds = ("ema", "model", "optimizer")
    shards = {f"{kind}.rank_{rank:05d}.safetensors" for kind in kinds for rank in (0, 1)}
    assert {p.name for p in folder.iterdir()} == shards | {"manifest.json"}
    sizes = [(folder / f"model.rank_{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 0.8 * sum(sizes), "each process writes its part"
    for name, processes, source in (
        ("on 1", 1, folder),
        ("on 3", 3, folder),
        ("on 4", 4, folder),
        ("of whole", 2, whole_folder),
    ):
        resumed = change(one, run_name=name, resume=str(source))
        run_world(processes, train_sharded, resumed)
        assert_same_weights(resumed, one, 1e-9)
    merged = []
    for source in (whole_folder, folder):
        path = tmp_path / f"{len(merged)}.safetensors"
        commands.write_one_file(Namespace(folder=str(source), file=str(path), ema=False))
        merged.append(load_file(path))
    torch.testing.assert_close(merged[0], merged[1], rtol=1e-9, atol=1e-9)
    for held in (merged[1], load_file(whole_folder / "model.safetensors")):
        assert "output.weight" not in held, "a tied weight is written once"
    tied = one.recipe.build_model({"features": 6})
    load_model(tied, path)
    assert torch.equal(tied.output.weight, merged[1]["input.weight"])


def test_a_shard_that_is_missing_is_noticed(tmp_path):
    config = odd(tmp_path)
    run_world(2, train_sharded, config)
    folder = folder_of(config, 3)
    shard = folder / "optimizer.rank_00001.safetensors"
    shard.unlink()
    assert "No such file or directory" in manifests.find_damage(folder)
    # also where a manifest was made for what is left
    manifest = manifests.read_manifest(folder)
    del manifest["files"][shard.name]
    (folder / "manifest.json").write_text(manifests.manifest_text(manifest))
    with pytest.raises(ConfigError, match="holds only a part of optimizer"):
        train(change(config, steps=4))
    del manifest["files"]["model.rank_00001.safetensors"]
    (folder / "manifest.json").write_text(manifests.manifest_text(manifest))
    arguments = Namespace(folder=str(folder), file=str(tmp_path / "merged"), ema=False)
    with pytest.raises(ConfigError, match="holds only a part of model"):
        commands.write_one_file(arguments)
    assert not list(tmp_path.glob("*merged*")), "no incomplete file is left"


def writes_an_empty_tensor() -> bool:
    with accelerators.start_accelerator(odd(Path("unused"))):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        empty = distribute_tensor(torch.empty(0, 4), mesh)
        return shards.own_shard(empty, torch.distributed.get_rank()) is not None


def test_one_rank_writes_a_sharded_tensor_without_elements():
    assert run_world(2, writes_an_empty_tensor) == [True, False]


def train_counting_hashes(config: Config) -> list[str]:
    """Train; return the files of step 2 that this rank has checked."""
    real, hashed = manifests.open_own, []

    def open_counted(path: Path, **options: Any) -> Any:
        if path.parent == folder_of(config, 2):
            hashed.append(path.name)
        return real(path, **options)

    manifests.open_own = open_counted
    train_sharded(config)
    return hashed


@pytest.mark.slow
def test_each_rank_hashes_a_share_of_the_files_and_all_go_back(tmp_path):
    whole = odd(tmp_path / "whole", checkpoints__every_steps=1)
    run_world(2, train_sharded, whole)
    listed = manifests.read_manifest(folder_of(whole, 2))["files"]
    for processes in (2, 1, 3):
        config = change(whole, runs_folder=str(tmp_path / f"on_{processes}"))
        shutil.copytree(whole.folder, config.folder)
        shutil.rmtree(config.folder / "export")  # else the run has finished
        shard = folder_of(config, 3) / "optimizer.rank_00001.safetensors"
        flip_one_bit(shard, shard.stat().st_size - 1)
        by_rank = run_world(processes, train_counting_hashes, config)
        assert [r["step"] for r in records(config, "resumed_from")] == [0, 2]
        assert_same_weights(config, whole, 1e-9)
        assert "step_00000003.old-1" in names(config)
        assert sorted(chain(*by_rank)) == sorted(listed), "each once"
        assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1


def train_failing_on_rank_1(config: Config) -> int:
    """Let rank 1 fail in its first save, as on a full disk."""
    if os.environ["RANK"] == "1":
        limit_file_size(200, failing=1)
    return train_sharded(config)


@pytest.mark.slow
def test_a_rank_that_cannot_write_its_shard_fails_the_save_not_hangs_it(tmp_path):
    config = odd(tmp_path, checkpoints__every_steps=2)
    assert run_world(2, train_failing_on_rank_1, config) == [0, 0]
    assert names(config) == ["step_00000003"]
    assert "rank 1 on" in status(config)["note"]


# ---- exports -------------------------------------------------------------------------------------
Act = Callable[..., Any]  # of what exporting.export is called with, the real one first


def act_for_export(config: Config, act: Act, *given: Any) -> Any:
    """Train, sharded where there are several processes, and return what is done for the export."""
    real, results = exporting.export, []
    exporting.export = lambda *arguments: results.append(act(real, *arguments, *given))
    assert train_sharded(config) == 0
    return results[0]


def whole(model: torch.nn.Module) -> dict[str, Any]:
    """Gather the weights, as arrays: those can be sent."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().numpy()
        for name, t in model.state_dict().items()
    }


@torch.no_grad()
def change_weights(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(1)


def storages() -> dict[int, Any]:
    """Return what the tensors of this process hold, also through arrays and views, by address."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    found = [one.untyped_storage() for one in gc.get_objects() if type(one) in kinds]
    return {storage.data_ptr(): storage for storage in found}


def export_and_go_on(
    real: Any, run: Any, data_info: Any, model: Any, checkpoints: Any, is_saved: bool
) -> tuple[Any, ...]:
    """Export, and export best/ while the weights change.

    Returns:
        The weights, the threads that wrote files, and the bytes that were held before each whole
        tensor of best/ was read, and with it.
    """
    weights = whole(model)
    if is_saved:
        checkpoints._copy_to_host = None  # no shards are written
    else:
        run.step += 1  # of which there is no checkpoint
    real(run, data_info, model, checkpoints)  # makes the buffers
    changed, threads, before, peaks = threading.Event(), [], [], []
    save_tensors, read = exporting.save_tensors, saving.TensorReader.read

    def save_late(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        assert changed.wait(600)
        save_tensors(*arguments)

    def read_counted(*arguments: Any) -> Any:
        before.append(new_bytes())
        tensor = read(*arguments)
        peaks.append(new_bytes())
        return tensor

    def new_bytes() -> int:
        return sum(one.nbytes() for address, one in storages().items() if address not in held)

    exporting.save_tensors, saving.TensorReader.read = save_late, read_counted
    held = storages()
    gc.freeze()  # only newer objects are looked at
    real(run, data_info, model, checkpoints, "best")
    change_weights(model)
    changed.set()
    checkpoints.wait()
    return weights, threads, before, peaks


def assert_exported(config: Config, processes: int, *, is_saved: bool) -> None:
    found = run_world(processes, act_for_export, config, export_and_go_on, is_saved)
    weights, threads, before, peaks = found[0]
    assert threads == ["checkpoint"]
    assert [of_rank[1:] for of_rank in found[1:]] == [([], [], [])] * (processes - 1)
    assert len(before) == len(weights) - 1, "each tensor once, also the tied one"
    assert max(before) == 0, "none is held when the next is read"
    assert max(peaks) == 8 * 6 * 5, "the largest tensor, the tied one"
    for name in ("export", "best"):
        folder = config.folder / name
        _, _, loaded = load_export(folder, ["ragged.Deep"])
        assert_equal(whole(loaded), weights)
        reader = saving.TensorReader(folder, "model")
        assert_equal({key: reader.read(key) for key in reader.shapes}, weights)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
            load_export(folder, ["ragged.Deep"])
    assert not list(config.folder.glob(".[!l]*")), "the files of the shards"
    live = saving.TensorReader(folder_of(config, 3), "model").read("output.weight")
    assert not torch.equal(live, torch.as_tensor(weights["output.weight"])), "it is the average"


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    tensors = ({name: torch.as_tensor(v) for name, v in one.items()} for one in (ours, theirs))
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


def test_best_of_a_sharded_model_is_written_while_training_goes_on(tmp_path):
    """By rank 0, which holds one whole tensor at a time, from the shards of all."""
    assert_exported(odd(tmp_path), 2, is_saved=False)


@pytest.mark.parametrize("processes", quick(1, [1, 2]))
def test_best_is_read_from_the_checkpoint_of_its_step(tmp_path, processes):
    """Also a tied weight, with one average and two names, and a frozen one, which has none."""
    assert_exported(odd(tmp_path), processes, is_saved=True)


def export_with_failures(
    real: Any, run: Any, data_info: Any, model: Any, checkpoints: Any
) -> list[Any]:
    """Export five times, each time other weights.

    The second time the disk is full on rank 0, which writes the files; the fourth time on rank 1,
    which writes its shards.
    """
    save_tensors, save_shards, outcomes = exporting.save_tensors, saving.save_shards, []

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for i in range(5):
        exporting.save_tensors = full if i == 1 else save_tensors
        saving.save_shards = full if (i, run.rank) == (3, 1) else save_shards
        change_weights(model)
        run.step += 1
        for name in ("best", "export"):
            real(run, data_info, model, checkpoints, name)
        paths = () if run.rank else run.folder.glob("*/*.safetensors")
        written = [*map(load_arrays, paths)]  # before a collective, after which rank 1 goes on
        outcomes.append((sorted(checkpoints.failures), whole(model), written))
    return outcomes


@pytest.mark.slow
def test_an_export_that_fails_leaves_the_one_before_and_no_rank_waits(tmp_path):
    config = odd(tmp_path, distributed__startup_timeout_seconds=30)
    written, others = run_world(2, act_for_export, config, export_with_failures)
    both = ["best", "export"]
    assert [failed for failed, *_ in written] == [[], both, [], both, []]
    assert [failed for failed, *_ in others] == [[], [], [], both, []]
    for i, newest in enumerate((0, 0, 2, 2, 4)):
        assert len(written[i][2]) == 2
        for found in written[i][2]:
            assert_equal(found | {"output.weight": found["input.weight"]}, written[newest][1])
    assert not list(config.folder.glob(".[!l]*"))


def buffer_of_rank_0(config: Config) -> list[float]:
    """Broadcast a buffer that is not contiguous."""
    model = torch.nn.Linear(1, 1)
    with accelerators.start_accelerator(config) as accelerator:
        values = torch.full((2, 4), float(accelerator.process_index))
        model.register_buffer("strided", values[:, ::2])
        broadcast_buffers(accelerator, model)
    return model.strided.flatten().tolist()


def test_an_evaluation_takes_a_buffer_that_is_not_contiguous_from_rank_0(tmp_path):
    assert run_world(2, buffer_of_rank_0, make_config(tmp_path)) == [[0.0] * 4] * 2
