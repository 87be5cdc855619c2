"""Read and write a mirror: a folder of an object store, with the files of a run.

    <checkpoints.mirror>/<run_name>/
      checkpoints/step_00000100/   as in the run folder; its manifest.json is uploaded last
      best/, export/               best.json and export.json, uploaded last, list their files
      metrics/                     metrics.jsonl in parts: a save uploads what is new
      config.yaml, run.json, status.json, starts.jsonl, starts/, evaluations.jsonl
      parts/                       shards of a save, on their way from other nodes to rank 0

Any URL that fsspec supports can be a mirror; fsspec is imported when one is given.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ..config import Config
from ..files import ConfigError, TransientError, flush_to_disk
from ..safety.redaction import mask

FOLDERS = ("best", "export")
BLOCK_BYTES = 16 << 20  # size of one request; S3 accepts 10,000 requests per object
THREADS = 4  # the number of threads that transfer the files of a folder
PARTIAL = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT)  # the errno of a full local disk; errors of a store have none
IN_CHECKPOINT = re.compile(r"(checkpoints/step_(\d{8,}))/([^/]+)")
PART = re.compile(r"metrics/(\d+)-(\d+)-(\d+)-([0-9a-f]{64})\.jsonl")


def find_files(fs: Any, folder: str) -> list[str]:
    """Return the paths of all files below a folder; [] if it does not exist.

    fsspec's own `find` also returns nothing for a folder that cannot be listed.
    """
    paths: list[str] = []
    with suppress(FileNotFoundError):
        for entry in fs.ls(folder, detail=True):
            if entry["type"] != "directory":
                paths.append(entry["name"])
            elif entry["name"].rstrip("/") != folder:  # some stores list the folder itself too
                paths += find_files(fs, entry["name"].rstrip("/"))
    return paths


class Store:
    """A folder of an object store. Names are relative to it, with slashes."""

    def __init__(self, url: str) -> None:
        """Store the URL; the first request connects.

        Args:
            url: the URL of the folder, with any protocol that fsspec supports.

        Raises:
            ConfigError: the protocol is unknown, or its package is missing.
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"the mirror {self.url} cannot be used: {error}. Install an extra of this"
                " project: s3 for s3://, gcs for gs://, azure for az:// (pip install -e '.[s3]')."
            ) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        is_generic = type(self.fs).find is AbstractFileSystem.find
        self.find = partial(find_files, self.fs) if is_generic else self.fs.find
        if self.is_local:
            self.fs.auto_mkdir = True

    @contextmanager
    def _errors(self, *, may_be_missing: bool = True) -> Iterator[None]:
        """Turn the exceptions of a store's library into an OSError without secrets.

        Args:
            may_be_missing: whether to raise a FileNotFoundError unchanged; otherwise it means that
                the bucket does not exist.
        """
        try:
            yield
        except Exception as error:
            is_missing = may_be_missing and isinstance(error, FileNotFoundError)
            if is_missing or (isinstance(error, OSError) and error.errno in FULL):
                raise
            # the exceptions of botocore, aiohttp and others have no common class
            text = " ".join(str(error).split()) or type(error).__name__
            refused = (PermissionError, *credential_errors())
            kind = PermissionError if isinstance(error, refused) else OSError
            raise kind(f"{self.url}: {mask(text)}") from error

    def names(self, below: str = "") -> list[str]:
        """Return the names of all complete files, or of those in a folder; see is_safe."""
        paths: list[str] = []
        with suppress(FileNotFoundError), self._errors():
            self.fs.invalidate_cache()
            paths = self.find(f"{self.root}/{below}".rstrip("/"))
        names = [path[len(self.root) + 1 :] for path in paths]
        return [name for name in names if is_safe(name)]

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the file cannot be read.
        """
        with self._errors():
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON object; {} if the file is missing or damaged."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            value = json.loads(self.read(name))
            return value if isinstance(value, dict) else {}
        return {}

    def write(self, name: str, content: bytes | Path) -> None:
        """Replace a file.

        Args:
            name: the name of the file.
            content: the new content, or the local file to copy.

        Raises:
            FileNotFoundError: there is no such local file.
            OSError: the file cannot be written, or has a different size afterward.
        """
        target = f"{self.root}/{name}"
        at = f"{target}{PARTIAL}" if self.is_local else target  # other stores replace atomically
        with content.open("rb") if isinstance(content, Path) else BytesIO(content) as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
            with self._errors(may_be_missing=False):
                if size <= BLOCK_BYTES:
                    self.fs.pipe_file(at, source.read())
                else:
                    with self.fs.open(at, "wb", block_size=max(BLOCK_BYTES, size // 9000)) as file:
                        shutil.copyfileobj(source, file, BLOCK_BYTES)
                if (stored := self.fs.info(at)["size"]) != size:
                    raise OSError(f"{name} has {stored} bytes in the store, not {size}")
                if self.is_local:
                    self.fs.mv(at, target)

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a local path, and flush it to disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self.fs.get_file(f"{self.root}/{name}", str(path))
        flush_to_disk(path)

    def remove(self, *names: str) -> None:
        """Remove files, one after the other, and what a killed `write` of them left.

        Missing files are ignored.
        """
        for name in names:
            for path in (name, f"{name}{PARTIAL}") if self.is_local else (name,):
                with suppress(FileNotFoundError), self._errors():
                    self.fs.rm_file(f"{self.root}/{path}")

    def move_aside(self) -> str:
        """Move all complete files to an unused URL beside this one, and return that URL.

        All files are copied and then removed. JSON files, which mark folders as complete, are
        removed first.
        """
        names, number = self.names(), 1
        while (aside := Store(f"{self.url}.old-{number}")).names():
            number += 1
        for name in names:
            with self._errors():
                self.fs.cp_file(f"{self.root}/{name}", f"{aside.root}/{name}")
        self.remove(*sorted(names, key=lambda name: not name.endswith(".json")))
        return aside.url


def is_safe(name: str) -> bool:
    """Return whether folder/name is a complete file inside the folder, whatever the folder."""
    parts = name.split("/")
    return not any(p in ("", ".", "..") or "\\" in p for p in parts) and not name.endswith(PARTIAL)


def transfer(function: Callable, *arguments: Iterable) -> None:
    """Call a function for each file, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(function, *arguments))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder, relative to the run's."""
    return f"checkpoints/step_{step:08d}"


