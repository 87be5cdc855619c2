"""The commands on the weights of a run: evaluate, predict, export.

Code in an untrusted folder of weights is never run (safety/trust.py). Modules that import torch are
imported when they are used, so --help and errors in the arguments appear immediately.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .config import Config, ConfigError
from .exits import run, run_on_all_ranks
from .files import Json
from .process import LAUNCHER
from .recipe import PARAMETERS, DataInfo, Datasets, Recipe, optional
from .run_files import local_folder
from .safety.search_path import run_folder
from .words import format_metric, make_parser, rendered, say

if TYPE_CHECKING:
    from accelerate import Accelerator

NUM_SAMPLES = 16


# ---- evaluate ------------------------------------------------------------------------------------
def evaluate(words: list[str]) -> None:
    r"""Evaluate a run, an export or a checkpoint with exact metrics.

    python -m my_project evaluate runs/image_classification
    python -m my_project evaluate runs/image_classification/checkpoints/step_00000100
    python -m my_project evaluate runs/image_classification --follow

    accelerate launch --config_file accelerate_configs/multi_gpu.yaml \
        -m my_project evaluate runs/image_classification

    The last command evaluates on several processes. For a run folder, its best/ is evaluated; if
    there is none, its export/; if there is neither, its newest checkpoint.
    """
    parser = make_parser(evaluate.__doc__, "evaluate")
    parser.add_argument("folder", help="a run folder, an export or a checkpoint")
    _add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a line of JSON per evaluation")
    parser.add_argument("--follow", action="store_true", help="evaluate checkpoints as they appear")
    arguments = parser.parse_args(words)
    LAUNCHER.watch()  # before torch is imported
    output = sys.stdout
    if arguments.json:  # standard output is for the JSON alone
        sys.stdout = sys.stderr
    if arguments.follow:
        from .follow import follow_run

        run_on_all_ranks(follow_run, arguments, output)
    run_on_all_ranks(print_evaluation, arguments, output)


def refuse_damaged(folder: Path, problem: str) -> None:
    """Raise a ConfigError if the checkpoint has a problem."""
    if problem:
        raise ConfigError(f"{folder} cannot be used: {problem}; give another checkpoint.")


def print_evaluation(arguments: argparse.Namespace, output: TextIO | None = None) -> int:
    """Evaluate and print the metrics, one per line, or as JSON with --json.

    The weights are those that training evaluates: a checkpoint's EMA, if it has one.
    """
    from . import evaluate, weights
    from .accelerator import check_launch, start_accelerator
    from .checkpoint import resuming
    from .files import finite
    from .ranks import agree, on_main_then_broadcast

    given = local_folder(arguments.folder)
    folder = weights.weights_folder(given)
    config = weights.config_beside(folder, arguments.trust, given)
    check_launch(config)
    data_info, datasets = validation_sets(config)
    with start_accelerator(config) as accelerator:
        # rank 0 chooses, since a run in training may have saved between the choices of two ranks
        below = on_main_then_broadcast(accelerator, lambda: folder.relative_to(given))
        folder = given / below
        before, is_export = weights.trained_steps(folder), weights.is_export(folder)
        if not is_export:
            refuse_damaged(folder, resuming.find_damage_together(accelerator, folder))
            weights.refuse_trained_view(folder)
        if is_export and optional(config.recipe, "load"):
            plain = weights.load_model(folder, config, data_info)
            model = prepared_model(accelerator, config, data_info, plain)
        else:
            model = prepared_model(accelerator, config, data_info)
            weights.load_weights(folder, model.model)
        step = weights.trained_steps(folder)
        agree(accelerator, {f"the step of {folder}": (before, step)})
        if accelerator.is_main_process:
            warn_of_other_data(data_info, folder)
        results = evaluate.evaluate(accelerator, config, model, datasets, step)
        if accelerator.is_main_process:
            if arguments.json:
                line = json.dumps({"weights": str(folder)} | finite(results), allow_nan=False)
                print(line, file=output)
            else:
                say_results(folder, results)
    return 0


def prepared_model(
    accelerator: "Accelerator", config: Config, data_info: DataInfo, plain: Any = None
) -> Any:
    """Return a model prepared for evaluation. Called by every rank.

    Args:
        accelerator: this process's Accelerator.
        config: the run's config.
        data_info: the result of the recipe's prepare_data.
        plain: a model that has its weights; None builds the recipe's model, for the caller to load
            weights into.
    """
    from accelerate.utils import DynamoBackend

    from . import contract
    from .sharding import is_sharding, model_for_sharding

    if dynamo := accelerator.state.dynamo_plugin:
        dynamo.backend = DynamoBackend.NO  # evaluation is not compiled
    if plain is None and is_sharding(accelerator):
        return model_for_sharding(accelerator, config, data_info)
    model = contract.build_model(config, data_info) if plain is None else plain
    wrapper = contract.RecipeModule(model)
    if is_sharding(accelerator):
        wrapper = wrapper.to(accelerator.device)  # which accelerate leaves out, expecting sharding
    return accelerator.prepare_model(wrapper, evaluation_mode=True)


def say_results(folder: Path, results: dict[str, float]) -> None:
    """Print the folder of the weights and, below it, the results of an evaluation, one per line."""
    say(folder)
    width = max(map(len, results), default=0)
    for name, value in results.items():
        say(f"  {name:{width}}  {format_metric(value)}")


# ---- predict -------------------------------------------------------------------------------------
def predict(words: list[str]) -> None:
    """Predict from an input with the weights of a run, or from samples of its validation set.

    python -m my_project predict runs/image_classification
    python -m my_project predict runs/image_classification digit.png

    The first command shows predictions for 16 validation samples. The second predicts from a file
    (in some recipes, from a text) and reads no validation data. Neither needs accelerate.
    For a run folder, its best/ is used, or its export/ if there is no best/.
    """
    run(print_prediction, parse_predict(words))


def parse_predict(words: list[str]) -> argparse.Namespace:
    """Parse the words of the command line."""
    parser = make_parser(predict.__doc__, "predict")
    parser.add_argument("folder", help="a run folder, or runs/<name>/best or runs/<name>/export")
    parser.add_argument(
        "argument",
        nargs="?",
        help="the input, such as an image file; default: validation samples; put -- before an input"
        " that begins with a hyphen",
    )
    _add_trust(parser)
    return parser.parse_args(words)


def print_prediction(arguments: argparse.Namespace) -> None:
    """Print the recipe's prediction for the input, or its answers for validation samples."""
    import torch

    from .weights import errors_as_sentences, load, weights_folder

    given = local_folder(arguments.folder)
    weights = weights_folder(given)
    if weights != given:
        say(f"weights: {weights}", to=sys.stderr)  # standard output is for the answer alone
    if arguments.argument is None:
        show_samples(arguments, weights)
        return
    config, data_info, model = load(weights, arguments.trust, given)
    predict = require_method(config.recipe, "predict")
    with torch.no_grad(), errors_as_sentences():  # such as a file that is not an image
        say(predict(model, data_info, arguments.argument))


