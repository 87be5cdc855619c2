"""The attempts of a launch: which failures are followed by another one, and starts.jsonl.

Processes are started again in place after a death by signal, lost contact with another process, or
an error of a device. Not after any other error, which would repeat, nor after a stop signal. The
launcher of node 0 appends a line to starts.jsonl once a start has begun the run, and one when it
has ended (docs/run-folder.md). Imports no torch; the loop does not import it.
"""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from ..failures import OUT_OF_MEMORY, Failure, first_failure
from ..files import open_own
from ..process import PREEMPTED
from ..run_files import (
    ENDED,
    Status,
    each_start,
    is_locked,
    last_record,
    lines,
    lock_of,
    newest_checkpoint,
    read_errors,
    read_info,
    read_status,
)

CAUSES = ("lost contact", "lost node", "device error")
OF_A_HOST = ("lost node", "device error")  # causes that another host does not have
REPORT_SECONDS = 5.0  # for the reports of the others when a process was ended by a signal
EXIT_SECONDS = 1.0  # when one has exited, which has reported why
SAVE_SECONDS = 10.0  # for a checkpoint that is being written
STUCK_LAUNCHES = 3  # without a newer checkpoint, after which a scheduler starts no other


class RunHasEnded(Exception):
    """No start follows; `code` is the exit code of node 0."""

    def __init__(self, code: int) -> None:
        self.code = code


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
        if self.about and not is_locked(self.folder):
            append(self.folder, unended(self.folder))

    @property
    def id(self) -> str:
        """Return the name of the current start, which run.json and error files have as launch."""
        return f"{self.launch}.{self.count}"

    def follow(self, start: str) -> None:
        """Take over the name of the current start from node 0, whose launcher may be a new one."""
        self.launch, _, count = start.rpartition(".")
        self.count = int(count)

    @property
    def has_begun(self) -> bool:
        """Return whether the current start has begun the run."""
        return read_info(self.folder).launch == self.id

    @property
    def phase(self) -> str:
        """Return starting (no step is done, so nothing saves), training, or ended."""
        status = read_status(self.folder)
        if not self.has_begun or (status.outcome == "running" and not status.first_step_time):
            return "starting"
        return "training" if status.outcome == "running" else "ended"

    @property
    def is_new(self) -> bool:
        """Return whether any start of this launch has begun the run, on node 0 or another one."""
        read_status(self.folder)  # makes a network file system refresh its cache
        # by its name: another launch may have begun the run meanwhile
        return read_info(self.folder).launch.startswith(f"{self.launch}.")

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
        self,
        codes: dict[int, int],
        failures: list[Failure],
        *,
        others_failed: bool = False,
        may_have_waited: bool = False,
    ) -> str:
        """Return why the processes are not started again; "" if they are.

        Args:
            codes: exit codes of the processes that failed by themselves, by rank.
            failures: the error files of this attempt.
            others_failed: those of another node have.
            may_have_waited: they are started again if they have waited for other processes.
        """
        first = first_failure(failures)
        causes = (*CAUSES, *["waiting"] * may_have_waited)
        causes += OUT_OF_MEMORY if first and first.next_micro_batch_size else ()
        may_mend = first.cause in causes if first else others_failed
        if not may_mend and not any(code < 0 for code in codes.values()):
            return "the error would repeat"
        # saved steps are compared with saved ones, reported with reported ones: most failures
        # leave no report, so the first report does not show progress
        saved = newest_checkpoint(self.folder) or 0
        reported = max((one.step or 0 for one in failures), default=0)
        if saved > self._saved or 0 < self._reported < reported:
            self._in_vain = 0
        self._saved, self._reported = saved, max(self._reported, reported)
        # a smaller micro-batch is not one more try of the same, and there is an end to them
        self._in_vain -= bool(first and first.next_micro_batch_size and self.limit)
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

    def end(self, codes: Mapping[int, int], failures: list[Failure], stop: str) -> None:
        """Note how the current start has ended.

        Args:
            codes: exit codes of the processes that ended by themselves, by rank.
            failures: the error files of this start on this node.
            stop: the stop signal, or why the run goes on with other nodes; "" without one.
        """
        began, self._began = self._began, time.time()  # a restart begins here
        if not self.about:
            return
        has_begun = self.has_begun
        failures = [*failures, *read_errors(self.folder, self.id)]
        first = first_failure(failures)
        cause = first.cause if first else ""
        if not has_begun and (cause == "setting" or not any(codes.values())):
            self._lines = []  # a refusal, or it had finished before
            return
        status = read_status(self.folder) if has_begun else Status()
        signals = [Signals(-code).name for code in codes.values() if code < 0]
        outcome = status.outcome
        if outcome not in ENDED:
            outcome = "preempted" if stop else "killed" if signals else "failed"
        cause = stop if outcome in ENDED else (signals or [cause])[0]
        line = {"event": "end", "id": self.id, "time": self._began}
        line |= progress(self.folder, began, status, [one.step or 0 for one in failures])
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


def progress(folder: Path, began: float, status: Status, steps: list[int]) -> dict[str, Any]:
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
    known = {"first_step_time": status.first_step_time, "from_step": status.from_step}
    return known | {"step": max([0, *steps, status.step])}


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
