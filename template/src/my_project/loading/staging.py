"""Copy a run's data from slow shared storage to a disk of each node, once.

With `stage_to: $SLURM_TMPDIR` the recipe reads copies of the folders and files that its fields
name: those declared with field(metadata={"staged": True}) whose path exists. One process of each
node copies, many files at a time, while the others wait. A file gets its name when its copy was
read back and has the hash of the original, so what is there after a restart is right and stays;
what has changed since, by size or time, is copied again.
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
from ..stacks import progress_reported

logger = logging.getLogger(__name__)
FILES_AT_A_TIME = 16  # network storage is slow by the file, and serves many at once
BLOCK_BYTES = 1 << 22


def staged(recipe: Any, where: str) -> Any:
    """Return the recipe with its data on this node's disk.

    Args:
        recipe: a dataclass.
        where: a folder of this node; environment variables in it are filled in.

    Raises:
        ConfigError: there is no such variable, nothing to copy, or not enough room.
    """
    folder = os.path.expandvars(where)
    if "$" in folder:
        raise ConfigError(
            f"stage_to is {where}, but the environment has no such variable here; give a folder on"
            " a disk of each node, or null to read the data where it lies."
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
    """Bring a copy of a file or folder up to date; return where it is."""
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:12]
    target = folder / f"staged_{name}" / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    checked = target.parent / f".checked_{launch_mark()}"
    with FileLock(target.parent / ".lock"):
        if not checked.exists():
            for mark in target.parent.glob(".checked_*"):  # of other launches
                mark.unlink()
            with progress_reported(f"copying {source} to {folder}"):
                update(source, target)
            checked.touch()
    return target


def launch_mark() -> str:
    """Return what the processes that one launcher has started on this node have in common.

    The pid alone comes again: in a container the launcher is number 1 each time.
    """
    parent = psutil.Process().parent() or psutil.Process()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # in ticks since the boot; psutil adds the time of the boot, which moves with the clock
        started = Path(f"/proc/{parent.pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        boot, started = "", str(parent.create_time())
    return "_".join((boot, str(parent.pid), started))


def update(source: Path, target: Path) -> None:
    """Copy what is missing or has changed, and remove what the source has no more."""
    started = time.monotonic()
    wanted = dict(_files(source))
    for path in [path for path in target.rglob("*") if path.is_file()]:
        if path.relative_to(target) not in wanted:
            path.unlink()
    missing = {name: stat for name, stat in wanted.items() if not _is_copy(target / name, stat)}
    needed, free = sum(s.st_size for s in missing.values()), shutil.disk_usage(target.parent).free
    if needed > free:
        raise ConfigError(
            f"{source} needs {needed / 1e9:.1f} GB more in {target.parent}, which has"
            f" {free / 1e9:.1f} GB free; give stage_to a larger disk, or null."
        )
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        list(pool.map(lambda name: _copy_file(source / name, target / name), missing))
    logger.info(
        "%s: %d of %d files copied to %s, %.2f GB in %.0f s",
        source, len(missing), len(wanted), target, needed / 1e9, time.monotonic() - started,
    )  # fmt: skip


def _files(source: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """List the files below a folder, or the file itself, relative to the source."""
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
    """Copy a file; it gets its name and its time once it was read back and found equal."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    stat, digest = source.stat(), hashlib.sha256()
    with source.open("rb") as reader, partial.open("wb") as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
    with partial.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest.digest():
            raise OSError(f"the copy of {source} at {partial} came out different: a faulty disk?")
    os.utime(partial, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(partial, target)
