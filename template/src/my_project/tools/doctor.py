"""Say what failed first in a run, on which rank and host, the likely cause and what to do.

    python -m my_project doctor runs/image_classification
    python -m my_project doctor runs/image_classification --json

It reads the files of all ranks (docs/run-folder.md describes them), and changes nothing. What a
file says is marked as known; conclusions from it are marked as likely, with the reason. The exit
code is 0 if there was something to say, even about a running or finished run, and 2 if the folder
is not a run.

--json prints one object with these fields:
    run, happened, step, steps, time (in seconds since 1970)
    outcome: finished, preempted, running, starting, failed, interrupted or unknown
    first: null, or an object with rank, host, step, time, what, at and says (the file that says so)
    cause: a key of CAUSES, unknown, or "" if nothing failed
    certainty: known, likely, unknown or ""
    known, likely, look_at, remedy, others, damaged: each a list of sentences
    earlier_failures: the number of earlier starts of this run that left error files
"""

import json
import math
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
from ..files import is_number, open_own, read_json
from ..run_files import (
    Record,
    Status,
    each_start,
    is_locked,
    local_folder,
    newest_checkpoint,
    read_failures,
)
from ..words import format_seconds, make_parser, printable, say, shortened
from . import flight_recorder
from .reader import Run, read_folder, read_run, run_tool, valid_time

MAX_CHARACTERS = 500  # of a sentence
COPIED_SECONDS = 60.0  # in a copy of a run folder, the times of files may differ by this much
MIN_FREE_BYTES = 10e6  # less than a checkpoint of most models
MAX_RANKS = 1_000_000
WATCHED = ("stalled", "waiting")  # causes that the watchdog finds
TAIL_BYTES = 1 << 18  # of a log, whose end shows how the process ended
ABORTED = -6  # SIGABRT, which NCCL's own watchdog also sends after ours has reported a hang
BY_OTHERS = (-2, -10, -15)  # SIGINT, SIGUSR1, SIGTERM: a launcher forwards these
PREEMPTED = os.EX_TEMPFAIL  # the exit code of a run that was stopped and saved

# ---- the table: cause -> what is likely and why, what to do --------------------------------------
MORE_TIME = "set --stop_after, or allow the save more time between the signal and the kill"
CAUSES = {
    "exception": ("", "correct that line"),
    "setting": ("", "do what the error message asks for"),
    "device error": (
        "a GPU reports errors late: an earlier line is at fault, often with an index out of range",
        "run one process with CUDA_LAUNCH_BLOCKING=1, which shows the line that is at fault",
    ),
    "out of memory": (
        "",
        "set a smaller --batches.micro_batch_size (now {micro}): gradient accumulation rises to"
        " match, so the loss curve stays the same; if that is not enough, --precision bf16,"
        " --distributed.activation_checkpointing true, or FSDP2",
    ),
    "out of host memory": ("", "{less_memory}"),
    "too many open files": (
        "each loader worker and each open file or socket counts toward the limit",
        "raise the limit where the run starts (ulimit -n 65536), or let the dataset close the files"
        " that it has read{fewer_workers}",
    ),
    "full disk": ("", "free some space ({free} left), or lower checkpoints.keep (now {keep})"),
    "full shared memory": (
        "/dev/shm is too small for the micro-batches of the loader workers, or for NCCL",
        "enlarge /dev/shm (docker run --shm-size; in Kubernetes an emptyDir of medium Memory)"
        "{fewer_workers}",
    ),
    "loader worker": (
        "it was killed for lack of host memory, or /dev/shm was full: it reported no exception",
        "{less_memory}; in a container, enlarge /dev/shm (--shm-size)",
    ),
    "not finite": (
        "",
        "check the data of these steps; then try a lower optim.lr (now {lr}) or a longer"
        " optim.warmup_steps (now {warmup}){safer}",
    ),
    "no items": ("", "check the labels: all items of these steps are masked"),
    "stopped": ("a second signal or the scheduler ended it before it could save", MORE_TIME),
    "killed": (
        "the kernel (for lack of memory), the scheduler or a person did it: its launcher did not",
        "if memory ran out: {less_memory}; if time ran out: " + MORE_TIME,
    ),
    "crashed": (
        "C code of torch, a driver or another library crashed (SIGBUS: /dev/shm or a disk is full)",
        "run it again with PYTHONFAULTHANDLER=1, which prints the line at which it crashes",
    ),
    "exited": ("code called os._exit: an exception would leave a report", "find that call"),
    "stalled": ("", "find out what that line waits for (distributed.timeout_seconds: {timeout})"),
    "mismatched collectives": (
        "an if or a break that only some ranks take, or a size that depends on the rank",
        "make all ranks call the same collectives in the same order",
    ),
    "hang": (
        "the network or a GPU is at fault: all ranks wait in the same line",
        "--preflight measures both; NCCL_DEBUG=INFO prints what NCCL uses",
    ),
    "network": (
        "the network is at fault: all ranks lost contact",
        "--preflight measures each link",
    ),
    "no report": ("it was killed, crashed or cut off: it left no report", "find out what ended it"),
    "lost node": ("the host or its network failed: it is silent", "check whether {host} answers"),
    "interrupted": ("all processes ended together, with their launcher or the machine", ""),
}
LIKELY = ("hang", "network", "no report", "lost node", "interrupted")  # conclusions
# For these causes, the log of the kernel or of the scheduler may say more.
ENDED_FROM_OUTSIDE = ("out of host memory", "loader worker", "stopped", "killed", "no report")
ENDED_FROM_OUTSIDE += ("lost node", "interrupted")


