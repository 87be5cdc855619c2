"""What trackers are given, and that no tracker's failure ends a run nor affects another tracker."""

import dataclasses
import json
import logging
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType
from my_project.config import Config
from my_project.records import trackers
from ragged import Ragged
from runs import change, make_config, status, train
from world import run_world


def needs(*packages: str) -> Any:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, not installed")


# ---- failures ------------------------------------------------------------------------------------
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


def config_of(folder: Any) -> Config:
    names = ["aim", "wandb"]
    return make_config(folder, steps=2, telemetry__trackers=names, evaluation__sanity_check=False)


@pytest.mark.parametrize("where", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_fails_is_named_in_a_line_and_dropped_alone(tmp_path, stubs, caplog, where):
    stubs["aim"].fails_in = (where,)
    config = config_of(tmp_path)
    assert train(config) == 0
    assert status(config)["outcome"] == "finished"
    assert (config.folder / "export/model.safetensors").is_file()
    logged = [step for what, step in stubs["wandb"].calls if what == "log"]
    assert set(logged) == {1, 2}
    assert stubs["wandb"].calls[-1][0] == "finish"
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "tracker aim" in errors[0]
    assert f"aim refuses to {where}" in errors[0]
    assert stubs["aim"].calls[-1][0] == where, "it is asked for nothing more"


def test_one_project_holds_all_runs_by_their_names(tmp_path, stubs, monkeypatch):
    config = config_of(tmp_path)
    for one in (config, change(config, run_name="other")):
        assert train(one) == 0
    made = [value for what, value in stubs["wandb"].calls if what == "init"]
    assert [(project, options["name"]) for project, options in made] == [
        ("my_project", "run"),
        ("my_project", "other"),
    ]
    assert made[0][1]["id"] != made[1][1]["id"]
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert train(change(config, run_name="third")) == 0
    assert [value for what, value in stubs["wandb"].calls if what == "init"][2][0] == "theirs"
    assert stubs["aim"].calls[0][1][0] == "my_project"
    (settings, *_) = (value for what, value in stubs["aim"].calls if what == "config")
    assert (settings["optim.lr"], settings["recipe.samples"]) == (0.05, 70)
    assert settings["recipe"] == "ragged.Ragged"


# ---- what is logged ------------------------------------------------------------------------------
ABOUT = {"step": 110, "epoch": 1.5, "elapsed_seconds": 9.0, "time": 1e9}


def test_numbers_are_grouped_and_what_is_no_number_is_left_out():
    interval = {
        "kind": "interval", **ABOUT, "steps": 10, "skipped": 1, "skipped_steps": 3, "loss": 0.5,
        "gradient_norm": None, "data_share": 0.1, "slowest_rank": 3, "slowest_host": "one",
    }  # fmt: skip
    assert trackers.values_of(interval) == {
        "train/loss": 0.5, "train/epoch": 1.5, "train/skipped_steps": 3, "perf/data_share": 0.1,
    }  # fmt: skip
    evaluation = {
        "kind": "evaluation", **ABOUT, "seconds": 2.0, "is_best": True, "validation/accuracy": 0.9,
        "held_out/f1": None, "sample": "text", "pictures": ["samples/a.png"],
    }  # fmt: skip
    expected = {"validation/accuracy": 0.9, "perf/evaluation_seconds": 2.0}
    assert trackers.values_of(evaluation) == expected
    checkpoint = {"kind": "checkpoint", **ABOUT, "seconds": 0.3}
    assert trackers.values_of(checkpoint) == {"perf/checkpoint_seconds": 0.3}
    for kind in ("start", "numerics", "stop"):
        assert trackers.values_of({"kind": kind, **ABOUT, "value": 1.0, "world_size": 2}) == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown(Ragged):
    """With a text of two lines and a picture, and a metric whose name MLflow refuses."""

    def build_metrics(self) -> dict[str, Any]:
        return {"accuracy@1": super().build_metrics()["accuracy"]}

    def sample(self, model: Any) -> str:
        return "first\n<b>second</b>"

    def predict_samples(self, model: Any, data_info: Any, samples: Any, folder: Path) -> str:
        from PIL import Image

        Image.new("RGB", (20, 10), (200, 10, 10)).save(folder / "predictions.png")
        return "answers"


STEPS = [1, 2, 3, 4, 5, 6]  # 3 of the first start, 3 of the second


def shown_config(folder: Path, tracker: str) -> Config:
    return make_config(
        folder, Shown(), steps=3, telemetry__trackers=[tracker], evaluation__every_steps=3,
        checkpoints__every_steps=3,
    )  # fmt: skip


def start_twice(config: Config, environment: dict[str, str]) -> list[int]:
    os.environ.update(environment)
    os.chdir(config.runs_folder)  # where a tool may write
    return [train(config), train(change(config, steps=6))]


def train_twice(config: Config, **environment: str) -> None:
    assert run_world(1, start_twice, config, environment) == [[0, 0]]


def events_in(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


@needs("PIL")
def test_tensorboard_shows_a_resumed_run_once_by_its_name(tmp_path):
    config = shown_config(tmp_path, "tensorboard")
    train_twice(config)
    assert {path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")} == {"run"}, (
        "the name that --logdir runs shows"
    )
    events = events_in(config.folder)
    assert [e.step for e in events.Scalars("train/loss")] == STEPS
    assert [e.step for e in events.Scalars("validation/accuracy@1")] == [3, 6]
    texts = {tag: events.Tensors(f"{tag}/text_summary") for tag in ("config", "samples/text")}
    text = [(e.step, e.tensor_proto.string_val[0].decode()) for e in texts["samples/text"]]
    lines = "    first\n    <b>second</b>\n\n    answers"
    assert text == [(3, lines), (6, lines)]
    assert [e.step for e in texts["config"]] == [0, 3], "once for each start"
    shown = texts["config"][1].tensor_proto.string_val[0].decode()
    assert "    steps: 6\n" in shown
    assert shown.startswith("    recipe:\n")
    assert [image.step for image in events.Images("samples/predictions")] == [3, 6]

    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (content,) = events.PluginTagToContent("hparams").values()
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.lr"].number_value == 0.05
    assert hparams["recipe.dtype"].string_value == "float32"
    assert hparams["epochs"].string_value == "null"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Ragged):
    fails_at: int = -1
    armed: ClassVar[bool] = True

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if step == self.fails_at and self.armed:
            raise RuntimeError("told to fail")
        return super().loss(model, batch, step)


def fail_and_resume(config: Config) -> int:
    Failing.armed = True
    try:
        train(config)
    except RuntimeError:
        Failing.armed = False
        return train(config)
    raise AssertionError("it did not fail")


def failing_config(folder: Path, fails_at: int, tracker: str) -> Config:
    recipe = Failing(fails_at=fails_at, validation_samples=0)
    return make_config(
        folder, recipe, steps=6, checkpoints__every_steps=3, telemetry__trackers=[tracker]
    )


@pytest.mark.parametrize("fails_at", [5, 2])
def test_tensorboard_shows_once_what_a_failed_start_has_logged(tmp_path, fails_at):
    """Step 4, by a run resumed from step 3; or step 1 and the config, by one from step 0."""
    config = failing_config(tmp_path, fails_at, "tensorboard")
    assert run_world(1, fail_and_resume, config) == [0]
    events = events_in(config.folder)
    assert [e.step for e in events.Scalars("train/loss")] == STEPS


def test_other_trackers_are_given_once_what_a_failed_start_has_logged(tmp_path, stubs):
    config = failing_config(tmp_path, 5, "wandb")
    assert fail_and_resume(config) == 0
    logged = [step for what, step in stubs["wandb"].calls if what == "log"]
    assert logged == sorted([*STEPS, 3, 6]), "each step once, and each checkpoint"
    first, second = (value[1] for what, value in stubs["wandb"].calls if what == "init")
    assert first["id"] == second["id"]


def wandb_records(path: Path) -> list[Any]:
    """Read an offline file, a log of LevelDB: blocks of 32 KiB, each part with 7 bytes before."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(whole))
            whole = b""
    return found


@pytest.mark.slow
@needs("wandb", "PIL")
def test_wandb_has_both_starts_under_one_id(tmp_path):
    config = shown_config(tmp_path, "wandb")
    train_twice(config, WANDB_MODE="offline")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    run_id = json.loads((config.folder / "run.json").read_text())["run"]
    rows: list[dict[str, str]] = []
    for file in files:
        found = wandb_records(file)
        (run,) = (r.run for r in found if r.WhichOneof("record_type") == "run")
        wanted = ("my_project", "run", run_id)
        assert (run.project, run.display_name, run.run_id) == wanted
        updates = [u for r in found for u in (*r.config.update, *r.run.config.update)]
        settings = {update.key: update.value_json for update in updates}
        assert (settings["optim.lr"], settings["epochs"]) == ("0.05", "null")
        for record in found:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join([*i.nested_key] or [i.key]): i.value_json for i in items})
    assert [int(row["_step"]) for row in rows] == STEPS
    assert all("train/loss" in row for row in rows)
    assert "validation/accuracy@1" in rows[2]
    assert any(name.startswith("samples/text") for name in rows[2])
    assert any(name.startswith("samples/predictions") for name in rows[5])
    pages = [page.read_text() for page in tmp_path.glob("wandb/offline*/**/text_*.html")]
    assert len(pages) == 2
    assert all("first\n&lt;b&gt;second&lt;/b&gt;" in page for page in pages)
