"""A failing evaluation loses no training: it is tried first, and the state is saved before it."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Ragged
from runs import assert_same_weights, averaged, change, make_config, records, status, train, values
from test_resume import make_disk_slow
from world import run_world

from my_project.config import Config
from my_project.files import read_json
from my_project.manifest import manifest_text, read_manifest
from my_project.run_files import checkpoint_step, checkpoints

NEWEST = {"step": -1}  # the newest step of this process


class Evaluated(Ragged):
    """Meets its fault in the evaluation after a given step."""

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        NEWEST["step"] = step
        return super().loss(model, batch, step)

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        torch.rand(3), random.random()  # draws that must not reach the training
        self.strike("evaluation", NEWEST["step"])
        super().update_metrics(model, batch, metrics)


def run_config(folder: Path, name: str, fault: str = "", after: int = 0, **settings: Any) -> Config:
    """Make the config of a run that meets a fault in the evaluation after a given step."""
    NEWEST["step"] = -1
    recipe = Evaluated(
        dropout=0.2, noise=0.1,
        fault=fault, fault_in="evaluation", fault_at=after - 1, fault_on_rank=0,
    )  # fmt: skip
    return make_config(folder, recipe, run_name=name, **settings)


def test_a_mistake_in_a_metric_ends_the_run_before_the_first_step(tmp_path):
    config = run_config(tmp_path, "first", "raise")
    with pytest.raises(RuntimeError, match="ValueError: this rank was told to fail"):
        run_world(2, train, config)
    assert [record["kind"] for record in records(config, "kind")] == ["start"]
    assert not checkpoints(config.folder)


class Opened(torch.utils.data.Dataset):
    """Reads from a file that it opens when the first sample is read."""

    def __init__(self, data: Any, path: str) -> None:
        self.data, self.path, self.file = data, path, None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(8 * index)
        time.sleep(0.001)  # meanwhile, a process that shares the file may move its position
        assert int.from_bytes(self.file.read(8), "big") == index
        return self.data[index]


@dataclass(frozen=True, kw_only=True)
class FromOneFile(Ragged):
    path: str = ""

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        data = Opened(super().build_datasets(data_info)[0], self.path)
        held_out = torch.utils.data.Subset(data, range(9))
        return torch.utils.data.Subset(data, range(10, 70)), {"validation": held_out}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_sanity_check_opens_no_file_that_loader_workers_would_share(tmp_path):
    (tmp_path / "numbers").write_bytes(b"".join(n.to_bytes(8, "big") for n in range(70)))
    recipe = FromOneFile(path=str(tmp_path / "numbers"))
    config = make_config(tmp_path, recipe, steps=12, batches__workers=2)
    assert run_world(1, train, config) == [0]


class SetByItsFirstBatch(torch.nn.Module):
    """Sets its parameters and a buffer from the first samples that it sees, like ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.seen.any():
            self.seen = x.detach().flatten(0, -2).abs().mean(0)
            self.scale.data = 1 / self.seen
        return x * self.scale


class Initialized(Ragged):
    def build_model(self, data_info: dict[str, Any]) -> Any:
        return torch.nn.Sequential(SetByItsFirstBatch(), super().build_model(data_info))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Evaluated(dropout=0.2, noise=0.1), Initialized()])
def test_trying_the_evaluation_first_leaves_the_curve_as_it_is(tmp_path, recipe):
    tried = make_config(tmp_path, recipe, run_name="tried", steps=5)
    untried = change(tried, run_name="untried", evaluation__sanity_check=False)
    for config in (tried, untried):
        run_world(1, train, config)
    assert_same_weights(tried, untried)
    assert values(tried) == values(untried)


def test_an_evaluation_that_fails_at_the_end_loses_no_step(tmp_path):
    config = run_config(tmp_path, "late", "raise", after=5, steps=5)
    whole = run_config(tmp_path, "whole", steps=5)
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    assert status(config)["outcome"] == "failed"
    assert [folder.name for folder in checkpoints(config.folder)] == ["step_00000005"]
    assert train(change(config, recipe__fault="")) == 0
    assert train(whole) == 0
    assert_same_weights(config, whole)
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5], "no step was taken twice"


def train_on_a_slow_disk(config: Config) -> int:
    make_disk_slow()
    return train(config)


@pytest.mark.slow
def test_the_last_save_is_on_the_disk_before_the_last_evaluation(tmp_path):
    config = run_config(tmp_path, "killed", "leave", after=4, steps=4)
    with pytest.raises(RuntimeError):
        run_world(1, train_on_a_slow_disk, config)
    assert [folder.name for folder in checkpoints(config.folder)] == ["step_00000004"]


JUDGED = {  # a run whose last evaluations are its best
    "steps": 8, "evaluation__every_steps": 2, "checkpoints__every_steps": 2,
    "evaluation__best_metric": "validation/accuracy", "checkpoints__keep": 1,
    **averaged(0.5),
}  # fmt: skip


@pytest.mark.parametrize("fault_after", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_killed_in_an_evaluation_the_next_start_does_it_first(tmp_path, fault_after):
    killed = run_config(tmp_path, "killed", "leave", fault_after, **JUDGED)
    whole = run_config(tmp_path, "whole", **JUDGED)
    with pytest.raises(RuntimeError):
        run_world(2, train, killed)
    assert status(killed)["outcome"] in ("running", "failed")
    run_world(2, train, change(killed, recipe__fault=""))
    run_world(2, train, whole)
    assert_same_weights(killed, whole)
    for name in ("validation/accuracy", "validation/auroc"):
        assert [record["step"] for record in records(killed, name)] == [2, 4, 6, 8]
        assert values(killed, name) == values(whole, name)
    left = [[folder.name for folder in checkpoints(c.folder)] for c in (killed, whole)]
    assert left[0] == left[1]
    states = [read_manifest(checkpoints(c.folder)[-1])["state"] for c in (killed, whole)]
    assert states[0] == states[1]
    assert states[0]["evaluated_step"] == 8
    assert_same_weights(killed, whole, part="best")


@pytest.mark.slow
def test_a_kill_between_record_and_checkpoint_leaves_one_record(tmp_path):
    config = run_config(tmp_path, "run", steps=4)
    assert train(config) == 0
    before = [(r["kind"], r["step"]) for r in records(config, "kind")]
    assert before[-2:] == [("checkpoint", 4), ("evaluation", 4)]
    folder = checkpoints(config.folder)[-1]
    content = read_manifest(folder)
    content["state"]["evaluated_step"] = -1
    (folder / "manifest.json").write_text(manifest_text(content))
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 4, "steps": 4}')
    assert train(config) == 0
    after = [(r["kind"], r["step"]) for r in records(config, "kind")]
    assert after == [*before[:-1], ("start", 4), ("evaluation", 4)]
    assert read_manifest(folder)["state"]["evaluated_step"] == 4


@pytest.mark.parametrize(("fault_in", "fault_at"), [("evaluation", 5), ("loss", 7)])
def test_a_learning_rate_that_follows_results_is_the_same_over_a_kill(tmp_path, fault_in, fault_at):
    """Killed in the evaluation that lowers it, or in the step after that."""
    settings: dict[str, Any] = {
        "steps": 12, "evaluation__every_steps": 2, "checkpoints__every_steps": 2,
        "evaluation__best_metric": "validation/accuracy",
        "optim__lr": 1e-9,  # nothing gets better
        "optim__schedule": "plateau", "optim__plateau_patience": 2, "optim__plateau_factor": 0.5,
        "optim__warmup_steps": 0, "telemetry__every_steps": 1,
    }  # fmt: skip
    config = run_config(tmp_path, "killed", "leave", **settings)
    with pytest.raises(RuntimeError):
        run_world(1, train, change(config, recipe__fault_in=fault_in, recipe__fault_at=fault_at))
    assert values(config, "learning_rate")[:6] == [1e-9] * 6
    assert run_world(1, train, change(config, recipe__fault="")) == [0]
    assert values(config, "learning_rate") == [1e-9] * 6 + [0.5e-9] * 4 + [0.25e-9] * 2


@pytest.mark.slow
def test_patience_sees_the_evaluation_that_a_kill_undid(tmp_path):
    settings: dict[str, Any] = {
        "steps": 40, "evaluation__every_steps": 2, "checkpoints__every_steps": 2,
        "evaluation__best_metric": "validation/accuracy", "evaluation__patience": 2,
        "optim__lr": 1e-9,  # nothing gets better
        "telemetry__every_steps": 5,
    }  # fmt: skip
    config = run_config(tmp_path, "killed", "leave", after=4, **settings)
    with pytest.raises(RuntimeError):
        run_world(1, train, config)
    config = change(config, recipe__fault="")
    assert run_world(1, train, config) == [0]
    assert (status(config)["outcome"], status(config)["step"]) == ("finished", 6)
    assert [r["step"] for r in records(config)] == [5, 6], "the last interval ends with the run"
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 6, "steps": 40}')
    assert run_world(1, train, config) == [0], "as if killed in its export"
    assert status(config)["step"] == 6, "no further step is trained"
    run = (config.folder / "run.json").read_text()
    assert run_world(1, train, config) == [0]
    assert (config.folder / "run.json").read_text() == run, "a finished run is shown, not begun"
    longer = change(config, evaluation__patience=4)
    assert run_world(1, train, longer) == [0]
    assert status(config)["step"] == 10
    all_steps = change(config, run_name="all", steps=4, evaluation__patience=50)
    assert run_world(1, train, all_steps) == [0]
    assert run_world(1, train, change(all_steps, steps=6)) == [0]
    assert status(all_steps)["step"] == 6


def test_a_run_from_the_checkpoint_of_another_has_its_own_best_value(tmp_path):
    """Or a run from the checkpoint of one that was stopped early would end before it trains."""
    first = run_config(
        tmp_path, "first", steps=9, evaluation__every_steps=1, evaluation__patience=2,
        evaluation__best_metric="validation/accuracy", optim__lr=1e-30,
    )  # fmt: skip
    assert train(first) == 0
    folder = checkpoints(first.folder)[-1]
    assert checkpoint_step(folder) == 3, "it was stopped early"
    second = change(first, run_name="second", resume=str(folder), evaluation__patience=3)
    assert train(second) == 0
    assert status(second)["step"] == 7
    assert read_json(second.folder / "best/step.json")["step"] == 4
    own = change(first, resume=str(folder.parent / ".." / folder.parent.name / folder.name))
    assert train(change(own, evaluation__patience=3)) == 0
    assert status(own)["step"] == 4, "its own best value, however the path is spelled"


@pytest.mark.slow
def test_a_start_from_a_path_that_failed_before_a_save_starts_there_again(
    tmp_path,
):
    first = run_config(tmp_path, "first", steps=4)
    assert train(first) == 0
    folder = checkpoints(first.folder)[-1]
    content = read_manifest(folder)
    content["state"]["evaluated_step"] = -1  # as if killed in its evaluation
    (folder / "manifest.json").write_text(manifest_text(content))
    second = run_config(
        tmp_path, "second", "raise", steps=6, evaluation__every_steps=2, resume=str(folder)
    )
    with pytest.raises(ValueError, match="told to fail"):
        train(second)
    assert train(change(second, recipe__fault="")) == 0
    assert [record["step"] for record in records(second)] == [5, 6]
