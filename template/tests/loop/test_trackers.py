"""No tracker's failure ends a run, nor keeps another tracker from its records."""

import logging
from typing import Any

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType
from runs import change, make_config, status, train

from my_project.config import Config


class Stub(tracking.GeneralTracker):
    """Note what it is given, and fail where it is told to."""

    requires_logging_directory = False
    fails_in: tuple[str, ...] = ()
    calls: list[tuple]

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self._called("init", (project, options))

    def _called(self, what: str, value: Any = None) -> None:
        self.calls.append((what, value))
        if what in self.fails_in:
            raise RuntimeError(f"{self.name} refuses\nto {what}")

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._called("start")

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self._called("log", step)
        values.clear()  # what one does to it is no other's concern

    def finish(self) -> None:
        self._called("finish")


@pytest.fixture
def trackers(monkeypatch):
    """Put stubs in the places of two trackers that accelerate knows."""
    made = {}
    for name in ("mlflow", "wandb"):
        made[name] = type(name, (Stub,), {"name": name, "calls": []})
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, made[name])
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.MLFLOW, LoggerType.WANDB])
    return made


def config_of(folder: Any) -> Config:
    names = ["mlflow", "wandb"]
    return make_config(folder, steps=2, telemetry__trackers=names, evaluation__sanity_check=False)


@pytest.mark.parametrize("where", ["init", "start", "log", "finish"])
def test_a_tracker_that_fails_is_named_in_a_line_and_dropped_alone(
    tmp_path, trackers, caplog, where
):
    trackers["mlflow"].fails_in = (where,)
    config = config_of(tmp_path)
    assert train(config) == 0
    assert status(config)["outcome"] == "finished"
    assert (config.folder / "export/model.safetensors").is_file()
    logged = [step for what, step in trackers["wandb"].calls if what == "log"]
    assert logged == [1, 2, 2]
    assert trackers["wandb"].calls[-1][0] == "finish"
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "tracker mlflow" in errors[0]
    assert f"mlflow refuses to {where}" in errors[0]
    assert trackers["mlflow"].calls[-1][0] == where, "it is asked for nothing more"


def test_one_project_of_wandb_holds_all_runs_by_their_names(tmp_path, trackers, monkeypatch):
    config = config_of(tmp_path)
    for one in (config, change(config, run_name="other")):
        assert train(one) == 0
    made = [value for what, value in trackers["wandb"].calls if what == "init"]
    assert [(project, options["name"]) for project, options in made] == [
        ("my_project", "run"),
        ("my_project", "other"),
    ]
    assert made[0][1]["id"] != made[1][1]["id"]
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert train(change(config, run_name="third")) == 0
    assert [value for what, value in trackers["wandb"].calls if what == "init"][2][0] == "theirs"
    assert trackers["mlflow"].calls[0][1][0] == "run"
