"""What a log says of a record, in one line. Imports no torch."""

from typing import Any

from ..files import format_seconds, kind_of, printable
from .outcome import format_metric

SAMPLE_CHARACTERS = 500  # of the text of the recipe, in a log
# Of an evaluation; its other numbers are results.
NOT_RESULTS = {"kind", "step", "epoch", "elapsed_seconds", "time", "seconds", "is_best"}


def line_of(record: dict[str, Any], total_steps: int) -> str:
    """Return what a log says of a record; "" if that is said elsewhere."""
    kind, step, says = kind_of(record), record["step"], ""
    if kind == "interval":
        left = (total_steps - step) * record["step_seconds"]
        norm = record["gradient_norm"]
        parts = [*numbers(record), f"gradient norm {norm:.4g}" if norm else ""]
        times = f"{format_seconds(record['elapsed_seconds'])} elapsed, {format_seconds(left)} left"
        says = ", ".join(filter(None, [*parts, f"epoch {round(record['epoch'], 2)}", times]))
    elif kind == "evaluation":
        results = {
            name: value
            for name, value in record.items()
            if name not in NOT_RESULTS and not isinstance(value, (str, list))
        }
        parts = [f"{printable(name)} {format_metric(value)}" for name, value in results.items()]
        sample = record.get("sample")
        parts = parts or ["a sample" if sample else "no results"]
        best = "the best so far" if record["is_best"] else ""
        says = ", ".join(filter(None, [*parts, best, f"in {record['seconds']:.3g} s"]))
        lines = (sample or "")[:SAMPLE_CHARACTERS].splitlines()
        says += "".join(f"\n  {printable(line)}" for line in lines)
    elif kind == "checkpoint":
        says = f"a save, for which training waited {record['seconds']:.2g} s"
    return f"step {step} of {total_steps}: {says}" if says else ""


def numbers(interval: dict[str, Any]) -> list[str]:
    """Return what is said of an interval: loss, learning rate, speed, MFU, data wait, skipped."""
    tokens, mfu = interval.get("tokens_per_second"), interval.get("mfu")
    speed = f"{format_speed(interval['samples_per_second'])} samples/s"
    data, skipped = interval.get("data_share"), interval["skipped_steps"]
    parts = [
        loss(interval),
        f"lr {interval['learning_rate']:.1e}",
        f"{format_speed(tokens)} tokens/s" if tokens else speed,
        "" if mfu is None else f"MFU {mfu:.0%}",
        "" if data is None else f"data {data:.0%}",
        # else the loss says so
        f"{skipped} steps skipped in all" if skipped > interval["skipped"] else "",
    ]
    return [part for part in parts if part]


def loss(interval: dict[str, Any]) -> str:
    """Return the loss of an interval, and how many of its steps were skipped."""
    value = interval["loss"]
    says = "loss not finite" if value is None else f"loss {value:#.4g}".removesuffix(".")
    if interval["skipped"]:
        says += f", {interval['skipped']} of {interval['steps']} steps skipped"
    return says


def format_speed(per_second: float) -> str:
    """Format a number per second in at most five characters: 9.31, 3021, 312k, 1.21M."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if per_second >= 100 * unit or per_second >= 1e6:
            return f"{per_second / unit:.3g}{suffix}"
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
