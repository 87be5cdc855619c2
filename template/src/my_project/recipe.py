"""The recipe: the contract between what is trained and how.

A recipe is a frozen dataclass whose fields are its hyperparameters. It is matched by structure: it
imports nothing from here, so one file can be copied anywhere. The loop calls, in this order:

    prepare_data() -> dict
        What the model must know of the data, as plain JSON (class names, vocabulary size).
        Downloads and tokenises once per cache, before any process group: the first process of the
        run alone, then the first of each node, then all others at once, which find it done.
    build_datasets(data_info) -> (train, {name: validation})
        Map-style datasets: `len(data)` and `data[index]`; {} for no validation. A dataset with
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

Random numbers: the loop seeds torch's, Python's and NumPy's global generators for each sample, and
for each micro-batch before `loss`, so that what is drawn from them is the same for any number of
processes and after any resume. A generator of the recipe's own (torch.Generator,
numpy.random.default_rng) is not seeded by the loop: one that is made once and drawn from again and
again gives another curve on another number of processes. Make it where it is used, from the seed
that `torch.initial_seed()` returns: in a dataset that of the sample (with batches.seed_samples), in
`loss` that of the micro-batch.
"""

import importlib
import inspect
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
PARAMETERS = {  # of every method that the loop calls
    "prepare_data": (),
    "build_datasets": ("data_info",),
    "build_model": ("data_info",),
    "loss": ("model", "batch", "step"),
    "collate": ("samples",),
    "parameter_groups": ("model",),
    "build_metrics": (),
    "update_metrics": ("model", "batch", "metrics"),
    "sample": ("model",),
    "per_sample": ("model",),
    "predict": ("model", "data_info", "argument"),
    "example_inputs": ("data_info",),
    "export": ("model", "data_info", "folder"),
    "load": ("data_info", "folder"),
}


def problems(kind: type) -> list[str]:
    """List what is wrong with a recipe's methods: required ones missing, wrong parameters."""
    found = []
    for name, parameters in PARAMETERS.items():
        method = getattr(kind, name, None)
        if method is None:
            found += [f"it has no method {name}"] if name in REQUIRED else []
        elif not callable(method):
            found.append(f"{name} is not a method")
        else:
            bound = _needs_no_self(inspect.getattr_static(kind, name))
            try:
                signature = inspect.signature(method)
            except ValueError:  # of some that are written in C
                continue
            try:
                signature.bind(*parameters, *([] if bound else ["self"]))
            except TypeError:
                wanted = ", ".join(parameters if bound else ("self", *parameters))
                found.append(f"{name}{signature} ({place_of(method)}) must accept ({wanted})")
    for one, other in (("build_metrics", "update_metrics"), ("update_metrics", "build_metrics")):
        if getattr(kind, one, None) is not None and getattr(kind, other, None) is None:
            found.append(f"it has {one}, which needs {other}, which it has not")
    return found


def _needs_no_self(attribute: Any) -> bool:
    """Return whether an attribute of a class is called without the object, as a collator is."""
    is_descriptor = hasattr(type(attribute), "__get__")
    return isinstance(attribute, (classmethod, staticmethod, type)) or not is_descriptor


def problems_of(class_path: str) -> list[str]:
    """Import a class and list what is wrong with it as a recipe."""
    module, _, name = class_path.rpartition(".")
    return problems(getattr(importlib.import_module(module), name))


def place_of(function: Any) -> str:
    """Return the file and line where a function is defined."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else "not written in Python"


def optional(recipe: Recipe, method: str) -> Any:
    """Return a method that a recipe may have, or None."""
    return getattr(recipe, method, None)
