"""The starts of a run: which failures are followed by another one, starts.jsonl, and goodput.

Processes are started again in place after a death by signal, lost contact with another process, or
an error of a device. Not after any other error, which would repeat, nor after a stop signal. The
launcher of node 0 appends a line to starts.jsonl once a start has begun the run, and one when it
has ended (docs/run-folder.md). Imports no torch; the loop does not import it.
"""

import fcntl
import json
import math
import os
import struct
import sys
import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from .failures import first_failure
from .files import (
    checkpoints,
    each_record,
    format_seconds,
    is_number,
    kind_of,
    lock_of,
    parse_record,
    read_json,
    read_status,
    step_of,
    write_atomically,
)
from .process import PREEMPTED

CAUSES = ("lost contact", "lost node", "device error")
REPORT_SECONDS = 5.0  # for the reports of the others when a process was ended by a signal
EXIT_SECONDS = 1.0  # when one has exited, which has reported why
SAVE_SECONDS = 10.0  # for a checkpoint that is being written
ENDED = ("finished", "preempted")  # with nothing to do again
STUCK_LAUNCHES = 3  # without a newer checkpoint, after which a scheduler starts no other
TAIL_BYTES = 1 << 20  # of metrics.jsonl, in which its last record stands


def failed(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return the exit codes of processes that have failed, by rank; -n: ended by signal n."""
    return {rank: code for rank, code in codes.items() if code and code != PREEMPTED}


@dataclass(kw_only=True)
class Starts:
    """The starts of one launch on this node."""

    folder: Path
    limit: int  # of restarts in place, without a new step in between
    is_written: bool = False  # into starts.jsonl, on node 0
    nodes: int = 1
    world_size: int = 1
    count: int = 0  # of restarts
    launch: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _began: float = field(
        default_factory=lambda: float(os.environ.get("LAUNCH_TIME") or time.time())
    )
    _lines: list[dict[str, Any]] = field(default_factory=list)  # not written yet
    _in_vain: int = 0  # restarts since the last new step
    _furthest: int = 0

    def __post_init__(self) -> None:
        self._about_before = read_json(self.folder / "run.json")
        self._unended = unended(self.folder) if self.is_written else []

    @property
    def id(self) -> str:
        """Return the name of the current start, which run.json and error files have as launch."""
        return f"{self.launch}.{self.count}"

    @property
    def has_begun(self) -> bool:
        """Return whether the current start has begun the run."""
        return read_json(self.folder / "run.json").get("launch") == self.id

    @property
    def attempt(self) -> int:
        """Return the number of this attempt; 0 until one has begun the run.

        So long --resume never holds: the run that it moves aside is still there.
        """
        return self.count if read_json(self.folder / "run.json") != self._about_before else 0

    def may_kill(self, codes: dict[int, int | None], seconds: float) -> bool:
        """Return whether the processes that are left need to be waited for no longer.

        Args:
            codes: by rank; None: still running.
            seconds: since the first has failed, here or on another node.
        """
        if self._lines and self.has_begun:
            self._write()
        if seconds < 0:  # none has failed
            return False
        is_saving = codes.get(0, 0) is None and any(self.folder.glob("checkpoints/.step_*.partial"))
        was_killed = any(code < 0 for code in failed(codes).values())
        limit = SAVE_SECONDS if is_saving else EXIT_SECONDS
        if was_killed and self._in_vain >= self.limit:
            limit = REPORT_SECONDS
        elif was_killed and not is_saving:
            limit = 0.0
        return seconds >= limit

    def refusal(
        self, codes: dict[int, int], failures: list[dict[str, Any]], *, others_failed: bool = False
    ) -> str:
        """Return why the processes are not started again; "" if they are.

        Args:
            codes: exit codes of the processes that failed by themselves, by rank.
            failures: the error files of this attempt.
            others_failed: those of another node have.
        """
        cause = first_failure(failures).get("cause")
        may_mend = cause in CAUSES or (others_failed and not failures)
        if not may_mend and not any(code < 0 for code in codes.values()):
            return "the error would repeat"
        step = max([newest_checkpoint(self.folder) or 0, *(one["step"] or 0 for one in failures)])
        if step > self._furthest:
            self._furthest, self._in_vain = step, 0
        if self._in_vain >= self.limit:
            return f"{self.limit} restarts have brought no new step"
        self._in_vain += 1
        self.count += 1
        return ""

    # ---- starts.jsonl ----------------------------------------------------------------------------
    def begin(self) -> None:
        """Note the beginning of a start, whose line is written once it has begun the run.

        Before that, --resume never has not moved the folder aside.
        """
        if self.is_written:
            line = {"event": "start", "id": self.id, "launch": self.launch, "attempt": self.count}
            line |= {"time": self._began, "job": os.environ.get("SLURM_JOB_ID", "")}
            self._lines.append(line | {"nodes": self.nodes, "world_size": self.world_size})

    def end(self, codes: Mapping[int, int], failures: list[dict[str, Any]], stop: str) -> None:
        """Note how the current start has ended.

        Args:
            codes: exit codes of the processes that ended by themselves, by rank.
            failures: the error files of this start on this node.
            stop: the stop signal; "" without one.
        """
        began, self._began = self._began, time.time()  # a restart begins here
        if not self.is_written:
            return
        has_begun = self.has_begun
        failures = [*failures, *read_errors(self.folder, self.id)]
        cause = first_failure(sorted(failures, key=lambda one: one["time"])).get("cause", "")
        if not has_begun and (cause == "setting" or not any(codes.values())):
            self._lines = []  # a refusal, or it had finished before
            return
        status = read_status(self.folder) if has_begun else {}
        signals = [Signals(-code).name for code in codes.values() if code < 0]
        outcome = status.get("outcome")
        if outcome in ENDED or stop:
            outcome, cause = outcome if outcome in ENDED else "preempted", stop
        else:
            outcome, cause = ("killed", signals[0]) if signals else ("failed", cause)
        line = {"event": "end", "id": self.id, "time": self._began}
        line |= progress(self.folder, began, status, [one["step"] or 0 for one in failures])
        self._lines.append(line | {"outcome": outcome, "cause": cause})
        if has_begun:
            self._write()

    def finish(self) -> dict[str, Any]:
        """Write what is left, and goodput into status.json; return that, {} where not known."""
        if self._lines:
            self._write()
        if not (self.is_written and self.has_begun):
            return {}
        shares = goodput(self.folder)
        with suppress(OSError):  # a full disk
            status = read_json(self.folder / "status.json") | {"goodput": shares}
            write_atomically(self.folder / "status.json", json.dumps(status) + "\n")
        return shares

    def _write(self) -> None:
        """Append the lines, and one for a start before whose launcher was killed."""
        path = self.folder / "starts.jsonl"
        # --resume never has moved the start before aside
        added = [*(self._unended if path.exists() else []), *self._lines]
        step = newest_checkpoint(self.folder)
        text = "".join(json.dumps({"checkpoint": step} | line) + "\n" for line in added)
        with suppress(OSError), path.open("ab+") as file:  # a full disk: tried again at the end
            file.seek(max(0, file.tell() - 1))
            is_cut = file.read() not in (b"", b"\n")
            file.write(b"\n" * is_cut + text.encode())
            self._lines, self._unended = [], []


# ---- what a launch leaves in the run folder ------------------------------------------------------
def checked(failure: Any) -> dict[str, Any]:
    """Return what an error file or status.json holds of a failure; {} where it is damaged."""
    found = {"step": None, "progress_time": None, "at": None, "frames": []} | (failure or {})
    needed = {"rank", "host", "reason", "cause", "time", "exit_code", "launch"}
    return found if needed <= found.keys() else {}


def read_errors(folder: Path, launch: str) -> list[dict[str, Any]]:
    """Read the error files of a launch (its token) from a run folder, the first failure first."""
    paths = (folder / "errors").glob("*_rank_*_step_*.json")
    found = [one for one in map(checked, map(read_json, paths)) if one.get("launch") == launch]
    return sorted(found, key=lambda failure: failure["time"])


def is_locked(folder: Path) -> bool | None:
    """Return whether a launch holds the lock on a run folder; None where that cannot be found out.

    The kernel is asked (F_GETLK), so no lock is taken. Not for the process that holds the lock:
    closing the file would release it.
    """
    if sys.platform != "linux":
        return None
    flock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with lock_of(folder).open("rb") as file:
            flock = fcntl.fcntl(file, fcntl.F_GETLK, flock)
    except FileNotFoundError:
        return False
    except OSError:  # no permission, or a file system without locks
        return None
    return struct.unpack("hhqqi0q", flock)[0] != fcntl.F_UNLCK


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    return next(map(step_of, checkpoints(folder)[-1:]), None)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl, without damaged ones; [] where no launcher wrote any."""
    found = []
    with suppress(OSError):
        for text in (folder / "starts.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                is_known = isinstance(line, dict) and {"event", "id", "time"} <= {*line}
                if is_known and isinstance(line["id"], str) and is_number(line["time"]):
                    found.append(line)
    return found


def last_record(folder: Path) -> dict[str, Any]:
    """Return the last record of metrics.jsonl; {} without one."""
    with suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            if record := parse_record(line):
                return record
    return {}


def progress(
    folder: Path, began: float, status: dict[str, Any], steps: list[int]
) -> dict[str, Any]:
    """Return first_step_time, from_step and step of a start, which is the newest of the run.

    Args:
        folder: the run folder.
        began: when it began.
        status: the content of its status.json.
        steps: that its error files name.
    """
    last = last_record(folder)
    if last.get("time", 0) >= began:
        steps = [*steps, last["step"]]
    has_stepped = (status.get("first_step_time") or 0) >= began
    return {
        "first_step_time": status["first_step_time"] if has_stepped else None,
        "from_step": status.get("from_step") if has_stepped else None,
        "step": max([0, *steps, status.get("step", 0)]),
    }


def unended(folder: Path) -> list[dict[str, Any]]:
    """Return an end line for the last start if its launcher was killed; [] if it was not.

    Written by the next launcher, since its processes drop the records of steps to be done again.
    """
    for start in lines(folder)[-1:]:
        if start["event"] == "start":
            known = progress(folder, start["time"], read_status(folder), [])
            times = known["first_step_time"] or 0, last_record(folder).get("time", 0)
            line = {"event": "end", "id": start["id"], "time": max(start["time"], *times)} | known
            line |= {"outcome": "killed", "cause": "", "checkpoint": newest_checkpoint(folder)}
            return [line]
    return []


def each_start(folder: Path) -> list[dict[str, Any]]:
    """Return the starts in starts.jsonl by time, each with the fields of both of its lines.

    "began" and "checkpoint_before" are of the first; "time" is when it ended, None for one that
    is under way or whose launcher was killed.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines(folder):
        if line["event"] == "start":
            about = {
                "began": line["time"],
                "checkpoint_before": line.get("checkpoint"),
                "time": None,
            }
            found[line["id"]] = line | about
        elif line["id"] in found:
            found[line["id"]] |= line
    return sorted(found.values(), key=lambda start: start["began"])


# ---- goodput -------------------------------------------------------------------------------------
PAUSES = {"checkpoint": "saving", "evaluation": "evaluation"}  # by the kind of their records
PARTS = ("kept", "startup", "lost", "saving", "evaluation", "data", "ending")
FIELDS = ("step", "time", "seconds", "data_share")  # of a record: there may be a million of them


def goodput(folder: Path) -> dict[str, Any]:
    """Return what the time of a run was spent on, as fractions by name; {} without starts.jsonl.

    Returns:
        "launcher" and "calendar", over the time in which a launcher ran and over that since the
        first one began: "seconds", and the share of each of PARTS; in the calendar also "down".
        "unknown_starts": those by accelerate launch or torchrun, of which no line says anything.
    """
    if not (starts := each_start(folder)):
        return {}
    began = [start["began"] for start in starts]
    records: list[list[dict[str, Any]]] = [[] for _ in starts]
    unknown_starts = 0
    path = folder / "metrics.jsonl"
    for record in filter(None, each_record(path) if path.exists() else ()):
        values = {name: record.get(name) for name in FIELDS}
        known: dict[str, Any] = {name: x if is_number(x) else 0 for name, x in values.items()}
        known["kind"] = kind_of(record)
        at = bisect_right(began, known["time"]) - 1
        if at >= 0 and known["time"] <= (starts[at]["time"] or math.inf):
            records[at].append(known)
        else:
            unknown_starts += known["kind"] == "start"
    sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    continued = None
    for start, own in zip(reversed(starts), reversed(records), strict=True):
        start["time"] = start["time"] or max([start["began"], *(one["time"] for one in own)])
        parts = parts_of(start, own, continued)
        sums = {name: sums[name] + parts[name] for name in PARTS}
        steps = [step for step in (continued, start.get("from_step")) if step is not None]
        continued = min(steps, default=None)
    launcher = sum(sums.values())
    calendar = max(start["time"] for start in starts) - starts[0]["began"]
    calendar = max(calendar, launcher)
    return {
        "launcher": shares(sums, launcher),
        "calendar": shares(sums | {"down": calendar - launcher}, calendar),
        "unknown_starts": unknown_starts,
    }


def shares(seconds: dict[str, float], whole: float) -> dict[str, float]:
    """Return the share of each part in the whole, whose seconds are the first item."""
    found = {name: round(part / (whole or 1), 4) for name, part in seconds.items()}
    return {"seconds": round(whole, 1)} | found


def parts_of(
    start: dict[str, Any], records: list[dict[str, Any]], continued: int | None
) -> dict[str, float]:
    """Return the seconds of each of PARTS in a start.

    Args:
        start: see each_start.
        records: written in it, of steps that no later start has dropped.
        continued: the least step from which a later one continued; None: none has got so far.
    """
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    is_lost = start.get("outcome", "finished") not in ENDED  # finished: it may be under way
    kept_step = continued
    if kept_step is None:
        kept_step = (start.get("checkpoint") or 0) if is_lost else math.inf
    known = [one for one in records if one["kind"] != "start" and one["step"] <= kept_step]
    first = start.get("first_step_time") or next((one["time"] for one in known), start["time"])
    last = kept_until = first
    for record in known:
        kept_until = max(kept_until, record["time"])
        if record["time"] > first and record["kind"] == "interval":
            found["data"] += record["data_share"] * (record["time"] - last)
            last = record["time"]
        elif record["time"] > first and record["kind"] in PAUSES:
            found[PAUSES[record["kind"]]] += record["seconds"]
    is_lost |= (start.get("step") or 0) > kept_step
    found["startup"] = first - start["began"]
    found["lost" if is_lost else "ending"] = start["time"] - kept_until
    pauses = found["data"] + found["saving"] + found["evaluation"]
    return found | {"kept": max(0.0, kept_until - first - pauses)}


def in_words(shares: dict[str, Any]) -> str:
    """Return what goodput says of the calendar, as a line; "" where it is not known."""
    if not shares:
        return ""
    calendar = shares["calendar"]
    return f"{calendar['kept']:.0%} of {format_seconds(calendar['seconds'])} since the first launch"


# ---- for schedulers ------------------------------------------------------------------------------
def marks(folder: Path) -> list[int]:
    """Return the step of the newest checkpoint when each launch so far began, and of now.

    -1 without a checkpoint. Read when a launch begins, so that all its nodes read the same.
    """
    found: dict[str, int | None] = {}
    for start in each_start(folder):
        found.setdefault(str(start.get("launch")), start["checkpoint_before"])
    return [-1 if step is None else step for step in (*found.values(), newest_checkpoint(folder))]


def requeue(folder: Path, marks: list[int], code: int) -> tuple[int, str]:
    """Return the exit code for a scheduler that starts a run again after 75 alone, and why.

    Args:
        folder: the run folder.
        marks: when this launch began.
        code: exit code of this launch.
    """
    newest, began = newest_checkpoint(folder), marks[-1]
    newest = -1 if newest is None else newest
    at = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is no checkpoint"
    if code == 1 and newest > began:
        before = f"step {began}" if began >= 0 else "none"
        return PREEMPTED, f"to be started again after an error: {at}, and was {before} before"
    if code == 1:
        return 1, f"not to be started again after an error: {at}, as when this job began"
    mark = marks[-STUCK_LAUNCHES:]
    if code == PREEMPTED and len(mark) == STUCK_LAUNCHES and newest <= mark[0]:
        count = STUCK_LAUNCHES
        return 1, f"not to be started again: {at}, and the last {count} jobs wrote no newer one"
    if code == PREEMPTED:
        return code, f"to be started again: {at}"
    return code, ""
