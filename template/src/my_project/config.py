"""The settings of a run, each with its unit and its default.

Each experiment has a YAML file (`configs/`). Options on the command line override it by dotted
names. Types are checked, and unknown keys are errors. This module does not import torch.

A field whose metadata have `changes_curve: False`, as `may_change` sets it, can change between two
starts of one run. Every other field changes the training curve, so an existing run continues only
with the same value (run_folder.py).
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from .files import ConfigError, Json, T
from .recipe import Recipe, source_location
from .safety.redaction import secrets_problem

Limits: TypeAlias = Mapping[str, Any]  # the metadata of a field


def may_change(default: T, **limits: float | str) -> T:
    """Declare a field that may change between two starts, with limits or an example (such_as)."""
    return field(default=default, metadata={"changes_curve": False} | limits)


def limited(default: Any = dataclasses.MISSING, **limits: float) -> Any:
    """Declare a number with the limits `least` and `most`, both inclusive."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class BatchesConfig:
    """Which samples a step sees, and how they are loaded."""

    global_batch_size: int = limited(least=1)
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: int = may_change(0, least=0)
    """Maximum number of samples per forward pass; 0: each rank takes its part of the global batch
    in one pass, so dropout and BatchNorm depend on the number of processes. Otherwise the global
    batch is cut into as few micro-batches as possible, whose sizes differ by at most one. The ranks
    take them in turn, so the micro-batches do not depend on the number of processes, which can be
    at most the number of micro-batches. The launcher halves the value if a pass runs out of memory
    before the first save, unless a BatchNorm or the loss depends on it (memory.py).
    """
    workers: int | None = may_change(None, least=0)
    """Loader processes per rank; null: use one fewer than the CPUs of this rank, at most 8."""
    seed_samples: Literal["auto"] | bool = "auto"
    """Seed the random generators for each sample from (seed, epoch, index), so that augmentation
    does not depend on the process that loads the sample. auto: always seed torch's generator (2.5
    us per sample); seed those of Python and NumPy (10 us) only after a sample has drawn from one of
    them, and read that sample's micro-batch again. true: seed all three, and read no sample twice;
    for a dataset that caches results of random draws. false: seed none, for a dataset without
    randomness. For a stream, auto means true."""
    loader: dict[str, Any] = field(default_factory=dict, metadata={"changes_curve": False})
    """More arguments of torch.utils.data.DataLoader by name, except those that would change the
    samples in a batch."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning rate schedule, gradient clipping and EMA."""

    class_path: str = "torch.optim.AdamW"
    """Any subclass of torch.optim.Optimizer. For one with train() and eval() (schedule-free), the
    weights of eval() are evaluated and exported, and checkpoints hold the weights of train()."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer besides the parameters, lr and weight_decay."""
    lr: float = limited(1e-3, least=0)
    """The highest learning rate of the schedule."""
    weight_decay: float = limited(0.0, least=0)
    """Weight decay of matrices and kernels; biases and normalization weights have none."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "plateau"] = "cosine"
    """The learning rate after the warmup (optim.learning_rate). wsd: constant, then a linear decay
    over the last decay_steps. plateau: constant, but multiplied by plateau_factor after every
    plateau_patience evaluations in a row without a better evaluation.best_metric."""
    warmup_steps: int = limited(0, least=0)
    """Steps over which the learning rate rises linearly; step k of n has k/n of optim.lr."""
    decay_steps: int = limited(0, least=0)
    """wsd only: the length of the final decay, in steps."""
    plateau_patience: int = limited(3, least=1)
    """plateau only: evaluations without a better best_metric before the rate is lowered."""
    plateau_factor: float = limited(0.1, least=0, most=1)
    """plateau only: the factor that lowers the learning rate."""
    final_lr_fraction: float = limited(0.0, least=0, most=1)
    """The learning rate at the end, as a fraction of lr. constant: no effect. plateau: the lowest
    rate; plateau_factor multiplies only what is above it."""
    clip_norm: float | None = limited(1.0, least=1e-30)
    """Maximum gradient norm over all parameters; null: do not clip."""
    ema_decay: float | None = limited(None, least=0, most=1)
    """Decay of an EMA of the weights, evaluated and exported in their place; null: keep no EMA."""
    max_skipped_steps: int = may_change(20, least=1)
    """End the run after this many consecutive skipped steps. A step is skipped when its gradient
    is not finite or its loss has no items."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When to evaluate, and which result is best. A run is always evaluated at its end."""

    every_steps: int | None = may_change(None, least=1)
    """Steps between evaluations; null: evaluate only at the end."""
    batch_size: int = may_change(0, least=0)
    """Samples per forward pass and rank; 0: micro_batch_size or, if that is 0, min(64, the global
    batch size). It does not depend on the number of processes."""
    sanity_check: bool = may_change(True)
    """Before the first step of a new run, evaluate one micro-batch of each validation set and
    discard the results, so that an error in the metrics ends the run before it trains."""
    samples: int = may_change(8, least=0)
    """Number of validation samples for the recipe's predict_samples at each evaluation; 0: none."""
    best_metric: str | None = may_change(None)
    """A result such as validation/accuracy; its best weights are exported to best/."""
    best_mode: Literal["max", "min"] | None = may_change(None)
    """Whether a higher or a lower best_metric is better; null: decided by torchmetrics or by
    the metric's name (contract.best_mode), and written to config.yaml in the run folder."""
    patience: int | None = may_change(None, least=1)
    """Stop early after this many evaluations without a better best_metric; null: never."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """When to save the full training state, and which checkpoints to keep.

    A run is always saved at its end and when it is asked to stop.
    """

    every_steps: int | None = may_change(None, least=1)
    """Steps between checkpoints; null: do not save by step count, so every_minutes decides."""
    every_minutes: float | Literal["auto"] | None = may_change("auto", least=0)
    """Save after this many minutes without a save, but not while steps are skipped; auto: 10 if
    every_steps is null, otherwise never; null or 0: never."""
    keep: int = may_change(2, least=1)
    """Number of newest checkpoints to keep. With evaluation.best_metric, the checkpoint of the
    best step is kept too, if one was saved at that step."""
    keep_every_steps: int | None = may_change(None, least=1)
    """Also keep checkpoints at multiples of this step; null: keep none of these."""
    background: bool = may_change(True)
    """Write in a thread while training goes on: a step waits only for the copy into host memory.
    This copy's buffers, as large as the state, stay allocated."""
    mirror: str | None = may_change(None)
    """URL in an object store, such as s3://bucket/prefix. The run is copied there after each save,
    and a machine without the run folder continues the run from there; null: do not copy."""
    mirror_seconds: float = may_change(60.0, least=0)
    """How long a run waits for its last upload after it was told to stop."""

    @property
    def minutes(self) -> float:
        """Return every_minutes as a number; 0: never save by time."""
        if self.every_minutes == "auto":
            return 10.0 if self.every_steps is None else 0.0
        return self.every_minutes or 0.0


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Settings of the process group, DDP and memory that accelerate's YAML files lack."""

    startup_timeout_seconds: int = may_change(1800, least=1)
    """A rank counts as stalled after this time without progress during startup, a save, one
    micro-batch of an evaluation, or the first step after any of these. If timeout_seconds is
    longer, it applies instead."""
    timeout_seconds: int = may_change(600, least=1)
    """A rank counts as stalled after this time without progress in a step. Every rank then writes
    its stack trace into errors/ and ends."""
    ddp: dict[str, Any] = field(default_factory=dict, metadata={"changes_curve": False})
    """Arguments of accelerate's DistributedDataParallelKwargs, by name."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the micro-batches of all ranks together, so the curve
    depends on the number of processes. GPUs only. false: each micro-batch has its own statistics,
    and the running statistics are updated by all micro-batches in order."""
    activation_checkpointing: bool = may_change(False)
    """Keep only the inputs of each block of layers, and recompute the rest in the backward pass:
    less memory, about a third more computation. The blocks are what the recipe's model_blocks
    returns, or else the layers of one class in a ModuleList or Sequential (blocks.py)."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is logged, how often, and where to."""

    every_steps: int = may_change(10, least=1)
    """Steps between records in metrics.jsonl and the trackers, and between updates of the numbers
    in the progress bar (records/screen.py)."""
    trackers: list[str] = field(
        default_factory=lambda: ["tensorboard"], metadata={"changes_curve": False}
    )
    """Names of accelerate's trackers: tensorboard, wandb, mlflow, ... (records/trackers.py)."""
    peak_tflops: float | None = may_change(None)
    """Peak TFLOP/s of one device for the run's precision, from its data sheet, to record MFU; null:
    look up the device's name in records/performance.py."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps torch.profiler records, and on which ranks (records/profiling.py)."""

    steps: str | None = may_change(None, such_as="20:25")
    """The first and the last step to profile, numbered from 1 as in metrics.jsonl. For example,
    20:25 profiles the six steps 20 to 25, and 20:20 one step; null: profile no steps. Quote the
    value in a YAML file, because YAML reads 20:25 as a number in base 60."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata={"changes_curve": False})
    """The ranks to profile, such as [0,1]."""
    with_stack: bool = may_change(False)
    """Also record the line of code that called each operator; slower, and larger files."""

    def __post_init__(self) -> None:
        """Refuse a value of `steps` that is not first:last; Config refuses a wrong type."""
        _ = isinstance(self.steps, str) and self.window

    @property
    def window(self) -> tuple[int, int] | None:
        """Return the first and the last step; None if no step is profiled."""
        if self.steps is None:
            return None
        numbers = re.fullmatch(r"(\d+):(\d+)", self.steps)
        first, last = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"profile.steps is {self.steps!r}, but must be the first and the last step, such as"
                " 20:25; steps are numbered from 1."
            )
        return first, last


@dataclass(frozen=True, kw_only=True)
class ChecksConfig:
    """What to do about mistakes that would not stop a run from training.

    off: do not check (YAML reads off as false); warn: log a line and write a record; end: end the
    run with exit code 2.
    """

    recipe: str | bool = may_change("warn")
    """A loss or num_items that is not a sum over samples, an EMA that stays near the initial
    weights, and a misspelled optional method; checked before the first step of a new run
    (checks/recipe.py)."""
    data: str | bool = may_change("warn")
    """A run that continues with different data (checks/agreement.py)."""
    code: str | bool = may_change("warn")
    """A run that continues with different code (checks/agreement.py)."""
    ranks: str | bool = may_change("end")
    """Data, code or a model that differs between the ranks when the run starts
    (checks/agreement.py), and weights that diverge while it trains (checks/ranks.py); about some of
    these, such as buffers, `end` only warns (docs/checks.md)."""

    def __post_init__(self) -> None:
        """Refuse a level that does not exist."""
        for name, level in vars(self).items():
            if level not in ("off", "warn", "end", False):
                raise ConfigError(f"checks.{name} is {level}, but must be off, warn or end.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    recipe: Recipe
    """The recipe to train: class_path and init_args (recipe.py)."""
    batches: BatchesConfig
    steps: int | None = may_change(None, least=1)
    """Optimizer steps of the whole run. Set either this or epochs."""
    epochs: float | None = may_change(None, least=1e-9)
    """Passes over the training set; may be fractional."""
    overfit_batches: int | None = limited(None, least=1)
    """Train only on this many global batches (the first ones), repeatedly, and evaluate on their
    samples, to see whether the model can learn at all; null: train on all."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    run_name: str = may_change("run")
    """Name of the run folder; on the command line, the default is the config file's name, with the
    settings on the command line that change the training curve."""
    runs_folder: str = may_change("runs")
    """Folder that contains the run folders; for several nodes usually on shared storage
    (docs/clusters.md)."""
    resume: str = may_change("auto")
    """auto: continue this run if it exists; never: move it aside and start again from step 0; or
    the path of a checkpoint to continue from, with its step and its optimizer. To start from
    weights alone, read them in the recipe's build_model."""
    stop_after: str | None = may_change(None, such_as="3h55m")
    """Save and exit after this time, such as 3h55m, counted from the start of the launcher
    (without one, of the process); the same command continues the run."""
    seed: int = limited(0, least=0, most=2**64 - 1)
    """Seed of initial weights, data order, augmentation and dropout."""
    precision: Literal["no", "bf16", "fp16"] | None = may_change(None)
    """Mixed precision; null: use the setting of the accelerate config."""
    tf32: bool = may_change(True)
    """Allow TF32 for float32 matrix products and convolutions on GPUs that support it."""
    channels_last: bool = may_change(False)
    """Use the channels_last memory format, the fastest for convolutions on GPUs; without effect
    under FSDP, which shards contiguous weights only."""
    deterministic: bool = may_change(False)
    """Use only deterministic algorithms; slower on GPUs."""

    def __post_init__(self) -> None:
        """Check the settings that do not depend on the machine."""
        if not dataclasses.is_dataclass(kind := type(self.recipe)):
            raise ConfigError(
                f"recipe {kind.__name__} ({source_location(kind)}) is not a dataclass: put"
                " @dataclass(frozen=True, kw_only=True) above it, and its settings as fields."
            )
        check_limits(self)
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"steps is {self.steps} and epochs is {self.epochs}: set exactly one of them."
            )
        if not self.run_name or self.run_name in {".", ".."} or "/" in self.run_name:
            raise ConfigError(f"run_name {self.run_name!r} must be a folder name without '/'.")
        for name in ("runs_folder", "resume"):
            if "://" in (path := getattr(self, name)):
                raise ConfigError(
                    f"{name} is {path}: give the path of a folder."
                    " checkpoints.mirror takes such a URL, to which a run is copied."
                )
        for name in ("lr", "weight_decay"):  # the loop sets these for each group of parameters
            if name in self.optim.init_args:
                raise ConfigError(f"optim.init_args holds {name}: set optim.{name} instead.")
        if self.optim.schedule == "wsd" and not self.optim.decay_steps:
            raise ConfigError("optim.decay_steps is 0, but must be at least 1 for wsd.")
        evaluation = self.evaluation
        finds_plateaus = evaluation.best_metric and evaluation.every_steps
        if self.optim.schedule == "plateau" and not finds_plateaus:
            raise ConfigError(
                "optim.schedule is plateau, which requires evaluation.best_metric and"
                " evaluation.every_steps: set both."
            )
        if self.stop_after is not None:
            parse_duration(self.stop_after)
        if evaluation.patience and not evaluation.best_metric:
            raise ConfigError(
                f"evaluation.patience is {evaluation.patience}: set evaluation.best_metric too."
            )

    @property
    def folder(self) -> Path:
        """Return the path of the run folder."""
        return Path(self.runs_folder) / self.run_name


