"""Say what happened first in a run, on which rank and host, the likely cause and the remedy.

    python -m my_project doctor runs/image_classification
    python -m my_project doctor runs/image_classification --json

Reads status.json, errors/, logs/, metrics.jsonl and the dumps of NCCL's flight recorder, of all
ranks; changes nothing. What a file says is marked as known, what only follows from it as likely,
with the reason. Exit code 0 if it could say something, also of a run that goes on or has finished;
2 for a folder that is no run.

--json prints one object: run, outcome (finished, preempted, running, starting, failed, interrupted,
unknown), happened, step, steps, time (seconds since 1970), first (null, or rank, host, step, time,
what, at, says), cause (exception, setting, out of memory, out of host memory, not finite,
loader worker, full disk, stopped, killed, crashed, exited, stalled, hang, mismatched collectives,
no report, lost node, network, interrupted, unknown; "" where nothing failed), certainty (known,
likely, unknown or ""), known, likely, look_at, remedy, others, damaged (lists of sentences), and
earlier_failures (starts of this run that failed before).
"""

import argparse
import json
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ...cli import make_parser, run
from ...files import lock_of, step_of
from ...records.outcome import checkpoints, format_seconds, print_block, rows
from ...safety.redaction import mask
from ..reader import format_problem
from . import hangs
from .causes import FULL_DISK, Cause, more_room, reported
from .evidence import Evidence, ranks_in_words, read

LONGEST = 500  # characters of a sentence
QUIET_SECONDS = 60.0  # after which a run may have stopped moving
RULES = (reported, hangs.ended, hangs.hung, hangs.by_status, hangs.lost)


