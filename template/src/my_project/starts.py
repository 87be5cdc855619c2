"""The starts of a run: which failures are followed by another one, starts.jsonl, and goodput.

Processes are started again in place after a death by signal, lost contact with another process, or
an error of a device. Not after any other error, which would repeat, a lack of memory, or a stop
signal. The launcher of node 0 appends a line to starts.jsonl once a start has begun the run, and
one when it has ended (docs/run-folder.md). Imports no torch; the loop does not import it.
"""

import json
import math
import os
import re
import sys
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, NamedTuple

from .failures import first_failure, read_errors
from .files import (
    checkpoints,
    each_record,
    format_seconds,
    kind_of,
    parse_record,
    read_json,
    read_status,
    step_of,
    write_atomically,
)
from .process import PREEMPTED

CAUSES = ("lost contact", "lost node", "device error")
REPEATED = ("lost contact", "lost node", SIGKILL.name)  # may come twice at one step by chance
REPORT_SECONDS = 5.0  # for the reports of the others when a process was ended by a signal
EXIT_SECONDS = 1.0  # when one has exited, which has reported why
SAVE_SECONDS = 10.0  # for a checkpoint that is being written
ENDED = ("finished", "preempted")  # with nothing to do again
STUCK_LAUNCHES = 3  # without a newer checkpoint, after which a scheduler starts no other
TAIL_BYTES = 1 << 20  # of metrics.jsonl, in which its last record stands
STEPS = ("from_step", "step", "checkpoint")  # of a line


