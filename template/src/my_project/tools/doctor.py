"""Say what happened first in a run, on which rank and host, the likely cause and what to do.

    python -m my_project doctor runs/image_classification
    python -m my_project doctor runs/image_classification --json

Reads the files that docs/run-folder.md describes, of all ranks; changes nothing. What a file says
is marked as known, what only follows from it as likely, with the reason. Exit code 0 if it could
say something, also of a run that goes on or has finished; 2 for a folder that is not a run.

--json prints one object: run, outcome (finished, preempted, running, starting, failed, interrupted,
unknown), happened, step, steps, time (seconds since 1970), first (null, or rank, host, step, time,
what, at, says: the file that says so), cause (a key of CAUSES; "" where nothing failed), certainty
(known, likely, unknown or ""), known, likely, look_at, remedy, others, damaged (lists of
sentences), and earlier_failures (starts of this run that failed before).
"""

import json
import os
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, NamedTuple

from ..failures import (
    CONSEQUENCES,
    FULL_DISK,
    SENTENCES,
    Failure,
    Frame,
    first_failure,
    late,
)
from ..files import open_own, read_json
from ..run_files import each_start, is_locked, local_folder, read_failures, step_of
from ..words import format_seconds, printable, say, shortened
from . import flight_recorder
from .reader import Run, parser_of, read_folder, read_run, run_tool, time_of

LONGEST = 500  # characters of a sentence
COPIED_SECONDS = 60.0  # by which the times of files may differ in a copy of a run folder
LITTLE_BYTES = 10e6  # of free space: less than a checkpoint of most models
MOST_RANKS = 1_000_000
WATCHED = ("stalled", "waiting")  # causes that the watchdog finds
TAIL_BYTES = 1 << 18  # of a log: what tells of the end stands there
ABORTED = -6  # SIGABRT: also by NCCL's own watchdog, after ours has reported a hang
BY_OTHERS = (-2, -15)  # SIGINT and SIGTERM: a launcher ends the other ranks with them
PREEMPTED = os.EX_TEMPFAIL  # the exit code of a run that was stopped and saved

# ---- the table: cause -> what is likely and why, what to do --------------------------------------
MORE_TIME = "--stop_after, or more time between the signal and the kill, so that it can save"
CAUSES = {
    "exception": ("", "correct that line"),
    "setting": ("", "do as the sentence says"),
    "device error": (
        "an earlier line is at fault, since a GPU reports errors late; often a wrong index",
        "CUDA_LAUNCH_BLOCKING=1, in one process, shows the line that is at fault",
    ),
    "out of memory": (
        "",
        "a smaller --batches.micro_batch_size (now {micro}): accumulation rises to match, so the"
        " curve stays; then --precision bf16, --distributed.activation_checkpointing true, FSDP2",
    ),
    "out of host memory": ("", "{less_memory}"),
    "too many open files": (
        "each loader worker and each file or socket that stays open counts",
        "a higher limit where the run starts (ulimit -n 65536); a dataset that closes the files it"
        " has read{fewer_workers}",
    ),
    "full disk": ("", "free space ({free} are left), or a smaller checkpoints.keep (now {keep})"),
    "full shared memory": (
        "/dev/shm is too small for the micro-batches of the loader workers, or for NCCL",
        "a larger /dev/shm (docker run --shm-size; in Kubernetes an emptyDir of medium Memory), or"
        " fewer batches.workers (now {workers})",
    ),
    "loader worker": (
        "killed for lack of host memory, or /dev/shm was full, since a worker passes exceptions on",
        "{less_memory}; in a container a larger /dev/shm (--shm-size)",
    ),
    "not finite": (
        "",
        "check the data of these steps; a lower optim.lr (now {lr}), a longer optim.warmup_steps"
        " (now {warmup}){safer}",
    ),
    "no items": ("", "check the labels: all items of these steps are masked"),
    "stopped": ("by a second signal, or at the end of the scheduler's grace period", MORE_TIME),
    "killed": (
        "by the kernel for lack of memory, the scheduler or a person, since the loop kills no rank",
        "for memory: {less_memory}; for time: " + MORE_TIME,
    ),
    "crashed": (
        "in C code of torch, a driver or another library (SIGBUS: /dev/shm or a disk is full)",
        "PYTHONFAULTHANDLER=1 in the environment prints the line at which it crashes",
    ),
    "exited": ("some code called os._exit, since an exception leaves a report", "look for it"),
    "stalled": ("", "see what that line waits for; distributed.timeout_seconds is {timeout}"),
    "mismatched collectives": (
        "an if or a break that not all ranks take, or a size that depends on the rank",
        "let all ranks call the same collectives in the same order",
    ),
    "hang": (
        "the network or a GPU, since all wait in one line",
        "--preflight measures both; NCCL_DEBUG=INFO says what NCCL uses",
    ),
    "network": ("the network, since all ranks lost contact", "--preflight measures each link"),
    "no report": (
        "killed, crashed or cut off, since it reported nothing",
        "find out what ended it",
    ),
    "lost node": ("the host or its network, since it is silent", "see whether {host} answers"),
    "interrupted": ("all processes ended at once, with their launcher or the machine", ""),
}
LIKELY = ("hang", "network", "no report", "lost node", "interrupted")  # no file says these
# Of these the kernel or the scheduler may know more.
ENDED_FROM_OUTSIDE = ("out of host memory", "loader worker", "stopped", "killed", "no report")
ENDED_FROM_OUTSIDE += ("lost node", "interrupted")


