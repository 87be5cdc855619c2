"""Copy a recipe and the loop into an existing repository. Needs Python 3.11 and no packages.

    python recipes/copy_recipe.py --list
    python recipes/copy_recipe.py causal_lm ../their-repo/their_package

Copies the loop to <package>/training, the recipe to <package>/<recipe>.py, its config to configs/
and the accelerate configs to accelerate_configs/ of the repository, and replaces the template's
package name with yours. It overwrites none of your files. In a git repository that does not ignore
runs/ yet, it adds the line /runs/ to .gitignore. When run again, it updates the files that you have
not changed, which it knows from the hashes in <package>/training/.copied.json, and leaves out those
that you have deleted. A project generated from the template already has the loop: it gets only the
recipe and its config (and .copied.json in its package).
With --tools, <package>/training/tools is copied too: report, doctor, runs, planner and preflight.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import keyword
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
LOOP = HERE / "template/src/my_project"
MODULES = sorted(path.relative_to(LOOP) for path in LOOP.rglob("*.py"))
MODULES = [module for module in MODULES if module.parts[0] != "recipes"]
TOOLS = Path("tools")  # the subpackage that the rest of the loop does not need
RECIPES = {path.stem: path for path in sorted((HERE / "recipes").glob("*.py"))}
del RECIPES["copy_recipe"]
MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # each marks the root of a repository
SOURCE_FOLDERS = ("src", "lib", "python")  # they contain packages, and are not imported themselves
NO_PACKAGES = ("test", "tests", "__pycache__")
BY_HAND = "image_classification"  # the recipe that the commands of recipes/README.md copy


class Refused(Exception):
    """An error that the user can fix; its message is one sentence."""


@dataclass(frozen=True)
class Package:
    """The package that a recipe is copied to."""

    folder: Path
    root: Path
    """The folder in which import paths begin."""
    repository: Path

    @property
    def dotted(self) -> str:
        """Return the package's import name."""
        return ".".join(self.folder.relative_to(self.root).parts)

    @property
    def is_project(self) -> bool:
        """Return whether the package is the loop itself, as in a generated project."""
        return holds_loop(self.folder)

    @property
    def loop(self) -> Path:
        """Return the folder of the loop."""
        return self.folder if self.is_project else self.folder / "training"

    @property
    def has_tools(self) -> bool:
        """Return whether the package's loop has tools."""
        return any(path.stem[0] != "_" for path in (self.loop / TOOLS).rglob("*.py"))

    @property
    def record(self) -> Path:
        """Return the file with the hashes of what was copied."""
        return self.loop / ".copied.json"

    def is_in_copied_loop(self, path: Path) -> bool:
        """Return whether a file is in the copied loop; a generated project has its own loop."""
        return not self.is_project and path.is_relative_to(self.loop)

    def is_linked(self, path: Path) -> bool:
        """Return whether a file, or a folder of the loop that contains it, is a link."""
        folders = (place for place in path.parents if self.loop in place.parents)
        return any(place.is_symlink() for place in (path, *folders))

    def name(self, path: Path) -> str:
        """Return a file's path in the repository."""
        return path.relative_to(self.repository).as_posix()


@dataclass
class Changes:
    """The files of a copy, by what happens to them."""

    new: list[Path] = field(default_factory=list)
    updated: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    """Files that differ from ours, and stay as the user has changed them."""
    differ: list[Path] = field(default_factory=list)
    """Files that differ from ours, and prevent the copy."""
    deleted: list[Path] = field(default_factory=list)
    """Files that were copied earlier, and that the user has deleted since."""
    dropped: list[Path] = field(default_factory=list)
    """Files that were copied earlier, and are no longer part of the loop."""


