"""Configs for tests, and readers of what a run leaves behind."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ragged import Ragged

from my_project.config import BatchesConfig, Config, OptimConfig, TelemetryConfig

EXPORTED = {  # the files of an export, besides the weights
    *("config.yaml", "data_info.json", "step.json"),
    "README.md",  # model_card
}


def quick(count: int, cases: Any) -> list[Any]:
    """Mark all cases after the first `count` as slow."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*c, marks=[pytest.mark.slow] * (i >= count)) for i, c in enumerate(listed)]


def averaged(decay: float) -> dict[str, Any]:
    """Return the setting of an EMA; {} if the owner has deleted ema.py."""
    return {"optim__ema_decay": decay} if hasattr(OptimConfig, "ema_decay") else {}


def make_config(folder: Path, recipe: Ragged | None = None, **settings: Any) -> Config:
    """Make the config of a short run; settings such as optim__lr override its values."""
    config = Config(
        recipe=recipe or Ragged(),
        batches=BatchesConfig(global_batch_size=16, micro_batch_size=4, workers=0),
        optim=OptimConfig(lr=0.05, warmup_steps=3, clip_norm=1.8),
        telemetry=TelemetryConfig(
            every_steps=1,
            trackers=[],
        ),
        runs_folder=str(folder),
        steps=10,
    )
    if "epochs" in settings:
        settings = {"steps": None} | settings
    return change(config, **settings)


def change(config: Any, **settings: Any) -> Any:
    """Replace settings; a nested setting is written with two underscores."""
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        outer, _, inner = name.partition("__")
        if inner:
            value = change(changed.get(outer, getattr(config, outer)), **{inner: value})
        changed[outer] = value
    return dataclasses.replace(config, **changed)


def records(config: Config, kind: str = "loss") -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl that have a key; by default, those of steps."""
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if kind in record]


def values(config: Config, name: str = "loss") -> list[Any]:
    """Read one value of all records that have it."""
    return [record[name] for record in records(config, name)]


def weights(folder: Path) -> dict[str, Any]:
    """Read exported or saved weights."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def assert_same_weights(
    one: Config, other: Config, tolerance: float = 0.0, part: str = "export"
) -> None:
    """Compare exported weights, or those of another part; to the bit without a tolerance."""
    import torch

    first, second = weights(one.folder / part), weights(other.folder / part)
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def status(config: Config) -> dict[str, Any]:
    return json.loads((config.folder / "status.json").read_text())


def choose(run: Any) -> Path | None:
    """Choose the checkpoint from which a run continues, in this process alone."""
    from accelerate import Accelerator

    from my_project.checkpoint import resuming

    return resuming.choose(Accelerator(cpu=True), run)


def train(config: Config) -> int:
    """Run the real main in this process."""
    from my_project.train import main

    return main(config)
