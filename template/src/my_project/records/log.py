"""Write the log: a line for each record, and lines at the start and the end of a run."""

import logging
import math
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from ..loading.layout import BatchLayout
from ..process import LOGS
from ..run_files import Record
from ..run_folder import Run
from ..words import format_metric, format_seconds, printable, processes, say, shortened

logger = logging.getLogger(__name__)
SAMPLE_CHARACTERS = 500  # maximum length of the recipe's text in the log


def log_record(record: Record, total_steps: int) -> None:
    """Log a record of metrics.jsonl; the log entry has the record's kind, for logging filters."""
    if line := format_record(record, total_steps):
        logger.info(line, extra={"kind": record.kind})


def format_record(record: Record, total_steps: int) -> str:
    """Return the line of a record; "" if other code logs what it contains."""
    kind, text = record.kind, ""
    if kind == "interval":
        parts = format_interval(record, total_steps)
        if not math.isnan(norm := record.number("gradient_norm")):
            parts.append(f"gradient norm {norm:.4g}")
        if record.epoch is not None:
            parts.append(f"epoch {round(record.epoch, 2)}")
        text = ", ".join([*parts, f"{format_seconds(record.elapsed_seconds)} elapsed"])
    elif kind == "evaluation":
        parts = [
            f"{printable(name)} {format_metric(record.number(name))}"
            for name in record.values
            if "/" in name  # <set>/<metric>
        ]
        parts += ["the best so far"] if record.values["is_best"] else []
        text = ", ".join([*parts, f"in {format_pause(record)}"])
        lines = shortened(record.text("sample"), SAMPLE_CHARACTERS).splitlines()
        text += "".join(f"\n  {printable(line)}" for line in lines)
    elif kind == "checkpoint":
        text = f"a save, for which training waited {format_pause(record)}"
    elif kind == "stop" and LOGS not in os.environ:  # otherwise the launcher's summary says it
        text = f"saved and stopped: {record.text('reason')}; the same command continues the run"
    return f"step {record.step} of {total_steps}: {text}" if text else ""


def format_pause(record: Record) -> str:
    """Format how long training waited: two digits, or whole seconds, minutes and hours."""
    seconds = record.number("seconds")
    return format_seconds(seconds) if seconds >= 10 else f"{seconds:.2g} s"


def format_interval(interval: Record, total_steps: int) -> list[str]:
    """Return the parts of an interval's line: loss, time left, rate, speed, MFU, data, skipped."""
    loss, skipped = interval.number("loss"), interval.values["skipped_steps"]
    parts = ["no loss" if math.isnan(loss) else f"loss {loss:#.4g}".removesuffix(".")]
    if step_seconds := interval.number("step_seconds", 0.0):
        left = (total_steps - interval.step) * step_seconds  # at this speed
        parts.append(f"{format_seconds(left)} left")
    parts.append(f"lr {interval.number('learning_rate'):.1e}")
    if rate := interval.number("items_per_second", 0.0):
        unit = "samples" if rate == interval.number("samples_per_second") else "items"
        parts.append(f"{float(format(rate, '.4g')):,.12g} {unit}/s")
    for name, field in (("MFU", "mfu"), ("data", "data_share")):
        share = interval.number(field)
        parts += [] if math.isnan(share) else [f"{name} {100 * share:.3g}%"]
    return parts + ([f"{skipped} step{'s' * (skipped != 1)} skipped"] if skipped else [])


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
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    words = [f"{processes(layout.world_size)} on {name}"]
    words += [kind for kind in [str(run.numerics["sharding"])] if kind != "none"]
    words.append({"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision))
    logger.info("%s: %s", run.folder, ", ".join(words))
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = f", {trained:,} of them trained" if trained < size else ""
    logger.info(f"{layout}; {run.total_steps:,} steps; {size:,} parameters{part}")
    if layout.is_uneven and not run.config.batches.micro_batch_size:
        logger.info(
            "dropout, BatchNorm and losses that compare samples depend on how the global batch is"
            " divided; set batches.micro_batch_size for equal results on any number of processes"
        )
    logger.info(f"resumed from {resume_from}" if resume_from else "starting at step 0")


def log_finished(run: Run, *, before: bool = False) -> None:
    """Log the result of a finished run, unless the launcher shows it.

    Args:
        run: the run folder.
        before: whether an earlier start finished the run; this is said in any case.
    """
    if before:
        done, asked = run.status().step, run.total_steps
        more = f" {done} steps, more than the {asked} that you asked for" if done > asked else ""
        print(
            f"this run has already finished{more}, so nothing is trained; use --resume never to"
            " move it aside and train it again, or --run_name to train another run",
            flush=True,
        )
    if LOGS not in os.environ:
        status = run.status()
        reason = f", {status.reason}" if status.reason else ""  # "" if the disk was full
        parts = [f"finished{reason}: weights in {run.folder / 'export'}"]
        results = status.result or {}
        parts += [f"{name} {format_metric(value)}" for name, value in results.items()]
        say("; ".join(filter(None, [", ".join(parts), status.note])))
