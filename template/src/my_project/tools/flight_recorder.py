"""Compare the last collectives of all ranks, as recorded by NCCL's flight recorder.

This module imports no torch. When the watchdog ends a run on GPUs, it writes
errors/nccl_trace_rank_<rank>.json (watchdog.py). The "entries" of this file are the collectives of
each process group, numbered by collective_seq_id. All ranks of a group must call them in the same
order, with the same operation and, for most operations, the same sizes. NCCL may write its own
dumps to the same folder: these are pickles, so they are named but not opened.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_json

# Operations for which the sizes of the input, and of the output, must be the same on all ranks.
EVEN = {"all_reduce", "allreduce_coalesced", "all_reduce_barrier", "barrier", "broadcast"}
EVEN |= {"reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base"}
EVEN |= {"_broadcast_oop", "_reduce_oop"}
KINDS = ("mismatch", "missing", "incomplete")  # the most informative first
# A dump that is older than the start by more than this belongs to an earlier start: the clocks of
# hosts differ by less.
OLD_SECONDS = 60.0


@dataclass(kw_only=True)
class Dumps:
    """The dumps of a hang."""

    # entries by group, collective_seq_id and rank
    calls: dict[str, dict[int, dict[int, list[dict[str, Any]]]]] = field(default_factory=dict)
    members: dict[str, set[int]] = field(default_factory=dict)  # ranks by group, as far as known
    ranks: set[int] = field(default_factory=set)  # the ranks that have left a dump
    notes: list[str] = field(default_factory=list)  # which dumps were left out, and why


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first collective in which ranks differ, or that was not completed."""

    kind: str  # one of KINDS; "missing": some ranks have not called the collective
    number: int  # collective_seq_id
    group: str
    calls: dict[str, list[int]]  # ranks by the call that they made
    missing: list[int]  # the ranks that have not called the collective

    @property
    def differing(self) -> list[int]:
        """Return the ranks without the most frequent call; [] if several are most frequent."""
        *others, most = sorted(self.calls.values(), key=len)
        is_tie = len(most) in map(len, others)
        return [] if is_tie else sorted(rank for ranks in others for rank in ranks)


def read(folder: Path, since: float) -> Dumps:
    """Read the dumps in errors/ of a run folder.

    Args:
        folder: the run folder.
        since: when the newest start began, in seconds since 1970.
    """
    dumps, errors = Dumps(), folder / "errors"
    for path in sorted(errors.glob("nccl_trace_rank_*.json")):
        match, dump = re.fullmatch(r"nccl_trace_rank_(\d{1,6})\.json", path.name), read_json(path)
        if not match or not isinstance(dump.get("version"), str):
            dumps.notes.append(f"errors/{path.name} is damaged, so it is left out")
            continue
        entries = [entry for entry in _list(dump.get("entries")) if _is_collective(entry)]
        times = [entry["time_created_ns"] / 1e9 for entry in entries]
        if max(times, default=path.stat().st_mtime) < since - OLD_SECONDS:
            dumps.notes.append(f"errors/{path.name} is from an earlier start, so it is left out")
            continue
        rank = int(match[1])
        dumps.ranks.add(rank)
        for name, ranks in _members(dump):
            dumps.members.setdefault(name, set()).update(ranks)
        for entry in entries:
            by_number = dumps.calls.setdefault(_group_name(entry.get("process_group")), {})
            by_rank = by_number.setdefault(entry["collective_seq_id"], {})
            by_rank.setdefault(rank, []).append(entry)
    if pickles := [*errors.glob("nccl_trace_rank_*[0-9]")]:
        dumps.notes.append(
            f"dumps that NCCL itself wrote: {len(pickles)}. They are pickles, which can run code,"
            " so they are not opened here; to analyze them: mkdir dumps; cp"
            f" {errors}/nccl_trace_rank_*[0-9] dumps;"
            " torchfrtrace dumps (torch.distributed.flight_recorder.fr_trace)"
        )
    return dumps


def compare(dumps: Dumps) -> Finding | None:
    """Return the collective that best explains the hang; None if the dumps show nothing.

    A mismatch is preferred to a missing call, and a missing call to an incomplete collective; among
    findings of one kind, the one with the earliest call is returned.
    """
    findings = [
        (KINDS.index(finding.kind), time, finding)
        for group in dumps.calls
        for time, finding in _findings(group, dumps)
    ]
    return min(findings, key=lambda ranked: ranked[:2])[2] if findings else None


def _findings(group: str, dumps: Dumps) -> Iterator[tuple[int, Finding]]:
    """Yield the findings in a group, each with the time of its first call in ns."""
    by_number = dumps.calls[group]
    ranks = {rank for by_rank in by_number.values() for rank in by_rank}
    expected = dumps.members.get(group, set()) & dumps.ranks | ranks
    # a rank keeps only its last collectives, so comparing begins where all ranks have entries
    first = max(min(n for n, by_rank in by_number.items() if rank in by_rank) for rank in ranks)
    for number in sorted(number for number in by_number if number >= first):
        by_rank = dict(sorted(by_number[number].items()))
        entries = [entry for called in by_rank.values() for entry in called]
        missing = sorted(expected - by_rank.keys())
        # not by entry["retired"], which is also true for a collective that timed out
        is_done = all(entry["state"] == "completed" for entry in entries)
        calls: dict[str, list[int]] = {}
        for rank, called in by_rank.items():
            calls.setdefault(", ".join(map(_describe, called)), []).append(rank)
        kind = "mismatch" if len(calls) > 1 else "missing" if missing else "incomplete"
        if is_done and kind != "mismatch":
            continue
        time_ns = min(entry["time_created_ns"] for entry in entries)
        yield time_ns, Finding(kind=kind, number=number, group=group, calls=calls, missing=missing)
        if kind == "mismatch":  # later calls in this group differ because of it
            return


# ---- entries -------------------------------------------------------------------------------------
def _list(value: Any) -> list[Any]:
    """Return a list; [] for anything else."""
    return value if isinstance(value, list) else []


def _is_collective(entry: Any) -> bool:
    """Return whether this is the entry of a collective, not of a send or receive."""
    kinds = {"collective_seq_id": int, "time_created_ns": int, "profiling_name": str, "state": str}
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return False
    is_complete = all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
    return is_complete and abs(entry["time_created_ns"]) < 1 << 63


def _group_name(names: Any) -> str:
    """Return the name of a process group with its description: "0 (default_pg)"."""
    name, description = [*map(str, _list(names)), "", ""][:2]
    return f"{name} ({description})" if description else name


def _members(dump: dict[str, Any]) -> Iterator[tuple[str, set[int]]]:
    """Yield the name and the ranks of each process group."""
    groups = dump.get("pg_config")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            numbers = re.findall(r"\b\d{1,6}\b", str(group.get("ranks")))  # "[0, 1]"
            yield _group_name([name, group.get("desc", "")]), set(map(int, numbers))


def _describe(entry: dict[str, Any]) -> str:
    """Return what all ranks of a collective must agree on: "all_reduce of Float [1024]"."""
    name = entry["profiling_name"].rpartition(":")[2].split(" ")[0]  # from "nccl:all_reduce"
    sides = []
    for side in ("input", "output") if name in EVEN else ():
        dtypes, sizes = (_list(entry.get(f"{side}_{kind}")) for kind in ("dtypes", "sizes"))
        words = [", ".join(dict.fromkeys(map(str, dtypes))), ", ".join(map(str, sizes))]
        sides.append(" ".join(filter(None, words)))
    tensors = " to ".join(dict.fromkeys(filter(None, sides)))
    return f"{name} of {tensors}" if tensors else name
