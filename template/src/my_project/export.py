"""Write the weights of a checkpoint, sharded or not, into one file.

    python -m my_project export runs/my_run/checkpoints/step_00000100 weights.safetensors

The module also writes and reads the exports of runs, which load without accelerate.
"""

import argparse
import dataclasses
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cli


def parse_arguments() -> argparse.Namespace:
    """Read the command line; --help imports no torch."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("folder", help="a checkpoint")
    parser.add_argument("file", help="the safetensors file to write")
    parser.add_argument("--ema", action="store_true", help="the EMA weights (ema_decay)")
    return parser.parse_args()


ARGUMENTS = parse_arguments() if __name__ == "__main__" else None

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .checkpoint import resuming
from .checkpoint.resuming import check
from .checkpoint.shards import TensorReader, model_tensors, save_tensors
from .config import Config, ConfigError, TelemetryConfig, to_yaml
from .files import replace_folder
from .recipe import Recipe, optional
from .run_folder import Run
from .safety.search_path import run_folder
from .safety.trust import read_config

if TYPE_CHECKING:
    # it imports accelerate, which predict.py does without
    from .checkpoint.saving import Checkpoints

logger = logging.getLogger(__name__)


def export(run: Run, data_info: dict[str, Any], model: nn.Module) -> None:
    """Write what predict.py needs to export/. Called by every rank; rank 0 writes."""
    weights = model_tensors(model, whole=True)
    if run.rank == 0:
        replace_folder(run.folder / "export", lambda to: _fill(run, data_info, model, weights, to))


def export_best(
    run: Run, data_info: dict[str, Any], model: nn.Module, checkpoints: "Checkpoints"
) -> None:
    """Export to best/ as checkpoints are saved: in the background. Called by every rank.

    A recipe's own `export` is called before this returns: it may read the model, which training
    changes, and draw random numbers; only flushing to disk is left to the background.
    """
    live = model_tensors(model)
    gathered = {name for name, tensor in live.items() if isinstance(tensor, DTensor)}
    weights = model_tensors(model, whole=True) if gathered else live
    if run.rank != 0:
        return
    if optional(run.config.recipe, "export"):
        checkpoints.replace_best_now(lambda to: _fill(run, data_info, model, weights, to))
    else:
        checkpoints.replace_best(
            weights, lambda to, copies: _fill(run, data_info, model, copies, to), gathered
        )


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded the model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _fill(
    run: Run, data_info: dict[str, Any], model: nn.Module, weights: dict[str, Any], folder: Path
) -> None:
    config = run.config
    if export_of := optional(config.recipe, "export"):
        plain = model
        if is_sharded(model):
            plain = config.recipe.build_model(data_info)
            plain.load_state_dict(weights)
        export_of(plain, data_info, folder)
    else:
        save_tensors(weights, folder / "model.safetensors")
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "data_info.json").write_text(json.dumps(data_info))


def load(
    folder: Path, trusted: Iterable[str] = (), given: Path | None = None
) -> tuple[Config, dict[str, Any], nn.Module]:
    """Build the model of an export and load its weights, every key of them.

    Args:
        folder: the export.
        trusted: class paths that may be imported besides this project's own (safety/trust.py).
        given: the folder as named on the command line.

    Raises:
        ConfigError: the folder is not an export, names a class that is not trusted, or its weights
            do not fit the model.
    """
    for name in ("config.yaml", "data_info.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} has no {name}; give an export, such as runs/<name>/export."
            )
    config = read_config(folder / "config.yaml", trusted, given)
    try:
        data_info = json.loads((folder / "data_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}/data_info.json cannot be read: {error}.") from error
    if not isinstance(data_info, dict):
        raise ConfigError(
            f"{folder}/data_info.json holds a {type(data_info).__name__}; it must hold the dict"
            " that the recipe's prepare_data returned."
        )
    return config, data_info, load_model(folder, config.recipe, data_info).eval()


def load_model(folder: Path, recipe: Recipe, data_info: dict[str, Any]) -> nn.Module:
    """Build the model of an export and load its weights, by the recipe's `load` if it has one.

    Raises:
        ConfigError: the weights are missing, damaged, or do not fit the model.
    """
    try:
        if load_of := optional(recipe, "load"):
            loaded: nn.Module = load_of(data_info, folder)
            return loaded
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder}: the weights cannot be loaded: {error}") from error
    model: nn.Module = recipe.build_model(data_info)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ConfigError(f"{folder}/model.safetensors does not fit the model: {error}") from error
    return model


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights, or its EMA, into the plain module; the keys must match."""
    TensorReader(folder, "model").fill(model.state_dict())
    if any(folder.glob("ema.*")):
        averages = TensorReader(folder, "ema")
        named = model.named_parameters()
        averages.fill({name: p.detach() for name, p in named if name in averages.shapes})


def weights_folder(folder: Path) -> Path:
    """Return the export or checkpoint that a path means; for a run, its export comes first."""
    for candidate in (folder, folder / "export"):
        if is_export(candidate) or (candidate / "manifest.json").is_file():
            return candidate
    if found := resuming.checkpoints(folder):
        return found[-1]
    raise ConfigError(
        f"{folder} holds neither an export nor a checkpoint; give a run folder or one of these."
    )


def is_export(folder: Path) -> bool:
    """Return whether a folder is an export, not a checkpoint or a run folder."""
    return (folder / "data_info.json").is_file()


def config_beside(folder: Path, trusted: Iterable[str] = (), given: Path | None = None) -> Config:
    """Return the config for evaluating an export, or a checkpoint of a run.

    The locks of prepare_data lie beside the run, or in this user's temporary folder.

    Args:
        folder: the export or checkpoint.
        trusted: class paths that may be imported besides this project's own (safety/trust.py).
        given: the folder as named on the command line.
    """
    run = Path(run_folder(str(folder)))
    for candidate in (folder, run):
        if (candidate / "config.yaml").is_file():
            config = read_config(candidate / "config.yaml", trusted, given or folder)
            runs = run.parent if os.access(run.parent, os.W_OK) else temporary_folder()
            return dataclasses.replace(
                config,
                telemetry=TelemetryConfig(trackers=[]),
                runs_folder=str(runs),
                run_name=run.name,
            )
    raise ConfigError(f"{folder} and {run} have no config.yaml; give an export or a checkpoint.")


def temporary_folder() -> Path:
    """Create and return a temporary folder that only this user can write to."""
    folder = Path(tempfile.gettempdir(), f"{__name__.partition('.')[0]}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o022 or folder.is_symlink():
        raise ConfigError(
            f"{folder} belongs to, or is writable by, other users; remove it, or set TMPDIR."
        )
    return folder


def merge(arguments: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, sharded or not, into one safetensors file."""
    folder, path = Path(arguments.folder), Path(arguments.file)
    check(folder)
    if path.exists() or not path.parent.is_dir():
        problem = "exists" if path.exists() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a new file.")
    merged: dict[str, Tensor] = {}
    for kind in ["model", "ema"] if arguments.ema else ["model"]:
        tensors = TensorReader(folder, kind)
        merged |= {name: tensors.read(name) for name in tensors.shapes}
    save_tensors(merged, path)
    print(f"{path}: {len(merged)} tensors, {path.stat().st_size} bytes")
    return 0


if ARGUMENTS:
    cli.run_on_all_ranks(merge, ARGUMENTS)