def check_limits(config: Config) -> None:
    """Refuse a value that does not have the type of its field, or is outside its limits."""
    for name, kind, limits in each_setting():
        value = attrgetter(name)(config)
        least, most = limits.get("least", -math.inf), limits.get("most", math.inf)
        is_number = isinstance(value, (int, float))
        is_within = not is_number or (least <= value <= most and abs(value) != math.inf)
        if not dataclasses.is_dataclass(value) and not (is_within and fits(value, kind)):
            raise wrong_value(name, value, kind, limits)


# ---- the values of a setting ---------------------------------------------------------------------
KINDS: dict[type, str] = {  # the types of settings, and what messages call them
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    list: "a list such as [a, b]",
    dict: "named settings {name: value}",
    NoneType: "null",
}


def each_setting(kind: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, Limits]]:
    """Yield the dotted name, type and metadata of each setting; a group precedes its settings.

    Args:
        kind: a dataclass; by default Config.
        prefix: prepended to the names.
    """
    for f in dataclasses.fields(kind or Config):
        is_group = dataclasses.is_dataclass(f.type)
        yield prefix + f.name, dict if is_group else f.type, f.metadata
        if is_group:
            yield from each_setting(f.type, f"{prefix}{f.name}.")


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value read from YAML has this type; True for a type that is not in KINDS."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(value is part or (isinstance(value, str) and value == part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(fits(item, part) for item in value for part in parts)
    if origin in (int, float):
        allowed = (int,) if origin is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return origin not in KINDS or isinstance(value, origin)


