"""metrics.jsonl, the file: a run appends to it, and a start drops what is newer than its state."""

import json
import logging
import os
import time
from contextlib import suppress
from typing import Any

from ..files import each_record, finite, kind_of, move_aside, writing
from ..run_folder import Run
from ..state import TrainState

logger = logging.getLogger(__name__)


class RecordFile:
    """The records of a run on the disk; a full disk does not end the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / "metrics.jsonl"
        self.unwritten = b""  # lines that a full disk has not taken yet
        self.elapsed_before = 0.0  # seconds in earlier starts of the run
        self.newest: dict[str, int] = {}  # of an earlier start: the last step of each kind

    def drop_newer(self, state: TrainState) -> None:
        """Drop the records that are newer than the state."""
        if not os.path.lexists(self.path):
            return
        is_changed = is_damaged = False
        try:
            for record in each_record(self.path):
                if not record:
                    is_damaged = True
                    continue
                kind = kind_of(record)
                self.newest[kind] = max(record["step"], self.newest.get(kind, 0))
                if not _is_kept(record, state):
                    is_changed = True
                elif isinstance(elapsed := record.get("elapsed_seconds"), (int, float)):
                    self.elapsed_before = max(elapsed, self.elapsed_before)
        except OSError:  # a folder
            is_damaged = True
        if is_damaged or is_changed:
            with writing(self.run.folder):
                self._rewrite(state, is_damaged=is_damaged)

    def _rewrite(self, state: TrainState, *, is_damaged: bool) -> None:
        """Write the file anew, without what is newer; a damaged one is kept aside."""
        source = move_aside(self.path) if is_damaged else self.path
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                for record in each_record(source) if source.is_file() else ():
                    if record and _is_kept(record, state):
                        file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Append a record, with the time; return it as it was written.

        If that fails (a full disk), the line is tried again with the next record.
        """
        elapsed = self.elapsed_before + time.monotonic() - self.run.began
        now = {"elapsed_seconds": round(elapsed, 3), "time": round(time.time(), 3)}
        record = finite({"kind": record["kind"], "step": record["step"], **record, **now})
        is_first_failure = not self.unwritten
        self.unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
        size: int | None = None
        try:
            with self.path.open("ab") as file:
                size = file.tell()
                file.write(self.unwritten)
            self.unwritten = b""
        except OSError as error:
            if is_first_failure:
                logger.error("%s cannot be written, so records are kept: %s", self.path, error)
            with suppress(OSError):
                if size is not None:
                    os.truncate(self.path, size)  # drop the partial line
        return record


def _is_kept(record: dict[str, Any], state: TrainState) -> bool:
    """Return whether a record is kept: not newer than the state, nor to be written again."""
    kind = kind_of(record)
    if kind == "numerics":  # one at this step is written again, if it still applies
        return record["step"] < state.step
    to_come = kind == "evaluation" and state.evaluated_step != state.step
    return record["step"] < state.step or (record["step"] == state.step and not to_come)
