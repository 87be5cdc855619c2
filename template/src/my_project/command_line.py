"""Read `--config file.yaml --dotted.key value ...`, and name the run after it.

The names of settings are checked first; then the recipe is imported, and jsonargparse checks all
values, those of the recipe's fields too. What is typed wins over the file.

A run without a run_name is named <config stem> and -<key>=<value> for each setting that was typed
and changes the training curve, so that a sweep has a folder for each value, while more steps or
another micro-batch continue the same run.
"""

import dataclasses
import gc
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from .config import REMOVED, Config, ConfigError, fixed_settings
from .failures import (
    exit_with_error,
    frames_of,
    own_frame,
    short_path,
)
from .files import check_yaml, flat, read_yaml
from .process import LAUNCHER
from .recipe import problems_of
from .safety.redaction import secrets_problem

NAME_LENGTH = 100  # characters of a run's name; file systems allow 255 bytes
DURATIONS = ("steps", "epochs")
FLAGS = ("-h", "--help", "--print_config", "--print_shtab")  # options without a value


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a similar name; "" if there is none."""
    similar = get_close_matches(given, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


# ---- what was typed ------------------------------------------------------------------------------
def normalized(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with _ for each - in the names of options: --overfit-batches."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        is_option = name.startswith("--")
        words.append(f"--{name[2:].replace('-', '_')}{equals}{value}" if is_option else word)
    return words


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Config files first, then options in the order in which they were typed."""

    files: tuple[Path, ...]
    options: tuple[tuple[str, str], ...]  # names without --, and texts; a name may be repeated
    flags: tuple[str, ...]

    @property
    def last(self) -> dict[str, str]:
        """Return the options by name; of a repeated one the last."""
        return dict(self.options)

    @property
    def words(self) -> list[str]:
        """Return the arguments for jsonargparse."""
        return [
            *(f"--config={file}" for file in self.files),
            *(f"--{name}={text}" for name, text in self.options),
        ]


