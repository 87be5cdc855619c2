"""Format durations, numbers, plurals and paths as text; print text safely; parse command lines."""

import argparse
import io
import math
import os
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any, TextIO

PACKAGE = __package__ or ""  # a copied package has another name


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


def make_parser(description: str | None, command: str = "") -> argparse.ArgumentParser:
    """Return an argument parser for a command, by default named after its module."""
    return argparse.ArgumentParser(
        prog=f"python -m {__package__} {command or Path(sys.argv[0]).stem}",
        description=cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
