"""Promise 7: saved weights load without accelerate, whatever wrapped the model."""

import os
from typing import Any

import pytest
import torch
from ragged import Ragged
from runs import make_config, train, weights
from safetensors import safe_open
from safetensors.torch import load_file
from world import run_world

from my_project.checkpoint import exporting, saving
from my_project.checkpoint.saving import Checkpoints
from my_project.config import Config
from my_project.run_folder import Run


def train_compiled(config: Config) -> int:
    """Train with torch.compile, as with accelerate's dynamo settings."""
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "AOT_EAGER"  # the whole path without a C++ compiler
    return train(config)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """The export of a run of 2 processes."""
    config = make_config(tmp_path_factory.mktemp("runs"), Ragged(dropout=0.1), steps=3)
    run_world(2, train, config)
    return config.folder / "export"


def test_exports_have_the_plain_keys_whatever_wrapped_the_model(tmp_path, export):
    plain = Ragged().build_model({"features": 6})
    for name, function in {"plain": train, "compiled": train_compiled}.items():
        config = make_config(tmp_path, Ragged(dropout=0.1), steps=3, run_name=name)
        run_world(1, function, config)
        exported = weights(config.folder / "export")
        assert exported.keys() == plain.state_dict().keys() == weights(export).keys()
        plain.load_state_dict(exported, strict=True)
        with safe_open(config.folder / "export/model.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt"}, "the same as save_pretrained writes"
        for key, value in exported.items():  # the same run, whatever wrapped it
            torch.testing.assert_close(value, weights(export)[key], rtol=1e-4, atol=1e-5)


class Chosen(Ragged):
    def export(self, model: Any, data_info: Any, tensors: Any, folder: Any) -> Any:
        if folder:
            (folder / "beside").mkdir()
            (folder / "beside/text.txt").touch()
        return "mine", {f"my.{name}": tensor for name, tensor in tensors.items()}


def test_a_recipe_names_the_file_and_tensors_and_writes_files_beside(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(saving, "flush_to_disk", flushed.append)
    config = make_config(tmp_path, Chosen())
    run = Run(config, 0)
    run.folder.mkdir(parents=True, exist_ok=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    exporting.export(run, {"features": 6}, model, Checkpoints(run, model, optimizer, None))
    assert load_file(run.folder / "export/mine.safetensors").keys() == {"my.weight", "my.bias"}
    assert (run.folder / "export/beside/text.txt").is_file()
    assert any(path.match(".export_*.partial/beside/text.txt") for path in flushed)
