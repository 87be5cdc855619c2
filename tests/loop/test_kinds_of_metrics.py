"""Any metric of torchmetrics: one value for any number of processes, NaN kept, the best found."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from my_project import contract
from my_project.config import ConfigError
from ragged import Ragged
from runs import change, make_config, quick, status, train, values
from test_metrics import LossOnly, evaluate_all
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMetric,
    SumMetric,
    wrappers,
)
from torchmetrics.classification import BinaryAUROC
from torchmetrics.classification import MulticlassAccuracy as Accuracy
from torchmetrics.classification import MulticlassPrecision as Precision
from torchmetrics.classification import MulticlassRecall as Recall
from torchmetrics.utilities import dim_zero_cat
from world import run_world


# ---- wrappers and collections --------------------------------------------------------------------
class OfNetwork(Metric):
    """The mean of what a network makes of the values, which FeatureShare can share."""

    feature_network = "network"

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Softplus()
        self.add_state("total", torch.zeros(()), "sum")
        self.add_state("count", torch.zeros(()), "sum")

    def update(self, predicted: Tensor, _: Tensor) -> None:
        self.total = self.total + self.network(predicted.float()).sum()
        self.count = self.count + len(predicted)

    def compute(self) -> Tensor:
        return self.total / self.count


def by_class(kind: Any) -> Any:
    return wrappers.ClasswiseWrapper(kind(3, average=None))


WRAPPED: dict[str, Any] = {
    "BinaryTargetTransformer": lambda: wrappers.BinaryTargetTransformer(Accuracy(3), 1),
    "BootStrapper": lambda: wrappers.BootStrapper(Accuracy(3), num_bootstraps=4),
    "ClasswiseWrapper": lambda: by_class(Accuracy),
    "FeatureShare": lambda: wrappers.FeatureShare({"one": OfNetwork(), "other": OfNetwork()}),
    "LambdaInputTransformer": lambda: wrappers.LambdaInputTransformer(
        Accuracy(3), lambda predicted: (predicted + 1) % 3
    ),
    "MinMaxMetric": lambda: wrappers.MinMaxMetric(Accuracy(3)),
    "MultioutputWrapper": lambda: wrappers.ClasswiseWrapper(
        wrappers.MultioutputWrapper(MeanSquaredError(), 2)
    ),
    "MultitaskWrapper": lambda: wrappers.MultitaskWrapper(
        {"mse": MeanSquaredError(), "accuracy": Accuracy(3)}
    ),
    "unsynced": lambda: Accuracy(3, sync_on_compute=False),
    "a compute group": lambda: MetricCollection(
        {"a": by_class(Recall), "b": Accuracy(3), "c": Precision(3), "d": by_class(Precision)}
    ),
}
REFUSED: dict[str, Any] = {  # and why
    "Running": lambda: wrappers.Running(Accuracy(3)),  # the last micro-batches of each process
    "MetricTracker": lambda: wrappers.MetricTracker(Accuracy(3)),  # is not a Metric
}
ABSTRACT = {"MetricInputTransformer"}


@dataclass(frozen=True, kw_only=True)
class Wrapping(Ragged):
    kinds: tuple[str, ...] = ()
    looks: bool = False  # at the value after each micro-batch

    def build_metrics(self) -> dict[str, Any]:
        return {kind: (WRAPPED | REFUSED)[kind]() for kind in self.kinds}

    def update_metrics(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        index = batch["index"]
        predicted, target = index * 5 % 7 % 3, index % 3
        for kind, metric in metrics.items():
            given = [predicted, target]
            if kind == "MultioutputWrapper":
                given = [torch.stack([values, index], 1).float() for values in given]
            if kind == "MultitaskWrapper":
                given = [dict.fromkeys(("mse", "accuracy"), values) for values in given]
            metric.update(*given)
            if self.looks:
                metric.compute()


def test_each_wrapper_of_torchmetrics_is_known_here():
    assert {*WRAPPED, *REFUSED, *ABSTRACT} >= {*wrappers.__all__}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wrappers_and_groups_give_one_value_on_1_2_and_4_processes(tmp_path):
    kinds = tuple(WRAPPED)
    recipes = [Wrapping(kinds=kinds, validation_samples=size) for size in (23, 7)]
    recipes.append(Wrapping(kinds=("ClasswiseWrapper",)))
    configs = [make_config(tmp_path, recipe) for recipe in recipes]
    one, *others = (run_world(n, evaluate_all, configs)[0] for n in (1, 2, 4))
    assert len(one[0]) > len(kinds)
    hits = [i * 5 % 7 % 3 == i % 3 for i in range(23)]
    exact = [sum(hits[k::3]) / len(hits[k::3]) for k in range(3)]
    named = [f"validation/ClasswiseWrapper/multiclassaccuracy_{k}" for k in range(3)]
    assert [one[0][name] for name in named] == pytest.approx(exact)
    for several in others:
        assert several == [pytest.approx(result, rel=1e-6) for result in one]


def test_a_value_looked_at_in_an_update_is_not_the_result(tmp_path):
    config = make_config(tmp_path, Wrapping(kinds=("unsynced",), looks=True))
    one, two = (run_world(n, evaluate_all, [config])[0] for n in (1, 2))
    assert two == [pytest.approx(one[0])]


class Stateless(Metric):
    """Keeps its numbers in plain attributes, which no rank can merge."""

    total = 0.0

    def update(self, predicted: Tensor, _: Tensor) -> None:
        self.total += float(predicted.sum())

    def compute(self) -> float:
        return self.total


REFUSED["Stateless"] = Stateless
REFUSED["MinMaxMetric of Stateless"] = lambda: wrappers.MinMaxMetric(Stateless())
REFUSED["a list"] = list


@pytest.mark.parametrize("kind", REFUSED)
def test_what_ranks_cannot_merge_is_refused_before_training(tmp_path, kind):
    config = make_config(tmp_path, Wrapping(kinds=(kind,)))
    with pytest.raises(ConfigError, match=kind.split()[-1]) as refused:
        train(config)
    assert refused.value.exit_code == 2
    assert not (config.folder / "metrics.jsonl").exists()


# ---- values that are no number -------------------------------------------------------------------
class Listed(CatMetric):
    """The mean of a list of values."""

    def compute(self) -> Tensor:
        return dim_zero_cat(self.value).mean()


@dataclass(frozen=True, kw_only=True)
class Aggregating(Ragged):
    """Metrics of torchmetrics that aggregate values, of which one may be NaN."""

    nan_at: int = -1
    strategy: str = "warn"

    def build_metrics(self) -> dict[str, Any]:
        kinds = (Listed, MaxMetric, MeanMetric, MinMetric, SumMetric)
        metrics: dict[str, Any] = {kind.__name__: kind(self.strategy) for kind in kinds}
        metrics["MinMaxMetric"] = wrappers.MinMaxMetric(MeanMetric(self.strategy))
        metrics["group"] = MetricCollection([MeanMetric(self.strategy), SumMetric(self.strategy)])
        return metrics | {"weighted": MeanMetric(self.strategy)}

    def update_metrics(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        number = batch["index"] + 1.0
        values = torch.where(batch["index"] == self.nan_at, math.nan, number)
        for name, metric in metrics.items():
            weights = {"weighted": [number], "MeanMetric": [3.0]}.get(name, [])
            metric.update(values, *weights)


class Judged(LossOnly):
    """A validation loss that falls until step 4; at step 6 it is NaN in one sample."""

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        loss_sum, num_items = super().loss(model, batch, step)
        if torch.is_grad_enabled():
            return loss_sum, num_items
        losses = torch.full((len(batch["index"]),), {2: 3.0, 4: 1.0, 6: 0.1}.get(step, 2.0))
        losses[(batch["index"] == 9) & (step == 6)] = math.nan
        return losses.sum(), len(losses)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("processes", quick(1, [2, 1]))
def test_a_nan_in_one_sample_is_in_every_result_for_any_batch_size(tmp_path, processes):
    configs = [
        make_config(tmp_path, recipe, evaluation__batch_size=size, steps=6)
        for recipe in (Aggregating(nan_at=9), Judged())
        for size in (1, 4, 23)
    ]
    for result in run_world(processes, evaluate_all, configs)[0]:
        numbers = {name for name, value in result.items() if not math.isnan(value)}
        assert numbers <= {f"validation/MinMaxMetric/{key}" for key in ("min", "max")}, "infinite"


@pytest.mark.parametrize("strategy", quick(1, ["warn", "disable"]))
def test_weights_of_a_mean_count_whatever_its_nan_strategy(tmp_path, strategy):
    config = make_config(tmp_path, Aggregating(strategy=strategy))
    (result,) = run_world(2, evaluate_all, [config])[0]
    numbers = range(1, 24)
    weighted = sum(i * i for i in numbers) / sum(numbers)
    assert result["validation/weighted"] == pytest.approx(weighted)
    assert result["validation/MeanMetric"] == pytest.approx(12)


def test_a_recipe_may_choose_to_drop_nan(tmp_path):
    config = make_config(tmp_path, Aggregating(nan_at=22, strategy="ignore"))
    (result,) = run_world(1, evaluate_all, [config])[0]
    assert result["validation/MeanMetric"] == pytest.approx(11.5)


# ---- which result is best ------------------------------------------------------------------------
def test_the_least_loss_is_best_by_its_name_and_nan_never_is(tmp_path):
    config = make_config(
        tmp_path, Judged(), evaluation__every_steps=2, evaluation__best_metric="validation/loss"
    )
    assert train(config) == 0
    losses = values(config, "validation/loss")
    assert losses == [3, 1, None, 2, 2]
    assert yaml.safe_load((config.folder / "best/step.json").read_text())["step"] == 4
    saved = yaml.safe_load((config.folder / "config.yaml").read_text())
    assert saved["evaluation"]["best_mode"] == "min", "for the tools, which import no metrics"
    highest = change(config, run_name="highest", evaluation__best_mode="max")
    assert train(highest) == 0
    assert yaml.safe_load((highest.folder / "best/step.json").read_text())["step"] == 2


class Flipped(Stateless):
    """An error rate whose part is an accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy(3)


