"""Read the settings from `--config file.yaml --dotted.key value ...`, and name the run after them.

jsonargparse imports the recipe and checks all names and values, including the recipe's fields.
Options override files.

A run without a run_name is named <config stem>, then -<key>=<value> for each typed setting that
changes the training curve, even if the file has the same value. So each run of a sweep has its own
folder, while the same command with more steps or another micro-batch size continues the same run.
"""

import dataclasses
import gc
import hashlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .config import Config, ConfigError, each_setting, fits, fixed_settings, wrong_value
from .failures import exception_frames, exit_with_error, own_frame
from .files import Json, read_yaml
from .process import LAUNCHER, never_fail_to_print
from .recipe import problems
from .run_files import flat
from .safety.redaction import secrets_problem
from .words import short_path, shortened

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

NAME_LENGTH = 100  # bytes of a run's name; file systems allow 255
Source: TypeAlias = Mapping[str, Json]  # settings of a file, or texts by dotted name
DURATIONS = ("steps", "epochs")
OTHER_NAMES = {  # what other training programs call a setting
    "learning_rate": "optim.lr",
    "batch_size": "batches.global_batch_size",
    "per_device_train_batch_size": "batches.micro_batch_size",
    "gradient_accumulation_steps": "batches.micro_batch_size",
    "output_dir": "runs_folder",
    "resume_from_checkpoint": "resume",
}
RECIPE_KEYS = {"class_path", "init_args"}
NULLABLE = {name for name, kind, _ in each_setting() if fits(None, kind)} - {"recipe"}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a similar name; "" if there is none."""
    similar = get_close_matches(given, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


# ---- what was typed ------------------------------------------------------------------------------
def split(arguments: Iterable[str]) -> tuple[list[Path], list[tuple[str, str | None]]]:
    """Return the config files, and the options as (name, text); a name may occur several times.

    Names of fields may have - instead of _, as in --overfit-batches. Other words are config files.
    """
    files: list[Path] = []
    options: list[tuple[str, str | None]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("-"):
            if equals and not word.endswith((".yaml", ".yml")):
                raise ConfigError(f"{name} is a setting: type it as --{name}.")
            files.append(Path(word))
            continue
        name = field_name(name.removeprefix("--"))
        has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
        value = (text if equals else words.pop(0)) if has_value else None
        if name == "config" and value:
            files.append(Path(value))
        else:
            options.append((name, value))
    return files, options


def field_name(name: str) -> str:
    """Replace - with _ in an option's name, except in what may be the key of a recipe's dict."""
    field = re.match(r"recipe\.(?:init[-_]args\.)?[^.]*", name)
    end = field.end() if field else len(name)
    return name[:end].replace("-", "_") + name[end:]


def read_config(file: Path) -> dict[str, Json]:
    """Read a config file."""
    if not file.is_file():
        folders = file.parent, Path("configs")
        paths = [path for folder in folders for path in folder.glob("*.yaml")]
        files = {path.stem: path for path in paths if path.is_file()}  # not a broken link
        similar = get_close_matches(file.stem, files, n=1)
        where = (
            f"look in {[*files.values()][-1].parent}/."
            if files
            else "the current folder has no configs/*.yaml."
        )
        hint = f"did you mean {files[similar[0]]}?" if similar else where
        raise ConfigError(f"there is no config file {file}; {hint}")
    if not (settings := read_yaml(file)):
        raise ConfigError(f"{file} is empty; write a recipe and its settings into it.")
    return settings


def unset_duration(sources: Iterable[Source]) -> list[str]:
    """Return an option that sets steps or epochs to null if the other one is set.

    Of several sources, the last one that sets either of them counts.
    """
    unset: list[str] = []
    for settings in sources:
        given = [name for name in DURATIONS if settings.get(name) not in (None, "null")]
        if given:
            unset = [f"--{other}=null" for other in DURATIONS if other not in given]
    return unset


# ---- the name of a run ---------------------------------------------------------------------------
def value_text(value: Json) -> str:
    """Return a value as text for a run's name: the same for 3e-3 and 0.003, and for 64 and 64.0."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(value_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def make_run_name(
    files: list[Path], typed: dict[str, str | None], in_files: Config | None, config: Config
) -> str:
    """Return the name of a run for which no run_name is given, from its files and options.

    Args:
        files: the config files.
        typed: the texts of the options, by name.
        in_files: the settings in the files alone; None if they are incomplete.
        config: all settings.
    """
    from_files = _curve_settings(in_files) if in_files else {}
    settings = _curve_settings(config)
    last_words = [name.rpartition(".")[2] for name in settings]
    # both recipe.init_args.width and recipe.width may be typed
    options = [f"{name.replace('recipe.init_args', 'recipe', 1)}." for name in typed_names(typed)]
    shown = {}
    for name, value in settings.items():
        is_typed = any(option.startswith(f"{name}.") for option in options)
        is_in_group = any(f"{name}.".startswith(option) for option in options)
        # if a whole group was typed, show only the settings that differ from the files
        if is_typed or (is_in_group and from_files.get(name) != value):
            short = name.rpartition(".")[2]
            shown[short if last_words.count(short) == 1 else name] = value
    stem = "+".join(file.stem for file in files) or "run"
    full_name = "-".join([stem, *(f"{key}={shown[key]}" for key in sorted(shown))])
    name = re.sub(r"[^\w.,+=-]", "_", full_name)
    if len(name.encode()) > NAME_LENGTH:
        digits = hashlib.sha256(full_name.encode()).hexdigest()[:8]
        name = f"{name.encode()[: NAME_LENGTH - 9].decode(errors='ignore')}-{digits}"
    return "run" if name in {"", ".", ".."} else name


