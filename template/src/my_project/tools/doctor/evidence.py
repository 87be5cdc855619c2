"""What a run has left behind: status, error files, logs and records, read without judging.

For doctor.py. Files of a run folder may be damaged or written by anybody: nothing here fails on
their content, and what could not be read is listed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...failures import own_frame, short_path
from ...files import ConfigError, each_record, is_locked, read_json, read_status, read_yaml
from ..reader import PARTS_OF_A_RUN
from . import exits

SILENT = re.compile(r"rank (\d+) on ([^\s,:;]+)")  # in a reason of stopping.likely_cause


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run folder holds about the newest start."""

    folder: Path
    status: dict[str, Any]  # {} where status.json is missing or damaged
    locked: bool | None  # by a process; None: not known
    about: dict[str, Any]  # run.json
    settings: dict[str, Any]  # config.yaml
    records: list[dict[str, Any]]
    of_this_start: list[dict[str, Any]]  # the records of this start; all, where none tells
    failures: list[dict[str, Any]]  # of error files and logs, the first first; "file" is the source
    earlier: int  # starts before this one that have left error files
    exits: dict[int, exits.Exit]  # by rank
    told: str  # the signal by which a process was told to stop, or why it left
    started: float  # the newest start, in seconds since 1970; 0: not known
    later: float  # a start after it that has left nothing, not even an open run; 0: none
    is_unopened: bool  # the newest start failed, or is, before it opened the run
    hosts: dict[int, str]  # by rank, as far as known
    nodes: dict[int, str]  # by rank: of those that wrote a log
    world_size: int
    last_sign: float  # when the run last wrote a record, an error or a status; 0: never
    damaged: list[str]

    @cached_property
    def silent(self) -> list[int]:
        """Return the ranks that left no report."""
        reported = {failure["rank"] for failure in self.failures}
        return [rank for rank in range(self.world_size) if rank not in reported]

    @property
    def step(self) -> int:
        """Return the last step that is known to be done."""
        steps = [one["step"] for one in (self.status, *self.records[-1:]) if "step" in one]
        return max([*steps, *(one["step"] or 0 for one in self.failures)], default=0)

    def intervals(self) -> list[dict[str, Any]]:
        """Return the records of intervals."""
        return [one for one in self.records if one.get("kind") == "interval"]

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting by its dotted name."""
        found: Any = self.settings
        for key in name.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return default if found is None else found


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run, or what a start that failed at once has left of one."""
    names = (*PARTS_OF_A_RUN, "errors")
    return any((folder / name).exists() for name in names) or any(folder.glob("logs/node_*/*"))


def read(folder: Path) -> Evidence:
    """Read a run folder.

    Raises:
        ConfigError: it is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no run {folder}. A start that is refused leaves no folder: its sentence was"
            " printed where it was started."
        )
    if not is_run(folder):
        runs = sorted(path for path in folder.glob("*/") if is_run(path))
        hint = f"; it holds runs: give one, such as {runs[0]}." if runs else "; give one."
        raise ConfigError(f"{folder} is not a run folder{hint}")
    damaged: list[str] = []
    about = _read_object(folder / "run.json", damaged)
    status = read_status(folder)
    if not status and (folder / "status.json").exists():
        damaged.append("status.json")
    records: list[dict[str, Any]] = []
    if (folder / "metrics.jsonl").exists():
        try:
            found = list(each_record(folder / "metrics.jsonl"))
        except OSError:  # a folder
            found = [{}]
        records = [_with_time(one) for one in found if one]
        damaged += ["metrics.jsonl"] * ({} in found)
    by_launch = exits.read_errors(folder, damaged)
    launch = about["launch"] if isinstance(about.get("launch"), str) else ""
    if by_launch and not launch:  # run.json is damaged: the newest
        launch = max(by_launch, key=lambda token: by_launch[token][-1]["time"])
    opened = by_launch.get(launch, [])
    last_sign = max([*_times(records), *_times(opened), *_written(folder)], default=0.0)

    of_this_start = _of_this_start(folder, records)
    locked = is_locked(folder)
    start = _newest_start(folder, by_launch, launch, last_sign, locked)
    logs = start.pop("logs")
    ranks = {exits.rank_of(path): node for node, paths in logs.items() for path in paths}
    ranks.pop(-1, None)
    failures = start["failures"]
    if start["is_unopened"]:
        size, hosts = 0, {one["rank"]: one["host"] for one in failures if one["host"]}
    else:
        size, hosts = _world(about, of_this_start, failures, status)
    size = size or max([*ranks, *hosts, *(one["rank"] for one in failures)], default=0) + 1
    _fill_hosts(hosts, ranks)
    reported = {one["rank"] for one in failures}
    start["failures"] = [one for one in failures if one["rank"] < size]
    start["exits"] = {
        rank: one for rank, one in start["exits"].items() if rank < size and rank not in reported
    }
    return Evidence(
        folder=folder,
        status=status,
        locked=locked,
        about=about,
        settings=_settings(folder, damaged),
        records=records,
        of_this_start=of_this_start,
        hosts=hosts,
        nodes=ranks,
        world_size=size,
        last_sign=last_sign,
        damaged=damaged,
        **start,
    )


def _newest_start(
    folder: Path,
    by_launch: dict[str, list[dict[str, Any]]],
    launch: str,
    last_sign: float,
    locked: bool | None,
) -> dict[str, Any]:
    """Return what is left of the newest start: the launch of run.json, or one after it.

    Returns:
        The fields of Evidence about the start, and "logs", its log files by node.
    """
    opened = by_launch.get(launch, [])
    path = folder / "run.json"  # written once, when a start opens the run
    opened_at = path.stat().st_mtime if path.is_file() else 0.0
    logs = exits.newest_logs(folder, opened_at)
    started = exits.start_of(logs.get("0", []))
    found = {"logs": logs, "exits": exits.exits(logs), "told": exits.told(logs)}
    found |= {"started": started or opened_at, "later": 0.0, "is_unopened": False}
    found |= {"failures": opened, "earlier": len(by_launch.keys() - {launch})}
    unopened = [one for one in by_launch.get("", ()) if launch and one["time"] > last_sign]
    if last_sign and not unopened and started <= last_sign:
        return found
    failures = unopened if launch else opened
    reported = {one["rank"] for one in failures}
    in_logs = [one for one in exits.failures_in(logs) if one["rank"] not in reported]
    failures = [*failures, *in_logs]
    if last_sign and not failures and not found["exits"] and not locked:
        # it showed the result of a finished run, or was killed: what the run itself left counts
        found |= {"logs": {}, "exits": {}, "told": "", "later": started}
        return found | {"started": opened_at}
    found |= {"failures": failures, "earlier": len(by_launch.keys() - {""})}
    return found | {"is_unopened": True}


# ---- times ---------------------------------------------------------------------------------------
def _with_time(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without a time that is none."""
    is_right = exits.is_time(record.get("time"))
    return record if is_right else {name: record[name] for name in record if name != "time"}


