"""Read the config.yaml beside untrusted weights without importing classes that are not trusted.

Weights are data, but the config.yaml beside them names classes, and importing a class runs code. So
commands.py reads only the recipe and a few numbers from the file, and jsonargparse imports nothing
but:

- the recipe's class and other dataclasses, if this package defines them; what the recipe's module
  defines;
- what a YAML file in this project's `configs/` names. The project is the folder with the package's
  `src`, or with pyproject.toml beside the package; or the current folder, if the package is in it;
- what --trust names.

Files in the folder of the weights do not belong to this project and are never imported.
train.py imports all that its user's config names.
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

from ..command_line import parse
from ..config import Config, ConfigError
from ..files import read_yaml
from ..recipe import problems
from .search_path import is_inside, run_folder

PACKAGE = __name__.partition(".")[0]
NUMBERS = {  # the settings that are read besides the recipe: numbers, booleans, null or auto
    "": ("seed", "tf32", "channels_last", "deterministic"),
    "batches": ("global_batch_size", "micro_batch_size", "workers", "seed_samples"),
    "evaluation": ("batch_size",),
}


def read_config(path: Path, trusted: Iterable[str] = (), given: Path | None = None) -> Config:
    """Read the settings that prediction and evaluation need from an untrusted config.yaml.

    Args:
        path: of the file.
        trusted: class paths that may be imported besides this project's own classes.
        given: the folder on the command line; the default is the folder of the file.

    Raises:
        ConfigError: the file names a class that is not trusted, or is not a config.
    """
    saved = read_yaml(path)
    for name in ("recipe", "batches", "evaluation"):
        if not isinstance(saved.setdefault(name, {}), dict):
            raise ConfigError(f"{path}: {name} is not a group of settings.")
    settings: dict[str, Any] = {"steps": 1}
    for group, names in NUMBERS.items():
        source, target = (
            (saved[group], settings.setdefault(group, {})) if group else (saved, settings)
        )
        for name in names:
            is_auto = (name, value := source.get(name)) == ("seed_samples", "auto")
            if not (is_auto or isinstance(value, (int, float, NoneType))):
                raise ConfigError(f"{path}: {f'{group}.{name}'.lstrip('.')} is not a number.")
            if name in source:
                target[name] = value
    if (precision := saved.get("precision")) not in ("no", "bf16", "fp16", None):
        raise ConfigError(f"{path}: precision is {precision!r}, but must be no, bf16 or fp16.")
    settings["precision"] = precision
    check = _Check(path, run_folder(str(given or path.parent)), trusted)
    settings["recipe"] = check.recipe(saved["recipe"])
    paths = check.may_import(saved["recipe"])
    while True:
        try:
            with _importing_only(paths):
                return parse(settings)
        except ConfigError as error:
            name = _refused(error)
            if not name:
                raise
            if name in paths or not _is_own_dataclass(name):
                raise check.refusal(name) from error
            paths.add(name)


class _Check:
    """The check of a config.yaml's recipe, before anything that it names is imported."""

    def __init__(self, path: Path, weights: str, trusted: Iterable[str]) -> None:
        self.path = path
        self.weights = weights
        self.named = {*trusted, *_named_in_configs(weights)}

    def recipe(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe's class and arguments."""
        name = settings.get("class_path")
        if not (isinstance(name, str) and _is_dotted(name)):
            raise ConfigError(
                f"{self.path} names {name!r}, which is not the path of a class (module.Class)."
            )
        self._refuse_beside_weights(name)
        if name not in self.named and not _is_own_dataclass(name):
            raise self.refusal(name)
        try:
            kind = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.path} names {name}, which cannot be imported: {error}."
            ) from error
        found = problems(kind) + ([] if is_dataclass(kind) else ["it is not a dataclass"])
        if found:
            raise ConfigError(f"{self.path}: {name} is not a recipe: {found[0]}.")
        if not isinstance(settings.get("init_args"), (dict, NoneType)):
            raise ConfigError(f"{self.path}: the init_args of {name} are not a group of settings.")
        return {name: settings[name] for name in ("class_path", "init_args") if name in settings}

    def may_import(self, settings: dict[str, Any]) -> set[str]:
        """Return the recipe's module, and what is named: each path, and where it is defined."""
        paths = {settings["class_path"].rpartition(".")[0]}
        for name in self.named.intersection(filter(_is_dotted, _strings(settings))):
            self._refuse_beside_weights(name)
            with suppress(ImportError, AttributeError, ValueError):  # a file's name, or a mistake
                found = pkgutil.resolve_name(name)
                paths |= {name, f"{found.__module__}.{found.__qualname__}"}
        return paths

    def refusal(self, name: str) -> ConfigError:
        """Return the error for a path that is not trusted."""
        return ConfigError(
            f"{self.path} names {name}, which may run any code: this package's recipes do not"
            " define it, and no file in configs/ names it. If you trust it, add"
            f" --trust {name}."
        )

    def _refuse_beside_weights(self, name: str) -> None:
        if any(is_inside(str(Path(entry, *name.split("."))), self.weights) for entry in sys.path):
            raise ConfigError(
                f"{self.path} names {name}, which is in {self.weights}: code beside weights is"
                " never imported. If you trust the code, copy it into your project."
            )


@contextmanager
def _importing_only(paths: Iterable[str]) -> Iterator[None]:
    """Let no value that is parsed import anything but these paths and what is below them."""
    before = dict(_common.parsing_settings)  # jsonargparse cannot take a policy back
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=list(paths),
        validate_subclass_spec_in_any=True,
    )
    try:
        yield
    finally:
        _common.parsing_settings.update(before)


def _refused(error: BaseException | None) -> str | None:
    """Return the path that jsonargparse refused to import; its error for that is not public."""
    while error:
        if found := re.search(r"Importing '([\w.]+)' is not allowed", str(error)):
            return found[1]
        error = error.__cause__
    return None


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _is_own_dataclass(name: str) -> bool:
    """Return whether a path in the package names a dataclass."""
    try:
        found = pkgutil.resolve_name(name) if name.startswith(f"{PACKAGE}.") else None
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and is_dataclass(found)


def _projects() -> Iterator[Path]:
    """Yield the folders that may have this project's configs/."""
    file = Path(__file__).resolve()
    source = file.parents[(__package__ or "").count(".") + 1]
    if source.name == "src":
        yield source.parent
    elif (source / "pyproject.toml").is_file() and not source.name.endswith("-packages"):
        yield source
    if file.is_relative_to(Path.cwd().resolve()):
        yield Path.cwd()


def _named_in_configs(weights: str) -> Iterator[str]:
    """Yield the strings in the configs/ of this project, unless that is the folder of weights."""
    for folder in [project / "configs" for project in _projects()]:
        for file in folder.glob("*.yaml") if not is_inside(str(folder), weights) else ():
            with suppress(ConfigError):
                yield from _strings(read_yaml(file))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
