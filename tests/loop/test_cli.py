"""The commands, listed and run by `python -m` and by the console script."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents import PROJECT
from my_project.__main__ import COMMANDS

HEAVY = ("torch", "accelerate", "jsonargparse", "yaml", "numpy", "psutil")
(SCRIPT,) = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"].values()
MODULE, _, FUNCTION = SCRIPT.partition(":")
PACKAGE = PROJECT / "src/my_project"
THERE = [name for name, at in COMMANDS.items() if (PACKAGE / f"{at.replace('.', '/')}.py").exists()]
WAYS = {
    "python -m": ["-m", "my_project"],
    # as pip and uv write it into bin/, which -P stands for: not the current folder
    "console script": ["-P", "-c", f"import sys; from {MODULE} import {FUNCTION}; {FUNCTION}()"],
}


@pytest.fixture(params=WAYS)
def call(request: pytest.FixtureRequest):
    """Return what runs the commands, one way or the other."""

    def run(*arguments: str, flags: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *flags, *WAYS[request.param], *arguments],
            capture_output=True, text=True, check=False, **options,
        )  # fmt: skip

    return run


def test_commands_are_listed_before_anything_heavy_is_imported(call):
    done = call(flags=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"(?m)^  (\w+) +\S", done.stdout)
    assert listed == THERE
    imported = set(re.findall(r"\| +(\w+)\S*$", done.stderr, re.M))
    assert {"my_project", "argparse"} <= imported
    assert not imported & set(HEAVY)
    assert call("--help").stdout == done.stdout


def test_a_command_runs(call, tmp_path: Path):
    refused = call("export", ".", "weights.safetensors", cwd=tmp_path)
    assert refused.returncode == 2
    assert "it has no manifest.json" in refused.stderr


@pytest.mark.parametrize("command", THERE)
def test_help_imports_no_torch(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "my_project", command, "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    assert not re.findall(r"\| +(torch|accelerate|numpy)$", done.stderr, re.M)
