"""What a run shows on the terminal."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..loading.layout import BatchLayout
from ..process import CopiedStream
from ..run_folder import Run
from .lines import line_of, numbers

logger = logging.getLogger(__name__)


class Progress:
    """The bar of a terminal (screen.py); elsewhere one plain line per record.

    While a debugger reads commands, it has the terminal; the bar is back after the step.
    """

    def __init__(self, run: Run) -> None:
        self.total_steps = run.total_steps
        self.is_terminal = False
        self.bar: Any = None
        self.log: CopiedStream | None = None
        self.debuggers = ExitStack()

    def start(self, step: int) -> None:
        """Show where the run is after so many steps, if this is a terminal."""
        is_dumb = os.environ.get("TERM") in ("dumb", "unknown")  # it cannot move its cursor
        self.is_terminal = sys.stdout.isatty() and not is_dumb
        if self.is_terminal:
            self.debuggers.enter_context(called_by_debuggers(self._hide))
            self._show(step)

    def step_ended(self, step: int) -> None:
        """Note the number of steps done; called after each, so it draws nothing."""
        if self.bar:
            self.bar.step = step
        elif self.is_terminal:  # a debugger had the terminal
            self._show(step)

    def pause(self, what: str) -> None:
        """Note what training waits for: evaluation, saving; "" when it goes on."""
        if self.bar:
            self.bar.pause = what

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        line = line_of(record, self.total_steps)
        if not self.is_terminal:
            if line:
                logger.info(line)
            return
        if self.log and line:
            self.log.write_to_file(f"{line}\n")
        if not self.bar:  # a debugger had the terminal
            self._show(record["step"])
        if record["kind"] == "interval":
            self.bar.numbers = "  ".join(numbers(record))
        elif record["kind"] == "evaluation":
            self.bar.say(line)

    def stop(self) -> None:
        """Leave the bar on the screen as it is."""
        self._remove()
        self.debuggers.close()

    def _show(self, step: int) -> None:
        from .screen import Bar

        before = sys.stdout
        self.log = before if isinstance(before, CopiedStream) else None
        self.bar = Bar(self.log.stream if self.log else before, step, self.total_steps)
        self.bar.start()
        if self.log:  # sys.stdout is rich's now, which prints above the bar, but into no log
            sys.stdout = CopiedStream(sys.stdout, self.log.file)

    def _hide(self) -> None:
        """Leave the terminal to a debugger."""
        if self.bar:
            self.bar.live.transient = True
        self._remove()

    def _remove(self) -> None:
        bar, self.bar = self.bar, None
        if bar:
            bar.stop()


@contextmanager
def called_by_debuggers(function: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever pdb, or a debugger made from it, is about to read commands.

    That is more than sys.breakpointhook sees: pdb.set_trace, `python -m pdb` and each stop at a
    breakpoint that was set in the debugger.
    """
    import pdb

    interaction = pdb.Pdb.interaction

    def call_first(debugger: Any, *arguments: Any, **options: Any) -> None:
        function()
        # a debugger made while the lines were shown prints through them
        debugger.stdout = getattr(debugger.stdout, "rich_proxied_file", debugger.stdout)
        interaction(debugger, *arguments, **options)

    setattr(pdb.Pdb, "interaction", call_first)  # noqa: B010 - as pyright wants it
    try:
        yield
    finally:
        setattr(pdb.Pdb, "interaction", interaction)  # noqa: B010


def log_start(
    accelerator: Accelerator,
    run: Run,
    layout: BatchLayout,
    model: nn.Module,
    resume_from: Path | None,
) -> None:
    """Log the devices, the batch layout, the model's size and the checkpoint to resume from."""
    if not accelerator.is_main_process:
        return
    logger.info(
        "%s: %s on %d process(es), %s, precision %s",
        run.folder,
        accelerator.device,
        layout.world_size,
        accelerator.distributed_type.value,
        accelerator.mixed_precision,
    )
    logger.info(
        "global batch %d = micro-batch %d x processes %d x accumulation %d; %d steps;"
        " %d parameters",
        layout.global_batch_size,
        layout.micro_batch_size,
        layout.world_size,
        layout.accumulation,
        run.total_steps,
        sum(p.numel() for p in model.parameters()),
    )
    logger.info(f"resumed from {resume_from}" if resume_from else "starting at step 0")


def print_table(rows: dict[str, str], title: str | None = None) -> None:
    """Print names and values in two columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=title, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