def holds_loop(folder: Path) -> bool:
    """Return whether a folder contains the loop: its recipe.py defines the recipe protocol."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return "class Recipe(Protocol)" in (folder / "recipe.py").read_text(encoding="utf-8")
    return False


def is_marked(folder: Path) -> bool:
    """Return whether a folder is the root of a repository."""
    return any((folder / mark).exists() for mark in MARKS)


def is_importable(name: str) -> bool:
    """Return whether a folder of this name can be imported as a package."""
    return name.isidentifier() and not keyword.iskeyword(name)


def packages_in(folder: Path) -> list[Path]:
    """List the packages in a folder and in its subfolders src, lib and python, without tests."""
    patterns = ("*/__init__.py", *(f"{name}/*/__init__.py" for name in SOURCE_FOLDERS))
    packages = [init.parent for pattern in patterns for init in sorted(folder.glob(pattern))]
    if folder.name == "src" and not packages:
        packages = sorted(folder.glob("*/"))  # namespace packages, without an __init__.py
    return [path for path in packages if is_importable(path.name) and path.name not in NO_PACKAGES]


def refuse_source_folder(package: Package) -> None:
    """Refuse a folder without an __init__.py that contains packages rather than being one.

    A namespace package has no __init__.py either. A folder in a repository's src counts as one, and
    so does a folder with the loop; elsewhere a folder that contains packages is refused.
    """
    folder = package.folder
    if holds_loop(folder) or holds_loop(folder / "training"):
        return
    packages = packages_in(folder)
    is_in_src = package.root.name == "src" and is_marked(package.repository)
    if folder.name == "src":
        problem = "is the source folder of a src layout, not a package"
    elif packages and (folder.name in SOURCE_FOLDERS or not is_in_src):
        problem = "has no __init__.py and contains packages"
    else:
        return
    remedy = f"make the folder of your package in it, such as {folder / 'your_package'}"
    if packages:
        remedy = f"give one of its packages, such as {', '.join(map(str, packages[:3]))}"
    raise Refused(
        f"{folder} {problem}; {remedy} (or add an __init__.py to {folder.name}, if you import it)."
    )


def find_package(folder: Path) -> Package:
    """Return the package in a folder: how it is imported, and the repository that contains it.

    Raises:
        Refused: the folder cannot be a package.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder; give your package's folder.")
    if folder.is_symlink():
        raise Refused(f"{folder} is a link to {folder.resolve()}; give that folder.")
    folder = folder.resolve()
    for mark in MARKS:
        if (folder / mark).exists():
            raise Refused(f"{folder} is a repository ({mark}); give the folder of its package.")
    root = folder.parent
    if holds_loop(folder) and holds_loop(root / "training"):
        raise Refused(f"{folder} is the loop; give {root}, the package around it.")
    if holds_loop(root) and Path(folder.name) in {module.parent for module in MODULES}:
        package = root.parent if root.name == "training" else root
        raise Refused(f"{folder} is a part of the loop; give {package}, the package around it.")
    while (root / "__init__.py").is_file() and not is_marked(root):
        root = root.parent
    is_subpackage = root != folder.parent
    marked = (place for place in (root, *root.parents) if is_marked(place))
    repository = next(marked, root.parent if root.name == "src" else root)
    for place in (root, *root.parents):  # namespace packages may be between src and root
        if place.name == "src" and place != repository and place.is_relative_to(repository):
            root = place
            break
    package = Package(folder, root, repository)
    if not is_subpackage and not (folder / "__init__.py").is_file():
        refuse_source_folder(package)
    for part in folder.relative_to(root).parts:
        if not is_importable(part):
            raise Refused(f"{part} cannot be imported as a package; give the folder of a package.")
    return package


def dependencies(recipe: Path) -> list[str]:
    """Return the dependencies of a recipe, from the comment at its top (PEP 723)."""
    text = recipe.read_text(encoding="utf-8")
    block = re.search(r"(?m)^# /// script$\s(?P<head>(^#(| .*)$\s)+)^# ///$", text)
    if not block:
        raise Refused(f"{recipe} has no PEP 723 comment at its top that lists its dependencies.")
    lines = [line.removeprefix("#").removeprefix(" ") for line in block["head"].splitlines()]
    return list(tomllib.loads("\n".join(lines))["dependencies"])


