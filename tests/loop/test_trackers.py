"""What trackers get; a tracker that fails neither ends the run nor affects another tracker."""

import dataclasses
import json
import logging
import os
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import tracking
from accelerate.utils import LoggerType
from my_project.config import Config
from my_project.records import trackers
from ragged import Noting, Ragged
from runs import change, make_config, quick, status, train
from world import run_world


def needs(*packages: str) -> Any:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, not installed")


# ---- failures ------------------------------------------------------------------------------------
class Stub(tracking.GeneralTracker):
    """Note what it is given, and fail where it is told to."""

    requires_logging_directory = False
    fails_in: tuple[str, ...] = ()
    how = "raise"
    calls: list[tuple]

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self._called("init", (project, options))

    def _called(self, what: str, value: Any = None) -> None:
        self.calls.append((what, value))
        if what not in self.fails_in:
            return
        if self.how == "hang":
            threading.Event().wait()
        if self.how == "no_grad":
            torch.set_grad_enabled(False)
            return
        error = SystemExit if self.how == "exit" else RuntimeError
        raise error(f"{self.name} refuses\nto {what}")

    @property
    def tracker(self) -> Any:
        return SimpleNamespace(
            url="https://me:hidden@example.org/run", dir="",
            finish=lambda exit_code: self._called(f"finish with {exit_code}"),
        )  # fmt: skip

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict) -> None:
        self._called("config", dict(values))

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self._called("log", step if values else None)
        values.clear()  # what one does to it is no other's concern

    def finish(self) -> None:
        self._called("finish")


@pytest.fixture
def stubs(monkeypatch):
    """Put stubs in the places of two trackers that accelerate knows."""
    made = {}
    for name in ("aim", "wandb"):
        made[name] = type(name, (Stub,), {"name": name, "calls": []})
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, made[name])
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.AIM, LoggerType.WANDB])
    return made


def run_config(folder: Any) -> Config:
    names = ["aim", "wandb"]
    return make_config(folder, steps=2, telemetry__trackers=names, evaluation__sanity_check=False)


HANGS = [("start", "hang"), ("finish", "hang")]
FAILS = [(where, "raise") for where in ("init", "config", "finish")]
HOWS = [("log", how) for how in ("raise", "hang", "exit", "no_grad")]


@pytest.mark.parametrize(("where", "how"), quick(2, [*HOWS, *FAILS, *HANGS]))
def test_a_tracker_that_fails_is_named_and_loses_only_its_own_records(
    tmp_path, stubs, caplog, monkeypatch, where, how
):
    monkeypatch.setattr(trackers, "START_SECONDS", 30.0 if how != "hang" else 0.3)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 30.0 if how != "hang" else 0.3)
    stubs["aim"].fails_in, stubs["aim"].how = (where,), how
    config = run_config(tmp_path)
    assert train(config) == 0
    assert status(config)["outcome"] == "finished"
    assert (config.folder / "export/model.safetensors").is_file()
    logged = [step for what, step in stubs["wandb"].calls if what == "log"]
    assert set(logged) == {1, 2}
    assert status(config)["trackers"]["wandb"] == "https://***@example.org/run"
    assert stubs["wandb"].calls[-1][0] == "finish"
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == {"no_grad": 0, "hang": 1 + (where == "start")}.get(how, 1)
    assert all(error.startswith("tracker aim ") for error in errors)
    if how != "no_grad":
        assert stubs["aim"].calls[-1][0] == where, "it is asked for nothing more"


def test_a_slow_tracker_loses_records_and_training_does_not_wait(
    tmp_path, stubs, caplog, monkeypatch
):
    monkeypatch.setattr(trackers, "MAX_WAITING", 1)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.3)
    stubs["aim"].fails_in, stubs["aim"].how = ("log",), "hang"
    config = change(run_config(tmp_path), steps=6, telemetry__trackers=["aim"])
    assert train(config) == 0
    assert caplog.text.count("tracker aim loses records: its queue already holds 1 records") == 1
    assert "tracker aim did not finish within 0 s; it may lack records" in caplog.text


