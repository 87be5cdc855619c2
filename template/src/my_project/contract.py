"""Call a recipe, and check what its methods return.

A slightly wrong recipe must neither silently fail to train nor end the run after hours. Each check
raises a ConfigError: one sentence that names the method, its file and its line.
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

from .config import Config, ConfigError, to_yaml
from .files import TransientError, writing
from .loading.layout import is_stream
from .loading.prepare_once import in_turn, until_all_are_done
from .loading.sampler import first_batches
from .process import process_name
from .recipe import Recipe, optional, problems, source_location
from .stack_traces import progress_reported


def check_recipe(config: Config) -> None:
    """Check the recipe's methods, and that config.yaml can hold its settings."""
    kind = type(config.recipe)
    if found := problems(kind):
        raise ConfigError(f"recipe {kind.__name__}: {'; '.join(found)} (see recipe.py).")
    to_yaml(config)
    for name, value in _undeclared(kind.__name__, config.recipe, [kind]):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which config.yaml cannot restore: annotate the"
            " field with that class itself, not with a base class of it."
        )


def _undeclared(name: str, value: Any, declared: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses in a setting whose class the annotation does not name."""
    if isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _undeclared(name, part, declared)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _undeclared(f"{name}[{key!r}]", part, declared)
    elif dataclasses.is_dataclass(value):
        if type(value) not in declared:
            yield name, value
        with suppress(NameError, TypeError):  # an annotation that cannot be resolved here
            annotations = get_type_hints(type(value))
            for f in dataclasses.fields(value):
                inner = getattr(value, f.name)
                if f.init:
                    yield from _undeclared(f"{name}.{f.name}", inner, _named(annotations[f.name]))


def _named(annotation: Any) -> list[Any]:
    """Return the classes that an annotation names."""
    inner = [kind for part in get_args(annotation) for kind in _named(part)]
    return [annotation, get_origin(annotation), *inner]


# ---- data ----------------------------------------------------------------------------------------
def prepare_data(config: Config) -> dict[str, Any]:
    """Call the recipe's prepare_data in one process first; the others find the work done.

    There is no timeout, since tokenizing can take hours; the working process logs its progress.

    Returns:
        data_info.

    Raises:
        ConfigError: the data cannot be prepared, or data_info is not plain JSON.
        TransientError: the process that this one waited for has ended.
    """
    recipe, folder = config.recipe, Path(config.runs_folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with until_all_are_done(folder, config.run_name), one_line_errors(recipe):
        with in_turn(folder, process_name()), progress_reported("prepare_data"):
            data_info = recipe.prepare_data()
        if not isinstance(data_info, dict):
            _refuse(recipe, "prepare_data", f"returned {_kind(data_info)}; it must return a dict.")
        try:
            data_info = json.loads(json.dumps(data_info))
        except (TypeError, ValueError) as error:
            _refuse(recipe, "prepare_data", f"must return plain JSON: {error}.")
        return data_info


def build_datasets(
    recipe: Recipe, data_info: dict[str, Any], config: Config | None = None
) -> tuple[Any, dict[str, Any]]:
    """Call the recipe's build_datasets.

    Args:
        recipe: reads the data.
        data_info: of prepare_data.
        config: of a run, for its overfit_batches; None: return all samples.

    Returns:
        The training set, and the validation sets by name.

    Raises:
        ConfigError: the data cannot be opened, or the returned value does not follow recipe.py.
    """
    with one_line_errors(recipe):
        returned = recipe.build_datasets(data_info)
    datasets = _checked_datasets(recipe, returned)
    return first_batches(config, *datasets) if config else datasets


def _checked_datasets(recipe: Recipe, returned: Any) -> tuple[Any, dict[str, Any]]:
    wanted = "it must return (train, {name: validation}), with {} for no validation."
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        _refuse(recipe, "build_datasets", f"returned {_kind(returned)}; {wanted}")
    train, validation_sets = returned
    if not isinstance(validation_sets, Mapping) or not all(
        isinstance(name, str) for name in validation_sets
    ):
        problem = f"returned {_kind(validation_sets)} for validation; {wanted}"
        _refuse(recipe, "build_datasets", problem)
    if not is_stream(train):
        _check_map_style(recipe, "the training set", train)
    for name, data in validation_sets.items():
        _check_map_style(recipe, f"validation set {name}", data)
        if len(data) == 0:
            problem = f"returned an empty validation set {name}; return only non-empty sets."
            _refuse(recipe, "build_datasets", problem)
    return train, dict(validation_sets)


def _check_map_style(recipe: Recipe, what: str, data: Any) -> None:
    """Check for length and index; torch's IterableDataset inherits both but supports neither."""
    has_length = True
    try:
        len(data)
    except (TypeError, NotImplementedError):
        has_length = False
    has_index = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not (has_length and has_index):
        missing = "index" if has_length else "length"
        _refuse(
            recipe,
            "build_datasets",
            f"returned {_kind(data)} as {what}, which has no {missing}; return a map-style dataset"
            " (len(data) and data[index]), or for training a stream (lanes and"
            " lane(i, epoch, start, seed)).",
        )


def has_state(lane: Any) -> bool:
    """Return whether what a stream's `lane` has returned can save its position and go on there.

    Raises:
        ConfigError: it has only one of the two methods.
    """
    found = [name for name in ("state_dict", "load_state_dict") if hasattr(lane, name)]
    if len(found) == 1:
        problem = "needs both state_dict and load_state_dict, or neither, for a stream's lane."
        _refuse(lane, found[0], problem)
    return bool(found)


def lane_state(lane: Any) -> str:
    """Call the state_dict of a stream's lane; return the state as JSON.

    Raises:
        ConfigError: the state is not plain JSON, or JSON would restore another value.
    """
    state = lane.state_dict()
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        _refuse(lane, "state_dict", f"must return plain JSON: {error}.")
    if json.loads(text) != state:
        problem = "must return plain JSON: lists, and dicts whose keys are strings; tuples are not."
        _refuse(lane, "state_dict", problem)
    return text


# ---- model and loss ------------------------------------------------------------------------------
def build_model(config: Config, data_info: dict[str, Any]) -> nn.Module:
    """Call the recipe's build_model.

    Raises:
        ConfigError: the model cannot be built from these settings, or is not a module.
    """
    with one_line_errors(config.recipe):
        model = config.recipe.build_model(data_info)
    if not isinstance(model, nn.Module):
        problem = f"returned {_kind(model)}; it must return a torch.nn.Module."
        _refuse(config.recipe, "build_model", problem)
    return model


def check_loss(recipe: Recipe, returned: Any, *, with_gradient: bool = True) -> None:
    """Check the (loss_sum, num_items) of the first micro-batch, before its backward pass."""
    wanted = (
        "; it must return (loss_sum, num_items): the sum of the per-item losses, a scalar tensor"
        " with a gradient, and the number of items in it, a number or scalar tensor."
    )
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        _refuse(recipe, "loss", f"returned {_kind(returned)}{wanted}")
    loss_sum, num_items = returned
    if not isinstance(loss_sum, Tensor) or loss_sum.ndim or not loss_sum.is_floating_point():
        _refuse(recipe, "loss", f"returned {_kind(loss_sum)} as loss_sum{wanted}")
    if with_gradient and not loss_sum.requires_grad:
        _refuse(recipe, "loss", f"returned a loss_sum that does not require a gradient{wanted}")
    if not (isinstance(num_items, Real) or (isinstance(num_items, Tensor) and not num_items.ndim)):
        _refuse(recipe, "loss", f"returned {_kind(num_items)} as num_items{wanted}")
    if not (math.isfinite(num_items) and float(num_items) >= 0):
        problem = f"returned num_items {float(num_items)}, which must be finite and not negative."
        _refuse(recipe, "loss", problem)


# ---- metrics -------------------------------------------------------------------------------------
def build_metrics(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's metrics by name; by default the mean loss."""
    from torchmetrics import MeanMetric, Metric, MetricCollection

    build = optional(recipe, "build_metrics")
    if build is None:
        return {"loss": MeanMetric()}
    metrics = build()
    if not hasattr(metrics, "items") or not all(
        isinstance(name, str) and isinstance(metric, (Metric, MetricCollection))
        for name, metric in metrics.items()
    ):
        problem = (
            f"returned {_kind(metrics)}; it must return a dict of torchmetrics.Metric by name."
        )
        _refuse(recipe, "build_metrics", problem)
    return dict(metrics.items())


def scalars(recipe: Recipe, name: str, value: Any) -> dict[str, float]:
    """Return the result of a metric's compute() as numbers by name; those of a dict by name/key."""
    values: dict[str, float] = {}
    for key, part in value.items() if isinstance(value, dict) else [("", value)]:
        try:
            values[f"{name}/{key}" if key else name] = float(part)
        except (TypeError, ValueError, RuntimeError):
            problem = (
                f"returned a metric {name} whose result is {_kind(part)}; it must be a number or a"
                " dict of numbers (in torchmetrics such as average='macro')."
            )
            _refuse(recipe, "build_metrics", problem)
    return values


# ---- error messages ------------------------------------------------------------------------------
def _refuse(source: Any, method: str, problem: str) -> NoReturn:
    """Raise a ConfigError that names a method of the recipe or of a lane, its file and its line."""
    place = source_location(getattr(source, method))
    raise ConfigError(f"{type(source).__name__}.{method} ({place}) {problem}")


def _kind(value: Any) -> str:
    """Describe a value by its type, and by its shape, keys or the types of its elements."""
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
def one_line_errors(recipe: Recipe) -> Iterator[None]:
    """Turn errors that a user can cause (a wrong path or name) into one line with their source."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError, IsADirectoryError, ConnectionError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f for f in frames if f.filename == inspect.getsourcefile(type(recipe))] or frames
        kind = TransientError if _is_network_error(error) else ConfigError
        raise kind(f"{error} ({at[-1].filename}, line {at[-1].lineno})") from error


def _is_network_error(error: BaseException | None) -> bool:
    """Return whether a network failure was the cause, so that another try may succeed."""
    names = set()
    while error:
        names |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__
    libraries = {"ConnectError", "Timeout", "TimeoutException", "LocalEntryNotFoundError"}
    network_errors = names & (libraries | {"ConnectionError", "TimeoutError"})
    return bool(network_errors) and "OfflineModeIsEnabled" not in names