def diagnose(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Return what --json prints.

    Raises:
        ConfigError: the folder is no run.
    """
    evidence = read(folder)
    now = time.time() if now is None else now
    outcome = _outcome(evidence)
    cause: Cause | None = None
    if outcome in ("failed", "interrupted", "unknown"):
        found = (rule(evidence) for rule in RULES)
        cause = next(filter(None, found), None) or hangs.unexplained(evidence)
    failure = _failure_of(evidence, cause)
    step = evidence.step if failure.get("step") is None else failure["step"]
    ended = cause.time if cause and cause.time else evidence.last_sign
    found = {
        "run": str(folder),
        "outcome": outcome,
        "happened": _happened(evidence, outcome, step, ended, now),
        "step": step,
        "steps": evidence.status.get("steps") or None,
        "time": ended or None,
        "first": cause and _first(evidence, cause, failure),
        "cause": cause.kind if cause else "",
        "certainty": _certainty(cause),
        "known": [*cause.known] if cause else [],
        "likely": [*cause.likely] if cause else [],
        "look_at": [*cause.look_at] if cause else [],
        "remedy": _remedies(evidence, cause, outcome),
        "others": _others(evidence, cause),
        "damaged": evidence.damaged,
        "earlier_failures": evidence.earlier,
    }
    return _shown(found)


# ---- how it is -----------------------------------------------------------------------------------
def _outcome(evidence: Evidence) -> str:
    outcome = evidence.status.get("outcome", "")
    if evidence.is_unopened:
        is_starting = evidence.locked and not evidence.failures and not evidence.exits
        return "starting" if is_starting else "failed"
    if outcome == "running":
        return "interrupted" if evidence.locked is False else "running"
    if outcome in ("finished", "preempted", "failed"):
        return outcome
    if evidence.failures:
        return "failed"
    return "running" if evidence.locked else "unknown"


def _happened(evidence: Evidence, outcome: str, step: int, ended: float, now: float) -> str:
    """Return in one or two sentences what happened, and when."""
    steps = evidence.status.get("steps") or "?"
    at, reason = f"step {step} of {steps}", evidence.status.get("reason", "")
    when = _when(ended, now)
    before = evidence.status.get("outcome")
    if evidence.is_unopened:
        when = _when(evidence.started, now)
        how = "failed" if evidence.failures else "ended"
        how = "has not opened the run yet" if outcome == "starting" else how
        text = f"the start of {when} {how}" + " before it opened the run" * (outcome == "failed")
        return text + f"; before that the run: {before}, step {step}" * bool(before)
    if outcome == "running":
        return _how_it_goes(evidence, now)
    sentences = {
        "finished": f"finished at {at}" + f", {reason}" * bool(reason),
        "preempted": f"stopped at {at} and saved, to be continued: {reason}",
        "failed": f"failed at {at}",
        "interrupted": f"ended at {at} without saying so: no process holds the run any more",
        "unknown": f"the outcome is not known: status.json is"
        f" {'damaged' if 'status.json' in evidence.damaged else 'missing'}; the last is {at}",
    }
    if outcome == "interrupted" and not evidence.exits and now - ended < QUIET_SECONDS:
        when += "; or it goes on where its lock is not seen from here, since it wrote just now"
    later = f"; a start of {_when(evidence.later, now)} has left nothing" if evidence.later else ""
    return f"{sentences[outcome]}, {when}{later * (outcome != 'finished')}"


def _how_it_goes(evidence: Evidence, now: float) -> str:
    """Return how far a run under way is, and whether it has stopped moving."""
    steps = evidence.status.get("steps") or "?"
    times = [one["time"] for one in evidence.of_this_start if "time" in one]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    age = max(0.0, now - evidence.last_sign)
    text = f"running: step {evidence.step} of {steps}, the last record or change"
    text += f" {format_seconds(age)} ago"
    limit = evidence.setting("distributed.timeout_seconds", 600)
    expected = max(QUIET_SECONDS, 2 * max(gaps)) if len(gaps) > 1 else limit
    if age > expected:
        usual = f", where records came every {format_seconds(median(gaps))}" if gaps else ""
        text += (
            f". It has not moved for long{usual}: the files do not say whether it evaluates, saves,"
            f" waits for data or hangs. Its watchdog ends it after {limit} s without progress"
            " (distributed.timeout_seconds; startup_timeout_seconds at the start, in evaluations"
            " and saves) and says where"
        )
    if evidence.locked is None:
        text += ". Whether its processes are still there is not known: no locks on this file system"
    return text


def _when(moment: float, now: float) -> str:
    if not moment:
        return "at an unknown time"
    shown = datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown} ({format_seconds(max(0, now - moment))} ago)"


# ---- what is said of it --------------------------------------------------------------------------
def _failure_of(evidence: Evidence, cause: Cause | None) -> dict[str, Any]:
    """Return the report of the rank on which it happened first; {} without one."""
    if not cause:
        return {}
    return next((one for one in evidence.failures if one["rank"] == cause.rank), {})


def _first(evidence: Evidence, cause: Cause, failure: dict[str, Any]) -> dict[str, Any]:
    rank = cause.rank if cause.rank != -1 else None
    host = failure.get("host") or cause.host or evidence.hosts.get(-1 if rank is None else rank)
    return {
        "rank": rank,
        "host": host or None,
        "step": failure.get("step"),
        "time": cause.time,
        "what": cause.what,
        "at": cause.at,
        "says": cause.says,
    }


def _certainty(cause: Cause | None) -> str:
    if not cause:
        return ""
    if cause.kind == "unknown":
        return "unknown"
    return "known" if cause.is_known else "likely"


def _remedies(evidence: Evidence, cause: Cause | None, outcome: str) -> list[str]:
    """Return what to do, and from which step the same command continues."""
    remedies = [*cause.remedy] if cause else []
    if not cause and FULL_DISK.search(evidence.status.get("reason", "")):
        remedies.append(more_room(evidence))  # a note on the last checkpoint
    if outcome in ("finished", "running", "starting"):
        return remedies
    found = checkpoints(evidence.folder)
    at = f"continues from step {step_of(found[-1])}" if found else "starts again from step 0"
    return [*remedies, f"{'then ' * bool(remedies)}the same command {at}"]


def _others(evidence: Evidence, cause: Cause | None) -> list[str]:
    """Return what other ranks report."""
    lines: list[str] = []
    if not cause:
        return lines
    hosts, by_cause = evidence.hosts, {}
    for one in evidence.failures:
        if one["rank"] != cause.rank:
            by_cause.setdefault(one["cause"], []).append(one)
    for kind, of_kind in by_cause.items():
        ranks = ranks_in_words({one["rank"] for one in of_kind}, hosts)
        if kind == "lost contact":
            lines.append(f"lost contact, which follows: {ranks}")
        elif kind == "waiting":
            lines.append(f"waited for other ranks: {ranks}")
        elif kind == "stalled":
            lines.append(f"stalled too: {ranks}")
        else:
            lines.append(f"failed too, {kind}: {ranks}")
    silent = {*evidence.silent} - {cause.rank} - evidence.exits.keys()
    if silent and evidence.failures and cause.kind not in ("no report", "lost node"):
        lines.append(f"left no report: {ranks_in_words(silent, hosts)}")
    if evidence.locked and cause.rank is not None:
        try:
            holder = lock_of(evidence.folder).read_text(encoding="utf-8", errors="replace")
        except OSError:
            holder = "a process"
        lines.append(f"the run is still held by {holder.strip()}")
    return lines


# ---- output --------------------------------------------------------------------------------------
def _shown(value: Any) -> Any:
    """Return texts in one line each, without secrets and control characters, and not too long."""
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if not isinstance(value, str):
        return value
    text = " ".join(mask(value).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def print_diagnosis(found: dict[str, Any]) -> None:
    """Print it as text."""
    pairs = [("what", found["happened"])]
    if first := found["first"]:
        rank = "" if first["rank"] is None else f"rank {first['rank']}"
        who = " on ".join(filter(None, (rank, first["host"])))
        step = "" if first["step"] is None else f"step {first['step']}"
        clock = datetime.fromtimestamp(first["time"]).strftime("%H:%M:%S") if first["time"] else ""
        when = ", ".join(filter(None, (who, step, clock)))
        pairs += [("first", f"{when}: {first['what']}" if when else first["what"])]
        pairs += [("at", first["at"]), ("says", first["says"])]
    for name in ("known", "likely", "look_at", "remedy", "others", "damaged"):
        label = {"look_at": "look at", "damaged": "damaged"}.get(name, name)
        pairs += [(label if i == 0 else "", text) for i, text in enumerate(found[name])]
    if count := found["earlier_failures"]:
        pairs.append(("earlier", f"{count} start{'s' * (count > 1)} of this run failed before"))
    print_block(f"{found['outcome']}: {found['run']}", rows([pair for pair in pairs if pair[1]]))


def main(arguments: argparse.Namespace) -> None:
    """Print what happened."""
    found = diagnose(Path(arguments.run))
    if problem := format_problem(Path(arguments.run)):
        print(problem, file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print_diagnosis(found)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object, for tools")
    run(main, parser.parse_args())
