"""Copy a run's data from slow shared storage to a disk of each node, once.

With `stage_to: $SLURM_TMPDIR` the recipe reads copies of the folders and files that its fields
name: fields declared with field(metadata={"staged": True}) whose path exists. One process of each
node copies, many files at a time, while the others wait. A copy gets its final name after it was
read back and its hash equals the original's, so copies survive a restart; a file whose size or
modification time has changed is copied again.
"""

import dataclasses
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from ..config import ConfigError
from ..stack_traces import progress_reported

logger = logging.getLogger(__name__)
FILES_AT_A_TIME = 16  # network storage is slow per file but serves many in parallel
BLOCK_BYTES = 1 << 22


def staged(recipe: Any, where: str) -> Any:
    """Return the recipe with its data on this node's disk.

    Args:
        recipe: a dataclass.
        where: a folder of this node; environment variables in it are expanded.

    Raises:
        ConfigError: a variable is not set, there is nothing to copy, or the disk is too small.
    """
    folder = os.path.expandvars(where)
    if "$" in folder:
        raise ConfigError(
            f"stage_to is {where}, but that variable is not set on this node; give a folder on a"
            " local disk of each node, or null to read the data in place."
        )
    copies = {}
    for field in dataclasses.fields(recipe):
        source = str(getattr(recipe, field.name))
        if field.metadata.get("staged") and os.path.exists(source):
            copies[field.name] = str(copy(Path(source).absolute(), Path(folder)))
    if not copies:
        raise ConfigError(
            f"stage_to is {where}, but {type(recipe).__name__} names no data to copy: no field with"
            ' metadata={"staged": True} holds a path that exists.'
        )
    return dataclasses.replace(recipe, **copies)


def copy(source: Path, folder: Path) -> Path:
    """Update the copy of a file or folder, and return its path."""
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
    target = folder / f"staged_{name}" / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    checked = target.parent / f".checked_{launch_mark()}"
    with FileLock(target.parent / ".lock"):
        if not checked.exists():
            for mark in target.parent.glob(".checked_*"):  # marks of other launches
                mark.unlink()
            with progress_reported(f"copying {source} to {folder}"):
                update(source, target)
            checked.touch()
    return target


def launch_mark() -> str:
    """Return an identifier of the launcher that started this process, unique on this node.

    The pid alone is not enough: in a container the launcher is always process 1.
    """
    parent = psutil.Process().parent() or psutil.Process()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # in ticks since boot; psutil's create_time changes when the clock is set
        started = Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        boot, started = "", str(parent.create_time())
    return "_".join((boot, str(parent.pid), started))


def update(source: Path, target: Path) -> None:
    """Copy missing and changed files, and remove files that the source no longer has."""
    started = time.monotonic()
    wanted = dict(_files(source))
    for path in [path for path in target.rglob("*") if path.is_file()]:
        if path.relative_to(target) not in wanted:
            path.unlink()
    missing = {name: stat for name, stat in wanted.items() if not _is_copy(target / name, stat)}
    needed = sum(stat.st_size for stat in missing.values())
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ConfigError(
            f"{source} needs {needed / 1e9:.1f} GB more in {target.parent}, which has"
            f" {free / 1e9:.1f} GB free; give stage_to a larger disk, or null."
        )
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        list(pool.map(lambda name: _copy_file(source / name, target / name), missing))
    logger.info(
        "%s: %d of %d files copied to %s, %.2f GB in %.0f s",
        source,
        len(missing),
        len(wanted),
        target,
        needed / 1e9,
        time.monotonic() - started,
    )


def _files(source: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files below a folder, or the file itself, relative to the source."""
    if source.is_file():
        yield Path(), source.stat()
    for folder, _, names in os.walk(source, followlinks=True):
        for name in names:
            path = Path(folder, name)
            yield path.relative_to(source), path.stat()


def _is_copy(path: Path, of: os.stat_result) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (there.st_size, there.st_mtime_ns) == (of.st_size, of.st_mtime_ns)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file; it gets its name and time after it was read back and its hash compared."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    stat, digest = source.stat(), hashlib.sha256()
    with source.open("rb") as reader, partial.open("wb") as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
    with partial.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest.digest():
            raise OSError(f"the copy of {source} at {partial} has another hash: check the disk")
    os.utime(partial, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(partial, target)
