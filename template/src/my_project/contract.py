"""Call a recipe, and check what its methods return.

A recipe that is slightly wrong must not train nothing in silence, nor fail after hours: each check
here ends the run with one sentence that names the method, its file and its line (ConfigError).
"""

import dataclasses
import inspect
import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from .config import Config, ConfigError, TransientError, to_yaml
from .files import writing
from .launcher import process_name
from .loading.layout import is_stream
from .loading.locks import in_turn, no_node_at_work
from .loading.staging import staged
from .recipe import Recipe, optional, place_of, problems
from .stacks import progress_reported


def check_recipe(config: Config) -> None:
    """Refuse a recipe with wrong methods, or settings that config.yaml cannot hold."""
    kind = type(config.recipe)
    if found := problems(kind):
        raise ConfigError(f"recipe {kind.__name__}: {'; '.join(found)} (see recipe.py).")
    to_yaml(config)
    for name, value in _undeclared(kind.__name__, config.recipe, [kind]):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which config.yaml cannot be read back as: declare"
            " the field with that class itself, not with one that it is derived from."
        )


def _undeclared(name: str, value: Any, declared: list[Any]) -> Iterator[tuple[str, Any]]:
    """List the dataclasses in a setting that are not of a class which its annotation names."""
    if isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _undeclared(name, part, declared)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _undeclared(f"{name}[{key!r}]", part, declared)
    elif dataclasses.is_dataclass(value):
        if type(value) not in declared:
            yield name, value
        with suppress(NameError, TypeError):  # an annotation that cannot be read where it stands
            annotations = get_type_hints(type(value))
            for f in dataclasses.fields(value):
                inner = getattr(value, f.name)
                if f.init:
                    yield from _undeclared(f"{name}.{f.name}", inner, _named(annotations[f.name]))


def _named(annotation: Any) -> list[Any]:
    """List the classes that an annotation names."""
    inner = [kind for part in get_args(annotation) for kind in _named(part)]
    return [annotation, get_origin(annotation), *inner]


