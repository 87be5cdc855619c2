"""Exact metrics for any data set size and number of processes; also a command.

python -m my_project.evaluate runs/image_classification
python -m my_project.evaluate runs/image_classification/checkpoints/step_00000100

A run folder means its export or, where there is none yet, its newest checkpoint.
"""

import argparse
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from . import checkpoint, runtime
from .batches import Fetch, make_loader, on_device
from .config import Config, ConfigError, TelemetryConfig, parse
from .predict import load_model
from .recipe import optional
from .run import build_model, prepare_data

logger = logging.getLogger(__name__)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, config: Config, call: Any, data_sets: dict[str, Any]
) -> dict[str, float]:
    """Evaluate every named data set; each sample counts once.

    Args:
        accelerator: of this process.
        config: of the run.
        call: the prepared model, called with a function of the plain model (runtime.Call).
        data_sets: map-style, by name.

    Returns:
        The value of each metric, "<data set>/<metric>", the same on every process.
    """
    call.eval()
    forget_gathered(call)
    runtime.share_buffers(accelerator, call)
    results: dict[str, float] = {}
    for name, data in data_sets.items():
        for metric, value in _evaluate_one(accelerator, config, call, data).items():
            results[f"{name}/{metric}"] = value
    if sample := optional(config.recipe, "sample"):
        text = call(sample)  # on every process: each holds only a part of a sharded model
        if accelerator.is_main_process:
            logger.info("sample: %s", text)
    forget_gathered(call)
    call.train()
    return results


