"""A generated project that is installed as its README says passes its own checks.

The checks of the repository run in its own .venv, which has every library of every recipe. Here
none of them can be imported, so a dependency that a project's README, Makefile or pyproject.toml
lacks makes its checks fail.
"""

import datetime
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from test_generate import POST_GEN, RENAMED, REPOSITORY, Desk

CHOICES = (*POST_GEN.RECIPES, "all")
TODAYS = CHOICES[datetime.date.today().timetuple().tm_yday % len(CHOICES)]


def choice(recipe: str):
    """Choose by the day, since each choice takes minutes and 7 GB of disk."""
    return pytest.param(
        recipe,
        marks=pytest.mark.skipif(
            recipe != TODAYS and not os.environ.get("ALL_RECIPES"),
            reason=f"today is the turn of {TODAYS}; ALL_RECIPES=1 runs all {len(CHOICES)}",
        ),
    )


def users_environment() -> dict[str, str]:
    """Return the environment without what leads to this repository, pytest, make or git hook.

    `python3` is the interpreter that the repository's .venv was made with.
    """
    ours = ("PYTHON", "VIRTUAL_ENV", "PYTEST_", "MAKE", "MFLAGS", "GIT_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    folders = [
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if folder != str(Path(sys.executable).parent)
        and not Path(folder).resolve().is_relative_to(REPOSITORY)
    ]
    return {**kept, "PATH": os.pathsep.join([f"{sys.base_prefix}/bin", *folders])}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", [choice(recipe) for recipe in CHOICES])
def test_a_project_installed_as_its_readme_says_passes_its_own_checks(
    template: Path, tmp_path: Path, recipe: str
):
    desk = Desk(tmp_path)
    project = desk.generate(template, **RENAMED, recipe=recipe)
    section = (project / "README.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    _, install = re.findall(r"```bash\n(.*?)```", section, re.S)  # with uv, with pip
    # pip compiles nothing: most modules are never imported
    desk.environment = users_environment() | {"PIP_NO_COMPILE": "1"}
    bash = ["bash", "-e", "-c"]
    try:
        # pip only warns if it does not find an extra
        shown = desk.succeed(*bash, f"exec 2>&1\n{install}", cwd=project)
        assert "does not provide the extra" not in shown
        desk.environment["PATH"] = f"{project}/.venv/bin:{desk.environment['PATH']}"
        shown = desk.succeed(*bash, "exec 2>&1; make lint test", cwd=project)
        assert re.search(r"\d+ passed", shown)
        print(shown)
    finally:
        shutil.rmtree(project / ".venv", ignore_errors=True)