def split(arguments: Iterable[str]) -> CommandLine:
    """Read a command line.

    Raises:
        ConfigError: a word is not an option, or an option has no value.
    """
    files: list[Path] = []
    options: list[tuple[str, str]] = []
    flags: list[str] = []
    words = normalized(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            raise ConfigError(
                f"{word!r} is not an option; type settings as --optim.lr 3e-4, and a config file as"
                " --config configs/<name>.yaml."
            )
        if name in FLAGS:
            flags.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{word} has no value; give one, such as {word} <value>.")
            value = words.pop(0)
        if name == "--config":
            files.append(Path(value))
        else:
            options.append((name.removeprefix("--"), value))
    return CommandLine(files=tuple(files), options=tuple(options), flags=tuple(flags))


@cache
def _fields(kind: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Map the dotted names of all settings to their types; those of the recipe are left out."""
    names: dict[str, Any] = {}
    for f in dataclasses.fields(kind):
        if prefix or f.name != "recipe":
            names[prefix + f.name] = f.type
            if dataclasses.is_dataclass(f.type):
                names |= _fields(f.type, f"{prefix}{f.name}.")
    return names


def _check_name(name: str, label: str = "--{}") -> None:
    """Refuse a setting that does not exist, or no longer."""
    if name in REMOVED:
        raise ConfigError(f"there is no setting {label.format(name)} any more: {REMOVED[name]}.")
    names = _fields()
    parents = [name.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    is_entry = any(str(names.get(parent, "")).startswith("dict") for parent in parents)
    if name.removesuffix("+") not in names and not is_entry:
        short = {full.rpartition(".")[2]: full for full in names}
        similar = label.format(short[name]) if name in short else ""
        hint = f"; did you mean {similar}?" if similar else ""
        hint = hint or did_you_mean(label.format(name), map(label.format, names))
        hint = hint or f"; python -m {__package__} train --help lists all settings."
        raise ConfigError(f"there is no setting {label.format(name)}{hint}")


def _check_names_in(settings: dict[str, Any], file: Path, prefix: str = "") -> None:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in ("recipe", "config"):
            continue
        try:
            _check_name(name, "{}")
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        if isinstance(value, dict) and dataclasses.is_dataclass(_fields().get(name)):
            _check_names_in(value, file, f"{name}.")


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file, and check the names of its settings."""
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path("configs")
        named = Path("configs", f"{file.name.removesuffix('.yaml')}.yaml")
        hint = did_you_mean(str(file), map(str, sorted(folder.glob("*.yaml"))))
        hint = f"; did you mean {named}?" if named.is_file() else hint
        raise ConfigError(f"there is no config file {file}{hint or '; configs/ has some.'}")
    settings = read_yaml(file)
    _check_names_in(settings, file)
    return settings


def one_duration(sources: list[dict[str, Any]]) -> list[str]:
    """Return the option that unsets steps or epochs where a later source sets the other one."""
    unset: list[str] = []
    for settings in sources:
        given = [name for name in DURATIONS if settings.get(name) not in (None, "null")]
        if len(given) == 1:
            (other,) = set(DURATIONS) - set(given)
            unset = [f"--{other}=null"]
        elif given:
            unset = []
    return unset


# ---- the recipe ----------------------------------------------------------------------------------
def class_path_of(sources: list[dict[str, Any]], typed: dict[str, str]) -> str:
    """Return the recipe's class path that files and options give."""
    class_path = ""
    for recipe in [*(settings.get("recipe") for settings in sources), _load(typed.get("recipe"))]:
        given = recipe.get("class_path") if isinstance(recipe, dict) else recipe
        class_path = given if isinstance(given, str) else class_path
    return typed.get("recipe.class_path", class_path)


def import_recipe(class_path: str) -> Any:
    """Import the recipe's class, here, since jsonargparse would hide what its module raises.

    Raises:
        ConfigError: there is no such class, or an import fails.
    """
    if not class_path:
        raise ConfigError(
            "no recipe is given: give a config file, --config configs/<name>.yaml, with recipe:"
            " class_path: ..."
        )
    module, _, name = class_path.rpartition(".")
    try:
        there = importlib.import_module(module or class_path)
    except Exception as error:
        is_import = isinstance(error, ImportError)
        if is_import and f"{module or class_path}.".startswith(f"{error.name}."):
            own = sorted((Path(__file__).parent / "recipes").glob("[!_]*.py"))
            names = [f"{__package__}.recipes.{path.stem}" for path in own]
            hint = did_you_mean(module, names)
            hint = hint or "; the class path of a recipe is <module>.<class>."
            raise ConfigError(
                f"recipe {class_path}: there is no module {module or class_path}{hint}"
            ) from None
        at = own_frame(frames_of(error))
        place = f" ({short_path(at['file'])}, line {at['line']})" if at else ""
        what = str(error) if is_import else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"recipe {class_path} cannot be imported: {what}{place}; install what is missing, or"
            " fix that line."
        ) from error
    if not hasattr(there, name):
        classes = [one for one, kind in vars(there).items() if dataclasses.is_dataclass(kind)]
        hint = did_you_mean(name, classes) or f"; it has {', '.join(classes) or 'none'}."
        raise ConfigError(f"recipe {class_path}: {module} has no class {name}{hint}")
    return getattr(there, name)


def _load(text: str | None) -> Any:
    """Read YAML as jsonargparse does: 3e-3 is a number."""
    from jsonargparse import get_loader

    check_yaml(text or "")
    return get_loader("yaml")(text) if text else None


# ---- the name of a run ---------------------------------------------------------------------------
def text_of(value: Any) -> str:
    """Return a value as it stands in a run's name: 3e-3 and 0.003 are one, 64 and 64.0 too."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(text_of, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def name_of_run(typed: CommandLine, in_files: Config | None, config: Config) -> str:
    """Return the name of a run for which no run_name is given.

    Args:
        typed: the command line.
        in_files: the settings in the files alone; None if they are incomplete.
        config: all settings.
    """
    before = _curve(in_files) if in_files else {}
    settings = _curve(config)
    every = [name.rpartition(".")[2] for name in settings]  # also those not typed
    # recipe.init_args.width is recipe.width
    names = [name.replace("recipe.init_args", "recipe", 1) for name in typed.last]
    shown = {}
    for name, value in settings.items():
        is_typed = any(
            name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
            for other in names
        )
        if is_typed and before.get(name) != value:
            short = name.rpartition(".")[2]
            shown[short if every.count(short) == 1 else name] = value
    parts = ["+".join(file.stem for file in typed.files) or "run"]
    whole = "-".join(parts + [f"{key}={shown[key]}" for key in sorted(shown)])
    name = re.sub(r"[^\w.,+=-]", "_", whole)
    if len(name) > NAME_LENGTH:
        digits = hashlib.sha256(whole.encode()).hexdigest()[:8]
        name = f"{name[: NAME_LENGTH - 9]}-{digits}"
    return "run" if name in {"", ".", ".."} else name


def _curve(config: Config) -> dict[str, str]:
    """Return the settings that change the training curve, as they stand in a run's name."""
    settings = flat(fixed_settings(config))
    settings["recipe.class_path"] = f"{type(config.recipe).__module__}.{settings.pop('recipe')}"
    return {name: text_of(value) for name, value in settings.items()}


# ---- all settings --------------------------------------------------------------------------------
def _parser(
    recipe: Any = None, *, description: str = "", prog: str | None = None, with_help: bool = False
):
    """Return jsonargparse's parser.

    Args:
        recipe: the class whose fields --help lists; by default, what a config names is imported.
        description: for --help.
        prog: the command's name in --help.
        with_help: read the fields' docstrings, which takes longer than all parsing.
    """
    import yaml
    from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=with_help)
    set_loader("checked_yaml", _load, (yaml.YAMLError,))
    parser = ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        parser_mode="checked_yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file; configs/ holds examples.")
    if recipe:
        parser.add_class_arguments(recipe, "recipe")
    parser.add_class_arguments(Config, skip={"recipe"} if recipe else None)
    for action in parser._actions:
        # the class_path in optim names the optimizer, not a subclass of OptimConfig
        if action.dest == "optim":
            setattr(action, "basetype", None)  # noqa: B010 - an attribute of jsonargparse
    return parser


