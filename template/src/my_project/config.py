"""How much: every setting of a run, with its unit and its default.

One YAML file per experiment (`configs/`), typed dotted overrides on the command line, unknown keys
fail. This module imports no torch, so `--help` and a wrong setting answer at once.

A field made with `free` may change between two starts of one run; any other field changes the
training curve, so a run that exists is continued only with the same value (run_folder.py).
"""

import dataclasses
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

from .launcher import LAUNCHER
from .recipe import Recipe, problems_of
from .safety.redaction import mask, refuse_secrets


class ConfigError(ValueError):
    """Say what a user can mend: the value, the limit, the remedy. Shown without a traceback."""

    exit_code = 2  # again would be no better


class TransientError(ConfigError):
    """Say what may get better by itself, so that a scheduler tries again."""

    exit_code = 1


CONFIG_ERRORS = "LAUNCH_CONFIG_ERRORS"  # names the folder in which launch.py looks for them


def free(default: Any) -> Any:
    """Declare a field that leaves the training curve as it is."""
    return field(default=default, metadata={"changes_curve": False})


@dataclass(frozen=True, kw_only=True)
class BatchesConfig:
    """Which samples a step sees, and how they are loaded."""

    global_batch_size: int
    """Samples per optimizer step, over all processes."""
    micro_batch_size: int = free(0)
    """Samples per forward and process; 0: the global batch divided by the processes.
    Accumulation follows: global = micro x processes x accumulation."""
    workers: int | None = free(None)
    """Loader processes per training process; null: the CPUs of this process less one, at most 8."""
    seed_samples: bool = True
    """Seed the random generators for each sample from (seed, epoch, index), so that augmentation
    does not depend on which process draws it. Costs about 10 us a sample: switch it off where
    the data set draws nothing."""
    loader: dict[str, Any] = field(default_factory=dict, metadata={"changes_curve": False})
    """More options of torch.utils.data.DataLoader, by its own names."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, the learning rate over time, clipping and averaging."""

    class_path: str = "torch.optim.AdamW"
    """Any optimizer class."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Its arguments besides the parameters, lr and weight_decay."""
    lr: float = 1e-3
    """The highest learning rate of the schedule."""
    weight_decay: float = 0.0
    """For matrices and kernels; biases and normalisation weights have none."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up. wsd: constant, then linear to the end over the last decay_steps."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    decay_steps: int = 0
    """wsd only: the length of the decay at the end, in steps."""
    final_lr_fraction: float = 0.0
    """The learning rate at the end, as a fraction of lr."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient over all parameters; null: no clipping."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, evaluated and exported in their place."""
    max_nonfinite_steps: int = free(20)
    """End the run when so many steps in a row teach nothing: a gradient that is not finite, or a
    loss that counts no sample."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When to evaluate, and what counts as best. The end of a run is always evaluated."""

    every_steps: int | None = free(None)
    """Steps between evaluations; null: at the end only."""
    batch_size: int = free(0)
    """Samples per forward and process; 0: the micro-batch."""
    sanity_check: bool = free(True)
    """Before the first step of a new run, evaluate one micro-batch of each validation set and throw
    the results away, so that a mistake in the metrics ends the run before it has trained."""
    best_metric: str | None = free(None)
    """Such as validation/accuracy: the best weights by it are exported to best/."""
    best_mode: Literal["max", "min"] = free("max")
    """Whether a greater or a smaller best_metric is better."""
    patience: int | None = free(None)
    """Stop early after so many evaluations without a better best_metric."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """When to save the whole state of the run, and what to keep."""

    every_steps: int | None = free(None)
    """Steps between checkpoints; null: at the end only."""
    keep: int = free(2)
    """The newest so many stay."""
    keep_best: bool = free(False)
    """The best by evaluation.best_metric stays too, of those saved at a step that is evaluated."""
    keep_every_steps: int | None = free(None)
    """Those of each so many steps stay for ever."""
    background: bool = free(True)
    """Write beside training: a step waits only for the copy into host memory, which stays in use
    (the size of the state)."""
    on_failure: Literal["continue", "end"] = free("continue")
    """What a save that fails (a full disk) does: the run goes on and tries again at the next one,
    or ends."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """What accelerate's YAML files cannot say about the process group and DDP."""

    startup_timeout_seconds: int = free(1800)
    """How long a process may stand still in start-up, an evaluation, a save, or the step after;
    at least timeout_seconds."""
    timeout_seconds: int = free(600)
    """How long it may stand still in a step. Then every process writes where it stands into
    errors/ and ends."""
    ddp: dict[str, Any] = field(default_factory=dict, metadata={"changes_curve": False})
    """Options of accelerate's DistributedDataParallelKwargs, by their own names."""
    sync_batchnorm: bool = False
    """BatchNorm over the micro-batches of all processes. On GPUs only."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is recorded."""

    every_steps: int = free(10)
    """Steps between records in metrics.jsonl and the trackers."""
    trackers: list[str] = field(
        default_factory=lambda: ["tensorboard"], metadata={"changes_curve": False}
    )
    """Names of accelerate's trackers: tensorboard, wandb, mlflow, ..."""
    peak_tflops: float | None = free(None)
    """Of one device, by its data sheet for the run's precision; with a recipe that counts its
    operations, the part of it that is used is recorded as utilisation."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    recipe: Recipe
    """What is trained: class_path and init_args (recipe.py)."""
    batches: BatchesConfig
    steps: int | None = free(None)
    """Optimizer steps of the whole run. State this or epochs."""
    epochs: float | None = free(None)
    """Passes over the training set; a part of an epoch is allowed."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    run_name: str = free("run")
    """The run folder's name; on the command line it defaults to the config file's name."""
    runs_folder: str = free("runs")
    """Where run folders lie; on several nodes, storage that all of them share."""
    stage_to: str | None = free(None)
    """A folder on a disk of each node, such as $SLURM_TMPDIR, to copy the recipe's data to before
    training; null: read the data where it lies (loading/staging.py)."""
    resume: str = free("auto")
    """auto: continue this run if it exists; never: move it aside and start anew; or the path of a
    checkpoint to continue from."""
    stop_after: str | None = free(None)
    """Save and leave after this time, such as 3h55m, counted from the start of the process; the
    same command continues."""
    seed: int = 0
    """Initial weights, data order, augmentation and dropout follow from it."""
    precision: Literal["no", "bf16", "fp16"] | None = free(None)
    """null: what the accelerate config says."""
    tf32: bool = free(True)
    """Let float32 matrix products use TF32 on GPUs that have it."""
    channels_last: bool = free(False)
    """Keep image models in the memory layout that is fastest for convolutions on GPUs."""
    deterministic: bool = free(False)
    """Only algorithms that give the same bits each time; slower on GPUs."""

    def __post_init__(self) -> None:
        """Refuse what no machine could run."""
        if not dataclasses.is_dataclass(self.recipe):
            raise ConfigError(
                f"recipe {type(self.recipe).__name__} is not a dataclass, so its settings cannot be"
                " recorded; decorate the class with @dataclass(frozen=True, kw_only=True)."
            )
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"steps is {self.steps} and epochs is {self.epochs}: state exactly one of them."
            )
        if not self.run_name or self.run_name in {".", ".."} or "/" in self.run_name:
            raise ConfigError(f"run_name {self.run_name!r} must be a folder name without '/'.")
        at_least = {
            "steps": (self.steps, 1),
            "epochs": (self.epochs, 1e-9),
            "batches.global_batch_size": (self.batches.global_batch_size, 1),
            "batches.micro_batch_size": (self.batches.micro_batch_size, 0),
            "batches.workers": (self.batches.workers, 0),
            "optim.lr": (self.optim.lr, 0),
            "optim.weight_decay": (self.optim.weight_decay, 0),
            "optim.warmup_steps": (self.optim.warmup_steps, 0),
            "optim.decay_steps": (self.optim.decay_steps, self.optim.schedule == "wsd"),
            "optim.clip_norm": (self.optim.clip_norm, 1e-30),
            "optim.max_nonfinite_steps": (self.optim.max_nonfinite_steps, 1),
            "evaluation.every_steps": (self.evaluation.every_steps, 1),
            "evaluation.batch_size": (self.evaluation.batch_size, 0),
            "evaluation.patience": (self.evaluation.patience, 1),
            "checkpoints.every_steps": (self.checkpoints.every_steps, 1),
            "checkpoints.keep": (self.checkpoints.keep, 1),
            "checkpoints.keep_every_steps": (self.checkpoints.keep_every_steps, 1),
            "telemetry.every_steps": (self.telemetry.every_steps, 1),
            "distributed.timeout_seconds": (self.distributed.timeout_seconds, 1),
            "distributed.startup_timeout_seconds": (self.distributed.startup_timeout_seconds, 1),
            "seed": (self.seed, 0),
        }
        for name, (value, least) in at_least.items():
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value}, but must be at least {least + 0}.")
        for name, value in {
            "optim.ema_decay": self.optim.ema_decay,
            "optim.final_lr_fraction": self.optim.final_lr_fraction,
        }.items():
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, but must lie between 0 and 1.")
        if self.stop_after is not None:
            seconds_of(self.stop_after)
        if self.checkpoints.keep_best and not self.evaluation.best_metric:
            raise ConfigError(
                "checkpoints.keep_best needs evaluation.best_metric, the metric to be best by."
            )
        if self.evaluation.patience and not self.evaluation.best_metric:
            raise ConfigError(
                "evaluation.patience needs evaluation.best_metric, the metric to be patient about."
            )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.runs_folder) / self.run_name


