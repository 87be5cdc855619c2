"""Read the weights of exports and checkpoints, without accelerate.

checkpoint/exporting.py writes exports, and checkpoint/saving.py checkpoints.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import nn

from . import contract
from .checkpoint.shards import TensorReader, model_tensors
from .config import Config, ConfigError
from .ema import load_ema
from .failures import exception_frames, own_frame
from .files import read_json, read_own, temporary_folder
from .manifest import read_manifest
from .recipe import DataInfo, optional
from .run_files import checkpoints
from .safety.search_path import run_folder
from .safety.trust import read_config


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn a recipe's error about an input or untrusted files into a message with file and line."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        frames = exception_frames(error)
        frame = own_frame(frames) or frames[-1]
        raise ConfigError(f"{error} ({frame.file}, line {frame.line})") from error


def load(
    folder: Path, trusted: Iterable[str] = (), given: Path | None = None
) -> tuple[Config, DataInfo, nn.Module]:
    """Build the model of an export and load all of its weights.

    Args:
        folder: the export.
        trusted: class paths that may be imported besides this project's own (safety/trust.py).
        given: the folder named on the command line; by default `folder`.

    Raises:
        ConfigError: the folder is not an export, names a class that is not trusted, or its weights
            do not fit the model.
    """
    if not is_export(folder) and (folder / "manifest.json").is_file():
        raise ConfigError(
            f"{folder} is a checkpoint, but a prediction needs an export, which a run writes at its"
            " end (with evaluation.best_metric also at each best evaluation). Continue the run, or"
            " evaluate the checkpoint."
        )
    for name in ("config.yaml", "data_info.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} has no {name}; give an export, such as runs/<name>/export."
            )
    config = read_config(folder / "config.yaml", trusted, given)
    try:
        data_info = dict(json.loads(read_own(folder / "data_info.json", follow=True)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / 'data_info.json'} is damaged: {error}.") from error
    with errors_as_sentences():
        return config, data_info, load_model(folder, config, data_info).eval()


def load_model(folder: Path, config: Config, data_info: DataInfo) -> nn.Module:
    """Build the model of an export and load its weights, with the recipe's `load` if it has one.

    Raises:
        ConfigError: the weights are missing, damaged, or do not fit the model.
        Exception: an error of the recipe's `load`.
    """
    if recipe_load := optional(config.recipe, "load"):
        contract.seed_model(config.seed)
        loaded: nn.Module = recipe_load(data_info, folder)
        contract.check_model(config.recipe, "load", loaded)
        return loaded
    model = contract.build_model(config, data_info)
    TensorReader(folder, "model").fill(model_tensors(model))
    return model


def trained_steps(folder: Path) -> int:
    """Return the number of steps that an export or a checkpoint was trained for; 0 if unknown."""
    step = read_json(folder / "step.json", follow=True).get("step")
    with suppress(ValueError, OSError):  # an old export without step.json
        return max(0, step if isinstance(step, int) else read_manifest(folder)["step"])
    return 0


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights that an evaluation uses into a plain or a sharded module.

    Args:
        folder: an export or a checkpoint.
        model: the module.
    """
    TensorReader(folder, "model").fill(model_tensors(model))
    if any(folder.glob("ema.*")):
        load_ema(folder, model)


def refuse_trained_view(folder: Path) -> None:
    """Refuse a checkpoint of an optimizer that evaluates other weights than those it trains."""
    optimizer = read_manifest(folder)["state"].get("optimizer")  # may be untrusted
    if isinstance(optimizer, dict) and optimizer.get("has_two_views"):
        raise ConfigError(
            f"{folder} holds the weights that its optimizer trains, but the optimizer's eval() sets"
            " other weights for an evaluation: give the run's best/ or export/."
        )


def weights_folder(folder: Path) -> Path:
    """Return the folder of weights for a path: for a run, best/, export/ or the last checkpoint."""
    for candidate in (folder, folder / "best", folder / "export"):
        if is_export(candidate) or (candidate / "manifest.json").is_file():
            return candidate
    if saved := checkpoints(folder):
        return saved[-1]
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}.")
    raise ConfigError(
        f"{folder} holds neither an export nor a checkpoint; give a run folder or one of these."
    )


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export, not a checkpoint or a run folder."""
    return (folder / "data_info.json").is_file()


def config_beside(folder: Path, trusted: Iterable[str] = (), given: Path | None = None) -> Config:
    """Return the config for evaluating an export, or a run or its checkpoint.

    Its runs_folder, in which prepare_data makes locks, is the folder around the run or, if that
    cannot be written to, this user's temporary folder.

    Args:
        folder: the export, checkpoint or run.
        trusted: class paths that may be imported besides this project's own (safety/trust.py).
        given: the folder named on the command line; by default `folder`.
    """
    run = Path(run_folder(str(folder)))
    for candidate in (folder, run):
        if (candidate / "config.yaml").is_file():
            config = read_config(candidate / "config.yaml", trusted, given or folder)
            runs = run.parent if os.access(run.parent, os.W_OK) else temporary_folder()
            return dataclasses.replace(config, runs_folder=str(runs), run_name=run.name)
    raise ConfigError(f"{folder} has no config.yaml; give a run folder, an export or a checkpoint.")
