"""The cause where no process has reported it: ranks that hang, were killed, or are gone."""

import re
from dataclasses import replace
from signal import Signals
from typing import Any

from . import flight_recorder
from .causes import (
    LITTLE_BYTES,
    Cause,
    free_bytes,
    full_disk,
    judge,
    kernel_log,
    less_host_memory,
    of,
    with_memory,
)
from .evidence import Evidence, place, ranks_in_words

BY_OTHERS = (2, 15)  # SIGINT and SIGTERM: a launcher ends the other ranks with them
ABORTED = -6  # SIGABRT: also by NCCL's own watchdog, after ours has reported a hang
FAULTHANDLER = "PYTHONFAULTHANDLER=1 in the environment prints the line at which it crashes"
MORE_TIME = "more time between the signal and the kill, or --stop_after, which saves before it"
STATUS = re.compile(r"rank (\d{1,6}) on (\S+), step (\d+): (.*)", re.DOTALL)


# ---- a launcher says how a process ended ---------------------------------------------------------
def ended(evidence: Evidence) -> Cause | None:
    """Return the cause where a launcher says how a process ended that left no report."""
    watched = any(one["cause"] in ("stalled", "waiting") for one in evidence.failures)
    found = {
        rank: one
        for rank, one in evidence.exits.items()
        if not one.by_launcher
        and -one.code not in BY_OTHERS
        and "so this process exits" not in one.last  # process.Launcher
        and not (watched and (one.code > 0 or one.code == ABORTED))
    }
    if not found:
        return None
    rank, first = next(iter(found.items()))
    same = [other for other, one in found.items() if one.code == first.code]
    who = f"{ranks_in_words(same, evidence.hosts)} " * bool(same[1:])
    cause = Cause(
        kind="exited",
        rank=None if same[1:] else rank,
        time=min((one["time"] for one in evidence.failures if one["time"]), default=None),
        what=f"{who}ended with exit code {first.code}, without a report",
        says=f"{first.file}: {first.line}",
        likely=("some code called os._exit, since an exception would have been reported",),
        remedy=("look for os._exit in the recipe and its libraries",),
    )
    if first.code < 0:
        cause = _by_signal(evidence, cause, rank, -first.code, who)
    if cause.kind == "killed" and first.told:
        likely = (
            f"a second signal, or the end of the scheduler's grace period, since it was told to"
            f" stop ({first.told}) before and had not saved yet"
        )
        cause = replace(cause, likely=(likely,), remedy=(MORE_TIME,))
    if first.last and cause.kind != "killed":
        cause = replace(cause, known=(*cause.known, f"the last that it printed: {first.last}"))
    return cause


def _by_signal(evidence: Evidence, cause: Cause, rank: int, number: int, who: str) -> Cause:
    try:
        name = Signals(number).name
    except ValueError:
        name = f"signal {number}"
    what = f"{who}ended by signal {number} ({name}), without a report"
    cause = replace(cause, what=what, likely=(), remedy=(FAULTHANDLER,))
    if name == "SIGKILL":
        cause = replace(
            cause,
            kind="killed",
            known=("SIGKILL ends a process at once: it can neither save nor report",),
            likely=(
                "the kernel for lack of memory, the scheduler at a limit of memory or time, or a"
                " person, since the loop sends this signal to no rank that works",
            ),
            look_at=(kernel_log(evidence, rank), _scheduler_log(evidence)),
            remedy=(
                f"if it was memory: {less_host_memory(evidence)}",
                "if it was a limit of time: --stop_after, which saves before it",
            ),
        )
        return with_memory(evidence, cause, of_gpu=False)
    known = ("it crashed in C code: of torch, a driver or another library",)
    cause = replace(cause, kind="crashed", known=known)
    if name == "SIGBUS":
        likely = "/dev/shm or a disk is full, since access to mapped memory then fails so"
        cause = replace(cause, likely=(likely,))
    return cause


def _scheduler_log(evidence: Evidence) -> str:
    environment = evidence.about.get("environment")
    job = environment.get("SLURM_JOB_ID", "") if isinstance(environment, dict) else ""
    if isinstance(job, str) and job.isdecimal():
        return f"sacct -j {job} -o JobID,State,ExitCode,MaxRSS"
    return "the log of the scheduler, where there is one (Kubernetes: OOMKilled, Evicted)"


