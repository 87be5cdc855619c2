"""Read the files of a run folder, which may be damaged or untrusted.

docs/run-folder.md describes the files and their fields.
"""

import fcntl
import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from .failures import Failure
from .files import (
    MAX_LINE_BYTES,
    Json,
    from_object,
    is_number,
    open_own,
    read_json,
    read_own,
    write_atomically,
)

RUN_FORMAT = 1  # the format of a run folder, recorded in run.json (docs/run-folder.md)
BLOCK_BYTES = 1 << 16  # size of one read from the end of a file
ENDED = ("finished", "preempted")  # the outcomes that lose no step
Numerics: TypeAlias = dict[str, str | bool | int | None]  # see accelerator.numerics
MAX_STEP = 2**53  # a float represents every smaller step exactly


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json; if the file is missing or damaged, the outcome is "".

    A field whose value has a wrong type gets its default.
    """

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

    def to_json(self) -> dict[str, Json]:
        """Return the content of status.json."""
        failure = self.failure and replace(self.failure, frames=(), details="").to_json()
        return {**vars(self), "failure": failure}


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The content of run.json; if the file is missing or damaged, `launch` is "".

    A field whose value has a wrong type gets its default.
    """

    format: int = 0
    run: str = ""
    launch: str = ""
    begun_by: dict[str, int] | None = None
    hosts: tuple[str, ...] = ()
    numerics: Numerics = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    fixed_settings: tuple[str, ...] | None = None  # names of those not at their defaults
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


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of metrics.jsonl or evaluations.jsonl; a damaged line gives a negative step."""

    kind: str = ""
    step: int = -1  # the number of steps done
    epoch: float | None = None  # None: a stream, which has no epochs
    elapsed_seconds: float = 0.0  # over all starts
    time: float = 0.0  # seconds since 1970
    values: Mapping[str, Json] = field(default_factory=dict)  # the values of this kind, by name

    def to_json(self) -> dict[str, Json]:
        """Return the content of the line."""
        epoch = {} if self.epoch is None else {"epoch": self.epoch}
        ends = {"elapsed_seconds": self.elapsed_seconds, "time": self.time}
        return {"kind": self.kind, "step": self.step, **epoch, **self.values, **ends}

    @property
    def is_damaged(self) -> bool:
        """Return whether the line was damaged."""
        return self.step < 0

    def number(self, name: str, default: float = math.nan) -> float:
        """Return a value by name, or the default if it is not a number.

        A value that was not finite is stored as null.
        """
        value = self.values.get(name)
        return value if is_number(value) else default

    def texts(self, name: str) -> list[str]:
        """Return a value that is a list of texts; [] if it is missing or not a list."""
        value = self.values.get(name)
        return [*map(str, value)] if isinstance(value, list) else []

    def text(self, name: str) -> str:
        """Return a value by name; "" if it is missing or not a text."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True)
class StartLine:
    """A line of starts.jsonl: what is known when a start begins, or when it ends."""

    event: str
    id: str
    time: float  # seconds since 1970
    checkpoint: int | None = None
    launch: str = ""
    micro_batch_size: int | None = None
    settings: str | None = None
    first_step_time: float | None = None
    from_step: int | None = None
    step: int | None = None
    outcome: str | None = None
    cause: str | None = None


def local_folder(path: str) -> Path:
    """Return the folder that a command was given; for a URL, a local copy of that folder."""
    if "://" in path:  # the URL of a run in a mirror
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
    """Return the lock file. It is in the run folder, so all paths to the folder share the lock."""
    return folder / ".lock"


def each_record(path: Path, kind: str = "") -> Iterator[Record]:
    """Yield the records of a metrics.jsonl, including damaged records, reading line by line.

    If a kill cut off the last line, that line is skipped.

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
            if not record.is_damaged or line.endswith(b"\n") or not line.startswith(b"{"):
                yield record


def each_record_backward(path: Path) -> Iterator[tuple[int, bytes, Record]]:
    """Yield the records of a metrics.jsonl as each_record does, but the last one first.

    A run may have a million records, and a start needs few of them. The items are (position of the
    line, its bytes, the record).
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
                begin, rest, lines = 0, b"", [b""]  # a damaged line; stop reading here
            start = begin + len(rest) + sum(map(len, lines))
            for line in reversed(lines):
                start -= len(line)
                record = parse_record(line)
                is_cut = start + len(line) == size and line.startswith(b"{") and line[-1:] != b"\n"
                if not (record.is_damaged and is_cut):
                    yield start, line, record


def parse_record(line: bytes) -> Record:
    """Return the record in a line, which may be damaged."""
    try:
        values = json.loads(line.decode())
    except (ValueError, RecursionError):
        return Record()
    if not isinstance(values, dict):
        return Record()
    kind, step, epoch = values.pop("kind", ""), values.pop("step", -1), values.pop("epoch", None)
    elapsed, time = values.pop("elapsed_seconds", 0.0), values.pop("time", 0.0)
    are_numbers = is_number(time) and is_number(elapsed) and (epoch is None or is_number(epoch))
    if type(step) is not int or not 0 <= step < MAX_STEP or not are_numbers:
        return Record()
    return Record(
        kind=str(kind), step=step, epoch=epoch, elapsed_seconds=elapsed, time=time, values=values
    )


def flat(settings: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Return settings by dotted name; those of a recipe as on the command line: recipe.width."""
    named: dict[str, Json] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"  # an untrusted key may be a number
        name = "recipe" if name == "recipe.init_args" else name
        if name == "recipe.class_path":
            named["recipe"] = value
        elif isinstance(value, dict) and value:
            named |= flat(value, f"{name}.")
        elif value != {} or name != "recipe":  # not the empty init_args of a recipe
            named[name] = value
    return named


def checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint's name; -1 for any other name."""
    match = re.fullmatch(r"step_(\d{8,})", folder.name)
    return int(match[1]) if match else -1


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first, including damaged ones."""
    folders = [p.parent for p in run_folder.glob("checkpoints/step_*/manifest.json")]
    return sorted((p for p in folders if checkpoint_step(p) >= 0), key=checkpoint_step)


def read_errors(folder: Path, launch: str) -> list[Failure]:
    """Read the error files of the launch with this token from a run folder."""
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


def lines(folder: Path) -> list[StartLine]:
    """Return the lines of starts.jsonl, without damaged ones; [] if no launcher wrote any."""
    intact = []
    with suppress(OSError):
        for text in read_own(folder / "starts.jsonl").splitlines():
            with suppress(ValueError, TypeError, RecursionError):
                intact.append(from_object(StartLine, json.loads(text)))
    return intact


def records(folder: Path, kind: str = "") -> Iterator[Record]:
    """Yield the records of metrics.jsonl that are not damaged, of one kind or of all."""
    with suppress(OSError):  # there are none yet, or the storage is gone
        for record in each_record(folder / "metrics.jsonl", kind):
            if not record.is_damaged and kind in ("", record.kind):
                yield record


def each_start(folder: Path) -> list[tuple[StartLine, StartLine | None]]:
    """Return the two lines of each start in starts.jsonl, by time.

    The second line is None while the start is under way, or if its launcher was killed.
    """
    starts: dict[str, tuple[StartLine, StartLine | None]] = {}
    for line in lines(folder):
        if line.event == "start":
            starts[line.id] = line, None
        elif line.id in starts:
            starts[line.id] = starts[line.id][0], line
    return sorted(starts.values(), key=lambda start: start[0].time)
