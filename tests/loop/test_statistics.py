"""BatchNorm's running statistics on any number of processes are those of torch's layers on one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project import accelerator as accelerators
from my_project import contract, statistics
from my_project import train as loop
from my_project.config import Config
from my_project.loading.layout import batch_layout
from my_project.loading.seeding import sample_keys
from ragged import Ragged
from runs import assert_same_weights, change, make_config, records, train, weights
from test_fsdp_on_cpu import train_sharded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from torchmetrics import MeanMetric
from world import run_world


class Still(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "Still":
        return super().train(False)


class Norms(nn.Module):
    """Every kind of layer with running statistics, and every way to call one."""

    def __init__(self, features: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.input = nn.Linear(features, width)
        self.norms = nn.ModuleDict(
            {
                "plain": nn.BatchNorm1d(width),
                "slow": nn.BatchNorm1d(width, momentum=0.01),
                "fast": nn.BatchNorm1d(width, momentum=1.0),
                "stuck": nn.BatchNorm1d(width, momentum=0.0),
                "twice": nn.BatchNorm1d(width),
                "recomputed": nn.BatchNorm1d(width),
                "untracked": nn.BatchNorm1d(width, track_running_stats=False),
                "still": Still(width),
                "average": nn.BatchNorm1d(width, momentum=None),
                "sometimes": nn.BatchNorm1d(width, affine=False),
                "written": nn.BatchNorm1d(width, affine=False),
            }
        )
        self.output = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, 1) for x (B, T, features)."""
        hidden = self.input(x).transpose(1, 2)
        norms: dict[str, Any] = dict(self.norms)
        used = [norms[n] for n in ("plain", "slow", "fast", "stuck", "untracked")]
        total = sum((norm(hidden) for norm in [*used, norms["still"]]), torch.zeros(()))
        total = total + norms["twice"](norms["twice"](hidden).square())
        if self.training and self.recompute:
            total = total + checkpoint(norms["recomputed"], hidden, use_reentrant=False)
        else:
            total = total + norms["recomputed"](hidden)
        if self.training:  # what follows differs by the number of processes
            norms["average"](hidden.detach())
            if x.sum() > 0:
                norms["sometimes"](hidden.detach())
        return self.output(total.tanh().transpose(1, 2))


@dataclass(frozen=True, kw_only=True)
class OfNorms(Ragged):
    recompute: bool = True

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model = Norms(data_info["features"], 5, self.recompute).to(getattr(torch, self.dtype))
        model.norms["average"].requires_grad_(False)
        return model

    def loss(self, model: Any, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        if model.training:
            model.norms["written"].running_mean.fill_(step)
            model.norms["slow"].momentum = 0.01 * (1 + step)
        return super().loss(model, batch, step)

    def build_metrics(self) -> dict[str, Any]:
        return {"error": MeanMetric().set_dtype(torch.float64)}

    def update_metrics(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        loss_sum, num_items = super().loss(model, batch, 0)
        metrics["error"].update(loss_sum / num_items, num_items)


def of_norms(folder: Path, **settings: Any) -> Config:
    return make_config(
        folder,
        OfNorms(dtype="float64", explode_at=(2,)),
        **{
            "optim__class_path": "torch.optim.SGD",
            "optim__schedule": "constant",
            "optim__warmup_steps": 0,
            "optim__weight_decay": 0.0,
            "optim__clip_norm": None,
            "evaluation__every_steps": 3,
            "steps": 7,
        }
        | settings,
    )


def by_hand(config: Config) -> dict[str, Tensor]:
    """Train in one process by torch's own layers and optimizer; return the model's state."""
    recipe: Any = replace(config.recipe, recompute=False)
    info, layout = recipe.prepare_data(), batch_layout(config.batches, 1)
    accelerators.set_numerics(config)
    model = contract.build_model(change(config, recipe=recipe), info).train()
    data, _ = recipe.build_datasets(info)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), config.optim.lr)
    batches = sample_keys(len(data), layout, 0, config.seed, range(config.steps or 0))
    for step in range(config.steps or 0):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        items = 0.0
        for keys in islice(batches, layout.accumulation):
            batch = default_collate([data[index] for _, index in keys])
            loss_sum, num_items = recipe.loss(model, batch, step)
            loss_sum.backward()
            items += num_items.item()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= items
        optimizer.step()
        optimizer.zero_grad()
        if step in recipe.explode_at:
            model.load_state_dict(before)
    return {name: value.clone() for name, value in model.state_dict().items()}


def without(state: dict[str, Tensor], *layers: str) -> dict[str, Tensor]:
    return {n: t for n, t in state.items() if not any(f".{layer}." in n for layer in layers)}


def errors(config: Config) -> list[float]:
    return [record["validation/error"] for record in records(config, "validation/error")]


