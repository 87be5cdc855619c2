"""Format durations, numbers, plurals and paths as text; print text without control characters."""

import io
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO

PACKAGE = __package__ or ""  # a copy of the loop has another name


def short_path(file: str) -> str:
    """Return a path, relative to the current folder if it is inside that folder."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def printable(text: str, keep: str = "") -> str:
    """Replace characters that are not printable, such as those that control a terminal."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def say(*lines: object, to: TextIO | None = None) -> None:
    """Print untrusted lines without characters that control the terminal."""
    text = printable("\n".join(map(str, lines)), keep="\n\t")
    print(text, file=to or sys.stdout, flush=True)


def processes(count: int) -> str:
    """Return a number of processes in words: "1 process", "2 processes"."""
    return f"{count} process{'es' * (count != 1)}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 41 s, 3 min 5 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_metric(value: float | None) -> str:
    """Format a metric: four decimals, or none from 100 on."""
    if value is None or math.isnan(value):
        return "not a number"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.0f}"


def shortened(text: str, length: int) -> str:
    """Return a text cut to at most `length` characters, including the "..." at the cut."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def rendered(answer: Any) -> str:
    """Return an answer as text; it is a string, or a table or another renderable of rich."""
    if isinstance(answer, str):
        return answer
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=100, color_system=None).print(answer)
    return file.getvalue()


WIDTH = 80  # characters in the rule above a block


def rows(pairs: list[tuple[str, str]]) -> list[str]:
    """Return names and values in two columns, without pairs whose value is empty."""
    return [f"  {name:8} {value}" for name, value in pairs if value]


def print_block(title: str, lines: list[str], *, to: TextIO | None = None) -> None:
    """Print a rule with a title, and the lines below it."""
    say(f"--- {title} ".ljust(WIDTH, "-"), *lines, to=to)


def command_line(name: str, folder: Path) -> str:
    """Return the command line that runs a command on a run folder."""
    return f"python -m {PACKAGE} {name} {shlex.quote(str(folder))}"
