"""Read `--config file.yaml --dotted.key value ...`, and name the run after it.

jsonargparse imports the recipe and checks all names and values, those of the recipe's fields too.
What is typed wins over the file.

A run without a run_name is named <config stem> and -<key>=<value> for each setting that was typed
and changes the training curve, also where its value is the file's: each run of a sweep has a folder
of its own, while more steps or another micro-batch continue the same run.
"""

import dataclasses
import gc
import hashlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, ConfigError, fixed_settings
from .failures import exit_with_error, frames_of, own_frame
from .files import read_yaml
from .process import LAUNCHER, never_fail_to_print
from .recipe import problems
from .run_files import flat
from .safety.redaction import secrets_problem
from .words import short_path

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

NAME_LENGTH = 100  # characters of a run's name; file systems allow 255 bytes
DURATIONS = ("steps", "epochs")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a similar name; "" if there is none."""
    similar = get_close_matches(given, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


# ---- what was typed ------------------------------------------------------------------------------
def split(arguments: Iterable[str]) -> tuple[list[Path], list[tuple[str, str | None]]]:
    """Return the config files, and the names of options with their texts, which may be repeated.

    A name may have - for _: --overfit-batches. A word that is not an option is a config file.
    """
    files: list[Path] = []
    options: list[tuple[str, str | None]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("-"):
            files.append(Path(word))
            continue
        name = name.removeprefix("--").replace("-", "_")
        has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
        value = (text if equals else words.pop(0)) if has_value else None
        if value == "None" and not name.startswith("recipe."):
            value = "null"  # Python's word for it
        if name == "config" and value:
            files.append(Path(value))
        else:
            options.append((name, value))
    return files, options


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file."""
    if not file.is_file():
        known = [*file.parent.glob("*.yaml"), *Path("configs").glob("*.yaml")]
        hint = did_you_mean(str(file), map(str, known))
        raise ConfigError(f"there is no config file {file}{hint}")
    if not (settings := read_yaml(file)):
        raise ConfigError(f"{file} is empty; write a recipe and its settings into it.")
    return settings


def one_duration(sources: list[dict[str, Any]]) -> list[str]:
    """Return the option that unsets steps or epochs where a later source sets the other one."""
    unset: list[str] = []
    for settings in sources:
        given = [name for name in DURATIONS if settings.get(name) not in (None, "null")]
        if given:
            unset = [f"--{other}=null" for other in DURATIONS if other not in given]
    return unset


# ---- the name of a run ---------------------------------------------------------------------------
def text_of(value: Any) -> str:
    """Return a value as it stands in a run's name: 3e-3 and 0.003 are one, 64 and 64.0 too."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(text_of, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def name_of_run(files: list[Path], typed: dict[str, str | None], config: Config) -> str:
    """Return the name of a run for which no run_name is given.

    Args:
        files: the config files.
        typed: the options, with their texts.
        config: all settings.
    """
    settings = flat(fixed_settings(config))
    settings["recipe.class_path"] = f"{type(config.recipe).__module__}.{settings.pop('recipe')}"
    every = [name.rpartition(".")[2] for name in settings]  # also those not typed
    # recipe.init_args.width is recipe.width
    names = [f"{name.replace('recipe.init_args', 'recipe', 1)}." for name in each_typed(typed)]
    shown: dict[str, str] = {}
    for name, value in settings.items():
        if any(typed_name.startswith(f"{name}.") for typed_name in names):
            short = name.rpartition(".")[2]
            shown[short if every.count(short) == 1 else name] = text_of(value)
    stem = "+".join(file.stem for file in files) or "run"
    whole = "-".join([stem, *(f"{key}={shown[key]}" for key in sorted(shown))])
    name = re.sub(r"[^\w.,+=-]", "_", whole)
    if len(name) > NAME_LENGTH:
        digits = hashlib.sha256(whole.encode()).hexdigest()[:8]
        name = f"{name[: NAME_LENGTH - 9]}-{digits}"
    return "run" if name in {"", ".", ".."} else name


def each_typed(typed: dict[str, str | None]) -> list[str]:
    """Return the names of the options and, of a group such as --optim {"lr": 1}, what is in it.

    --recipe alone is its class path.
    """
    import yaml

    names = [*typed]
    for name, text in typed.items():
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(text or "")
            names += flat(value, f"{name}.") if isinstance(value, dict) else []
    return [*names, *["recipe.class_path"] * ("recipe" in names)]


# ---- all settings --------------------------------------------------------------------------------
def _parser(
    recipe: type | None = None, *, prog: str | None = None, with_help: bool = False
) -> "ArgumentParser":
    """Return jsonargparse's parser.

    Args:
        recipe: the class whose fields --help lists; by default, what a config names is imported.
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


