"""How a finished run is shown, last on the screen, and the layout of blocks. Imports no torch."""

import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from ..files import format_seconds, read_json, read_manifest, read_yaml, step_of
from ..process import LOGS


def format_metric(value: float | None) -> str:
    """Format a metric: four decimals, or none where it is large."""
    if value is None:
        return "not a number"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.0f}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest first; their hashes are not read."""
    found = [path for path in folder.glob("checkpoints/step_*") if step_of(path) >= 0]
    return sorted((path for path in found if (path / "manifest.json").is_file()), key=step_of)


def best_of(folder: Path) -> str:
    """Return the best evaluation of a run, as the newest checkpoint has it; "" without one."""
    try:
        name = read_yaml(folder / "config.yaml")["evaluation"]["best_metric"]
        newest = checkpoints(folder)[-1]
        state = read_json(newest / "state.json") | read_manifest(newest).get("evaluation", {})
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


def print_earlier(folder: Path, status: dict[str, Any]) -> None:
    """Show the result of a run that has finished before."""
    print(
        "already finished, so nothing is trained; --resume never trains it again and keeps this"
        " run aside, --run_name trains another run",
        flush=True,
    )
    print_finished(folder, status)


def print_finished(folder: Path, status: dict[str, Any]) -> None:
    """Show how a finished run ended, unless launch.py does."""
    if LOGS not in os.environ:
        print_finished_block(folder, status)


def print_finished_block(folder: Path, status: dict[str, Any], goodput: str = "") -> None:
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
    tools = Path(__file__).parents[1] / "tools"
    return (tools / name).is_dir() or (tools / f"{name}.py").is_file()


def command_line(name: str, folder: Path) -> str:
    """Return what one types for a command on a run."""
    package = (__package__ or "").rpartition(".")[0]  # a copy of the loop has another name
    return f"python -m {package} {name} {shlex.quote(str(folder))}"
