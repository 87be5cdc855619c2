"""What a run shows: one line per record, or on a terminal a bar below the lines of the log.

    step 196/330 [###########         ] 59%  loss 0.4312  52 s left  lr 9.1e-03  3,021 samples/s

The bar is drawn by the steps themselves, so a debugger that stops one has the terminal. What a
recipe prints begins behind the bar.
"""

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..loading.layout import BatchLayout
from ..process import LOGS, can_redraw
from ..run_files import kind_of
from ..run_folder import FINISHED_BEFORE, Run
from ..words import format_metric, format_seconds, printable, processes, say, shortened

logger = logging.getLogger(__name__)
SECONDS_PER_DRAWING = 0.25
SAMPLE_CHARACTERS = 500  # of the text of the recipe, in a log


class Screen:
    """The bar on the last line of a terminal, which a line of the log erases first."""

    def __init__(self, run: Run) -> None:
        self.total_steps = run.total_steps
        self.is_terminal = False
        self.step = 0  # steps done
        self.drawn = 0.0  # time.monotonic()
        self.numbers: list[str] = []  # of the last interval
        self.waits_for = ""

    def start(self, step: int) -> None:
        """Begin after so many steps; draw the bar if this is a terminal."""
        self.step = step
        self.is_terminal = can_redraw()
        for handler in logging.getLogger().handlers:
            handler.addFilter(self.erase)
        self._draw()

    def erase(self, _: logging.LogRecord) -> bool:
        """Erase the bar, which the next step draws again; pass all lines of the log on."""
        if self.is_terminal:
            self._put("\r\x1b[K")
        return True

    def step_ended(self, step: int) -> None:
        """Note the number of steps done."""
        self.step = step
        if self.is_terminal and time.monotonic() > self.drawn + SECONDS_PER_DRAWING:
            self._draw()

    def pause(self, what: str) -> None:
        """Show what training waits for: evaluation, saving; "" when it goes on."""
        self.waits_for = what
        self._draw()

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl; on a terminal, only evaluations stay above the bar."""
        if kind_of(record) == "interval":
            self.numbers = numbers(record, self.total_steps)
        line = line_of(record, self.total_steps)
        if line and (not self.is_terminal or kind_of(record) == "evaluation"):
            logger.info(line)
        elif line and LOGS in os.environ:
            with suppress(OSError):  # a full disk
                print(line, file=sys.stderr)  # the log file

    def stop(self) -> None:
        """Leave the bar on the screen as it is."""
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
        for part in (bar, *(f"  {part}" for part in parts)):  # whole parts, as far as they fit
            if len(text) + len(part) > width:
                break
            text += part
        self._put(f"\r\x1b[K{text[:width]}")

    def _put(self, text: str) -> None:
        """Write to the terminal alone: what is printed to sys.stdout has a copy in the log file."""
        terminal: Any = sys.__stdout__
        with suppress(OSError):  # a terminal that was closed: the run goes on, to save
            terminal.write(text)
            terminal.flush()


# ---- lines ---------------------------------------------------------------------------------------
def line_of(record: dict[str, Any], total_steps: int) -> str:
    """Return what a log says of a record; "" if that is said elsewhere."""
    kind, step, says = kind_of(record), record["step"], ""
    if kind == "interval":
        parts = numbers(record, total_steps)
        if norm := record["gradient_norm"]:
            parts.append(f"gradient norm {norm:.4g}")
        if "epoch" in record:  # a stream has none
            parts.append(f"epoch {round(record['epoch'], 2)}")
        says = ", ".join([*parts, f"{format_seconds(record['elapsed_seconds'])} elapsed"])
    elif kind == "evaluation":
        parts = [
            f"{printable(name)} {format_metric(value)}"
            for name, value in record.items()
            if "/" in name  # <set>/<metric>
        ]
        parts += ["the best so far"] if record["is_best"] else []
        says = ", ".join([*parts, f"in {record['seconds']:.3g} s"])
        lines = shortened(record.get("sample", ""), SAMPLE_CHARACTERS).splitlines()
        says += "".join(f"\n  {printable(line)}" for line in lines)
    elif kind == "checkpoint":
        says = f"a save, for which training waited {record['seconds']:.2g} s"
    return f"step {step} of {total_steps}: {says}" if says else ""


def numbers(interval: dict[str, Any], total_steps: int) -> list[str]:
    """Return what is said of an interval: loss, time left, rate, speed, MFU, data wait, skipped."""
    loss, skipped = interval["loss"], interval["skipped_steps"]
    left = (total_steps - interval["step"]) * interval["step_seconds"]  # at its speed
    is_sample = interval["items_per_second"] == interval["samples_per_second"]
    unit = "samples" if is_sample else "items"
    parts = [
        "loss not finite" if loss is None else f"loss {loss:#.4g}".removesuffix("."),
        f"{format_seconds(left)} left",
        f"lr {interval['learning_rate']:.1e}",
        f"{float(format(interval[f'{unit}_per_second'], '.4g')):,g} {unit}/s",
    ]
    for name, field in (("MFU", "mfu"), ("data", "data_share")):
        parts += [f"{name} {100 * interval[field]:.3g}%"] if interval.get(field) is not None else []
    return parts + ([f"{skipped} steps skipped"] if skipped else [])


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
    device, sharding = accelerator.device, run.numerics["sharding"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    words = [f"{processes(layout.world_size)} on {name}", sharding * (sharding != "none")]
    words.append({"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision))
    logger.info("%s: %s", run.folder, ", ".join(filter(None, words)))
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = f", {trained:,} of them trained" if trained < size else ""
    logger.info(
        f"global batch {layout.global_batch_size} = micro-batch {layout.micro_batch_size}"
        f" x {processes(layout.world_size)} x accumulation {layout.accumulation};"
        f" {run.total_steps:,} steps; {size:,} parameters{part}"
    )
    logger.info(f"resumed from {resume_from}" if resume_from else "starting at step 0")


def log_finished(run: Run, *, before: bool = False) -> None:
    """Log the result of a run, of an earlier start or now, unless the launcher shows it."""
    if before:
        done, asked = run.status().step, run.total_steps
        length = f"finished: {done} steps, you asked for {asked}; " if done > asked else ""
        print(length + FINISHED_BEFORE, flush=True)
    if LOGS not in os.environ:
        status = run.status()
        parts = [f"finished, {status.reason}: weights in {run.folder / 'export'}"]
        results = status.result or {}  # a full disk may not have taken the status
        parts += [f"{name} {format_metric(value)}" for name, value in results.items()]
        say("; ".join(filter(None, [", ".join(parts), status.note])))
