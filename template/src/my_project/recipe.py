"""The recipe: the contract between what is trained and how.

A recipe is a frozen dataclass whose fields are its hyperparameters. It is matched by structure: it
imports nothing from here, so one file can be copied anywhere. The loop calls, in this order:

    prepare_data() -> dict
        What the model must know of the data, as plain JSON (class names, vocabulary size).
        Downloads and tokenises once per cache; called under a file lock, before any process group.
    build_datasets(data_info) -> (train, {name: validation})
        Map-style data sets: `len(data)` and `data[index]`; {} for no validation. A data set with
        `__getitems__(indices)` is asked for a whole micro-batch at once where nothing is seeded
        per sample (batches.seed_samples).
        The train set may be a stream instead: `lanes: int` and `lane(i, epoch, start, seed) ->
        iterator` of samples, the same ones each time it is asked. Lane i feeds fixed places of
        every global batch; what it draws ahead of a sample must follow from (i, epoch, seed).
        `start` samples are passed over. The number of lanes must divide the global batch and be a
        multiple of the micro-batches in it; the first lane that ends, ends the epoch.
    build_model(data_info) -> torch.nn.Module
        Needs no training data and no network, since predict.py calls it too.
    loss(model, batch, step) -> (total, weight)
        The SUM of the per-item losses, a scalar tensor, and how many items (examples, tokens) it
        sums, a number or scalar tensor. Never a mean: only sums give the right gradient when the
        number of items differs between micro-batches. `model` is the plain module; any of its
        methods may be called. Called once per micro-batch on every process.

A recipe may also have:

    collate(samples) -> batch                     torch's default_collate otherwise
    parameter_groups(model) -> list of dicts      as for torch.optim; "lr_scale" multiplies lr
    build_metrics() -> {name: torchmetrics.Metric}    with update_metrics; the loss otherwise
    update_metrics(model, batch, metrics) -> None
    sample(model) -> str                          shown at each evaluation
    per_sample(model) -> {"tokens": n, "operations": m}    of one sample, forward and backward; for
                                                  throughput and utilisation
    predict(model, data_info, argument) -> str    the answer of predict.py
    example_inputs(data_info) -> tuple of tensors     batch first; for predict.py --onnx
    export(model, data_info, folder) -> None      in place of model.safetensors; with
    load(data_info, folder) -> torch.nn.Module    which loads that

And its fields may be declared with field(metadata={...}): "changes_curve": False for one that may
change between two starts of a run (a path); "staged": True for the path of data that `stage_to`
copies to each node's own disk.
"""

from typing import Any, Protocol


class Recipe(Protocol):
    """What every recipe has; unannotated and positional-only, so that any ordinary class fits."""

    def prepare_data(self):  # noqa: D102
        raise NotImplementedError

    def build_datasets(self, data_info, /):  # noqa: D102
        raise NotImplementedError

    def build_model(self, data_info, /):  # noqa: D102
        raise NotImplementedError

    def loss(self, model, batch, step, /):  # noqa: D102
        raise NotImplementedError


REQUIRED = ("prepare_data", "build_datasets", "build_model", "loss")


def missing_methods(class_path: str) -> list[str]:
    """Name the required methods that the class lacks."""
    import importlib

    module, _, name = class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return [method for method in REQUIRED if not callable(getattr(kind, method, None))] or [
        "with the right arguments: " + ", ".join(REQUIRED)
    ]


def optional(recipe: Recipe, method: str) -> Any:
    """Return a method that a recipe may have, or None."""
    return getattr(recipe, method, None)