def _config(parser: "ArgumentParser", parse_them: Callable[[], "Namespace"]) -> Config:
    """Return the settings that a function has the parser parse; an error becomes one line."""
    from jsonargparse import ArgumentError

    try:
        values = vars(parser.instantiate(parse_them()))
        values.pop("config")
        return Config(**values)
    except ConfigError:
        raise
    except ArgumentError as error:
        raise ConfigError(explained(error, parser)) from error
    except Exception as error:  # of the import of the recipe's module, or its __post_init__
        at = own_frame(frames_of(error))
        place = f" ({short_path(at.file)}, line {at.line})" if at else ""
        raise ConfigError(f"{type(error).__name__}: {error}{place}") from error


# ---- wrong values --------------------------------------------------------------------------------
def explained(error: Exception, parser: "ArgumentParser") -> str:
    """Return an error of jsonargparse in one line: what it says, without its classes and subtypes.

    For a name that does not exist it gives the most similar one, for a wrong value its type.
    """
    message = " ".join(str(error).split())
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    recipe = re.search(r"(?:class_path '|Import path )([\w.]+)", message)
    if unknown := re.search(r"(?:Group '([\w.]+)'.*)?(?:ption '|arguments: --)([^'=\s]+)", message):
        group, last = unknown.groups()
        name = f"{group or key}.{last}".strip(".")
        known = [*parser.get_defaults().keys()]
        if recipe and key == "recipe":
            fields = getattr(pkgutil.resolve_name(recipe[1]), "__dataclass_fields__", ())
            known = [f"recipe.{field}" for field in fields]
        by_last = {name.rpartition(".")[2]: name for name in known}
        similar = get_close_matches(name, [*known, *by_last], n=1)
        hint = f"did you mean {by_last.get(similar[0], similar[0])}?" if similar else ""
        return f"there is no setting {name}; {hint or '--help lists all settings.'}"
    if recipe and "does not implement protocol" in message:
        return f"recipe {recipe[1]}: {'; '.join(problems(pkgutil.resolve_name(recipe[1])))}."
    if "arguments are required: recipe" in message:
        return f"{message}; give a config file, --config configs/<name>.yaml."
    values = re.findall("(?:Got|Given) value: (.*)", str(error))
    kinds = re.findall(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\])", message)
    if values and kinds:
        names = [name or choices.replace("'", "") for name, choices in kinds]
        wanted = " or ".join(dict.fromkeys(names))
        return f"{key} is {values[-1]}, but must be {wanted.replace('NoneType', 'null')}."
    return re.sub(r'^Parser key "([\w.]+)": ', r"\1: ", message)


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
    if not isinstance(arguments, dict) and {"-h", "--help"} & {*arguments}:
        show_help(arguments, description, prog)
    parser = _parser()
    if isinstance(arguments, dict):
        return _config(parser, lambda: parser.parse_object(arguments))
    files, options = split(arguments)
    typed = dict(options)
    in_files = [read_config(file) for file in files]
    for source in (*in_files, typed):
        if refusal := secrets_problem(source):  # it would be in the name of the run
            raise ConfigError(refusal)
    words = [f"--config={file}" for file in files]
    words += [f"--{name}" + ("" if text is None else f"={text}") for name, text in options]
    words += one_duration([*in_files, typed])
    config = _config(parser, lambda: parser.parse_args(words))
    if config.run_name != "run":
        return config
    return dataclasses.replace(config, run_name=name_of_run(files, typed, config))


def show_help(arguments: list[str], description: str, prog: str | None) -> None:
    """Print all settings, and with a config file those of its recipe; exit."""
    kind = None
    with suppress(ConfigError):
        kind = type(parse([word for word in arguments if word not in ("-h", "--help")]).recipe)
    if not kind:
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
    never_fail_to_print()
    try:
        return parse(sys.argv[1:], description)
    except ConfigError as error:
        exit_with_error(error)
