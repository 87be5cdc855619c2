"""`cruft update`: a project takes a commit of the template, and keeps its owner's edits."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_generate import RENAMED, Desk, tree

TRAIN = "src/leafscan/train.py"
OWN, NEW = "# leaves\n", "# a line of the new version\n"
EDITED = (
    TRAIN,
    "src/leafscan/recipes/image_classification.py",
    "src/leafscan/words.py",  # which the new version renames
    "configs/image_classification.yaml",
    "launch/slurm.sbatch",
)


def improve(template: Path) -> None:
    """Append a line to train.py and to a launch script, rename a module, add one, remove a page."""
    project, hook = template / "template", template / "hooks/post_gen_project.py"
    package = project / "src/my_project"
    for path in (package / "train.py", project / "launch/slurm.sbatch"):
        path.write_text(path.read_text() + NEW)
    (package / "words.py").rename(package / "phrases.py")
    for path in package.rglob("*.py"):
        if not path.is_symlink():
            path.write_text(re.sub(r"\.words import", ".phrases import", path.read_text()))
    (package / "added.py").write_text('"""A new module."""\n')
    (project / "docs/how-to/hub.md").unlink()
    listed = hook.read_text()
    assert '"src/my_project/words.py"' in listed
    listed = listed.replace("src/my_project/words.py", "src/my_project/phrases.py")
    listed = listed.replace("docs/how-to/hub.md", "src/my_project/added.py")
    hook.write_text(listed)


def edit_nothing(project: Path) -> None:
    """Leave the project as it was generated."""


def edit_first_lines(project: Path) -> None:
    for file in EDITED:
        (project / file).write_text(OWN + (project / file).read_text())


def edit_also_the_line_that_the_template_changes(project: Path) -> None:
    edit_first_lines(project)
    (project / TRAIN).write_text((project / TRAIN).read_text() + OWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "conflicts"),
    [
        (edit_nothing, []),
        (edit_first_lines, []),
        (edit_also_the_line_that_the_template_changes, [TRAIN]),
    ],
)
def test_an_update_conflicts_only_where_both_sides_changed(
    template: Path, tmp_path: Path, edit: Callable[[Path], None], conflicts: list[str]
):
    """Files without conflicts equal those of a fresh project, with the owner's lines."""
    upstream = shutil.copytree(template, tmp_path / "upstream", symlinks=True)
    desk = Desk(tmp_path)
    desk.commit(upstream)
    answers = f"--extra-context={json.dumps(RENAMED)}"
    desk.succeed("cruft", "create", "--no-input", upstream, answers)
    project = desk.folder / RENAMED["project_slug"]
    desk.commit(project)
    assert desk.succeed("cruft", "diff", "--exit-code", cwd=project) == ""
    edit(project)
    if edit is not edit_nothing:
        desk.commit(project)

    improve(upstream)
    desk.commit(upstream)
    desk.succeed("cruft", "update", "--skip-apply-ask", cwd=project)
    desk.succeed("cruft", "check", cwd=project)
    updated = tree(project)
    del updated[".cruft.json"]

    desk.folder = tmp_path / "fresh"
    desk.folder.mkdir()
    generated = desk.generate(upstream, **RENAMED)
    if edit is not edit_nothing:
        (generated / "src/leafscan/phrases.py").rename(generated / "src/leafscan/words.py")
        edit(generated)
        (generated / "src/leafscan/words.py").rename(generated / "src/leafscan/phrases.py")
    expected = tree(generated)
    assert set(updated) == set(expected)  # no .rej file: all patches applied
    assert [file for file in updated if updated[file] != expected[file]] == conflicts
    for file in conflicts:
        text = updated[file][0].decode()
        assert re.search(f"(?ms)^<<<<<<< ours\n{OWN}=======\n{NEW}>>>>>>> theirs$", text)
