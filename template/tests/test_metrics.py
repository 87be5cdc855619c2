"""Promise 4: exact metrics for any data set size and number of processes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from ragged import Ragged
from runs import change, make_config
from torch import nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassJaccardIndex
from world import run_world

from my_project import accelerator as accelerators
from my_project import contract
from my_project.config import Config
from my_project.evaluate import evaluate, gather_on_main, micro_batch_size
from my_project.state import TrainState


def evaluate_all(configs: list[Config], may_fail: bool = False) -> list[Any]:
    """Evaluate fixed weights in one world; with may_fail, a failure gives its type and message."""
    results: list[Any] = []
    with accelerators.start_accelerator(configs[0]) as accelerator:
        for config in configs:
            try:
                results.append(_evaluate(accelerator, config))
            except Exception as error:
                if not may_fail:
                    raise
                results.append((type(error), str(error)))
    return results


def _evaluate(accelerator: Accelerator, config: Config) -> dict[str, float]:
    data_info = config.recipe.prepare_data()
    torch.manual_seed(0)
    model = config.recipe.build_model(data_info)
    call = accelerator.prepare_model(contract.RecipeModule(model), evaluation_mode=True)
    _, data_sets = config.recipe.build_datasets(data_info)
    told: list[None] = []
    step = config.steps or 0
    results = evaluate(accelerator, config, call, data_sets, step, lambda: told.append(None))
    assert bool(gather_on_main(accelerator, "lists")) == accelerator.is_main_process
    size = micro_batch_size(config) * accelerator.num_processes
    rounds = (math.ceil(len(data) / size) for data in data_sets.values())
    assert len(told) == sum(rounds), "each micro-batch reports progress: all may exceed the limit"
    return results


def expected(recipe: Ragged) -> dict[str, float]:
    """Compute the same metrics from one forward pass over all samples, without scikit-learn."""
    torch.manual_seed(0)
    model = recipe.build_model(recipe.prepare_data())
    _, data_sets = recipe.build_datasets(recipe.prepare_data())
    data = data_sets["validation"]
    samples = [data[i] for i in range(len(data))]
    with torch.no_grad():
        scores = model(torch.stack([s["x"] for s in samples]))[:, 0, 0].sigmoid()
    labels = torch.stack([s["label"] for s in samples])
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative[None]).double().mean().nan_to_num()  # NaN: no pairs
    return {
        "validation/accuracy": float(((scores > 0.5).long() == labels).double().mean()),
        "validation/auroc": float(wins),
    }


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_validation_sample_counts_once(tmp_path, processes):
    micro_batch = 4
    sizes = {1, max(1, processes - 1), micro_batch + 1, processes * micro_batch + 1, 101}
    configs = [
        make_config(tmp_path, Ragged(validation_samples=size), batches__global_batch_size=24)
        for size in sorted(sizes)
    ]
    by_rank = run_world(processes, evaluate_all, configs)
    for results in by_rank:  # the same on every process
        for config, result in zip(configs, results, strict=True):
            assert result == pytest.approx(expected(config.recipe), abs=1e-6)


class LossOnly(Ragged):
    """A recipe without its own metrics."""

    build_metrics = None  # type: ignore[assignment]
    update_metrics = None  # type: ignore[assignment]


def test_without_metrics_the_loss_per_item_is_exact(tmp_path):
    recipe = LossOnly(validation_samples=7, dtype="float64")
    configs = [make_config(tmp_path, recipe)]
    results = run_world(2, evaluate_all, configs)[0]
    torch.manual_seed(0)
    model: nn.Module = recipe.build_model({"features": 6})
    data = recipe.build_datasets({"features": 6})[1]["validation"]
    with torch.no_grad():
        pairs = [recipe.loss(model, {k: v[None] for k, v in data[i].items()}, 0) for i in range(7)]
    total, items = (float(sum(values)) for values in zip(*pairs, strict=True))
    assert results[0] == {"validation/loss": pytest.approx(total / items, rel=1e-6)}


# ---- losses that draw random numbers -------------------------------------------------------------
class Masked(LossOnly):
    """A masked language model: it predicts the 30 % of tokens that are hidden at random."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(72, 36)).double()

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        tokens = batch["x"][..., 0].clamp(-2, 1.99).floor().long() + 2  # (B, 9)
        hidden = torch.rand(tokens.shape) < 0.3
        logits = model(tokens.masked_fill(hidden, 4)).view(-1, 4, 9)
        losses = nn.functional.cross_entropy(logits, tokens, reduction="none")
        return (losses * hidden).sum(), hidden.sum()