# ---- the newest start ----------------------------------------------------------------------------
class Exit(NamedTuple):
    """How a process ended, according to its launcher."""

    code: int  # negative: the signal
    by_launcher: bool  # the launcher killed it, since it did not end after another rank had failed
    restarts: int  # the number of restarts in place before it ended
    time: float  # when its launcher wrote this, in seconds since 1970
    says: str


@dataclass(kw_only=True)
class Start:
    """What the files of a run say about its newest start."""

    run: Run
    launch: str = ""  # its name, as in run.json; "": not known
    is_unopened: bool = False  # it has not opened the run folder: it is starting, or has failed
    # A time in seconds since 1970 that bounds when the start began; 0: not known. If the start has
    # opened the run folder, it began before this time; otherwise, it began after this time.
    began: float = 0.0
    failures: list[Failure] = field(default_factory=list)  # sorted by time
    hosts: dict[int, str] = field(default_factory=dict)  # by rank, as far as known
    world_size: int = 1
    logs: dict[int, Path] = field(default_factory=dict)  # by rank
    exits: dict[int, Exit] = field(default_factory=dict)  # by rank, as the launchers say
    log_folders: list[Path] = field(default_factory=list)  # one for each node
    stop_signal: str = ""  # the signal that told it to stop

    @property
    def silent(self) -> list[int]:
        """Return the ranks that left no report."""
        return sorted({*range(self.world_size)} - {failure.rank for failure in self.failures})

    def describe(self, ranks: Iterable[int]) -> str:
        """Return ranks with their hosts: "ranks 0, 1 on gpu-a, rank 2 on gpu-b"."""
        by_host: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts.get(rank, ""), []).append(rank)
        return ", ".join(
            f"rank{'s' * (len(local) > 1)} {str(local)[1:-1]}" + f" on {host}" * bool(host)
            for host, local in by_host.items()
        )

    def names_of_hosts(self, ranks: Iterable[int]) -> str | None:
        """Return the hosts of ranks, as far as they are known: "gpu-a, gpu-b"."""
        return ", ".join(sorted({self.hosts.get(rank, "") for rank in ranks} - {""})) or None


