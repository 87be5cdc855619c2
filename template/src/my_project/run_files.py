"""Read the files of a run folder, which may be damaged or untrusted.

docs/run-folder.md describes the files and their fields.
"""

import fcntl
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

from .failures import Failure
from .files import (
    MAX_LINE_BYTES,
    from_object,
    is_like,
    is_number,
    open_own,
    read_json,
    read_own,
    write_atomically,
)

RUN_FORMAT = 1  # of a run folder, in run.json; docs/run-folder.md explains it
BLOCK_BYTES = 1 << 16  # size of one read from the end of a file
ENDED = ("finished", "preempted")  # the outcomes after which no step has to be done again
NUMBER = (int, float)
LINE_TYPES = {  # the types of the fields of a line in starts.jsonl
    **dict.fromkeys(("event", "id"), str),
    "time": NUMBER,
    **dict.fromkeys(("first_step_time", "from_step", "step", "checkpoint"), (*NUMBER, NoneType)),
    **dict.fromkeys(("outcome", "cause", "settings"), (str, NoneType)),
    "micro_batch_size": (int, NoneType),
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json; a field of a wrong type gets its default."""

    outcome: str = ""
    step: int = 0
    steps: int = 0
    reason: str = ""
    nodes: str = ""
    first_step_time: float | None = None
    from_step: int | None = None
    seconds: float = 0.0
    paused_seconds: float = 0.0
    trackers: dict[str, str] = field(default_factory=dict)
    warnings: int = 0
    note: str | None = None
    result: dict[str, float | None] | None = None
    patience: int | None = None
    failure: Failure | None = None  # without frames and details
    goodput: dict[str, dict[str, float] | int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of status.json."""
        failure = self.failure and replace(self.failure, frames=(), details="").to_json()
        return vars(self) | {"failure": failure}

    @property
    def is_damaged(self) -> bool:
        """Return whether status.json is missing or damaged: each status has an outcome."""
        return not self.outcome

    @property
    def calendar(self) -> dict[str, float]:
        """Return the goodput over the time since the first launch; {} if it is not known."""
        goodput = (self.goodput or {}).get("calendar")
        return goodput if isinstance(goodput, dict) else {}


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The content of run.json; a field of a wrong type gets its default."""

    format: int = 0
    run: str = ""
    launch: str = ""
    begun_by: dict[str, int] | None = None
    hosts: tuple[str, ...] = ()
    numerics: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    fixed_settings: tuple[str, ...] | None = None  # those that were not at their defaults
    recipe_sha256: str | None = None
    command: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    folder: str = ""
    host: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        """Return whether run.json is missing or damaged: each start writes its token there."""
        return not self.launch


def local_folder(path: str) -> Path:
    """Return the folder that a command was given; for a URL, a local copy of that folder."""
    if "://" in path:  # of a mirror
        from .mirror.download import local_copy

        return local_copy(path)  # from a mirror
    return Path(path)


def refresh(folder: Path) -> None:
    """Make a network file system look up the files of a folder again."""
    with suppress(OSError):
        os.listdir(folder)


def read_status(folder: Path) -> Status:
    """Read status.json."""
    refresh(folder)
    return from_object(Status, read_json(folder / "status.json"), is_strict=False)


def write_status(folder: Path, status: Status) -> None:
    """Replace status.json."""
    write_atomically(folder / "status.json", json.dumps(status.to_json()) + "\n")


def read_info(folder: Path) -> RunInfo:
    """Read run.json."""
    return from_object(RunInfo, read_json(folder / "run.json"), is_strict=False)


def read_failure(path: Path) -> Failure | None:
    """Read an error file; None for a damaged one."""
    try:
        return replace(from_object(Failure, read_json(path)), source=path)
    except TypeError:
        return None


def read_failures(paths: Iterable[Path]) -> list[Failure]:
    """Read error files, without damaged ones."""
    return [failure for path in paths if (failure := read_failure(path))]


def lock_path(folder: Path) -> Path:
    """Return a launch's lock file: in the run folder, since the folder may have several paths."""
    return folder / ".lock"


def each_record(path: Path, kind: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, reading line by line; {} for a damaged line.

    A last line that was cut off by a kill is skipped.

    Args:
        path: the file.
        kind: skip lines that do not contain this string, without parsing them; "" skips none.
    """
    needed = json.dumps(kind).encode() if kind else b""
    with open_own(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if needed not in line:
                continue
            record = parse_record(line)
            if record or line.endswith(b"\n") or not line.startswith(b"{"):
                yield record


def each_record_backward(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield the records of a metrics.jsonl as each_record does, but the last one first.

    A run may have a million records, and a start needs few. Each record comes with the position and
    the bytes of its line.
    """
    with open_own(path) as file:
        begin = size = file.seek(0, os.SEEK_END)
        rest = b""  # the end of a line that begins in an earlier block
        while begin:
            # a line longer than a block is read in blocks of doubling size
            begin = max(0, (end := begin) - max(BLOCK_BYTES, len(rest)))
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).splitlines(keepends=True) or [b""]
            if not begin:
                rest, lines = b"", [rest, *lines]
            if len(rest) > MAX_LINE_BYTES:
                begin, rest, lines = 0, b"", [b""]  # damaged; earlier lines are not read
            start = begin + len(rest) + sum(map(len, lines))
            for line in reversed(lines):
                start -= len(line)
                record = parse_record(line)
                is_cut = start + len(line) == size and line.startswith(b"{") and line[-1:] != b"\n"
                if record or not is_cut:
                    yield start, line, record


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line; {} if there is none."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record and is_number(record.get("time", 0)) else {}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; the recipe's as on the command line, such as recipe.width."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"  # an untrusted key may be a number
        name = "recipe" if name == "recipe.init_args" else name
        if name == "recipe.class_path":
            named["recipe"] = value
        elif isinstance(value, dict) and value:
            named |= flat(value, f"{name}.")
        elif value != {} or name != "recipe":  # a recipe without arguments
            named[name] = value
    return named


def kind_of(record: dict[str, Any]) -> str:
    """Return the kind of a record (docs/run-folder.md)."""
    return str(record.get("kind"))


def checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint's name; -1 for another name."""
    match = re.fullmatch(r"step_(\d{8,})", folder.name)
    return int(match[1]) if match else -1


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first, including damaged ones."""
    folders = [p.parent for p in run_folder.glob("checkpoints/step_*/manifest.json")]
    return sorted((p for p in folders if checkpoint_step(p) >= 0), key=checkpoint_step)


def read_errors(folder: Path, launch: str) -> list[Failure]:
    """Read the error files of a launch (its token) from a run folder."""
    paths = (folder / "errors").glob("*_rank_*_step_*.json")
    return [failure for failure in read_failures(paths) if failure.launch == launch]


def is_locked(folder: Path) -> bool | None:
    """Return whether a launch holds the lock on a run folder; None if that cannot be found out.

    The kernel is asked (F_GETLK), so no lock is taken. The process that holds the lock must not
    call this: closing the file releases the lock.
    """
    if sys.platform != "linux":
        return None
    flock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_own(lock_path(folder)) as file:
            answer = struct.unpack("hhqqi0q", fcntl.fcntl(file, fcntl.F_GETLK, flock))
            return answer[0] != fcntl.F_UNLCK
    except FileNotFoundError:
        return False
    except OSError:  # no permission, or a file system without locks
        return None


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint; None if there is none."""
    return next(map(checkpoint_step, checkpoints(folder)[-1:]), None)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl, without damaged ones; [] if no launcher wrote any."""
    intact = []
    with suppress(OSError):
        for text in read_own(folder / "starts.jsonl").splitlines():
            with suppress(ValueError, LookupError, TypeError):
                line = json.loads(text)
                if is_like(dict.fromkeys(LINE_TYPES) | line, LINE_TYPES):
                    intact.append(line)
    return intact


def last_record(folder: Path) -> dict[str, Any]:
    """Return the last record of metrics.jsonl; {} if there is none."""
    with suppress(OSError):  # there are none yet, or the storage is gone
        for _, _, record in each_record_backward(folder / "metrics.jsonl"):
            if record:
                return record
    return {}


def records(folder: Path, kind: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl that are not damaged, of one kind or of all."""
    with suppress(OSError):  # there are none yet, or the storage is gone
        for record in each_record(folder / "metrics.jsonl", kind):
            if record and kind in ("", kind_of(record)):
                yield record


def each_start(folder: Path) -> list[dict[str, Any]]:
    """Return the starts in starts.jsonl by time, each with the fields of both of its lines.

    "began" and "checkpoint_before" come from the first line; "time" is when the start ended, or
    None if it is under way or its launcher was killed.
    """
    starts: dict[str, dict[str, Any]] = {}
    for line in lines(folder):
        if line["event"] == "start":
            before = {"began": line["time"], "checkpoint_before": line.get("checkpoint")}
            starts[line["id"]] = line | before | {"time": None, "first_step_time": None}
        elif line["id"] in starts:
            starts[line["id"]] |= line
    return sorted(starts.values(), key=lambda start: start["began"])
