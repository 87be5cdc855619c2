"""Copy a recipe, and the loop, into a repository that exists. Needs nothing but Python.

    python recipes/copy_recipe.py --list
    python recipes/copy_recipe.py causal_lm ../their-repo/their_package

Copies the loop to <package>/training, the recipe to <package>/<recipe>.py, its config to configs/
and the accelerate configs to accelerate_configs/ of the repository, and puts the recipe's import
path into the config. Nothing that exists is overwritten. Called again, it brings the loop's files
up to date, if they are as it left them: it keeps their hashes in <package>/training/.copied.json.
A project that was generated from the template has the loop already, and gets recipe and config.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent  # a clone of the template, or a generated project
RECORD = ".copied.json"


class Refused(Exception):
    """What the user can mend, in one sentence."""


def loop_folder() -> Path:
    """Find the loop: in the template, or in a project made from it."""
    places = [HERE / "template/src", HERE / "src"]
    for train in [path for place in places for path in sorted(place.glob("*/train.py"))]:
        if (train.parent / "recipe.py").is_file():
            return train.parent
    raise Refused(f"{HERE} holds no loop (src/*/train.py).")


def recipes() -> dict[str, Path]:
    """List the recipes by name."""
    places = [HERE / "recipes", *HERE.glob("src/*/recipes")]
    found = {path.stem: path for place in places for path in sorted(place.glob("*.py"))}
    return {name: path for name, path in found.items() if name not in ("copy_recipe", "__init__")}


def first_line(recipe: Path) -> str:
    """Say in a line what a recipe does."""
    return (ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or "").splitlines()[0]


def dependencies(recipe: Path) -> list[str]:
    """Read what a recipe needs from its head (PEP 723)."""
    text = recipe.read_text(encoding="utf-8")
    found = re.search(r"(?m)^# /// script$\s(?P<head>(^#(| .*)$\s)+)^# ///$", text)
    if not found:
        raise Refused(f"{recipe} has no PEP 723 head that says what it needs.")
    lines = [line.removeprefix("#").removeprefix(" ") for line in found["head"].splitlines()]
    return list(tomllib.loads("\n".join(lines))["dependencies"])


def loop_dependencies() -> list[str]:
    """Read what the loop needs from the project's own pyproject.toml."""
    for project in (HERE / "template/pyproject.toml", HERE / "pyproject.toml"):
        if project.is_file():
            return list(
                tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
            )
    return []


def import_path(package: Path) -> tuple[str, Path]:
    """Return a package's dotted name and the folder that it is imported from."""
    names, folder = [package.name], package.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    return ".".join(names), folder


def repository_of(package: Path) -> Path:
    """Find the repository: what git or a pyproject.toml marks, else where the package lies."""
    _, root = import_path(package)
    for folder in (root, *root.parents):
        if (folder / ".git").exists() or (folder / "pyproject.toml").is_file():
            return folder
    return root


def digest(content: bytes) -> str:
    """Hash a file's content."""
    return hashlib.sha256(content).hexdigest()


def is_project(package: Path) -> bool:
    """Tell whether a package is the loop itself, as in a generated project."""
    return (package / "train.py").is_file() and (package / "recipe.py").is_file()


def plan(name: str, package: Path) -> dict[Path, bytes]:
    """List what belongs into the repository: path and content, the loop's files first."""
    recipe, loop = recipes()[name], loop_folder()
    dotted, _ = import_path(package)
    repository = repository_of(package)
    configs = (HERE / f"recipes/{name}.yaml", HERE / f"configs/{name}.yaml")
    config = next(path for path in configs if path.is_file())
    old, here = loop.name, dotted if is_project(package) else f"{dotted}.training"
    beside = "recipes." if is_project(package) else ""

    def renamed(path: Path) -> bytes:
        text = path.read_text(encoding="utf-8")
        return text.replace(f"{old}.recipes.", f"{dotted}.{beside}").replace(
            f"{old}.", f"{here}."
        ).encode()  # fmt: skip

    wanted: dict[Path, bytes] = {}
    if not is_project(package):
        for path in sorted(loop.glob("*.py")):
            wanted[package / "training" / path.name] = renamed(path)
        for path in sorted((HERE / "accelerate_configs").iterdir()):
            wanted[repository / "accelerate_configs" / path.name] = renamed(path)
    place = package / "recipes" if is_project(package) else package
    wanted[place / f"{name}.py"] = recipe.read_bytes()
    wanted[repository / "configs" / f"{name}.yaml"] = renamed(config)
    return wanted


def copy(name: str, package: Path) -> list[Path]:
    """Copy what is not there yet, and update the loop; return what was written.

    Raises:
        Refused: files are there that differ; nothing has been written then.
    """
    if name not in recipes():
        raise Refused(f"there is no recipe {name}; there are {', '.join(recipes())}.")
    if not package.is_dir():
        raise Refused(f"{package} is no folder; give that of your package.")
    if not re.fullmatch(r"[A-Za-z_]\w*", package.name):
        raise Refused(f"{package.name} cannot be imported as a package; give a package's folder.")
    repository, loop = repository_of(package), package / "training"
    record_path = loop / RECORD
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    written, differ = [], []
    wanted = plan(name, package)
    for path, content in wanted.items():
        copied = record.get(path.relative_to(repository).as_posix())
        if not path.exists():
            written.append(path)
        elif (there := path.read_bytes()) == content:
            continue
        elif path.parent == loop and copied == digest(there):
            written.append(path)  # as it was copied: an update
        elif path.parent == loop or copied is None:
            differ.append(path)  # recipes and configs that were copied are yours to change
    if differ:
        raise Refused(
            "nothing was copied, since these exist and differ: "
            + ", ".join(path.relative_to(repository).as_posix() for path in differ)
            + "; move them away, or copy by hand (recipes/README.md)."
        )
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wanted[path])
        record[path.relative_to(repository).as_posix()] = digest(wanted[path])
    if not is_project(package):
        record_path.write_text(json.dumps(record, indent=1) + "\n")
    return written


def main(arguments: list[str]) -> None:
    """Copy, and say how to go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("package", nargs="?", type=Path, help="the folder of your package")
    parser.add_argument("--list", action="store_true", help="the recipes, a line each")
    given = parser.parse_args(arguments)
    if given.list:
        for name, path in recipes().items():
            print(f"{name:24}{first_line(path)}")
        return
    if given.recipe is None or given.package is None:
        raise Refused("give a recipe and the folder of your package, or --list.")
    package = given.package.resolve()
    written = copy(given.recipe, package)
    dotted, root = import_path(package)
    repository = repository_of(package)
    print(f"{len(written)} file(s) written to {repository}")
    loops = [] if is_project(package) else loop_dependencies()
    needs = dict.fromkeys([*loops, *dependencies(recipes()[given.recipe])])
    train = f"{dotted}.train" if is_project(package) else f"{dotted}.training.train"
    print("add to your dependencies:", *(f'"{need}"' for need in needs))
    path = "" if root == repository else f"PYTHONPATH={root.relative_to(repository)} "
    print(
        f"then, in {repository} (PYTHONPATH where {dotted} is not installed):\n{path}accelerate"
        f" launch --config_file accelerate_configs/cpu_2_processes.yaml -m {train}"
        f" --config configs/{given.recipe}.yaml"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
