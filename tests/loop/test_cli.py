"""The commands, listed and run by `python -m`; test_wheel.py has the console script."""

import logging
import re
import subprocess
import sys

import pytest
from documents import PROJECT
from my_project.__main__ import COMMANDS
from my_project.exits import Warned

HEAVY = ("torch", "accelerate", "jsonargparse", "yaml", "numpy", "psutil")
PACKAGE = PROJECT / "src/my_project"
THERE = [name for name, at in COMMANDS.items() if (PACKAGE / f"{at.replace('.', '/')}.py").exists()]


def call(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, "-m", "my_project", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_commands_are_listed_before_anything_heavy_is_imported():
    done = call(flags=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"(?m)^  (\w+) +\S", done.stdout)
    assert listed == THERE
    assert '"' not in done.stdout
    imported = set(re.findall(r"\| +(\w+)\S*$", done.stderr, re.M))
    assert {"my_project", "argparse"} <= imported
    assert not imported & set(HEAVY)
    assert call("--help").stdout == done.stdout


@pytest.mark.parametrize("command", THERE)
def test_help_imports_no_torch(command):
    done = call(command, "--help", flags=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    assert not re.findall(r"\| +(torch|accelerate|numpy)$", done.stderr, re.M)


def test_warnings_are_counted_once_however_often_logging_is_set_up(monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    warned = Warned()
    warned.start()
    factory = logging.getLogRecordFactory()
    warned.start()
    assert logging.getLogRecordFactory() is factory