def _times(records: list[dict[str, Any]]) -> list[float]:
    return [one["time"] for one in records if "time" in one]


def _written(folder: Path) -> Iterator[float]:
    """Yield when run.json and status.json were written, of those that are there."""
    for name in ("run.json", "status.json"):
        if (path := folder / name).is_file():
            yield path.stat().st_mtime


def _of_this_start(folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records since the last start record, if it is not of an earlier start."""
    starts = [i for i, one in enumerate(records) if one.get("kind") == "start"]
    if not starts:
        return records  # of an old run
    opened_at = next(_written(folder), 0.0)
    is_earlier = records[starts[-1]].get("time", 0.0) < opened_at - exits.COPIED_SECONDS
    return [] if is_earlier else records[starts[-1] :]


# ---- JSON and YAML -------------------------------------------------------------------------------
def _read_object(path: Path, damaged: list[str]) -> dict[str, Any]:
    content = read_json(path)
    if not content and path.exists():
        damaged.append(path.name)
    return content


def _settings(folder: Path, damaged: list[str]) -> dict[str, Any]:
    if not (folder / "config.yaml").exists():
        return {}
    try:
        settings = read_yaml(folder / "config.yaml")
    except ConfigError:
        settings = {}
    damaged += ["config.yaml"] * (not settings)
    return settings


# ---- ranks and hosts -----------------------------------------------------------------------------
def _world(
    about: dict[str, Any],
    records: list[dict[str, Any]],
    failures: list[dict[str, Any]],
    status: dict[str, Any],
) -> tuple[int, dict[int, str]]:
    """Return the world size of a launch, 0 where it is not known, and its hosts by rank."""
    start = next((one for one in records if one.get("kind") == "start"), {})
    names = start["hosts"] if isinstance(start.get("hosts"), list) else []
    hosts = {rank: name for rank, name in enumerate(names) if isinstance(name, str)}
    environment = about.get("environment")
    text = environment.get("WORLD_SIZE", "1") if isinstance(environment, dict) else ""
    size = int(text) if re.fullmatch(r"\d{1,6}", str(text)) else 0
    _, _, silent = status.get("reason", "").partition("No report from ")
    hosts |= {int(rank): host for rank, host in SILENT.findall(silent.partition(": ")[0])}
    hosts |= {one["rank"]: one["host"] for one in failures}
    if isinstance(about.get("host"), str):
        hosts.setdefault(0, about["host"])
    return size, hosts


def _fill_hosts(hosts: dict[int, str], nodes: dict[int, str]) -> None:
    """Add the hosts of ranks that share a node with one whose host is known."""
    of_node = {nodes[rank]: host for rank, host in hosts.items() if rank in nodes}
    for rank, node in nodes.items():
        if node in of_node:
            hosts.setdefault(rank, of_node[node])


# ---- words ---------------------------------------------------------------------------------------
def ranks_in_words(ranks: Iterable[int], hosts: dict[int, str]) -> str:
    """Return ranks with their hosts: "ranks 0 to 3 on gpu-a, rank 4 on gpu-b"."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    parts = []
    for host, of_host in by_host.items():
        spans: list[list[int]] = []
        for rank in of_host:
            if spans and spans[-1][-1] == rank - 1:
                spans[-1].append(rank)
            else:
                spans.append([rank])
        texts = [
            f"{span[0]} to {span[-1]}" if span[2:] else ", ".join(map(str, span)) for span in spans
        ]
        name = f"rank{'s' * (len(of_host) > 1)} {', '.join(texts)}"
        name = "a process" if of_host == [-1] else name
        parts.append(f"{name} on {host}" if host else name)
    return ", ".join(parts)


def place(failure: dict[str, Any]) -> str:
    """Return the innermost line of the project's own code: "a.py, line 3, in loss: x = 1"."""
    frame = own_frame(failure["frames"])
    if not frame:
        return ""
    at = f"{short_path(frame['file'])}, line {frame['line']}, in {frame['function']}"
    return f"{at}: {frame['code']}" if frame["code"] else at