class Variational(LossOnly):
    """A variational autoencoder whose second term grows with the step."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return nn.ModuleDict({"encode": nn.Linear(6, 4), "decode": nn.Linear(2, 6)}).double()

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        self.strike("loss", step)
        x = batch["x"]
        mean, log_variance = model["encode"](x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        error = (model["decode"](code) - x).square().sum()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return error + min(1, step / 4) * divergence, len(x)


DRAWING = [kind(validation_samples=23, dtype="float64") for kind in (Masked, Variational)]
DEFAULT_SIZES = {"batches__global_batch_size": 8, "batches__micro_batch_size": 0}


def test_what_a_loss_draws_does_not_depend_on_the_processes(tmp_path):
    configs = [make_config(tmp_path, recipe, **DEFAULT_SIZES) for recipe in DRAWING]
    configs.append(make_config(tmp_path, DRAWING[0], **DEFAULT_SIZES, evaluation__batch_size=3))
    configs.append(make_config(tmp_path, DRAWING[1], **DEFAULT_SIZES, steps=1))
    one, *others = (run_world(n, evaluate_all, configs)[0] for n in (1, 2, 4))
    assert one[0] != one[2], "other sizes give other draws"
    assert one[1] != one[3], "the loss gets the step"
    for several in others:
        for result, reference in zip(several, one, strict=True):
            assert result == pytest.approx(reference, rel=1e-6)


# ---- merging -------------------------------------------------------------------------------------
class Kinds(Metric):
    """States that are merged in each way that torchmetrics offers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.add_state("count", torch.zeros((), dtype=torch.int32), "sum")
        self.add_state("by_column", torch.zeros(()), "sum")  # the first batch gives its shape
        self.add_state("exact", torch.zeros(2, dtype=torch.float64), "sum")
        self.add_state("average", torch.zeros(()), "mean")
        self.add_state("largest", torch.tensor(-math.inf), "max")
        self.add_state("smallest", torch.tensor(math.inf), "min")
        self.add_state("unmerged", torch.zeros(()), None)
        self.add_state("custom", torch.ones(()), lambda stacked: stacked.prod(0))
        self.add_state("listed", [], "cat")

    def update(self, index: torch.Tensor) -> None:
        value = index.float() if self.fault != "nan" else index.float().log().neg().sqrt()
        self.count = self.count + len(index)
        self.by_column = self.by_column + torch.full((3,), 1.0) * index.sum()
        self.exact = self.exact + torch.tensor([1e9, 1e-9], dtype=torch.float64) * len(index)
        self.average = torch.tensor(5.0)
        self.largest = torch.maximum(self.largest, value.max())
        self.smallest = torch.minimum(self.smallest, value.min())
        self.unmerged = torch.maximum(self.unmerged, index.max().float())
        self.custom = self.custom * 2.0 ** len(index)
        self.listed.append(index)

    def compute(self) -> dict[str, torch.Tensor]:
        if self.fault == "compute":
            raise LookupError("no such class")
        assert isinstance(self.listed, list), "torchmetrics would turn it into a tensor"
        return {
            "listed": torch.cat(self.listed).sum(),
            "count": self.count, "sum": self.by_column[2], "large": self.exact[0],
            "small": self.exact[1], "average": self.average, "largest": self.largest,
            "smallest": self.smallest, "unmerged": self.unmerged.max(), "custom": self.custom,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllKinds(Ragged):
    classes: int = 12
    metric_fault: str = ""

    def build_metrics(self) -> dict[str, Any]:
        overlap = MulticlassJaccardIndex(self.classes)  # sums a matrix
        metrics = super().build_metrics()
        metrics["inverse"] = 1 - metrics["auroc"]  # shares the state of auroc
        return metrics | {"kinds": Kinds(self.metric_fault), "overlap": overlap}

    def update_metrics(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        super().update_metrics(
            model, batch, {name: metrics[name] for name in ("auroc", "accuracy")}
        )
        index = batch["index"]
        metrics["kinds"].update(index)
        metrics["overlap"].update(index % self.classes, index // 2 % self.classes)


def evaluate_in_a_group_of_one(configs: list[Config]) -> list[Any]:
    """Evaluate in a process group of one, as with torchrun, or FSDP2 on one GPU."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    return evaluate_all(configs, may_fail=True)


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.slow
def test_each_kind_of_state_is_merged_as_one_process_has_it(tmp_path):
    sizes = (1, 2, 7, 23)
    recipes = [AllKinds(validation_samples=size) for size in sizes]
    recipes += [AllKinds(metric_fault=fault) for fault in ("nan", "compute")]
    configs = [make_config(tmp_path, recipe, batches__global_batch_size=24) for recipe in recipes]
    alone = run_world(1, evaluate_all, configs, True)[0]
    assert repr(run_world(1, evaluate_in_a_group_of_one, configs)[0]) == repr(alone)  # NaN too
    error_type, message = alone.pop()
    assert error_type is LookupError
    assert "no such class" in message
    for processes in (2, 3):
        for results in run_world(processes, evaluate_all, configs[:-1], True):
            for size, one, several in zip(sizes, alone, results, strict=False):
                assert one["validation/kinds/count"] == size
                assert one["validation/kinds/custom"] == 2.0**size
                assert one["validation/kinds/average"] == 5
                assert several == pytest.approx(one, rel=1e-6)
                same = [name for name in one if not name.endswith(("auroc", "inverse", "small"))]
                assert [several[name] for name in same] == [one[name] for name in same]
            (with_nan,) = results[len(sizes) :]
            assert math.isnan(with_nan["validation/kinds/largest"]), "from a sample of one rank"


@pytest.mark.parametrize(("mode", "best"), [("max", 0.7), ("min", 0.3)])
def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path, mode, best):
    settings = {"best_metric": "validation/loss", "best_mode": mode}
    config = make_config(tmp_path, **{f"evaluation__{k}": v for k, v in settings.items()})
    state = TrainState()
    values = [math.nan, 0.5, math.nan, math.inf, -math.inf, best]
    better = [state.record_evaluation(config, {"validation/loss": value}) for value in values]
    assert better == [False, True, False, False, False, True]
    assert state.best == best


def test_another_metric_or_mode_has_no_best_yet(tmp_path):
    """Compared with the best of another metric, its own best might never be reached."""
    settings = {"evaluation__best_metric": "validation/loss", "evaluation__best_mode": "max"}
    highest = make_config(tmp_path, **settings)
    state = TrainState()
    better = [state.record_evaluation(highest, {"validation/loss": value}) for value in (5, 4)]
    assert better == [True, False]
    for other in ({"best_mode": "min"}, {"best_metric": "validation/error"}):
        config = change(highest, **{f"evaluation__{name}": value for name, value in other.items()})
        resumed = TrainState()
        resumed.restore(state.to_dict(), config)
        assert resumed.evaluations_since_best == 0
        assert resumed.record_evaluation(config, {"validation/loss": 7, "validation/error": 3})