def loop_dependencies() -> list[str]:
    """Return the dependencies of the loop."""
    project = tomllib.loads((HERE / "template/pyproject.toml").read_text(encoding="utf-8"))
    return list(project["project"]["dependencies"])


def replace_names(package: Package, text: str, recipe: str) -> str:
    """Replace the names of the template's package and recipe in a text."""
    loop = package.dotted if package.is_project else f"{package.dotted}.training"
    recipes = f"{package.dotted}.recipes" if package.is_project else package.dotted
    names = re.compile(rf"\b{LOOP.name}(\.recipes(?=\.))?\b")
    text = names.sub(lambda match: recipes if match[1] else loop, text)
    return re.sub(r"(?<=[/ ])image_classification\b", recipe, text)


def plan(
    name: str, first: str, package: Package, with_tools: bool
) -> Iterator[tuple[Path, bytes, set[str]]]:
    """Yield the files to copy into the repository.

    Args:
        name: the recipe to copy.
        first: the recipe that was copied first; the loop and the accelerate configs mention it.
        package: the destination.
        with_tools: whether to copy tools/.

    Yields:
        A path, its content, and the two hashes that the file may have if you copied it by hand:
        with the names replaced by sed, or unchanged.
    """

    def read(source: Path, recipe: str) -> tuple[bytes, set[str]]:
        text = source.read_text(encoding="utf-8")
        by_hand = {digest(replace_names(package, text, BY_HAND).encode()), digest(text.encode())}
        return replace_names(package, text, recipe).encode(), by_hand

    if not package.is_project:
        for module in MODULES:
            if with_tools or TOOLS not in module.parents:
                yield package.loop / module, *read(LOOP / module, first)
        for source in sorted((HERE / "accelerate_configs").glob("*.yaml")):
            place = package.repository / "accelerate_configs" / source.name
            yield place, *read(source, first)
    folder = package.folder / "recipes" if package.is_project else package.folder
    yield folder / f"{name}.py", *read(RECIPES[name], name)
    config = package.repository / "configs" / f"{name}.yaml"
    yield config, *read(HERE / f"recipes/{name}.yaml", name)


