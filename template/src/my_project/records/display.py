"""What a run shows on the terminal."""

import logging
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..loading.layout import BatchLayout
from ..run_folder import Run

logger = logging.getLogger(__name__)


class Progress:
    """A bar on a terminal; elsewhere one line per record."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.bar: Any = None

    def start(self, step: int) -> None:
        """Show the bar, if this is a terminal."""
        if sys.stdout.isatty():
            from rich import progress

            self.bar = progress.Progress(
                "step",
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}"),
            )
            self.task = self.bar.add_task("", total=self.run.total_steps, completed=step)
            self.bar.start()

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        values = " ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in record.items()
            if value is not None and name not in ("step", "peak_memory_bytes", "data_seconds")
        )
        line = f"step {record['step']} of {self.run.total_steps}: {values}"
        if not self.bar:
            logger.info(line)
        elif "samples_per_second" in record:
            brief = f"{record['samples_per_second']:.0f} samples/s, loss {record['loss'] or 0:.4g}"
            self.bar.update(self.task, completed=record["step"], description=brief)
        else:
            self.bar.console.print(line)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar:
            self.bar.stop()


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
