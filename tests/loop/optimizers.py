"""What each optimizer of torch does with each kind of weight: a table.

A model is trained for a few steps, and then again from the checkpoint in the middle: in one
process, on two under DDP, and on two under FSDP2. The words in the cells are

    ok             both runs end with the same weights and optimizer state, bit for bit; under DDP
                   and FSDP2 these equal those of one process, except for rounding
    error          training, saving or resuming raised an error
    another curve  neither of these; no cell may have this
"""

import gc
import importlib
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from my_project.checkpoint.shards import TensorReader
from my_project.config import Config
from ragged import Ragged
from runs import change, make_config, records, train
from torch import Tensor, nn
from world import World, free_port

STEPS, MIDDLE = 4, 2
ROUNDING = 1e-6  # in float64
BFLOAT16 = 0.02  # for Muon, which rounds to bfloat16: sharded sums are rounded elsewhere
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD with momentum": {"momentum": 0.9},
}
CLASSES = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]
OPTIMIZERS = sorted({*CLASSES, *ARGUMENTS} - {"Optimizer"})
WEIGHTS = ("matrices", "channels_last", "expanded", "0-dim", "sparse")
PROCESSES = {"one": 1, "DDP": 2, "FSDP2": 2}

Cell = tuple[str, str, str]  # optimizer, kind of weight, one of PROCESSES
Outcome = tuple[str, str]  # a word, and why


class Layers(nn.Module):
    """Layers with weights of such a kind; without biases, since Muon takes matrices only."""

    def __init__(self, features: int, kind: str) -> None:
        super().__init__()
        drawn = 0.5 * torch.randn(features, 8, dtype=torch.float64)
        weights = {
            "channels_last": [drawn.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)],
            "matrices": [
                drawn,
                drawn.repeat_interleave(2, 1)[:, ::2],  # every second
                drawn[:, :features].contiguous(),  # tied to another
            ],
            "expanded": [drawn[:1].expand(features, 8)],
        }.get(kind, [drawn])
        self.first = nn.ParameterList(weights)
        self.last = nn.Parameter(drawn[0, :, None].clone())
        self.scale = nn.Parameter(drawn[0, 0].clone()) if kind == "0-dim" else 1
        if kind == "matrices":
            self.second = self.first[2]

    def forward(self, x: Tensor) -> Tensor:
        hidden = [torch.tanh(x @ weight.flatten(1)) for weight in self.first]
        if len(hidden) > 1:
            hidden[2] = nn.functional.pad(torch.tanh(hidden[2] @ self.second), (0, 2))
        return sum(hidden) @ self.last * self.scale


class Sparse(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input * 4).long() % 16).sum(-2)


@dataclass(frozen=True, kw_only=True)
class Odd(Ragged):
    """The samples of Ragged for a model with a weight of this kind."""

    weight: str
    dtype: str = "float64"
    validation_samples: int = 0

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        if self.weight == "sparse":
            return Sparse(16, 1, sparse=True, dtype=torch.float64)
        return Layers(data_info["features"], self.weight)


def external(package: str) -> list[str]:
    """Return the class paths of the optimizers that a package exports."""
    found = vars(importlib.import_module(package)).items()
    kinds = {name: kind for name, kind in found if isinstance(kind, type)}
    own = [name for name, kind in kinds.items() if package.startswith(kind.__module__[:5])]
    return [f"{package}.{name}" for name in own if issubclass(kinds[name], torch.optim.Optimizer)]