class Inherited(Accuracy):
    """An error rate that has inherited higher_is_better."""


MIXED = {"wer": MeanSquaredError(), "hits": Accuracy(3)}
MODES: list[tuple[Any, str, str]] = [
    (MeanMetric(), "loss", "min"),
    (MeanMetric(), "bits_per_byte", "min"),
    (MeanMetric(), "top5_accuracy", "max"),
    (MeanMetric(), "mean_iou", "max"),
    (MeanSquaredError(), "distance", "min"),
    (BinaryAUROC(), "curve", "max"),
    (by_class(Recall), "each/multiclassrecall_0", "max"),
    (wrappers.MinMaxMetric(MeanSquaredError()), "each/max", "min"),
    (MetricCollection(MIXED), "each/hits", "max"),
    (MetricCollection({"b": MeanSquaredError()}, prefix="a_"), "each/a_b", "min"),
    (wrappers.MultitaskWrapper({"b": MeanSquaredError(), "c": Accuracy(3)}), "each/b", "min"),
    (MeanMetric(), "quality", ""),
    (1 - BinaryAUROC(), "inverse", ""),
    (Flipped(), "flipped", ""),
    (Inherited(3), "error", ""),
    (MetricCollection(MIXED), "each/unknown", ""),
    (MeanMetric(), "accuracy_loss", ""),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("metric", "result", "mode"), MODES, ids=[case[1] for case in MODES])
