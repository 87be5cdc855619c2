"""The starts of a launch: decide which failures are followed by a restart; write starts.jsonl.

Processes are restarted in place after a death by signal, lost contact with another process, a lost
node or a device error, and if a smaller micro-batch may fit in memory; with --min_machines, also
after a stall in which they waited for a node that has left. They are not restarted after other
errors, most of which would repeat, nor after a stop signal. The launcher of node 0 appends a line
to starts.jsonl once rank 0 of a start has written run.json, and another when the start has ended
(docs/run-folder.md). If a start fails before rank 0 has written run.json, the launcher appends both
lines later: when a restart has written run.json, or when the launcher itself ends. This module
imports no torch, and the loop does not import it.
"""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import Any

from ..failures import OUT_OF_MEMORY, Failure, first_failure, write_error
from ..files import open_own
from ..process import PREEMPTED
from ..run_files import (
    ENDED,
    Record,
    Status,
    each_record_backward,
    each_start,
    is_locked,
    lines,
    lock_path,
    newest_checkpoint,
    read_errors,
    read_info,
    read_status,
    refresh,
)

CAUSES = ("lost contact", "lost node", "device error")
HOST_CAUSES = ("lost node", "device error")  # a scheduler avoids these by leaving out the host
# How long the launcher waits for the other processes after a process has failed.
REPORT_SECONDS = 5.0  # after a death by signal without a restart: others may report the reason
EXIT_SECONDS = 1.0  # after an exit: the process has already reported the reason
SAVE_SECONDS = 10.0  # if rank 0 is on this node and is writing a checkpoint
STUCK_LAUNCHES = 3  # after this many launches without a newer checkpoint, the scheduler gives up


class RunHasEnded(Exception):
    """The run has ended, and no start follows; `code` is the exit code of node 0."""

    def __init__(self, code: int) -> None:
        self.code = code