def newest_start(run: Run, locked: bool | None) -> Start:
    """Return the newest start: the last one that opened the run folder, or a later one."""
    failure = run.status.failure
    in_status = [replace(failure, source=run.folder / "status.json")] if failure else []
    launch = run.info.launch or (failure.launch if failure else "")  # run.json may be damaged
    files = [run.folder / name for name in ("run.json", "status.json")]
    changed = [path.stat().st_mtime for path in files if path.is_file()]
    opened = changed[0] if changed else 0.0
    reports = run.failures.get(launch, [])
    failed = [valid_time(failure.time) for failure in reports]
    last_sign = max([*changed, *failed, run.last_record_time])
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(last_sign))
    start = _read_logs(Start(run=run), opened, launch, stamp)
    is_later = any(folder.name[:15] > stamp for folder in start.log_folders)
    # Restarts in place share a log folder, and launcher.json is written only when a start ends. So
    # exits and failures may be those of an earlier start.
    name, _, number = launch.rpartition(".")
    restarts = int(number) if number.isdecimal() and not is_later else 0
    attempts = [end.restarts for end in start.exits.values() if end.time > opened]
    attempts += [failure.attempt for failure in start.failures if failure.time > opened]
    newest = max([restarts, *attempts])
    start.exits = {rank: end for rank, end in start.exits.items() if end.restarts >= newest}
    in_logs = [failure for failure in start.failures if failure.attempt >= newest]
    later = [f for f in run.failures.get("", []) if valid_time(f.time) > last_sign]
    later += in_logs * is_later
    has_failed = any(ended.code for ended in start.exits.values())
    if name and newest > restarts and not is_later:  # a restart in place
        start.is_unopened, start.began, start.launch = True, last_sign, f"{name}.{newest}"
        reports = [*run.failures.get(start.launch, []), *in_logs]
    elif later or (is_later and (has_failed or locked or not last_sign)):
        start.is_unopened, start.began = True, last_sign
        reports = later
    else:
        if is_later:  # a later launch found a finished run, or was killed immediately: left out
            start, in_logs = Start(run=run), []
        start.launch, start.began = launch, opened
        in_logs = [failure for failure in in_logs if failure.launch in ("", launch)]
        reports = [*reports, *in_logs, *in_status]
        start.hosts = dict(enumerate(run.info.hosts))
    by_rank = {failure.rank: failure for failure in reversed(reports)}
    start.failures = sorted(by_rank.values(), key=lambda failure: failure.time)
    is_known = bool(start.hosts)
    start.hosts |= {failure.rank: failure.host for failure in start.failures}
    largest = max([0, *start.hosts, *(() if is_known else (*start.logs, *start.exits))])
    start.world_size = min(largest, MAX_RANKS) + 1
    return start


def _changed(path: Path) -> float:
    """Return when a file was changed; 0 if it is gone: launchers rename and remove files."""
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _read_logs(start: Start, opened: float, launch: str, stamp: str) -> Start:
    """Add what the newest log folder of each node contains, unless it is older than `opened`.

    If some folders are named later than `stamp`, folders with earlier names are left out, since the
    newest launch may have fewer nodes. Stop signals that came before the start `launch` are left
    out.
    """
    begun = max((b.time for b, _ in each_start(start.run.folder) if b.id == launch), default=0.0)
    nodes = sorted(start.run.folder.glob("logs/node_*/"))
    newest = [sorted(node.glob("[0-9]*T[0-9]*/"))[-1:] for node in nodes]  # by the time in the name
    logs: list[Path] = []
    oldest = opened - COPIED_SECONDS
    folders = [f for f in chain(*newest) if max(map(_changed, f.iterdir()), default=0.0) >= oldest]
    start.log_folders = [folder for folder in folders if folder.name[:15] > stamp] or folders
    for folder in start.log_folders:
        logs += folder.glob("rank_" + 5 * "[0-9]" + ".log")
        start.failures += read_failures(sorted(folder.glob("rank_*.json")))
        launcher = read_json(folder / "launcher.json")
        notes = [read_json(path) for path in sorted(folder.glob("signal_rank_*.json"))]
        notes = [note for note in (*notes, launcher) if valid_time(note.get("time")) >= begun]
        names = (note["signal"] for note in notes if isinstance(note.get("signal"), str))
        start.stop_signal = start.stop_signal or next(names, "")
        start.exits |= _exits(launcher, folder / "launcher.json")
    # after the nodes of a run have changed, a node may have other ranks: the newest log counts
    logs.sort(key=_changed)
    start.logs = {int(path.stem[5:]): path for path in logs}
    return start


