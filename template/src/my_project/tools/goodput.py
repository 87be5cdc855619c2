"""Compute what the time of a run was spent on."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..run_files import ENDED, Status, each_start, records
from ..words import format_seconds

GOOD = 0.9  # goodput (the share of the time spent on steps that are kept) is shown if it is lower
START_SECONDS = 60.0  # before this time, no goodput is shown unless a step has been kept
PAUSES = {"checkpoint": "saving", "evaluation": "evaluation"}  # by the kind of their records
PARTS = ("kept", "startup", "lost", "saving", "evaluation", "data", "ending")


@dataclass(kw_only=True)
class Span:
    """The time of a start, in seconds since 1970."""

    began: float
    ended: float | None = None
    first_step_time: float | None = None
    last: float  # the newest record
    is_lost: bool  # it failed, or later starts did some of its steps again
    # the last step that is kept: later starts repeated the steps after it or, after a failure, will
    # have to repeat them
    kept_step: float
    kept_until: float = 0.0
    data_until: float = 0.0


def goodput(folder: Path) -> dict[str, Any]:
    """Return what the time of a run was spent on, as fractions by name.

    Returns:
        "launcher" (the time in which a launcher ran) and "calendar" (the time since the first
        launcher began): "seconds", and the share of each of PARTS; in "calendar" also "down".
        "unknown_starts": the number of starts at times when, according to starts.jsonl, no launcher
        ran: accelerate launch or torchrun started them. {} if no start is in starts.jsonl, or if
        times are damaged.
    """
    if not (starts := spans(folder)):
        return {}
    began = [start.began for start in starts]
    sums: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    unknown_starts = 0
    for record in records(folder):
        when, kind = record.time, record.kind
        start = starts[bisect_right(began, when) - 1]
        if not start.began <= when <= (start.ended or math.inf):
            unknown_starts += kind == "start"
            continue
        start.last = when
        if kind == "start" or record.step > start.kept_step:
            continue
        first = start.first_step_time = start.first_step_time or when
        start.kept_until = max(first, when)
        if when > first and kind == "interval":
            since = max(first, start.data_until)
            sums["data"] += record.number("data_share", 0.0) * (when - since)
            start.data_until = when
        elif when > first and kind in PAUSES:
            sums[PAUSES[kind]] += record.number("seconds", 0.0)
    for start in starts:
        ended = start.ended or start.last
        first = start.first_step_time or ended
        kept_until = max(first, start.kept_until)
        sums["startup"] += first - start.began
        sums["kept"] += kept_until - first
        sums["lost" if start.is_lost else "ending"] += ended - kept_until
    pauses = sums["data"] + sums["saving"] + sums["evaluation"]
    sums["kept"] = max(0.0, sums["kept"] - pauses)
    launcher = sum(sums.values())
    calendar = max(launcher, max(start.ended or start.last for start in starts) - began[0])
    if not math.isfinite(launcher + calendar):  # damaged times
        return {}
    return {
        "launcher": shares(sums, launcher),
        "calendar": shares(sums | {"down": calendar - launcher}, calendar),
        "unknown_starts": unknown_starts,
    }


def spans(folder: Path) -> list[Span]:
    """Return the spans of the starts in starts.jsonl, by time."""
    kept_step = math.inf  # the lowest step from which a later start has continued
    newest_first = []
    for begin, end in reversed(each_start(folder)):
        is_lost = end is not None and end.outcome not in ENDED  # without an end: maybe under way
        kept = min(kept_step, (end.checkpoint or 0) if end and is_lost else math.inf)
        span = Span(began=begin.time, last=begin.time, is_lost=is_lost, kept_step=kept)
        if end:
            span.ended, span.first_step_time = end.time, end.first_step_time
            span.is_lost |= (end.step or 0) > kept
            kept_step = min(kept_step, math.inf if end.from_step is None else end.from_step)
        newest_first.append(span)
    return newest_first[::-1]


def shares(seconds: dict[str, float], whole: float) -> dict[str, float]:
    """Return the seconds of the whole, then the share of each part in it."""
    fractions = {name: round(part / (whole or 1), 4) for name, part in seconds.items()}
    return {"seconds": round(whole, 1)} | fractions


def calendar(status: Status) -> dict[str, float]:
    """Return the goodput over the time since the first launch; {} if a status has none."""
    goodput = (status.goodput or {}).get("calendar")
    return goodput if isinstance(goodput, dict) else {}


def in_words(status: Status) -> str:
    """Return the goodput in a status.json as a line; "" if it is good or says nothing yet."""
    shares = calendar(status)
    if not {"kept", "seconds"} <= shares.keys():
        return ""
    text = f"{shares['kept']:.0%} of {format_seconds(shares['seconds'])} since the first launch"
    is_start = shares["kept"] == 0 and shares["seconds"] < START_SECONDS
    return text if shares["kept"] < GOOD and not is_start else ""