# ---- the newest start ----------------------------------------------------------------------------
class Exit(NamedTuple):
    """How a process ended, as its launcher wrote."""

    code: int  # negative: the signal
    by_launcher: bool  # killed by it, since it did not end after the failure of another rank
    says: str


@dataclass(kw_only=True)
class Start:
    """What is left of the newest start of a run."""

    run: Run
    is_unopened: bool = False  # it ended, or is, before the run was open
    began: float = 0.0  # or later, in seconds since 1970; 0: not known
    failures: list[Failure] = field(default_factory=list)  # by time
    hosts: dict[int, str] = field(default_factory=dict)  # by rank, as far as known
    world_size: int = 1
    logs: dict[int, Path] = field(default_factory=dict)  # by rank
    exits: dict[int, Exit] = field(default_factory=dict)  # by rank, as the launchers say
    ended: dict[Path, dict[str, Any]] = field(default_factory=dict)  # launcher.json, by log folder
    told: str = ""  # the signal that told it to stop

    @property
    def silent(self) -> list[int]:
        """Return the ranks that left no report."""
        return sorted({*range(self.world_size)} - {one.rank for one in self.failures})

    def names(self, ranks: Iterable[int]) -> str:
        """Return ranks with their hosts: "ranks 0, 1 on gpu-a, rank 2 on gpu-b"."""
        by_host: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts.get(rank, ""), []).append(rank)
        return ", ".join(
            f"rank{'s' * (len(of) > 1)} {str(of)[1:-1]}" + f" on {host}" * bool(host)
            for host, of in by_host.items()
        )


def newest_start(run: Run, locked: bool | None) -> Start:
    """Return what is left of the newest start: the one that opened the run last, or a later one."""
    noted = [replace(one, source=run.folder / "status.json") for one in [run.status.failure] if one]
    launch = run.info.launch or next((one.launch for one in noted), "")  # run.json may be damaged
    files = [run.folder / name for name in ("run.json", "status.json")]
    changed = [path.stat().st_mtime for path in files if path.is_file()]
    opened = changed[0] if changed else 0.0
    reports = run.failures.get(launch, [])
    last_sign = max(
        [*changed, *map(when, reports), *map(time_of, run.skimmed[0][-1:])], default=0.0
    )
    start = _read_logs(Start(run=run), opened)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(last_sign))
    is_later = min((folder.name[:15] for folder in start.ended), default="") > stamp
    later = [one for one in run.failures.get("", []) if when(one) > last_sign]
    later += start.failures * is_later
    has_failed = any(one.code for one in start.exits.values())
    if later or (is_later and (has_failed or locked or not last_sign)):
        start.is_unopened, start.began = True, last_sign
        reports = later
    else:
        if is_later:  # it only showed the result of a finished run, or was killed at once
            start = Start(run=run)
        start.began = opened
        # torchrun may have restarted the processes, which write into the same folder
        ours = [one for one in start.failures if one.launch in ("", launch)]
        reports = [*reports, *ours, *noted]
        start.hosts = dict(enumerate(run.info.hosts))
    by_rank = {one.rank: one for one in reversed(reports)}
    start.failures = sorted(by_rank.values(), key=lambda one: one.time)
    is_known = bool(start.hosts)
    start.hosts |= {one.rank: one.host for one in start.failures}
    largest = max([0, *start.hosts, *(() if is_known else start.logs)])
    start.world_size = min(largest, MOST_RANKS) + 1
    return start