def _config(parser: Any, parse_them: Callable[[], Any]) -> Config:
    """Parse and return the settings; an error becomes one line."""
    from argparse import ArgumentError

    try:
        values = vars(parser.instantiate(parse_them()))
        values.pop("config")
        return Config(**values)
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())[:1000]  # it may quote a whole file
        message = _plain_words(re.sub(r'^Parser key "([\w.]+)": ', r"\1: ", message))
        if "does not implement protocol" in message:
            class_path = message.split("Import path ")[-1].split(" ")[0]
            found = "; ".join(problems_of(class_path)) or message
            message = f"recipe {class_path}: {found} (recipe.py describes all methods)."
        raise ConfigError(message) from error


WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text in quotes",
}
WORDS |= {"NoneType": "null"}


def _plain_words(message: str) -> str:
    """Return jsonargparse's message about a value without the names of Python's types."""
    found = re.search(r"(?:Got|Given) value: (.*)$", message)
    name = re.search(r'^(?:"?recipe"?: .*Parser key "(\w+)"|([\w.]+)):', message)
    kinds = dict.fromkeys(re.findall(r"<class '(\w+)'>", message.partition("Errors:")[0]))
    literals = "".join(re.findall(r"Literal\[([^\]]*)\]", message))
    choices = list(dict.fromkeys(re.findall(r"'(\w+)'", literals)))
    # of a file: on the command line any value is a text
    is_number = bool(found) and re.fullmatch(r"[-+\d.e]+", found[1]) is not None
    wanted = [WORDS[kind] for kind in kinds if kind in WORDS and (kind != "str" or is_number)]
    wanted += [f"one of {', '.join(choices)}"] if len(choices) > 1 else choices
    if not found or not name or not wanted or len(wanted) < len(kinds) + bool(choices) - 1:
        return message
    key = f"recipe.{name[1]}" if name[1] else name[2]
    hint = did_you_mean(found[1], choices)
    return f"{key} is {found[1]!r}, but must be {' or '.join(wanted)}{hint or '.'}"


