"""How a launch ended, and the summary that is printed last. Imports no torch."""

import importlib
import shlex
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..failures import CONSEQUENCES, Failure, first_failure
from ..files import read_yaml
from ..manifest import read_manifest
from ..process import PREEMPTED
from ..run_files import Status, checkpoint_step, checkpoints
from ..words import PACKAGE, format_metric, format_seconds, say
from .attempts import signal_name

WIDTH = 80  # characters in the rule above a block

# a process that has lost contact may end by SIGABRT, but not by these signals
ENDED_BY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended, according to its launcher."""

    folder: Path
    logs: Path
    status: Status
    is_new: bool  # this launch has begun the run, so the status is about this launch
    is_first_node: bool  # it prints the summary; the others print one line
    failures: list[Failure]  # the failures of the last start
    stop_signal: str  # the stop signal that the launcher has received; "" if none
    stop_signal_time: float  # seconds since 1970; inf without a signal
    command: str  # the command that continues the run; "" if not known
    codes: dict[int, int]  # exit codes of this node's processes, by rank; -n: ended by signal n
    killed: Collection[int] = ()  # the ranks that the launcher killed, after a failure
    may_start_over: bool = False  # the same command has --resume never

    @property
    def kind(self) -> str:
        """Return finished, preempted, stopped (nothing saved), refused or failed."""
        outcome = self.status.outcome
        if self.is_new and outcome == "preempted":
            return "preempted"
        is_success = bool(self.codes) and not any(self.codes.values())
        if outcome == "finished" and (self.is_new or is_success):
            return "finished"
        # after a stop signal in startup, processes exit one by one, and those that still run may
        # report lost contact
        noted, first = self.status.failure, self._first
        is_consequence = noted is not None and noted.cause in CONSEQUENCES
        is_unsaved = not self.is_new or outcome == "running" or is_consequence or not self.codes
        failed_before = any(failure.time < self.stop_signal_time for failure in self.failures)
        if self.stop_signal and is_unsaved and not failed_before:
            return "stopped"
        is_refused = first is not None and first.cause == "setting" and not first.step
        return "refused" if is_refused else "failed"

    @property
    def exit_code(self) -> int:
        """Return 0 if finished, 75 if preempted or stopped, 2 if a retry would fail too, else 1."""
        kind = self.kind
        if kind in ("preempted", "stopped"):
            return PREEMPTED
        if kind == "finished":
            return 0
        return self._first.exit_code if self._first else 1

    @property
    def _warnings(self) -> tuple[str, str]:
        count = self.status.warnings if self.is_new else 0
        return "warnings", f"{count}, in {self.logs / 'rank_00000.log'}" if count else ""

    @property
    def _first(self) -> Failure | None:
        return first_failure(self.failures)

    @property
    def _silent(self) -> int | None:
        """The first rank here that a signal ended, so that it could report nothing; or None."""
        ended = (rank for rank, code in self.codes.items() if -code in ENDED_BY)
        return next((rank for rank in ended if rank not in self.killed), None)

    def tell(self) -> int:
        """Print how the run ended, after all output of its processes; return the exit code."""
        with suppress(OSError):  # a closed terminal
            self.print()
        return self.exit_code

    def print(self) -> None:
        """Print the summary on the first node, and one line on the others or for a refusal."""
        kind, first = self.kind, self._first
        if first and kind == "refused":
            say(f"error: {first.reason}", to=sys.stderr)
        elif not self.is_first_node:
            reason = self.status.reason if self.is_new else ""
            if not reason and first:
                reason = f"{first.reason}; see {self.logs}"
            say(f"{self.folder}: {kind}: {reason or self.stop_signal}")
        elif kind == "finished":
            print_finished(self.folder, self.status, self._warnings)
        elif kind in ("preempted", "stopped"):
            self._print_stopped()
        else:
            self._print_failed()

    def _print_stopped(self) -> None:
        title = "stopped before it could save"
        pairs = [("reason", self.stop_signal), ("run", str(self.folder))]
        if self.kind == "preempted":
            title = f"stopped: saved at step {self.status.step} of {self.status.steps}"
            pairs[0] = ("reason", self.status.reason)
            pairs += [("note", self.status.note or ""), self._warnings, *links(self.status)]
            pairs.append(("nodes", too_few_nodes(self.status)))
            pairs.append(("goodput", goodput_in_words(self.status)))
        print_block(title, [*rows(pairs), *self._next("the same command")])

    def _next(self, subject: str) -> list[str]:
        """Return the lines that say from which step the run continues, and by which command."""
        newest = [checkpoint_step(path) for path in checkpoints(self.folder)[-1:]]
        effect = f"continues from step {newest[0]}" if newest else "starts again from step 0"
        line = f"{subject}{' without --resume never' * self.may_start_over} {effect}"
        return [f"{line}:", f"  {self.command}"] if self.command else [line]

    def _print_failed(self) -> None:
        title, reason, calls = "failed", unexplained(self.codes, self.killed), []
        # the frames in which a rank noticed the failure of another process say little
        is_consequence, silent = True, None
        if failure := self._first:
            is_consequence = failure.cause in CONSEQUENCES
            has_noticed = is_consequence or failure.cause == "loader worker"
            frames = () if has_noticed else failure.frames
            calls = [f"  {frame.place}" for frame in frames if not frame.library]
            title += f" after step {failure.step} of {self.status.steps}" if failure.step else ""
            silent = self._silent if is_consequence else None
            who = f"rank {failure.rank} on {failure.host}" if silent is None else f"rank {silent}"
            title += f", {who}"
            reason = failure.reason or reason
        if self.is_new and is_consequence:
            reason = self.status.reason or reason
        if silent is not None:
            reason = unexplained({silent: self.codes[silent]}, ())
        others = len({failure.rank for failure in self.failures}) - 1
        ranks = f"{others} more failed: {self.folder / 'errors'}" if others > 0 else ""
        doctor = command_line("doctor", self.folder) if has_tool("doctor") else ""
        pairs = [
            ("error", reason),
            ("ranks", ranks),
            self._warnings,
            ("nodes", too_few_nodes(self.status)),
            ("goodput", goodput_in_words(self.status)),
            ("logs", str(self.folder / "logs")),
            ("doctor", doctor),
        ]
        traceback = ["traceback without the libraries, the innermost call last:"] * bool(calls)
        lines = [*traceback, *calls, *rows(pairs), *self._next("fix it; then the same command")]
        print_block(title, lines, to=sys.stderr)


def unexplained(codes: dict[int, int], killed: Collection[int]) -> str:
    """Return what the exit codes say about processes that left no error file."""
    codes = {rank: code for rank, code in codes.items() if code and rank not in killed} or codes
    ended = [f"rank {rank} {how_it_ended(code)}" for rank, code in codes.items()]
    cause = "it called os._exit, or C code ended it"
    if min(codes.values(), default=0) < 0:
        cause = "it crashed in C code, or was sent the signal"
    if -signal.SIGKILL in codes.values():  # others may have ended because of this one
        cause = "it was killed, perhaps because the host ran out of memory"
    return f"a process ended without an error file ({', '.join(ended[:4]) or 'no code'}): {cause}."


def how_it_ended(code: int) -> str:
    """Return an exit code in words; -n: ended by signal n."""
    if code >= 0:
        return f"exited with {code}"
    return f"was ended by {signal_name(-code)}"


def print_finished(folder: Path, status: Status, *more: tuple[str, str]) -> None:
    """Print the results of a finished run, and commands to run next."""
    weights = folder / "best", folder / "export"
    results = [f"{name} {format_metric(value)}" for name, value in (status.result or {}).items()]
    pairs = [
        ("steps", f"{status.step} of {status.steps}, {status.reason}"),
        ("note", status.note or ""),
        *more,
        ("time", f"{format_seconds(status.seconds)} in the last start"),
        ("nodes", too_few_nodes(status)),
        ("goodput", goodput_in_words(status)),
        ("best", best_evaluation(folder)),
        ("result", ", ".join(results)),
        ("weights", ", ".join(str(path) for path in weights if path.exists())),
        ("metrics", str(folder / "metrics.jsonl")),
        *links(status),
    ]
    has_samples = (folder / "samples").is_dir()  # the recipe defines predict_samples
    names = {"report": has_tool("report"), "predict": has_samples, "evaluate": True}
    commands = [f"  {command_line(name, folder)}" for name, is_shown in names.items() if is_shown]
    print_block(f"finished: {folder}", [*rows(pairs), "next:", *commands])


def best_evaluation(folder: Path) -> str:
    """Return the best evaluation stored in the newest checkpoint of a run; "" if there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # a file may be damaged
        name = read_yaml(folder / "config.yaml", follow=False)["evaluation"]["best_metric"]
        state = read_manifest(checkpoints(folder)[-1])["state"]
        if state["best"] is not None:
            return f"{name} {format_metric(state['best'])} at step {state['best_step']}"
    return ""


