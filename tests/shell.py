"""Commands that must succeed."""

import subprocess
from pathlib import Path
from typing import Any


def succeed(*command: str | Path, **options: Any) -> str:
    """Run a command that must succeed; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout
