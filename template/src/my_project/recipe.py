"""The recipe: the contract between what is trained and the loop that trains it.

A recipe is a frozen dataclass whose fields are its hyperparameters. It is matched by structure: it
imports nothing from this package, so one file can be copied anywhere. The loop calls, in this
order:

    prepare_data() -> dict
        Return what the model must know about the data as plain JSON (class names, vocabulary size).
        Downloads and tokenizes once per cache, before any process group: one process of the run
        goes first, then one on each node, then all others together, which find the work done.
    build_datasets(data_info) -> (train, {name: validation})
        Return map-style datasets: `len(data)` and `data[index]`; {} for no validation. A dataset
        with `__getitems__(indices)` is asked for a whole micro-batch in one call, unless it draws
        random numbers (batches.seed_samples). The first samples for which it draws may be read
        twice, so it must not keep what it drew. If a dataset, even one inside a Subset or
        ConcatDataset, has `set_epoch(epoch)`, the loop calls it before the first sample of each
        epoch, in every process that reads it; for evaluations with epoch 0.
        The training set may be a stream instead, which is divided into lanes. A lane is a logical
        shard of the stream, like a canonical node of MosaicML's streaming: the number of lanes is
        fixed, whatever the world size, and so is the order of the samples. A stream has
        `lanes: int` and `lane(i, start, seed) -> iterable`, which skips `start` samples and yields
        the same samples whenever it is called. A lane must never run out: after its last sample
        it starts over, independently of the others, so lanes may differ in length; one that runs
        out is an error. Lane i fills fixed positions of every global batch; random numbers drawn
        ahead of a sample must depend on (i, seed) and its position only. The number of lanes must
        divide the global batch and be a multiple of its number of micro-batches. A stream has no
        length, so a run needs `steps`.
        What `lane` returns may have `state_dict()` and `load_state_dict(state)` (the Stateful
        protocol of torch.distributed.checkpoint), so that a resumed run need not read again what
        it skips. `state_dict` is called after each step's samples and returns the position after
        the last of them as short plain JSON, which checkpoints keep, or None where it cannot tell:
        a resumed run then skips what the lane has read. Otherwise the run opens a new lane with
        start 0 and calls its `load_state_dict` before iterating.
    build_model(data_info) -> torch.nn.Module
        Must work without training data and network, since predict calls it too.
    loss(model, batch, step) -> (loss_sum, num_items[, scalars])
        Return the SUM of the per-item losses, a scalar tensor, and the number of items (examples,
        tokens) in it, a number or scalar tensor. Never a mean: only sums give the right gradient
        when the number of items differs between micro-batches. Sum in float32, even where autocast
        leaves bf16: `losses.float().sum()`. `model` is the plain module; any of
        its methods may be called. The loop calls `loss` once per micro-batch and equally often on
        every rank: a rank with one micro-batch fewer repeats its first one with weight 0. Without
        `update_metrics`, evaluations call it too, without gradients (a gradient penalty needs
        `if torch.is_grad_enabled()`) and with the number of steps trained as `step`.
        scalars, {name: sum}, are recorded as train/<name>: each is summed over the step's
        micro-batches and ranks, like the loss, and divided by the items. A value is a number or a
        scalar tensor; all calls return the same names, and none of contract.TRAIN_TAGS.

A recipe may also have:

    collate(samples) -> batch                     default: torch's default_collate
    parameter_groups(model) -> list of dicts      as for torch.optim; "lr_scale" multiplies lr
    model_blocks(model) -> list of modules        that FSDP2 gathers, activation checkpointing
                                                  recomputes and torch.compile compiles one by one,
                                                  none inside another; default: the layers of one
                                                  class in a list (blocks.py)
    build_metrics() -> {name: torchmetrics.Metric}    with update_metrics; default: the mean loss
    update_metrics(model, batch, metrics) -> None
    flops_per_item(model) -> float                FLOPs of forward and backward, for MFU; default:
                                                  counted in the first step
    predict(model, data_info, argument) -> str    the answer that predict prints
    predict_samples(model, data_info, samples, folder)    the answers for some validation samples,
                                                  also shown at each evaluation
    export(model, data_info, tensors, folder) -> (stem, {name: tensor}) or None
                                                  what an export holds, see below; default:
                                                  model.safetensors with all tensors
    load(data_info, folder) -> torch.nn.Module    loads what `export` has written

`samples` is a torch.utils.data.Subset of the validation set. predict_samples returns what
predict prints, a str or a rich renderable such as a Table; files that it writes into `folder`,
such as pictures, are moved to the run. Each evaluation calls it too, with evaluation.samples
samples, whose tensors are on the device of the model: on rank 0 or, where FSDP shards the model, on
every rank (records/samples.py).

`export` is called twice. First on every rank, with folder None: from `tensors`, the model's state,
it returns those that the loop should write to <stem>.safetensors, renamed if need be. If the model
is sharded, so are they, and the loop reads and writes one at a time. Then on rank 0 alone, with a
folder, into which it writes other files; this call must neither read a weight nor draw random
numbers. If the first call returned None, the second writes the weights too, and gets a whole model:
for a sharded one, rank 0 builds another.

Before the first step, the loop compares the loss and the items of a few samples with the sums over
their two halves. In a correct recipe these may differ, if the loss compares the samples of a
micro-batch with each other (contrastive learning), or padding to the largest changes much: such a
recipe sets the class attribute `compares_samples = True`.

A dataset or stream must open its files when the first sample is read, not in its constructor:
forked loader workers would share the offset of an open file, so the loop refuses it. A file that
the recipe opens itself, at import or in its constructor, is opened once on each rank.

A field that may change between two starts of a run (a path) is declared with
field(metadata={"changes_curve": False}).

Random numbers: the loop seeds the global generators of torch, Python and NumPy before prepare_data
and build_datasets (always with the same seed, so that a random split is the same on every rank, in
every start and for every `seed`), before build_model and load (with the config's `seed`), for each
sample, and for each micro-batch before `loss`. So random numbers are the same for any world
size and after any resume. The loop does not seed a generator that the recipe makes for itself
(torch.Generator, numpy.random.default_rng): if it is made once and kept, the training curve depends
on the world size. Make it where it is used, from `torch.initial_seed()`, which is the sample's seed
in a dataset (with batches.seed_samples) and the micro-batch's seed in `loss`.

State: what `loss` changes in the model besides gradients (a mean teacher, a queue in a buffer)
depends on how a step is split into micro-batches, unless `loss` changes it once per `step`, and
only while `model.training`. What it takes from the samples must be gathered from all ranks, and
the number of ranks must then divide the number of micro-batches
(docs/how-to/state-in-a-buffer.md).
Only the optimizer may change a trained parameter. The loop calls `model.train()`, which also puts
the dropout and BatchNorm of a frozen part into training mode: give that part a `train` method that
calls `super().train(False)`. A parameter that is to be trained at any time must have requires_grad
True when build_model returns.
The running statistics of BatchNorm move once for each micro-batch of all ranks (statistics.py), so
`loss` must not write the statistics of a layer that it also calls in training.
Under FSDP, all ranks must call the same blocks in each forward, or the run hangs.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, TypeVar

from .files import Json

DataInfo: TypeAlias = dict[str, Json]  # what prepare_data returns
Batch = TypeVar("Batch")


class Dataset(Protocol):
    """Data with a length and an index, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Datasets: TypeAlias = dict[str, Dataset]  # by name


