"""Read the config.yaml beside untrusted weights without importing classes that are not trusted.

Weights are data, but the config.yaml beside them names classes, and importing a class runs code. So
commands.py reads only the recipe and a few numbers from the file. A class is imported
only if --trust names it or if it belongs to this project:

- a class that is defined in the top-level package of the loop, as the recipe, or as the value of a
  field whose type is a base class of it;
- a class that a YAML file in this project's `configs/` names. The project is the folder with the
  package's `src`, or with pyproject.toml beside the package; or the current folder, if the package
  is in it.

Files in the folder of the weights do not belong to this project and are never imported. Every class
is checked before its import. A string for a field that takes settings is refused, since
jsonargparse would read the file of that name. train.py imports all that its user's config names.
"""

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import yaml
from jsonargparse import get_loader

from ..command_line import parse
from ..config import Config, ConfigError
from ..files import check_yaml, read_yaml
from ..recipe import problems
from .search_path import is_inside, run_folder

PACKAGE = __name__.partition(".")[0]
NUMBERS = {  # the settings that are read besides the recipe: numbers, booleans, null or auto
    "": ("seed", "tf32", "channels_last", "deterministic"),
    "batches": ("global_batch_size", "micro_batch_size", "workers", "seed_samples"),
    "evaluation": ("batch_size",),
}
PLAIN = (str, int, float, complex, bytes, NoneType, PurePath, Enum)


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
    return parse(settings)


class _Check:
    """The check of a config.yaml's recipe, before any class that it names is imported."""

    def __init__(self, path: Path, weights: str, trusted: Iterable[str]) -> None:
        self.path = path
        self.weights = weights
        self.named = {*trusted, *_named_in_configs(weights)}

    def recipe(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe's class and arguments."""
        kind = self._class_of(settings.get("class_path"), is_base=True)
        found = problems(kind) + ([] if is_dataclass(kind) else ["it is not a dataclass"])
        if found:
            raise ConfigError(f"{self.path}: {settings['class_path']} is not a recipe: {found[0]}.")
        self._arguments(settings.get("init_args"), kind)
        return {name: settings[name] for name in ("class_path", "init_args") if name in settings}

    def _class_of(self, name: Any, is_base: bool) -> type:
        """Import and return a trusted class.

        Args:
            name: its path.
            is_base: whether a class of this project is enough here without being named.
        """
        if not (isinstance(name, str) and _is_dotted(name)):
            raise ConfigError(
                f"{self.path} names {name!r}, which is not the path of a class (module.Class)."
            )
        self._refuse_unless_trusted(name, is_base)
        try:
            kind = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.path} names {name}, which cannot be imported: {error}."
            ) from error
        if not isinstance(kind, type):
            raise ConfigError(f"{self.path} names {name}, which is not a class.")
        return kind

    def _refuse_unless_trusted(self, name: str, own_is_enough: bool) -> None:
        if any(is_inside(str(Path(entry, *name.split("."))), self.weights) for entry in sys.path):
            raise ConfigError(
                f"{self.path} names {name}, which is in {self.weights}: code beside weights is"
                " never imported. If you trust the code, copy it into your project."
            )
        if name not in self.named and not (own_is_enough and _own_class(name)):
            raise ConfigError(
                f"{self.path} names {name}, which may run any code: it is not a class of the"
                f" package {PACKAGE} for this field, and no file in configs/ names it. If you trust"
                f" it, add --trust {name}."
            )

    def _arguments(self, arguments: Any, kind: type) -> None:
        """Check the arguments of a class."""
        if not isinstance(arguments, (dict, NoneType)):
            raise ConfigError(
                f"{self.path}: the init_args of {kind.__qualname__} are not a group of settings."
            )
        hints = _hints(kind)
        for name, value in (arguments or {}).items():
            self._value(value, hints.get(name, object))

    def _value(self, value: Any, hint: Any) -> None:
        """Check a value and its parts for a field of this type."""
        kinds = list(_kinds(hint))
        if isinstance(value, str):
            self._string(value, hint, kinds)
        elif isinstance(value, dict):
            self._mapping(value, kinds)
        elif isinstance(value, (list, tuple, set)):
            hints = [part for kind in kinds for part in _parts(kind)]
            for part in value:
                self._value(part, Union[tuple(hints)] if hints else Any)  # noqa: UP007

    def _string(self, value: str, hint: Any, kinds: list[Any]) -> None:
        takes_strings = any(_is_plain(kind) for kind in kinds if kind is not NoneType)
        only_plain = takes_strings and all(_is_plain(k) or k is NoneType for k in kinds)
        is_import = _may_run_code(value) or (_is_dotted(value) and not takes_strings)
        if is_import and not only_plain:
            self._refuse_unless_trusted(value, not any(_is_function(kind) for kind in kinds))
        elif not takes_strings:  # jsonargparse would read the file, or find the class, of this name
            raise ConfigError(
                f"{self.path} has {value[:100]!r} in place of a group of settings or a class."
            )
        inner = None
        try:  # jsonargparse reads strings as YAML, by rules that differ from PyYAML's
            check_yaml(value)
            inner = get_loader("yaml")(value)
        except yaml.YAMLError:
            pass
        except ValueError as error:
            raise ConfigError(f"{self.path} has {value[:100]!r}: {error}.") from error
        if isinstance(inner, (dict, list, set)):
            self._value(inner, hint)

    def _mapping(self, value: dict[Any, Any], kinds: list[Any]) -> None:
        for key in value:
            if str(key) != "class_path" and str(key).rstrip("+").endswith(".class_path"):
                raise ConfigError(
                    f"{self.path} has the dotted setting {key}; write it as a group of settings."
                )
        if "class_path" in value:
            name = value["class_path"]
            own = _own_class(name) if isinstance(name, str) else None
            is_base = own is not None and any(kind in own.__mro__[:-1] for kind in kinds)
            self._arguments(value.get("init_args"), self._class_of(name, is_base))
            value = {key: value[key] for key in value.keys() - {"class_path", "init_args"}}
        for key, part in value.items():
            hints = [_hint_of(key, kind) for kind in kinds if not _is_plain(kind)]
            self._value(part, Union[tuple(hints)] if hints else Any)  # noqa: UP007


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield the types that a field takes: each member of a union."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _kinds(part)
    elif get_origin(hint) is Annotated:
        yield from _kinds(get_args(hint)[0])
    else:
        yield hint