def digest(content: bytes) -> str:
    """Return the hash of a text, the same for LF and CRLF line ends."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


def compare(
    package: Package, wanted: dict[Path, tuple[bytes, set[str]]], record: dict[str, str], keep: bool
) -> Changes:
    """Sort the files: new, to be updated, kept as the user changed them, or preventing the copy."""
    changes = Changes()
    for path, (content, by_hand) in wanted.items():
        if not os.path.lexists(path):
            is_deleted = package.name(path) in record
            (changes.deleted if is_deleted else changes.new).append(path)
            continue
        if not path.is_file():
            changes.differ.append(path)
            continue
        current, copied = path.read_bytes(), record.get(package.name(path))
        if digest(current) == digest(content):
            continue
        in_loop = package.is_in_copied_loop(path)
        if digest(current) in {copied, *by_hand} and not package.is_linked(path):
            changes.updated.append(path)
        elif copied and (keep or not in_loop or copied == digest(content)):
            changes.kept.append(path)
        elif "accelerate_configs" in path.parts and b"distributed_type:" in current:
            changes.kept.append(path)  # written for another package, or copied by hand
        else:
            changes.differ.append(path)
    changes.differ += dict.fromkeys(conflicts(package, changes.new, record))
    copied_loop = (package.repository / name for name in record)
    changes.dropped = [
        path
        for path in copied_loop
        if path not in wanted and path.is_file() and package.is_in_copied_loop(path)
    ]
    return changes


def conflicts(package: Package, new: Iterable[Path], record: dict[str, str]) -> Iterator[Path]:
    """Yield links, and modules that have the import name of one of ours, so one hides the other.

    Args:
        package: the destination.
        new: the files that are written there for the first time.
        record: the hashes of what was copied. An unchanged module with the name of a new folder is
            not a conflict: it is no longer imported.
    """
    folders = {path.parent for path in new if package.is_in_copied_loop(path)} - {package.loop}
    for path in new:
        if path.suffix == ".py" and any(path.with_suffix("").glob("*.py")):
            yield path.with_suffix("")
    for folder in sorted(folders):
        if folder.is_symlink():
            yield folder
        module = folder.with_suffix(".py")
        if module.is_file() and digest(module.read_bytes()) != record.get(package.name(module)):
            yield module
    if not holds_loop(package.loop):
        yield from package.folder.glob("training.py")
        for folder in (package.loop, *sorted(folders)):
            for path in folder.glob("*.py"):
                if path.relative_to(package.loop) not in MODULES:
                    yield path


def check_writable(paths: Iterable[Path]) -> None:
    """Refuse files that cannot be written, before any is written."""
    for path in paths:
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        if existing != path and not existing.is_dir():
            raise Refused(f"{path} cannot be written: {existing} is not a folder.")
        if not os.access(existing, os.W_OK):
            raise Refused(f"{path} cannot be written: you may not write to {existing}.")


def copy(name: str, package: Package, keep: bool = False, tools: bool = False) -> Changes:
    """Copy missing files, and update files that the user has not changed.

    Args:
        name: the name of the recipe.
        package: the destination.
        keep: keep the user's version of modules of the loop that have changed on both sides.
        tools: copy tools/ too; if the destination has it, it is updated in any case.

    Raises:
        Refused: files exist and differ, or cannot be written; checked before any is written.
    """
    if name not in RECIPES:
        raise Refused(f"there is no recipe {name}; the recipes are {', '.join(RECIPES)}.")
    if tools and package.is_project:
        raise Refused(
            f"{package.folder} has a loop of its own, which is not copied: leave out --tools."
        )
    files, first = {}, name
    if package.record.is_file():
        try:
            record = json.loads(package.record.read_text(encoding="utf-8"))
            files, first = record["files"], record["recipe"]
        except (ValueError, KeyError, TypeError):
            raise Refused(
                f"{package.record} is damaged; fix it, or remove it: files that you have changed"
                " then prevent the copy."
            ) from None
    wanted = {
        path: (text, by_hand)
        for path, text, by_hand in plan(name, first, package, tools or package.has_tools)
    }
    changes = compare(package, wanted, files, keep)
    if changes.differ:
        merge = ""
        if any(package.name(path) in files for path in changes.differ):
            merge = ", or merge by hand what is new in those that you have changed, and give --keep"
        raise Refused(
            "nothing was copied, since these exist and differ: "
            + ", ".join(package.name(path) for path in changes.differ)
            + f"; move them away, copy by hand (recipes/README.md){merge}."
        )
    to_write = changes.new + changes.updated
    check_writable([*to_write, package.record])
    unwritten = set(to_write)
    try:
        for path in to_write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[path][0])
            unwritten.remove(path)
    except OSError as error:
        raise Refused(f"{error}; fix that and run the same command again.") from error
    finally:
        if package.loop.is_dir():
            for path in wanted.keys() - unwritten:
                files[package.name(path)] = digest(wanted[path][0])
            record = json.dumps({"recipe": first, "files": files}, indent=1)
            package.record.write_text(f"{record}\n", encoding="utf-8")
    return changes


def git_ignores(repository: Path, folder: str) -> bool:
    """Return whether git ignores a folder; without git, whether .gitignore has a line for it."""
    command = ["git", "-C", str(repository), "check-ignore", "--quiet", f"{folder}/any"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        code = subprocess.run(command, capture_output=True, timeout=10, check=False).returncode
        if code in (0, 1):
            return code == 0
    with contextlib.suppress(OSError):
        lines = (repository / ".gitignore").read_bytes().decode(errors="replace")
        return bool(re.search(rf"(?m)^(/|\*\*/)?{folder}(/\*{{0,2}})?\s*$", lines))
    return False


def ignore_outputs(repository: Path) -> Iterator[str]:
    """Make git ignore the run folders, by a line at the end of .gitignore.

    data/ contains downloads and caches, but maybe files of the user too, so it is only mentioned.

    Yields:
        Lines for the report.
    """
    if not any(os.path.lexists(place / ".git") for place in (repository, *repository.parents)):
        return
    file = repository / ".gitignore"
    if not git_ignores(repository, "runs"):
        try:
            if file.is_symlink():
                raise OSError(f"it is a link to {file.resolve()}")
            text = file.read_bytes() if file.exists() else b""
            if b"\0" in text:
                raise OSError("it is not UTF-8")
            end = b"\r\n" if b"\r\n" in text else b"\n"
            with file.open("ab") as lines:
                lines.write((b"" if text.endswith(b"\n") or not text else end) + b"/runs/" + end)
            yield "added to .gitignore, for the run folders: /runs/"
        except OSError as error:
            yield f"add to .gitignore, for the run folders: /runs/ (not added: {error})"
    if not git_ignores(repository, "data"):
        yield (
            "note: recipes put downloads and caches in data/, which git does not ignore; add /data/"
            " to .gitignore, unless you keep files of your own there"
        )


def report(name: str, package: Package, changes: Changes, notes: Iterable[str]) -> None:
    """Print what was done, and the launch command."""
    count = len(changes.new) + len(changes.updated)
    print(f"{count} file(s) written to {package.repository}")
    for title, paths in {
        "updated": changes.updated,
        "kept, since they are yours": changes.kept,
        f"left out, since you have deleted them (the lines in {package.name(package.record)} say"
        " so)": changes.deleted,
        "no longer part of the loop": changes.dropped,
    }.items():
        if paths:
            print(f"{title}: {', '.join(package.name(path) for path in paths)}")
    for note in notes:
        print(note)
    if package.is_project:
        ours = replace_names(package, (LOOP / "recipe.py").read_text(encoding="utf-8"), name)
        if digest(ours.encode()) != digest((package.folder / "recipe.py").read_bytes()):
            print("note: its recipe.py is from another version; cruft update brings it to this one")
    needs = [] if package.is_project else loop_dependencies()
    needs = dict.fromkeys([*needs, *dependencies(RECIPES[name])])
    print("add to your dependencies:", *(f'"{need}"' for need in needs))
    root = package.root.relative_to(package.repository)
    path = "" if root == Path() else f"PYTHONPATH={shlex.quote(str(root))} "
    module = f"{package.dotted}.train" if package.is_project else f"{package.dotted}.training.train"
    print(
        f"then, in {package.repository} (PYTHONPATH if {package.dotted} is not installed):\n"
        f"{path}accelerate launch --config_file accelerate_configs/cpu_2_processes.yaml"
        f" -m {module} --config configs/{name}.yaml"
    )


def main(arguments: list[str]) -> None:
    """Copy a recipe, or list all recipes."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help="the recipe to copy")
    parser.add_argument("package", nargs="?", type=Path, help="the folder of your package")
    parser.add_argument("--list", action="store_true", help="list the recipes, one per line")
    parser.add_argument(
        "--keep", action="store_true", help="keep files of the loop that you have changed"
    )
    parser.add_argument(
        "--tools", action="store_true", help="copy report, doctor, runs, planner and preflight too"
    )
    given = parser.parse_args(arguments)
    if given.list:
        for name, path in RECIPES.items():
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"{name:24}{text.splitlines()[0]}")
        return
    if given.recipe is None or given.package is None:
        raise Refused("give a recipe and the folder of your package, or --list.")
    package = find_package(given.package)
    changes = copy(given.recipe, package, given.keep, given.tools)
    report(given.recipe, package, changes, list(ignore_outputs(package.repository)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