# ---- validation samples --------------------------------------------------------------------------
def validation_sets(config: Config) -> tuple[DataInfo, Datasets]:
    """Prepare the recipe's data; return data_info and the validation sets."""
    from . import contract
    from .loading import prepare

    contract.check_recipe(config)
    data_info = prepare.prepare_data(config)
    _, datasets = contract.build_datasets(config.recipe, data_info)
    if not datasets:
        raise ConfigError("the recipe's build_datasets returns no validation set.")
    return data_info, datasets


def warn_of_other_data(data_info: DataInfo, folder: Path) -> None:
    """Warn if the recipe's prepare_data now returns another data_info than in the training.

    Args:
        data_info: what prepare_data returns now.
        folder: an export, a checkpoint or a run; without an export in the run, nothing is compared.
    """
    from .files import read_json
    from .weights import is_export

    run = Path(run_folder(str(folder)))
    export = next(filter(is_export, (folder, run / "best", run / "export")), None)
    # files in a cache of the Hugging Face Hub are links
    if export and not is_close(data_info, read_json(export / "data_info.json", follow=True)):
        say(
            "warning: the weights were trained on other data: prepare_data does not return the"
            f" content of {export}/data_info.json",
            to=sys.stderr,
        )


def is_close(value: Json, other: Json) -> bool:
    """Return whether JSON values are equal, except that numbers may be rounded differently."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_close(value[k], other[k]) for k in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_close, value, other))
    if isinstance(value, float) and isinstance(other, float):
        same = math.isclose(value, other, rel_tol=1e-5, abs_tol=1e-6)
        return same or (math.isnan(value) and math.isnan(other))
    return value == other


def show_samples(arguments: argparse.Namespace, weights: Path) -> None:
    """Print and write the recipe's answers for validation samples."""
    import torch
    from torch.utils.data import Subset

    from .loading.layout import evenly_spaced
    from .weights import config_beside, load

    given = local_folder(arguments.folder)
    config = config_beside(weights, arguments.trust, given)
    recipe = config.recipe
    show = require_method(recipe, "predict_samples", ", or give an input")
    _, exported, model = load(weights, arguments.trust, given)
    data_info, datasets = validation_sets(config)
    data: Any = next(iter(datasets.values()))
    samples = Subset(data, evenly_spaced(data, NUM_SAMPLES))
    warn_of_other_data(data_info, weights)
    folder = Path(run_folder(str(weights)))
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())  # shorter to read
    is_writable = os.access(folder, os.W_OK)
    within = folder if is_writable else None
    with tempfile.TemporaryDirectory(prefix=".predict-", dir=within) as temporary:
        with torch.no_grad():
            say(rendered(show(model, exported, samples, Path(temporary)) or ""))
        paths = sorted(path for path in Path(temporary).iterdir() if path.is_file())
        if paths and not is_writable:
            folder = Path(tempfile.mkdtemp(prefix="predictions-"))
        for path in paths:
            # an existing link of that name, which may be untrusted, is replaced, not followed
            os.replace(path, folder / path.name)
            say(folder / path.name)