# ---- hangs ---------------------------------------------------------------------------------------
def hung(evidence: Evidence) -> Cause | None:
    """Return the cause where watchdogs have ended the run."""
    stalled = [one for one in evidence.failures if one["cause"] == "stalled"]
    waiting = [one for one in evidence.failures if one["cause"] == "waiting"]
    if not stalled and not waiting:
        return None
    if stalled:
        cause = _stalled(evidence, stalled, waiting)
    elif evidence.silent:
        cause = _gone(evidence, waiting)
    else:
        cause = _all_wait(evidence, waiting)
    return flight_recorder.with_dumps(evidence, cause)


def _stalled(
    evidence: Evidence, stalled: list[dict[str, Any]], waiting: list[dict[str, Any]]
) -> Cause:
    first = stalled[0]
    hosts = evidence.hosts
    remedy = (
        "see what that line waits for, such as storage, a download or a lock; if it only needs more"
        f" time: distributed.timeout_seconds (now"
        f" {evidence.setting('distributed.timeout_seconds', 'the default')})",
    )
    what = re.sub(r" at \S+ \(.*\)$", "", first["reason"]) if place(first) else first["reason"]
    cause = of(first, "stalled", what=what, remedy=remedy)
    if waiting:
        who = ranks_in_words([one["rank"] for one in waiting], hosts)
        where = place(waiting[0]).partition(":")[0]
        known = f"no progress there, while {who} waited for other ranks (in {where})"
        likely = "the others wait for it, since it alone waits for no other rank"
        if stalled[1:]:
            likely = "the others wait for these, since only these wait for no other rank"
        return replace(cause, known=(known,), likely=(likely,))
    same = len({place(one) for one in stalled}) == 1 and len(stalled) > 1
    likely = "something that all ranks share, since all of them stalled at the same line"
    return replace(cause, known=("no progress at this line",), likely=(likely,) if same else ())


def _gone(evidence: Evidence, noticed: list[dict[str, Any]]) -> Cause:
    """Judge ranks that left no report, which the others noticed."""
    silent, hosts, by = evidence.silent, evidence.hosts, noticed[0]
    who = ranks_in_words(silent, hosts)
    cause = Cause(
        kind="no report",
        is_known=False,
        rank=None if silent[1:] else silent[0],
        time=by["time"],
        what=f"no report from {who}, as {ranks_in_words([by['rank']], hosts)} noticed:"
        f" {by['reason']}",
        says=str(by["file"]),
        likely=("killed, stopped or cut off, since the others noticed it and it reported nothing",),
        look_at=(kernel_log(evidence, silent[0]), _scheduler_log(evidence)),
        remedy=("find out what ended the processes there",),
    )
    ended = [evidence.exits[rank] for rank in silent if rank in evidence.exits]
    if ended and all(one.by_launcher for one in ended):
        likely = (
            "stopped (SIGSTOP, a debugger) or stuck in C code or the kernel, such as storage that"
            " does not answer, since its launcher had to kill it and even its watchdog was silent"
        )
        return replace(cause, likely=(likely,))
    return _lost_node(evidence, cause)


def _lost_node(evidence: Evidence, cause: Cause) -> Cause:
    """Say so where the silent ranks are all those of some hosts, and no others."""
    by_host: dict[str, set[int]] = {}
    for rank in range(evidence.world_size):
        by_host.setdefault(evidence.hosts.get(rank, ""), set()).add(rank)
    silent = {*evidence.silent}
    lost = {host: ranks for host, ranks in by_host.items() if host and ranks <= silent}
    if set().union(*lost.values()) != silent or silent & evidence.exits.keys():
        return cause
    name = ", ".join(lost)
    none = f"none of the {len(silent)} ranks there" if len(silent) > 1 else "its only rank did not"
    verb = "left" if len(silent) > 1 else "leave"
    logs = ", nor their launcher" if silent & evidence.nodes.keys() else ""
    likely = (
        f"{name} or its network failed, or all processes there were killed, since {none} {verb} a"
        f" report{logs}"
    )
    return replace(
        cause,
        kind="lost node",
        host=name,
        likely=(likely,),
        look_at=(f"whether {name} answers: ping, uptime", *cause.look_at),
        remedy=(f"start it again without {name}, or when it is back",),
    )