def typed_names(typed: dict[str, str | None]) -> list[str]:
    """Return the names of the options, and of the settings in a group such as --optim {"lr": 1}.

    The option --recipe also sets recipe.class_path.
    """
    import yaml

    names = [*typed]
    for name, text in typed.items():
        with suppress(yaml.YAMLError, ValueError):  # ValueError: such as 2024-02-30
            value = yaml.safe_load(text or "")
            names += flat(value, f"{name}.") if isinstance(value, dict) else []
    return [*names, *["recipe.class_path"] * ("recipe" in names)]


def _curve_settings(config: Config) -> dict[str, str]:
    """Return the settings that change the training curve, as texts for a run's name."""
    settings = flat(fixed_settings(config))
    settings["recipe.class_path"] = f"{type(config.recipe).__module__}.{settings.pop('recipe')}"
    return {name: value_text(value) for name, value in settings.items()}


# ---- all settings --------------------------------------------------------------------------------
def _parser(recipe: type | None = None, *, prog: str | None = None, with_help: bool = False):
    """Return jsonargparse's parser.

    Args:
        recipe: the class whose fields --help lists; None: the config names the class.
        prog: the command's name in --help.
        with_help: read the fields' docstrings, which takes longer than all parsing.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=with_help)
    parser = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="A YAML file; configs/ holds examples.")
    if recipe:
        parser.add_class_arguments(recipe, "recipe")
    parser.add_class_arguments(Config, skip={"recipe"} if recipe else None)
    for action in parser._actions:
        # the class_path in optim names the optimizer, not a subclass of OptimConfig
        if action.dest == "optim":
            setattr(action, "basetype", None)  # noqa: B010 - an attribute of jsonargparse
    return parser


def _config(
    parser: "ArgumentParser", run_parser: Callable, sources: Iterable[Source] = ()
) -> Config:
    """Parse and return the settings; an error becomes one line.

    Args:
        parser: jsonargparse's parser.
        run_parser: calls the parser.
        sources: the config files' settings and the options, in which the wrong value is looked up.
    """
    try:
        values = vars(parser.instantiate(run_parser()))
        values.pop("config")
        return Config(**values)
    except ConfigError:
        raise
    except Exception as error:  # of any type: parsing imports the recipe's module
        message = shortened(" ".join(str(error).split()), 1000)  # it may quote a whole file
        frame = own_frame(exception_frames(error))
        if frame and frame.file != __file__:
            place = f"{short_path(frame.file)}, line {frame.line}"
            message = f"{type(error).__name__}: {message} ({place})"
        raise ConfigError(_explained(message, parser, sources)) from error


# ---- wrong values --------------------------------------------------------------------------------
def spread(settings: Source, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield dotted names and values of settings, each group before its settings."""
    for key, value in settings.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from spread(value, f"{prefix}{key}.")


