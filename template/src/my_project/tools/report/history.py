"""Read the curves and events of a run record by record, so that a long run fits in memory.

A run folder may come from someone else and may be damaged: the type of each value is checked before
it is used, and it is escaped where it is shown (page.py).
"""

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...run_files import Record, each_start
from ..reader import Run, read_run

PHASES = ("data", "evaluation", "saving")
RANK_COLUMNS = ("rank_seconds_median", "rank_seconds_max")  # left out for a single process
COLUMNS = (
    *("step", "loss", "skipped", "skipped_steps", "learning_rate", "gradient_norm"),
    *("samples_per_second", "items_per_second", "mfu", "peak_memory_bytes", "elapsed_seconds"),
    *("gpu_utilization", *RANK_COLUMNS, *(f"{phase}_share" for phase in PHASES)),
)
NOT_RESULTS = {"seconds", "is_best"}
MAX_FIELDS = 100  # of a record
MAX_CHARACTERS = 10_000  # of a text
MAX_NUMBER = 1e250  # larger numbers could overflow in arithmetic


@dataclass(frozen=True)
class Evaluation:
    """An evaluation by the training run, or by `evaluate --follow`."""

    record: Record
    results: dict[str, float]  # NaN: not finite
    is_followed: bool  # by `evaluate --follow`


@dataclass
class Start:
    """A start of the run."""

    record: Record
    world_size: int
    hosts: Counter[str]
    last: int  # the step of its last record
    changed: str = ""  # the numerics that differ from those of the start before
    end: str = ""  # how it ended


@dataclass(kw_only=True)
class History:
    """The curves and events of a run."""

    run: Run
    name: str = ""  # as it is shown
    short: str = ""  # the name in legends
    last: Record = field(default_factory=lambda: Record(step=0))  # the last record
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of the intervals
    curves: dict[str, np.ndarray] = field(default_factory=dict)  # of the intervals; NaN: no value
    starts: list[Start] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    checks: list[Record] = field(default_factory=list)  # what checks have found

    @property
    def best(self) -> tuple[str, Evaluation | None]:
        """Return the name of the best_metric, and the best evaluation, if there is one."""
        name = text(self.run.settings.get("evaluation.best_metric"))
        finite = [e for e in self.evaluations if math.isfinite(e.results.get(name, math.nan))]
        choose = min if self.run.settings.get("evaluation.best_mode") == "min" else max
        return name, choose(finite, key=lambda one: one.results[name], default=None)

    @property
    def skipped(self) -> np.ndarray:
        """Return the steps of the intervals with skipped steps or without a finite loss."""
        nothing = np.zeros(len(self.steps))
        is_skipped = np.nan_to_num(self.curves.get("skipped", nothing)) > 0
        return self.steps[is_skipped | np.isnan(self.curves.get("loss", nothing))]


def number(value: Any) -> float:
    """Return a number as a float; NaN for anything else."""
    is_number = type(value) in (int, float) and abs(value) < MAX_NUMBER
    return float(value) if is_number else math.nan


def text(value: Any) -> str:
    """Return the beginning of a string; "" for anything else."""
    return value[:MAX_CHARACTERS] if isinstance(value, str) else ""


def read_history(folder: Path) -> History:
    """Read a run folder; the run may be under way.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    history = History(run=read_run(folder))
    columns = {name: array("d") for name in COLUMNS}
    damaged = 0
    for record in history.run.each_record():
        if record.is_damaged:
            damaged += 1
            continue
        if record.kind == "interval":
            count = len(columns["step"])
            for name in islice(record.values, MAX_FIELDS):
                if name.startswith("train/") and name not in columns:  # a scalar of the recipe
                    columns[name] = array("d", [math.nan]) * count
            values = record.to_json()
            for name, column in columns.items():
                column.append(number(values.get(name)))
        else:
            note(history, record)
        if history.starts:
            history.starts[-1].last = record.step
        history.last = record
    if max((start.world_size for start in history.starts), default=1) == 1:
        columns = {name: columns[name] for name in columns if name not in RANK_COLUMNS}
    if columns["items_per_second"] == columns["samples_per_second"]:  # an item is a sample
        del columns["items_per_second"]
    curves = {name: np.frombuffer(column) for name, column in columns.items() if column}
    history.curves = {name: values for name, values in curves.items() if np.isfinite(values).any()}
    history.steps = history.curves.pop("step", history.steps)
    if damaged or (history.run.status.step and not history.last.kind):
        lines = f", damaged lines that are left out: {damaged:,}" * bool(damaged)
        history.run.problems.append(f"metrics.jsonl is missing or damaged{lines}.")
    note_followed(history)
    note_ends(history)
    return history


def note_ends(history: History) -> None:
    """Add how each start ended, if starts.jsonl says so: only the project's launcher writes it."""
    for begin, end in each_start(history.run.folder):
        for start in history.starts:
            if end and not start.end and begin.time <= start.record.time <= end.time:
                start.end = ": ".join(filter(None, (text(end.outcome), text(end.cause))))


def note_followed(history: History) -> None:
    """Add evaluations by `evaluate --follow`, for steps that training has not evaluated itself."""
    evaluated = {evaluation.record.step for evaluation in history.evaluations}
    records = [*history.run.each_record("evaluations.jsonl")]
    # if a step was trained again, its last record counts
    followed = {record.step: record for record in records if not record.is_damaged}
    for step in followed.keys() - evaluated:
        history.evaluations.append(evaluation(followed[step], is_followed=True))
    history.evaluations.sort(key=lambda one: one.record.step)
    if any(record.is_damaged for record in records):
        history.run.problems.append("evaluations.jsonl has damaged lines, which are left out.")


def note(history: History, record: Record) -> None:
    """Add a record to the history; it may be of any kind except "interval"."""
    kind, values = record.kind, record.values
    if kind == "start":
        size, hosts = values.get("world_size"), Counter(map(text, record.texts("hosts")))
        size = size if type(size) is int else 0
        history.starts.append(Start(record, size, hosts, record.step))
    elif kind == "stop" and history.starts:
        history.starts[-1].end = f"preempted: {text(values.get('reason'))}"
    elif kind == "evaluation":
        history.evaluations.append(evaluation(record))
    elif kind == "checkpoint":
        history.checkpoints.append(record)
    elif kind == "check":
        history.checks.append(record)
    elif kind == "numerics" and history.starts:
        history.starts[-1].changed = text(str(values.get("changed")))


def evaluation(record: Record, *, is_followed: bool = False) -> Evaluation:
    """Return the evaluation that a record describes."""
    results = {
        name: number(value)
        for name, value in islice(record.values.items(), MAX_FIELDS)
        if name not in NOT_RESULTS and (value is None or math.isfinite(number(value)))
    }
    return Evaluation(record, results, is_followed)