def _exits(launcher: dict[str, Any], path: Path) -> dict[int, Exit]:
    """Return by rank how processes ended, in the order in which their launcher wrote it."""
    exits, killed, codes = {}, launcher.get("killed"), launcher.get("exit_codes")
    restarts = number if type(number := launcher.get("restarts")) is int else 0
    written = valid_time(launcher.get("time"))
    for text, code in codes.items() if isinstance(codes, dict) else ():
        if text.isdecimal() and isinstance(code, int) and code != PREEMPTED:
            by_launcher = isinstance(killed, list) and int(text) in killed
            says = f"{path}: rank {text}: {code}"
            exits[int(text)] = Exit(code, by_launcher, restarts, written, says)
    return exits


def _tail(path: Path | None) -> str:
    """Return the end of a log; "" if there is no log."""
    with suppress(OSError), open_own(path or "") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")
    return ""


# ---- the cause -----------------------------------------------------------------------------------
def find_cause(start: Start) -> dict[str, Any]:
    """Return the cause of a failed start, and what failed first, as a dict.

    Its keys are "cause" and "what". It may also have "says", "known", "look_at", "likely" (which
    replaces what CAUSES says), "is_known" (which replaces what LIKELY says), and fields of an error
    file, such as "rank".
    """
    failures = start.failures
    first = first_failure(failures)
    kind = first.cause if first else ""
    if first and kind not in (*CONSEQUENCES, *WATCHED, "stopped"):
        return _reported(first)
    watched = [failure for failure in failures if failure.cause in WATCHED]
    exits = {
        rank: ended
        for rank, ended in start.exits.items()
        if rank in start.silent and not ended.by_launcher and ended.code not in BY_OTHERS
        if not (watched and (ended.code > 0 or ended.code == ABORTED))
        if not (start.stop_signal and ended.code == 1)  # process.Launcher exits with 1
    }
    if exits:
        return _unreported_exit(start, exits)
    if not first:
        return _without_report(start)
    if kind == "stopped":
        return _reported(first)
    cause = _cause_from(first, "network")
    if kind == "stalled" or first in late(failures):
        cause = _stalled(start, first)
    elif start.silent:
        cause = _silent_ranks(start, first)
    elif watched:
        cause = _all_wait(start, watched)
    return _with_dumps(start, cause) if watched else cause


def _cause_from(failure: Failure, cause: str, **facts: Any) -> dict[str, Any]:
    """Return a cause with what an error file says; `facts` add to it or override it."""
    reported = {"rank": failure.rank, "host": failure.host, "step": failure.step, "at": failure.at}
    reported |= {"time": failure.time, "what": failure.reason, "says": str(failure.source)}
    return reported | {"cause": cause, "known": []} | facts


def _reported(failure: Failure) -> dict[str, Any]:
    """Return the cause that a failure reports."""
    kind = failure.cause if failure.cause in CAUSES else "exception"
    if failure.errno in FULL_DISK and kind != "full shared memory":
        kind = "full disk"
    kind = "no items" if failure.num_items == 0 else kind
    cause = _cause_from(failure, kind)
    if kind in ("not finite", "no items"):
        cause["known"].append(f"steps {failure.skipped_from} to {failure.skipped_to} were skipped")
    if failure.loss_is_finite is False:
        cause["known"].append("the loss on this rank was not finite: check its data first")
    elif kind == "not finite":
        cause["likely"] = ["the backward pass overflowed: the loss was finite on every rank"]
    return cause


