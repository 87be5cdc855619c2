"""From an export to an answer, without accelerate, the network or the training data.

python -m my_project.predict runs/image_classification/export digit.png
python -m my_project.predict runs/image_classification/export --onnx

The second writes model.onnx beside the weights. Nothing of a stranger's export is run (trust.py).
"""

import sys

from .search_path import leave_out_weights

if __name__ == "__main__":
    leave_out_weights(sys.argv[1:])  # before any other import

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from .config import Config, ConfigError, exit_with_sentence
from .recipe import Recipe, optional
from .trust import add_trust, read_config


def load(folder: Path, trusted: Iterable[str] = ()) -> tuple[Config, dict[str, Any], nn.Module]:
    """Build the model of an export and load its weights, every key of them.

    Args:
        folder: the export, whoever made it.
        trusted: class paths that may be imported besides this project's own (trust.py).

    Raises:
        ConfigError: the folder is no export, it names a class that is not trusted, or its weights
            do not fit the model.
    """
    for name in ("config.yaml", "data_info.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no export: it has no {name}; give runs/<name>/export.")
    config = read_config(folder / "config.yaml", trusted)
    try:
        data_info = json.loads((folder / "data_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}/data_info.json cannot be read: {error}.") from error
    if not isinstance(data_info, dict):
        raise ConfigError(
            f"{folder}/data_info.json holds a {type(data_info).__name__}; an export has what its"
            " recipe's prepare_data returned, a dict."
        )
    return config, data_info, load_model(folder, config.recipe, data_info).eval()


def load_model(folder: Path, recipe: Recipe, data_info: dict[str, Any]) -> nn.Module:
    """Build the model of an export and load its weights, by the recipe's `load` if it has one.

    Raises:
        ConfigError: they are not there or do not fit.
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


def write_onnx(path: Path, config: Config, data_info: dict[str, Any], model: nn.Module) -> None:
    """Write the model's forward as ONNX, for any batch size."""
    example_of = optional(config.recipe, "example_inputs")
    if example_of is None:
        raise ConfigError("the recipe has no example_inputs(data_info), which --onnx traces with.")
    if find_spec("onnxscript") is None:
        raise ConfigError("--onnx needs onnxscript: pip install -e '.[onnx]'.")
    inputs = example_of(data_info)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=path.parent) as folder:
        written = os.path.join(folder, path.name)  # at `path` a stranger's link may lie
        torch.onnx.export(
            model, inputs, written, dynamo=True, dynamic_shapes=shapes, external_data=False
        )
        os.replace(written, path)


def main(arguments: argparse.Namespace) -> None:
    """Print the recipe's answer, or write the ONNX file."""
    folder = Path(arguments.folder)
    config, data_info, model = load(folder, arguments.trust)
    if arguments.onnx:
        write_onnx(folder / "model.onnx", config, data_info, model)
        print(folder / "model.onnx")
        return
    if arguments.argument is None:
        raise ConfigError("give an argument to answer for, such as an image file, or --onnx.")
    predict = optional(config.recipe, "predict")
    if predict is None:
        raise ConfigError(
            f"{type(config.recipe).__name__} has no predict(model, data_info, argument)."
        )
    with torch.no_grad():
        print(predict(model, data_info, arguments.argument))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="runs/<name>/export or runs/<name>/best")
    parser.add_argument("argument", nargs="?", help="what the recipe's predict takes")
    add_trust(parser)
    parser.add_argument("--onnx", action="store_true", help="write model.onnx into the folder")
    try:
        main(parser.parse_args())
    except ConfigError as error:
        exit_with_sentence(error)
