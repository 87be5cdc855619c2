"""Predict with an export, without accelerate or the training data.

python -m my_project.predict runs/image_classification/export digit.png
python -m my_project.predict runs/image_classification/export --onnx

The second command writes model.onnx beside the weights. Code of an untrusted export is never run
(safety/trust.py).
"""

import sys

from .safety.search_path import leave_out_weights

if __name__ == "__main__":
    leave_out_weights(sys.argv[1:])  # before any other import

import argparse
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cli import make_parser, run
from .config import Config, ConfigError
from .export import load
from .recipe import optional
from .safety.trust import add_trust


def write_onnx(path: Path, config: Config, data_info: dict[str, Any], model: nn.Module) -> None:
    """Write the model's forward as ONNX, for any batch size."""
    example_of = optional(config.recipe, "example_inputs")
    if example_of is None:
        raise ConfigError("the recipe has no example_inputs(data_info), which --onnx needs.")
    if find_spec("onnxscript") is None:
        raise ConfigError("--onnx needs onnxscript: pip install -e '.[onnx]'.")
    inputs = example_of(data_info)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=path.parent) as folder:
        written = os.path.join(folder, path.name)  # `path` may be a symlink of an untrusted export
        torch.onnx.export(
            model, inputs, written, dynamo=True, dynamic_shapes=shapes, external_data=False
        )
        os.replace(written, path)


def main(arguments: argparse.Namespace) -> None:
    """Print the recipe's prediction, or write the ONNX file."""
    folder = Path(arguments.folder)
    config, data_info, model = load(folder, arguments.trust)
    if arguments.onnx:
        write_onnx(folder / "model.onnx", config, data_info, model)
        print(folder / "model.onnx")
        return
    if arguments.argument is None:
        raise ConfigError("no input is given; give one, such as an image file, or --onnx.")
    predict = optional(config.recipe, "predict")
    if predict is None:
        raise ConfigError(
            f"{type(config.recipe).__name__} has no predict(model, data_info, argument); add it."
        )
    with torch.no_grad():
        print(predict(model, data_info, arguments.argument))


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("folder", help="runs/<name>/export or runs/<name>/best")
    parser.add_argument("argument", nargs="?", help="the input of the recipe's predict")
    add_trust(parser)
    parser.add_argument("--onnx", action="store_true", help="write model.onnx into the folder")
    run(main, parser.parse_args())