def takes(kind: Any, such_as: str = "") -> list[str]:
    """Describe in words the values that a type allows."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return [word for part in parts for word in takes(part, such_as)]
    if origin is Literal:
        return [str(part) for part in parts]
    if origin is bool:
        return ["true", "false"]
    return [KINDS[origin] + f" such as {such_as}" * (origin is str and bool(such_as))]


def wrong_value(name: str, value: Any, kind: Any, metadata: Limits | None = None) -> ConfigError:
    """Return the error for a wrong value: the setting's name, the value and the allowed values.

    Args:
        name: the setting's dotted name.
        value: a value of the wrong type, or outside the limits.
        kind: the setting's type.
        metadata: the field's metadata, with the limits.
    """
    limits = metadata or {}
    least, most = limits.get("least"), limits.get("most")
    floor = "more than 0" if least and least < 1e-6 else f"at least {least}"
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    floor = "a finite number" if is_infinite else floor
    wanted = f"between {least} and {most}" if most is not None else floor
    if not fits(value, kind):
        *words, last = takes(kind, limits.get("such_as", ""))
        wanted = f"{', '.join(words)} or {last}" if words else last
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    shown += " (without quotes, YAML reads no and off as false)" * (value is False)
    return ConfigError(f"{name} is {shown}, but must be {wanted}.")


def parse_duration(duration: str) -> int:
    """Convert a duration such as 3h55m or 90s to seconds."""
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration)
    if not parts or not duration:
        raise ConfigError(
            f"stop_after is {duration!r}; give days, hours, minutes and seconds such as 3h55m."
        )
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def to_dict(config: Any) -> dict[str, Json]:
    """Return a config as plain data in the form of the YAML files."""
    plain: dict[str, Json] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name == "recipe" and isinstance(config, Config):
            kind = type(value)
            class_path = f"{kind.__module__}.{kind.__qualname__}"
            plain[f.name] = {"class_path": class_path, "init_args": to_dict(value)}
        elif f.init:  # a derived field is not a setting
            plain[f.name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    """Convert a value to a YAML type that settings.parse reads back."""
    match value:
        case Enum():
            return value.name
        case Path():
            return os.fspath(value)
        case dict():
            return {_plain(key): _plain(part) for key, part in value.items()}
        case set() | frozenset():
            return sorted(map(_plain, value), key=repr)  # the same order on every rank
        case list() | tuple():
            return [_plain(part) for part in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def to_yaml(config: Config) -> str:
    """Return a config as YAML that settings.parse reads back.

    Raises:
        ConfigError: a setting holds a secret, or a value that YAML has no type for.
    """
    import yaml

    if refusal := secrets_problem(config):
        raise ConfigError(refusal)

    class Dumper(yaml.SafeDumper):
        """Also puts quotes around a text such as 1e3, or jsonargparse would read a number."""

    number = re.compile(r"[-+]?[\d_]+[eE][-+]?\d+")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        value = error.args[-1]
        raise ConfigError(f"config.yaml cannot hold {value!r}: give its name as text.") from error


def fixed_settings(config: Config) -> dict[str, Json]:
    """Return the settings that change the training curve, by dotted name."""
    return saved_fixed_settings(to_dict(config), config)


def used_fixed_settings(config: Config) -> list[str]:
    """Return the names of the fixed settings that are not at their defaults.

    Config has no defaults for recipe and batches, so all their settings that are not null are
    included.
    """
    defaults = saved_fixed_settings({}, config)
    return [name for name, value in fixed_settings(config).items() if value != defaults.get(name)]


def saved_fixed_settings(saved: dict[str, Json], config: Any, prefix: str = "") -> dict[str, Json]:
    """Return the fixed settings of a config.yaml, without importing the classes that it names.

    Args:
        saved: the content of the file.
        config: gives the fields to look up in the file, and the defaults for missing ones.
        prefix: prepended to the dotted names.
    """
    names = {f.name for f in dataclasses.fields(config)}
    settings = {prefix + name: value for name, value in saved.items() if name not in names}
    for f in dataclasses.fields(config):
        if not f.init or not f.metadata.get("changes_curve", True):
            continue
        value = getattr(config, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        saved_value = saved.get(f.name, _plain(default))
        if f.name == "recipe" and isinstance(config, Config) and isinstance(saved_value, dict):
            kind, class_path = type(value).__qualname__, str(saved_value.get("class_path"))
            settings["recipe"] = kind if class_path.endswith(f".{kind}") else class_path
            saved_value = saved_value.get("init_args") or {}
        if dataclasses.is_dataclass(value) and isinstance(saved_value, dict):
            settings |= saved_fixed_settings(saved_value, value, f"{prefix}{f.name}.")
        else:
            settings[prefix + f.name] = None if saved_value is dataclasses.MISSING else saved_value
    return settings
