"""Samples that are shown at each evaluation: where they are, and that the run is the same."""

import dataclasses
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project.config import Config
from my_project.records import samples
from ragged import Ragged
from runs import assert_same_weights, change, make_config, quick, records, status, train, weights
from test_fsdp_on_cpu import ask_for_fsdp
from world import run_world

PICTURE = b"not looked at"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown(Ragged):
    """With answers and files; draws random numbers, and fails where it is told to."""

    fails: bool = dataclasses.field(default=False, metadata={"changes_curve": False})

    def predict_samples(self, model: Any, data_info: Any, samples: Any, folder: Path) -> str:
        assert not model.training
        assert isinstance(samples, torch.utils.data.Subset)
        drawn = torch.rand(()), random.random(), np.random.rand()
        (folder / "picture.png").write_bytes(PICTURE)
        (folder / "answers.txt").write_text("a name that the loop uses too")
        (folder / "drawn.txt").write_text(" ".join(f"{float(number):.9f}" for number in drawn))
        if self.fails:
            raise ValueError("no answers\nto show")
        answers = [model(sample["x"][None]) for sample in samples]
        assert not answers[0].requires_grad
        indices = " ".join(str(int(sample["index"])) for sample in samples)
        return f"{float(model[0].weight.sum()):.6f}: {indices}"


def shown_config(folder: Path, recipe: Ragged | None = None, **settings: Any) -> Config:
    settings = {"steps": 2, "evaluation__every_steps": 1} | settings
    return make_config(folder, recipe or Shown(), **settings)


def folders_of(config: Config) -> list[str]:
    return sorted(path.name for path in (config.folder / "samples").iterdir())


