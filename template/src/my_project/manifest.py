"""Ensure that a checkpoint is complete or absent: manifests, hashes, atomic replacement of folders.

A folder is written under a temporary name, flushed to disk, given a manifest with the hash of each
file, and renamed. So a folder under its final name is complete, and damage is detected.
"""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from .files import (
    UNANSWERED,
    FormatError,
    Json,
    discard,
    flush_to_disk,
    open_own,
    read_own,
    unused_name,
    write_atomically,
    writing,
)
from .run_files import checkpoint_step

FORMAT = 1  # the format of checkpoints
UNREADABLE = "cannot be read now"  # see find_damage
HASHING_THREADS = 4


class Manifest(TypedDict):
    """The content of a manifest."""

    format: int
    step: int
    files: dict[str, str]  # the SHA-256 of each file by name
    resumed_from: str | None  # the --resume path from which the run began
    state: dict[str, Any]  # what the checkpoint holds besides tensors
    provenance: NotRequired[dict[str, Json]]  # where the checkpoint comes from


def manifest_text(content: Manifest) -> str:
    """Return the text of a manifest, with a hash of its own content."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"manifest": content, "sha256": digest})


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: the manifest is missing or damaged.
        FormatError: the manifest has a different format.
        OSError: the manifest cannot be read.
    """
    path = folder / "manifest.json"
    if not folder.exists():
        raise ValueError("it does not exist")
    if (folder / "run.json").is_file():
        raise ValueError("it is a run folder; the checkpoints of a run are in its checkpoints/")
    if not path.is_file():
        raise ValueError("it has no manifest.json, so it is not a complete checkpoint")
    try:
        text = read_own(path, follow=True).decode()
        content: Manifest = json.loads(text)["manifest"]
        if text != manifest_text(content):
            raise ValueError
        version, step = content["format"], content["step"]
        if version == FORMAT:
            is_valid = type(step) is int and isinstance(content["files"], dict)
            is_valid &= isinstance(content["state"], dict) and content["state"].get("step") == step
            if not (is_valid and isinstance(content["resumed_from"], str | None)):
                raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("manifest.json is damaged") from None
    if version != FORMAT:
        raise FormatError(
            f"{folder} was saved by another version of this project (format {version}, this code"
            f" reads {FORMAT}): continue with that version, whose commit is in run.json, or start"
            " again with --resume never or another --run_name."
        )
    if checkpoint_step(folder) not in (-1, step):
        raise ValueError(f"its manifest.json has step {step}")
    return content


def find_damage(folder: Path, share: slice = slice(None)) -> str:
    """Return what is wrong with a checkpoint; "" if it is intact. One core hashes 1 GB per second.

    If the storage does not answer, the result begins with UNREADABLE: the files may be intact.

    Args:
        folder: the checkpoint.
        share: which of the checkpoint's files to check, in the order of their names.
    """

    def check_file(name: str) -> str:
        with open_own(folder / name, follow=True) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore
        is_intact = digest == hashes[name]
        return "" if is_intact else f"{name} is damaged: its hash is not the one in manifest.json"

    try:
        hashes = read_manifest(folder)["files"]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            return next(filter(None, pool.map(check_file, sorted(hashes)[share])), "")
    except (ValueError, LookupError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in UNANSWERED:
            return f"{UNREADABLE} ({error})"
        return str(error).removesuffix(".")  # a FormatError ends with it, but callers append text


def try_saving(folder: Path) -> None:
    """Try each operation of a save in a folder; on a local disk, this takes a few milliseconds.

    Raises:
        ConfigError: an operation fails, so no save would work.
    """
    # if this start is killed here, a later start removes folders with these names
    trial, renamed = folder / ".step_0.partial", folder / ".step_0.removed"
    discard(trial)
    discard(renamed)
    try:
        with writing(folder, ", so no save would work"):
            trial.mkdir()
            for text in ("written", "replaced"):
                write_atomically(trial / "file", text)
            put_in_place(trial, renamed)
            shutil.rmtree(renamed)
    finally:
        discard(trial)
        discard(renamed)


def complete(temporary: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose files are on disk, then give it its final name."""
    write_atomically(temporary / "manifest.json", manifest_text(manifest))
    put_in_place(temporary, folder)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Replace the previous folder with a new one, whose files have been flushed to disk."""
    flush_to_disk(temporary)
    # an unused name, since an older folder may remain: NFS keeps removed files that are still open
    before = unused_name(folder.with_name(f".{folder.name}"), "before")
    if folder.is_symlink() or folder.is_file():
        os.replace(folder, unused_name(folder))  # no run makes a link or file here: keep it
    elif folder.exists():
        os.replace(folder, before)
    try:
        os.replace(temporary, folder)
    except OSError:
        with suppress(OSError):
            os.replace(before, folder)
        raise
    flush_to_disk(folder.parent)
    discard(before)
