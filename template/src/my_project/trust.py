"""Which classes a stranger's config.yaml may name; any other needs --trust.

Weights are data, but the config.yaml beside them names classes, and importing one runs code. So
predict.py and evaluate.py import only what is this project's own:

- what is defined in the package that the loop lies in (its top-level package);
- what a YAML file in this project's `configs/` names: in that of the current folder, and in that of
  the project which the package lies in (beside the package, or beside `src` around it).

What lies in the run folder, export or checkpoint that was given is not this project's, and never
imported. Nothing is imported before it is checked. train.py imports what its user's config names.
"""

import argparse
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path

import yaml

from .config import Config, ConfigError, parse
from .search_path import is_inside, run_folder

PACKAGE = __name__.partition(".")[0]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # jsonargparse's


def read_config(path: Path, trusted: Iterable[str] = ()) -> Config:
    """Read the config.yaml of a run, whoever made it.

    Args:
        path: of the file.
        trusted: class paths that may be imported besides this project's own.

    Raises:
        ConfigError: it names what may not be imported, or is no config.
    """
    weights = run_folder(str(path.parent))
    try:
        settings = _compose(path.read_text())  # decoded as jsonargparse does
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, yaml.MappingNode):
        raise ConfigError(f"{path} holds no settings by name.")
    names = {str(key.value) for key, _ in settings.value}
    if unknown := names - {f.name for f in fields(Config)}:  # `config` would read another file
        raise ConfigError(f"{path} has settings that no run has: {', '.join(sorted(unknown))}.")
    for key, value in settings.value:
        if key.value == "optim" and isinstance(value, yaml.MappingNode):  # training imports it
            value.value = [(k, v) for k, v in value.value if k.value != "class_path"]
    named = set(_named_in_configs(weights)) | {*trusted}
    for name, is_class in _strings(settings, set()):
        if is_class and not _is_dotted(name):
            raise ConfigError(f"{path} names {name!r}, which is no path of a class (module.Class).")
        if not (is_class or _may_run_code(name)):
            continue
        if any(is_inside(str(Path(entry, *name.split("."))), weights) for entry in sys.path):
            raise ConfigError(
                f"{path} names {name}, which lies in {weights}: code that comes with weights is"
                " never imported; copy what you have read and trust into your project."
            )
        if name not in named and not _is_of_package(name):
            raise ConfigError(
                f"{path} names {name}, which is neither defined in the package {PACKAGE} nor named"
                " by a file in configs/, so importing it may run anything; if you trust it, add"
                f" --trust {name}."
            )
    return parse(["--config", str(path)])


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option --trust."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="CLASS_PATH",
        help="import this class, which config.yaml names and which is not this project's own",
    )


def _compose(text: str) -> yaml.Node | None:
    """Parse YAML into its nodes, of which nothing is built."""
    with suppress(yaml.YAMLError):
        yaml.compose(text, yaml.SafeLoader)  # nested too deep, the one in C ends the process
    node: yaml.Node | None = yaml.compose(text, LOADER)
    return node


def _strings(node: yaml.Node | None, seen: set[int], is_class: bool = False) -> Iterator[tuple]:
    """List all strings, and whether each is a class_path; also those in strings that are YAML."""
    if isinstance(node, yaml.ScalarNode):
        yield node.value, is_class
        with suppress(yaml.YAMLError):
            inner = _compose(node.value)
            if inner and inner.value != node.value:
                yield from _strings(inner, seen)
    elif node and id(node) not in seen:  # an alias may lead back to what it is in
        seen.add(id(node))
        for part in node.value:
            key, value = part if isinstance(node, yaml.MappingNode) else (None, part)
            yield from _strings(key, seen)
            yield from _strings(value, seen, bool(key) and str(key.value).endswith("class_path"))


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _may_run_code(name: str) -> bool:
    """Return whether to import a string would run a module; jsonargparse does so for some fields.

    A file's name such as data.csv is none, unless a module data is there.
    """
    if not _is_dotted(name):
        return False
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])  # imports nothing, since it is no submodule
    except (ImportError, ValueError):
        return True
    for part in parts[1:]:
        if spec is None or spec.origin is not None:  # none there, or more than a plain folder
            break
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec is not None and spec.origin is not None


def _is_of_package(name: str) -> bool:
    """Return whether the package defines it; what its modules have imported is not its own."""
    if not name.startswith(f"{PACKAGE}."):
        return False
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return str(getattr(found, "__module__", "")).partition(".")[0] == PACKAGE


def _named_in_configs(weights: str) -> Iterator[str]:
    """List what the configs/ of this project name; not those of a stranger's folder."""
    source = Path(__file__).resolve().parents[(__package__ or "").count(".") + 1]
    projects = {Path.cwd(), source, *([source.parent] if source.name == "src" else [])}
    for folder in [project / "configs" for project in projects]:
        for file in folder.glob("*.yaml") if not is_inside(str(folder), weights) else ():
            with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
                yield from (name for name, _ in _strings(_compose(file.read_text()), set()))
