"""Atomic writes of files and folders, JSON, records, manifests. Imports no other module but config.

A folder is written under a temporary name, flushed to disk, given a manifest with the size and hash
of each file, and renamed: a folder under its final name is complete, and damage is detected.
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
    """Replace a file atomically: a reader sees either the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power failure can leave an empty file
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} for a missing or damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON lacks, with None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def move_aside(path: Path, suffix: str = "damaged") -> Path:
    """Rename a damaged or misplaced file or folder, and return its new path."""
    aside = unused_name(path, suffix)
    path.rename(aside)
    logger.warning("%s is damaged or misplaced: moved aside to %s", path, aside.name)
    return aside


def unused_name(path: Path, suffix: str = "old") -> Path:
    """Return an unused path beside a file or folder, with this suffix and a number."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{suffix}-{number}")):
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
    """Turn an OSError of a write (read-only, full, not a folder) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error}): free disk space there, get write permission,"
            " or choose another --runs_folder."
        ) from error


RUN_FORMAT = 1  # of a run folder, as run.json states it; docs/run-folder.md says what it means


# ---- metrics.jsonl -------------------------------------------------------------------------------
def each_record(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, reading line by line; {} for a damaged line.

    A last line cut off by a kill is no damage.
    """
    with path.open("rb") as file:
        for line in file:
            record = parse_record(line)
            if record or line.endswith(b"\n") or not line.startswith(b"{"):
                yield record


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line; {} if it holds none."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else {}


def kind_of(record: dict[str, Any]) -> str:
    """Return the kind of a record (docs/run-folder.md)."""
    return str(record.get("kind"))


def printable(text: str) -> str:
    """Replace characters that are not printable, such as those that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


FORMAT = 3
STEP_FOLDER = re.compile(r"step_(\d{8,})")


# ---- atomic folders ------------------------------------------------------------------------------
def flush_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder for its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return {
            "size": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def manifest_text(content: dict[str, Any]) -> str:
    """Return the text of a manifest, with a hash of its own content."""
    plain = json.dumps(content, sort_keys=True)
    return json.dumps(
        {"manifest": content, "sha256": hashlib.sha256(plain.encode()).hexdigest()},
        sort_keys=True,
        indent=1,
    )


def discard(path: Path) -> None:
    """Remove a file or folder with one of our temporary names; of a symlink only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name; -1 for another name."""
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: the manifest is missing, damaged, or of another format.
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


def find_damage(folder: Path, *, hashes: bool = True) -> str:
    """Return what is wrong with a checkpoint; "" if it is intact.

    Args:
        folder: the checkpoint.
        hashes: read every file, which takes about a second per GB; else only state.json, and
            compare the sizes of the others.
    """
    try:
        manifest = read_manifest(folder)
        for name, wanted in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["size"]:
                return f"{name} has {path.stat().st_size} bytes, not {wanted['size']}"
            if (hashes or name == "state.json") and fingerprint(path) != wanted:
                return hash_problem(name)
        return _other_step(folder, manifest["step"])
    except (ValueError, OSError) as error:
        return str(error)
    except (KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json has an unknown structure ({error!r})"


def hash_problem(name: str) -> str:
    """Return the sentence for a file whose hash differs."""
    return f"{name} is damaged: its hash is not the one in manifest.json"


def _other_step(folder: Path, step: int) -> str:
    """Return which part of a checkpoint has another step than its manifest; "" if none has."""
    saved = read_json(folder / "state.json").get("step")
    if saved is None:
        return "state.json is damaged"
    for part, its_step in (("name", step_of(folder)), ("state.json", saved)):
        if its_step not in (-1, step):
            return f"its {part} has step {its_step}, its manifest.json has step {step}"
    return ""


def complete(temporary: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are on disk, and rename it to its final name."""
    write_atomically(temporary / "manifest.json", manifest_text(manifest))
    flush_to_disk(temporary)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder and put it in place of the previous one."""
    fill_temporary(folder, fill)
    put_in_place(folder)


def fill_temporary(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill the temporary folder that put_in_place takes; remove it if that fails."""
    temporary = folder.with_name(f".{folder.name}.partial")
    discard(temporary)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(folder: Path) -> None:
    """Flush the temporary folder to disk, and put it in place of the previous one."""
    temporary = folder.with_name(f".{folder.name}.partial")
    before = folder.with_name(f".{folder.name}.before")
    try:
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