def forget_gathered(call: nn.Module) -> None:
    """Let sharded modules gather their weights anew: those may be averaged ones, or be again."""
    for module in call.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _evaluate_one(
    accelerator: Accelerator, config: Config, call: Any, data: Any
) -> dict[str, float]:
    recipe, processes = config.recipe, accelerator.num_processes
    if len(data) == 0:
        raise ConfigError("a validation set is empty; return only sets that hold samples.")
    own = range(accelerator.process_index, len(data), processes)
    batches = config.batches
    size = config.evaluation.batch_size or batches.micro_batch_size
    size = size or max(1, batches.global_batch_size // processes)
    index_lists = [[("evaluation", i) for i in own[k : k + size]] for k in range(0, len(own), size)]
    counted = len(index_lists)
    # Every process makes the same number of forwards, else sharded models wait for ever: the ones
    # too many go to metrics that are thrown away.
    for _ in range(counted, math.ceil(math.ceil(len(data) / processes) / size)):
        index_lists.append([("evaluation", 0)])
    fetch = Fetch(data, optional(recipe, "collate"), config.seed, config.batches.seed_samples)
    loader = make_loader(config.batches, fetch, accelerator.device, batch_sampler=index_lists)

    build_metrics = optional(recipe, "build_metrics") or _loss_metric
    update = optional(recipe, "update_metrics") or recipe_loss(config)
    metrics, thrown_away = (_on(build_metrics(), accelerator.device) for _ in range(2))
    for k, batch in enumerate(on_device(loader, accelerator.device)):
        call(update, batch, metrics if k < counted else thrown_away)
    merge(accelerator, metrics)
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            values[f"{name}/{key}" if key else name] = float(part)
    return values


def _on(metrics: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: metric.to(device) for name, metric in metrics.items()}


def _loss_metric() -> dict[str, Any]:
    """Build the metric of a recipe that has none: the sum of losses over the sum of weights."""
    from torchmetrics import MeanMetric

    return {"loss": MeanMetric()}


def recipe_loss(config: Config) -> Any:
    """Make an update_metrics out of a recipe's loss."""

    def update(model: nn.Module, batch: Any, metrics: dict[str, Any]) -> None:
        total, weight = config.recipe.loss(model, batch, 0)
        if weight > 0:
            metrics["loss"].update(total / weight, weight)

    return update


def merge(accelerator: Accelerator, metrics: dict[str, Any]) -> None:
    """Give every process the metrics' state over all processes.

    In place of torchmetrics' own gathering, which aborts the process when one rank holds a list
    of values and another, without samples, an empty one.
    """
    from torchmetrics import Metric

    parts = [
        part
        for name in sorted(metrics)
        for part in metrics[name].modules()
        if isinstance(part, Metric)
    ]
    mine = [
        (part._update_count, {name: _to_cpu(getattr(part, name)) for name in part._reductions})
        for part in parts
    ]
    everywhere = gather_object([mine])
    reduce: Any
    for i, part in enumerate(parts):
        part._to_sync = False  # compute() is to take this state as it is
        updated = [rank[i] for rank in everywhere if rank[i][0]]
        part._update_count = sum(count for count, _ in updated)
        for name, reduce in part._reductions.items():
            values = [state[name] for _, state in updated]
            if not values:
                continue
            if isinstance(values[0], list):
                joined = [tensor.to(part.device) for value in values for tensor in value]
                setattr(part, name, [torch.cat(joined)] if joined and _is_cat(reduce) else joined)
            else:
                stacked = torch.stack([value.to(part.device) for value in values])
                setattr(part, name, reduce(stacked) if reduce else stacked)


def _is_cat(reduce: Any) -> bool:
    from torchmetrics.utilities import dim_zero_cat

    return reduce is dim_zero_cat


def _to_cpu(state: Tensor | list[Tensor]) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    return [torch.atleast_1d(tensor.detach().cpu()) for tensor in state]


def check_best_metric(config: Config, data_sets: dict[str, Any]) -> None:
    """Refuse a best_metric that no evaluation will give."""
    wanted = config.evaluation.best_metric
    if wanted is None:
        return
    metrics = optional(config.recipe, "build_metrics")
    names = [
        f"{data}/{metric}" for data in data_sets for metric in (metrics() if metrics else ["loss"])
    ]
    if not any(wanted == name or wanted.startswith(f"{name}/") for name in names):
        raise ConfigError(
            f"evaluation.best_metric {wanted} is none of {', '.join(names) or 'no metrics at all'}."
        )


def note_best(config: Config, state: dict[str, Any], results: dict[str, float]) -> bool:
    """Tell whether these results are the best so far, and count those that were not."""
    state["results"], state["evaluated_step"] = results, state["step"]
    name = config.evaluation.best_metric
    if name is None:
        return False
    sign = 1 if config.evaluation.best_mode == "max" else -1
    value = results[name]
    better = not math.isnan(value) and (
        state["best"] is None or sign * value > sign * state["best"]
    )
    state["best"] = value if better else state["best"]
    state["evaluations_since_best"] = 0 if better else state["evaluations_since_best"] + 1
    return better


def end_of(config: Config, state: dict[str, Any], total_steps: int) -> str:
    """Say why the run is at its end, or nothing."""
    if state["step"] >= total_steps:
        return "all steps done"
    patience = config.evaluation.patience
    if patience is not None and state["evaluations_since_best"] >= patience:
        return f"{config.evaluation.best_metric} has not got better in {patience} evaluations"
    return ""


def weights_folder(folder: Path) -> Path:
    """Find the weights that a path means: the export of a run, or its newest checkpoint."""
    for place in (folder, folder / "export"):
        if is_export(place) or (place / "manifest.json").is_file():
            return place
    if found := checkpoint.checkpoints(folder):
        return found[-1]
    raise ConfigError(f"{folder} holds neither an export nor a checkpoint.")


def is_export(folder: Path) -> bool:
    """Tell an export from a checkpoint, or a run folder."""
    return (folder / "data_info.json").is_file()


def config_beside(folder: Path) -> Config:
    """Read the config.yaml of an export, a run folder or a checkpoint's run."""
    for place in (folder, *folder.resolve().parents[:2]):
        if (place / "config.yaml").is_file():
            return parse(["--config", str(place / "config.yaml")])
    raise ConfigError(f"{folder} has no config.yaml beside it.")


def main(arguments: argparse.Namespace) -> int:
    """Evaluate and print the metrics as a table and, with --json, as JSON."""
    folder = weights_folder(Path(arguments.folder))
    config = dataclasses.replace(
        config_beside(folder), telemetry=TelemetryConfig(trackers=[]), stage_to=None
    )
    runtime.check_launch(config)
    data_info, _, data_sets = prepare_data(config)
    if not data_sets:
        raise ConfigError("the recipe's build_datasets returns no validation set.")
    with runtime.start(config) as accelerator:
        if is_export(folder):
            model = load_model(folder, config.recipe, data_info)
        else:
            model = build_model(config, data_info)
            checkpoint.load_weights(folder, model)
        call = accelerator.prepare_model(runtime.Call(model), evaluation_mode=True)
        results = evaluate(accelerator, config, call, data_sets)
        if accelerator.is_main_process:
            print(json.dumps({"weights": str(folder)} | results, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", help="a run folder, an export or a checkpoint")
    runtime.command(main, parser.parse_args())