def _unreported_exit(start: Start, exits: dict[int, Exit]) -> dict[str, Any]:
    """Return the cause if processes left no report, but their launcher wrote how they ended."""
    # after a rank of another node has ended, NCCL's watchdog aborts the ranks that wait for it
    rank, first = min(exits.items(), key=lambda item: item[1].code == ABORTED)
    same = [other for other, ended in exits.items() if ended.code == first.code]
    kind, ending = "exited", f"with exit code {first.code}"
    if first.code < 0:
        names = {number.value: number.name for number in Signals}
        ending = f"by signal {-first.code} ({names.get(-first.code, 'unknown')})"
        kind = "killed" if -first.code == SIGKILL else "crashed"
    # only after an abort: another log may have NCCL's message from an earlier start
    is_abort = first.code == ABORTED
    if is_abort and SENTENCES["mismatched collectives"].search(_tail(start.logs.get(rank))):
        kind = "mismatched collectives"
    cause = {
        "cause": kind,
        "rank": None if same[1:] else rank,
        "host": start.names_of_hosts(same),
        "time": min((failure.time for failure in start.failures), default=None),
        "what": f"{start.describe(same)} ended {ending}, without a report",
        "says": first.says,
        "look_at": [f"the end of {start.logs[rank]}"] if rank in start.logs else [],
    }
    if kind == "killed" and start.stop_signal:
        why = f"it had been told to stop ({start.stop_signal}), and had not saved"
        cause["likely"] = [f"{CAUSES['stopped'][0]}: {why}"]
    return cause


def _stalled(start: Start, first: Failure) -> dict[str, Any]:
    """Return the cause if a rank made no progress, while others may have waited for it."""
    waiting = [failure for failure in start.failures if failure.cause == "waiting"]
    cause = _cause_from(first, "stalled", known=_waited(start, waiting), likely=[])
    if first.cause != "stalled":
        why = "it went on after the others had given up"
        cause["likely"] = [f"it was stopped (SIGSTOP, a debugger) or cut off for a time: {why}"]
    elif waiting:
        cause["likely"] = ["the others wait for it: it is the only rank that waits for no other"]
    return cause


def _waited(start: Start, waiting: list[Failure]) -> list[str]:
    """Return a sentence for each line in which ranks waited for others."""
    places: dict[str, list[int]] = {}
    for failure in waiting:
        places.setdefault(failure.at.place if failure.at else "", []).append(failure.rank)
    return [
        f"{start.describe(ranks)} waited" + f" in {place}" * bool(place)
        for place, ranks in places.items()
    ]


def _silent_ranks(start: Start, noticed: Failure) -> dict[str, Any]:
    """Return the cause if some ranks left no report, and other ranks lost contact with them."""
    silent, hosts = start.silent, start.hosts
    silent_hosts = {hosts.get(rank, "") for rank in silent}
    reporting_hosts = {failure.host for failure in start.failures}
    notice = f"{start.describe([noticed.rank])} noticed: {noticed.reason}"
    what = f"no report from {start.describe(silent)}; {notice}"
    cause = _cause_from(noticed, "no report", what=what, step=None, at=None)
    rank, host = None if silent[1:] else silent[0], start.names_of_hosts(silent)
    cause |= {"rank": rank, "host": host}
    exits = [start.exits[rank] for rank in silent if rank in start.exits]
    has_logs = any(rank in start.logs for rank in silent)
    if exits and all(ended.by_launcher for ended in exits):
        stuck = "it was stopped (SIGSTOP, a debugger) or stuck in C code or storage"
        cause["likely"] = [f"{stuck}: its launcher had to kill it"]
    elif not has_logs and not silent_hosts & {"", *reporting_hosts}:
        cause["cause"] = "lost node"
    return cause


