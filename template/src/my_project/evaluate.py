"""Evaluate a run, an export or a checkpoint with exact metrics.

python -m my_project.evaluate runs/image_classification
python -m my_project.evaluate runs/image_classification/checkpoints/step_00000100

A run folder means its export or, if there is none yet, its newest checkpoint. Code in an untrusted
folder is never run (safety/trust.py).
"""

import sys

from .safety.search_path import leave_out_weights

if __name__ == "__main__":
    leave_out_weights(sys.argv[1:])  # before any other import

from .process import LAUNCHER

if __name__ == "__main__":
    LAUNCHER.watch()  # before torch is imported

import argparse
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cli
from .safety.trust import add_trust


def parse_arguments() -> argparse.Namespace:
    """Read the command line; --help imports no torch."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("folder", help="a run folder, an export or a checkpoint")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


ARGUMENTS = parse_arguments() if __name__ == "__main__" else None

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from . import contract, devices, export, sharding
from .blocks import not_compiled
from .checkpoint import resuming
from .checkpoint.verification import on_main_with_hashes
from .collectives import on_main_then_broadcast
from .config import Config, ConfigError
from .export import config_beside, is_export, load_model, weights_folder
from .files import finite
from .loading.loader import Fetch, make_loader, on_device
from .loading.seeding import fork_rng
from .metric_state import merge_on_main
from .recipe import optional
from .records.display import print_table
from .records.outcome import format_metric
from .records.runs import printable

logger = logging.getLogger(__name__)


def evaluate(
    accelerator: Accelerator,
    config: Config,
    model: Any,
    datasets: dict[str, Any],
    *,
    is_sanity_check: bool = False,
) -> dict[str, float]:
    """Evaluate every named dataset; each sample counts once.

    Args:
        accelerator: this process's Accelerator.
        config: the run's config.
        model: prepared; called with a function of the plain model (sharding.RecipeModule).
        datasets: map-style, by name.
        is_sanity_check: take one micro-batch of each.

    Returns:
        The value of each metric, "<dataset>/<metric>", the same on every rank.
    """
    results: dict[str, float] = {}
    with evaluation_mode(accelerator, model):
        for name, data in datasets.items():
            values = _evaluate_one(accelerator, config, model, data, is_sanity_check)
            results |= {f"{name}/{metric}": value for metric, value in values.items()}
    return results


@contextmanager
def evaluation_mode(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Set a prepared model to evaluation: no gradients, and the buffers of rank 0 on every rank."""
    model.eval()
    reshard(model)
    broadcast_buffers(accelerator, model)
    try:
        with torch.no_grad(), not_compiled(model):
            yield
    finally:
        reshard(model)
        model.train()


def sample(config: Config, model: Any) -> str:
    """Return the recipe's sample, such as a generated text; empty where it has no such method.

    In evaluation mode, and on every rank: each holds only a part of a sharded model.
    """
    sample_of = optional(config.recipe, "sample")
    return str(model(sample_of)) if sample_of else ""


