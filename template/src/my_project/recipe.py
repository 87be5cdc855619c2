"""The recipe: the contract between what is trained and the loop that trains it.

A recipe is a frozen dataclass whose fields are its hyperparameters. The loop looks at its methods,
not at a base class: a recipe imports nothing from this package, so its file can be copied anywhere.
The loop calls, in this order:

    prepare_data() -> dict
        Return, as plain JSON, what the model must know about the data (class names, vocabulary
        size). Download and tokenize here, before any process group exists. Each cache is filled
        only once: one process of the run goes first, then one on each node, then all others
        together, which find the work done.
    build_datasets(data_info) -> (train, {name: validation})
        Return map-style datasets: `len(data)` and `data[index]`; {} for no validation. A dataset
        with `__getitems__(indices)` is asked for a whole micro-batch in one call, unless it draws
        random numbers (batches.seed_samples). The first micro-batch whose samples draw from
        Python's or NumPy's generator, or in `__getitems__` from any, is loaded twice, since the
        draw is noticed only then; so a dataset that caches random results needs
        `batches.seed_samples: true`. If a dataset, even one inside a Subset or
        ConcatDataset, has `set_epoch(epoch)`, every process that reads the dataset calls this
        method before the first sample of each epoch; evaluations pass epoch 0.
        The training set may be a stream instead, which is divided into lanes. A lane is a logical
        shard of the stream, like a canonical node of MosaicML's streaming: the number of lanes is
        fixed, whatever the world size, and so is the order of the samples. A stream has
        `lanes: int` and `lane(i, start, seed) -> iterable`, which skips `start` samples and yields
        the same samples whenever it is called. A lane that runs out is an error: after its last
        sample it must start over, independently of the other lanes, so lanes may differ in length.
        Lane i fills fixed positions of every global batch. Random numbers that it draws before
        yielding a sample must depend only on (i, seed) and the position of that sample. The number
        of lanes must divide the global batch and be a multiple of its number of micro-batches. A
        stream has no length, so a run needs `steps`.
        The iterable may have `state_dict()` and `load_state_dict(state)` (the Stateful protocol of
        torch.distributed.checkpoint); a resumed run then need not read the samples that it skips.
        `state_dict` is called after each step's samples. It returns the position after the last of
        them as short plain JSON, which checkpoints hold. A resumed run opens a new lane with start
        0 and calls its `load_state_dict` before iterating. If a lane cannot tell its position,
        `state_dict` returns None, and a resumed run skips the samples that the lane has read.
    build_model(data_info) -> torch.nn.Module
        This must work without training data and network, since the command predict calls it too.
    loss(model, batch, step) -> (loss_sum, num_items[, scalars])
        Return the SUM of the per-item losses (a scalar tensor), and the number of items, examples
        or tokens, in this sum (a number or scalar tensor). Never return a mean: only sums give the
        right gradient when the number of items differs between micro-batches. Sum in float32, even
        where autocast returns bf16: `losses.float().sum()`. `model` is the plain module; any of its
        methods may be called. The loop calls `loss` once per micro-batch and equally often on every
        rank: a rank with one micro-batch fewer repeats its first one with weight 0. The check
        before the first step calls `loss` without gradients, and so do evaluations of a recipe
        without `update_metrics` (so a gradient penalty needs `if torch.is_grad_enabled()`); `step`
        is then the number of steps trained.
        The loop records scalars, {name: sum}, as train/<name>: like the loss, each is summed over
        the micro-batches, ranks and steps of a record, and divided by the items. A value is a
        number or a scalar tensor; all calls return the same names, none in contract.TRAIN_TAGS.

A recipe may also have:

    collate(samples) -> batch                     default: torch's default_collate
    parameter_groups(model) -> list of dicts      as for torch.optim; "lr_scale" multiplies lr
    model_blocks(model) -> list of modules        the modules that FSDP2 gathers, activation
                                                  checkpointing recomputes and torch.compile
                                                  compiles, one at a time; none may contain another;
                                                  default: a transformers model's layers, or layers
                                                  of one class in a ModuleList or Sequential
                                                  (blocks.py)
    build_metrics() -> {name: torchmetrics.Metric}    needs update_metrics; default: the mean loss
    update_metrics(model, batch, metrics) -> None
    flops_per_item(model) -> float                FLOPs of forward and backward, for MFU; default:
                                                  counted in the first step
    predict(model, data_info, argument) -> str    what the command predict prints for an input
    predict_samples(model, data_info, samples, folder)    what the command predict prints without
                                                  an input: predictions for some validation samples,
                                                  also shown at each evaluation
    export(model, data_info, tensors, folder) -> (stem, {name: tensor}) or None
                                                  the content of an export, see below; default:
                                                  model.safetensors with all tensors
    load(data_info, folder) -> torch.nn.Module    loads what `export` has written

`samples` is a torch.utils.data.Subset of the first validation set. predict_samples returns a str or
a rich renderable such as a Table; files that it writes into `folder`, such as pictures, are moved
to the run, but not subfolders. Each evaluation calls predict_samples too (records/samples.py): on
rank 0 or, if FSDP shards the model, on every rank. An evaluation passes as many samples as
evaluation.samples says, with their tensors on the model's device.

`export` is called twice. The first call is on every rank, with folder None: from `tensors`, the
model's state, it returns the tensors that the loop should write to <stem>.safetensors, renamed if
need be. The tensors of a sharded model are sharded too, and the loop reads and writes them one by
one. The second call is on rank 0 alone, with a folder into which it writes other files; it must
neither read a weight nor draw random numbers. But if the first call returned None, the second call
also writes the weights, and gets an unsharded model: if FSDP shards the model, rank 0 builds an
unsharded copy for this call.

Before the first step, the loop compares the loss and the items of a few samples with the sums over
two halves of these samples. In a correct recipe, the values may differ if the loss compares the
samples of a micro-batch with each other (contrastive learning), or if it changes much when samples
are padded to the largest. Such a recipe sets the class attribute `compares_samples = True`.

A dataset or stream must open its files when the first sample is read, not in its constructor:
forked loader workers would share the offset of an open file, so the loop refuses such a dataset.
Files that the recipe itself opens, at import or in its constructor, are not checked.

Declare a field that may change between two starts of a run, such as a path, with
field(metadata={"changes_curve": False}).

Random numbers: the loop seeds the global generators of torch, Python and NumPy. Before prepare_data
and build_datasets it uses a constant seed, so that a random split is the same on every rank, in
every start and for every `seed`. Before build_model and load it uses the config's `seed`. It seeds
them again for each sample, and for each micro-batch before `loss`. So random numbers are the same
for any world size and after any resume. The loop does not seed a generator that the recipe makes
for itself (torch.Generator, numpy.random.default_rng): if the recipe makes it once and keeps it,
the training curve depends on the world size. Make such a generator where it is used, seeded with
`torch.initial_seed()`, which is the sample's seed in a dataset (unless batches.seed_samples is
false; in `__getitems__`, the first sample's) and the micro-batch's seed in `loss`.

State: if `loss` updates state in the model without gradients (a mean teacher, a queue in a buffer),
the values that it reads must change only once per `step`, and only while `model.training` is True;
otherwise the result depends on how a step is split into micro-batches. If the change depends on the
samples, gather or all-reduce it over all ranks. The number of ranks must then divide the number of
micro-batches, since otherwise some ranks repeat a micro-batch, whose samples would count twice
(docs/how-to/state-in-a-buffer.md).
Only the optimizer may change a trained parameter. The loop calls `model.train()`, which also puts
the dropout and BatchNorm of a frozen part into training mode: give that part a `train` method that
calls `super().train(False)`. A parameter that is to be trained at any time must have requires_grad
True when build_model returns.
After each step, the loop writes the running statistics of each BatchNorm layer that `loss` called,
computed from the micro-batches of all ranks (statistics.py). So `loss` must not itself write the
running statistics of a layer that it also calls in training.
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
    """Data without length or index, in lanes that never end.

    A function that accepts a Dataset or a Stream annotates it as Dataset (see layout.is_stream).
    """

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
PARAMETERS = {  # arguments of every method that the loop or a command calls
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
    except TypeError:  # a function, a module, a class written in C, an abstract class
        return [f"it is not a concrete class written in Python, but of type {type(kind).__name__}"]
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
        annotations = inspect.get_annotations(cls)
        annotated = [name for name in annotations if "ClassVar" not in str(annotations[name])]
        ignored += [name for name in vars(cls) if name in inherited and name not in annotations]
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
