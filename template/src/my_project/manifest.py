"""A checkpoint is complete or not there: manifests, hashes, atomic folders.

A folder is written under a temporary name, flushed to disk, given a manifest with the size and hash
of each file, and renamed: a folder under its final name is complete, and damage is detected.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import (
    FormatError,
    discard,
    flush_to_disk,
    open_own,
    read_own,
    unused_name,
    write_atomically,
    writing,
)
from .run_files import step_of

logger = logging.getLogger(__name__)
FORMAT = 1  # of a checkpoint
BUSY = (errno.EBUSY, errno.ENOTEMPTY)  # a file in a folder is open on another host (NFS)
PIECE_BYTES = 64 << 20  # hashed by itself, so that ranks and threads share a large file
CHUNK_BYTES = 1 << 20  # of one read
HASHING_THREADS = 4


class Fingerprint:
    """The size in bytes and the SHA-256 of each piece of a file, from what is written to it."""

    def __init__(self) -> None:
        self.size = 0
        self.digests: list[Any] = []

    def update(self, data: memoryview) -> None:
        """Add bytes, in the order of the file."""
        while data:
            if self.size % PIECE_BYTES == 0:
                self.digests.append(hashlib.sha256())
            part = data[: PIECE_BYTES - self.size % PIECE_BYTES]
            self.digests[-1].update(part)
            self.size += len(part)
            data = data[len(part) :]

    def listed(self) -> dict[str, Any]:
        """Return what a manifest lists."""
        return {"size": self.size, "sha256": [digest.hexdigest() for digest in self.digests]}


def _hash_piece(path: Path, number: int) -> str:
    digest, left = hashlib.sha256(), PIECE_BYTES
    with open_own(path, follow=True) as file:
        file.seek(number * PIECE_BYTES)
        while chunk := file.read(min(left, CHUNK_BYTES)):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def manifest_text(content: dict[str, Any]) -> str:
    """Return the text of a manifest, with a hash of its own content."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"manifest": content, "sha256": digest})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        ValueError: the manifest is missing or damaged.
        FormatError: it is of another format.
        OSError: it cannot be read.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError("it has no manifest.json, so it was never completed")
    content: dict[str, Any] = {}
    try:
        text = read_own(path, follow=True).decode()
        content = json.loads(text)["manifest"]
        intact = text == manifest_text(content) and _is_manifest(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("manifest.json is damaged")
    if content.get("format") != FORMAT:
        raise FormatError(
            f"{folder} was saved by another version of this project (format"
            f" {content.get('format')}, this code reads {FORMAT}): go on with that version, whose"
            " commit is in run.json, or start again with --resume never or another --run_name."
        )
    if step_of(folder) not in (-1, content["step"]):
        raise ValueError(f"its manifest.json has step {content['step']}")
    return content


def _is_manifest(content: dict[str, Any]) -> bool:
    """Return whether a manifest has the fields that are read; a valid hash does not say so."""
    if content["format"] != FORMAT:
        return True  # refused with its number
    are_files = all(
        name == os.path.basename(name) and type(one["size"]) is int and type(one["sha256"]) is list
        for name, one in content["files"].items()
    )
    is_state = isinstance(content["state"]["optimizer"], dict)
    is_state &= content["state"]["step"] == content["step"]
    is_path = isinstance(content["resumed_from"], str | None)
    return type(content["step"]) is int and are_files and is_state and is_path


def find_damage(folder: Path, share: slice = slice(None)) -> str:
    """Return what is wrong with a checkpoint; "" if it is intact. A core hashes a GB per second.

    Args:
        folder: the checkpoint.
        share: of the pieces of its files, those to read.
    """

    def problem_of(piece: tuple[str, int]) -> str:
        name, number = piece
        path, listed = folder / name, files[name]
        if path.stat().st_size != listed["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {listed['size']}"
        is_intact = _hash_piece(path, number) == listed["sha256"][number]
        return "" if is_intact else f"{name} is damaged: its hash is not the one in manifest.json"

    try:
        files = read_manifest(folder)["files"]
        pieces = [(name, i) for name, listed in files.items() for i in range(len(listed["sha256"]))]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            return next(filter(None, pool.map(problem_of, pieces[share])), "")
    except (ValueError, OSError) as error:
        return str(error)


def try_saving(folder: Path) -> None:
    """Do once in a folder what a save does there; a few milliseconds on a local disk.

    Raises:
        ConfigError: an operation fails, so that no save could work.
    """
    # names that a later start removes, if this one is killed here
    trial, renamed = folder / ".step_0.partial", folder / ".step_0.removed"
    old, new = trial / "old", trial / "new"
    operations: dict[str, Callable[[], object]] = {
        "make a folder": trial.mkdir,
        "write a file and fsync it": lambda: write_atomically(old, "tried"),
        "replace a file": lambda: (new.touch(), os.replace(new, old)),
        "fsync a folder": lambda: flush_to_disk(trial),
        "rename a folder": lambda: os.replace(trial, renamed),
        "remove a folder": lambda: shutil.rmtree(renamed),
    }
    discard(trial)
    discard(renamed)
    try:
        for operation, do in operations.items():
            with writing(folder, f", so no save would work, which has to {operation} there"):
                do()
    finally:
        discard(trial)


def complete(temporary: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder whose files are on disk, and rename it to its final name."""
    write_atomically(temporary / "manifest.json", manifest_text(manifest))
    flush_to_disk(temporary)
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)


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
    for path in temporary.iterdir():
        flush_to_disk(path)
    flush_to_disk(temporary)
    before = folder.with_name(f".{folder.name}.before")
    # on NFS a file that somebody has open stays, as .nfs<number>, and so does its folder
    for left in folder.parent.glob(f"{before.name}*"):
        discard(left)
    if os.path.lexists(before):
        os.replace(before, unused_name(before))
    if folder.is_symlink() or folder.is_file():
        aside = unused_name(folder)
        folder.rename(aside)
        logger.warning("%s is no folder of this run: moved aside to %s", folder, aside.name)
    elif folder.exists():
        try:
            os.replace(folder, before)
        except OSError as error:
            if error.errno not in BUSY:
                raise
            _replace_files(temporary, folder)  # somebody on another host keeps the folder busy
            return
    os.replace(temporary, folder)
    flush_to_disk(folder.parent)
    discard(before)


def _replace_files(temporary: Path, folder: Path) -> None:
    """Replace the files in a folder one by one; after a kill in between they are written again."""
    names = {path.name for path in temporary.iterdir()}
    for name in names:
        os.replace(temporary / name, folder / name)
    for path in folder.iterdir():
        if path.name not in names:
            discard(path)
    flush_to_disk(folder)
    discard(temporary)