def _all_wait(start: Start, waiting: list[Failure]) -> dict[str, Any]:
    """Return the cause if all ranks wait for one another, in the loop or in the recipe."""
    known = _waited(start, waiting)
    kind = "mismatched collectives" if len(known) > 1 else "hang"
    modules = str(start.run.settings.get("recipe")).split(".")
    in_recipe = [rank for rank in waiting if rank.at and Path(rank.at.file).stem in modules]
    cause = _cause_from((in_recipe or waiting)[0], kind, is_known=False, known=known)
    if in_recipe and kind != "hang":
        rank = start.describe([in_recipe[0].rank])
        return cause | {"likely": [f"{rank} is at fault: it waits in the recipe"]}
    return cause | {"what": "all ranks waited for one another", "at": None}


def _with_dumps(start: Start, cause: dict[str, Any]) -> dict[str, Any]:
    """Return the cause of a hang with what the dumps of NCCL's flight recorder show."""
    dumps = flight_recorder.read(start.run.folder, start.began)
    finding = flight_recorder.compare(dumps)
    cause |= {"look_at": dumps.notes}
    if not finding:
        return cause
    calls = [f"{start.describe(ranks)} called {call}" for call, ranks in finding.calls.items()]
    if finding.missing:
        calls.append(f"{start.describe(finding.missing)} had not called it")
    collective = f"collective {finding.number} of group {finding.group}"
    cause["known"].append(f"{collective}: {'; '.join(calls)} (errors/nccl_trace_rank_*.json)")
    if without := {*range(start.world_size)} - dumps.ranks:
        cause["known"].append(f"no dump from {start.describe(without)}")
    if finding.kind == "mismatch":
        differing = finding.differing
        cause |= _of_rank(start, differing[0] if differing else None)
        cause |= {"cause": "mismatched collectives", "is_known": True, "at": None}
        cause["what"] = "ranks called different collectives"
        if differing:
            cause["likely"] = [f"at fault: {start.describe(differing)}, since the others agree"]
    elif finding.missing and cause["cause"] in ("hang", "mismatched collectives"):
        cause |= _of_rank(start, finding.missing[0])
    return cause


def _of_rank(start: Start, rank: int | None) -> dict[str, Any]:
    """Return the fields of a cause that depend on the rank at fault; None: no single rank."""
    values = {"rank": rank, "host": None if rank is None else start.hosts.get(rank)}
    for report in (failure for failure in start.failures if failure.rank == rank):
        values |= {"step": report.step, "time": report.time, "at": report.at}
        values["says"] = str(report.source)
    return values


def _without_report(start: Start) -> dict[str, Any]:
    """Return the cause if no process reported anything."""
    status = Status() if start.is_unopened else start.run.status
    what = status.reason or "no process reported why it ended"
    cause: dict[str, Any] = {"cause": "interrupted", "what": what}
    if shutil.disk_usage(start.run.folder).free < MIN_FREE_BYTES:
        likely = "the disk is full: a process that cannot write leaves no report"
        return cause | {"cause": "full disk", "is_known": False, "likely": [likely]}
    if start.stop_signal:
        known = f"it was told to stop ({start.stop_signal}), and had not saved"
        return cause | {"cause": "stopped", "known": [known]}
    return cause | ({"cause": "unknown"} if status.outcome == "failed" else {})


def slow_rank(records: list[Record]) -> list[str]:
    """Return a sentence if one rank made the others wait in most of the last records."""
    fields = ("rank_seconds_max", "rank_seconds_min", "step_seconds")
    intervals = [one for one in records if not math.isnan(sum(map(one.number, fields)))]
    counts = Counter(
        f"rank {one.values.get('slowest_rank')} on {one.values.get('slowest_host')}"
        for one in intervals  # less than 10 ms is noise, even in a short step
        if one.number("rank_seconds_max") - one.number("rank_seconds_min")
        > 0.01 + one.number("step_seconds") / 4
    )
    slow = [rank for rank, count in counts.items() if count > max(4, 0.8 * len(intervals))]
    return [f"{rank} is slow: others wait for it for a quarter of a step or more" for rank in slow]


