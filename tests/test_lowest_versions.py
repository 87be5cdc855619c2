"""The lower bounds of the dependencies are correct: the tests pass with exactly these versions."""

import os
import re
import shutil
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.version import Version
from shell import succeed

UV = Path(sys.executable).with_name("uv")
# What calls the libraries; the other tests of a project read files, send signals and parse words.
CALLING = (
    "accelerate_configs evaluation export launch loader metrics mirror resume same_curve sharding"
)


def bounds(pyproject: Path) -> dict[str, str]:
    """Return the lower bound of each direct dependency, including those of all extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: dict[str, str] = {}
    for requirement in chain(project["dependencies"], *project["optional-dependencies"].values()):
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement)
        assert match, f"{requirement} is not a name and a lower bound"
        name, bound = match.groups()
        assert found.setdefault(name, bound) == bound, f"{name} has two lower bounds"
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not UV.exists(), reason=f"needs uv beside {Path(sys.executable).name}")
def test_quick_tests_pass_with_the_lowest_versions(template, tmp_path):
    """Indirect dependencies have their newest versions, as for a user.

    With AVX2, as make test-cpus runs the other numeric tests.
    """
    repository = shutil.copytree(template, tmp_path / "repository", symlinks=True)
    project, environment = repository / "template", tmp_path / "environment"
    lowest = bounds(project / "pyproject.toml")
    # the resolver may silently take a newer version than the lower bound; this forbids it
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={bound}\n" for name, bound in lowest.items()))
    python = environment / "bin/python"
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in ("VIRTUAL_ENV", "PYTEST_ADDOPTS")
    }
    clean |= {"PATH": f"{python.parent}:{clean['PATH']}", "ATEN_CPU_CAPABILITY": "avx2"}
    try:
        succeed(UV, "venv", "--quiet", "--python", sys.executable, environment, env=clean)
        succeed(
            UV, "pip", "install", "--quiet", "--python", python,
            "--resolution", "lowest-direct", "--constraints", constraints,
            "--requirements", project / "pyproject.toml", "--all-extras", env=clean,
        )  # fmt: skip
        frozen = succeed(UV, "pip", "freeze", "--quiet", "--python", python, env=clean)
        installed = dict(line.split("==") for line in frozen.splitlines())
        newer = {n: installed[n] for n, b in lowest.items() if Version(installed[n]) != Version(b)}
        assert not newer, "not the lowest that pyproject.toml allows"
        succeed(
            python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "1",
            "-m", "not slow and not gpu", "tests/recipes",
            *(f"tests/test_{name}.py" for name in CALLING.split()), cwd=project, env=clean,
        )  # fmt: skip
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # 7 GB
