"""Compare the last collectives of all ranks, which NCCL's flight recorder has kept. No torch.

When the watchdog ends a run it writes errors/nccl_trace_rank_<rank>.json (stopping.py): "entries",
one for each collective of a process group, numbered by collective_seq_id, which all ranks of the
group must call in the same order with the same operation and, mostly, the same sizes. NCCL may
write dumps of its own beside them, which are pickles: they are named, and not opened.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_json

# Operations whose sizes must be equal on all ranks, of the input and of the output.
EVEN = {"all_reduce", "allreduce_coalesced", "all_reduce_barrier", "barrier", "broadcast"}
EVEN |= {"reduce", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base"}
EVEN |= {"_broadcast_oop", "_reduce_oop"}
KINDS = ("mismatch", "missing", "incomplete")  # the one that says most first
OLD_SECONDS = 60.0  # before the start: a dump of an earlier one, whatever the clocks of hosts say


@dataclass(kw_only=True)
class Dumps:
    """The dumps of a hang: the calls of a collective by group, number and rank."""

    calls: dict[str, dict[int, dict[int, list[dict[str, Any]]]]] = field(default_factory=dict)
    members: dict[str, set[int]] = field(default_factory=dict)  # ranks by group, as far as known
    ranks: set[int] = field(default_factory=set)  # that have left a dump
    notes: list[str] = field(default_factory=list)  # which dumps were left out


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first collective in which ranks differ, or that was not completed."""

    kind: str  # mismatch, missing (ranks have not called it) or incomplete
    number: int  # collective_seq_id
    group: str
    calls: dict[str, list[int]]  # the ranks by what they called
    missing: list[int]  # ranks that have not called it

    @property
    def fewest(self) -> list[int]:
        """Return the ranks that called what the fewest called; [] where no group is smaller."""
        groups = sorted(self.calls.values(), key=len)
        return groups[0] if len(groups[0]) < len(groups[-1]) else []


def read(folder: Path, since: float) -> Dumps:
    """Read the dumps in a run folder's errors/.

    Args:
        folder: the run folder.
        since: when the newest start began, in seconds since 1970.
    """
    dumps, errors = Dumps(), folder / "errors"
    for path in sorted(errors.glob("nccl_trace_rank_*.json")):
        number, dump = re.fullmatch(r"nccl_trace_rank_(\d{1,6})\.json", path.name), read_json(path)
        if not number or not isinstance(dump.get("version"), str):
            dumps.notes.append(f"a damaged dump is left out: errors/{path.name}")
            continue
        entries = [one for one in _list(dump.get("entries")) if _is_collective(one)]
        called = [one["time_created_ns"] / 1e9 for one in entries]
        if max(called, default=path.stat().st_mtime) < since - OLD_SECONDS:
            dumps.notes.append(f"a dump of an earlier start is left out: errors/{path.name}")
            continue
        rank = int(number[1])
        dumps.ranks.add(rank)
        for name, ranks in _members(dump):
            dumps.members.setdefault(name, set()).update(ranks)
        for one in entries:
            numbers = dumps.calls.setdefault(_group(one.get("process_group")), {})
            by_rank = numbers.setdefault(one["collective_seq_id"], {})
            by_rank.setdefault(rank, []).append(one)
    if pickles := [*errors.glob("nccl_trace_rank_*[0-9]")]:
        dumps.notes.append(
            f"{len(pickles)} dumps of NCCL itself are pickles, which can run code, and not opened"
            f" here: mkdir dumps; cp {errors}/nccl_trace_rank_*[0-9] dumps; torchfrtrace"
            " dumps (torch.distributed.flight_recorder.fr_trace)"
        )
    return dumps


def compare(dumps: Dumps) -> Finding | None:
    """Return the first collective in which ranks differ; None if the dumps show nothing.

    A mismatch before a missing call before an incomplete one; of several groups the one in which
    it was called first.
    """
    found = [
        (KINDS.index(finding.kind), time, finding)
        for group in dumps.calls
        for time, finding in _in_group(group, dumps)
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _in_group(group: str, dumps: Dumps) -> Iterator[tuple[int, Finding]]:
    """Yield the collectives in which something is wrong, each with when it was called, in ns."""
    numbers = dumps.calls[group]
    ranks = {rank for called in numbers.values() for rank in called}
    expected = dumps.members.get(group, set()) & dumps.ranks | ranks
    # a rank keeps only its last collectives: compare where all have theirs
    first = max(min(n for n, called in numbers.items() if rank in called) for rank in ranks)
    for number in sorted(number for number in numbers if number >= first):
        called = dict(sorted(numbers[number].items()))
        entries = [one for of_rank in called.values() for one in of_rank]
        missing = sorted(expected - called.keys())
        # one that timed out is retired too
        is_done = all(one["state"] == "completed" for one in entries)
        calls: dict[str, list[int]] = {}
        for rank, of_rank in called.items():
            calls.setdefault(", ".join(map(_described, of_rank)), []).append(rank)
        kind = "mismatch" if len(calls) > 1 else "missing" if missing else "incomplete"
        if is_done and kind != "mismatch":
            continue
        when = min(one["time_created_ns"] for one in entries)
        yield when, Finding(kind=kind, number=number, group=group, calls=calls, missing=missing)
        if kind == "mismatch":  # what follows in this group differs too
            return


# ---- entries -------------------------------------------------------------------------------------
def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_collective(entry: Any) -> bool:
    """Return whether this is an entry of a collective, not of a send or receive."""
    kinds = {"collective_seq_id": int, "time_created_ns": int, "profiling_name": str, "state": str}
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return False
    return all(isinstance(entry.get(name), kind) for name, kind in kinds.items())


def _group(names: Any) -> str:
    """Return the name of a process group with its description: "0 (default_pg)"."""
    name, description = [*map(str, _list(names)), "", ""][:2]
    return f"{name} ({description})" if description else name


def _members(dump: dict[str, Any]) -> Iterator[tuple[str, set[int]]]:
    groups = dump.get("pg_config")
    for name, one in groups.items() if isinstance(groups, dict) else ():
        if isinstance(one, dict):
            numbers = re.findall(r"\b\d{1,6}\b", str(one.get("ranks")))  # "[0, 1]"
            yield _group([name, one.get("desc", "")]), set(map(int, numbers))


def _described(entry: dict[str, Any]) -> str:
    """Return what must be equal on all ranks of a call: all_reduce of Float [1024]."""
    name = entry["profiling_name"].rpartition(":")[2].split(" ")[0]  # of "nccl:all_reduce"
    sides = []
    for side in ("input", "output") if name in EVEN else ():
        types, sizes = (_list(entry.get(f"{side}_{what}")) for what in ("dtypes", "sizes"))
        words = [", ".join(dict.fromkeys(map(str, types))), ", ".join(map(str, sizes))]
        sides.append(" ".join(filter(None, words)))
    shown = " to ".join(dict.fromkeys(filter(None, sides)))
    return f"{name} of {shown}" if shown else name
