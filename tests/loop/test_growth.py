"""What a start, a save and an evaluation cost on more processes: counted, not timed.

Each count is of two numbers of processes, so that what grows with their square is seen.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from my_project import devices, files, optim, sharding
from my_project.checkpoint import resuming, shards, verification
from my_project.config import Config, OptimConfig
from my_project.state import TrainState
from ragged import Ragged
from rank_counts import check_received, counted, objects_counted
from runs import make_config
from test_sharded import checkpoints_of, in_group, train_steps
from world import run_world

KINDS = ("ema", "model", "optimizer")
STATE = TrainState(step=3, items_per_micro_batch=1.0)


# ---- a start that resumes from shards ------------------------------------------------------------
def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build a sharded model whose first dimensions any number of processes here divides."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    fully_shard(model)
    return model, optim.build_optimizer(OptimConfig(lr=0.01), None, model)


def save(rank: int, world: int, config: Config) -> list[str]:
    """Save; return the names of the files that this rank asks for one by one."""
    model, optimizer = build()
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    train_steps(model, optimizer, range(3))
    asked: list[str] = []
    with counted(Path, "exists", lambda path, *_: asked.append(path.name)):
        checkpoints.save(STATE)
        checkpoints.wait()
    return asked


def start(rank: int, world: int, config: Config) -> dict[str, Any]:
    """Open the run and resume; return what this rank opens and hashes, and objects received."""
    from accelerate import Accelerator

    model, optimizer = build()
    checkpoints = checkpoints_of(config, rank, world, model, optimizer)
    opened: list[str] = []
    hashed: list[str] = []
    with (
        counted(shards.SafetensorsFile, "__init__", lambda _, path: opened.append(path.name)),
        counted(files, "fingerprint", lambda path: hashed.append(path.name)),
        objects_counted() as objects,
    ):
        accelerator = Accelerator(cpu=True)
        devices.open_run(accelerator, checkpoints.run, {"config": config}, {"train": 3})
        folder = verification.choose(accelerator, checkpoints.run)
        assert folder
        _, state = checkpoints.resume(accelerator, folder)
    assert state["step"] == 3
    evaluated: list[str] = []  # hashed by `evaluate`
    with counted(files, "fingerprint", lambda path: evaluated.append(path.name)):
        verification.on_main_with_hashes(accelerator, partial(resuming.check, folder))
    found = {"opened": opened, "hashed": hashed, "evaluated": evaluated}
    return found | {"objects": objects["received"]}


def test_a_start_on_more_processes_costs_each_of_them_the_same(tmp_path):
    """Four and eight processes; the only checkpoint, which is hashed before it is loaded."""
    found = {}
    for world in (4, 8):
        config = make_config(tmp_path / str(world))
        asked = run_world(world, in_group, save, config)
        assert not any("rank_" in name for name in asked[0]), "one listing for all ranks"
        found[world] = run_world(world, in_group, start, config)
        wanted = {f"{kind}.rank_{rank:05d}.safetensors" for kind in KINDS for rank in range(world)}
        for kind in ("hashed", "evaluated"):
            hashed = Counter(name for of_rank in found[world] for name in of_rank[kind])
            del hashed["state.json"]
            assert hashed == Counter(wanted), "each file by one rank"
            for of_rank in found[world]:
                assert len(set(of_rank[kind]) - {"state.json"}) == 3, "no rank hashes more"
        for rank, of_rank in enumerate(found[world]):
            own = [f"{kind}.rank_{one:05d}.safetensors" for kind in KINDS for one in {0, rank}]
            assert sorted(of_rank["opened"]) == sorted(own), "names and shapes are in rank 0's"
    received = {world: [of_rank["objects"] for of_rank in found[world]] for world in found}
    check_received(received, each=7)


# ---- an evaluation -------------------------------------------------------------------------------
CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class Matrix(Ragged):
    """A metric with a large sum, and one with a list of all samples."""

    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import BinaryAUROC, MulticlassJaccardIndex

        return {"overlap": MulticlassJaccardIndex(CLASSES), "auroc": BinaryAUROC()}

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        super().update_metrics(model, batch, {"auroc": metrics["auroc"]})
        metrics["overlap"].update(batch["index"] % CLASSES, batch["index"] // 2 % CLASSES)


def evaluate(config: Config) -> Counter[str]:
    """Evaluate; return what this rank sends, receives and reduces."""
    from my_project.evaluate import evaluate

    reduced: list[int] = []
    with devices.start(config) as accelerator:
        model = config.recipe.build_model({"features": 6})
        call = accelerator.prepare_model(sharding.RecipeModule(model), evaluation_mode=True)
        _, sets = config.recipe.build_datasets({"features": 6})
        with (
            objects_counted() as found,
            counted(torch.distributed, "reduce", lambda values, *_: reduced.append(len(values))),
        ):
            evaluate(accelerator, config, call, sets)
    found["reductions"], found["reduced"] = len(reduced), sum(reduced)
    return found


def test_an_evaluation_on_more_processes_sends_each_of_them_the_same(tmp_path):
    """A sum is reduced; it is not gathered, not even on rank 0. Values go to rank 0 alone."""
    config = make_config(tmp_path, Matrix(), batches__global_batch_size=8)
    found = {world: run_world(world, evaluate, config) for world in (2, 4)}
    for of_rank in found.values():
        for one in of_rank:
            assert one["reductions"] == 1
            assert one["reduced"] == CLASSES**2
            assert one["gathered everywhere"] == 0
            assert one["bytes sent"] < 8 * CLASSES**2 / 10
    received = {world: [one["received"] for one in found[world]] for world in found}
    check_received(received, each=1)
