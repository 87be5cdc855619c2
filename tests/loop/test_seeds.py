"""What a recipe draws before the loop is the same on every rank and in every start."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project import contract
from ragged import QUIET, Ragged
from runs import assert_same_weights, make_config, train, weights
from test_launch import launch
from torch.utils.data import Subset, random_split
from world import run_world

COUNT = 70


def by_sklearn() -> list[int]:
    from sklearn.model_selection import train_test_split

    return train_test_split(range(COUNT))[0]


def by_datasets() -> list[int]:
    from datasets import Dataset

    halves = Dataset.from_dict({"at": [*range(COUNT)]}).train_test_split(0.25)
    return halves["train"].to_dict()["at"]


SPLITS: dict[str, Callable[[], list[int]]] = {
    "sklearn": by_sklearn,
    "datasets": by_datasets,
    "numpy": lambda: [*np.random.permutation(COUNT).tolist()][:50],
    "random": lambda: random.sample(range(COUNT), 50),
    "torch": lambda: [*torch.randperm(COUNT).tolist()][:50],
    "random_split": lambda: random_split(range(COUNT), [50, 20])[0].indices,  # type: ignore
}


@dataclass(frozen=True, kw_only=True)
class Drawing(Ragged):
    """Draws its split in two methods, and its weights; notes what it has drawn in a folder."""

    notes: str = field(default=".", metadata=QUIET)

    def prepare_data(self) -> dict[str, Any]:
        drawn = {name: split() for name, split in SPLITS.items()}
        disturb(int.from_bytes(os.urandom(4)))  # where a cache is found, less is drawn
        return super().prepare_data() | drawn

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        train, validation_sets = super().build_datasets(data_info)
        drawn = {name: split() for name, split in SPLITS.items()}
        rank, folder = os.environ.get("RANK", "0"), Path(self.notes)
        path = folder / f"{rank}_{len([*folder.glob(f'{rank}_*')])}.json"
        path.write_text(json.dumps([data_info, drawn]))
        return Subset(train, drawn["numpy"]), validation_sets

    def build_model(self, data_info: dict[str, Any]) -> Any:
        model = super().build_model(data_info)
        with torch.no_grad():
            model[0].bias.copy_(torch.from_numpy(np.random.randn(8)))
            model[0].weight.fill_(random.random())
        model.register_buffer("kept", torch.tensor(np.random.random()))
        return model


def disturb(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def disturb_and_train(config: Any, start: int) -> int:
    """Train where each rank and each start has other random states, as processes have."""
    disturb(1000 * start + int(os.environ.get("RANK", "0")))
    return train(config)


def test_a_split_is_the_same_on_ranks_in_starts_and_for_seeds(tmp_path):
    recipe = Drawing(notes=str(tmp_path))
    config = make_config(tmp_path, recipe, steps=1)
    other = make_config(tmp_path, recipe, seed=1, steps=1, run_name="other")
    run_world(2, disturb_and_train, config, 1)
    run_world(1, disturb_and_train, config, 2)
    run_world(1, disturb_and_train, other, 3)
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert len(texts) == 4
    first = json.loads(texts["0_0.json"])
    for name, text in texts.items():
        for ours, drawn in zip(first, json.loads(text), strict=True):
            assert {split for split in SPLITS if ours[split] != drawn[split]} == set(), name
    # each method draws from a seed of its own
    assert first[0]["numpy"] != first[1]["numpy"]


@pytest.mark.slow
def test_processes_of_another_launcher_draw_the_same_split(tmp_path, monkeypatch):
    """Each process of accelerate launch begins with random states of its own; ours are forks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    settings = ("--recipe", "test_seeds.Drawing", f"--recipe.notes={tmp_path}", "--steps", "1")
    with launch(tmp_path, *settings) as process:
        output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    texts = [path.read_text() for path in tmp_path.glob("*_0.json")]
    assert len(texts) == 2
    assert len({*texts}) == 1


@pytest.mark.slow
def test_weights_that_numpy_and_random_draw_follow_from_the_seed(tmp_path):
    recipe = Drawing(notes=str(tmp_path))
    configs = [make_config(tmp_path, recipe, steps=1, run_name=name) for name in "ab"]
    configs.append(make_config(tmp_path, recipe, steps=1, run_name="c", seed=1))
    for start, config in enumerate(configs):
        run_world(1, disturb_and_train, config, start)
    a, b, c = configs
    assert_same_weights(a, b)
    exported = weights(a.folder / "export"), weights(c.folder / "export")
    for name in ("0.weight", "0.bias", "kept"):
        assert not torch.equal(exported[0][name], exported[1][name]), name


def test_a_command_builds_the_model_that_training_built(tmp_path):
    config = make_config(tmp_path, Drawing(), seed=3)
    models = []
    for start in range(2):
        disturb(start)
        models.append(contract.build_model(config, {"features": 6}).state_dict())
    torch.testing.assert_close(*models, rtol=0, atol=0)
