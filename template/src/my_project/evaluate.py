"""Evaluate a model: every sample of each validation set counts once, on any number of processes."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from . import contract
from .config import Config
from .loading.loader import Fetch, make_loader, on_device
from .loading.seeding import seed_forward
from .parallel import not_compiled
from .ranks import gather_on_main, on_main_then_broadcast
from .recipe import Datasets, optional
from .run_folder import Run
from .sharding import renew_sharding

logger = logging.getLogger(__name__)
DEFAULT_SIZE = 64  # maximum samples per micro-batch, unless set in the config


def evaluate(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    datasets: Datasets,
    step: int,
    note_progress: Callable[[], None] | None = None,
    *,
    is_sanity_check: bool = False,
) -> dict[str, float]:
    """Evaluate every named dataset; each sample counts once.

    A dataset is cut into micro-batches of consecutive samples. Micro-batch m goes to rank
    m % world size, and its forward is seeded by (seed, dataset, m), so the results do not depend on
    the number of processes, except for rounding.

    Args:
        accelerator: this process's Accelerator.
        config: the run's config.
        model: the prepared contract.RecipeModule; model(function, ...) calls the function with the
            plain model.
        datasets: map-style datasets by name.
        step: the number of steps that the weights have been trained for; passed to `loss`.
        note_progress: called before each forward, since an evaluation may last minutes.
        is_sanity_check: evaluate at most one micro-batch of each dataset on each rank.

    Returns:
        The value of each metric, "<dataset>/<metric>", the same on every rank.
    """
    recipe, world_size, device = config.recipe, accelerator.num_processes, accelerator.device
    update = optional(recipe, "update_metrics") or recipe_loss(config, step)
    collate, size = optional(recipe, "collate"), micro_batch_size(config)
    # If there are workers, the sanity check reads in one worker. A dataset opens its files when its
    # first sample is read; if this process read it, later workers would share the files' offsets.
    extra = {"max_workers": 1, "persistent_workers": False} if is_sanity_check else {}
    results: dict[str, float] = {}
    with evaluation_mode(accelerator, model):
        for name, data in datasets.items():
            count = math.ceil(len(data) / size)
            count = min(count, world_size) if is_sanity_check else count
            # Each rank must make the same number of forward passes, because FSDP deadlocks
            # otherwise. Surplus passes update metrics that are discarded.
            rounds = math.ceil(count / world_size)
            numbers = range(accelerator.process_index, rounds * world_size, world_size)
            samples = range(len(data))
            index_lists = [
                [("evaluation", i) for i in samples[m * size : (m + 1) * size] or (0,)]
                for m in numbers
            ]
            fetch = Fetch(data, collate, config.seed, config.batches.seed_samples)
            loader = make_loader(config.batches, fetch, device, batch_sampler=index_lists, **extra)
            metrics, discarded = (
                {key: metric.to(device) for key, metric in contract.build_metrics(recipe).items()}
                for _ in range(2)
            )
            for m, batch in zip(numbers, on_device(loader, device), strict=True):
                if note_progress:
                    note_progress()
                seed_forward(config.seed, f"evaluation/{name}", m, device)
                model(update, batch, metrics if m < count else discarded)
            merge_metrics_on_main(accelerator, metrics)
            values = _values(accelerator, config, metrics, is_sanity_check)
            results |= {f"{name}/{key}": value for key, value in values.items()}
    return results


@contextmanager
def evaluation_mode(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Broadcast rank 0's buffers; keep a model in eval mode, without gradients, in the block."""
    model.eval()
    renew_sharding(model)
    broadcast_buffers(accelerator, model)
    try:
        with torch.no_grad(), not_compiled(model):
            yield
    finally:
        renew_sharding(model)
        model.train()


