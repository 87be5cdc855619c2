"""How processes ended, as error files and logs tell it. Judged by causes.py and hangs.py.

A process that is killed, crashes in C code or fails at an import leaves no error file; its launcher
knows the signal or the exit code. One that fails before the run folder is open has written the
traceback into its log.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...failures import frame
from ...files import read_json

NEEDED = {"rank": int, "host": str, "reason": str, "cause": str, "launch": str}
TAIL_BYTES = 1 << 18  # of a log: what tells of the end stands there
COPIED_SECONDS = 60.0  # by which the times of files may differ in a copy of a run folder
# cli.run_on_all_ranks and failures.exit_with_error
FAILED = re.compile(r"(?m)^(?:\[rank .+\] ERROR )?rank (\d+) of (\d+) failed on (\S+)\n")
REFUSED = re.compile(r"(?m)^error: (.+)")
FOLDED_FRAME = re.compile(r"(?m)^  (\S.*), line (\d+), in (.+)(?:\n    (\S.*))?")
FOLDED = re.compile(r"\A\s*\.\.\. \d+ frames? in .*\n")  # failures.folded
FRAME = re.compile(r'(?m)^  File "([^"<>\n]+)", line (\d+), in (.+)(?:\n    (\S.*))?')
# torchrun, and accelerate for one process
ENDED = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\n +exitcode +: (-?\d+) \(pid: (\d+)\).*")
DIED = re.compile(r"died with <Signals\.SIG\w+: (\d+)>|returned non-zero exit status (\d+)")
KILLED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (\d+) via")
RAISED = re.compile(r"(?m)^(?!.*(?:CalledProcess|ChildFailed))([\w.]*(?:Error|Exception): .+)")
TOLD = re.compile(r"(?m)^(SIG\w+): will save and exit after this step")
LEFT = re.compile(r"(?m)^rank \d+: (.+), so this process exits$")  # process.Launcher
LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended that left no error file, as its launcher wrote."""

    code: int  # negative: the signal
    file: Path
    line: str
    by_launcher: bool  # killed by torchrun, since it did not end after the failure of another rank
    last: str  # the last line that it printed
    told: str  # the signal by which it was told to stop before; "" without one