def test_an_evaluation_shows_the_weights_that_it_evaluates(tmp_path):
    """They are the averaged ones, which are exported too."""
    config = shown_config(tmp_path, optim__ema_decay=0.5, optim__lr=0.3)
    assert train(config) == 0
    record = records(config, "validation/accuracy")[-1]
    total = float(weights(config.folder / "export")["0.weight"].sum())
    answers = f"{total:.6f}: " + " ".join(str(i * 23 // 8) for i in range(8))
    assert record["sample"] == answers
    assert record["pictures"] == ["samples/step_00000002/picture.png"]
    assert (config.folder / record["pictures"][0]).read_bytes() == PICTURE
    assert (config.folder / "samples/step_00000002/answers.txt").read_text() == answers
    drawn = {path.read_text() for path in config.folder.glob("samples/*/drawn.txt")}
    assert len(drawn) == 1, "the same random numbers at each evaluation"


def test_the_newest_folders_are_kept_and_steps_not_done_yet_are_removed(tmp_path):
    config = shown_config(tmp_path, steps=5, checkpoints__every_steps=3, evaluation__samples=3)
    (config.folder / "samples/step_00000009").mkdir(parents=True)
    (config.folder / "samples/mine").mkdir()
    (config.folder / "samples/step_00000000").write_text("not a folder")
    assert train(config) == 0
    assert folders_of(config) == ["mine", *(f"step_{step:08d}" for step in (3, 4, 5))]
    assert all(r["sample"].endswith(": 0 7 15") for r in records(config, "validation/accuracy"))


def test_what_fails_is_told_in_one_line_and_the_run_goes_on(tmp_path, caplog):
    config = shown_config(tmp_path, Shown(fails=True), evaluation__sanity_check=False)
    assert train(config) == 0
    assert status(config)["outcome"] == "finished"
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("records.samples")]
    sentence = "the samples of this evaluation are left out: ValueError: no answers to show"
    places = [line.removeprefix(sentence) for line in lines]
    assert len(places) == 2
    assert all(re.fullmatch(r" \(\S+test_samples\.py, line \d+\)", place) for place in places)


def test_an_evaluation_is_recorded_without_samples_if_tmp_is_full(tmp_path, caplog, monkeypatch):
    config = shown_config(tmp_path, evaluation__sanity_check=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert train(config) == 0
    assert ["sample" in r for r in records(config, "validation/accuracy")] == [False, False]
    assert caplog.text.count("the samples of this evaluation are left out: FileNotFoundError") == 2


def test_an_exception_of_a_loader_worker_is_told_without_its_traceback(caplog):
    with samples.reported():
        raise ValueError(
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent"
            f' call last):\n  File "{__file__}", line 7, in __getitem__\nValueError: no sample 3\n'
        )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "left out: ValueError: no sample 3 (in a loader worker) (" in line
    assert line.endswith("test_samples.py, line 7)")


@pytest.mark.slow
def test_the_curve_is_the_same_without_samples_and_where_they_fail(tmp_path):
    recipe = Shown(dropout=0.3, batch_norm=True)
    shown = shown_config(tmp_path, recipe, steps=4, evaluation__sanity_check=False)
    plain = change(shown, run_name="plain", evaluation__samples=0)
    failing = change(shown, run_name="failing", recipe__fails=True)
    for config in (plain, shown, failing):
        assert run_world(2, train, config) == [0, 0]
        ours, theirs = records(config, "loss"), records(plain, "loss")
        assert [record["loss"] for record in ours] == [record["loss"] for record in theirs]
        assert_same_weights(config, plain)
    assert len(folders_of(shown)) == 3, "of rank 0 alone"


# ---- several processes ---------------------------------------------------------------------------
def train_on_each(config: Config, sharded: bool) -> int:
    if sharded:
        ask_for_fsdp()
    return train(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnEachRank(Shown):
    """Notes each call; fails on one rank."""

    notes: str = ""
    fails_on: int = -1

    def predict_samples(self, model: Any, data_info: Any, samples: Any, folder: Path) -> str:
        if os.environ["RANK"] == str(self.fails_on):
            raise ValueError("no answers on this rank")
        total = sum(float(model(sample["x"][None]).sum()) for sample in samples)
        (Path(self.notes) / os.environ["RANK"]).write_text(f"{folder} {total:.6f}")
        (folder / "picture.png").write_bytes(PICTURE)
        return f"{total:.6f}"


def each_config(folder: Path, **settings: Any) -> Config:
    recipe = OnEachRank(notes=str(folder), **settings)
    return shown_config(folder, recipe, steps=1, evaluation__sanity_check=False)


@pytest.mark.parametrize("sharded", quick(1, [False, True]))
def test_the_whole_model_answers_and_rank_0_writes(tmp_path, sharded):
    """Of a sharded model every rank answers, since each holds only a part of it."""
    config = each_config(tmp_path)
    assert run_world(2, train_on_each, config, sharded) == [0, 0]
    paths = [tmp_path / "0", tmp_path / "1"]
    assert [path.exists() for path in paths] == [True, sharded]
    notes = [path.read_text().split() for path in paths if path.exists()]
    assert len({answer for _, answer in notes}) == 1
    assert len({folder for folder, _ in notes}) == len(notes)
    assert not any(Path(folder).exists() for folder, _ in notes), "thrown away"
    (record,) = records(config, "validation/accuracy")
    assert record["sample"] == notes[0][1]
    assert record["pictures"] == ["samples/step_00000001/picture.png"]


def train_without_tmp_on_rank_1(config: Config) -> int:
    if os.environ["RANK"] == "1":
        tempfile.tempdir = "/missing"
    return train_on_each(config, True)


def test_a_sharded_run_goes_on_if_one_rank_has_no_folder_for_samples(tmp_path):
    config = each_config(tmp_path)
    assert run_world(2, train_without_tmp_on_rank_1, config) == [0, 0]
    assert not any("sample" in record for record in records(config, "validation/accuracy"))


@pytest.mark.slow
def test_an_error_in_a_sharded_model_ends_the_run(tmp_path):
    """The other ranks might wait in a gather for the one that failed."""
    with pytest.raises(RuntimeError, match="no answers on this rank"):
        run_world(2, train_on_each, each_config(tmp_path, fails_on=0), True)