WORLDS: dict[str, list[tuple[int, Callable, tuple]]] = {
    "ddp": [(2, train, ()), (3, train, ())],
    "fsdp": [(3, train_sharded, (1,)), (4, train_sharded, (2,))],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_statistics_are_those_of_one_process_under(tmp_path, kind):
    """Of weights, buffers and results; a step is skipped, and a layer is recomputed."""
    one = of_norms(tmp_path, run_name="one")
    wanted = by_hand(one)
    run_world(1, train, one)
    found, curve = weights(one.folder / "export"), errors(one)
    exact = ("average", "written")
    torch.testing.assert_close(without(found, *exact), without(wanted, *exact), rtol=0, atol=1e-12)
    assert len(curve) == 3
    assert abs(found["norms.plain.running_var"] - 1).max() > 0.1, "they must have moved"
    assert found["norms.plain.num_batches_tracked"] == 6 * 4, "a step is skipped"
    assert found["norms.average.num_batches_tracked"] == 7 * 4, "as torch has it"
    assert found["norms.still.num_batches_tracked"] == 0

    several = []
    for processes, function, arguments in WORLDS[kind]:
        ours = change(one, run_name=f"on_{processes}")
        run_world(processes, function, ours, *arguments)
        state = weights(ours.folder / "export")
        several.append(without(state, "average"))
        rest = [without(tensors, *exact, "sometimes") for tensors in (state, wanted)]
        torch.testing.assert_close(*rest, rtol=0, atol=1e-12)
        assert errors(ours) == pytest.approx(curve, rel=1e-12, abs=1e-12)
        assert torch.all(state["norms.written.running_mean"] == 6), "of the last step"
    torch.testing.assert_close(*several, rtol=0, atol=1e-12)
    name = "norms.sometimes.num_batches_tracked"
    assert 0 < several[0][name] == wanted[name] < 6 * 4
    for name in ("norms.sometimes.running_mean", "norms.sometimes.running_var"):  # an average
        torch.testing.assert_close(several[0][name], wanted[name], rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_statistics(tmp_path):
    whole = of_norms(tmp_path, run_name="whole")
    run_world(2, train, whole)
    for name, first, then, tolerance in (("same", 2, 2, 0.0), ("other", 4, 2, 1e-12)):
        ours = change(whole, run_name=name)
        run_world(first, train, change(ours, steps=4))
        run_world(then, train, ours)
        states = [without(weights(c.folder / "export"), "average") for c in (ours, whole)]
        torch.testing.assert_close(*states, rtol=0, atol=tolerance)
        if name == "same":
            assert_same_weights(ours, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "replicas"), [(2, 1), (4, 2)])
def test_batch_norm_trains_under_fsdp_in_bf16(tmp_path, processes, replicas):
    """torch refuses statistics of float32 with weights that were gathered in bf16."""
    one = of_norms(tmp_path, precision="bf16")
    recipe = replace(one.recipe, dtype="float32", explode_at=())
    one, ours = (change(one, recipe=recipe, run_name=name) for name in ("one", "sharded"))
    run_world(1, train, one)
    run_world(processes, train_sharded, ours, replicas)
    states = [weights(config.folder / "export") for config in (one, ours)]
    for kind in ("running_mean", "running_var"):
        name = f"norms.plain.{kind}"
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0.05, atol=0.02)


def test_a_model_without_batch_norm_runs_not_a_line_of_it(tmp_path, monkeypatch):
    assert loop.RunningStatistics  # whose import needs the class
    monkeypatch.setattr(statistics, "RunningStatistics", None)
    assert train(make_config(tmp_path, run_name="plain", steps=2)) == 0
    with pytest.raises(TypeError):
        train(make_config(tmp_path, Ragged(batch_norm=True), run_name="norm", steps=2))


def collectives_of(configs: list[Config]) -> list[list[int]]:
    """Count the all-reduces and the broadcasts of each run."""
    counts = []
    for config in configs:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(config)
        events = {event.key: event.count for event in profile.key_averages()}
        counts.append([events.get(f"c10d::{n}_", 0) for n in ("allreduce", "broadcast")])
    return counts


@pytest.mark.slow
def test_batch_norm_adds_no_collective_to_a_step(tmp_path):
    configs = [
        make_config(
            tmp_path, Ragged(validation_samples=0, batch_norm=norm),
            run_name=f"{norm}_{steps}", steps=steps,
        )
        for norm in (False, True)
        for steps in (3, 6)
    ]  # fmt: skip
    plain, norm = torch.tensor(run_world(2, collectives_of, configs)[0]).diff(dim=0)[::2]
    assert plain.tolist() == norm.tolist()
    assert plain[0] == 6, "one for the gradient and one for the sums, per step"
