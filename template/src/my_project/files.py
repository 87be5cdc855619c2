"""Open and write files safely, read JSON and YAML, define errors that users can fix.

A file is written under a temporary name, flushed to disk and renamed. This module imports no other
module of the project.
"""

import errno
import json
import logging
import math
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import IO, Any, TypeAlias, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
logger = logging.getLogger(__name__)


class ConfigError(ValueError):
    """An error that the user can fix; it names value, limit and remedy, and shows no traceback."""

    exit_code = 2  # a retry would fail in the same way


class FormatError(ConfigError):
    """A checkpoint was saved by another version of this project."""


class TransientError(ConfigError):
    """An error that may go away without a change, so a scheduler tries again."""

    exit_code = 1


# the same call may work later: storage does not answer, or too many files are open
UNANSWERED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}


# ---- untrusted files -----------------------------------------------------------------------------
MAX_BYTES = 1 << 28  # maximum size of a file that is read whole
MAX_YAML_BYTES = 1 << 22  # a file of this size is parsed in about a second
MAX_LINE_BYTES = 1 << 24


def open_own(
    path: Path | str, mode: str = "rb", *, follow: bool = False, buffering: int = -1
) -> IO[bytes]:
    """Open a regular file of a run folder, in a binary mode.

    Somebody else may have made the folder: a link could lead to a file outside it, which a write
    would change or create, and opening a pipe would block. Links are allowed for the folder itself
    and for the folders in it.

    Args:
        path: the file.
        mode: a binary mode of `open`.
        follow: whether to follow a link, as for exports: the Hub's cache consists of links.
        buffering: as for `open`.

    Raises:
        OSError: it is not a regular file.
    """

    def opener(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        problem = OSError(errno.EINVAL, "it is not a regular file", str(path))
        try:
            descriptor = os.open(name, flags, 0o666)
        except OSError as error:  # a link, a pipe without a reader, a folder
            is_other = error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR)
            raise (problem if is_other else error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise problem
        return descriptor

    return open(path, mode, buffering, opener=opener)


def read_own(path: Path | str, *, follow: bool = False, most: int = MAX_BYTES) -> bytes:
    """Read a whole file of a run folder, as `open_own` opens it.

    Raises:
        OSError: it is not a regular file, or has more than `most` bytes.
    """
    with open_own(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        return file.read()


# ---- JSON and YAML -------------------------------------------------------------------------------
def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old text or the new."""
    # a random name: processes on other hosts, and threads, may write the file at this moment
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure can leave an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a JSON object; return {} for a missing or damaged file. For `follow` see open_own."""
    try:
        content = json.loads(read_own(path, follow=follow))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


hints_of_fields = cache(get_type_hints)  # it takes 0.1 ms per class


def from_object(kind: type[T], content: Json, *, is_strict: bool = True) -> T:
    """Return a dataclass filled from a JSON object; unknown fields of the object are ignored.

    Args:
        kind: the dataclass.
        content: the object, which may be damaged or untrusted.
        is_strict: refuse a value of a wrong type; otherwise its field gets the default.

    Raises:
        TypeError: the content is not an object, or lacks a field that has no default.
    """
    fields, values = {}, convert(content, dict)
    for name, hint in hints_of_fields(kind).items():
        if name in values:
            try:
                fields[name] = convert(values[name], hint)
            except TypeError:
                if is_strict:
                    raise
    return kind(**fields)


def convert(value: Json, hint: Any) -> Any:
    """Convert a value of a JSON file to a type: a list to a tuple, an object to a dataclass.

    Raises:
        TypeError: the value does not fit the type.
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        for part in parts:
            with suppress(TypeError):
                return convert(value, part)
    elif isinstance(kind, type) and is_dataclass(kind):
        return from_object(kind, value)
    elif kind is tuple and isinstance(value, list):
        return tuple(convert(item, parts[0]) for item in value)
    elif isinstance(value, dict) and kind is dict:
        return {name: convert(item, parts[1]) for name, item in value.items()} if parts else value
    elif type(value) is kind or (kind is float and is_number(value)):
        return value
    raise TypeError(f"{type(value).__name__} is not {hint}")


def finite(values: Mapping[str, T]) -> dict[str, T | None]:
    """Replace NaN and infinities, which JSON lacks, with None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def unused_name(path: Path, suffix: str = "old") -> Path:
    """Return an unused path beside a file or folder, with this suffix and a number."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{suffix}-{number}")):
        number += 1
    return aside


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = 0.2) -> bool:
    """Wait until a condition is true; return False if it is still false after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(poll_seconds)
    return is_true


@contextmanager
def writing(folder: Path, consequence: str = "") -> Iterator[None]:
    """Turn an OSError of a write (folder read-only, disk full) into a ConfigError.

    If the storage does not answer, it becomes a TransientError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in UNANSWERED:
            raise TransientError(
                f"{folder} cannot be written to now ({error}){consequence}: start again; if the"
                " error stays, check this storage."
            ) from error
        raise ConfigError(
            f"{folder} cannot be written to ({error}){consequence}: free disk space there, get"
            " write permission, or choose another --runs_folder."
        ) from error


def temporary_folder() -> Path:
    """Return this user's temporary folder; create it if necessary, closed to others."""
    folder = Path(tempfile.gettempdir(), f"{__name__.partition('.')[0]}-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # for a link: the link's owner, not its target's
        raise ConfigError(f"{folder} belongs to another user; remove it, or set TMPDIR.")
    return folder


SOCKET = "/pymp-12345678/listener-12345678"  # a path below the folder for temporary files
SOCKET_BYTES = 103 if sys.platform == "darwin" else 107  # the maximum length of a socket's path


def check_temporary_folder(*, has_workers: bool) -> None:
    """Refuse a folder for temporary files with which a run cannot start.

    Args:
        has_workers: whether loader workers will send tensors, for which multiprocessing makes
            sockets in that folder. Without the sockets, the workers send nothing, and training
            hangs.

    Raises:
        ConfigError: there is no such folder, or its path is too long.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            "there is no folder for temporary files (TMPDIR, /tmp and /var/tmp are missing,"
            " read-only or full): mount one, or set TMPDIR to one that can be written to."
        ) from error
    length, limit = len(os.fsencode(folder)), SOCKET_BYTES - len(SOCKET)
    if has_workers and length > limit:
        raise ConfigError(
            f"the folder for temporary files has a path of {length} bytes ({folder}); the limit is"
            f" {limit} with loader workers: set TMPDIR to a shorter one, or batches.workers to 0."
        )


MAX_YAML_ALIASES = 50  # a few lines with ten aliases each can expand to more than fits in memory


def refuse_repeated_keys(root: Any) -> None:
    """Refuse a repeated key in a YAML node: YAML would silently keep only its last value.

    Raises:
        ValueError: a mapping has the same key twice.
    """
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue  # a scalar, or a node that an alias repeats
        seen.add(id(node))
        lines: dict[tuple[str, str], int] = {}
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            nodes.append(value)
            if key is None or not isinstance(key.value, str) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if first := lines.get((key.tag, key.value)):
                raise ValueError(f"{key.value} is in line {first} and again in line {line}")
            lines[key.tag, key.value] = line


def read_yaml(path: Path, *, follow: bool = True) -> dict[str, Any]:
    """Read a YAML file with settings.

    Args:
        path: the file.
        follow: whether to follow a link, as in the user's own configs/ (see open_own).

    Raises:
        ConfigError: the file cannot be read, has too many aliases or a repeated key, or is not a
            mapping.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_own(path, follow=follow, most=MAX_YAML_BYTES).decode()
        aliases = sum(isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, loader))
        if aliases > MAX_YAML_ALIASES:
            raise ValueError(f"it has {aliases} aliases; the limit is {MAX_YAML_ALIASES}")
        refuse_repeated_keys(yaml.compose(text, loader))
        settings = yaml.load(text, loader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{path} holds no named settings, but a value of type {type(settings).__name__}."
        )
    return settings


def is_number(value: Json) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a number that a float can represent."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 1e308)


def flush_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder (for its entries) if the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a file or folder with one of our temporary names; for a symlink, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