# ---- data ----------------------------------------------------------------------------------------
def prepare_data(config: Config) -> tuple[dict[str, Any], Recipe]:
    """Let the recipe prepare its data: one process first, the others find it done.

    No limit holds, since tokenizing takes hours: the process at work says where it stands.

    Returns:
        data_info, and the recipe that reads the data: with stage_to, this node's copies.

    Raises:
        ConfigError: it cannot be prepared as the settings say, or data_info is no JSON.
        TransientError: the process that was waited for is gone.
    """
    recipe, folder = config.recipe, Path(config.runs_folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with no_node_at_work(folder, config.run_name), in_a_sentence(recipe):
        with in_turn(folder, process_name()), progress_reported("prepare_data"):
            data_info = recipe.prepare_data()
        if not isinstance(data_info, dict):
            _refuse(recipe, "prepare_data", f"returned {_kind(data_info)}; it must return a dict.")
        try:
            data_info = json.loads(json.dumps(data_info))
        except (TypeError, ValueError) as error:
            _refuse(recipe, "prepare_data", f"must return plain JSON: {error}.")
        return data_info, staged(recipe, config.stage_to) if config.stage_to else recipe


def build_datasets(recipe: Recipe, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let the recipe open its data.

    Returns:
        The training set, and the validation sets by name.

    Raises:
        ConfigError: the data is not as the recipe says, or it returned something else than
            recipe.py asks for.
    """
    with in_a_sentence(recipe):
        returned = recipe.build_datasets(data_info)
    return _checked_data_sets(recipe, returned)


def _checked_data_sets(recipe: Recipe, returned: Any) -> tuple[Any, dict[str, Any]]:
    wanted = "it must return (train, {name: validation}), with {} for no validation."
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        _refuse(recipe, "build_datasets", f"returned {_kind(returned)}; {wanted}")
    train, validation_sets = returned
    if not isinstance(validation_sets, Mapping) or not all(
        isinstance(name, str) for name in validation_sets
    ):
        _refuse(
            recipe, "build_datasets",
            f"returned {_kind(validation_sets)} for validation; {wanted}",
        )  # fmt: skip
    if not is_stream(train):
        _check_map_style(recipe, "the training set", train)
    for name, data in validation_sets.items():
        _check_map_style(recipe, f"validation set {name}", data)
        if len(data) == 0:
            _refuse(
                recipe, "build_datasets",
                f"returned an empty validation set {name}; return only sets that hold samples.",
            )  # fmt: skip
    return train, dict(validation_sets)


def _check_map_style(recipe: Recipe, what: str, data: Any) -> None:
    """Refuse data without length or index; torch's IterableDataset inherits both and has none."""
    has_length = True
    try:
        len(data)
    except (TypeError, NotImplementedError):
        has_length = False
    has_index = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not (has_length and has_index):
        _refuse(
            recipe, "build_datasets",
            f"returned {_kind(data)} as {what}, which has no {'index' if has_length else 'length'};"
            " return a map-style dataset (len(data) and data[index]), or for training a stream"
            " (lanes and lane(i, epoch, start, seed)).",
        )  # fmt: skip


# ---- model and loss ------------------------------------------------------------------------------
def build_model(config: Config, data_info: dict[str, Any]) -> nn.Module:
    """Let the recipe build its model, with fresh weights or known ones.

    Raises:
        ConfigError: it cannot be built as the settings say, or is no module.
    """
    with in_a_sentence(config.recipe):
        model = config.recipe.build_model(data_info)
    if not isinstance(model, nn.Module):
        _refuse(
            config.recipe, "build_model",
            f"returned {_kind(model)}; it must return a torch.nn.Module.",
        )  # fmt: skip
    return model


def check_loss(recipe: Recipe, returned: Any, *, with_gradient: bool = True) -> None:
    """Refuse what is no (total, weight) of a micro-batch; called for the first, before backward."""
    wanted = (
        "; it must return (total, weight): the sum of the losses, a scalar tensor with a gradient,"
        " and how many items it sums, a number or scalar tensor."
    )
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        _refuse(recipe, "loss", f"returned {_kind(returned)}{wanted}")
    total, weight = returned
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
        _refuse(recipe, "loss", f"returned {_kind(total)} as the total{wanted}")
    if with_gradient and not total.requires_grad:
        _refuse(recipe, "loss", f"returned a total that does not require a gradient{wanted}")
    is_number = isinstance(weight, Real) or (isinstance(weight, Tensor) and not weight.ndim)
    if not is_number:
        _refuse(recipe, "loss", f"returned {_kind(weight)} as the weight{wanted}")
    if not (math.isfinite(weight) and float(weight) >= 0):
        _refuse(
            recipe, "loss",
            f"returned the weight {float(weight)}, which must be finite and not negative.",
        )  # fmt: skip


# ---- metrics -------------------------------------------------------------------------------------
def build_metrics(recipe: Recipe) -> dict[str, Any]:
    """Build the recipe's metrics, or the loss where it has none."""
    from torchmetrics import MeanMetric, Metric, MetricCollection

    build = optional(recipe, "build_metrics")
    if build is None:
        return {"loss": MeanMetric()}
    metrics = build()
    if not hasattr(metrics, "items") or not all(
        isinstance(name, str) and isinstance(metric, (Metric, MetricCollection))
        for name, metric in metrics.items()
    ):
        _refuse(
            recipe, "build_metrics",
            f"returned {_kind(metrics)}; it must return a dict of torchmetrics.Metric by name.",
        )  # fmt: skip
    return dict(metrics.items())


def scalars(recipe: Recipe, name: str, value: Any) -> dict[str, float]:
    """Return what a metric's compute() gave as numbers by name; a dict's with "name/key"."""
    values: dict[str, float] = {}
    for key, part in value.items() if isinstance(value, dict) else [("", value)]:
        try:
            values[f"{name}/{key}" if key else name] = float(part)
        except (TypeError, ValueError, RuntimeError):
            _refuse(
                recipe, "build_metrics",
                f"returned a metric {name} whose result is {_kind(part)}; it must be a number or a"
                " dict of numbers (in torchmetrics such as average='macro').",
            )  # fmt: skip
    return values


# ---- sentences -----------------------------------------------------------------------------------
def _refuse(recipe: Recipe, method: str, problem: str) -> NoReturn:
    place = place_of(getattr(recipe, method))
    raise ConfigError(f"{type(recipe).__name__}.{method} ({place}) {problem}")


def _kind(value: Any) -> str:
    """Describe a value by its type, with what tells values of the type apart."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(type(part).__name__ for part in value[:5])
        return f"a {type(value).__name__} of {len(value)} ({inner})"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {type(part).__name__}" for key, part in [*value.items()][:5])
        return f"a {type(value).__name__} ({inner})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


@contextmanager
def in_a_sentence(recipe: Recipe) -> Iterator[None]:
    """Say what a user can cause (a wrong path or name) without a traceback, and where."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError, IsADirectoryError, ConnectionError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f for f in frames if f.filename == inspect.getsourcefile(type(recipe))] or frames
        kind = TransientError if _is_of_network(error) else ConfigError
        raise kind(f"{error} ({at[-1].filename}, line {at[-1].lineno})") from error


def _is_of_network(error: BaseException | None) -> bool:
    """Return whether a network was the cause, which may be there again on the next try."""
    names = set()
    while error:
        names |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__
    libraries = {"ConnectError", "Timeout", "TimeoutException", "LocalEntryNotFoundError"}
    is_of_network = names & (libraries | {"ConnectionError", "TimeoutError"})
    return bool(is_of_network) and "OfflineModeIsEnabled" not in names