def seconds_of(duration: str) -> int:
    """Read a duration such as 3h55m or 90s, in seconds."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration)
    if not found or not duration:
        raise ConfigError(
            f"stop_after is {duration!r}; give days, hours, minutes and seconds such as 3h55m."
        )
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def to_dict(config: Any) -> dict[str, Any]:
    """Turn a config into plain data, in the form that the YAML files have."""
    plain: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name == "recipe" and isinstance(config, Config):
            kind = type(value)
            class_path = f"{kind.__module__}.{kind.__qualname__}"
            plain[f.name] = {"class_path": class_path, "init_args": to_dict(value)}
        elif f.init:  # what follows from other fields is not a setting
            plain[f.name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    """Turn a value into what YAML has, in the form that `parse` reads back."""
    match value:
        case Enum():
            plain: Any = value.name
        case Path():
            plain = os.fspath(value)
        case dict():
            plain = {_plain(key): _plain(part) for key, part in value.items()}
        case set() | frozenset():
            plain = sorted(map(_plain, value), key=repr)  # the same on every process
        case list() | tuple():
            plain = [_plain(part) for part in value]
        case _:
            plain = to_dict(value) if dataclasses.is_dataclass(value) else value
    return plain


def to_yaml(config: Config) -> str:
    """Write a config as YAML that `parse` reads back.

    Raises:
        ConfigError: a setting is of a type that YAML does not have, or holds a secret.
    """
    import yaml

    if refusal := refuse_secrets(config):
        raise ConfigError(refusal)
    plain = to_dict(config)
    try:
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        kind = type(config.recipe)
        value = error.args[-1]
        raise ConfigError(
            f"a setting of {kind.__module__}.{kind.__qualname__} cannot be written to config.yaml:"
            f" {value!r} is a {type(value).__name__}; use numbers, strings, enums, paths, lists,"
            " dictionaries or dataclasses of these."
        ) from error


def curve(config: Any, prefix: str = "") -> dict[str, Any]:
    """List the settings which change the training curve, by dotted name."""
    settings: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if not f.init or not f.metadata.get("changes_curve", True):
            continue
        if dataclasses.is_dataclass(value):
            settings |= curve(value, f"{prefix}{f.name}.")
        else:
            settings[prefix + f.name] = _plain(value)
        if f.name == "recipe":
            settings["recipe"] = type(value).__qualname__
    return settings


def saved_curve(saved: Any, config: Any, prefix: str = "") -> dict[str, Any]:
    """List the same settings out of a config.yaml, without importing the classes it names.

    Args:
        saved: what the file holds.
        config: whose fields are looked for; their defaults stand for what the file lacks.
        prefix: of the dotted names.
    """
    known = {f.name for f in dataclasses.fields(config)}
    settings = {prefix + name: value for name, value in saved.items() if name not in known}
    for f in dataclasses.fields(config):
        if not f.init or not f.metadata.get("changes_curve", True):
            continue
        value = getattr(config, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        there = saved.get(f.name, _plain(default))
        if f.name == "recipe" and isinstance(config, Config) and isinstance(there, dict):
            kind, class_path = type(value).__qualname__, str(there.get("class_path"))
            settings["recipe"] = kind if class_path.endswith(f".{kind}") else class_path
            there = there.get("init_args") or {}
        if dataclasses.is_dataclass(value) and isinstance(there, dict):
            settings |= saved_curve(there, value, f"{prefix}{f.name}.")
        else:
            settings[prefix + f.name] = None if there is dataclasses.MISSING else there
    return settings


# ---- YAML, checked -------------------------------------------------------------------------------
MOST_YAML_CHARACTERS = 10_000_000  # what aliases stand for counted each time; a value is 100 more
MOST_YAML_LEVELS = 100


def check_yaml(text: str) -> None:
    """Refuse YAML that would take all memory, or overflow the stack.

    A few lines of aliases, each of ten others, stand for more values than memory holds.

    Raises:
        yaml.YAMLError: it is such, or no YAML.
    """
    import yaml

    collections: list[list[Any]] = [["", 0, 0]]  # those that are open: anchor, characters, levels
    anchored: dict[str | None, tuple[int, int]] = {}  # characters and levels
    has_aliases = False
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        characters, levels = 100, 0
        if isinstance(event, yaml.ScalarEvent):
            characters += len(event.value)
            anchored[event.anchor] = characters, levels
        elif isinstance(event, yaml.CollectionStartEvent):
            collections.append([event.anchor, characters, 0])
            characters, levels = 0, len(collections)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, characters, levels = collections.pop()
            anchored[anchor] = characters, levels
        elif isinstance(event, yaml.AliasEvent):
            has_aliases = True
            if event.anchor in [anchor for anchor, *_ in collections]:
                raise yaml.YAMLError(f"the alias *{event.anchor} stands inside of what it names")
            characters, levels = anchored.get(event.anchor, (characters, levels))
        collections[-1][1] += characters
        collections[-1][2] = max(collections[-1][2], levels + 1)
        if has_aliases and collections[-1][1] > MOST_YAML_CHARACTERS:
            raise yaml.YAMLError(
                f"its aliases stand for more than {MOST_YAML_CHARACTERS} characters"
            )
        if collections[-1][2] > MOST_YAML_LEVELS:
            raise yaml.YAMLError(f"it is nested more than {MOST_YAML_LEVELS} levels deep")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings, whatever they are.

    Raises:
        ConfigError: it cannot be read, or holds no settings.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        settings = yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__} in place of named settings.")
    return settings


# ---- the command line ----------------------------------------------------------------------------
def _parser(description: str, prog: str | None):
    import yaml
    from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings

    def load(text: str) -> Any:
        check_yaml(text)
        return get_loader("yaml")(text)

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("checked_yaml", load, (yaml.YAMLError,))
    parser = ArgumentParser(
        prog=prog, description=description, exit_on_error=False, parser_mode="checked_yaml"
    )
    parser.add_argument("--config", action="config", help="A YAML file; configs/ holds examples.")
    parser.add_class_arguments(Config)
    for action in parser._actions:
        if action.dest == "optim":  # its class_path is the optimizer's, not one of OptimConfig
            setattr(action, "basetype", None)  # noqa: B010 - an attribute of jsonargparse's own
    return parser


def parse(
    arguments: list[str] | dict[str, Any], description: str = "", prog: str | None = None
) -> Config:
    """Read `--config file.yaml --dotted.key value ...`; the later argument wins.

    Args:
        arguments: these, or the settings as plain data.
        description: for --help.
        prog: the command's name there.

    Raises:
        ConfigError: in one sentence, what is wrong.
    """
    from argparse import ArgumentError

    parser = _parser(description, prog)
    try:
        if isinstance(arguments, dict):
            settings = parser.parse_object(arguments)
        else:
            settings = parser.parse_args(arguments)
        if settings.config:
            settings.run_name = _run_name(settings.run_name, str(settings.config[-1]))
        values = vars(parser.instantiate(settings))
        values.pop("config")
        return Config(**values)
    except ConfigError:
        raise
    except (ArgumentError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())[:1000]  # it may quote a whole file
        if "does not implement protocol" in message:
            class_path = message.split("Import path ")[-1].split(" ")[0]
            found = "; ".join(problems_of(class_path)) or message
            message = f"recipe {class_path}: {found} (recipe.py describes all methods)."
        elif "required" in message and "--config" not in " ".join(arguments):
            message += "; give a config file: --config configs/<name>.yaml"
        raise ConfigError(message.removeprefix("Parser key ")) from error


def _run_name(name: str, config_file: str) -> str:
    """Return the run's name: the config file's where none was given ("run" is the default)."""
    return Path(config_file).stem if name == "run" else name


def run_folder_of(arguments: Iterable[str]) -> Path:
    """Return the run folder that `parse` would find, without importing the recipe (and torch)."""
    runs_folder = "runs"
    name = "run"
    config_file = "run"
    words = [part for argument in arguments for part in argument.split("=", 1)]
    for word, value in pairwise(words):
        if word == "--config":
            config_file = value
            settings = read_yaml(Path(value)) if Path(value).is_file() else {}
            runs_folder = str(settings.get("runs_folder", runs_folder))
            name = str(settings.get("run_name", name))
        elif word == "--runs_folder":
            runs_folder = value
        elif word == "--run_name":
            name = value
    return Path(runs_folder) / _run_name(name, config_file)


def parse_command_line(description: str) -> Config:
    """Read the command line of the train module; a mistake ends the process with 2.

    Before anything else: from here on the process ends with the launcher that started it.
    """
    LAUNCHER.watch()
    try:
        config = parse(sys.argv[1:], description)
    except ConfigError as error:
        exit_with_sentence(error)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and config.resume == "never":  # the run that began anew is the one to continue
        return dataclasses.replace(config, resume="auto")
    return config


def exit_with_sentence(error: ConfigError) -> NoReturn:
    """Print one sentence and exit with the error's code.

    Every process of a launch meets the same mistake. The first of each node says it; the others
    wait a little, since the launcher ends them once one is gone, and speak only if it did not.
    Launchers return 1 whatever their processes returned, so launch.py finds both in a file.
    """
    if folder := os.environ.get(CONFIG_ERRORS):
        with suppress(OSError):
            path = Path(folder, f"{error.exit_code}_{os.getpid()}")
            path.write_text(mask(str(error)), encoding="utf-8")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        import time

        time.sleep(5)
    print(mask(f"error: {error}"), file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)
