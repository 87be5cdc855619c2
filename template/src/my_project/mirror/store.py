"""What a mirror is: a folder of an object store, with the files of a run.

    <checkpoints.mirror>/<run_name>/
      checkpoints/step_00000100/   as in the run folder; its manifest.json is uploaded last
      best/, export/               best.json and export.json list their files, and come last
      metrics/                     metrics.jsonl in parts: a save uploads what is new
      config.yaml, run.json, status.json, starts.jsonl, starts/

Any URL that fsspec knows is a mirror; fsspec is imported when one is given.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ..config import Config
from ..files import ConfigError, TransientError, flush_to_disk
from ..run_files import step_of
from ..safety.redaction import mask

FOLDERS = ("best", "export")
BLOCK_BYTES = 16 << 20  # of one request; S3 takes 10,000 for an object
THREADS = 4  # that transfer files of a folder
PARTIAL = ".partial"


class Store:
    """A folder of an object store. Names are relative to it, with slashes."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet.

        Args:
            url: of the folder, of any kind that fsspec knows.

        Raises:
            ConfigError: it is of another kind, or a package is missing.
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoints.mirror {self.url} cannot be used: {error}. s3:// needs the extra s3"
                " of this project, gs:// gcs, az:// azure (pip install -e '.[s3]')."
            ) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        if self.is_local:
            self.fs.auto_mkdir = True

    @contextmanager
    def _errors(self, *, may_be_missing: bool = True) -> Iterator[None]:
        """Turn what the libraries of stores raise into an OSError without secrets.

        Args:
            may_be_missing: raise FileNotFoundError as it is; else it means that there is no bucket.
        """
        try:
            yield
        except Exception as error:
            if may_be_missing and isinstance(error, FileNotFoundError):
                raise
            # botocore's, aiohttp's and others have no common class
            text = " ".join(str(error).split()) or type(error).__name__
            kind = PermissionError if isinstance(error, PermissionError) else OSError
            raise kind(f"{self.url}: {mask(text)}") from error

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of each file, by name."""
        at = f"{self.root}/{below}".rstrip("/")
        with self._errors():
            self.fs.invalidate_cache()
            try:
                listed = self.fs.find(at, detail=True)
            except FileNotFoundError:
                return {}
        skip = len(self.root) + 1
        names = {path[skip:]: int(about["size"] or 0) for path, about in listed.items()}
        return {name: size for name, size in names.items() if is_safe(name)}

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it cannot be read.
        """
        with self._errors():
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, content: bytes | Path) -> None:
        """Replace a file.

        Args:
            name: of the file.
            content: of it, or the file that is copied.

        Raises:
            FileNotFoundError: there is no such local file.
            OSError: it cannot be written, or has another size afterwards.
        """
        target = f"{self.root}/{name}"
        at = f"{target}{PARTIAL}" if self.is_local else target  # others replace atomically
        with content.open("rb") if isinstance(content, Path) else BytesIO(content) as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
            with self._errors(may_be_missing=False):
                if size <= BLOCK_BYTES:
                    self.fs.pipe_file(at, source.read())
                else:
                    with self.fs.open(at, "wb", block_size=max(BLOCK_BYTES, size // 9000)) as file:
                        shutil.copyfileobj(source, file, BLOCK_BYTES)
                if (there := self.fs.info(at)["size"]) != size:
                    raise OSError(f"{name} has {there} bytes there, not {size}")
                if self.is_local:
                    self.fs.mv(at, target)

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file into a local one, and flush it to disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self.fs.get_file(f"{self.root}/{name}", str(path))
        flush_to_disk(path)

    def remove(self, *names: str) -> None:
        """Remove files, one after the other; one that is gone is passed over."""
        for name in names:
            with self._errors(), suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")

    def move(self, names: list[str], old: str, new: str) -> None:
        """Move files from below one name to below another; those that complete a folder first."""
        for name in names:
            with self._errors():
                self.fs.cp_file(f"{self.root}/{name}", f"{self.root}/{new}{name[len(old) :]}")
        self.remove(*sorted(names, key=lambda name: not name.endswith(".json")))


def is_safe(name: str) -> bool:
    """Return whether a name leads to a place below the folder that it is joined to."""
    parts = name.split("/")
    return not any(p in ("", ".", "..") or "\\" in p for p in parts) and not name.endswith(PARTIAL)


def transfer(function: Any, *arguments: Any) -> None:
    """Call a function for each file, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(function, *arguments))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore


def is_file_with(path: Path, digest: str) -> bool:
    """Return whether a file is there, with this SHA-256."""
    return path.is_file() and sha256_of(path) == digest


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint."""
    return run_folder / "checkpoints" / f"step_{step:08d}"


def remote_steps(names: dict[str, int]) -> list[int]:
    """Return the steps of the complete checkpoints among the files of a mirror, oldest first."""
    folders = [name.split("/") for name in names if name.endswith("/manifest.json")]
    steps = [step_of(Path(parts[1])) for parts in folders if len(parts) == 3]
    return sorted(step for step in steps if step >= 0)


# ---- the records, in parts -----------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of metrics.jsonl: an object of the mirror, all that it is stands in its name."""

    number: int  # of the upload; a later one replaces what it overlaps
    begin: int  # its first byte
    size: int  # in bytes
    digest: str  # of its bytes

    @property
    def name(self) -> str:
        """Return its name in the mirror."""
        return f"metrics/{self.number:08d}-{self.begin}-{self.size}-{self.digest}.jsonl"

    @property
    def end(self) -> int:
        """Return the byte behind its last one."""
        return self.begin + self.size


PART = re.compile(r"metrics/(\d+)-(\d+)-(\d+)-([0-9a-f]{64})\.jsonl")


def chain(names: dict[str, int]) -> list[Part]:
    """Return the parts that make up the newest metrics.jsonl of a mirror, in order.

    An upload that was interrupted leaves parts that are not among them.
    """
    found = [match.groups() for match in map(PART.fullmatch, names) if match]
    parts = [Part(number=int(n), begin=int(b), size=int(s), digest=d) for n, b, s, d in found]
    result: list[Part] = []
    for part in sorted(parts, key=lambda part: part.number, reverse=True):
        if not result or part.end == result[-1].begin:
            result.append(part)
    return result[::-1] if result and result[-1].begin == 0 else []


def without_small(parts: list[Part], size: int) -> list[Part]:
    """Return the parts that stay when a file has grown to a size: what follows them is a new part.

    A part is merged with the new one while it is not larger, so that there are few of them, and a
    byte is uploaded again as often as the file doubles.
    """
    kept = [*parts]
    while kept and kept[-1].size <= size - kept[-1].end:
        kept.pop()
    return kept


def is_part_of(file: IO[bytes], part: Part) -> bool:
    """Return whether a file holds a part."""
    file.seek(part.begin)
    return hashlib.sha256(file.read(part.size)).hexdigest() == part.digest


def parsed(content: bytes) -> dict[str, Any]:
    """Return a JSON object; {} for what is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}


def url_of(config: Config) -> str:
    """Return the URL of a run in its mirror."""
    return f"{config.checkpoints.mirror}".rstrip("/") + f"/{config.run_name}"


@contextmanager
def refused_without(store: Store) -> Iterator[None]:
    """Turn an error of a store into one that ends a start, which cannot do without."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(
            f"checkpoints.mirror {error}. Set the credentials of the store in the environment."
        ) from error
    except OSError as error:
        raise TransientError(
            f"checkpoints.mirror {store.url} cannot be used ({error}), so nobody knows what the run"
            " has saved there: see that the bucket exists and can be reached, or leave"
            " checkpoints.mirror out."
        ) from error
