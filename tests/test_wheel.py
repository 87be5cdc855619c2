"""A generated project as a wheel: the installed package runs without the project's folder."""

import sys
import zipfile
from pathlib import Path

import pytest
from test_generate import RENAMED, Desk

IMPORT_ALL = """
import importlib, pathlib, leafscan
folder = pathlib.Path(leafscan.__file__).parent
for path in sorted(folder.rglob("*.py")):
    name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
    importlib.import_module(name.removesuffix(".__init__"))
    print(name)
"""


@pytest.mark.slow
def test_a_wheel_has_all_modules_and_runs_from_anywhere(template: Path, tmp_path: Path):
    desk = Desk(tmp_path)
    project = desk.generate(template, **RENAMED, recipe="all")
    modules = {str(path.relative_to(project / "src")) for path in project.rglob("src/**/*.py")}
    assert len(modules) > 50
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]  # setuptools is installed
    desk.succeed(*pip, "wheel", *offline, "--wheel-dir", desk.folder / "dist", project)
    (wheel,) = (desk.folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == modules

    installed = desk.folder / "installed"
    desk.succeed(*pip, "install", *offline, "--target", installed, wheel)
    desk.environment["PYTHONPATH"] = str(installed)
    elsewhere = desk.folder / "elsewhere"
    elsewhere.mkdir()
    imported = desk.succeed(sys.executable, "-P", "-c", IMPORT_ALL, cwd=elsewhere).splitlines()
    assert len(imported) == len(modules)

    script = installed / "bin" / RENAMED["project_slug"]
    listed = desk.succeed(script, cwd=elsewhere)
    assert listed == desk.succeed(sys.executable, "-m", "leafscan", cwd=elsewhere)
    assert "planner" in listed
    assert "usage: " in desk.succeed(script, "predict", "--help", cwd=elsewhere)
