"""Call a recipe, and check what its methods return.

A slightly wrong recipe must neither silently fail to train nor end the run after hours. Each check
raises a ConfigError. If the mistake is in a method of the recipe, the error says in which method,
file and line.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, SupportsFloat, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from .config import Config, ConfigError, to_yaml
from .files import T
from .loading.layout import is_stream
from .loading.seeding import derive_seed, permutation, seed_rng
from .process import world
from .recipe import DataInfo, Dataset, Datasets, Recipe, optional, problems, source_location
from .words import shortened

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

Metrics: TypeAlias = "dict[str, Metric | MetricCollection]"
KNOWN_NAMES: dict[str, set[str]] = {  # words in the names of metrics, by best_mode
    "max": {"accuracy", "acc", "precision", "recall", "f1", "iou", "dice", "auroc", "auc", "bleu"},
    "min": {"loss", "error", "perplexity", "nll", "mse", "rmse", "mae", "wer", "cer", "bits"},
}
# the names that the loop itself records
TRAIN_TAGS = {"loss", "learning_rate", "gradient_norm", "epoch", "skipped_steps"}


def check_recipe(config: Config) -> None:
    """Check the recipe's methods, and that config.yaml can hold its settings."""
    kind = type(config.recipe)
    if messages := problems(kind):
        raise ConfigError(f"recipe {kind.__name__}: {'; '.join(messages)} (see recipe.py).")
    to_yaml(config)


def described(value: object) -> str:
    """Describe in words what a method has returned."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value[:4]))})"
    kind = type(value).__name__
    return "nothing" if value is None else f"a{'n' * (kind[0] in 'AEIOUaeiou')} {kind}"


# ---- datasets ------------------------------------------------------------------------------------
def build_datasets(
    recipe: Recipe, data_info: DataInfo, config: Config | None = None
) -> tuple[Dataset, Datasets]:
    """Call the recipe's build_datasets.

    The random state is the same on every rank, in every start and for every seed of the config, so
    a random split stays the same.

    Args:
        recipe: the recipe, which reads the data.
        data_info: from prepare_data.
        config: the run's config, which has overfit_batches; None: return all samples.

    Returns:
        The training set, and the validation sets by name.

    Raises:
        ConfigError: the returned value does not follow recipe.py.
    """
    seed_rng(derive_seed("build_datasets"))
    returned = recipe.build_datasets(data_info)
    is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not is_pair or not isinstance(returned[1], Mapping):
        problem = f"returned {described(returned)}; it must return the training set, and a dict"
        refuse(
            recipe, "build_datasets", f"{problem} of validation sets by name, which may be empty."
        )
    train, validation_sets = returned[0], dict(returned[1])
    sets = validation_sets
    if not is_stream(returned[0]):
        sets = {"the training set": train} | validation_sets
    for name, data in sets.items():
        if name == "train":
            problem = 'returned a validation set named "train", which names the records of training'
            refuse(recipe, "build_datasets", f"{problem}: give it another name.")
        if isinstance(data, type) or not isinstance(name, str):
            problem = f"returned, as {name!r}, {described(data)}"
            refuse(
                recipe,
                "build_datasets",
                f"{problem}; each name must be text, and each dataset an object.",
            )
        # torch's IterableDataset has a __getitem__, but it only raises
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            problem = f"returned {type(data).__name__} as {name}, which has no index (data[i])"
            remedy = " or lanes (see recipe.py)" if data is train else ""
            refuse(recipe, "build_datasets", f"{problem}: give it a method __getitem__{remedy}.")
        if not hasattr(data, "__len__"):
            problem = f"returned {described(data)} as {name}, which has no length"
            refuse(recipe, "build_datasets", f"{problem}: give it a method __len__.")
        if data is not train and not len(data):
            refuse(recipe, "build_datasets", f"returned an empty validation set {name}.")
    if config is None or config.overfit_batches is None:
        return train, validation_sets
    if not hasattr(train, "__len__"):
        raise ConfigError("overfit_batches needs a training set with a length; set it to null.")
    # the samples that the first steps of a full run would see; all samples if the set has fewer
    count = min(config.overfit_batches * config.batches.global_batch_size, len(train))
    chosen = Subset(train, permutation(len(train), config.seed, 0)(np.arange(count)).tolist())
    return chosen, dict.fromkeys(validation_sets, chosen)


# ---- model and loss ------------------------------------------------------------------------------
def build_model(config: Config, data_info: DataInfo) -> nn.Module:
    """Call the recipe's build_model, with the random state that follows from the config's seed.

    Raises:
        ConfigError: it did not return a model; or the model has extra state, a sparse buffer, or a
            buffer to be saved whose values are not finite, such as a mask of -inf.
    """
    seed_model(config.seed)
    model = config.recipe.build_model(data_info)
    check_model(config.recipe, "build_model", model)
    saved = model.state_dict()
    for name in saved:
        if name.rpartition(".")[2] == "_extra_state":
            problem = f"has the extra state {name}, which a checkpoint does not hold"
            refuse(config.recipe, "build_model", f"{problem}: keep it in buffers.")
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided and (name in saved or world()[0] > 1):
            problem = f"has the sparse buffer {name}, which neither a checkpoint nor DDP can hold"
            remedy = "register its indices and values, and build it from them where it is used"
            refuse(config.recipe, "build_model", f"{problem}: {remedy}.")
        if name in saved and not buffer.is_meta and not torch.isfinite(buffer).all():
            problem = f"has the buffer {name}, whose values are not finite but would be saved"
            refuse(config.recipe, "build_model", f"{problem}: register it with persistent=False.")
    return model


def check_model(recipe: Recipe, method: str, model: object) -> None:
    """Check that build_model or load has returned a model."""
    if not isinstance(model, nn.Module):
        refuse(recipe, method, f"returned {described(model)}; it must return a torch.nn.Module.")


def seed_model(seed: int) -> None:
    """Seed the random generators of every device for the recipe's build_model and load."""
    seed_rng(seed)
    torch.manual_seed(seed)


