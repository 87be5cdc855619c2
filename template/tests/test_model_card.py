"""The model card of an export, export/README.md. Delete this with model_card.py."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from ragged import Ragged
from runs import change, make_config, records, train, weights
from world import run_world

from my_project import model_card
from my_project.config import Config

TOKEN = "hf_" + "a" * 34
MOST_LINES = 40


class Named(Ragged):
    """A recipe with the name of a dataset, and with a path."""

    dataset = "squad/plain"
    data_path = "/home/somebody/data"

    def build_datasets(self, data_info):
        train_set, sets = super().build_datasets(data_info)
        return train_set, sets | {"planes": sets["validation"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Config:
    settings = {"evaluation__best_metric": "validation/accuracy", "evaluation__every_steps": 1}
    config = make_config(tmp_path_factory.mktemp("runs"), Named(), steps=4, seed=3, **settings)
    os.environ["HF_TOKEN"] = TOKEN
    try:
        assert run_world(2, train, config) == [0, 0]
    finally:
        del os.environ["HF_TOKEN"]
    return config


def page(config: Config) -> Path:
    return config.folder / "export/README.md"


def test_the_card_says_what_was_trained_on_what_with_which_results(run):
    text = page(run).read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["datasets"] == ["squad/plain"]
    assert "license" not in head
    count = sum(tensor.numel() for tensor in weights(run.folder / "export").values())
    for words in (
        f"`Named` with {count} parameters, trained by `test_model_card.Named`",
        "for 4 steps of 16 samples with seed 3",
        "- dataset: squad/plain\n- the training set: 70 samples\n",
        "- validation set validation: 23 samples\n- validation set planes: 23 samples\n",
    ):
        assert words in body
    evaluations = records(run, "validation/accuracy")
    best = max(evaluations, key=lambda record: record["validation/accuracy"])
    values = [f"{record['validation/accuracy']:.4f}" for record in (evaluations[-1], best)]
    assert f"| metric | last (step 4) | best (step {best['step']}) |" in body
    assert f"| validation/accuracy | {values[0]} | {values[1]} |" in body


def test_the_card_is_short_and_holds_no_path_and_no_secret(run):
    text = page(run).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for word in (TOKEN, str(run.folder.parent), str(Path.cwd()), "/home/", os.uname().nodename):
        assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), word


def test_the_code_of_the_card_loads_the_weights(run, monkeypatch):
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", page(run).read_text())
    monkeypatch.chdir(run.folder)
    monkeypatch.syspath_prepend("")  # as in an interactive session
    exec(code, names := {})
    torch.testing.assert_close(names["model"].state_dict(), weights(run.folder / "export"))


def test_an_edited_card_is_kept_and_any_other_is_written_again(tmp_path):
    config = make_config(tmp_path, Named(), steps=2, optim__schedule="constant")
    for steps in (2, 3):
        assert train(change(config, steps=steps)) == 0
        assert f"for {steps} steps" in page(config).read_text()
    edited = page(config).read_text().replace("## Data", "Mine.\n\n## Data")
    page(config).write_text(edited)
    assert train(change(config, steps=4)) == 0
    assert page(config).read_text() == edited
    assert not (config.folder / "export/model.safetensors").is_symlink()


class WritesCard(Ragged):
    """Its export writes a card, as save_pretrained of a library does."""

    def export(self, model, data_info, tensors, folder):
        if folder:
            (folder / "README.md").write_text("of the recipe")
        return "model", tensors


@pytest.mark.parametrize("is_link", [False, True])
def test_a_card_that_the_recipe_writes_is_kept(tmp_path, is_link):
    config = make_config(tmp_path, WritesCard(), steps=2, optim__schedule="constant")
    assert train(config) == 0
    page(config).write_text("an older one")
    if is_link:
        page(config).unlink()
        page(config).symlink_to(config.folder / "config.yaml")
    assert train(change(config, steps=3)) == 0
    assert page(config).read_text() == "of the recipe"


def test_a_name_that_is_a_path_is_not_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad/plain").touch()
    assert model_card.dataset_name(Named()) == ("", False)
    monkeypatch.setattr(Named, "dataset", "s3://bucket/with?key=1")
    assert model_card.dataset_name(Named()) == ("", False)
