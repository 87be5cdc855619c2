"""Restore the template's symbolic links, remove ignored files, and have each answer checked.

Cookiecutter runs this file unrendered, before its first question, in a temporary copy of the
repository in which it has resolved all links. But in a zip archive, or in a checkout without
symbolic links, each link is a text file with the target's path. And a clone in which somebody has
trained contains runs and caches, which do not belong in a generated project.
"""

import json
import os
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path

ROOT_LINK = "{{cookiecutter.project_slug}}"
# The module that checks the answers; no other module on Python's search path may have this name.
CHECKS = "cookiecutter_accelerate_answer_checks"


def is_temporary_copy(root: Path) -> bool:
    """Return whether a folder is cookiecutter's copy; files of a clone must not be removed."""
    temporary = Path(tempfile.gettempdir()).resolve()
    return root.parent.parent == temporary and root.parent.name.startswith("cookiecutter")


def remove_ignored(folder: Path) -> None:
    """Remove the files and folders that match the project's .gitignore."""
    patterns = [line.rstrip("/") for line in (folder / ".gitignore").read_text().splitlines()]
    for path in list(folder.rglob("*")):
        if any(fnmatch(path.name, pattern) for pattern in patterns):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # it may have been removed with its folder


def link_target(path: Path, root: Path) -> Path | None:
    """Return the target of a link that was turned into a text file; None for any other file."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 255:
        return None
    # git writes the target without a newline, which a text file would have
    content = path.read_bytes()
    if not content.startswith(b"../") or b"\n" in content:
        return None
    target = (path.parent / os.fsdecode(content)).resolve()
    return target if target.is_file() and target.is_relative_to(root) else None


def check_each_answer(root: Path) -> None:
    """Let cookiecutter check each answer before it asks the next question."""
    shutil.copyfile(root / "hooks/answer_checks.py", root / f"{CHECKS}.py")
    settings = {}
    original = json.loads((root / "cookiecutter.json").read_text(encoding="utf-8"))
    for question, default in original.items():
        settings[question] = default
        if not question.startswith("_"):
            # cookiecutter renders a private variable in its turn, without asking for it
            settings[f"__{question}_checked"] = "{{ cookiecutter | checked }}"
    settings["_extensions"] = [f"{CHECKS}.AnswerChecks"]
    (root / "cookiecutter.json").write_text(json.dumps(settings), encoding="utf-8")


def main(root: Path) -> None:
    """Prepare cookiecutter's copy; in a clone, only restore links."""
    if is_temporary_copy(root):
        check_each_answer(root)
    restore_links(root)


def restore_links(root: Path) -> None:
    """Replace links that are text files with copies of their targets; restore the root link."""
    template = root / "template"
    link = root / ROOT_LINK
    for folder in (template, link):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if is_temporary_copy(root):
            remove_ignored(folder)
        for path in folder.rglob("*"):
            if target := link_target(path, root):
                shutil.copyfile(target, path)
    if link.is_dir():
        return
    link.unlink(missing_ok=True)
    try:
        link.symlink_to("template", target_is_directory=True)
    except OSError:  # Windows without the privilege to create links
        shutil.copytree(template, link)


if __name__ == "__main__":
    main(Path.cwd().resolve())
