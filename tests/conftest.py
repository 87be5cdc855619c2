"""Fixtures: the template as users get it (the files that git tracks), and emulated hosts."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
from hosts import CONFIG, PROJECT, Hosts
from shell import succeed

REPOSITORY = Path(__file__).parents[1]


def pytest_configure():
    """Handle SIGTERM as Ctrl-C, so that tests end the processes that they have started.

    Threads of torch that wait for each other take most of the CPU time of small models.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Start the fork server of world.py, which looks for its imports in PYTHONPATH alone."""
    tests = (i for i in request.session.items if "slow" in i.keywords)
    if any(hasattr(test.module, "run_world") for test in tests):
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """Return the files that git tracks in the repository."""
    return sorted(succeed("git", "ls-files", "-z", cwd=REPOSITORY).rstrip("\0").split("\0"))


@pytest.fixture(scope="session")
def template(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the tracked files, links as links. Tests only read the folder, or change a copy."""
    folder = tmp_path_factory.mktemp("export") / "cookiecutter-accelerate"
    for file in tracked:
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / file, copy, follow_symlinks=False)
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Start two hosts that share a project's folder; remove them afterwards."""
    with hosts_with_a_project(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def three_hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Start three such hosts."""
    with hosts_with_a_project(tmp_path, 3) as hosts:
        yield hosts


def hosts_with_a_project(folder: Path, count: int = 2) -> Hosts:
    for name in ("src", "accelerate_configs"):
        (folder / name).symlink_to(PROJECT / name)
    shutil.copytree(PROJECT / "launch", folder / "launch")
    (folder / "tiny.yaml").write_text(CONFIG)
    return Hosts(folder, count)