class Stream(Protocol):
    """Data without length or index, in lanes that never end; a Dataset for all other modules."""

    lanes: int

    def lane(self, index: int, start: int, seed: int, /) -> Any: ...  # noqa: D102


class Recipe(Protocol):
    """The required methods; unannotated and positional-only, so that any ordinary class fits."""

    def prepare_data(self):  # noqa: D102
        raise NotImplementedError

    def build_datasets(self, data_info, /):  # noqa: D102
        raise NotImplementedError

    def build_model(self, data_info, /):  # noqa: D102
        raise NotImplementedError

    def loss(self, model, batch, step, /):  # noqa: D102
        raise NotImplementedError


FIELDS = "__dataclass_fields__"
PARAMETERS = {  # of every method that the loop calls
    "prepare_data": (),
    "build_datasets": ("data_info",),
    "build_model": ("data_info",),
    "loss": ("model", "batch", "step"),
    "collate": ("samples",),
    "parameter_groups": ("model",),
    "model_blocks": ("model",),
    "build_metrics": (),
    "update_metrics": ("model", "batch", "metrics"),
    "flops_per_item": ("model",),
    "predict": ("model", "data_info", "argument"),
    "predict_samples": ("model", "data_info", "samples", "folder"),
    "export": ("model", "data_info", "tensors", "folder"),
    "load": ("data_info", "folder"),
}


def problems(kind: type) -> list[str]:
    """List what is wrong with a recipe: missing methods, wrong parameters, ignored fields."""
    messages = []
    try:
        recipe = object.__new__(kind)  # without its fields, to look methods up as the loop does
    except TypeError:  # a function, a module, a class written in C
        return [f"it is not a class written in Python, but of type {type(kind).__name__}"]
    for name, parameters in PARAMETERS.items():
        method = getattr(recipe, name, None)
        if method is None:
            messages += [f"it has no method {name}"] if hasattr(Recipe, name) else []
            continue
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError as error:
            place, wanted = source_location(method), ", ".join(parameters)
            messages.append(f"{name} ({place}) must accept ({wanted}): {error}")
    for name, other in (("build_metrics", "update_metrics"), ("update_metrics", "build_metrics")):
        if getattr(kind, name, None) is not None and getattr(kind, other, None) is None:
            messages.append(f"it has {name} but lacks {other}, which {name} needs")
    for name in ignored_fields(kind):
        messages.append(
            f"the {name} that it sets would be ignored: write @dataclass above the class, and a"
            f" type after the name, such as {name}: int = 8"
        )
    return messages


def ignored_fields(kind: type) -> list[str]:
    """List the names in the body of a dataclass's subclass that look like fields but are not.

    These are annotated names in a class without @dataclass, and unannotated new defaults for
    inherited fields: an instance would have the base class's default.
    """
    ignored: list[str] = []
    for cls in kind.__mro__:
        bases = [base for base in cls.__mro__[1:] if FIELDS in vars(base)]
        inherited = {f.name for base in bases for f in fields(base)}
        is_decorated = FIELDS in vars(cls)
        if not inherited or (not is_decorated and "__init__" in vars(cls)):
            continue
        kinds = inspect.get_annotations(cls)
        annotated = [name for name in kinds if "ClassVar" not in str(kinds[name])]
        ignored += [name for name in vars(cls) if name in inherited and name not in kinds]
        ignored += [] if is_decorated else annotated
    return ignored


def source_location(function: Callable) -> str:
    """Return the file and line where a function or a class is defined."""
    if isinstance(function, type):
        return f"{inspect.getsourcefile(function)}, line {inspect.getsourcelines(function)[1]}"
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else "not written in Python"


def optional(recipe: Recipe, method: str) -> Any:
    """Return an optional method of a recipe, or None."""
    return getattr(recipe, method, None)
