"""How a launch ended, and the block that says so, last on the screen. Imports no torch."""

import shlex
import shutil
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .failures import CONSEQUENCES, first_failure, folded, place_of, short_path
from .files import (
    checkpoints,
    format_metric,
    format_seconds,
    read_manifest,
    read_yaml,
    step_of,
)
from .process import PREEMPTED
from .starts import in_words

GOOD = 0.9  # the share of the time that trained kept steps, below which it is shown


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended, as its launcher knows it."""

    folder: Path
    logs: Path
    status: dict[str, Any]  # the content of status.json
    goodput: dict[str, Any]  # of starts.py; {} where it is not known
    is_new: bool  # whether this start has changed it
    is_first_node: bool  # the others show one line
    failures: list[dict[str, Any]]  # error files of this start (failures.py), the first first
    stop_signal: str  # which the launcher has received
    stop_signal_time: float = float("inf")  # seconds since 1970
    was_killed: bool  # by a second signal
    command: str  # what continues the run; "" where that is not known
    codes: dict[int, int]  # exit codes of this node's processes, by rank; -n: ended by signal n

    @property
    def kind(self) -> str:
        """Return finished, preempted, stopped (nothing saved), refused, failed, or unknown."""
        state = self.status.get("outcome")
        if self.is_new and state == "preempted":
            return "preempted"
        is_success = not any(self.codes.values())
        if state == "finished" and (self.is_new or is_success):
            return "finished"
        # stopped in startup, each process exits by itself, and others may report a lost connection
        follows = self.status.get("failure", {}).get("cause") in CONSEQUENCES
        unsaved = not self.is_new or state == "running" or follows
        failed_before = any(one.get("time", 0) < self.stop_signal_time for one in self.failures)
        if (
            self.stop_signal
            and not is_success
            and (self.was_killed or (unsaved and not failed_before))
        ):
            return "stopped"
        if is_success:
            return "unknown"
        is_refused = self._first.get("cause") == "setting" and not self._first["step"]
        return "refused" if is_refused else "failed"

    @property
    def exit_code(self) -> int:
        """Return 0 finished; 75 preempted or stopped; 2 if a retry would fail too; 1 else."""
        kind = self.kind
        if kind in ("preempted", "stopped"):
            return PREEMPTED
        if kind == "finished":
            return 0
        codes = [one["exit_code"] for one in self.failures if one["cause"] == "setting"]
        if codes and kind != "unknown":
            return max(codes)
        return 1

    @property
    def _first(self) -> dict[str, Any]:
        return first_failure(self.failures)

    def _continues(self) -> str:
        """Return from which step the same command continues."""
        if found := checkpoints(self.folder):
            return f"continues from step {step_of(found[-1])}"
        return "starts again from step 0"

    def _goodput(self) -> str:
        """Return where the time went; "" where nearly all of it trained."""
        kept = self.goodput.get("calendar", {}).get("kept", 1.0)
        return in_words(self.goodput) if kept < GOOD else ""

    def print(self) -> None:
        """Print the block; on other nodes than the first one line."""
        kind = self.kind
        if not self.is_first_node and kind != "refused":
            reason = self.status.get("reason", "") if self.is_new else ""
            if not reason and self._first:
                at = self._first["at"]
                place = f" ({short_path(at['file'])}, line {at['line']})" if at else ""
                reason = f"{self._first['reason']}{place}; see {self.logs}"
            print(f"{self.folder}: {kind}: {reason or self.stop_signal}", flush=True)
        elif kind == "finished":
            print_finished(self.folder, self.status, self._goodput())
        elif kind == "refused":
            print(f"error: {self._first['reason']}", file=sys.stderr, flush=True)
        elif kind in ("preempted", "stopped"):
            self._print_stopped()
        elif kind == "unknown":
            print(
                f"error: the processes exited with 0, but {self.folder}/status.json does not say"
                " finished: some code in them called os._exit. The same command continues the run.",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._print_failed()

    def _print_stopped(self) -> None:
        step, steps = self.status.get("step", 0), self.status.get("steps", 0)
        reason = self.status.get("reason", "")
        if self.kind == "preempted":
            title = f"stopped: saved at step {step} of {steps}"
            note = self.status.get("note", "")
            pairs = [("reason", reason), ("note", note), ("run", str(self.folder))]
            pairs += [("", link) for link in self.status.get("trackers", {}).values()]
            pairs.append(("goodput", self._goodput()))
        else:
            title = "stopped before it could save"
            pairs = [("reason", self.stop_signal), ("run", str(self.folder))]
        lines = rows([pair for pair in pairs if pair[1]])
        if self.stop_signal:
            print()  # the terminal may have shown ^C
        print_block(title, [*lines, *self._next("the same command")])

    def _next(self, what: str) -> list[str]:
        """Return the lines about what continues the run."""
        if not self.command:
            return [f"{what} {self._continues()}"]
        return [f"{what} {self._continues()}:", f"  {self.command}"]

    def _print_failed(self) -> None:
        failure = self._first
        follows = failure.get("cause") in CONSEQUENCES  # where this rank noticed it says little
        frames = [] if follows else failure.get("frames", [])
        lines = []
        if frames:
            lines += ["traceback, the innermost frame last:", *folded(frames)]
        step = failure.get("step")
        title = "failed" + (f" after step {step} of {self.status.get('steps')}" if step else "")
        if failure:
            title += f", rank {failure['rank']} on {failure['host']}"
        reason = failure.get("reason") or self._unexplained()
        pairs = [("error", reason)]
        status_reason = self.status.get("reason", "") if self.is_new else ""
        if (follows or not failure) and status_reason:
            pairs = [("error", status_reason)]
        if at := not follows and place_of(failure.get("at")):
            pairs.append(("at", at))
        others = len({one["rank"] for one in self.failures}) - 1
        if others > 0:
            text = f"{others} more rank{'s' * (others > 1)} failed: {self.folder / 'errors'}"
            pairs.append(("ranks", text))
        if goodput := self._goodput():
            pairs.append(("goodput", goodput))
        pairs.append(("logs", str(self.folder / "logs")))
        lines = [*(f"{line}"[: 4 * width()] for line in lines), *rows(pairs)]
        if has_tool("doctor"):
            lines.append(f"  {'doctor':8} {command_line('doctor', self.folder)}")
        lines += self._next("fix it; then the same command")
        print_block(title, lines, to=sys.stderr)

    def _unexplained(self) -> str:
        """Return what is known of processes that left no error file."""
        ended = [f"rank {rank} {how_it_ended(code)}" for rank, code in self.codes.items() if code]
        hint = f" ({', '.join(ended[:4])})" if ended else ""
        return (
            "a process ended without an error file: killed, out of host memory, or crashed in C"
            f" code{hint}."
        )


def how_it_ended(code: int) -> str:
    """Return an exit code in words; -n means by signal n."""
    if code >= 0:
        return f"exited with {code}"
    return f"was ended by {signal.Signals(-code).name}"


def best_of(folder: Path) -> str:
    """Return the best evaluation of a run, as the newest checkpoint has it; "" without one."""
    try:
        name = read_yaml(folder / "config.yaml")["evaluation"]["best_metric"]
        state = read_manifest(checkpoints(folder)[-1])["state"]
        best, step = state["best"], state["best_step"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    return f"{name} {format_metric(best)} at step {step}" if name and best is not None else ""


# ---- layout --------------------------------------------------------------------------------------
def width() -> int:
    """Return the number of columns: of the terminal, at most 100."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def rows(pairs: list[tuple[str, str]]) -> list[str]:
    """Return names and values in two columns; long values go on below."""
    lines = []
    for name, value in pairs:
        wrapped = textwrap.wrap(
            value, width() - 11, break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(f"  {name:8} {wrapped[0]}")
        lines += [f"{'':11}{line}" for line in wrapped[1:]]
    return lines


def print_block(title: str, lines: list[str], *, to: Any = None) -> None:
    """Print a title under a rule, and lines."""
    text = [("--- " + title + " ").ljust(width(), "-"), *lines]
    print("\n".join(text), file=to or sys.stdout, flush=True)


def print_finished(folder: Path, status: dict[str, Any], goodput: str = "") -> None:
    """Show how a finished run ended, and what can be done with it."""
    step, steps, reason = status.get("step"), status.get("steps"), status.get("reason", "")
    pairs = [("steps", f"{step} of {steps}" + (f", {reason}" if step != steps else ""))]
    pairs.append(("note", status.get("note", "")))
    if "seconds" in status:
        pairs.append(("time", f"{format_seconds(status['seconds'])} in the last start"))
    pairs.append(("goodput", goodput))
    if best := best_of(folder):
        pairs.append(("best", best))
    found = dict(status.get("result", {}))
    if speed := found.pop("samples per second", None):
        pairs.append(("speed", f"{speed:.4g} samples per second"))
    results = [f"{name} {format_metric(value)}" for name, value in found.items()]
    pairs.append(("result", ", ".join(results)))
    pairs.append(("weights", str(folder / "export")))
    pairs.append(("metrics", str(folder / "metrics.jsonl")))
    pairs += [("", link) for link in status.get("trackers", {}).values()]
    lines = rows([(name, value) for name, value in pairs if value])
    lines.append("next:")
    answers = (folder / "samples").is_dir()  # the recipe has predict_samples
    names = {"report": has_tool("report"), "predict": answers, "evaluate": True}
    lines += [f"  {command_line(name, folder)}" for name, is_there in names.items() if is_there]
    print_block(f"finished: {folder}", lines)


def has_tool(name: str) -> bool:
    """Return whether this project still has a tool: tools/ may be deleted."""
    tools = Path(__file__).parent / "tools"
    return (tools / name).is_dir() or (tools / f"{name}.py").is_file()


def command_line(name: str, folder: Path) -> str:
    """Return what one types for a command on a run."""
    return f"python -m {__package__} {name} {shlex.quote(str(folder))}"
