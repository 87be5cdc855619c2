"""What a run folder tells of a run: its curves and events, settings and provenance.

A run folder may come from someone else and may be damaged: each value is checked for its type here,
and is escaped where it is shown (page.py). What is missing or damaged is left out, and named in
`problems`.
"""

import math
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...failures import first_failure
from ...files import ConfigError, each_record, kind_of, read_json, read_status, read_yaml
from ...run_folder import read_errors
from ...safety.redaction import MASK, is_secret, mask
from ..reader import format_problem
from ..runs import state_of
from ..spikes import spikes

SHARES = ("data", "forward", "backward", "communication", "optimizer", "evaluation", "saving")
CURVES = (
    *("steps", "skipped", "skipped_steps", "loss", "learning_rate", "gradient_norm", "mfu"),
    *("samples_per_second", "tokens_per_second", "step_seconds"),
    *(f"{part}_share" for part in SHARES),
    *(f"{part}_seconds_{end}" for part in ("rank", "data") for end in ("min", "median", "max")),
    *("peak_memory_bytes", "allocator_retries"),
    *("gpu_utilization", "elapsed_seconds"),
)
NOT_RESULTS = {"step", "epoch", "elapsed_seconds", "time", "seconds", "is_best"}
MOST_FIELDS = 100  # of an evaluation
MOST_CHARACTERS = 10_000  # of a text
LARGEST = 1e250  # of a number; beyond it arithmetic is not safe


@dataclass(kw_only=True)
class Event:
    """Something that happened once."""

    step: int
    elapsed: float  # seconds over all starts; NaN where it is not known
    time: float  # seconds since 1970; NaN where it is not known
    seconds: float = math.nan  # how long it took
    name: str = ""  # of a spike; why, of a stop
    value: float = math.nan
    results: dict[str, float] = field(default_factory=dict)  # of an evaluation
    epoch: float = math.nan


@dataclass(kw_only=True)
class Start:
    """A start of the run, up to the next one."""

    begin: Event
    end: Event  # its last record; updated as records are read
    world_size: int = 0
    hosts: list[str] = field(default_factory=list)  # by rank
    resumed_from: str = ""
    stop: Event | None = None  # where it was preempted