def when(failure: Failure) -> float:
    """Return when a process failed, in seconds since 1970; 0 where that cannot be."""
    return time_of({"time": failure.time})


def _read_logs(start: Start, opened: float) -> Start:
    """Add what the newest log folder of each node holds, but not from before the run was opened."""
    nodes = sorted(start.run.folder.glob("logs/node_*/"))
    newest = [sorted(node.glob("[0-9]*T[0-9]*/"))[-1:] for node in nodes]  # by the time in the name
    logs: list[Path] = []
    for folder in chain(*newest):
        changed = max((path.lstat().st_mtime for path in folder.iterdir()), default=0.0)
        if changed < opened - COPIED_SECONDS:
            continue
        logs += folder.glob("rank_" + 5 * "[0-9]" + ".log")
        start.failures += read_failures(sorted(folder.glob("rank_*.json")))
        start.ended[folder] = ended = read_json(folder / "launcher.json")
        signals = [read_json(path) for path in sorted(folder.glob("signal_rank_*.json"))]
        told = (one.get("signal") for one in (*signals, ended))
        start.told = start.told or next((one for one in told if isinstance(one, str)), "")
        start.exits |= _exits(ended, folder / "launcher.json")
    # a node has other ranks in a later attempt, where the nodes were others
    logs.sort(key=lambda path: path.lstat().st_mtime)
    start.logs = {int(path.stem[5:]): path for path in logs}
    return start


def _exits(ended: dict[str, Any], path: Path) -> dict[int, Exit]:
    """Return by rank how processes ended, as their launcher wrote, in order."""
    found, killed = {}, ended.get("killed")
    codes = _dict(ended.get("exit_codes"))
    for text, code in codes.items():
        if text.isdecimal() and isinstance(code, int) and code != PREEMPTED:
            by_launcher = isinstance(killed, list) and int(text) in killed
            found[int(text)] = Exit(code, by_launcher, f"{path}: rank {text}: {code}")
    return found


def _tail(path: Path | None) -> str:
    """Return the end of a log; "" where there is none."""
    with suppress(OSError), open_own(path or "") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")
    return ""


# ---- the cause -----------------------------------------------------------------------------------
def find_cause(start: Start) -> dict[str, Any]:
    """Return what happened first in a start that has failed: "cause", and what replaces the table.

    The keys are those of an error file, and besides: what, says, known, likely, look_at, is_known.
    """
    failures = start.failures
    first = first_failure(failures)
    kind = first.cause if first else ""
    if first and kind not in (*CONSEQUENCES, *WATCHED, "stopped"):
        return _reported(start, first)
    watched = [one for one in failures if one.cause in WATCHED]
    exits = {
        rank: one
        for rank, one in start.exits.items()
        if rank in start.silent and not one.by_launcher and one.code not in BY_OTHERS
        if not (watched and (one.code > 0 or one.code == ABORTED))
        if not (start.told and one.code == 1)  # of process.Launcher
    }
    if exits:
        return _ended(start, exits)
    if not first:
        return _without_report(start)
    if kind == "stopped":
        return _reported(start, first)
    cause = _of(first, "network", known=[])
    if kind == "stalled" or first in late(failures):
        cause = _stalled(start, first)
    elif start.silent:
        cause = _gone(start, first)
    elif watched:
        cause = _all_wait(start, watched)
    return _with_dumps(start, cause) if watched else cause


