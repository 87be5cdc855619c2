"""The commands evaluate, predict, export. Delete this with commands.py (AGENTS.md)."""

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Ragged
from runs import averaged, change, make_config, records, status, train, values, weights
from safetensors.torch import load_file
from test_metrics import Variational
from test_resume import interrupted_at
from torch import nn
from world import TESTS, run_world

from my_project import commands
from my_project import weights as weights_module
from my_project.config import Config, ConfigError
from my_project.manifest import manifest_text
from my_project.run_files import checkpoints
from my_project.weights import load, refuse_trained_view, trained_steps


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """The export of a run of 2 processes."""
    config = make_config(tmp_path_factory.mktemp("runs"), Ragged(dropout=0.1), steps=3)
    run_world(2, train, config)
    return config.folder / "export"


def test_predict_answers_without_accelerate_data_or_network(export):
    """In a process without accelerate, network and training data."""
    code = (
        "import socket, sys\n"
        "for name in ('accelerate', 'datasets', 'tensorboard'): sys.modules[name] = None\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "from ragged import Ragged\n"
        "def gone(self, data_info=None, /): raise AssertionError('needs no training data')\n"
        "def prepare(self): gone(self)\n"
        "Ragged.build_datasets, Ragged.prepare_data = gone, prepare\n"
        "from my_project.commands import predict\n"
        "predict(sys.argv[1:])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, "--trust", "ragged.Ragged", export, "0.5"],
        capture_output=True, text=True, check=False, cwd=TESTS,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    model = Ragged().build_model({"features": 6}).eval()
    model.load_state_dict(weights(export))
    assert float(answer.stdout) == pytest.approx(model(torch.full((1, 1, 6), 0.5)).item(), abs=1e-6)


# ---- one file ------------------------------------------------------------------------------------
def test_the_command_export_writes_the_weights_of_an_export(export, tmp_path, capsys):
    path = tmp_path / "one.safetensors"
    commands.write_one_file(argparse.Namespace(folder=str(export), file=str(path), ema=False))
    torch.testing.assert_close(load_file(path), weights(export), rtol=0, atol=0)
    assert "4 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_the_command_export_refuses_what_is_not_a_checkpoint(export, tmp_path, folder):
    given = export.parent / folder
    arguments = argparse.Namespace(folder=str(given), file=str(tmp_path / "one"), ema=False)
    with pytest.raises(ConfigError, match="does not exist, or is not a complete checkpoint"):
        commands.write_one_file(arguments)


def test_an_untrusted_manifest_need_not_have_an_optimizer_and_has_the_step(tmp_path):
    folder = tmp_path / "step_00000100.old-1"
    folder.mkdir()
    for state in ({"step": 100}, {"step": 100, "optimizer": "x"}):
        content = {"format": 1, "step": 100, "files": {}, "resumed_from": None, "state": state}
        (folder / "manifest.json").write_text(manifest_text(content))
        refuse_trained_view(folder)
    assert trained_steps(folder) == 100


# ---- validation samples --------------------------------------------------------------------------
class Shown(Ragged):
    """Answers for samples with their indices, and with a file; a subfolder is ignored."""

    def predict_samples(self, model: Any, data_info: Any, samples: Any, folder: Path) -> str:
        assert not model.training
        assert not model(samples[0]["x"]).requires_grad
        (folder / "predictions.txt").write_text("answers")
        (folder / "samples").mkdir()  # the run has a folder of this name
        return " ".join(str(int(sample["index"])) for sample in samples)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A finished run with best/ and export/."""
    settings = {"evaluation__best_metric": "validation/accuracy", "evaluation__every_steps": 1}
    config = make_config(tmp_path_factory.mktemp("shown"), Shown(), steps=2, **settings)
    assert train(config) == 0
    return config.folder


def run_here(*words: Any) -> None:
    trusted = ("--trust", "test_commands.Shown", "--trust", "ragged.Ragged")
    commands.print_prediction(commands.parse_predict([*trusted, *map(str, words)]))


def test_a_run_answers_for_evenly_spaced_validation_samples(shown, capsys):
    run_here(shown)
    out, err = capsys.readouterr()
    assert err == f"weights: {shown}/best\n"
    answers, path = out.splitlines()
    assert answers == " ".join(str(i * 23 // 16) for i in range(16))
    assert path == f"{shown}/predictions.txt"
    assert Path(path).read_text() == "answers"


def test_an_input_that_cannot_be_read_is_one_sentence(shown, monkeypatch):
    def refuse(*_: Any) -> str:
        raise OSError("cannot identify image file")

    monkeypatch.setattr(Shown, "predict", refuse)
    with pytest.raises(ConfigError, match="cannot identify image file"):
        run_here(shown, "text.png")


def test_files_replace_a_strangers_link_and_avoid_a_read_only_folder(
    shown, tmp_path, monkeypatch, capsys
):
    """Even for an export that was handed on without its run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given = shutil.copytree(shown / "export", tmp_path / "given")
    (tmp_path / "mine").write_text("kept")
    (given / "predictions.txt").symlink_to(tmp_path / "mine")
    run_here(given)
    assert capsys.readouterr().out.splitlines()[-1] == f"{given}/predictions.txt"
    assert (tmp_path / "mine").read_text() == "kept"
    assert not (given / "predictions.txt").is_symlink()

    (given / "predictions.txt").unlink()
    before = sorted(given.iterdir())
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != given and really(path, mode))
    run_here(given)
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert path.read_text() == "answers"
    assert path.parent.parent == tmp_path
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(given.iterdir()) == before

    monkeypatch.setattr(Shown, "predict_samples", lambda *_: "no file")
    before = sorted(tmp_path.iterdir())
    run_here(given)
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_means_its_best_weights_or_else_its_export(shown, tmp_path, capsys):
    run = shutil.copytree(shown, tmp_path / "run")
    for folder, name in ((run, "best"), (run, "export"), (run / "export", "")):
        run_here(folder, "0.5")
        out, err = capsys.readouterr()
        assert err == (f"weights: {run}/{name}\n" if name else "")
        assert float(out)
        shutil.rmtree(run / "best", ignore_errors=True)
    shutil.rmtree(run / "export")
    for words in (["0.5"], []):
        with pytest.raises(ConfigError, match=r"step_\d+ is a checkpoint"):
            run_here(run, *words)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match=r"run holds neither .*; give a run folder"):
        run_here(run, "0.5")
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        run_here(tmp_path / "nowhere")