# ---- error files ---------------------------------------------------------------------------------
def is_time(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970."""
    return type(value) in (int, float) and 0 < value < 1e11


def read_errors(folder: Path, damaged: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Read all error files by launch, each sorted by time; add those that are damaged to a list."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "errors").glob("*_rank_*_step_*.json")):
        one = read_json(path)
        right = all(isinstance(one.get(name), kind) for name, kind in NEEDED.items())
        if not (right and is_time(one.get("time")) and 0 <= one["rank"] < 10**6):
            damaged.append(f"errors/{path.name}")
            continue
        step = one.get("step")
        one["step"] = step if isinstance(step, int) else None
        frames = one.get("frames")
        one["frames"] = [f for f in frames if _is_frame(f)] if isinstance(frames, list) else []
        found.setdefault(one["launch"], []).append(one | {"file": path})
    return {launch: sorted(of, key=lambda one: one["time"]) for launch, of in found.items()}


def _is_frame(frame: Any) -> bool:
    kinds = {"file": str, "line": int, "function": str, "code": str, "library": (str, type(None))}
    return isinstance(frame, dict) and all(
        name in frame and isinstance(frame[name], kind) for name, kind in kinds.items()
    )


# ---- logs ----------------------------------------------------------------------------------------
def newest_logs(folder: Path, after: float) -> dict[str, list[Path]]:
    """Return the log files of the newest start by node, without those of a start that is older.

    Args:
        folder: the run folder.
        after: when that start began, in seconds since 1970; 0 where that is not known.
    """
    found: dict[str, list[Path]] = {}
    nodes = [path for path in folder.glob("logs/node_*/") if path.name[5:].isdecimal()]
    for node in sorted(nodes, key=lambda path: int(path.name[5:])):
        # the names of starts begin with the time
        starts = sorted(path for path in node.iterdir() if path.is_dir())
        paths = sorted(starts[-1].glob("*.log")) if starts else []
        if paths and max(path.stat().st_mtime for path in paths) > after - COPIED_SECONDS:
            found[node.name[5:]] = paths
    return found


def start_of(paths: list[Path]) -> float:
    """Return when a start began, of which these are log files; 0 where their folder has no time."""
    try:
        start = datetime.strptime(paths[0].parent.name.partition("_")[0], "%Y%m%dT%H%M%S")
    except (IndexError, ValueError):
        return 0.0
    return start.replace(tzinfo=UTC).timestamp()


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def rank_of(path: Path) -> int:
    """Return the rank whose log this is; -1 for that of a launcher."""
    number = path.stem.removeprefix("rank_")
    return int(number) if re.fullmatch(r"\d{1,6}", number) else -1


def _frames(pattern: re.Pattern[str], text: str) -> list[dict[str, Any]]:
    return [frame(file, int(line), at, code) for file, line, at, code in pattern.findall(text)]


def failures_in(logs: dict[str, list[Path]]) -> Iterator[dict[str, Any]]:
    """Yield what logs tell of failures, as error files do; time is null, rank -1 if not known."""
    for path in (path for paths in logs.values() for path in paths):
        text, rank = _tail(path), rank_of(path)
        known = {"rank": rank, "host": "", "step": None, "time": None, "file": path}
        known |= {"cause": "exception", "frames": []}
        failed = [*FAILED.finditer(text)]
        if rank < 0:
            yield from (known | one for one in _failed_at_import(text))
        elif failed:
            block = text[failed[-1].end() :]
            *_, end = [0, *(found.end() for found in FOLDED_FRAME.finditer(block))]
            reason = FOLDED.sub("", block[end:]).strip()
            lost = any(sign in reason for sign in LOST)
            yield known | {
                "reason": reason,
                "cause": "lost contact" if lost else "exception",
                "frames": _frames(FOLDED_FRAME, block),
                "host": failed[-1][3],
            }
        elif refused := REFUSED.findall(text):
            yield known | {"reason": refused[-1], "cause": "setting"}


def _failed_at_import(text: str) -> Iterator[dict[str, Any]]:
    """Yield what a launcher's log tells of an import that fails, before a process has a log."""
    raised = [*RAISED.finditer(text)]
    if raised:
        *_, begins = [0, *(one.end() for one in raised[:-1])]
        block = text[begins : raised[-1].start()]
        frames = _frames(FOLDED_FRAME, block) or _frames(FRAME, block)
        yield {"reason": raised[-1][1], "frames": frames}


def exits(logs: dict[str, list[Path]]) -> dict[int, Exit]:
    """Return by rank how processes ended, as their launchers say."""
    exits: dict[int, Exit] = {}
    for paths in logs.values():
        printed = {rank_of(path): _tail(path) for path in paths}
        for path in (path for path in paths if path.stem == "launcher"):
            text = _tail(path)
            by_launcher = set(KILLED_BY_LAUNCHER.findall(text))
            for rank, code, pid, line in _ended(text):
                exits[rank] = Exit(
                    code=code,
                    file=path,
                    line=" ".join(line.split()),
                    by_launcher=pid in by_launcher,
                    last=printed.get(rank, "").strip().rpartition("\n")[2],
                    told=found[1] if (found := TOLD.search(printed.get(rank, ""))) else "",
                )
    return exits


def _ended(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield rank, exit code (negative: a signal), process ID and line, the first failure first."""
    block, _, root = text.rpartition("Root Cause (first observed failure)")
    for found in (*ENDED.finditer(root), *ENDED.finditer(block)):
        yield int(found[1]), int(found[2]), found[3], found[0]
    if died := DIED.search(text):  # of accelerate, for one process
        yield 0, -int(died[1]) if died[1] else int(died[2]), "", died[0]


def told(logs: dict[str, list[Path]]) -> str:
    """Return why processes were told to stop, as the first log says that has it."""
    for path in (path for paths in logs.values() for path in paths):
        if found := TOLD.search(text := _tail(path)) or LEFT.search(text):
            return found[1]
    return ""
