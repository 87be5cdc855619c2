"""Atomic writes of files and folders, JSON, YAML, records, manifests. Imports no other module.

A folder is written under a temporary name, flushed to disk, given a manifest with the size and hash
of each file, and renamed: a folder under its final name is complete, and damage is detected.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import IO, Any

logger = logging.getLogger(__name__)


class ConfigError(ValueError):
    """An error that the user can fix: value, limit and remedy. Shown without a traceback."""

    exit_code = 2  # a retry would fail in the same way


class FormatError(ConfigError):
    """A checkpoint was saved by another version of this project."""


class TransientError(ConfigError):
    """An error that may go away without a change, so that a scheduler tries again."""

    exit_code = 1


# ---- untrusted files -----------------------------------------------------------------------------
MOST_BYTES = 1 << 28  # of a file that is read whole
MOST_YAML_BYTES = 1 << 22  # which takes about a second
MOST_LINE_BYTES = 1 << 24


def open_own(
    path: Path | str, mode: str = "rb", *, follow: bool = False, buffering: int = -1
) -> IO[bytes]:
    """Open a regular file of a run folder, in a binary mode.

    Somebody else may have made the folder: a link would lead to a file outside it, which a write
    would change or create, and a pipe would never answer. The folder itself may be a link, and so
    may the folders in it.

    Args:
        path: of the file.
        mode: of `open`.
        follow: read a link too; of an export, since the Hub's cache consists of links.
        buffering: of `open`.

    Raises:
        OSError: it is something else than a regular file.
    """

    def opener(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        problem = OSError(errno.EINVAL, "it is not a regular file", str(path))
        try:
            descriptor = os.open(name, flags, 0o666)
        except OSError as error:  # a link; a pipe, to be written; a folder
            is_other = error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR)
            raise (problem if is_other else error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise problem
        return descriptor

    return open(path, mode, buffering, opener=opener)


def read_own(path: Path | str, *, follow: bool = False, most: int = MOST_BYTES) -> bytes:
    """Read a whole file of a run folder, as `open_own` opens it.

    Raises:
        OSError: it is not a regular file, or has more than so many bytes.
    """
    with open_own(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        return file.read()


def printable(text: str, keep: str = "") -> str:
    """Replace characters that are not printable, such as those that control a terminal."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def say(*lines: object, to: Any = None) -> None:
    """Print untrusted lines without characters that control the terminal."""
    text = printable("\n".join(map(str, lines)), keep="\n\t")
    print(text, file=to or sys.stdout, flush=True)


# ---- JSON and YAML -------------------------------------------------------------------------------
def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process with the same ID, or an untrusted link
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power failure can leave an empty file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a JSON object; return {} for a missing or damaged file. For `follow` see open_own."""
    try:
        content = json.loads(read_own(path, follow=follow))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON lacks, with None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


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
def writing(folder: Path, consequence: str = "") -> Iterator[None]:
    """Turn an OSError of a write (read-only, full, not a folder) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error}){consequence}: free disk space there, get"
            " write permission, or choose another --runs_folder."
        ) from error


SOCKET = "/pymp-12345678/listener-12345678"  # in the folder for temporary files
SOCKET_BYTES = 103 if sys.platform == "darwin" else 107  # of the path of a socket


def check_temporary_folder(*, has_workers: bool) -> None:
    """Refuse a folder for temporary files with which nothing can start.

    Args:
        has_workers: whether loader workers will send tensors, for which multiprocessing makes
            sockets there. Where it cannot, they send nothing, and training hangs.

    Raises:
        ConfigError: there is none, or its name is too long.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            "there is no folder for temporary files (TMPDIR, /tmp and /var/tmp are missing,"
            " read-only or full): mount one, or let TMPDIR name one that can be written to."
        ) from error
    length, limit = len(os.fsencode(folder)), SOCKET_BYTES - len(SOCKET)
    if has_workers and length > limit:
        raise ConfigError(
            f"the folder for temporary files has a name of {length} bytes ({folder}), but may have"
            f" {limit} with loader workers: let TMPDIR name another, or set batches.workers to 0."
        )


MAX_YAML_ALIASES = 50  # a few lines of ten each can stand for more values than memory holds


def read_yaml(path: Path, *, follow: bool = True) -> dict[str, Any]:
    """Read a YAML file of any settings.

    Args:
        path: of the file.
        follow: read a link too, as in the user's own configs/ (see open_own).

    Raises:
        ConfigError: the file cannot be read, has too many aliases, or is not a mapping.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_own(path, follow=follow, most=MOST_YAML_BYTES).decode()
        aliases = sum(isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, loader))
        if aliases > MAX_YAML_ALIASES:
            raise ValueError(f"it has {aliases} aliases, but may have {MAX_YAML_ALIASES}")
        settings = yaml.load(text, loader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}, not named settings.")
    return settings