def read_value(text: str) -> Json:
    """Return a value from the command line as YAML reads it, but read 1e3 as a number."""
    import yaml

    value: Json = text
    with suppress(yaml.YAMLError, ValueError):
        value = yaml.safe_load(text)
        value = float(value) if isinstance(value, str) and value[-1:].isdigit() else value
    return value


def is_null(value: Json, name: str) -> bool:
    """Return whether a setting that may be null has a word for null: Python's, or one of YAML's."""
    return value in ("None", "null", "Null", "NULL", "~") and name in NULLABLE


def with_null(settings: Source, prefix: str = "") -> dict[str, Json]:
    """Replace words such as None with null in the settings of a file, where null is allowed."""
    replaced: dict[str, Json] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        inner = with_null(value, f"{name}.") if isinstance(value, dict) else value
        replaced[key] = None if is_null(value, name) else inner
    return replaced


def wrong_setting(sources: Iterable[Source], recipe: type | None) -> ConfigError | None:
    """Return the error for the first setting with a value of a wrong type, or None.

    Args:
        sources: the settings of each config file, and the options' texts by dotted name.
        recipe: the recipe's class; None if it is unknown.
    """
    types: dict[str, Any] = {name: (kind, limits) for name, kind, limits in each_setting()}
    path = {"such_as": "package.module.Class"}
    types |= {"recipe": (str | dict, path), "recipe.class_path": (str, path)}
    types["recipe.init_args"] = (dict, {})
    if dataclasses.is_dataclass(recipe):
        types |= {name: kind_limits for name, *kind_limits in each_setting(recipe, "recipe.")}
    for name, value in chain(*map(spread, sources)):
        name = re.sub(r"^recipe\.init_args\.", "recipe.", name)
        kind, limits = types.get(name, (Any, {}))
        # jsonargparse reads a date as text
        other = read_value(value) if isinstance(value, str) else value
        other = str(value) if isinstance(value, date) else other
        if not (fits(value, kind) or fits(other, kind)):
            return wrong_value(name, value, kind, limits)
    return None


def _explained(message: str, parser: "ArgumentParser", sources: Iterable[Source]) -> str:
    """Return jsonargparse's message in plain words, if its meaning is known.

    For an unknown name, suggest the most similar one; for a wrong value, say what is valid.
    """
    unknown = re.search(
        r"(?:(?:Group '|^Parser key \")([\w.]+).*)?(?:ption '|arguments: (--))([^'=\s]+)", message
    )
    kind = re.search(r"(?:class_path '|Import path )(([\w.]+)\.(\w+))", message)
    recipe = getattr(sys.modules.get(kind[2]), kind[3], None) if kind else None
    if wrong := wrong_setting(sources, recipe):
        return str(wrong)
    for group in (source.get("recipe") for source in sources):
        names = {str(name) for name in group} if isinstance(group, dict) else set()
        # without these two, the keys are those of init_args
        for name in sorted(names - RECIPE_KEYS) if names & RECIPE_KEYS else ():
            hint = f": if {name} is a setting of the recipe, move it to init_args."
            if name in Config.__dataclass_fields__:
                hint = f": move {name} to the top level."
            hint = did_you_mean(name, RECIPE_KEYS) or hint
            return f"recipe has only class_path and init_args{hint}"
    if unknown:
        group, dashes, last = unknown.groups(default="")
        name = f"{group}.{last}".strip(".")
        fields = getattr(recipe, "__dataclass_fields__", {})
        paths = [*parser.get_defaults().keys(), *(f"recipe.{field}" for field in fields)]
        names = {path.rpartition(".")[2]: path for path in paths} | OTHER_NAMES
        names |= {field: f"recipe.{field}" for field in fields} | {path: path for path in paths}
        similar = [names[match] for match in get_close_matches(name, names, n=1)]
        hint = f"did you mean {dashes}{similar[0]}?" if similar else "--help lists all settings."
        return f"there is no setting {dashes}{name}; {hint}"
    if kind and "does not implement protocol" in message:
        reasons = "; ".join(problems(pkgutil.resolve_name(kind[1]))) or message
        return f"recipe {kind[1]}: {reasons} (recipe.py describes all methods)."
    if missing := re.search(r"module '([\w.]+)' has no attribute '(\w+)'$", message):
        module = sys.modules[missing[1]]
        folders = getattr(module, "__path__", ())  # of a package, which may have no __file__
        files = [file.stem for folder in folders for file in Path(folder).glob("*")]
        message += did_you_mean(missing[2], [*vars(module), *files])
    if "arguments are required: recipe" in message:
        return f"{message}; give a config file, --config configs/<name>.yaml."
    return re.sub(r'^Parser key "([\w.]+)": ', r"\1: ", message)


