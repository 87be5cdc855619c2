"""Compare the last collectives of all ranks, which NCCL's flight recorder has kept. No torch.

When the watchdog ends a run it writes errors/nccl_trace_rank_<rank>.json (stopping.py): "entries",
one for each collective of a process group, numbered by collective_seq_id, which all ranks of the
group must call in the same order with the same operation and, mostly, the same sizes. NCCL may
write dumps of its own beside them, which are pickles: they are listed, and not opened.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...files import read_json
from ...stack_traces import library_of
from .causes import Cause
from .evidence import Evidence, ranks_in_words

# Operations whose sizes must be equal on all ranks: of the input and of the output.
EVEN_INPUT = {"all_reduce", "allreduce_coalesced", "all_reduce_barrier", "barrier", "broadcast"}
EVEN_INPUT |= {"reduce", "gather", "all_gather", "_all_gather_base", "reduce_scatter"}
EVEN_INPUT |= {"_reduce_scatter_base", "_broadcast_oop", "_reduce_oop"}
EVEN_OUTPUT = EVEN_INPUT - {"gather"} | {"scatter"}
OLD_SECONDS = 60.0  # before the start: a dump of an earlier one, whatever the clocks of hosts say


@dataclass(frozen=True, kw_only=True)
class Dumps:
    """The dumps of a hang."""

    collectives: dict[str, dict[int, dict[int, list[dict[str, Any]]]]]  # by group, rank, number
    members: dict[str, set[int]]  # ranks by group, as far as known
    files: dict[int, Path]  # by rank
    pickles: list[Path]  # NCCL's own
    damaged: list[str]
    is_old: bool  # there are dumps, but of an earlier start


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first collective in which ranks differ, or that was not completed."""

    kind: str  # mismatch, missing (ranks have not called it) or incomplete
    number: int  # collective_seq_id
    group: str
    calls: dict[str, list[int]]  # the ranks by what they called
    missing: list[int]  # ranks that have not called it
    at: str  # a line of the project's code, where the dump has frames


def read(folder: Path, since: float) -> Dumps:
    """Read the dumps in a run folder's errors/.

    Args:
        folder: the run folder.
        since: when the newest start began, in seconds since 1970.
    """
    groups: dict[str, dict[int, dict[int, list[dict[str, Any]]]]] = {}
    members: dict[str, set[int]] = {}
    files, damaged, is_old = {}, [], False
    paths = sorted((folder / "errors").glob("nccl_trace_rank_*"))
    for path in (path for path in paths if path.suffix == ".json"):
        number = path.stem.removeprefix("nccl_trace_rank_")
        dump = read_json(path)
        if not re.fullmatch(r"\d{1,6}", number) or not isinstance(dump.get("version"), str):
            damaged.append(f"errors/{path.name}")
            continue
        rank = int(number)
        entries = [one for one in _list(dump.get("entries")) if _is_collective(one)]
        called = [one["time_created_ns"] / 1e9 for one in entries]
        if max(called, default=path.stat().st_mtime) < since - OLD_SECONDS:
            is_old = True
            continue
        files[rank] = path
        for name, ranks in _members(dump):
            members.setdefault(name, set()).update(ranks)
        for one in entries:
            numbers = groups.setdefault(_group(one), {}).setdefault(rank, {})
            numbers.setdefault(one["collective_seq_id"], []).append(one)
    return Dumps(
        collectives=groups,
        members=members,
        files=files,
        pickles=[path for path in paths if re.search(r"rank_\d+$", path.name)],
        damaged=damaged,
        is_old=is_old,
    )


