"""What a run records of its code, packages and command."""

import ast
import hashlib
import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .safety.redaction import RECORDED_VARIABLES, is_secret, mask, mask_command

RECORDED_PACKAGES = ("torch", "accelerate", "safetensors", "torchmetrics", "numpy", "scikit-learn")


def source_hash(file: str | Path | None) -> str | None:
    """Return the SHA-256 of a source file; None for None."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None


def installed(source: str | None = None) -> dict[str, str]:
    """Return the versions of the packages that a run depends on: the loop's, and the recipe's.

    A package whose module has another name is listed by that: cv2, PIL.
    """
    found = {}
    for name in (*RECORDED_PACKAGES, *imports_of(source)):
        if name not in sys.stdlib_module_names:
            known = getattr(sys.modules.get(name), "__version__", None)
            with suppress(PackageNotFoundError):
                known = version(name)
            found |= {name: str(known)} if known else {}
    return found


def imports_of(source: str | None) -> list[str]:
    """Return the top-level modules that a source file imports, also inside functions."""
    names: set[str] = set()
    with suppress(OSError, ValueError):  # ValueError: also of its syntax, or a zero byte
        for node in ast.walk(ast.parse(Path(source or "").read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return sorted(names)


def provenance(source: str | None = None) -> dict[str, Any]:
    """Return what is needed to reproduce the run, without secrets.

    Args:
        source: the recipe's file, whose repository is that of the project.
    """
    folder = Path(source or __file__).resolve().parent
    is_tracked = _git(folder, "check-ignore", "-q", ".") is None  # not an environment in another's
    commit = _git(folder, "rev-parse", "HEAD") if is_tracked else None
    changes = _git(folder, "status", "--porcelain") if is_tracked else None
    return {
        "recipe_sha256": source_hash(source),
        "command": mask_command(sys.orig_argv),
        "launcher": _launcher(),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": installed(source),
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "environment": {
            name: mask(value)
            for name, value in sorted(os.environ.items())
            if RECORDED_VARIABLES.fullmatch(name) and not is_secret(name)
        },
    }


def _launcher() -> list[str]:
    """Return the command that started this process through accelerate launch; [] if none did."""
    import psutil

    with suppress(psutil.Error):
        for parent in psutil.Process().parents()[:3]:
            words = parent.cmdline()
            if "train" in words or any(word.startswith("--config_file") for word in words):
                return mask_command(words)
    return []


def _git(folder: Path, *arguments: str) -> str | None:
    # in a hook, git's variables name another repository
    variables = {k: value for k, value in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10, env=variables
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
