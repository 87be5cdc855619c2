"""Optimizers that switch to other weights by train() and eval(), such as schedule-free ones."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project import commands
from my_project.config import Config, ConfigError
from my_project.manifest import read_manifest
from ragged import Deep
from runs import change, make_config, train, values, weights
from safetensors.torch import load_file
from test_fsdp_on_cpu import ask_for_fsdp
from world import run_world

BETA = 0.9


class Averaging(torch.optim.SGD):
    """Trains y = (1 - BETA) z + BETA x, and evaluates x, the average of all z."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"training": False, "k": 0}

    @torch.no_grad()
    def _set(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight).mul_(1 + 1e-6)  # more than it must round
            group["training"] = training

    def train(self) -> None:
        self._set(True, 1 - BETA)

    def eval(self) -> None:
        self._set(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 - 1 / BETA)
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 1 / group["k"])
                    p.lerp_(z, 1 - BETA)


class DeepLoss(Deep):
    build_metrics = None  # type: ignore[assignment]
    update_metrics = None  # type: ignore[assignment]


KINDS = ["test_two_views.Averaging", "schedulefree.AdamWScheduleFree"]


@pytest.fixture(params=KINDS, ids=["by hand", "schedulefree"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    if request.param != KINDS[0]:
        pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    return make_config(
        tmp_path, DeepLoss(), steps=6, optim__class_path=request.param,
        optim__schedule="constant", evaluation__every_steps=3, checkpoints__every_steps=1,
        checkpoints__keep=9, evaluation__best_metric="validation/loss", evaluation__samples=0,
    )  # fmt: skip


def saved(config: Config, step: int, kind: str = "model") -> dict[str, Any]:
    folder = config.folder / f"checkpoints/step_{step:08d}"
    (path,) = folder.glob(f"{kind}.safetensors")
    return load_file(path)


def loss_of(config: Config, tensors: dict[str, Any]) -> float:
    """Return the validation loss of these weights."""
    recipe = config.recipe
    model = recipe.build_model({"features": 6})
    model.load_state_dict(tensors, strict=False)
    data = recipe.build_datasets({"features": 6})[1]["validation"]
    batch = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        total, items = recipe.loss(model.eval(), batch, 0)
    return float(total / items)


def test_eval_weights_are_evaluated_and_exported_train_weights_are_saved(config):
    assert train(config) == 0
    for part in ("best", "export"):
        step = json.loads((config.folder / part / "step.json").read_text())["step"]
        exported, trained, slots = (
            weights(config.folder / part), saved(config, step), saved(config, step, "optimizer")
        )  # fmt: skip
        name = "blocks.0.inner.weight"
        averaged = trained[name].lerp(slots[f"{name}/z"], 1 - 1 / BETA)
        torch.testing.assert_close(exported[name], averaged)
        assert not torch.equal(exported[name], trained[name])
        loss = values(config, "validation/loss")[step // 3 - 1]
        assert loss == pytest.approx(loss_of(config, exported), rel=1e-5)
        assert loss != pytest.approx(loss_of(config, trained), rel=1e-5)


def test_an_evaluation_leaves_the_trained_weights_to_the_bit(config):
    rarely = change(config, run_name="rarely", evaluation__every_steps=None)
    assert train(config) == train(rarely) == 0
    torch.testing.assert_close(saved(config, 6), saved(rarely, 6), rtol=0, atol=0)


def train_sharded(config: Config) -> int:
    ask_for_fsdp()
    return train(config)


@pytest.mark.parametrize(
    ("processes", "run"),
    [
        (1, train),
        pytest.param(2, train, marks=pytest.mark.slow),
        pytest.param(2, train_sharded, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(config, processes, run):
    assert run_world(processes, run, config) == [0] * processes
    for step in (2, 3):  # 3: evaluated already
        resumed = change(config, run_name=f"from_{step}")
        resumed = change(resumed, resume=str(config.folder / f"checkpoints/step_{step:08d}"))
        assert run_world(processes, run, resumed) == [0] * processes
        for part in ("export", "best"):
            ours, theirs = weights(resumed.folder / part), weights(config.folder / part)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_killed_between_save_and_evaluation_the_next_start_evaluates(config):
    assert train(config) == 0
    recorded = values(config, "validation/loss")
    last = config.folder / "checkpoints/step_00000006"
    content = read_manifest(last)
    content["state"]["evaluated_step"] = 3
    (last / "manifest.json").write_text(json.dumps(content))
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 6, "steps": 6}')
    before = weights(config.folder / "export")
    assert train(config) == 0
    assert values(config, "validation/loss") == recorded
    torch.testing.assert_close(weights(config.folder / "export"), before, rtol=0, atol=0)


def test_an_ema_beside_such_an_optimizer_is_refused(config):
    with pytest.raises(ConfigError, match=r"ema_decay is 0\.5") as refused:
        train(change(config, optim__ema_decay=0.5))
    assert refused.value.exit_code == 2


def test_evaluate_and_export_refuse_the_weights_that_are_trained(config, capsys):
    assert train(config) == 0
    arguments = {"trust": ["test_two_views.DeepLoss"], "json": True}
    folder = str(config.folder / "export")
    assert commands.print_evaluation(Namespace(folder=folder, **arguments)) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])["validation/loss"]
    assert printed == values(config, "validation/loss")[-1]
    folder = str(config.folder / "checkpoints/step_00000006")
    with pytest.raises(ConfigError, match="step_00000006"):
        commands.print_evaluation(Namespace(folder=folder, **arguments))
    file = config.folder / "weights.safetensors"
    with pytest.raises(ConfigError, match="step_00000006"):
        commands.write_one_file(Namespace(folder=folder, file=str(file), ema=False))
    assert not file.exists()