def _of(failure: Failure, cause: str, **more: Any) -> dict[str, Any]:
    """Return a cause with what an error file says."""
    facts = {"rank": failure.rank, "host": failure.host, "step": failure.step, "at": failure.at}
    facts |= {"time": failure.time, "what": failure.reason, "says": str(failure.source)}
    return facts | {"cause": cause, "known": []} | more


def _reported(start: Start, failure: Failure) -> dict[str, Any]:
    """Return the cause that a failure reports."""
    kind = failure.cause if failure.cause in CAUSES else "exception"
    if failure.errno in FULL_DISK and kind != "full shared memory":
        kind = "full disk"
    kind = "no items" if failure.num_items == 0 else kind
    cause = _of(failure, kind)
    if kind in ("not finite", "no items"):
        steps = f"steps {failure.skipped_from} to {failure.skipped_to} were skipped"
        cause["known"].append(steps)
    if failure.loss_is_finite is False:
        cause["known"].append("the loss of this rank was not finite: look at its data first")
    elif kind == "not finite":
        likely = "it overflowed in the backward pass, since no rank had a loss that is not finite"
        cause["likely"] = [likely]
    return cause


def _ended(start: Start, exits: dict[int, Exit]) -> dict[str, Any]:
    """Return the cause where a launcher says how processes ended that left no report."""
    rank, first = next(iter(exits.items()))
    same = [other for other, one in exits.items() if one.code == first.code]
    kind, how = "exited", f"with exit code {first.code}"
    if first.code < 0:
        names = {number.value: number.name for number in Signals}
        how = f"by signal {-first.code} ({names.get(-first.code, 'unknown')})"
        kind = "killed" if -first.code == SIGKILL else "crashed"
    if SENTENCES["mismatched collectives"].search(_tail(start.logs.get(rank))):
        kind = "mismatched collectives"
    cause = {
        "cause": kind,
        "rank": None if same[1:] else rank,
        "host": start.hosts.get(rank),
        "time": min((one.time for one in start.failures), default=None),
        "what": f"{start.names(same)} ended {how}, without a report",
        "says": first.says,
        "look_at": [f"the end of {start.logs[rank]}"] if rank in start.logs else [],
    }
    if kind == "killed" and start.told:
        told = f"since it was told to stop ({start.told}) before and had not saved"
        cause["likely"] = [f"{CAUSES['stopped'][0]}, {told}"]
    return cause


def _stalled(start: Start, first: Failure) -> dict[str, Any]:
    """Judge a rank that made no progress, while others may have waited for it."""
    waiting = [one for one in start.failures if one.cause == "waiting"]
    cause = _of(first, "stalled", known=_waited(start, waiting), likely=[])
    if first.cause != "stalled":
        why = "since it went on when the others had given up"
        cause["likely"] = [f"stopped (SIGSTOP, a debugger) or cut off for a time, {why}"]
    elif waiting:
        cause["likely"] = ["the others wait for it, since it alone waits for no other rank"]
    return cause


def _waited(start: Start, waiting: list[Failure]) -> list[str]:
    """Return a sentence for each line in which ranks waited for others."""
    places: dict[str, list[int]] = {}
    for one in waiting:
        places.setdefault(one.at.place if one.at else "", []).append(one.rank)
    return [f"{start.names(ranks)} waited in {place}" for place, ranks in places.items()]


def _gone(start: Start, noticed: Failure) -> dict[str, Any]:
    """Judge ranks that left no report, which the others noticed."""
    silent, hosts = start.silent, start.hosts
    gone_hosts = {hosts.get(rank, "") for rank in silent}
    seen_hosts = {one.host for one in start.failures}
    by = start.names([noticed.rank])
    what = f"no report from {start.names(silent)}, as {by} noticed: {noticed.reason}"
    cause = _of(noticed, "no report", what=what, step=None, at=None)
    cause |= {"rank": None if silent[1:] else silent[0], "host": ", ".join(sorted(gone_hosts))}
    exits = [start.exits[rank] for rank in silent if rank in start.exits]
    folders = {start.logs[rank].parent for rank in silent if rank in start.logs}
    if exits and all(one.by_launcher for one in exits):
        stuck = "stopped (SIGSTOP, a debugger) or stuck in C code or storage"
        cause["likely"] = [f"{stuck}, since its launcher had to kill it"]
    elif not folders and not gone_hosts & {"", *seen_hosts}:
        cause["cause"] = "lost node"
    return cause