def compare(dumps: Dumps) -> Finding | None:
    """Return the first collective in which ranks differ; None if the dumps show nothing.

    A mismatch before a missing call before an incomplete one; of several groups the one in which
    it was called first.
    """
    found = [
        (order, time, finding)
        for group, by_rank in dumps.collectives.items()
        for order, time, finding in _in_group(group, by_rank, dumps)
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _in_group(
    group: str, by_rank: dict[int, dict[int, list[dict[str, Any]]]], dumps: Dumps
) -> Iterator[tuple[int, int, Finding]]:
    """Yield the first finding of each kind, with its order and when it was called, in ns."""
    # a rank keeps only its last collectives: compare where all have theirs
    first = max(min(numbers) for numbers in by_rank.values())
    last = max(max(numbers) for numbers in by_rank.values())
    expected = dumps.members.get(group, set()) & dumps.files.keys() | by_rank.keys()
    kinds: set[str] = set()
    for number in range(first, min(last, first + 10**6) + 1):
        called = {rank: of[number] for rank, of in sorted(by_rank.items()) if number in of}
        missing = sorted(rank for rank in expected if rank not in called)
        is_done = all(map(_is_done, called.values()))
        kind = ""
        if len({_signature(entries) for entries in called.values()}) > 1:
            kind = "mismatch"
        elif missing and not is_done:
            kind = "missing"
        elif called and not is_done:
            kind = "incomplete"
        if not kind or kind in kinds:
            continue
        kinds.add(kind)
        calls: dict[str, list[int]] = {}
        for rank, entries in called.items():
            calls.setdefault(", ".join(map(_described, entries)), []).append(rank)
        when = min(one["time_created_ns"] for entries in called.values() for one in entries)
        at = next((at for entries in called.values() for at in map(_place, entries) if at), "")
        yield (
            ("mismatch", "missing", "incomplete").index(kind),
            when,
            Finding(kind=kind, number=number, group=group, calls=calls, missing=missing, at=at),
        )
        if kind == "mismatch":
            return


# ---- what they add to a cause --------------------------------------------------------------------
def with_dumps(evidence: Evidence, cause: Cause) -> Cause:
    """Return the cause of a hang with what the dumps show."""
    dumps = read(evidence.folder, evidence.started)
    if finding := compare(dumps):
        cause = _with_finding(evidence, cause, finding, dumps)
    folder, look_at = evidence.folder / "errors", list(cause.look_at)
    if dumps.damaged:
        look_at.append(f"damaged dumps, left out: {', '.join(dumps.damaged)}")
    if dumps.is_old:
        look_at.append("the dumps in errors/ are of an earlier start, so they are left out")
    if dumps.pickles:
        look_at.append(
            f"{len(dumps.pickles)} dumps of NCCL itself: pickles, which are not opened here, since"
            " a pickle can run code. torch's own analyzer opens them:"
            f" mkdir dumps; cp {folder}/nccl_trace_rank_*[0-9] dumps; torchfrtrace dumps"
            " (torch.distributed.flight_recorder.fr_trace)"
        )
    return replace(cause, look_at=(*look_at,))


def _with_finding(evidence: Evidence, cause: Cause, finding: Finding, dumps: Dumps) -> Cause:
    """Add what the dumps of NCCL's flight recorder show."""
    hosts, name = evidence.hosts, f"collective {finding.number} of group {finding.group}"
    calls = [f"{ranks_in_words(ranks, hosts)} called {c}" for c, ranks in finding.calls.items()]
    says = str(evidence.folder / "errors/nccl_trace_rank_*.json")
    without = {*range(evidence.world_size)} - dumps.files.keys()
    note = (f"no dump of {ranks_in_words(without, hosts)}",) if without else ()
    if finding.kind == "mismatch":
        groups = sorted(finding.calls.values(), key=len)
        differs, likely = (groups[0] if len(groups[0]) < len(groups[-1]) else []), ()
        if differs:
            likely = (
                f"{ranks_in_words(differs, hosts)} is at fault, since the other"
                f" {sum(map(len, groups)) - len(differs)} agree",
            )
        return replace(
            cause,
            kind="mismatched collectives",
            is_known=True,
            rank=differs[0] if differs else None,
            what=f"{name} differs: {'; '.join(calls)}",
            at=finding.at,
            says=says,
            known=(*cause.known, *note),
            likely=likely,
            remedy=(
                "look for an if around something that communicates, a break that one rank alone"
                " takes, or a size that depends on the rank",
            ),
        )
    if finding.kind == "missing":
        missing = ranks_in_words(finding.missing, hosts)
        known = f"{missing} had not called {name}, in which {'; '.join(calls)}"
        if cause.kind != "stalled":
            cause = replace(cause, rank=finding.missing[0])
    else:
        known = f"{name} was called by all ranks alike and not completed: {'; '.join(calls)}"
    return replace(cause, known=(*cause.known, f"{known} ({says})", *note))


# ---- entries -------------------------------------------------------------------------------------
def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_collective(entry: Any) -> bool:
    """Return whether this is an entry of a collective, not of a send or receive."""
    kinds = {"collective_seq_id": int, "time_created_ns": int, "profiling_name": str, "state": str}
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return False
    return all(isinstance(entry.get(name), kind) for name, kind in kinds.items())


def _group(entry: dict[str, Any]) -> str:
    """Return the name of a process group with its description: "0 (default_pg)"."""
    name, description = [*map(str, _list(entry.get("process_group"))), "", ""][:2]
    return f"{name} ({description})" if description else name


def _members(dump: dict[str, Any]) -> Iterator[tuple[str, Iterable[int]]]:
    groups = dump.get("pg_config")
    for name, one in groups.items() if isinstance(groups, dict) else ():
        if isinstance(one, dict):
            ranks = {int(number) for number in re.findall(r"\b\d{1,6}\b", str(one.get("ranks")))}
            description = str(one.get("desc", ""))
            yield (f"{name} ({description})" if description else name), ranks


def _operation(entry: dict[str, Any]) -> str:
    return entry["profiling_name"].rpartition(":")[2].split(" ")[0]


def _signature(entries: list[dict[str, Any]]) -> str:
    """Return what must be equal on all ranks."""
    parts = []
    for one in entries:
        name = _operation(one)
        parts.append(name)
        for side, even in (("input", EVEN_INPUT), ("output", EVEN_OUTPUT)):
            if name in even:
                parts.append(str((one.get(f"{side}_sizes"), one.get(f"{side}_dtypes"))))
    return " ".join(parts)


def _is_done(entries: list[dict[str, Any]]) -> bool:
    return all(one["state"] == "completed" for one in entries)  # one that timed out is retired too


def _described(entry: dict[str, Any]) -> str:
    """Return a call in words: all_reduce of Float [1024]."""
    sides = [
        " ".join(
            [
                ", ".join(dict.fromkeys(map(str, _list(entry.get(f"{side}_dtypes"))))),
                ", ".join(map(str, _list(entry.get(f"{side}_sizes")))),
            ]
        ).strip()
        for side in ("input", "output")
    ]
    shown = " to ".join(dict.fromkeys(side for side in sides if side))
    return f"{_operation(entry)} of {shown}" if shown else _operation(entry)


def _place(entry: dict[str, Any]) -> str:
    """Return the innermost line outside of libraries, where an entry has frames."""
    for one in _list(entry.get("frames")):  # the innermost first
        file = one.get("filename") if isinstance(one, dict) else None
        if isinstance(file, str) and not library_of(file):
            return f"{file}, line {one.get('line')}, in {one.get('name')}"
    return ""
