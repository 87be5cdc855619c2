"""Read the config.yaml beside untrusted weights without importing classes that are not trusted.

Weights are data, but the config.yaml beside them names classes, and importing a class runs code. So
only the recipe and a few plain settings are read from the file, and jsonargparse imports only:

- dataclasses that this package defines, such as the recipe's class, and all that the module of such
  a recipe defines;
- what a YAML file in this project's `configs/` names. The project is the folder that contains the
  package or its `src`, and also the current folder, if that contains the package;
- what --trust names.

Files in the folder of the weights do not belong to this project and are never imported.
train.py imports everything that the user's config names.
"""

import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from jsonargparse import _common, set_parsing_settings

from ..config import Config, ConfigError
from ..files import Json, read_yaml
from ..settings import parse
from .search_path import is_inside, run_folder

PACKAGE = __name__.partition(".")[0]
# The settings that are read besides the recipe; jsonargparse accepts only plain values for them.
SETTINGS = ("seed", "precision", "tf32", "channels_last", "deterministic")
GROUPS = {
    "batches": ("global_batch_size", "micro_batch_size", "workers", "seed_samples"),
    "evaluation": ("batch_size",),
    "recipe": ("class_path", "init_args"),
}


def read_config(path: Path, trusted: Iterable[str] = (), given: Path | None = None) -> Config:
    """Read the settings that prediction and evaluation need from an untrusted config.yaml.

    Args:
        path: the path of the file.
        trusted: class paths that may be imported besides this project's own classes.
        given: the folder of weights on the command line; by default the folder of the file.

    Raises:
        ConfigError: the file names a class that is not trusted, or is not a config.
    """
    saved = read_yaml(path)
    settings: dict[str, Any] = {"steps": 1} | _pick(saved, SETTINGS)
    settings |= {group: _pick(saved.get(group), names) for group, names in GROUPS.items()}
    recipe = settings["recipe"]
    name = recipe.get("class_path")
    is_class = isinstance(name, str) and _is_dotted(name)
    if not (is_class and isinstance(recipe.get("init_args"), (dict, NoneType))):
        raise ConfigError(
            f"{path}: recipe must have a class_path such as module.Class; its init_args, if given,"
            " must be a group of settings."
        )
    weights = run_folder(str(given or path.parent))
    trusted = {*trusted, *_named_in_configs(weights)}
    for dotted in {name, *trusted.intersection(_strings(recipe))}:
        if any(is_inside(str(file), weights) for file in _files_of(dotted)):
            raise ConfigError(
                f"{path} names {dotted}, which is in {weights}: code beside weights is never"
                " imported. If you trust the code, copy it into your project."
            )
    allowed, failed = dict[str, Any](), dict[str, str]()
    for dotted in filter(_is_dotted, _strings(recipe)):
        if dotted in trusted or dotted.startswith(f"{PACKAGE}."):
            try:
                resolved: Any = pkgutil.resolve_name(dotted)
                definition = f"{resolved.__module__}.{resolved.__qualname__}"
                is_own = definition.startswith(f"{PACKAGE}.") and is_dataclass(resolved)
                if dotted in trusted or is_own:
                    allowed |= {dotted: resolved, definition: resolved}
            except Exception as error:  # not a class, misspelled, or its module raises an error
                failed[dotted] = f" ({type(error).__name__}: {error})"
    if name in trusted and not is_dataclass(allowed.get(name)):
        problem = f"cannot be imported, or is not a dataclass{failed.get(name, '')}"
        raise ConfigError(f"{path} names {name}, which {problem}.")
    if name in allowed:
        allowed[name.rpartition(".")[0]] = None
    try:
        with _importing_only(allowed):
            return parse(settings)
    except ConfigError as error:
        if not (refused := _refused_path(error)):
            raise
        raise ConfigError(
            f"{path} names {refused}, which may run any code: this package's recipes do not define"
            f" it, and no file in configs/ names it. If you trust it, add --trust {refused}."
        ) from error


def _pick(saved: Json, names: Iterable[str]) -> dict[str, Any]:
    return {name: saved[name] for name in names if isinstance(saved, dict) and name in saved}


@contextmanager
def _importing_only(paths: Iterable[str]) -> Iterator[None]:
    """Let jsonargparse import only these paths and what is below them."""
    before = dict(_common.parsing_settings)  # jsonargparse cannot undo a policy
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=list(paths),
        validate_subclass_spec_in_any=True,
    )
    try:
        yield
    finally:
        _common.parsing_settings.update(before)


def _refused_path(error: BaseException | None) -> str | None:
    """Return the class path that jsonargparse refused to import; None for another error.

    It is read from the message, since the class of the error is private.
    """
    while error:
        if match := re.search(r"Importing '([\w.]+)' is not allowed", str(error)):
            return match[1]
        error = error.__cause__
    return None


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _files_of(dotted: str) -> Iterator[Path]:
    """Yield the files and folders from which Python may import a class path."""
    for folder in map(Path, sys.path):
        for part in dotted.split("."):
            yield from (path for path in folder.glob(f"{part}*") if path.name.split(".")[0] == part)
            folder /= part


def _named_in_configs(weights: str) -> Iterator[str]:
    """Yield the strings in this project's configs/, unless it is inside the folder of weights."""
    package = Path(__file__).resolve()
    source = package.parents[(__package__ or "").count(".") + 1]
    for project in (source.parent if source.name == "src" else source, Path.cwd()):
        folder = project / "configs"
        if package.is_relative_to(project.resolve()) and not is_inside(str(folder), weights):
            for file in folder.glob("*.yaml"):
                with suppress(ConfigError):
                    yield from _strings(read_yaml(file))


def _strings(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
