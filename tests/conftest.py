"""The template as users get it: what git tracks, never the working folder."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def pytest_configure():
    """Handle SIGTERM as Ctrl-C: tests end the processes that they have started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """List what git tracks in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return sorted(listing.stdout.rstrip("\0").split("\0"))


@pytest.fixture(scope="session")
def template(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the tracked files, links as links. To be read only; copy it to change it."""
    folder = tmp_path_factory.mktemp("export") / "cookiecutter-accelerate"
    for file in tracked:
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / file, copy, follow_symlinks=False)
    return folder