def links(status: Status) -> list[tuple[str, str]]:
    """Return a row for each tracker, with its link to the run."""
    return [("tracker", link) for link in status.trackers.values()]


def too_few_nodes(status: Status) -> str:
    """Return how many nodes took part at the end, such as "3 of 4"; "" if all did."""
    present, _, total = status.nodes.partition(" of ")
    return status.nodes if present != total else ""


def goodput_in_words(status: Status) -> str:
    """Return the goodput in status.json as a line; "" if it is good or unknown."""
    goodput = tool("goodput")
    return str(goodput.in_words(status)) if goodput else ""


def tool(name: str) -> Any:
    """Return a module of tools/; None if it was deleted."""
    return importlib.import_module(f"{PACKAGE}.tools.{name}") if has_tool(name) else None


def has_tool(name: str) -> bool:
    """Return whether this project still has a tool; tools/ may be deleted."""
    tools = Path(__file__).parents[1] / "tools"
    return (tools / name).is_dir() or (tools / f"{name}.py").is_file()


def rows(pairs: list[tuple[str, str]]) -> list[str]:
    """Return names and values in two columns, without pairs whose value is empty."""
    return [f"  {name:8} {value}" for name, value in pairs if value]


def print_block(title: str, lines: list[str], *, to: TextIO | None = None) -> None:
    """Print a rule with a title, and the lines below it."""
    say(f"--- {title} ".ljust(WIDTH, "-"), *lines, to=to)


def command_line(name: str, folder: Path) -> str:
    """Return the command line that runs a command on a run folder."""
    return f"python -m {PACKAGE} {name} {shlex.quote(str(folder))}"