def check_loss(recipe: Recipe, returned: Any) -> tuple[str, ...]:
    """Check what `loss` returned, before the backward pass; return the scalars' names."""
    names: tuple[str, ...] = ()
    try:
        loss_sum, num_items, *rest = returned
        is_valid = loss_sum.ndim == 0 and loss_sum.is_floating_point()
        is_valid &= math.isfinite(num_items) and float(num_items) >= 0
        for scalars in rest:
            names = tuple(sorted(scalars))
            is_valid &= len(rest) == 1 and not TRAIN_TAGS & scalars.keys()
            _ = [torch.as_tensor(value).detach().item() for value in scalars.values()]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        shown = shortened(" ".join(repr(returned).split()), 200)
        refuse(
            recipe,
            "loss",
            f"returned {shown}; it must return (loss_sum, num_items): the sum of the per-item"
            " losses as a scalar tensor, and the number of items in this sum as a finite,"
            " non-negative number or scalar tensor. It may add a third value, {name: sum}, scalars"
            f" to record under names other than {', '.join(sorted(TRAIN_TAGS))}.",
        )
    if (dtype := returned[0].dtype) in (torch.bfloat16, torch.float16):
        problem = f"returned a loss of {dtype}, which has only three digits"
        refuse(recipe, "loss", f"{problem}: sum in float32, such as losses.float().sum().")
    return names


def with_zero_weight(returned: Any) -> tuple[Any, ...]:
    """Multiply what `loss` returned by zero, so that its backward pass adds nothing."""
    loss_sum, _, *rest = returned
    return loss_sum.nan_to_num(0, 0, 0) * 0, 0, *(dict.fromkeys(scalars, 0) for scalars in rest)