def train_external(folder: Path, paths: list[str]) -> dict[str, str]:
    """Train by each, and again from the middle: refused by the second step, ok, or what is wrong.

    Those that need arguments, or other weights, raise an error of their own in the first step.
    """
    warnings.simplefilter("ignore")
    outcomes = {}
    for path in paths:
        config = make_config(
            folder, run_name=path, steps=6, checkpoints__every_steps=3, optim__class_path=path,
            optim__clip_norm=None, optim__warmup_steps=0, optim__schedule="constant",
        )  # fmt: skip
        middle = config.folder / "checkpoints/step_00000003"
        resumed = change(config, run_name=f"{path}_resumed", resume=str(middle))
        try:
            train(config)
            train(resumed)
            names = differing(config, resumed, 0.0, step=6)
            outcomes[path] = f"another curve: {names}" if names else "ok"
        except Exception as error:
            has_begun = (config.folder / "metrics.jsonl").exists()
            is_late = has_begun and len(records(config)) > 2
            outcomes[path] = f"{'late' if is_late else 'refused'}: {error!r}"
        gc.freeze()
    return outcomes


def run_config(folder: Path, cell: Cell) -> Config:
    optimizer, weight, _ = cell
    return make_config(
        folder,
        Odd(weight=weight),
        run_name=".".join(cell),
        steps=STEPS,
        checkpoints__every_steps=MIDDLE,
        optim__class_path=f"torch.optim.{optimizer.split()[0]}",
        optim__init_args=ARGUMENTS.get(optimizer, {}),
    )


def final(config: Config, step: int) -> dict[str, Tensor]:
    """Return weights and optimizer state after its last step, by name."""
    folder = config.folder / f"checkpoints/step_{step:08d}"
    kinds = {file.name.split(".")[0] for file in folder.glob("*.safetensors")}
    readers = [TensorReader(folder, kind) for kind in kinds]
    return {f"{r.kind} {name}": r.read(name) for r in readers for name in r.shards}


def differing(ours: Config, theirs: Config, rounding: float, step: int = STEPS) -> list[str]:
    one, other = final(ours, step), final(theirs, step)
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.allclose(one[name], other[name], rtol=rounding, atol=rounding)
    )


def train_and_resume(config: Config, resumed: Config, ports: Iterable[int]) -> Outcome:
    for one, port in zip((config, resumed), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # no rank may find the store of the run before
        try:
            train(one)
        except Exception as error:
            return "error", f"{type(error).__name__}: {error}".splitlines()[0]
        gc.freeze()  # else each run begins with a look at all that the ones before have left
    return "ok", ""


def train_each(runs: list[Any], layout: str) -> list[Outcome]:
    """Train each config, and again from the middle; called in all processes of a world."""
    warnings.simplefilter("ignore")  # of torch, of sparse tensors
    if layout == "FSDP2":
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    return [train_and_resume(*run) for run in runs]


def table(folder: Path, cells: list[Cell]) -> dict[Cell, Outcome]:
    """Return the outcome of each cell."""
    found: dict[Cell, Outcome] = {}
    worlds = {}
    for layout, processes in PROCESSES.items():
        runs = []
        for cell in (cell for cell in cells if cell[2] == layout):
            config = run_config(folder, cell)
            middle = config.folder / f"checkpoints/step_{MIDDLE:08d}"
            resumed = change(config, run_name=f"{config.run_name} resumed", resume=str(middle))
            runs.append((config, resumed, (free_port(), free_port())))
        worlds[layout] = runs, World(processes, train_each, runs, layout)
    for layout, (runs, world) in worlds.items():
        outcomes = world.results(550)[0]
        for (config, resumed, _), outcome in zip(runs, outcomes, strict=True):
            optimizer, weight, _ = config.run_name.split(".")
            cell, alone = (optimizer, weight, layout), (optimizer, weight, "one")
            found[cell] = outcome
            if outcome[0] == "ok" and (names := differing(config, resumed, 0.0)):
                found[cell] = "another curve", f"after a resume: {', '.join(names)}"
            elif outcome[0] == "ok" and found.get(alone, outcome)[0] == "ok":
                is_rounded = (optimizer, layout) == ("Muon", "FSDP2")
                rounding = BFLOAT16 if is_rounded else ROUNDING
                if names := differing(config, run_config(folder, alone), rounding):
                    found[cell] = "another curve", f"in one process: {', '.join(names)}"
    return found