@dataclass(kw_only=True)
class History:
    """A run."""

    folder: Path
    name: str = ""  # as it is shown
    short: str = ""  # the same beside those of other runs
    status: dict[str, Any] = field(default_factory=dict)
    state: str = ""  # see runs.state_of
    settings: dict[str, str] = field(default_factory=dict)  # by dotted name, masked
    about: dict[str, Any] = field(default_factory=dict)  # run.json
    failure: dict[str, Any] = field(default_factory=dict)  # the first one of a failed run
    problems: list[str] = field(default_factory=list)
    curves: dict[str, np.ndarray] = field(default_factory=dict)  # of the intervals; NaN: no value
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of the intervals
    slowest: Counter[tuple[int, str]] = field(default_factory=Counter)  # rank and host: intervals
    starts: list[Start] = field(default_factory=list)
    evaluations: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    spikes: list[Event] = field(default_factory=list)
    numerics: list[tuple[int, str]] = field(default_factory=list)  # steps, and what changed
    samples: list[tuple[int, str]] = field(default_factory=list)  # the newest three
    pictures: list[str] = field(default_factory=list)  # of the newest evaluation that has some
    pictures_step: int = 0
    last: Event | None = None  # the last record

    @property
    def best_metric(self) -> str:
        """Return the name of the result that decides; "" if none does."""
        name = self.settings.get("evaluation.best_metric", "")
        return "" if name == "null" else name

    @property
    def best(self) -> Event | None:
        """Return the evaluation with the best result."""
        name = self.best_metric
        found = [one for one in self.evaluations if math.isfinite(one.results.get(name, math.nan))]
        choose = min if self.settings.get("evaluation.best_mode") == "min" else max
        return choose(found, key=lambda one: one.results[name], default=None)

    @property
    def step(self) -> int:
        """Return the steps done."""
        return max(self.last.step if self.last else 0, self.status.get("step", 0))

    @property
    def elapsed(self) -> float:
        """Return for how long the run has been running, over all of its starts."""
        return self.last.elapsed if self.last else math.nan

    @property
    def kills(self) -> list[Start]:
        """Return the starts that follow one without a stop."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [start for before, start in pairs if not before.stop]

    def curve(self, name: str, scale: float = 1.0) -> np.ndarray:
        """Return a column of the intervals."""
        return self.curves.get(name, np.zeros(0)) * scale

    def median(self, name: str) -> float:
        """Return the median of a column; NaN if it has no value."""
        values = self.curve(name)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan


def number(value: Any) -> float:
    """Return a number as a float; NaN for anything else."""
    if type(value) not in (int, float) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def text(value: Any) -> str:
    """Return a string without secrets; "" for anything else."""
    return _masked(value[:MOST_CHARACTERS]) if isinstance(value, str) else ""


@lru_cache(maxsize=1000)  # the same hosts stand in each record
def _masked(value: str) -> str:
    return mask(value)


def read_history(folder: Path) -> History:
    """Read a run folder; the run may be under way."""
    run = History(folder=folder, name=folder.resolve().name, status=read_status(folder))
    run.state = state_of(folder, run.status)
    if not run.status:
        run.problems.append("status.json is missing or damaged, so the outcome is not known.")
    run.about = read_json(folder / "run.json")
    if not run.about:
        run.problems.append("run.json is missing or damaged, so its provenance is not known.")
    if problem := format_problem(folder):
        run.problems.append(problem)
    with suppress(ConfigError):
        run.settings = flat(read_yaml(folder / "config.yaml"))
    if not run.settings:
        run.problems.append("config.yaml is missing or damaged, so its settings are not known.")
    if run.state == "failed":
        launch = run.about.get("launch")
        run.failure = first_failure(read_errors(folder, launch) if isinstance(launch, str) else [])
    with suppress(OSError):
        _read_records(run)
    if run.step and not run.last:
        run.problems.append("metrics.jsonl is missing or damaged, so there are no curves.")
    return run


def flat(settings: dict[Any, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by dotted name, with secrets masked."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = as_typed(name, value)
    return found


def as_typed(name: str, value: Any) -> str:
    """Return a setting as one types it; a secret masked."""
    if is_secret(name) and value:
        return MASK
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return mask(str(value)[:MOST_CHARACTERS])


# ---- records -------------------------------------------------------------------------------------
def _read_records(run: History) -> None:
    """Read metrics.jsonl: columns of the intervals, and lists of the rest."""
    columns = {name: array("d") for name in CURVES}
    steps, damaged = array("d"), 0
    for record in each_record(run.folder / "metrics.jsonl"):
        if not record or not 0 <= record["step"] < 2**53:
            damaged += 1
            continue
        kind = kind_of(record)
        if kind == "interval":
            steps.append(record["step"])
            for name, column in columns.items():
                value = record.get(name)
                column.append(value if type(value) is float else number(value))
            if type(record.get("slowest_rank")) is int:
                host = record.get("slowest_host")
                run.slowest[record["slowest_rank"], host if isinstance(host, str) else ""] += 1
        event = Event(
            step=record["step"],
            elapsed=number(record.get("elapsed_seconds")),
            time=number(record.get("time")),
            seconds=number(record.get("seconds")),
            epoch=number(record.get("epoch")),
        )
        if kind == "start" or not run.starts:
            run.starts.append(_start(record, event))
        elif kind == "stop":
            event.name = text(record.get("reason"))
            run.starts[-1].stop = event
        _note(run, kind, event, record)
        run.starts[-1].end = run.last = event
    run.steps = np.frombuffer(steps) if steps else np.zeros(0)
    found = {name: np.array(column) for name, column in columns.items()}
    with np.errstate(all="ignore"):
        found["rank_skew"] = found["rank_seconds_max"] / found["rank_seconds_median"]
    for name, values in found.items():
        values[~(np.abs(values) < LARGEST)] = math.nan
        if np.isfinite(values).any():
            run.curves[name] = values
    run.curves.setdefault("elapsed_seconds", np.full(len(run.steps), math.nan))
    run.spikes = _spikes(run)
    if damaged:
        run.problems.append(f"metrics.jsonl has {damaged:,} damaged lines, which are left out.")


def _spikes(run: History) -> list[Event]:
    """Return the spikes of the loss and of the gradient norm."""
    found = [
        Event(
            step=int(run.steps[index]),
            elapsed=float(run.curve("elapsed_seconds")[index]),
            time=math.nan,
            name=name,
            value=float(run.curve(name)[index]),
        )
        for name in ("loss", "gradient_norm")
        for index, _ in spikes(run.curve(name).tolist())
    ]
    return sorted(found, key=lambda one: one.step)


def _start(record: dict[str, Any], event: Event) -> Start:
    world_size, hosts = record.get("world_size"), record.get("hosts")
    return Start(
        begin=event,
        end=event,
        world_size=world_size if type(world_size) is int else 0,
        hosts=[text(host) for host in hosts] if isinstance(hosts, list) else [],
        resumed_from=text(record.get("resumed_from")),
    )


def _note(run: History, kind: str, event: Event, record: dict[str, Any]) -> None:
    """Add a record that is not of an interval to its list."""
    if kind == "evaluation":
        for name, value in islice(record.items(), MOST_FIELDS):
            result = number(value)
            if name not in NOT_RESULTS and (value is None or math.isfinite(result)):
                event.results[name] = result
        run.evaluations.append(event)
        if isinstance(record.get("sample"), str):
            run.samples = [(event.step, record["sample"]), *run.samples[:2]]
        if isinstance(pictures := record.get("pictures"), list):
            run.pictures = [path for path in pictures if isinstance(path, str)]
            run.pictures_step = event.step
    elif kind == "checkpoint":
        run.checkpoints.append(event)
    elif kind == "numerics" and isinstance(changed := record.get("changed"), dict):
        for name, values in changed.items():
            before, now = values if isinstance(values, list) and len(values) == 2 else ("?", values)
            run.numerics.append((event.step, f"{name} {before} to {now}"))