class RecipeModule(nn.Module):
    """Let a recipe call any method of its model inside the one forward that the wrappers see.

    DDP, FSDP, autocast and torch.compile act on `forward` only.
    """

    def __init__(
        self, model: nn.Module, autocast: tuple[str, torch.dtype | None] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast  # device type and dtype; None: accelerate applies autocast

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call function(model, *arguments)."""
        with torch.autocast(*self.autocast) if self.autocast else nullcontext():
            return function(self.model, *arguments)


# ---- metrics -------------------------------------------------------------------------------------
def build_metrics(recipe: Recipe) -> Metrics:
    """Return the recipe's metrics by name; by default the mean loss.

    Metrics that aggregate values (MeanMetric, ...) keep NaN, which torchmetrics drops by default.

    Raises:
        ConfigError: build_metrics did not return metrics by name, or ranks cannot merge a metric.
    """
    from torchmetrics import MeanMetric, Metric, MetricCollection
    from torchmetrics.aggregation import BaseAggregator
    from torchmetrics.wrappers.abstract import WrapperMetric

    build = optional(recipe, "build_metrics")
    returned = build() if build else {"loss": MeanMetric()}
    if not hasattr(returned, "items"):
        problem = f"returned {described(returned)}; it must return a dict of metrics by name."
        refuse(recipe, "build_metrics", problem)
    metrics: Metrics = dict(returned.items())
    for name, metric in metrics.items():
        is_metric = isinstance(metric, (Metric, MetricCollection))
        problem = "" if is_metric else f"a {type(metric).__name__}, not a torchmetrics.Metric"
        for part in metric_parts(metric) if is_metric else []:
            kind = type(part).__name__
            # for example torchmetrics' Running, which aggregates only the last updates
            if isinstance(part, WrapperMetric) and part._defaults:
                problem = f"a {kind}, whose value depends on the micro-batches of each process"
            elif not part._defaults and len(metric_parts(part)) == 1:
                problem = f"a {kind} without a state (add_state) that ranks could merge"
            if isinstance(part, BaseAggregator) and part.nan_strategy in ("warn", "disable"):
                part._cast_and_nan_check_input = partial(_keep_nan, part)  # type: ignore
        if problem:
            refuse(recipe, "build_metrics", f"returned the metric {name}: {problem}.")
    return metrics


def metric_parts(metric: nn.Module) -> list["Metric"]:
    """Return a metric and the metrics inside it, but only one metric for each state.

    If several metrics share a state, as a ClasswiseWrapper and its metric do, the inner one is
    returned, because it counts the updates.
    """
    from torchmetrics import Metric

    parts = [part for part in metric.modules() if isinstance(part, Metric)]
    return [*{id(part._defaults): part for part in parts}.values()]


def _keep_nan(metric: "Metric", value: Any, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Replace a method of torchmetrics: return values and weights, NaN included.

    With nan_strategy "disable", torchmetrics 1.7 to 1.9 replaces the weights by ones.
    """
    value = torch.as_tensor(value, dtype=metric.dtype, device=metric.device)
    return value, torch.ones_like(value) if weight is None else weight.to(metric.dtype)


def best_mode(metric: Any, result: str, name: str) -> str:
    """Return "max" if a higher result is better, else "min", as torchmetrics or the name says.

    Args:
        metric: the metric that computes the result.
        result: the result's name; <name>/<key> if the metric has several.
        name: the metric's name.

    Raises:
        ConfigError: neither source decides, or the two contradict each other.
    """
    from torchmetrics.wrappers.abstract import WrapperMetric

    by_key = dict(metric.items()) if hasattr(metric, "items") else {}
    metric = by_key.get(result.removeprefix(f"{name}/"), metric)
    parts = [part for part in metric_parts(metric) if not isinstance(part, WrapperMetric)]
    declared = {part.higher_is_better for part in parts}
    words = {*re.findall("[a-z]+[0-9]?", result.lower())}
    modes = {mode for mode, names in KNOWN_NAMES.items() if words & names}
    if declared in ({True}, {False}):
        modes.add("max" if declared == {True} else "min")
    if len(modes) != 1:
        raise ConfigError(
            f"evaluation.best_mode is null, and it is unclear whether a higher {result} is better:"
            " torchmetrics and the metric's name do not say, or disagree. Set evaluation.best_mode"
            " to max or min."
        )
    return modes.pop()


def scalars(recipe: Recipe, name: str, value: SupportsFloat | dict) -> dict[str, float]:
    """Return a metric's result as numbers by name; if it is a dict, the names are <name>/<key>."""
    parts = value if isinstance(value, dict) else {"": value}
    try:
        return {f"{name}/{key}" if key != "" else name: float(part) for key, part in parts.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        problem = (
            f"returned a metric {name} whose result is not a number or dict of numbers: {error}."
        )
        refuse(recipe, "build_metrics", problem)


def check_best_metric(config: Config, validation_sets: Datasets) -> Config:
    """Check the recipe's metrics, and that one of them can give best_metric.

    A best_metric may name one of several results of a metric, as <set>/<metric>/<key>. The key is
    checked later, by sanity_check.

    Returns:
        The config, with a null best_mode replaced by the mode that the metric implies.
    """
    evaluation, wanted = config.evaluation, config.evaluation.best_metric
    metrics = build_metrics(config.recipe) if validation_sets else {}
    named = {(data, metric): f"{data}/{metric}" for data in validation_sets for metric in metrics}
    matches = [pair for pair, name in named.items() if f"{wanted}/".startswith(f"{name}/")]
    if wanted and not matches:
        raise no_such_metric(wanted, named.values())
    if not wanted or evaluation.best_mode:
        return config
    data, metric = max(matches, key=lambda pair: len(named[pair]))
    mode = best_mode(metrics[metric], wanted.removeprefix(f"{data}/"), metric)
    return dataclasses.replace(config, evaluation=dataclasses.replace(evaluation, best_mode=mode))


def no_such_metric(wanted: str, names: Collection[str]) -> ConfigError:
    """Return the error for a best_metric that an evaluation does not compute."""
    computed = f"computes {', '.join(names)}; choose one of these, or null."
    if not names:
        computed = "has no results: there are no metrics or no validation samples; set it to null."
    return ConfigError(f"evaluation.best_metric is {wanted}, but the evaluation {computed}")


# ---- error messages ------------------------------------------------------------------------------
def refuse(recipe: Recipe, method: str, problem: str) -> NoReturn:
    """Raise a ConfigError that names a method of a recipe, its file and its line."""
    place = source_location(getattr(recipe, method))
    raise ConfigError(f"{type(recipe).__name__}.{method} ({place}) {problem}")