def sanity_check(
    accelerator: Accelerator, config: Config, model: Any, datasets: dict[str, Any]
) -> None:
    """Run one micro-batch of each dataset through the evaluation, before the first step.

    A mistake in a metric then ends the run before it has trained. The results are discarded; random
    state, weights and buffers are restored, so the run is the same as without.
    """
    gpus = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with (
            restored_state(model),
            fork_rng(),
            torch.random.fork_rng(devices=gpus),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # such as that a micro-batch lacks a class
            evaluate(accelerator, config, model, datasets, is_sanity_check=True)
            with evaluation_mode(accelerator, model):
                sample(config, model)
    except Exception as error:
        error.add_note(
            "This was the evaluation of one micro-batch before the first step;"
            " evaluation.sanity_check false leaves it out."
        )
        raise


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers: some modules set them in their first forward."""
    kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (named, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for named in (module._parameters, module._buffers)
        for name, tensor in named.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for named, name, tensor, copy in kept:
                named[name] = tensor.copy_(copy)


def reshard(model: nn.Module) -> None:
    """Let sharded modules gather their weights again: the copies may be stale after an EMA swap."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _evaluate_one(
    accelerator: Accelerator, config: Config, model: Any, data: Any, is_sanity_check: bool
) -> dict[str, float]:
    recipe, world_size = config.recipe, accelerator.num_processes
    own = range(accelerator.process_index, len(data), world_size)
    batches = config.batches
    size = config.evaluation.batch_size or batches.micro_batch_size
    size = size or max(1, batches.global_batch_size // world_size)
    index_lists = [[("evaluation", i) for i in own[k : k + size]] for k in range(0, len(own), size)]
    forwards = math.ceil(math.ceil(len(data) / world_size) / size)
    if is_sanity_check:
        index_lists, forwards = index_lists[:1], 1
    counted = len(index_lists)
    # Each rank makes the same number of forward passes, else FSDP deadlocks; surplus ones go to
    # metrics that are discarded.
    index_lists += [[("evaluation", 0)]] * (forwards - counted)
    fetch = Fetch(data, optional(recipe, "collate"), config.seed, config.batches.seed_samples)
    # With workers, this process reads no sample: the workers would inherit a file that the dataset
    # opens at its first sample, and share its offset.
    brief = {"max_workers": 1, "persistent_workers": False} if is_sanity_check else {}
    loader = make_loader(
        config.batches, fetch, accelerator.device, batch_sampler=index_lists, **brief
    )

    update = optional(recipe, "update_metrics") or recipe_loss(config)
    metrics, discarded = (_on(contract.build_metrics(recipe), accelerator.device) for _ in range(2))
    for k, batch in enumerate(on_device(loader, accelerator.device)):
        model(update, batch, metrics if k < counted else discarded)
    merge_on_main(accelerator, metrics)
    return _values(accelerator, config, metrics, is_sanity_check)


def _values(
    accelerator: Accelerator, config: Config, metrics: dict[str, Any], is_sanity_check: bool
) -> dict[str, float]:
    """Compute on rank 0, which holds the merged state; return the values on every rank."""
    failures: list[Exception] = []

    def compute() -> dict[str, float] | str:
        values: dict[str, float] = {}
        for name, metric in metrics.items():
            try:
                value = metric.compute()
            except Exception as error:  # a metric may raise anything when samples are too few
                if not is_sanity_check:
                    failures.append(error)  # not every exception can be sent
                    return f"the metric {name} could not be computed on rank 0: {error!r}"
                logger.warning("metric %s cannot be computed from one micro-batch: %s", name, error)
                continue
            values |= contract.scalars(config.recipe, name, value)
        return values

    found = on_main_then_broadcast(accelerator, compute)
    if isinstance(found, str):
        raise failures[0] if failures else RuntimeError(found)
    return found


def _on(metrics: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: metric.to(device) for name, metric in metrics.items()}


def recipe_loss(config: Config) -> Any:
    """Make an update_metrics out of a recipe's loss."""

    def update(model: nn.Module, batch: Any, metrics: dict[str, Any]) -> None:
        returned = config.recipe.loss(model, batch, 0)
        contract.check_loss(config.recipe, returned, with_gradient=False)
        loss_sum, num_items = returned
        if num_items > 0:
            metrics["loss"].update(loss_sum / num_items, num_items)

    return update


def broadcast_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Broadcast the buffers of rank 0 (BatchNorm statistics), as DDP does in training."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def main(arguments: argparse.Namespace) -> int:
    """Evaluate and print the metrics as a table or, with --json, as JSON.

    The weights are those that training evaluates: a checkpoint's EMA, if it has one.
    """
    output = sys.stdout
    if arguments.json:  # standard output is for the JSON alone
        sys.stdout = sys.stderr
    folder = weights_folder(Path(arguments.folder))
    config = config_beside(folder, arguments.trust, Path(arguments.folder))
    devices.check_launch(config)
    contract.check_recipe(config)
    data_info, reader = contract.prepare_data(config)
    _, datasets = contract.build_datasets(reader, data_info)
    if not datasets:
        raise ConfigError("the recipe's build_datasets returns no validation set.")
    with devices.start(config) as accelerator:
        if is_export(folder):
            model = load_model(folder, config.recipe, data_info)
        else:
            on_main_with_hashes(accelerator, lambda find: resuming.check(folder, find))
            model = contract.build_model(config, data_info)
            export.load_weights(folder, model)
        if plugin := accelerator.state.dynamo_plugin:
            plugin.backend = DynamoBackend.NO  # evaluation is not compiled
        model = accelerator.prepare_model(sharding.RecipeModule(model), evaluation_mode=True)
        results = evaluate(accelerator, config, model, datasets)
        with evaluation_mode(accelerator, model):
            text = sample(config, model)
        if accelerator.is_main_process:
            if text:
                logger.info("sample: %s", "\n".join(map(printable, text.splitlines())))
            if arguments.json:
                found = json.dumps({"weights": str(folder)} | finite(results), allow_nan=False)
                print(found, file=output)
                sys.stdout = output
            else:
                print_table(
                    {name: format_metric(value) for name, value in results.items()}, str(folder)
                )
    return 0


if ARGUMENTS:
    cli.run_on_all_ranks(main, ARGUMENTS)