def _all_wait(start: Start, waiting: list[Failure]) -> dict[str, Any]:
    """Judge ranks that all wait for one another: in the loop, or one in the recipe."""
    known = _waited(start, waiting)
    kind = "mismatched collectives" if len(known) > 1 else "hang"
    modules = str(start.run.settings.get("recipe")).split(".")
    own = [one for one in waiting if one.at and Path(one.at.file).stem in modules]
    cause = _of((own or waiting)[0], kind, is_known=False, known=known)
    if own and kind != "hang":
        return cause | {"likely": ["this rank is at fault, since it waits in the recipe"]}
    return cause | {"what": "all ranks waited for one another", "at": None}


def _with_dumps(start: Start, cause: dict[str, Any]) -> dict[str, Any]:
    """Return the cause of a hang with what the dumps of NCCL's flight recorder show."""
    dumps = flight_recorder.read(start.run.folder, start.began)
    finding = flight_recorder.compare(dumps)
    cause |= {"look_at": dumps.notes}
    if not finding:
        return cause
    calls = [f"{start.names(ranks)} called {call}" for call, ranks in finding.calls.items()]
    if finding.missing:
        calls.append(f"{start.names(finding.missing)} had not called it")
    of = f"collective {finding.number} of group {finding.group}"
    cause["known"].append(f"{of}: {'; '.join(calls)} (errors/nccl_trace_rank_*.json)")
    if without := {*range(start.world_size)} - dumps.ranks:
        cause["known"].append(f"no dump of {start.names(without)}")
    if finding.kind == "mismatch":
        cause |= {"cause": "mismatched collectives", "is_known": True, "at": None, "rank": None}
        cause["what"] = "ranks called different collectives"
        if fewest := finding.fewest:
            cause["rank"] = fewest[0]
            cause["likely"] = [f"{start.names(fewest)} is at fault, since the others agree"]
    elif finding.missing and cause["cause"] != "stalled":
        cause["rank"] = finding.missing[0]
    return cause


def _without_report(start: Start) -> dict[str, Any]:
    """Return what can be said where nothing was reported."""
    status = start.run.status
    what = status.reason or "no process reported why it ended"
    cause: dict[str, Any] = {"cause": "interrupted", "what": what}
    if shutil.disk_usage(start.run.folder).free < LITTLE_BYTES:
        likely = "the disk is full, since a process that cannot write leaves no report"
        return cause | {"cause": "full disk", "is_known": False, "likely": [likely]}
    if start.told:
        known = f"it was told to stop ({start.told}), and had not saved"
        return cause | {"cause": "stopped", "known": [known]}
    return cause | ({"cause": "unknown"} if status.outcome == "failed" else {})


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def slow_rank(records: list[dict[str, Any]]) -> list[str]:
    """Return a sentence if one rank made the others wait in most of the last records."""
    fields = ("rank_seconds_max", "rank_seconds_min", "step_seconds")
    rows = [  # of damaged ones none
        one for one in records if all(isinstance(one.get(name), (int, float)) for name in fields)
    ]
    found = Counter(
        f"rank {one.get('slowest_rank')} on {one.get('slowest_host')}"
        for one in rows  # 10 ms: less is noise, however short a step is
        if one["rank_seconds_max"] - one["rank_seconds_min"] > 0.01 + one["step_seconds"] / 4
    )
    slow = [rank for rank, count in found.items() if count > max(4, 0.8 * len(rows))]
    return [f"{rank} is slow: others wait for it for a quarter of a step or more" for rank in slow]