def test_a_tracker_whose_queue_is_full_at_the_end_is_finished_too(monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 1)
    may_go_on, calls = threading.Event(), []
    tracker = SimpleNamespace(finish=lambda: calls.append("finish"))
    thread = trackers.TrackerThread("aim", lambda: may_go_on.wait() and tracker)  # type: ignore
    for step in (1, 2):
        thread.put("log", lambda _, step=step: calls.append(step))
    thread.put("finish", lambda tracker: tracker.finish())
    may_go_on.set()
    thread.join(10)
    assert calls == [1, "finish"]


def test_a_failed_run_is_failed_in_wandb(tmp_path, stubs):
    config = change(run_config(tmp_path), recipe=Ragged(fault="raise", fault_at=1, fault_on_rank=0))
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    assert stubs["wandb"].calls[-1][0] == "finish with 1"
    assert stubs["aim"].calls[-1][0] == "finish"


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("", "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"),
        ("sqlite:///a.db", "mlflow ui --backend-store-uri sqlite:///a.db"),
        ("https://me:hidden@host/", "https://***@host/"),
    ],
)
def test_mlflow_shows_where_its_records_are(tmp_path, stubs, monkeypatch, store, shown):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "mlflow", stubs["aim"])
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.MLFLOW])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    if not store:
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
    config = change(run_config(tmp_path), telemetry__trackers=["mlflow"])
    assert train(config) == 0
    assert status(config)["trackers"] == {"mlflow": shown.format(folder=tmp_path)}


# ---- what is logged ------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown(Noting):
    """With a text of two lines and a picture."""

    def predict_samples(self, model: Any, data_info: Any, samples: Any, folder: Path) -> str:
        from PIL import Image

        Image.new("RGB", (20, 10), (200, 10, 10)).save(folder / "predictions.png")
        return "first\n<b>second</b>"


def failing_config(folder: Path, fails_at: int, tracker: str) -> Config:
    recipe = Shown(fault="raise", fault_at=fails_at, fault_on_rank=0)
    return make_config(
        folder, recipe, steps=6, telemetry__trackers=[tracker], evaluation__every_steps=3,
        checkpoints__every_steps=3,
    )  # fmt: skip


def fail_and_resume(config: Config, **environment: str) -> int:
    os.environ.update(environment)
    os.chdir(config.runs_folder)  # where a tool may write
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    with mock.patch("ragged.strike"):
        return train(config)


@pytest.mark.parametrize(("fails_at", "resumed_from"), quick(1, [(2, 0), (5, 3)]))
def test_tensorboard_shows_a_resumed_run_once_by_its_name(tmp_path, fails_at, resumed_from):
    """Also step 4, or 1, which both starts have logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = failing_config(tmp_path, fails_at, "tensorboard")
    assert run_world(1, fail_and_resume, config) == [0]
    assert {path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")} == {"run"}, (
        "the name that --logdir runs shows"
    )
    events = EventAccumulator(str(config.folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    for tag in ("train/loss", "train/twice"):
        assert [e.step for e in events.Scalars(tag)] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("validation/accuracy")] == [3, 6]
    texts = {tag: events.Tensors(f"{tag}/text_summary") for tag in ("config", "samples/text")}
    text = [(e.step, e.tensor_proto.string_val[0].decode()) for e in texts["samples/text"]]
    assert text == [(step, "    first\n    <b>second</b>") for step in (3, 6)]
    assert [e.step for e in texts["config"]] == [0, resumed_from], "once for each start"
    assert "    steps: 6\n" in texts["config"][-1].tensor_proto.string_val[0].decode()
    assert [image.step for image in events.Images("samples/predictions")] == [3, 6]


@pytest.mark.slow
@needs("wandb", "PIL")
def test_wandb_has_both_starts_under_one_id(tmp_path):
    config = failing_config(tmp_path, 5, "wandb")
    assert run_world(1, partial(fail_and_resume, config, WANDB_MODE="offline")) == [0]
    run_id = json.loads((config.folder / "run.json").read_text())["run"]
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{run_id}*/*.wandb"))
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        for name in (b"my_project", b"optim.lr", b"train/loss", b"samples/predictions"):
            assert name in content, name
