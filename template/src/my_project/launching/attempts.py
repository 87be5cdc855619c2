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
import sys
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from types import NoneType
from typing import Any

from ..failures import first_failure
from ..files import (
    checkpoints,
    each_record,
    format_seconds,
    has_lock,
    is_like,
    is_number,
    kind_of,
    lock_of,
    open_own,
    read_json,
    read_own,
    read_status,
    step_of,
)
from ..process import PREEMPTED

NUMBER = (int, float)
CAUSES = ("lost contact", "lost node", "device error")
GOOD = 0.9  # the share of the time that trained kept steps, below which it is shown
START_SECONDS = 60.0  # a run that has kept no step in this time has no goodput to show yet
REPORT_SECONDS = 5.0  # for the reports of the others when a process was ended by a signal
EXIT_SECONDS = 1.0  # when one has exited, which has reported why
SAVE_SECONDS = 10.0  # for a checkpoint that is being written
ENDED = ("finished", "preempted")  # with nothing to do again
STUCK_LAUNCHES = 3  # without a newer checkpoint, after which a scheduler starts no other


def failed(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return the exit codes of processes that have failed, by rank; -n: ended by signal n."""
    return {rank: code for rank, code in codes.items() if code and code != PREEMPTED}


@dataclass(kw_only=True)
class Starts:
    """The starts of one launch on this node."""

    folder: Path
    limit: int  # of restarts in place, without a new step in between
    about: dict[str, Any] | None = None  # nodes and world_size; None: another node writes lines
    count: int = 0  # of restarts
    launch: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _began: float = field(
        default_factory=lambda: float(os.environ.get("LAUNCH_TIME") or time.time())
    )
    _lines: list[dict[str, Any]] = field(default_factory=list)  # not written yet
    _in_vain: int = 0  # restarts since the last new step
    _saved: int = 0  # the newest step that was saved, and that an error file has named
    _reported: int = 0

    def __post_init__(self) -> None:
        self._about_before = read_json(self.folder / "run.json")
        if self.about and not is_locked(self.folder):
            append(self.folder, unended(self.folder))

    @property
    def id(self) -> str:
        """Return the name of the current start, which run.json and error files have as launch."""
        return f"{self.launch}.{self.count}"

    @property
    def has_begun(self) -> bool:
        """Return whether the current start has begun the run."""
        return read_json(self.folder / "run.json").get("launch") == self.id

    @property
    def is_new(self) -> bool:
        """Return whether any start of this launch has begun the run, on node 0 or another one."""
        read_status(self.folder)  # makes a network file system refresh its cache
        about = read_json(self.folder / "run.json")
        if self.about:  # by its name: another launch may have begun the run meanwhile
            return str(about.get("launch")).startswith(f"{self.launch}.")
        return about != self._about_before

    def may_kill(self, codes: dict[int, int | None], seconds: float) -> bool:
        """Return whether the processes that are left need to be waited for no longer.

        Args:
            codes: by rank; None: still running.
            seconds: since the first has failed, here or on another node.
        """
        if self._lines and self.has_begun:
            self.write()
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
        # saved steps are compared with saved ones, reported with reported ones: most failures
        # leave no report, so the first report does not show progress
        saved = newest_checkpoint(self.folder) or 0
        reported = max((one["step"] or 0 for one in failures), default=0)
        if saved > self._saved or 0 < self._reported < reported:
            self._in_vain = 0
        self._saved, self._reported = saved, max(self._reported, reported)
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
        if self.about:
            line = {"event": "start", "id": self.id, "launch": self.launch, "attempt": self.count}
            line |= {"time": self._began, "job": os.environ.get("SLURM_JOB_ID", "")}
            self._lines.append(line | self.about)

    def end(self, codes: Mapping[int, int], failures: list[dict[str, Any]], stop: str) -> None:
        """Note how the current start has ended.

        Args:
            codes: exit codes of the processes that ended by themselves, by rank.
            failures: the error files of this start on this node.
            stop: the stop signal; "" without one.
        """
        began, self._began = self._began, time.time()  # a restart begins here
        if not self.about:
            return
        has_begun = self.has_begun
        failures = [*failures, *read_errors(self.folder, self.id)]
        cause = first_failure(failures).get("cause", "")
        if not has_begun and (cause == "setting" or not any(codes.values())):
            self._lines = []  # a refusal, or it had finished before
            return
        status = read_status(self.folder) if has_begun else {}
        signals = [Signals(-code).name for code in codes.values() if code < 0]
        outcome = status.get("outcome")
        if outcome not in ENDED:
            outcome = "preempted" if stop else "killed" if signals else "failed"
        cause = stop if outcome in ENDED else (signals or [cause])[0]
        line = {"event": "end", "id": self.id, "time": self._began}
        line |= progress(self.folder, began, status, [one["step"] or 0 for one in failures])
        self._lines.append(line | {"outcome": outcome, "cause": cause})
        if has_begun:
            self.write()

    def write(self) -> None:
        """Append what has not been written."""
        if append(self.folder, self._lines):  # else it is tried again at the end
            self._lines = []


def append(folder: Path, lines: list[dict[str, Any]]) -> bool:
    """Append lines to starts.jsonl; return False on a full disk."""
    if not lines:
        return True
    step = newest_checkpoint(folder)
    text = "".join(json.dumps({"checkpoint": step} | line) + "\n" for line in lines)
    with suppress(OSError), open_own(folder / "starts.jsonl", "ab+") as file:
        file.seek(max(0, file.tell() - 1))
        is_cut = file.read() not in (b"", b"\n")
        file.write(b"\n" * is_cut + text.encode())
        return True
    return False


# ---- what a launch leaves in the run folder ------------------------------------------------------
LINE = {  # the types of fields of a line in starts.jsonl
    **dict.fromkeys(("event", "id"), str),
    "time": NUMBER,
    **dict.fromkeys(("first_step_time", "from_step", "step", "checkpoint"), (*NUMBER, NoneType)),
    **dict.fromkeys(("outcome", "cause"), (str, NoneType)),
}
OPTIONAL = {"step": None, "progress_time": None, "at": None, "frames": []}
FAILURE = {  # the types of fields of an error file
    **dict.fromkeys(("rank", "exit_code"), int),
    **dict.fromkeys(("host", "reason", "cause", "launch"), str),
    "time": NUMBER,
    **dict.fromkeys(("step", "progress_time"), (*NUMBER, NoneType)),
    "at": (dict, NoneType),
    "frames": list,
}
FRAME = {"file": str, "line": int, "function": str, "code": str}


def checked(failure: Any) -> dict[str, Any]:
    """Return what an error file or status.json holds of a failure; {} where it is damaged."""
    if not isinstance(failure, dict) or not is_like(found := OPTIONAL | failure, FAILURE):
        return {}
    frames = [*found["frames"], *filter(None, [found["at"]])]
    return found if all(is_like(one, FRAME) for one in frames) else {}


def read_errors(folder: Path, launch: str) -> list[dict[str, Any]]:
    """Read the error files of a launch (its token) from a run folder."""
    paths = (folder / "errors").glob("*_rank_*_step_*.json")
    return [one for one in map(checked, map(read_json, paths)) if one.get("launch") == launch]


def is_locked(folder: Path) -> bool | None:
    """Return whether a launch holds the lock on a run folder; None where that cannot be found out.

    The kernel is asked (F_GETLK), so no lock is taken. Not for the process that holds the lock:
    closing the file would release it.
    """
    if sys.platform != "linux":
        return None
    try:
        with open_own(lock_of(folder)) as file:
            return has_lock(file, fcntl.F_GETLK)
    except FileNotFoundError:
        return False
    except OSError:  # no permission, or a file system without locks
        return None


@contextmanager
def status_locked(folder: Path) -> Iterator[None]:
    """Lock a run folder for the block, which writes status.json, if its storage has locks.

    Raises:
        BlockingIOError: another launch has it.
    """
    with open_own(lock_of(folder), "ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    return next(map(step_of, checkpoints(folder)[-1:]), None)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl, without damaged ones; [] where no launcher wrote any."""
    found = []
    with suppress(OSError):
        for text in read_own(folder / "starts.jsonl").splitlines():
            with suppress(ValueError, LookupError, TypeError):
                line = json.loads(text)
                if is_like(dict.fromkeys(LINE) | line, LINE):
                    found.append(line)
    return found


def last_record(folder: Path) -> dict[str, Any]:
    """Return the last record of metrics.jsonl; {} without one."""
    return next(iter(deque(records(folder), maxlen=1)), {})


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl that are not damaged."""
    with suppress(OSError):  # there are none yet, or the storage is gone
        yield from filter(None, each_record(folder / "metrics.jsonl"))


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
    known = {name: status.get(name) for name in ("first_step_time", "from_step")}
    return known | {"step": max([0, *steps, status.get("step", 0)])}


def unended(folder: Path) -> list[dict[str, Any]]:
    """Return an end line for the last start if its launcher was killed; [] if it was not.

    Written by the next launcher, since its processes drop the records of steps to be done again.
    """
    for start in lines(folder)[-1:]:
        if start["event"] == "start":
            known = progress(folder, start["time"], read_status(folder), [])
            times = known["first_step_time"] or 0, last_record(folder).get("time", 0)
            line = {"event": "end", "id": start["id"], "time": max(start["time"], *times)}
            return [line | known | {"outcome": "killed", "cause": ""}]
    return []


def each_start(folder: Path) -> list[dict[str, Any]]:
    """Return the starts in starts.jsonl by time, each with the fields of both of its lines.

    "began" and "checkpoint_before" are of the first; "time" is when it ended, None for one that
    is under way or whose launcher was killed.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines(folder):
        if line["event"] == "start":
            before = {"began": line["time"], "checkpoint_before": line.get("checkpoint")}
            found[line["id"]] = line | before | {"time": None, "first_step_time": None}
        elif line["id"] in found:
            found[line["id"]] |= line
    return sorted(found.values(), key=lambda start: start["began"])


# ---- goodput -------------------------------------------------------------------------------------
PAUSES = {"checkpoint": "saving", "evaluation": "evaluation"}  # by the kind of their records
PARTS = ("kept", "startup", "lost", "saving", "evaluation", "data", "ending")


def goodput(folder: Path) -> dict[str, Any]:
    """Return what the time of a run was spent on, as fractions by name; {} without starts.jsonl.

    Returns:
        "launcher" and "calendar", over the time in which a launcher ran and over that since the
        first one began: "seconds", and the share of each of PARTS; in the calendar also "down".
        "unknown_starts": those by accelerate launch or torchrun, of which no line says anything.
    """
    if not (starts := each_start(folder)):
        return {}
    kept_step = math.inf  # from which later starts have continued
    for start in reversed(starts):
        is_lost = start.get("outcome", "finished") not in ENDED  # finished: it may be under way
        start["kept_step"] = min(kept_step, (start.get("checkpoint") or 0) if is_lost else math.inf)
        start["is_lost"] = is_lost or (start.get("step") or 0) > start["kept_step"]
        if start.get("from_step") is not None:
            kept_step = min(kept_step, start["from_step"])
        start |= {"last": start["began"], "kept_until": 0.0, "data_until": 0.0}
    began = [start["began"] for start in starts]
    sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    unknown_starts = 0
    for record in records(folder):
        when, kind = number(record, "time"), kind_of(record)
        start = starts[max(0, bisect_right(began, when) - 1)]
        if not start["began"] <= when <= (start["time"] or math.inf):
            unknown_starts += kind == "start"
            continue
        start["last"] = when
        if kind == "start" or record["step"] > start["kept_step"]:
            continue
        first = start["first_step_time"] = start["first_step_time"] or when
        start["kept_until"] = max(first, when)
        if when > first and kind == "interval":
            since = max(first, start["data_until"])
            sums["data"] += number(record, "data_share") * (when - since)
            start["data_until"] = when
        elif when > first and kind in PAUSES:
            sums[PAUSES[kind]] += number(record, "seconds")
    for start in starts:
        ended = start["time"] = start["time"] or start["last"]
        first = start["first_step_time"] or ended
        kept_until = max(first, start["kept_until"])
        sums["startup"] += first - start["began"]
        sums["kept"] += kept_until - first
        sums["lost" if start["is_lost"] else "ending"] += ended - kept_until
    pauses = sums["data"] + sums["saving"] + sums["evaluation"]
    sums["kept"] = max(0.0, sums["kept"] - pauses)
    launcher = sum(sums.values())
    calendar = max(launcher, max(start["time"] for start in starts) - began[0])
    return {
        "launcher": shares(sums, launcher),
        "calendar": shares(sums | {"down": calendar - launcher}, calendar),
        "unknown_starts": unknown_starts,
    }


def number(record: dict[str, Any], name: str) -> float:
    """Return a number of a record; 0 where it is damaged."""
    return record[name] if is_number(record.get(name)) else 0.0


def shares(seconds: dict[str, float], whole: float) -> dict[str, float]:
    """Return the share of each part in the whole, whose seconds are the first item."""
    found = {name: round(part / (whole or 1), 4) for name, part in seconds.items()}
    return {"seconds": round(whole, 1)} | found


def in_words(status: dict[str, Any]) -> str:
    """Return the goodput in a status.json as a line; "" where it is good or says nothing yet."""
    calendar = status.get("goodput", {}).get("calendar")
    if not isinstance(calendar, dict) or not {"kept", "seconds"} <= calendar.keys():
        return ""
    text = f"{calendar['kept']:.0%} of {format_seconds(calendar['seconds'])} since the first launch"
    is_start = calendar["kept"] == 0 and calendar["seconds"] < START_SECONDS
    return text if calendar["kept"] < GOOD and not is_start else ""


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
    if code not in (1, PREEMPTED):
        return code, ""
    newest = newest_checkpoint(folder)
    at = (
        "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
    )
    tries = 1 if code == 1 else STUCK_LAUNCHES
    if len(marks) >= tries and marks[-tries] >= (-1 if newest is None else newest):
        return 1, f"not to be started again: {at}; launches that wrote no newer one: {tries}"
    return PREEMPTED, f"to be started again: {at}"
