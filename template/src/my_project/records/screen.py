"""Show a run on a terminal: a bar below the lines of the log.

    step 135/330 [########            ] 41%  loss 0.1461  4 s left  lr 7.5e-03  3,237 samples/s

The steps themselves draw the bar, so it leaves the terminal alone while a debugger stops a step.
What a recipe prints begins after the bar, on the same line.
"""

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from typing import Any

from ..process import LOGS, can_redraw
from ..run_files import Record
from ..run_folder import Run
from . import log

SECONDS_PER_DRAWING = 0.25


class Screen:
    """A bar on the last line of a terminal; each line of the log erases it first."""

    def __init__(self, run: Run, *_: object) -> None:
        self.total_steps = run.total_steps
        self.is_terminal = False
        self.step = 0  # steps done
        self.drawn = 0.0  # time.monotonic()
        self.numbers: list[str] = []  # the numbers of the last interval, as text
        self.waits_for = ""

    def start(self, step: int, _: dict[str, int]) -> None:
        """Begin after this many steps; draw the bar if this is a terminal."""
        self.step = step
        self.is_terminal = can_redraw()
        log.logger.addFilter(self.is_shown)
        for handler in logging.getLogger().handlers:
            handler.addFilter(self.erase)
        self._draw()

    def erase(self, _: logging.LogRecord) -> bool:
        """Erase the bar, which the next step draws again; pass all lines of the log on."""
        if self.is_terminal:
            self._put("\r\x1b[K")
        return True

    def is_shown(self, entry: logging.LogRecord) -> bool:
        """Return whether a line of the log is shown above the bar.

        Of the lines of records, only those of evaluations are shown: the bar shows the numbers of
        intervals. Under the launcher, the lines that are not shown go to the log file.
        """
        kind = getattr(entry, "kind", None)  # None: not the line of a record
        if not self.is_terminal or kind in (None, "evaluation"):
            return True
        if LOGS in os.environ:
            with suppress(OSError):  # a full disk
                print(entry.msg, file=sys.stderr)  # the log file
        return False

    def step_ended(self, step: int) -> None:
        """Note the number of steps done."""
        self.step = step
        if self.is_terminal and time.monotonic() > self.drawn + SECONDS_PER_DRAWING:
            self._draw()

    def pause(self, kind: str) -> None:
        """Show what training waits for: evaluation, saving."""
        self.waits_for = kind
        self._draw()

    def resume(self, _kind: str, _seconds: float) -> None:
        """Show that training goes on."""
        self.pause("")

    def write(self, record: Record) -> None:
        """Keep the numbers of an interval that the bar shows."""
        if record.kind == "interval":
            self.numbers = log.format_interval(record, self.total_steps)

    def close(self) -> None:
        """Draw the bar for the last time, and leave it on the screen."""
        log.logger.removeFilter(self.is_shown)
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self.erase)
        if self.is_terminal:
            self._draw()
            self._put("\n")
            self.is_terminal = False

    def _draw(self) -> None:
        if not self.is_terminal:
            return
        self.drawn = time.monotonic()
        share = self.step / max(1, self.total_steps)
        bar = f" [{'#' * int(20 * share):20}] {share:.0%}"
        parts = filter(None, (self.waits_for, *self.numbers))
        width = shutil.get_terminal_size().columns - 1
        text = f"step {self.step}/{self.total_steps}"
        for part in (bar, *(f"  {part}" for part in parts)):  # only whole parts that fit
            if len(text) + len(part) > width:
                break
            text += part
        self._put(f"\r\x1b[K{text[:width]}")

    def _put(self, text: str) -> None:
        """Write to the terminal alone: what goes to sys.stdout is copied to the log file too."""
        terminal: Any = sys.__stdout__
        with suppress(OSError):  # the terminal was closed; the run goes on, so that it can save
            terminal.write(text)
            terminal.flush()