def _all_wait(evidence: Evidence, waiting: list[dict[str, Any]]) -> Cause:
    """Judge ranks that all wait for one another."""
    places: dict[str, list[int]] = {}
    for one in waiting:
        places.setdefault(place(one), []).append(one["rank"])
    known = tuple(f"{ranks_in_words(ranks, {})}: {at}" for at, ranks in places.items())
    cause = of(waiting[0], "hang", is_known=False, what="all ranks waited for one another", at="")
    if len(places) > 1:
        likely = (
            "they called different collectives, since they wait in different lines: an if or a"
            " break that not all ranks take"
        )
        remedy = "all ranks must call the same collectives in the same order: compare these lines"
        kind = "mismatched collectives"
        return replace(cause, kind=kind, known=known, likely=(likely,), remedy=(remedy,))
    between = " between the hosts" if len({*evidence.hosts.values()}) > 1 else ""
    likely = f"the network{between}, or a GPU, since every rank waits in the same line"
    remedy = "--preflight measures each GPU and each link; NCCL_DEBUG=INFO says what NCCL uses"
    return replace(cause, known=known, likely=(likely,), remedy=(remedy,))


# ---- lost contact, and nothing at all ------------------------------------------------------------
def lost(evidence: Evidence) -> Cause | None:
    """Return the cause where ranks have only lost contact."""
    noticed = evidence.failures
    if not noticed:
        return None
    if evidence.silent:
        return _gone(evidence, noticed)
    return of(
        noticed[0],
        "network",
        is_known=False,
        known=("every rank lost contact with another, and none failed by itself",),
        likely=("the network between the hosts failed, since all processes went on",),
        remedy=("--preflight measures each pair of nodes; the same command continues",),
    )


def by_status(evidence: Evidence) -> Cause | None:
    """Return what status.json says of a rank whose error file is missing or damaged."""
    status, reason = evidence.status, evidence.status.get("reason", "")
    if status.get("outcome") != "failed" or evidence.is_unopened:
        return None
    file = evidence.folder / "status.json"
    note = "errors/ has no intact file of it: the logs may have the traceback"
    # unexplained: only what another rank noticed
    found = STATUS.fullmatch(reason) if "unexplained" not in status else None
    if found:
        failure = {"rank": int(found[1]), "host": found[2], "reason": found[4], "time": None}
        failure |= {"cause": "exception", "frames": [], "file": file}
        cause = replace(judge(evidence, failure), host=found[2])
        return replace(cause, look_at=(note, *cause.look_at))
    if evidence.failures:
        return None
    return Cause(kind="unknown", what=reason, says=str(file), look_at=(note,))


def unexplained(evidence: Evidence) -> Cause:
    """Return what can be said where nothing was reported."""
    cause = Cause(kind="unknown", is_known=False, what="no process reported why it ended")
    if free_bytes(evidence) < LITTLE_BYTES:
        likely = ("the disk is full, since a process that cannot write leaves no report",)
        return full_disk(evidence, replace(cause, kind="full disk", likely=likely))
    terminated = [rank for rank, one in evidence.exits.items() if -one.code in BY_OTHERS]
    if evidence.told or terminated:
        told = evidence.told or Signals(-evidence.exits[terminated[0]].code).name
        return replace(
            cause,
            kind="stopped",
            known=(f"it was told to stop ({told}), and had not saved when it ended",),
            likely=(
                "a second signal, or SIGKILL at the end of the scheduler's grace period, since it"
                " was about to stop",
            ),
            look_at=(_scheduler_log(evidence),),
            remedy=(MORE_TIME,),
        )
    look_at = (kernel_log(evidence, 0), "last -x reboot shutdown", _scheduler_log(evidence))
    if not evidence.nodes:
        look_at = ("the terminal: plain accelerate launch writes no logs", *look_at)
    return replace(
        cause,
        kind="interrupted",
        known=("no error file, and no exit of a process in a log of its launcher",),
        likely=(
            "all processes ended at once, with their launcher: by SIGKILL, or with the machine,"
            " since else one of them had reported",
        ),
        look_at=look_at,
    )
