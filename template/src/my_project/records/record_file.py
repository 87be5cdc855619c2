"""metrics.jsonl, the file: a run appends to it, and a start drops what is newer than its state."""

import json
import logging
import os
import time
from typing import Any

from ..files import finite, move_aside, write_atomically
from ..run_folder import Run
from ..state import TrainState
from .runs import kind_of, parse_records

logger = logging.getLogger(__name__)


class RecordFile:
    """The records of a run on the disk; a full disk does not end the run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / "metrics.jsonl"
        self.unwritten = b""  # lines that a full disk has not taken yet
        self.elapsed_before = 0.0  # seconds in earlier starts of the run
        self.newest: dict[str, int] = {}  # of an earlier start: the last step of each kind

    def drop_newer(self, state: TrainState) -> list[dict[str, Any]]:
        """Drop the records that are newer than the state; return the others."""
        if not os.path.lexists(self.path):
            return []
        records, damaged = parse_records(self.run.folder)
        if damaged:
            move_aside(self.path)
        for record in records:
            self.newest[kind_of(record)] = max(record["step"], self.newest.get(kind_of(record), 0))
        kept = [record for record in records if _is_kept(record, state)]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        times = [record.get("elapsed_seconds") for record in kept]
        self.elapsed_before = max((t for t in times if isinstance(t, (int, float))), default=0.0)
        return kept

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