def require_method(recipe: Recipe, method: str, other_remedy: str = "") -> Callable:
    """Return an optional method of the recipe; refuse a recipe without it."""
    if function := optional(recipe, method):
        return function
    signature = f"{method}({', '.join(PARAMETERS[method])})"
    raise ConfigError(f"{type(recipe).__name__} has no {signature}; add it{other_remedy}.")


# ---- export --------------------------------------------------------------------------------------
def export(words: list[str]) -> None:
    """Write the weights of a checkpoint or an export, sharded or not, into one file.

    python -m my_project export runs/my_run/checkpoints/step_00000100 weights.safetensors
    """
    parser = make_parser(export.__doc__, "export")
    parser.add_argument("folder", help="a checkpoint or an export")
    parser.add_argument("file", help="the safetensors file to write")
    parser.add_argument("--ema", action="store_true", help="the EMA weights (ema_decay)")
    run(write_one_file, parser.parse_args(words))


def write_one_file(arguments: argparse.Namespace) -> int:
    """Write the weights of a checkpoint or an export, in any number of files, into one file.

    Only one tensor at a time is in memory. The file gets its final name when it is complete.
    """
    from .checkpoint.shards import TensorReader, in_file_order, save_tensors
    from .files import flush_to_disk
    from .manifest import find_damage
    from .weights import is_export, refuse_trained_view

    folder, path = local_folder(arguments.folder), Path(arguments.file)
    if not is_export(folder):
        if not (folder / "manifest.json").is_file():
            raise ConfigError(
                f"{folder} does not exist, or is not a complete checkpoint or an export: give"
                " runs/<name>/checkpoints/step_<n>, runs/<name>/export or runs/<name>/best."
            )
        refuse_damaged(folder, find_damage(folder))
        refuse_trained_view(folder)
    if path.exists() or not path.parent.is_dir():
        problem = "exists" if path.exists() else "is in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a new file.")
    readers: dict[str, TensorReader] = {}
    metadata = {"format": "pt"}
    kinds = ["model"]
    if arguments.ema:
        kinds.append("ema")
    for kind in kinds:
        reader = TensorReader(folder, kind)
        readers |= dict.fromkeys(reader.shapes.keys() - reader.aliases.keys(), reader)
        metadata |= reader.aliases
    tensors = in_file_order({name: reader.meta(name) for name, reader in readers.items()})
    temporary = path.with_name(f".{path.name}.partial")
    try:
        values = (readers[name].read(name) for name in tensors)
        save_tensors(tensors, temporary, values, metadata)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    say(f"{path}: {len(tensors)} tensors, {path.stat().st_size} bytes")
    return 0


# ---- evaluate and predict ------------------------------------------------------------------------
def _add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option --trust."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="CLASS_PATH",
        help="import this class, which config.yaml names and which is not part of this project",
    )