def test_data_that_is_not_that_of_the_training_is_a_warning(shown, tmp_path, capsys):
    export = shutil.copytree(shown / "export", tmp_path / "export")
    (export / "data_info.json").write_text(json.dumps({"features": 6, "classes": ["other"]}))
    run_here(export)
    assert "warning: the weights were trained on other data" in capsys.readouterr().err


def test_rounding_nan_and_links_are_no_other_data(tmp_path, capsys):
    """As on another CPU, and in a cache of the Hugging Face Hub."""
    info = {"mean": [0.1, 1e-17], "missing": float("nan"), "names": ["a", "b"], "features": 6}
    (tmp_path / "blob").write_text(json.dumps(info | {"mean": [0.1 + 1e-9, -3e-17]}))
    (tmp_path / "data_info.json").symlink_to(tmp_path / "blob")
    commands.warn_of_other_data(info, tmp_path)
    assert not capsys.readouterr().err
    for other in ({"mean": [0.2, 1e-17]}, {"names": ["b", "a"]}, {"features": 7}, {"added": 1}):
        commands.warn_of_other_data(info | other, tmp_path)
        assert "trained on other data" in capsys.readouterr().err


def test_an_evaluation_with_other_data_than_the_training_is_a_warning(tmp_path, capsys):
    """Such as another mean, by which the recipe normalizes: the metrics would change in silence."""
    config = make_config(tmp_path, Ragged(), steps=2)
    assert run_world(1, train, config) == [0]
    (checkpoint,) = checkpoints(config.folder)
    arguments = argparse.Namespace(trust=["ragged.Ragged"], json=True, follow=True)
    for is_changed in (False, True):
        if is_changed:
            (config.folder / "export/data_info.json").write_text('{"features": 6, "mean": 0.5}')
        for folder in (config.folder, config.folder / "export", checkpoint):
            arguments.folder = str(folder)
            assert commands.print_evaluation(arguments) == 0
            warned = "warning: the weights were trained on other data" in capsys.readouterr().err
            assert warned == is_changed


@dataclass(frozen=True, kw_only=True)
class Compiled(Ragged):
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return torch.compile(super().build_model(data_info), backend="eager")