def by_checks(records: list[dict[str, Any]]) -> list[str]:
    """Return what the checks have found in the run, each with the first step at which they did."""
    found = {str(one["problem"]): one["step"] for one in reversed(records) if "problem" in one}
    firsts = sorted(found.items(), key=lambda item: item[1])[:5]
    return [f"from step {step} on: {problem}" for problem, step in firsts]


def by_memory(folder: Path) -> list[str]:
    """Return to which size the launcher has lowered the micro-batches, if it has."""
    size = next((one.get("micro_batch_size") for one in reversed(each_start(folder))), None)
    why = "since larger micro-batches did not fit in memory (starts.jsonl)"
    return [f"batches.micro_batch_size was lowered to {size}, {why}"] if size else []


# ---- what is said of it --------------------------------------------------------------------------
def diagnose(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Return what --json prints.

    Raises:
        ConfigError: the folder is not a run.
    """
    is_started = any(folder.glob("logs/node_*/*")) or (folder / "errors").is_dir()
    run = read_folder(folder) if is_started else read_run(folder)
    locked = is_locked(folder)
    start = newest_start(run, locked)
    outcome = _outcome(start, locked)
    cause = find_cause(start) if outcome in ("failed", "interrupted", "unknown") else {}
    kind, note = cause.get("cause", ""), run.status.note or ""  # on the last checkpoint
    values = _values(start, cause)
    row = CAUSES.get("full disk" if note and not cause else kind, ("", ""))
    likely, remedy = ([text.format_map(values)] if text else [] for text in row)
    if outcome not in ("finished", "running", "starting"):
        steps = [step_of(path.parent) for path in folder.glob("checkpoints/step_*/manifest.json")]
        at = f"continues from step {max(steps)}" if steps else "starts again from step 0"
        remedy.append(f"{'then ' * bool(remedy)}the same command {at}")
    look_at = [*cause.get("look_at", [])]
    if kind in ENDED_FROM_OUTSIDE:
        look_at.append(f"dmesg -T | grep -iE 'killed process|out of memory', on {values['host']}")
        look_at.append(f"the log of the scheduler, where there is one{values['job']}")
    known = [note] * bool(note) + cause.get("known", []) + slow_rank(run.skimmed[0])
    known = known or ["no failure"] * (outcome in ("finished", "preempted"))
    if (count := run.status.warnings) and not start.is_unopened:
        known.append(f"rank 0 gave warnings ({count}): see {start.logs.get(0, 'what it printed')}")
    known += by_checks(run.skimmed[1]) + by_memory(folder)
    certainty = "known" if cause.get("is_known", kind not in LIKELY) else "likely"
    place: Frame | None = cause.get("at")
    first = {name: cause.get(name) for name in ("rank", "host", "step", "what", "says")}
    first |= {"time": time_of(cause) or None, "at": place.place if place else ""}
    return {
        "run": str(folder),
        "outcome": outcome,
        "happened": _happened(start, outcome, now or time.time(), locked),
        "step": cause.get("step") or run.step,
        "steps": run.status.steps or None,
        "time": first["time"],
        "first": first if cause else None,
        "cause": kind,
        "certainty": "unknown" if kind == "unknown" else certainty if cause else "",
        "known": known,
        "likely": cause.get("likely", likely if cause else []),
        "look_at": look_at,
        "remedy": remedy,
        "others": [
            f"{start.names([one.rank])} too: {one.cause}"
            for one in start.failures
            if cause and one.rank != cause.get("rank")
        ],
        "damaged": [] if start.is_unopened else run.problems,
        "earlier_failures": len(run.failures.keys() - {"", run.info.launch}),
    }


def _outcome(start: Start, locked: bool | None) -> str:
    if start.is_unopened:
        return "starting" if locked and not start.failures and not start.exits else "failed"
    if not start.run.status.is_damaged:
        return start.run.state
    return "failed" if start.failures else "running" if locked else "unknown"


def _happened(start: Start, outcome: str, now: float, locked: bool | None) -> str:
    """Return in a sentence or two how far the run is, and since when."""
    status, last = start.run.status, max([start.began, *map(time_of, start.run.skimmed[0][-1:])])
    text = f"step {'?' if status.is_damaged else start.run.step} of {status.steps or '?'}"
    if start.is_unopened:
        before = f"; before it: {status.outcome}, {text}" * (not status.is_damaged)
        return f"the newest start did not open the run{before}"
    if outcome != "running":
        reason = "" if outcome == "failed" else status.reason  # that is told as the first
        return f"{text}: {reason}" if reason else text
    limit = start.run.settings.get("distributed.timeout_seconds", 600)
    text += f", the last record is {format_seconds(max(0.0, now - last))} old"
    if now - last > limit:
        text += f". It has not moved for long: its watchdog ends it after {limit} s without"
        text += " progress, and later at the start, in evaluations and saves"
    unknown = ". Whether its processes are still there is not known: no locks on this file system"
    return text + unknown * (locked is None)


def _values(start: Start, cause: dict[str, Any]) -> dict[str, Any]:
    """Return what fills the names in the table."""
    setting, environment = start.run.settings.get, start.run.info.environment
    job = environment.get("SLURM_JOB_ID")
    workers = setting("batches.workers", 0)
    workers = "one less than the CPUs" if workers is None else workers
    micro = setting("batches.micro_batch_size") or "as large as it can be"
    # there the activations are in host memory, too
    is_on_cpu = str(environment.get("CUDA_VISIBLE_DEVICES")).startswith("-1")
    is_on_cpu |= str(environment.get("ACCELERATE_USE_CPU")).lower() in ("true", "1")
    smaller = [f"a smaller --batches.micro_batch_size (now {micro})"] * is_on_cpu
    fewer = [f"fewer batches.workers (now {workers})"] * (workers != 0)
    return {
        "host": cause.get("host") or start.hosts.get(cause.get("rank") or 0) or "its host",
        "job": f": sacct -j {job} -o JobID,State,ExitCode,MaxRSS" if job else "",
        "free": f"{shutil.disk_usage(start.run.folder).free / 1e9:.3g} GB",
        "micro": micro,
        "fewer_workers": f"; {fewer[0]}" if fewer else "",
        "less_memory": "; ".join([*fewer, *smaller, "more memory for the job"]),
        "keep": setting("checkpoints.keep"),
        "lr": setting("optim.lr"),
        "warmup": setting("optim.warmup_steps"),
        "safer": ", --precision no" * (start.run.info.numerics.get("precision") != "no"),
        "timeout": setting("distributed.timeout_seconds"),
    }


# ---- output --------------------------------------------------------------------------------------
def print_diagnosis(found: dict[str, Any]) -> None:
    """Print it as text; the last line is what to do."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    say(f"--- {found['outcome']}: {found['run']} ".ljust(width, "-"))
    pairs = [("what", found["happened"])]
    if first := found["first"]:
        known = [name for name in ("rank", "host", "step") if first[name] is not None]
        where = ", ".join(f"{name} {first[name]}" for name in known)
        clock = time.strftime(" at %H:%M:%S", time.localtime(first["time"])) * bool(first["time"])
        pairs.append(("first", f"{where}{clock}: {first['what']}".removeprefix(": ")))
        pairs += [("at", first["at"]), ("says", first["says"] or "")]
        pairs.append(("cause", f"{found['cause']}: {found['certainty']}"))
    for name in ("known", "likely", "others", "damaged", "look_at", "remedy"):
        pairs += [(name.replace("_", " ") * (not i), text) for i, text in enumerate(found[name])]
    for name, text in pairs:
        if text:
            text = shortened(printable(" ".join(text.split())), LONGEST)
            lines = textwrap.wrap(text, width - 11, break_long_words=False, break_on_hyphens=False)
            say(f"  {name:8} " + f"\n{'':11}".join(lines))


def main() -> None:
    """Read the command line, and print what is found."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object, for tools")
    arguments = parser.parse_args()
    found = diagnose(local_folder(arguments.run))
    print(json.dumps(found, indent=1)) if arguments.json else print_diagnosis(found)


if __name__ == "__main__":
    run_tool(main)
