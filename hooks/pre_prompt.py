"""Make the template whole: as git tracks it, with its links.

Cookiecutter runs this file as it is, before it asks anything, in a temporary copy of the
repository. There links have already become what they point at, so that in a fresh clone nothing is
to do. But a zip archive, or a checkout without symbolic links, has text files in their place, each
with the path that it should point at; and in a clone where people train and test lie runs and
caches, which are no part of anybody's project.
"""

import os
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path

ROOT_LINK = "{{cookiecutter.project_slug}}"


def is_temporary_copy(root: Path) -> bool:
    """Tell cookiecutter's copy from a clone, where nothing may be removed."""
    temporary = Path(tempfile.gettempdir()).resolve()
    return root.parent.parent == temporary and root.parent.name.startswith("cookiecutter")


def remove_ignored(folder: Path) -> None:
    """Remove what the project's .gitignore names."""
    patterns = [line.rstrip("/") for line in (folder / ".gitignore").read_text().splitlines()]
    for path in list(folder.rglob("*")):
        if any(fnmatch(path.name, pattern) for pattern in patterns):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # gone with its folder


def flattened(path: Path, root: Path) -> Path | None:
    """Return the file that a flattened link means, or None for any other file."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 255:
        return None
    # Git writes a link as its bare target; a line of text would end in a newline.
    content = path.read_bytes()
    if not content.startswith(b"../") or b"\n" in content:
        return None
    target = (path.parent / os.fsdecode(content)).resolve()
    return target if target.is_file() and target.is_relative_to(root) else None


def main(root: Path) -> None:
    """Give every flattened file link its target's content, and the root link its folder."""
    template, link = root / "template", root / ROOT_LINK
    for folder in (template, link):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if is_temporary_copy(root):
            remove_ignored(folder)
        for path in folder.rglob("*"):
            if target := flattened(path, root):
                shutil.copyfile(target, path)
    if link.is_dir():
        return
    link.unlink(missing_ok=True)
    try:
        link.symlink_to("template", target_is_directory=True)
    except OSError:  # Windows without the right to make links
        shutil.copytree(template, link)


if __name__ == "__main__":
    main(Path.cwd().resolve())