def parse(
    arguments: list[str] | dict[str, Any], description: str = "", prog: str | None = None
) -> Config:
    """Parse `--config file.yaml --dotted.key value ...`; the last argument wins.

    Args:
        arguments: command-line arguments, or the settings as plain data.
        description: for --help.
        prog: the command's name in --help.

    Raises:
        ConfigError: a setting is unknown, missing or has a wrong value.
    """
    if isinstance(arguments, dict):
        for name in REMOVED.keys() & flat(arguments).keys():
            _check_name(name, "{}")
        parser = _parser(description=description, prog=prog)
        return _config(parser, lambda: parser.parse_object(arguments))
    if {"-h", "--help"} & {*arguments}:
        show_help(arguments, description, prog)
    typed = split(arguments)
    for name in typed.last:
        if name.partition(".")[0] != "recipe":
            _check_name(name)
    in_files = [read_config(file) for file in typed.files]
    for source in (*in_files, typed.last):
        if refusal := secrets_problem(source):  # it would be in the name of the run
            raise ConfigError(refusal)
    recipe = import_recipe(class_path_of(in_files, typed.last))
    words = [*typed.words, *one_duration([*in_files, typed.last]), *typed.flags]
    parser = _parser(description=description, prog=prog, with_help=bool(typed.flags))
    try:
        config = _config(parser, lambda: parser.parse_args(words))
    except ConfigError as error:
        raise ConfigError(f"{error}{_similar_field(str(error), recipe)}") from error
    if config.run_name != "run":
        return config
    words = [f"--config={file}" for file in typed.files] + one_duration(in_files)
    base = None
    with suppress(ConfigError):  # incomplete, or wrong where something else is typed
        base = _config(parser, lambda: parser.parse_args(words))
    return dataclasses.replace(config, run_name=name_of_run(typed, base, config))


def _similar_field(message: str, recipe: Any) -> str:
    """Return a hint for an unknown field of the recipe."""
    found = re.search(r"[Oo]ption '([\w.]+)'", message)
    if not found or not dataclasses.is_dataclass(recipe):
        return ""
    return did_you_mean(found[1], [f.name for f in dataclasses.fields(recipe)])


def show_help(arguments: list[str], description: str, prog: str | None) -> None:
    """Print all settings, and with a config file those of its recipe; exit."""
    kind: Any = None
    typed = split(word for word in arguments if word not in ("-h", "--help"))
    if class_path := class_path_of([*map(read_config, typed.files)], typed.last):
        kind = import_recipe(class_path)
    else:
        description += "\nWith a config, the fields of its recipe are listed too.\n"
    print(description)  # as it is: the parser would join its lines
    _parser(kind, prog=prog, with_help=True).print_help()
    raise SystemExit(0)


def parse_command_line(description: str) -> Config:
    """Parse the command line of the train module; an error ends the process with exit code 2.

    Call it first: from here on the process ends when the launcher that started it ends, and Python
    collects no garbage until run_on_all_ranks (see no_garbage_collection).
    """
    LAUNCHER.watch()
    gc.disable()
    try:
        return as_restarted(parse(sys.argv[1:], description))
    except ConfigError as error:
        exit_with_error(error)


def as_restarted(config: Config) -> Config:
    """Return the settings of a process that may have been restarted: --resume never held once."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # in place; requeued
    restarted = any(os.environ.get(name, "0") not in ("", "0") for name in counts)
    # the run that was moved aside has been replaced: continue the new one
    is_replaced = restarted and config.resume == "never"
    return dataclasses.replace(config, resume="auto") if is_replaced else config
