"""Files and folders that appear whole: atomic writes, JSON, manifests. The ground floor.

A folder is written under a temporary name, flushed to disk, given a manifest with the size and hash
of each file, and renamed: what has its name is complete, and damage to it is noticed.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .config import ConfigError

logger = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave an empty file under the name
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty when there is none, or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace by None the numbers that JSON does not have: NaN and the infinities."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def move_aside(path: Path, end: str = "damaged") -> Path:
    """Rename what is in the way; it is never deleted."""
    aside = unused_name(path, end)
    path.rename(aside)
    logger.warning("%s is in the way, or damaged: moved aside to %s", path, aside.name)
    return aside


def unused_name(path: Path, end: str = "old") -> Path:
    """Find a name beside a file or folder that nothing has."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{end}-{number}")):
        number += 1
    return aside


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = 0.2) -> bool:
    """Wait until a condition is true; return False if it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(poll_seconds)
    return is_true


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in a sentence why a folder cannot be written to: read-only, full, not a folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error}): make room there or get permission to write,"
            " or choose another --runs_folder."
        ) from error


FORMAT = 1
STEP_FOLDER = re.compile(r"step_(\d{8,})")


# ---- folders that appear whole -------------------------------------------------------------------
def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def manifest_text(content: dict[str, Any]) -> str:
    """Write a manifest, with a hash of itself, in the one form that is valid."""
    plain = json.dumps(content, sort_keys=True)
    return json.dumps(
        {"manifest": content, "sha256": hashlib.sha256(plain.encode()).hexdigest()},
        sort_keys=True,
        indent=1,
    )


def discard(path: Path) -> None:
    """Remove what has a temporary name of ours, whatever it is; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def step_of(folder: Path) -> int:
    """Read the step off a checkpoint's name; -1 where it names none."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: it is missing or damaged; says which.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError("it has no manifest.json, so it was never completed")
    content: dict[str, Any] = {}
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)["manifest"]
        intact = text == manifest_text(content) and isinstance(content["step"], int)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("manifest.json is damaged")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')}, this code reads {FORMAT}")
    return content


def damage(folder: Path, *, hashes: bool = True) -> str:
    """Say what is wrong with a checkpoint; nothing if it is whole.

    Args:
        folder: of the checkpoint.
        hashes: read every file, which takes about a second per GB, or look at the sizes only.
    """
    try:
        manifest = read_manifest(folder)
        for name, wanted in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["size"]:
                return f"{name} has {path.stat().st_size} bytes in place of {wanted['size']}"
            if hashes and fingerprint(path) != wanted:
                return f"{name} is damaged: its hash is not the one in manifest.json"
        return _other_step(folder, manifest["step"])
    except (ValueError, OSError) as error:
        return str(error)
    except (KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json is not one of ours ({error!r})"


def _other_step(folder: Path, step: int) -> str:
    """Say which part of a checkpoint is of another step than its manifest; nothing if none is."""
    saved = read_json(folder / "state.json").get("step")
    if saved is None:
        return "state.json is damaged"
    for part, its_step in (("name", step_of(folder)), ("state.json", saved)):
        if its_step not in (-1, step):
            return f"its {part} is of step {its_step}, its manifest.json of step {step}"
    return ""


def complete(temporary: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are on the disk, and give it its name."""
    write_atomically(temporary / "manifest.json", manifest_text(manifest))
    flush_to_disk(temporary)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder appear whole, in place of the one before."""
    temporary, before = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "before"))
    discard(temporary)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in temporary.iterdir():
            flush_to_disk(path)
        flush_to_disk(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    discard(before)
    if folder.is_symlink() or folder.is_file():
        move_aside(folder, "old")
    elif folder.exists():
        os.replace(folder, before)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)
    discard(before)
