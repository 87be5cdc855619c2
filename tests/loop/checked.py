"""Train runs for tests of the checks; return what the checks find, and how the run ends."""

from pathlib import Path
from typing import Any

import pytest
from my_project.checks.findings import Findings
from my_project.files import ConfigError
from runs import make_config, quick, train
from test_fsdp_on_cpu import ask_for_fsdp
from world import run_world

LAYOUTS = {"alone": (1, 0), "ddp": (2, 0), "fsdp": (2, 1)}  # processes, replicas
EACH_LAYOUT = pytest.mark.parametrize("layout", quick(1, ["ddp", "alone", "fsdp"]))


def found(
    recipe: Any, folder: Path, settings: dict[str, Any], replicas: int
) -> tuple[int, list[tuple[str, str]]]:
    """Train on this rank; return the exit code, and the level and the text of each finding."""
    findings: list[tuple[str, str]] = []
    add = Findings.add

    def note(self: Findings, check: str, problem: str, *, level: str = "") -> None:
        findings.append((level, problem))
        add(self, check, problem, level=level)

    Findings.add = note
    if replicas:
        ask_for_fsdp(replicas)
    try:
        return train(make_config(folder, recipe, **settings)), findings
    except ConfigError:
        return 2, findings


def check(
    recipe: Any, folder: Path, processes: int = 1, *, replicas: int = 0, **settings: Any
) -> tuple[int, list[tuple[str, str]]]:
    """Train in a new world; return the exit code and the findings, which are equal on all ranks.

    The model is not sharded with 0 replicas; it is sharded by FSDP2 with 1, and by HSDP with more.
    """
    settings = {"run_name": f"{processes}_{replicas}", "steps": 4} | settings
    results = run_world(processes, found, recipe, folder, settings, replicas)
    assert all(result == results[0] for result in results)
    return results[0]