def _is_plain(kind: Any) -> bool:
    """Return whether a field of this type reads a string as a plain value, not as settings."""
    is_plain_class = isinstance(kind, type) and issubclass(kind, PLAIN)
    return kind is Any or get_origin(kind) is Literal or is_plain_class


def _is_function(kind: Any) -> bool:
    return Callable in (kind, get_origin(kind))


def _hint_of(key: Any, kind: Any) -> Any:
    """Return the type of one value of a group: a dictionary or a class with typed fields."""
    if isinstance(origin := get_origin(kind) or kind, type) and issubclass(origin, Mapping):
        if is_typeddict(kind):
            return _hints(kind).get(key, object)
        return get_args(kind)[-1] if get_args(kind) else Any
    return _hints(kind).get(key, object) if isinstance(kind, type) else object


def _parts(kind: Any) -> list[Any]:
    """Return the types of the items of a list, tuple or set."""
    if _is_plain(kind) or _is_function(kind):
        return []
    return [part for part in get_args(kind) if part is not Ellipsis]


def _hints(kind: type) -> dict[str, Any]:
    """Return the types of the arguments of a class."""
    has_fields = is_dataclass(kind) or is_typeddict(kind)
    try:
        return get_type_hints(kind if has_fields else kind.__init__, include_extras=True)
    except Exception as error:  # an annotation may be any expression
        raise ConfigError(
            f"the types of {kind.__module__}.{kind.__qualname__} cannot be read: {error}."
        ) from error


def _is_dotted(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _may_run_code(name: str) -> bool:
    """Return whether a string may name a module or a part of one, which jsonargparse might import.

    A file name such as data.csv does not, unless a module `data` exists.
    """
    if not _is_dotted(name):
        return False
    parts = name.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])  # imports nothing, since it is a top-level name
    except (ImportError, ValueError):
        return True
    for part in parts[1:]:
        if spec is None or spec.origin is not None:  # not found, or not a namespace package
            break
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec is not None and spec.origin is not None


def _own_class(name: str) -> type | None:
    """Return a class that the package defines, but not one that its modules only import."""
    if not (_is_dotted(name) and name.startswith(f"{PACKAGE}.")):
        return None
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None
    is_own = isinstance(found, type) and found.__module__.partition(".")[0] == PACKAGE
    return found if is_own else None


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
