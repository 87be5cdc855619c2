"""Read `--config file.yaml --dotted.key value ...`, and name the run after it.

`check` checks everything but the fields of the recipe, without importing it, and so without torch;
`parse` then imports the recipe and checks its fields too. What is typed wins over the file.

A run without a run_name is named <config stem> and -<key>=<value> for each setting that was typed
and changes the training curve, so that a sweep has a folder for each value, while more steps or
another micro-batch continue the same run.
"""

import ast
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, check_yaml, fixed_settings, read_yaml
from .failures import exit_with_error
from .process import LAUNCHER
from .recipe import problems_of

NAME_LENGTH = (
    100  # characters of a run's name; file systems allow 255 bytes, less for temporary names
)
DURATIONS = ("steps", "epochs")
FLAGS = ("-h", "--help", "--print_config", "--print_shtab")  # options without a value


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """A recipe that has not been imported."""

    class_path: str = ""
    init_args: dict[str, Any] = field(default_factory=dict)


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


def split(arguments: Iterable[str]) -> tuple[list[Path], dict[str, str]]:
    """Return the config files, and the other options by name; of a repeated one the last value."""
    files: list[Path] = []
    typed: dict[str, str] = {}
    words = normalized(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise ConfigError(
                f"{word!r} is not an option; type settings as --optim.lr 3e-4, and a config file as"
                " --config configs/<name>.yaml."
            )
        name, equals, value = word.partition("=")
        if name.partition("=")[0] in FLAGS:
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{word} has no value; give one, such as {word} <value>.")
            value = words.pop(0)
        if name == "--config":
            files.append(Path(value))
        else:
            typed[name.removeprefix("--")] = value
    return files, typed


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
    """Refuse a setting that does not exist."""
    names = _fields()
    parents = [name.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    is_entry = any(str(names.get(parent, "")).startswith("dict") for parent in parents)
    if name.removesuffix("+") not in names and not is_entry:
        hint = did_you_mean(label.format(name), map(label.format, names))
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
        hint = did_you_mean(str(file), map(str, sorted(folder.glob("*.yaml"))))
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


# ---- the recipe, not imported --------------------------------------------------------------------
def recipe_settings(sources: list[dict[str, Any]], typed: dict[str, str]) -> RecipeSettings:
    """Return the recipe's class path and the values that files and options give its fields."""
    class_path, init_args = "", {}
    for settings in sources:
        given = settings.get("recipe") or {}
        given = {"class_path": given} if isinstance(given, str) else given
        if not isinstance(given, dict):
            raise ConfigError(f"recipe is {given!r}; give class_path and init_args.")
        class_path = str(given.get("class_path", class_path))
        fields = given.get("init_args") or {}
        init_args |= fields if isinstance(fields, dict) else {}
    for name, text in typed.items():
        if name in ("recipe", "recipe.class_path"):
            class_path = text
        elif name.startswith("recipe."):
            key = name.removeprefix("recipe.").removeprefix("init_args.")
            if name == "recipe.init_args":
                init_args |= _value(text) if isinstance(_value(text), dict) else {}
            else:
                init_args[key] = _value(text)
    return RecipeSettings(class_path=class_path, init_args=init_args)


def _value(text: str) -> Any:
    """Read a value as the YAML files are read: 3e-3 is a number."""
    import yaml
    from jsonargparse import get_loader

    try:
        check_yaml(text)
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text


def _source_of(module: str) -> Path | None:
    """Return the file of a module; unlike importlib.util.find_spec, import no parent package.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    first, *rest = module.split(".")
    try:
        spec = find_spec(first)
    except ValueError:  # __main__
        return None
    name = first
    for part in rest:
        locations = spec.submodule_search_locations if spec else None
        if name in sys.modules:  # a package may extend its own path
            locations = getattr(sys.modules[name], "__path__", locations)
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, [*locations]) if locations else None
    if spec is None:
        raise ModuleNotFoundError(name)
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _tree_of(class_path: str) -> ast.Module | None:
    try:
        path = _source_of(class_path.rpartition(".")[0])
        return ast.parse(path.read_text(encoding="utf-8")) if path else None
    except (ImportError, OSError, ValueError, SyntaxError):
        return None  # importing it says what is wrong


def check_recipe_exists(class_path: str) -> None:
    """Refuse a class path whose module or class does not exist, without importing it."""
    if not class_path:
        raise ConfigError(
            "no recipe is given: give a config file, --config configs/<name>.yaml, with recipe:"
            " class_path: ..."
        )
    module, _, name = class_path.rpartition(".")
    try:
        _source_of(module)
    except (ImportError, ValueError):
        own = sorted((Path(__file__).parent / "recipes").glob("[!_]*.py"))
        names = [f"{__package__}.recipes.{path.stem}" for path in own]
        hint = did_you_mean(module, names) or "; the class path of a recipe is <module>.<class>."
        raise ConfigError(
            f"recipe {class_path}: there is no module {module or class_path}{hint}"
        ) from None
    if tree := _tree_of(class_path):
        bound = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if name not in bound | classes | assigned and "*" not in bound:
            hint = (
                did_you_mean(name, classes) or f"; it has {', '.join(sorted(classes)) or 'none'}."
            )
            raise ConfigError(f"recipe {class_path}: {module} has no class {name}{hint}")


def literal_defaults(class_path: str) -> dict[str, Any]:
    """Return the defaults of a recipe's fields that are literals, from its source."""
    return _fields_of_recipe(class_path)[0]


def _fields_of_recipe(class_path: str) -> tuple[dict[str, Any], set[str]]:
    """Read the fields of a recipe from its source: literal defaults, and those that may change."""
    defaults: dict[str, Any] = {}
    may_change: set[str] = set()
    tree = _tree_of(class_path)
    constants: dict[str, Any] = {}

    def literal(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return constants[node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return literal(node.left) | literal(node.right)
        return ast.literal_eval(node)

    for node in tree.body if tree else []:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.expr):
            constants |= _evaluated(targets[0].id, value, literal)
        if not isinstance(node, ast.ClassDef) or node.name != class_path.rpartition(".")[2]:
            continue
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            name, value = line.target.id, line.value
            if isinstance(value, ast.Call):  # field(default=..., metadata=...)
                given = {word.arg: word.value for word in value.keywords if word.arg}
                metadata = _evaluated("metadata", given.get("metadata"), literal).get("metadata")
                if isinstance(metadata, dict) and not metadata.get("changes_curve", True):
                    may_change.add(name)
                value = given.get("default")
            defaults |= _evaluated(name, value, literal)
    return defaults, may_change


def _evaluated(name: str, node: ast.expr | None, literal: Any) -> dict[str, Any]:
    try:
        return {name: literal(node)} if node is not None else {}
    except (ValueError, KeyError, TypeError):
        return {}


# ---- the name of a run ---------------------------------------------------------------------------
def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def text_of(value: Any) -> str:
    """Return a value as it stands in a run's name: 3e-3 and 0.003 are one, 64 and 64.0 too."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(text_of, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def name_of_run(files: list[Path], in_files: Config | None, config: Config) -> str:
    """Return the name of a run for which no run_name is given.

    Args:
        files: the config files.
        in_files: the settings in the files alone; None if they are incomplete.
        config: all settings, with RecipeSettings as the recipe.
    """
    recipe = config.recipe
    assert isinstance(recipe, RecipeSettings)
    defaults, may_change = _fields_of_recipe(recipe.class_path)
    before = {f"recipe.{name}": text_of(value) for name, value in _flat(defaults).items()}
    if in_files:
        before |= {name: text_of(value) for name, value in _curve(in_files).items()}
    changed = {
        name: text
        for name, value in _curve(config).items()
        if name.removeprefix("recipe.").partition(".")[0] not in may_change
        and before.get(name) != (text := text_of(value))
    }
    parts = ["+".join(file.stem for file in files) or "run"]
    last = [name.rpartition(".")[2] for name in changed]
    shown = {
        key if last.count(key := name.rpartition(".")[2]) == 1 else name: text
        for name, text in changed.items()
    }
    parts += [f"{key}={shown[key]}" for key in sorted(shown)]
    whole = "-".join(parts)
    name = re.sub(r"[^\w.,+=-]", "_", whole)
    if len(name) > NAME_LENGTH:
        digits = hashlib.sha256(whole.encode()).hexdigest()[:8]
        name = f"{name[: NAME_LENGTH - 9]}-{digits}"
    return "run" if name in {"", ".", ".."} else name


def _curve(config: Config) -> dict[str, Any]:
    """Return the settings that change the training curve; a recipe's fields as recipe.<field>."""
    settings = fixed_settings(config)
    settings["recipe"] = settings.pop("recipe.class_path")
    init_args = settings.pop("recipe.init_args")
    return _flat(settings) | _flat(init_args, "recipe")


# ---- all settings --------------------------------------------------------------------------------
def _parser(recipe: Any = None, *, description: str = "", prog: str | None = None):
    """Return jsonargparse's parser.

    Args:
        recipe: None for the type of the contract, which imports what a config names; a callable
            that takes anything; or a recipe's class, whose fields become options.
        description: for --help.
        prog: the command's name in --help.
    """
    import yaml
    from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings

    def load(text: str) -> Any:
        check_yaml(text)
        return get_loader("yaml")(text)

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("checked_yaml", load, (yaml.YAMLError,))
    parser = ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        parser_mode="checked_yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file; configs/ holds examples.")
    if isinstance(recipe, type):
        parser.add_class_arguments(recipe, "recipe")
    elif recipe:
        parser.add_argument("--recipe", type=recipe)
    parser.add_class_arguments(Config, skip={"recipe"} if recipe else None)
    for action in parser._actions:
        # the class_path in optim names the optimizer, not a subclass of OptimConfig
        if action.dest == "optim":
            setattr(action, "basetype", None)  # noqa: B010 - an attribute of jsonargparse
    return parser


def _anything(value: Any) -> Any:
    return value


def check(arguments: list[str]) -> Config:
    """Check all settings but the recipe's fields, and name the run; imports no torch.

    Returns:
        The config, with RecipeSettings in place of the recipe.

    Raises:
        ConfigError: a setting is unknown, missing or has a wrong value.
    """
    files, typed = split(arguments)
    for name in typed:
        if name.partition(".")[0] != "recipe":
            _check_name(name)
    in_files = [read_config(file) for file in files]
    recipe = recipe_settings(in_files, typed)
    check_recipe_exists(recipe.class_path)
    options = [f"--config={file}" for file in files]
    base = None
    if not any("run_name" in settings for settings in (*in_files, typed)):
        try:
            in_files_only = recipe_settings(in_files, {})
            base = _checked([*options, *one_duration(in_files)], in_files_only)
        except ConfigError:
            base = None  # incomplete, or wrong where something else is typed
    words = [f"--{name}={text}" for name, text in typed.items() if name.split(".")[0] != "recipe"]
    config = _checked([*options, *words, *one_duration([*in_files, typed])], recipe)
    if config.run_name == "run":
        return dataclasses.replace(config, run_name=name_of_run(files, base, config))
    return config


def _checked(words: list[str], recipe: RecipeSettings) -> Config:
    parser = _parser(_anything)
    values = _values(parser, lambda: parser.parse_args(words))
    values["recipe"] = recipe
    return Config(**values)


def _values(parser: Any, parse_them: Any) -> dict[str, Any]:
    """Parse, and return the settings as objects by name; an error becomes one line."""
    from argparse import ArgumentError

    try:
        values = vars(parser.instantiate(parse_them()))
        values.pop("config")
        return values
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split())[:1000]  # it may quote a whole file
        message = re.sub(r'^Parser key "([\w.]+)": ', r"\1: ", message)
        if "does not implement protocol" in message:
            class_path = message.split("Import path ")[-1].split(" ")[0]
            found = "; ".join(problems_of(class_path)) or message
            message = f"recipe {class_path}: {found} (recipe.py describes all methods)."
        raise ConfigError(message) from error


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
        parser = _parser(description=description, prog=prog)
        return Config(**_values(parser, lambda: parser.parse_object(arguments)))
    if {"-h", "--help"} & {*arguments}:
        show_help(arguments, description, prog)
    checked = check(arguments)
    files, typed = split(arguments)
    unset = one_duration([*map(read_yaml, files), typed])
    recipe = checked.recipe
    assert isinstance(recipe, RecipeSettings)
    parser = _parser(description=description, prog=prog)
    try:
        values = _values(parser, lambda: parser.parse_args([*normalized(arguments), *unset]))
    except ConfigError as error:
        raise ConfigError(f"{error}{_similar_field(str(error), recipe.class_path)}") from error
    values["run_name"] = checked.run_name
    return Config(**values)


def _similar_field(message: str, class_path: str) -> str:
    """Return a hint for an unknown field of the recipe, which has been imported."""
    found = re.search(r"[Oo]ption '([\w.]+)'", message)
    if not found:
        return ""
    module, _, name = class_path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    names = [f.name for f in dataclasses.fields(kind)] if kind else []
    return did_you_mean(found[1], names)


def show_help(arguments: list[str], description: str, prog: str | None) -> None:
    """Print all settings, and with a config file those of its recipe; exit."""
    import importlib

    kind: Any = _anything
    files, typed = split([word for word in arguments if word not in ("-h", "--help")])
    if class_path := recipe_settings([*map(read_config, files)], typed).class_path:
        check_recipe_exists(class_path)
        module, _, name = class_path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
    else:
        description += "\n\nWith --config, the fields of its recipe are listed too."
    _parser(kind, description=description, prog=prog).print_help()
    raise SystemExit(0)


def parse_command_line(description: str) -> Config:
    """Parse the command line of the train module; an error ends the process with exit code 2.

    Call it first: from here on the process ends when the launcher that started it ends.
    """
    LAUNCHER.watch()
    try:
        config = parse(sys.argv[1:], description)
    except ConfigError as error:
        exit_with_error(error)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    # the run that was moved aside has been replaced: continue the new one
    if restarted and config.resume == "never":
        return dataclasses.replace(config, resume="auto")
    return config