def parse(
    arguments: list[str] | dict[str, Json], description: str = "", prog: str | None = None
) -> Config:
    """Parse `--config file.yaml --dotted.key value ...`; options override files.

    Of several files or equal options, the last one wins.

    Args:
        arguments: command-line arguments, or the settings as plain data.
        description: the text that --help shows first.
        prog: the command's name in --help.

    Raises:
        ConfigError: a setting is unknown, missing or has a wrong value.
    """
    if not isinstance(arguments, dict) and {"-h", "--help"} & {*arguments}:
        show_help(arguments, description, prog)
    parser = _parser()
    if isinstance(arguments, dict):
        given = with_null(arguments)
        return _config(parser, lambda: parser.parse_object(given), [given])
    files, options = split(arguments)
    options = [(name, "null" if is_null(text, name) else text) for name, text in options]
    typed = dict(options)
    contents = [read_config(file) for file in files]
    in_files = [*map(with_null, contents)]
    read = {name: read_value(text or "") for name, text in typed.items()}
    as_typed = {n: typed[n] if isinstance(v, (dict, list)) else v for n, v in read.items()}
    for source in (*in_files, as_typed):
        if refusal := secrets_problem(source):  # a secret would become part of the run's name
            raise ConfigError(refusal)
    from_files = [  # jsonargparse accepts a file's content instead of its path
        f"--config={file if before == after else json.dumps(after, default=str)}"
        for file, before, after in zip(files, contents, in_files, strict=True)
    ]
    words = [f"--{name}" + ("" if text is None else f"={text}") for name, text in options]
    words = [*from_files, *words, *unset_duration([*in_files, typed])]
    texts = {name: text for name, text in options if text is not None}
    config = _config(parser, lambda: parser.parse_args(words), [*in_files, texts])
    if refusal := secrets_problem(config):  # in a group that was typed as JSON
        raise ConfigError(refusal)
    if any("run_name" in source for source in (*in_files, typed)):
        return config
    base = None
    with suppress(ConfigError):  # the files alone may be incomplete or wrong
        base = _config(parser, lambda: parser.parse_args([*from_files, *unset_duration(in_files)]))
    return dataclasses.replace(config, run_name=make_run_name(files, typed, base, config))


def show_help(arguments: list[str], description: str, prog: str | None) -> None:
    """Print all settings, including the recipe's if a config file is given, and exit."""
    kind: type | None = None
    with suppress(ConfigError):
        kind = type(parse([word for word in arguments if word not in ("-h", "--help")]).recipe)
    if not kind:
        description += "\nWith a config, the fields of its recipe are listed too.\n"
    print(description)  # the parser would join its lines
    _parser(kind, prog=prog, with_help=True).print_help()
    raise SystemExit(0)


def parse_command_line(description: str) -> Config:
    """Parse the command line of the train module; an error ends the process with exit code 2.

    Call it first: from then on, the process ends when the launcher that started it ends, and Python
    collects no garbage until run_on_all_ranks (see no_garbage_collection).
    """
    LAUNCHER.watch()
    gc.disable()
    never_fail_to_print()
    try:
        return parse(sys.argv[1:], description)
    except ConfigError as error:
        exit_with_error(error)