def failed(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return the exit codes of processes that have failed, by rank; -n: ended by signal n."""
    return {rank: code for rank, code in codes.items() if code and code != PREEMPTED}


def kills_for_memory() -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory."""
    try:
        (own,) = re.findall(r"(?m)^0::(.*)$", Path("/proc/self/cgroup").read_text())
        events = Path(f"/sys/fs/cgroup{own}/memory.events").read_text()
        return int(re.findall(r"(?m)^oom_kill (\d+)$", events)[0])
    except (OSError, ValueError, IndexError):
        return 0


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
    _in_vain: int = 0  # since the last new step
    _furthest: int = 0
    _last: tuple[str, int] = ("", -1)  # the failure before: what and at which step
    _killed_for_memory: int = field(default_factory=kills_for_memory)

    def __post_init__(self) -> None:
        self._about_before = read_json(self.folder / "run.json")
        self._unended = unended(self.folder) if self.is_written else {}

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
        signals = [code for code in failed(codes).values() if code < 0]
        if not signals and (failed(codes) or seconds < EXIT_SECONDS):
            return seconds > EXIT_SECONDS
        if self._in_vain >= self.limit or kills_for_memory() > self._killed_for_memory:
            return seconds > REPORT_SECONDS
        started = self.folder.glob("checkpoints/step_*")
        is_writing = any(not (path / "manifest.json").exists() for path in started)
        return not (is_writing and codes.get(0, 0) is None) or seconds > SAVE_SECONDS

    def refusal(
        self, codes: dict[int, int], failures: list[dict[str, Any]], *, others_failed: bool = False
    ) -> str:
        """Return why the processes are not started again; "" if they are.

        Args:
            codes: exit codes of the processes that failed by themselves, by rank.
            failures: the error files of this attempt.
            others_failed: those of another node have.
        """
        first = first_failure(failures) or {"cause": "lost contact" if others_failed else ""}
        signals = [-code for code in codes.values() if code < 0]
        if not signals and first["cause"] not in CAUSES:
            return "the error would repeat"
        if kills_for_memory() > self._killed_for_memory:
            return "the kernel has killed a process for lack of memory"
        steps = [one["step"] or 0 for one in failures]
        step = max([*steps, *map(step_of, checkpoints(self.folder)[-1:])], default=0)
        what = Signals(signals[0]).name if signals else first["cause"]
        if (what, step) == self._last and what not in REPEATED:
            return f"{what} again at step {step}"
        self._last = (what, step)
        if step > self._furthest:
            self._furthest, self._in_vain = step, 0
        if self._in_vain >= self.limit:
            return (
                f"{self.limit} restarts have brought no new step" if self.limit else "no restarts"
            )
        self._in_vain += 1
        self.count += 1
        return ""

    # ---- starts.jsonl ----------------------------------------------------------------------------
    def begin(self) -> None:
        """Note the beginning of a start, whose line is written once it has begun the run.

        Before that, --resume never has not moved the folder aside.
        """
        if self.is_written:
            about = {"nodes": self.nodes, "world_size": self.world_size}
            about = {"job": os.environ.get("SLURM_JOB_ID", ""), **about}
            line = {"event": "start", "id": self.id, "launch": self.launch, "attempt": self.count}
            self._lines.append(line | {"time": self._began} | about)

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
        is_refusal = first_failure(failures).get("cause") == "setting"
        if not has_begun and (is_refusal or not any(codes.values())):
            self._lines = []  # it had finished before, or a refusal
            return
        status = read_status(self.folder) if has_begun else {}
        failures = sorted(
            [*failures, *read_errors(self.folder, self.id)], key=lambda one: one["time"]
        )
        signals = [Signals(-code).name for code in codes.values() if code < 0]
        if status.get("outcome") in ENDED:
            outcome, cause = status["outcome"], stop
        elif stop:
            outcome, cause = "preempted", stop
        else:
            outcome = "killed" if signals else "failed"
            cause = signals[0] if signals else first_failure(failures).get("cause", "")
        steps = [one["step"] or 0 for one in failures]
        line = {"event": "end", "id": self.id, "time": self._began}
        line |= progress(self.folder, began, status, steps)
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
        is_there = self._unended and self._unended["id"] in {
            one["id"] for one in lines(self.folder)
        }
        added = [self._unended] * bool(is_there) + self._lines
        step = newest_checkpoint(self.folder)
        text = "".join(json.dumps({"checkpoint": step} | line) + "\n" for line in added)
        with suppress(OSError), path.open("ab+") as file:  # a full disk: tried again at the end
            file.seek(max(0, file.tell() - 1))
            is_cut = file.read() not in (b"", b"\n")
            file.write(b"\n" * is_cut + text.encode())
            self._lines, self._unended = [], {}


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    return next(map(step_of, checkpoints(folder)[-1:]), None)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of starts.jsonl, without damaged ones; [] where no launcher wrote any."""
    found = []
    with suppress(OSError):
        for text in (folder / "starts.jsonl").read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                known = isinstance(line, dict) and {"event", "id", "time"} <= {*line}
                if known and isinstance(line["id"], str) and _number(line["time"]):
                    steps = {name: line.get(name) for name in STEPS}
                    found.append(
                        line | {n: x if type(x) is int else None for n, x in steps.items()}
                    )
    return found


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and 0 < value < 1e11 else 0.0


class Record(NamedTuple):
    """What is read of a record of metrics.jsonl, of which there may be a million."""

    kind: str
    step: int
    time: float
    seconds: float  # of an evaluation or a save
    data_share: float  # of an interval


def as_record(record: dict[str, Any]) -> Record:
    """Return a record; its time is 0 where it does not say one."""
    return Record(
        kind=sys.intern(kind_of(record)),
        step=record.get("step", 0),
        time=_number(record.get("time")),
        seconds=_number(record.get("seconds")),
        data_share=min(1.0, _number(record.get("data_share"))),
    )


def last_record(folder: Path) -> Record:
    """Return the last record of metrics.jsonl; its step and time are 0 without one."""
    found: list[bytes] = []
    with suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        found = file.read().splitlines()
    return as_record(next(filter(None, map(parse_record, reversed(found))), {}))


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
    last, first = last_record(folder), _number(status.get("first_step_time"))
    has_stepped = first >= began
    return {
        "first_step_time": first if has_stepped else None,
        "from_step": status.get("from_step") if has_stepped else None,
        "step": max([0, *steps, status.get("step", 0), last.step * (last.time >= began)]),
    }


def unended(folder: Path) -> dict[str, Any]:
    """Return an end line for the last start if its launcher was killed; {} if it was not.

    Written by the next launcher, since its processes drop the records of steps to be done again.
    """
    start = next(iter(lines(folder)[-1:]), {})
    if start.get("event") != "start":
        return {}
    known = progress(folder, start["time"], read_status(folder), [])
    times = start["time"], known["first_step_time"] or 0, last_record(folder).time
    line = {"event": "end", "id": start["id"], "time": max(times)} | known
    return line | {"outcome": "killed", "cause": "", "checkpoint": newest_checkpoint(folder)}


def each_start(folder: Path) -> list[dict[str, Any]]:
    """Return the starts in starts.jsonl by time, each with the fields of both of its lines.

    "began" and "checkpoint_before" are of the first; "time" is when it ended, None for one that
    is under way or whose launcher was killed.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in lines(folder):
        if line["event"] == "start":
            about = {"began": line["time"], "checkpoint_before": line["checkpoint"], "time": None}
            found[line["id"]] = line | about
        elif line["id"] in found:
            found[line["id"]] |= line
    return sorted(found.values(), key=lambda start: start["began"])


# ---- goodput -------------------------------------------------------------------------------------
def records_of(folder: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl that say when they were written."""
    with suppress(OSError):
        for found in each_record(folder / "metrics.jsonl"):
            if (record := as_record(found)).time:
                yield record


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
    began = [start["began"] for start in starts]
    own: list[list[Record]] = [[] for _ in starts]
    unknown_starts = 0
    for record in records_of(folder):
        at = bisect_right(began, record.time) - 1
        if at >= 0 and record.time <= (starts[at]["time"] or math.inf):
            own[at].append(record)
        else:
            unknown_starts += record.kind == "start"
    sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    continued = None
    for start, records in zip(reversed(starts), reversed(own), strict=True):
        start["time"] = start["time"] or max([start["began"], *(one.time for one in records)])
        parts = parts_of(start, records, continued)
        sums = {name: sums[name] + parts[name] for name in PARTS}
        steps = [step for step in (continued, start["from_step"]) if step is not None]
        continued = min(steps, default=None)
    launcher = sum(sums.values())
    calendar = max(start["time"] for start in starts) - starts[0]["began"]
    calendar = max(calendar, launcher, 1e-9)
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
    start: dict[str, Any], records: list[Record], continued: int | None
) -> dict[str, float]:
    """Return the seconds of each of PARTS in a start.

    Args:
        start: see each_start.
        records: written in it, of steps that no later start has dropped.
        continued: the least step from which a later one continued; None: none has got so far.
    """
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    end = start["time"]
    is_lost = start.get("outcome", "finished") not in ENDED  # finished: it may be under way
    kept_step = start["checkpoint"] or 0 if is_lost else sys.maxsize
    kept_step = kept_step if continued is None else continued
    known = [one for one in records if one.kind != "start" and one.step <= kept_step]
    first = _number(start.get("first_step_time")) or next((one.time for one in known), end)
    known = [one for one in known if one.time > first]
    last = first
    for record in known:
        if record.kind == "interval":
            found["data"] += record.data_share * (record.time - last)
            last = record.time
        elif record.kind in PAUSES:
            found[PAUSES[record.kind]] += record.seconds
    kept_until = max([first, *(one.time for one in known)])
    is_lost |= (start["step"] or 0) > kept_step
    found["startup"] = first - start["began"]
    found["lost" if is_lost else "ending"] = end - kept_until
    pauses = found["data"] + found["saving"] + found["evaluation"]
    return found | {"kept": max(0.0, kept_until - first - pauses)}


def in_words(shares: dict[str, Any]) -> str:
    """Return what goodput says of the calendar, the largest loss first: a line."""
    if not shares:
        return ""
    rest = dict(shares["calendar"])
    seconds, kept = rest.pop("seconds"), rest.pop("kept")
    names = sorted((name for name in rest if rest[name] >= 0.005), key=lambda name: -rest[name])
    lost = ", ".join(f"{WORDS.get(name, name)} {rest[name]:.0%}" for name in names)
    return f"{kept:.0%} of {format_seconds(seconds)} since the first launch; {lost}"


WORDS = {
    "startup": "start-up",
    "lost": "lost steps",
    "data": "waiting for data",
    "down": "no launcher ran",
}


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


def stop_seconds(folder: Path) -> float:
    """Return the seconds of the longest step, evaluation and save of a run, summed."""
    path = folder / "metrics.jsonl"
    longest = {"interval": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
    written = {
        step_of(path): (path / "manifest.json").stat().st_mtime for path in checkpoints(folder)
    }
    for record in each_record(path) if path.exists() else ():
        kind = kind_of(record)
        seconds = record.get("step_seconds" if kind == "interval" else "seconds") or 0.0
        if kind == "checkpoint":  # training waits for a part of a save only
            seconds = max(seconds, written.get(record["step"], 0.0) - record["time"])
        if kind in longest:
            longest[kind] = max(longest[kind], seconds)
    return sum(longest.values())