def complete_steps(names: list[str]) -> list[int]:
    """Return the steps of the complete checkpoints among the files of a mirror, oldest first."""
    matches = map(IN_CHECKPOINT.fullmatch, names)
    return sorted(int(match[2]) for match in matches if match and match[3] == "manifest.json")


# ---- the records, in parts -----------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of metrics.jsonl: an object of the mirror, whose name contains all these fields."""

    number: int  # counts the uploads; a part replaces parts with lower numbers that it overlaps
    begin: int  # the offset of the part's first byte in metrics.jsonl
    size: int  # in bytes
    digest: str  # the SHA-256 of the part's bytes

    @property
    def name(self) -> str:
        """Return the name of the part's file."""
        return f"metrics/{self.number:08d}-{self.begin}-{self.size}-{self.digest}.jsonl"

    @property
    def end(self) -> int:
        """Return the offset after the part's last byte."""
        return self.begin + self.size


def parts_among(names: list[str]) -> list[Part]:
    """Return all parts among the files of a mirror, including replaced ones."""
    fields = [match.groups() for match in map(PART.fullmatch, names) if match]
    return [Part(number=int(n), begin=int(b), size=int(s), digest=d) for n, b, s, d in fields]


def chain(parts: list[Part]) -> list[Part]:
    """Return the parts that make up the newest metrics.jsonl of a mirror, in order.

    Replaced parts and leftovers of interrupted uploads are not among them.
    """
    result: list[Part] = []
    for part in sorted(parts, key=lambda part: part.number, reverse=True):
        if not result or part.end == result[-1].begin:
            result.append(part)
    return result[::-1] if result and result[-1].begin == 0 else []


def parts_to_keep(parts: list[Part], size: int) -> list[Part]:
    """Return the parts to keep when a file has grown to `size` bytes; a new part has the rest.

    A part that is no larger than the new part is merged into the new part. So there are few parts,
    and each time that a byte is uploaded again, its part is at least twice as large.
    """
    kept = [*parts]
    while kept and kept[-1].size <= size - kept[-1].end:
        kept.pop()
    return kept


def is_part_of(file: IO[bytes], part: Part) -> bool:
    """Return whether a file contains the bytes of a part."""
    file.seek(part.begin)
    return hashlib.sha256(file.read(part.size)).hexdigest() == part.digest


def url_of(config: Config) -> str:
    """Return the URL of a run in its mirror."""
    return f"{config.checkpoints.mirror}".rstrip("/") + f"/{config.run_name}"


def credential_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that imported libraries raise for missing credentials."""
    names = {
        "botocore.exceptions": "NoCredentialsError",
        "google.auth.exceptions": "DefaultCredentialsError",
    }
    return tuple(getattr(sys.modules[m], name) for m, name in names.items() if m in sys.modules)


@contextmanager
def store_needed(store: Store) -> Iterator[None]:
    """Turn a store's error into a ConfigError, where nothing can go on without the store."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(
            f"the mirror {error}: set the credentials of the store in the environment, or get"
            " permission."
        ) from error
    except OSError as error:
        if error.errno in FULL:
            raise ConfigError(
                f"{store.url} cannot be copied ({error}): free disk space."
            ) from error
        raise TransientError(
            f"the mirror {store.url} cannot be used ({error}): check that the bucket exists and can"
            " be reached. To train without a mirror, leave checkpoints.mirror out."
        ) from error
