"""What a run shows on the terminal."""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..loading.layout import BatchLayout
from ..process import CopiedStream
from ..run_folder import Run

logger = logging.getLogger(__name__)


class Progress:
    """A bar on a terminal; elsewhere one line per record.

    While a debugger reads commands, it has the terminal; the bar is back with the next record.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_terminal = False
        self.bar: Any = None
        self.log: CopiedStream | None = None
        self.debuggers = ExitStack()

    def start(self, step: int, records: list[dict[str, Any]]) -> None:
        """Show the bar, if this is a terminal."""
        self.is_terminal = sys.stdout.isatty()
        if self.is_terminal:
            self.debuggers.enter_context(called_by_debuggers(self._remove_bar))
            self._show_bar(step)

    def _show_bar(self, step: int) -> None:
        from rich import progress
        from rich.console import Console

        before = sys.stdout
        self.log = before if isinstance(before, CopiedStream) else None
        self.bar = progress.Progress(
            "step",
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=Console(file=self.log.stream if self.log else None),  # not into the log
        )
        self.task = self.bar.add_task("", total=self.run.total_steps, completed=step)
        self.bar.start()
        if self.log:  # sys.stdout is rich's now, which prints above the bar
            sys.stdout = CopiedStream(sys.stdout, self.log.file)

    def _remove_bar(self) -> None:
        bar, self.bar = self.bar, None
        if bar:
            with suppress(OSError):  # a closed terminal
                bar.stop()

    def step_ended(self, step: int) -> None:
        """Note the steps done."""

    def pause(self, what: str) -> None:
        """Show what interrupts the steps."""

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        if record["kind"] not in ("interval", "evaluation"):
            return
        values = " ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in record.items()
            if value is not None and name not in ("step", "kind", "time", "elapsed_seconds")
        )
        line = f"step {record['step']} of {self.run.total_steps}: {values}"
        if not self.is_terminal:
            logger.info(line)
            return
        if not self.bar:
            self._show_bar(record["step"])
        if self.log:
            self.log.write_to_file(f"{line}\n")
        if "samples_per_second" in record:
            loss = math.nan if record["loss"] is None else record["loss"]
            brief = f"{record['samples_per_second']:.0f} samples/s, loss {loss:.4g}"
            with suppress(OSError):
                self.bar.update(self.task, completed=record["step"], description=brief)
        else:
            with suppress(OSError):
                self.bar.console.print(line)

    def stop(self) -> None:
        """Remove the bar."""
        self._remove_bar()
        self.debuggers.close()


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
        # a debugger made while the bar was shown prints through the bar
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