def failed(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return the exit codes of processes that have failed, by rank; -n: ended by signal n."""
    return {rank: code for rank, code in codes.items() if code and code != PREEMPTED}


def signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have none."""
    return Signals(number).name if number in [*Signals] else f"signal {number}"


@dataclass(kw_only=True)
class Starts:
    """The starts of one launch on this node."""

    folder: Path
    limit: int  # the maximum number of consecutive restarts in place without a new step
    about: dict[str, Any] | None = None  # fields for starts.jsonl; None: another node writes it
    count: int = 0  # starts of this launch before the current one, as node 0 counts them
    launch: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _began: float = field(
        default_factory=lambda: float(os.environ.get("LAUNCH_TIME") or time.time())
    )
    _lines: list[dict[str, Any]] = field(default_factory=list)  # lines still to be written
    _stuck_restarts: int = 0  # restarts since the last new step
    _saved_step: int = 0  # the step of the newest checkpoint
    _reported_step: int = 0  # the newest step in an error file

    def __post_init__(self) -> None:
        if self.about and not is_locked(self.folder):
            append(self.folder, missing_end(self.folder))

    @property
    def id(self) -> str:
        """Return the name of the current start, which run.json and error files call `launch`."""
        return f"{self.launch}.{self.count}"

    def follow(self, start: str) -> None:
        """Take over the name of the current start from node 0, which may have a new launcher."""
        self.launch, _, count = start.rpartition(".")
        self.count = int(count)

    @property
    def has_begun(self) -> bool:
        """Return whether the current start has begun the run."""
        refresh(self.folder)
        return read_info(self.folder).launch == self.id

    @property
    def phase(self) -> str:
        """Return "starting" (no step is done, so a stop cannot save), "training" or "ended"."""
        status = read_status(self.folder)
        if not self.has_begun or (status.outcome == "running" and not status.first_step_time):
            return "starting"
        return "training" if status.outcome == "running" else "ended"

    @property
    def is_new(self) -> bool:
        """Return whether a start of this launch has begun the run, on any node."""
        refresh(self.folder)
        # compare names, since another launch may have begun the run meanwhile
        return read_info(self.folder).launch.startswith(f"{self.launch}.")

    def report(self, failure: Failure, **facts: Any) -> Failure:
        """Write an error file for a process that could not; return the failure.

        Args:
            failure: the failure, with the launcher's rank and host.
            facts: the fields to replace, such as rank.
        """
        step = last_record(self.folder).step
        failure = replace(failure, step=step, launch=self.id, **facts)
        with suppress(OSError):  # the storage may be gone too
            if self.is_new:
                write_error(self.folder, failure)
        return failure

    def may_kill(self, codes: dict[int, int | None], seconds: float) -> bool:
        """Return whether the processes that still run can be killed; also write lines that are due.

        Args:
            codes: exit codes by rank; None: the process is still running.
            seconds: time since the first failure, here or on another node; negative: no failure.
        """
        if self._lines and self.has_begun:
            self.write()
        if seconds < 0:
            return False
        is_saving = codes.get(0, 0) is None and any(self.folder.glob("checkpoints/.step_*.partial"))
        was_killed = any(code < 0 for code in failed(codes).values())
        limit = SAVE_SECONDS if is_saving else EXIT_SECONDS
        if was_killed and self._stuck_restarts >= self.limit:
            limit = max(limit, REPORT_SECONDS)
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
        """Return why the processes are not restarted; "" if they are.

        Args:
            codes: exit codes of the processes that failed by themselves, by rank.
            failures: the error files of this start.
            others_failed: processes of another node have failed.
            may_have_waited: restart also after a stall in which this node waited for other ranks.
        """
        first = first_failure(failures)
        causes = (*CAUSES, *["waiting"] * may_have_waited)
        causes += OUT_OF_MEMORY if first and first.next_micro_batch_size else ()
        may_succeed = first.cause in causes if first else others_failed
        if not may_succeed and not any(code < 0 for code in codes.values()):
            return "the error would repeat"
        # A reported step is progress if it comes after a step that an earlier start has reported.
        # If none has (0), an earlier start may have reached the same step and failed without a
        # report.
        saved_step = newest_checkpoint(self.folder) or 0
        reported_step = max((failure.step or 0 for failure in failures), default=0)
        if saved_step > self._saved_step or 0 < self._reported_step < reported_step:
            self._stuck_restarts = 0
        self._saved_step = saved_step
        self._reported_step = max(self._reported_step, reported_step)
        # a restart with a smaller micro-batch does not count toward the limit: it is a different
        # attempt, and cannot recur forever, since sizes do not fall below 1
        self._stuck_restarts -= bool(first and first.next_micro_batch_size and self.limit)
        if self._stuck_restarts >= self.limit:
            return f"{self.limit} restarts without a new step"
        self._stuck_restarts += 1
        self.count += 1
        return ""

    # ---- starts.jsonl ----------------------------------------------------------------------------
    def begin(self) -> None:
        """Prepare the first line of a start.

        It is not written before rank 0 has written run.json, or the launcher ends: until then, the
        folder may still contain an older run, which `--resume never` moves aside.
        """
        if self.about:
            line = {"event": "start", "id": self.id, "launch": self.launch, "attempt": self.count}
            line |= {"time": self._began, "job": os.environ.get("SLURM_JOB_ID", "")}
            self._lines.append(line | self.about)

    def end(self, codes: Mapping[int, int], failures: list[Failure], stop: str) -> None:
        """Prepare the line about the end of this start; write it if this start has begun the run.

        Args:
            codes: exit codes of the processes that ended by themselves, by rank.
            failures: the error files of this start on this node.
            stop: the stop signal, or why the run goes on with different nodes; "" if neither.
        """
        began, self._began = self._began, time.time()  # a restart begins now
        if not self.about:
            return
        has_begun = self.has_begun
        failures = [*failures, *read_errors(self.folder, self.id)]
        first = first_failure(failures)
        cause = first.cause if first else ""
        if not has_begun and (cause == "setting" or not any(codes.values())):
            # the run was refused, or had finished before
            self._lines = [line for line in self._lines if line["id"] != self.id]
            return
        status = read_status(self.folder) if has_begun else Status()
        signals = [signal_name(-code) for code in codes.values() if code < 0]
        outcome = status.outcome
        if outcome not in ENDED:
            outcome = "preempted" if stop else "killed" if signals else "failed"
        cause = stop if outcome in ENDED else (signals or [cause])[0]
        line = {"event": "end", "id": self.id, "time": self._began}
        line |= progress(self.folder, began, status, [failure.step or 0 for failure in failures])
        self._lines.append(line | {"outcome": outcome, "cause": cause})
        if has_begun:
            self.write()

    def write(self) -> None:
        """Append the lines that have not been written."""
        if append(self.folder, self._lines):  # on a full disk, a later call writes them
            self._lines = []


def append(folder: Path, lines: list[dict[str, Any]]) -> bool:
    """Append lines to starts.jsonl; return False if that fails, for example on a full disk."""
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
    """Lock a run folder, if its storage supports locks, while the block writes status.json.

    Raises:
        BlockingIOError: another launch holds the lock.
    """
    with open_own(lock_path(folder), "ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield


def last_record(folder: Path) -> Record:
    """Return the last record of metrics.jsonl; if there is none, a record of step 0."""
    with suppress(OSError):  # there are none yet, or the storage is gone
        for _, _, record in each_record_backward(folder / "metrics.jsonl"):
            if not record.is_damaged:
                return record
    return Record(step=0)


def progress(folder: Path, began: float, status: Status, steps: list[int]) -> dict[str, Any]:
    """Return first_step_time, from_step and step of the newest start of the run.

    Args:
        folder: the run folder.
        began: when the start began, in seconds since 1970.
        status: the content of status.json.
        steps: the steps named in the start's error files.
    """
    last = last_record(folder)
    if last.time >= began:
        steps = [*steps, last.step]
    in_status = {"first_step_time": status.first_step_time, "from_step": status.from_step}
    return in_status | {"step": max([0, *steps, status.step])}


def missing_end(folder: Path) -> list[dict[str, Any]]:
    """Return a list with an end line for the last start if its launcher was killed; else [].

    The next launcher writes this line first, because its processes delete the records of the steps
    that they repeat.
    """
    for start in lines(folder)[-1:]:
        if start.event == "start":
            fields = progress(folder, start.time, read_status(folder), [])
            times = fields["first_step_time"] or 0, last_record(folder).time
            line = {"event": "end", "id": start.id, "time": max(start.time, *times)}
            return [line | fields | {"outcome": "killed", "cause": ""}]
    return []


# ---- for schedulers ------------------------------------------------------------------------------
def steps_at_launches(folder: Path) -> list[int]:
    """List the step of the newest checkpoint at the start of each earlier launch, and now.

    -1 stands for no checkpoint.
    """
    steps: dict[str, int | None] = {}
    for begin, _ in each_start(folder):
        steps.setdefault(begin.launch, begin.checkpoint)
    return [-1 if step is None else step for step in (*steps.values(), newest_checkpoint(folder))]


def requeue(newest: int | None, steps: list[int], code: int) -> tuple[int, str]:
    """Return the exit code for a scheduler that restarts runs only after code 75, and the reason.

    Args:
        newest: the step of the newest checkpoint; None if there is none.
        steps: the step of the newest checkpoint at the start of each launch, this launch the last.
        code: the exit code of this launch.
    """
    if code not in (1, PREEMPTED):
        return code, ""
    reason = "there is no checkpoint"
    if newest is not None:
        reason = f"the newest checkpoint is at step {newest}"
    tries = 1 if code == 1 else STUCK_LAUNCHES
    if len(steps) >= tries and steps[-tries] >= (-1 if newest is None else newest):
        reason += f"; {tries} launch(es) in a row wrote no newer one"
        return 1, f"exit code 1, so the scheduler does not start the run again: {reason}"
    return PREEMPTED, f"exit code 75, so the scheduler starts the run again: {reason}"