def test_best_mode_is_that_of_the_metric_or_its_name_or_refused(metric, result, mode):
    name = result.partition("/")[0]
    if mode:
        assert contract.best_mode(metric, result, name) == mode
        return
    with pytest.raises(ConfigError, match="best_mode") as refused:
        contract.best_mode(metric, result, name)
    assert refused.value.exit_code == 2


def test_a_best_metric_of_unknown_direction_is_refused_before_training(tmp_path):
    config = make_config(
        tmp_path, Aggregating(), steps=2, evaluation__best_metric="validation/SumMetric"
    )
    with pytest.raises(ConfigError, match=r"evaluation.best_mode .* SumMetric"):
        train(config)
    assert not (config.folder / "status.json").exists()
    assert train(change(config, evaluation__best_mode="min")) == 0
    assert status(config)["outcome"] == "finished"


# ---- the precision of a loss ---------------------------------------------------------------------
class Half(LossOnly):
    """A loss that autocast leaves in the type of the model's output."""

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        _, num_items = super().loss(model, batch, step)
        return model(batch["x"]).sum(), num_items


def test_a_loss_in_bfloat16_is_refused_before_the_first_step(tmp_path):
    config = make_config(tmp_path, Half(), precision="bf16")
    line = Half.loss.__code__.co_firstlineno
    with pytest.raises(ConfigError, match=rf"Half.loss .*, line {line}\) .*bfloat16"):
        train(config)
    without = change(config, evaluation__sanity_check=False, run_name="without")
    with pytest.raises(ConfigError, match="bfloat16"):
        train(without)
    assert train(change(config, precision="no", run_name="full", steps=1)) == 0