def sanity_check(run: Run, accelerator: Accelerator, model: nn.Module, sets: Datasets) -> None:
    """Run one micro-batch of each dataset per rank through the evaluation, before the first step.

    A mistake in a metric then ends the run before it trains. The results are discarded;
    weights and buffers are restored, and each step is seeded separately, so the run is the same as
    without this check.

    Raises:
        ConfigError: evaluation.best_metric is not among the results.
    """
    with restored_state(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a warning that a micro-batch lacks a class
        note = run.note_progress
        results = evaluate(accelerator, run.config, model, sets, 0, note, is_sanity_check=True)
    wanted, names = run.config.evaluation.best_metric, [*results]
    unknown = [name for name in names if math.isnan(results[name])]
    if (
        wanted
        and wanted not in names
        and not any(f"{wanted}/".startswith(f"{n}/") for n in unknown)
    ):
        raise contract.no_such_metric(wanted, names)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers after the block: some modules change them in a forward.

    All trained parameters are copied: the copies take no more memory than their gradients. Of the
    frozen ones, only vectors and those with a max_norm are: a copy of a large frozen model may not
    fit in memory.
    """
    kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is None:
                    continue
                may_change = named is module._buffers or getattr(module, "max_norm", None)
                if may_change or tensor.requires_grad or tensor.ndim < 2:
                    kept.append((named, name, tensor, tensor.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for named, name, tensor, copy in kept:
                named[name] = tensor.copy_(copy)


def micro_batch_size(config: Config) -> int:
    """Return the samples per forward pass; it does not depend on the number of processes."""
    batches = config.batches
    default = batches.micro_batch_size or min(DEFAULT_SIZE, batches.global_batch_size)
    return config.evaluation.batch_size or default


def merge_metrics_on_main(accelerator: Accelerator, metrics: contract.Metrics) -> None:
    """Merge the metrics' state of all ranks on rank 0, which alone can then compute them.

    This replaces torchmetrics' own gathering, which sends the states of all ranks to every rank,
    and aborts the process if a rank without samples has an empty list where another rank has a list
    of values. torchmetrics has no public way to make compute() use the state as it is, not even in
    a process group of one rank.
    """
    parts = [part for name in sorted(metrics) for part in contract.metric_parts(metrics[name])]
    for metric in dict.fromkeys(parts):  # each part once, even if several metrics share it
        metric._to_sync = False
        metric._computed = None  # cached if a recipe computed a micro-batch's value
        if accelerator.num_processes > 1:
            _merge(accelerator, metric)


def _merge(accelerator: Accelerator, metric: Any) -> None:
    """On rank 0, merge the states of all ranks that have samples, by the metric's reductions."""
    state = send_to_device(metric.metric_state, "cpu")
    gathered = gather_on_main(accelerator, (metric.update_count, state))
    # ranks without samples have the default states, whose shapes may differ
    with_samples = [(updates, rank_state) for updates, rank_state in gathered if updates]
    if not with_samples:
        return
    metric._update_count = sum(updates for updates, _ in with_samples)
    for name, reduce in metric._reductions.items():
        values: list[Any] = [rank_state[name] for _, rank_state in with_samples]
        if isinstance(values[0], list):
            merged: Any = [tensor for value in values for tensor in value]
        else:
            merged = torch.stack(values)
            is_real = merged.is_floating_point()
            # in float64, rounding does not depend on the order of ranks
            merged = merged.double() if is_real else merged
            merged = reduce(merged) if reduce else merged
            merged = merged.to(values[0].dtype) if is_real else merged
        setattr(metric, name, send_to_device(merged, metric.device))


def _values(
    accelerator: Accelerator, config: Config, metrics: contract.Metrics, is_sanity_check: bool
) -> dict[str, float]:
    """Compute the metrics on rank 0, which has the merged states; return them on every rank."""

    def compute() -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metric in metrics.items():
            try:
                value = metric.compute()
            except Exception as error:  # a metric may raise anything when samples are too few
                if not is_sanity_check:
                    raise
                logger.warning("metric %s cannot be computed from one micro-batch: %s", name, error)
                value = math.nan
            values |= contract.scalars(config.recipe, name, value)
        return values

    return on_main_then_broadcast(accelerator, compute)


def recipe_loss(config: Config, step: int) -> Callable:
    """Return an update_metrics function that averages the recipe's loss, called with `step`."""

    def update(model: nn.Module, batch: Any, metrics: contract.Metrics) -> None:
        returned = config.recipe.loss(model, batch, step)
        contract.check_loss(config.recipe, returned)
        loss_sum, num_items, *_ = returned
        if num_items > 0:
            metrics["loss"].update(loss_sum / num_items, num_items)

    return update


def broadcast_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Broadcast all buffers of rank 0; in training, DDP leaves out some (statistics.py)."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            values = buffer.contiguous()  # NCCL refuses other layouts, and gloo scrambles them
            torch.distributed.broadcast(values, src=0)
            buffer.copy_(values)
