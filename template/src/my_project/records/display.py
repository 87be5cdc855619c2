"""What a run shows on the terminal."""

import logging
import sys
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from ..loading.layout import Split
from ..run_folder import Run

logger = logging.getLogger(__name__)


def log_start(
    accelerator: Accelerator, run: Run, split: Split, model: nn.Module, resume_from: Path | None
) -> None:
    """Say in a few lines what starts, where, and from what."""
    if not accelerator.is_main_process:
        return
    logger.info(
        "%s: %s on %d process(es), %s, precision %s",
        run.folder,
        accelerator.device,
        split.processes,
        accelerator.distributed_type.value,
        accelerator.mixed_precision,
    )
    logger.info(
        "global batch %d = micro-batch %d x processes %d x accumulation %d; %d steps;"
        " %d parameters",
        split.global_batch_size,
        split.micro_batch_size,
        split.processes,
        split.accumulation,
        run.total_steps,
        sum(p.numel() for p in model.parameters()),
    )
    logger.info("resumed from %s" if resume_from else "from the beginning%.0s", resume_from or "")


def shown(value: float) -> str:
    """Format a metric: four decimals, or none where it is large."""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.0f}"


def print_result(run: Run) -> None:
    """Show how a finished run ended."""
    status = run.status()
    rows = {
        "outcome": f"{status.get('outcome')} {status.get('reason', '')}".strip(),
        "steps": f"{status.get('step')} of {status.get('steps')}",
    }
    for name, value in status.get("result", {}).items():
        rows[name] = "not a number" if value is None else shown(value)
    rows["run folder"] = str(run.folder)
    rows["metrics"] = str(run.folder / "metrics.jsonl")
    rows["exported weights"] = str(run.folder / "export")
    print_table(rows)


def print_table(rows: dict[str, str], title: str | None = None) -> None:
    """Print names and values in two columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=title, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