def load_after_a_resume(config: Config) -> list[Any]:
    """Train, resume, and return the weights of the exported model."""
    train(change(config, steps=3))
    train(config)
    _, _, model = load(config.folder / "export", ["test_commands.Compiled"])
    return [weight.tolist() for weight in model.state_dict().values()]


def test_a_recipe_may_compile_its_model_itself(tmp_path):
    config = make_config(tmp_path, Compiled(), steps=5)
    (loaded,) = run_world(1, load_after_a_resume, config)
    plain = Ragged().build_model({"features": 6}).state_dict().keys()
    exported = weights(config.folder / "export")
    assert exported.keys() == plain
    assert loaded == [exported[key].tolist() for key in plain]


# ---- evaluate ---------------------------------------------------------------------------------
def evaluate(folder: Path, is_json: bool = True) -> None:
    trust = ["test_metrics.Variational"]
    arguments = argparse.Namespace(folder=str(folder), trust=trust, json=is_json)
    assert commands.print_evaluation(arguments) == 0


def evaluate_while_training(folder: Path, is_replaced: bool) -> str:
    """Evaluate; rank 1 sees a newer checkpoint or other weights; return the folder or the error."""
    loaded: list[str] = []
    load_weights, rank = weights_module.load_weights, int(os.environ["RANK"])
    weights_module.load_weights = lambda *these: (
        loaded.append(these[0].name) or load_weights(*these)
    )
    if not is_replaced:
        weights_module.weights_folder = lambda run: checkpoints(run)[rank]
    elif rank == 1:
        weights_module.trained_steps = lambda _: 2
    arguments = argparse.Namespace(folder=str(folder), trust=["ragged.Ragged"], json=True)
    try:
        commands.print_evaluation(arguments)
    except ConfigError as error:
        return str(error)
    return loaded[0]


def test_all_ranks_evaluate_the_weights_that_rank_0_chooses(tmp_path):
    """A run in training saves, or replaces best/, between what two ranks do."""
    config = make_config(tmp_path, Ragged(), steps=4, checkpoints__every_steps=2)
    assert run_world(2, train, config) == [0, 0]
    names = run_world(2, evaluate_while_training, config.folder, False)
    assert names == ["step_00000002"] * 2
    for error in run_world(2, evaluate_while_training, config.folder / "export", True):
        assert "export on rank(s) [1]" in error


def test_a_resume_and_the_command_evaluate_as_the_uninterrupted_run(tmp_path, capsys):
    """With averaged weights, and a loss that draws random numbers and depends on the step."""
    recipe = Variational(validation_samples=23, dtype="float64")
    settings = {"batches__global_batch_size": 8, "batches__micro_batch_size": 2, "steps": 6}
    settings |= {"evaluation__every_steps": 2, **averaged(0.9)}
    alone, resumed = (make_config(tmp_path, recipe, run_name=name, **settings) for name in "ab")
    assert run_world(1, train, alone) == [0]
    assert run_world(2, train, interrupted_at(resumed, 2)) == [75, 75]
    assert status(resumed)["step"] == 4
    assert len(records(resumed, "validation/loss")) == 1, "the next start does that of step 4"
    assert run_world(4, train, resumed) == [0] * 4
    wanted = values(alone, "validation/loss")
    assert len(wanted) == 3
    assert values(resumed, "validation/loss") == pytest.approx(wanted, rel=1e-6)
    checkpoint, last = checkpoints(resumed.folder)
    if averaged(0.9):
        exported, raw = weights(resumed.folder / "export"), weights(last)
        assert not any(torch.equal(exported[name], raw[name]) for name in exported)
    for folder, value in (resumed.folder, wanted[2]), (checkpoint, wanted[1]):
        capsys.readouterr()
        evaluate(folder)
        assert json.loads(capsys.readouterr().out)["validation/loss"] == pytest.approx(value)
    evaluate(resumed.folder, is_json=False)
    table = capsys.readouterr().out
    assert "validation/loss" in table
    assert f"{wanted[2]:.4f}" in table

    path = resumed.folder / "export/config.yaml"
    path.write_text(path.read_text().replace("precision: null", "precision: fp16"))
    evaluate(path.parent)  # a run of a GPU

    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-3] ^= 64
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged: its hash is not"):
        evaluate(checkpoint)
