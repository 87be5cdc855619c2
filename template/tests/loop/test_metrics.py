"""Promise 4: exact metrics for any data set size and number of processes."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator
from ragged import Ragged
from runs import make_config
from torch import nn
from world import run_world

from my_project import devices, sharding
from my_project.config import Config
from my_project.evaluate import evaluate
from my_project.state import TrainState


def evaluate_sizes(configs: list[Config]) -> list[dict[str, float]]:
    """Evaluate fixed weights on several data sets in one world."""
    results = []
    with devices.start(configs[0]) as accelerator:
        for config in configs:
            results.append(_evaluate(accelerator, config))
    return results


def _evaluate(accelerator: Accelerator, config: Config) -> dict[str, float]:
    data_info = config.recipe.prepare_data()
    torch.manual_seed(0)
    model = config.recipe.build_model(data_info)
    call = accelerator.prepare_model(sharding.RecipeModule(model), evaluation_mode=True)
    _, data_sets = config.recipe.build_datasets(data_info)
    return evaluate(accelerator, config, call, data_sets)


def expected(recipe: Ragged) -> dict[str, float]:
    """Compute the same with one forward over all samples and scikit-learn-free arithmetic."""
    torch.manual_seed(0)
    model = recipe.build_model(recipe.prepare_data())
    _, data_sets = recipe.build_datasets(recipe.prepare_data())
    data = data_sets["validation"]
    samples = [data[i] for i in range(len(data))]
    with torch.no_grad():
        scores = model(torch.stack([s["x"] for s in samples]))[:, 0, 0].sigmoid()
    labels = torch.stack([s["label"] for s in samples])
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (
        (positive[:, None] > negative[None]).double().mean()
        if len(positive) and len(negative)
        else 0.0
    )
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
        make_config(tmp_path, Ragged(validation_samples=size), batches__global_batch_size=12)
        for size in sorted(sizes)
    ]
    by_rank = run_world(processes, evaluate_sizes, configs)
    for results in by_rank:  # the same on every process
        for config, result in zip(configs, results, strict=True):
            assert result == pytest.approx(expected(config.recipe), abs=1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOnly(Ragged):
    """A recipe without metrics of its own."""

    build_metrics = None  # type: ignore[assignment]
    update_metrics = None  # type: ignore[assignment]


def test_without_metrics_the_loss_per_item_is_exact(tmp_path):
    recipe = LossOnly(validation_samples=7, dtype="float64")
    configs = [make_config(tmp_path, recipe)]
    results = run_world(2, evaluate_sizes, configs)[0]
    torch.manual_seed(0)
    model: nn.Module = recipe.build_model({"features": 6})
    data = recipe.build_datasets({"features": 6})[1]["validation"]
    pairs = [recipe.loss(model, {k: v[None] for k, v in data[i].items()}, 0) for i in range(7)]
    mean = sum(float(total.detach()) for total, _ in pairs) / sum(
        float(weight) for _, weight in pairs
    )
    assert results[0] == {"validation/loss": pytest.approx(mean, rel=1e-6)}


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path):
    config = make_config(tmp_path, evaluation__best_metric="validation/loss")
    state = TrainState(items_per_micro_batch=1.0)
    values = [float("nan"), 0.5, float("nan"), 0.7]
    better = [state.record_evaluation(config, {"validation/loss": value}) for value in values]
    assert better == [False, True, False, True]
    assert state.best == 0.7
