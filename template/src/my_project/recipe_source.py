"""What the source of a recipe says, without importing it, which would import torch."""

import ast
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .config import ConfigError


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for a similar name; "" if there is none."""
    similar = get_close_matches(given, list(known), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def source_of(module: str) -> Path | None:
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


def tree_of(class_path: str) -> ast.Module | None:
    """Return the syntax tree of the module of a class; None where it has no source."""
    try:
        path = source_of(class_path.rpartition(".")[0])
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
        source_of(module)
    except (ImportError, ValueError):
        own = sorted((Path(__file__).parent / "recipes").glob("[!_]*.py"))
        names = [f"{__package__}.recipes.{path.stem}" for path in own]
        hint = did_you_mean(module, names) or "; the class path of a recipe is <module>.<class>."
        raise ConfigError(
            f"recipe {class_path}: there is no module {module or class_path}{hint}"
        ) from None
    if tree := tree_of(class_path):
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


def fields_of(class_path: str) -> tuple[dict[str, Any], set[str]]:
    """Return the literal defaults of a recipe's fields, and the fields that may change.

    Those of the classes that it inherits from come first, as far as their source is found.
    """
    module, _, name = class_path.rpartition(".")
    tree = tree_of(class_path)
    constants: dict[str, Any] = {}
    imported: dict[str, str] = {}
    for node in tree.body if tree else []:
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, node.module] if node.module else above)
            imported |= {
                alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                constants |= _evaluated(target.id, node.value, constants)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            return _fields_in(node, module, constants, imported)
    return {}, set()


def _fields_in(
    node: ast.ClassDef, module: str, constants: dict[str, Any], imported: dict[str, str]
) -> tuple[dict[str, Any], set[str]]:
    defaults: dict[str, Any] = {}
    may_change: set[str] = set()
    for base in node.bases:
        if isinstance(base, ast.Name):
            inherited = fields_of(imported.get(base.id, f"{module}.{base.id}"))
            defaults |= inherited[0]
            may_change |= inherited[1]
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name, value = line.target.id, line.value
        if isinstance(value, ast.Call):  # field(default=..., metadata=...)
            given = {word.arg: word.value for word in value.keywords if word.arg}
            metadata = _evaluated("metadata", given.get("metadata"), constants).get("metadata")
            if isinstance(metadata, dict) and not metadata.get("changes_curve", True):
                may_change.add(name)
            factory = given.get("default_factory")
            value = given.get("default")
            if isinstance(factory, ast.Name) and factory.id in ("list", "dict", "tuple"):
                defaults[name] = {} if factory.id == "dict" else []
        defaults |= _evaluated(name, value, constants)
    return defaults, may_change


def _evaluated(name: str, node: ast.expr | None, constants: dict[str, Any]) -> dict[str, Any]:
    """Return {name: value} of an expression of literals and constants; {} of any other."""

    def literal(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return constants[node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return literal(node.left) | literal(node.right)
        return ast.literal_eval(node)

    try:
        return {name: literal(node)} if node is not None else {}
    except (ValueError, KeyError, TypeError):
        return {}