def check_findings(records: list[Record]) -> list[str]:
    """Return what the checks found in the run, each with the first step at which they found it."""
    steps = {one.text("problem"): one.step for one in reversed(records) if one.text("problem")}
    firsts = sorted(steps.items(), key=lambda item: item[1])[:5]
    return [f"from step {step} on: {problem}" for problem, step in firsts]


def lowered_micro_batch(folder: Path) -> list[str]:
    """Return a sentence with the size to which the launcher lowered micro-batches, if any."""
    size = next((begin.micro_batch_size for begin, _ in reversed(each_start(folder))), None)
    why = "since larger micro-batches did not fit in memory (starts.jsonl)"
    return [f"batches.micro_batch_size was lowered to {size}, {why}"] if size else []


# ---- the diagnosis -------------------------------------------------------------------------------
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
    kind, note = cause.get("cause", ""), run.status.note or ""  # the note is about a failed save
    values = _values(start, cause)
    is_disk_full = not cause and bool(SENTENCES["full disk"].search(note))
    row = CAUSES.get("full disk" if is_disk_full else kind, ("", ""))
    likely, remedy = ([text.format_map(values)] if text else [] for text in row)
    if outcome not in ("finished", "running", "starting"):
        step = newest_checkpoint(folder)
        effect = "starts again from step 0" if step is None else f"continues from step {step}"
        if step is not None and not run.settings:  # a start refuses the folder
            remedy.append("restore config.yaml (best/ and export/ have copies)")
        remedy.append(f"{'then ' * bool(remedy)}the same command {effect}")
    look_at = [*cause.get("look_at", [])]
    if kind in ENDED_FROM_OUTSIDE:
        look_at.append(f"on {values['host']}: dmesg -T | grep -iE 'killed process|out of memory'")
        look_at.append(f"the log of the scheduler, if there is one{values['job']}")
    known = [note] * bool(note) + cause.get("known", []) + slow_rank(run.skimmed[0])
    known = known or ["no failure"] * (outcome in ("finished", "preempted"))
    if (count := run.status.warnings) and not start.is_unopened:
        known.append(f"rank 0 printed warnings ({count}): see {start.logs.get(0, 'its output')}")
    known += check_findings(run.skimmed[1]) + lowered_micro_batch(folder)
    certainty = "known" if cause.get("is_known", kind not in LIKELY) else "likely"
    place: Frame | None = cause.get("at")
    first = {name: cause.get(name) for name in ("rank", "host", "step", "what", "says")}
    when = valid_time(cause.get("time") or 0.0) or None
    first |= {"time": when, "at": place.place if place else ""}
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
            f"{start.describe([failure.rank])} failed too: {failure.cause}"
            for failure in start.failures
            if cause and failure.rank != cause.get("rank")
        ],
        "damaged": [] if start.is_unopened else run.problems,
        "earlier_failures": len(run.failures.keys() - {"", start.launch}),
    }


def _outcome(start: Start, locked: bool | None) -> str:
    """Return the outcome of the newest start, as --json names it."""
    if start.is_unopened:
        return "starting" if locked and not start.failures and not start.exits else "failed"
    if start.run.status.outcome:
        return start.run.state
    return "failed" if start.failures else "running" if locked else "unknown"


def _happened(start: Start, outcome: str, now: float, locked: bool | None) -> str:
    """Return in a sentence or two how far the run is, and how old its last record is."""
    run, status = start.run, start.run.status
    text = f"step {run.step if status.outcome else '?'} of {status.steps or '?'}"
    if start.is_unopened:
        before = f"; the start before it: {status.outcome}, {text}" * bool(status.outcome)
        return f"the newest start has not opened the run folder{before}"
    if outcome != "running":
        reason = "" if outcome == "failed" else status.reason  # "first" says why it failed
        return f"{text}: {reason}" if reason else text
    limit = run.settings.get("distributed.timeout_seconds")
    limit = limit if is_number(limit) else 600
    idle = max(0.0, now - max(start.began, run.last_record_time))
    text += f", the last record is {format_seconds(idle)} old"
    if idle > limit:
        text += f". That is long: the watchdog ends a run after {limit} s without progress"
        text += " (more at startup, in evaluations and in saves)"
    unknown = ". Whether its processes still run is not known: this file system has no locks"
    return text + unknown * (locked is None)