# ---- the run folder -----------------------------------------------------------------------------
RUN_FORMAT = 2  # of a run folder, as run.json states it; docs/run-folder.md says what it means


STATUS = {  # the types of fields of status.json; of the others any is shown as text
    **dict.fromkeys(("outcome", "reason", "note"), str),
    **dict.fromkeys(("step", "steps", "patience"), int),
    **dict.fromkeys(("seconds", "first_step_time", "from_step"), (int, float, NoneType)),
    **dict.fromkeys(("result", "trackers", "failure", "goodput"), dict),
}


def read_status(folder: Path) -> dict[str, Any]:
    """Read status.json, without fields of other types; return {} for a missing or damaged file."""
    with suppress(OSError):
        os.listdir(folder)  # makes a network file system refresh its cache
    status = read_json(folder / "status.json")
    status = {k: value for k, value in status.items() if isinstance(value, STATUS.get(k, object))}
    if "result" in status:
        results = status["result"].items()
        status["result"] = {k: value for k, value in results if value is None or is_number(value)}
    for name, shares in [*status.get("goodput", {}).items()]:
        if isinstance(shares, dict) and not all(map(is_number, shares.values())):
            del status["goodput"][name]
    return status


def lock_of(folder: Path) -> Path:
    """Return the file that a launch locks: in the run folder, which may have several paths."""
    return folder / ".lock"


def has_lock(file: Any, command: int) -> bool:
    """Ask the kernel whether a file is locked; Linux.

    Args:
        file: open.
        command: F_GETLK, for the locks of other processes, or F_OFD_GETLK, for this one's too.

    Raises:
        OSError: it cannot tell, as on a file system without locks.
    """
    flock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return struct.unpack("hhqqi0q", fcntl.fcntl(file, command, flock))[0] != fcntl.F_UNLCK


# Appended to or updated in a run, which would go on without them if they could not be opened.
NEEDED = ("metrics.jsonl", "starts.jsonl", "status.json")


# ---- metrics.jsonl -------------------------------------------------------------------------------
def each_record(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, reading line by line; {} for a damaged line.

    A last line cut off by a kill is no damage.
    """
    with open_own(path) as file:
        while line := file.readline(MOST_LINE_BYTES):
            record = parse_record(line)
            if record or line.endswith(b"\n") or not line.startswith(b"{"):
                yield record


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line; {} if it holds none."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record and is_number(record.get("time", 0)) else {}


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_like(value: Any, types: Mapping[str, Any]) -> bool:
    """Return whether a value of a JSON file is an object whose fields have these types."""
    is_object = isinstance(value, dict)
    return is_object and all(isinstance(value.get(name), kind) for name, kind in types.items())


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name, those of the recipe as they are typed: recipe.width."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"  # an untrusted key may be a number
        name = "recipe" if name == "recipe.init_args" else name
        if name == "recipe.class_path":
            found["recipe"] = value
        elif isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        elif value != {} or name != "recipe":  # a recipe without arguments
            found[name] = value
    return found


def kind_of(record: dict[str, Any]) -> str:
    """Return the kind of a record (docs/run-folder.md)."""
    return str(record.get("kind"))


def processes(count: int) -> str:
    """Return a number of processes in words: "1 process", "2 processes"."""
    return f"{count} process{'es' * (count != 1)}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 41 s, 3 min 5 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_metric(value: float | None) -> str:
    """Format a metric: four decimals, or none where it is large."""
    if value is None:
        return "not a number"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.0f}"


def shortened(text: str, length: int) -> str:
    """Return at most so many characters of a text; what is cut off is marked by "..."."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


FORMAT = 5  # of a checkpoint
BUSY = (errno.EBUSY, errno.ENOTEMPTY)  # a file in a folder is open on another host (NFS)
PIECE_BYTES = 64 << 20  # hashed by itself, so that ranks and threads share a large file
CHUNK_BYTES = 1 << 20  # read at once
HASHING_THREADS = 4
STEP_FOLDER = re.compile(r"step_(\d{8,})")


# ---- atomic folders ------------------------------------------------------------------------------
def flush_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder for its entries, which some file systems cannot do."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


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


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first, including damaged ones."""
    found = [p.parent for p in run_folder.glob("checkpoints/step_*/manifest.json")]
    return sorted((p for p in found if step_of(p) >= 0), key=step_of)


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