def _values(start: Start, cause: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the placeholders in CAUSES."""
    setting, environment = start.run.settings.get, start.run.info.environment
    job = environment.get("SLURM_JOB_ID")
    workers = setting("batches.workers", 0)
    workers = "one fewer than the CPUs, at most 8" if workers is None else workers
    micro = setting("batches.micro_batch_size") or "as large as it can be"
    # on a CPU, the activations are in host memory too
    is_on_cpu = str(environment.get("CUDA_VISIBLE_DEVICES")).startswith("-1")
    is_on_cpu |= str(environment.get("ACCELERATE_USE_CPU")).lower() in ("true", "1")
    smaller = [f"set a smaller --batches.micro_batch_size (now {micro})"] * is_on_cpu
    fewer = [f"use fewer batches.workers (now {workers})"] * (workers != 0)
    return {
        "host": cause.get("host") or start.hosts.get(cause.get("rank") or 0) or "its host",
        "job": f": sacct -j {job} -o JobID,State,ExitCode,MaxRSS" if job else "",
        "free": f"{shutil.disk_usage(start.run.folder).free / 1e9:.3g} GB",
        "micro": micro,
        "fewer_workers": f"; {fewer[0]}" if fewer else "",
        "less_memory": ", or ".join([*fewer, *smaller, "request more memory for the job"]),
        "keep": setting("checkpoints.keep"),
        "lr": setting("optim.lr"),
        "warmup": setting("optim.warmup_steps"),
        "safer": ", or --precision no" * (start.run.info.numerics.get("precision") != "no"),
        "timeout": setting("distributed.timeout_seconds"),
    }


# ---- output --------------------------------------------------------------------------------------
def print_diagnosis(diagnosis: dict[str, Any]) -> None:
    """Print a diagnosis as text; after a failure, the last line says what to do."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    say(f"--- {diagnosis['outcome']}: {diagnosis['run']} ".ljust(width, "-"))
    pairs = [("what", diagnosis["happened"])]
    if first := diagnosis["first"]:
        names = [name for name in ("rank", "host", "step") if first[name] is not None]
        where = ", ".join(f"{name} {first[name]}" for name in names)
        clock = time.strftime(" at %H:%M:%S", time.localtime(first["time"])) * bool(first["time"])
        pairs.append(("first", f"{where}{clock}: {first['what']}".removeprefix(": ")))
        pairs += [("at", first["at"]), ("file", first["says"] or "")]
        pairs.append(("cause", f"{diagnosis['cause']} ({diagnosis['certainty']})"))
    for name in ("known", "likely", "others", "damaged", "look_at", "remedy"):
        label, texts = name.replace("_", " "), diagnosis[name]
        pairs += [(label * (not i), text) for i, text in enumerate(texts)]
    for name, text in pairs:
        if text:
            text = shortened(printable(" ".join(text.split())), MAX_CHARACTERS)
            lines = textwrap.wrap(text, width - 11, break_long_words=False, break_on_hyphens=False)
            say(f"  {name:8} " + f"\n{'':11}".join(lines))


def main() -> None:
    """Read the command line, and print the diagnosis."""
    parser = make_parser(__doc__, "doctor")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    arguments = parser.parse_args()
    diagnosis = diagnose(local_folder(arguments.run))
    print(json.dumps(diagnosis, indent=1)) if arguments.json else print_diagnosis(diagnosis)


if __name__ == "__main__":
    run_tool(main)
