"""Where the time of the profiled steps went: a short table of a trace of torch.profiler.

It is read from the names that torch gives to ranges and operators, so the loop needs no ranges of
its own: each would cost microseconds, also while nothing is profiled. The host's time is divided by
what its main thread was doing:

    other        from the start of a step to its first micro-batch: learning rate, records
    data wait    in the DataLoader
    forward      until the first operator of the backward pass
    backward     until the last one
    all-reduce   of DDP on a CPU: what the backward pass does not hide
    optimizer    until the end of the step: gradient norm, clipping, optimizer, EMA

A GPU's time is divided by its kernels: each belongs to what the host was doing when it launched the
kernel. NCCL's kernels and copies count where no other kernel runs at the same time.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

STEP = "ProfilerStep#"  # the range of a step, by the name that other tools for traces look for
DATA = "enumerate(DataLoader)#"
BACKWARD = "autograd::engine::evaluate_function"
PAUSED = "evaluation or save"  # a range of the loop
COMMUNICATION = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")  # ranges of torch.distributed
HOST = {"cpu_op", "user_annotation"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
PHASES = ("data wait", "forward", "backward", "all-reduce", "optimizer", PAUSED, "other")
OPERATORS = 10  # in the table
WIDTH, COLUMN = 99, 13  # of a line, and of a number in it

Interval = tuple[float, float]
Phase = tuple[float, float, str]


class Span(NamedTuple):
    """An event of the trace; times in microseconds."""

    start: float
    end: float
    name: str
    thread: Any
    kind: str  # its category
    details: dict[str, Any]


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """Return the events that take time, by start, those that enclose others first."""
    spans = [
        Span(
            start=event["ts"],
            end=event["ts"] + event["dur"],
            name=str(event["name"]),
            thread=event.get("tid"),
            kind=str(event.get("cat")),
            details=event.get("args") or {},
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and "dur" in event
    ]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def table(trace: dict[str, Any], last: int) -> list[str]:
    """Return the table as lines: how long a step took, where the time went, operators.

    Args:
        trace: the content of a chrome trace.
        last: the last step that ended; of a later one the trace has only a part.

    Raises:
        ValueError: the trace has no steps.
    """
    spans = spans_of(trace)
    begun = [span for span in spans if span.name.startswith(STEP) and span.kind in HOST]
    steps = [span for span in begun if int(span.name.removeprefix(STEP)) <= last] or begun
    if not steps:
        raise ValueError("it holds no steps")
    steps[:-1] = [a._replace(end=b.start) for a, b in pairwise(steps)]  # else there are gaps
    begin, end = steps[0].start, steps[-1].end
    host = [span for span in spans if begin <= span.start < end and span.kind in HOST]
    phases = [phase for step in steps for phase in phases_of(step, host)]
    kernels = device_spans(spans, phases)
    until = max([end, *(span.end for span, _ in kernels)])
    of_host = Times({}, len(steps), end - begin)
    for start, stop, name in phases:
        of_host.of[name] = of_host.of.get(name, 0.0) + stop - start
    milliseconds = (until - begin) / 1000 / len(steps)
    lines = [f"{milliseconds:.{0 if milliseconds >= 100 else 2}f} ms per step", ""]
    if kernels:
        of_gpu = Times(device_times(kernels, begin, until), len(steps), until - begin)
        lines.append(row("where the time went", "GPU: ms", "share", "host: ms", "share"))
        for name in (*PHASES, "copies", "idle"):
            if of_gpu.of[name] or name in of_host.of:
                lines.append(row(f"  {name}", *of_gpu.numbers(name), *of_host.numbers(name)))
        return [*lines, "", *operator_rows("by GPU time", device_operators(kernels, spans), of_gpu)]
    lines.append(row("where the time went", "ms per step", "share"))
    for name in PHASES:
        if name in of_host.of:
            lines.append(row(f"  {name}", *of_host.numbers(name)))
    return [*lines, "", *operator_rows("by CPU time of their own", own_times(host, steps), of_host)]


class Times(NamedTuple):
    """Microseconds by name, of so many steps, which took so many microseconds."""

    of: dict[str, float]
    steps: int
    whole: float

    def numbers(self, name: str) -> tuple[str, str]:
        """Return the milliseconds per step, and the share."""
        time = self.of.get(name, 0.0)
        return f"{time / 1000 / self.steps:.3f}", f"{time / self.whole:.1%}"


def row(name: str, *numbers: str) -> str:
    """Return a line of the table."""
    room = min(60, WIDTH - COLUMN * len(numbers))
    cut = name if len(name) <= room else f"{name[: room - 3]}..."
    return f"{cut:{room}}" + "".join(f"{number:>{COLUMN}}" for number in numbers)


def operator_rows(heading: str, operators: dict[str, tuple[float, int]], whole: Times) -> list[str]:
    """Return the operators with the most time, as lines.

    Args:
        heading: by which time.
        operators: microseconds and the number of calls, by name.
        whole: of which the shares are.
    """
    times = whole._replace(of={name: time for name, (time, _) in operators.items()})
    longest = sorted(times.of, key=lambda name: -times.of[name])[:OPERATORS]
    lines = [row(f"operators {heading}", "ms per step", "share", "per step")]
    for name in longest:
        count = f"{operators[name][1] / times.steps:.4g}"
        lines.append(row(f"  {name}", *times.numbers(name), count))
    return lines


# ---- what the host was doing ---------------------------------------------------------------------
def phases_of(step: Span, host: list[Span]) -> list[Phase]:
    """Divide the time of a step, without gaps.

    Args:
        step: its range.
        host: the spans of all threads of the host, by start.
    """
    low, high = (bisect_left(host, at, key=lambda span: span.start) for at in step[:2])
    inside = [span for span in host[low:high] if not span.name.startswith(STEP)]
    marks, until = [], step.start
    for span in inside:  # the outermost of the main thread, and the backward pass of any thread
        is_own = span.thread == step.thread or span.name.startswith(BACKWARD)
        if is_own and span.start >= until:
            marks.append(span)
            until = span.end
    last_backward = max((s.start for s in marks if s.name.startswith(BACKWARD)), default=step.start)
    communication = merged((s.start, s.end) for s in inside if s.name.startswith(COMMUNICATION))
    phases: list[Phase] = []
    phase, since, before = "other", step.start, step.start

    def change(to: str, at: float) -> None:
        nonlocal phase, since
        if to != phase:
            phases.append((since, at, phase))
            phase, since = to, at

    for span in marks:
        if span.name.startswith(DATA) or span.name == PAUSED:
            is_data = span.name != PAUSED
            change("data wait" if is_data else PAUSED, span.start)
            change("forward" if is_data else "other", span.end)
        elif span.name.startswith(BACKWARD):
            change("backward", span.start)
        elif phase == "backward":
            for start, end in communication:  # the thread waits for what has not ended
                if before < end and start < span.start:
                    change("all-reduce", max(start, before))
                    change("backward", min(end, span.start))
            change("forward" if span.start < last_backward else "optimizer", span.start)
        before = span.end
    return [*phases, (since, step.end, phase)]


def own_times(host: list[Span], steps: list[Span]) -> dict[str, tuple[float, int]]:
    """Return by name the time of spans without the spans inside them, and their number."""
    threads = {steps[0].thread} | {s.thread for s in host if s.name.startswith(BACKWARD)}
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    enclosing: dict[Any, list[Span]] = {thread: [] for thread in threads}
    for span in host:
        if span.thread not in threads:
            continue
        stack = enclosing[span.thread]
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            times[stack[-1].name] -= span.end - span.start
        stack.append(span)
        times[span.name] += span.end - span.start
        counts[span.name] += 1
    return {
        name: (time, counts[name])
        for name, time in times.items()
        if not name.startswith((STEP, PAUSED))
    }


# ---- what the GPU was doing ----------------------------------------------------------------------
def device_spans(spans: list[Span], phases: list[Phase]) -> list[tuple[Span, str]]:
    """Return the kernels and copies that were launched in the steps, each with its phase."""
    launched = {
        span.details["correlation"]: span.start
        for span in spans
        if span.kind.endswith(("_runtime", "_driver")) and "correlation" in span.details
    }
    starts = [start for start, _, _ in phases]
    found = []
    for span in spans:
        at = launched.get(span.details.get("correlation"), span.start)
        if span.kind in DEVICE and phases[0][0] <= at < phases[-1][1]:
            found.append((span, phases[bisect_right(starts, at) - 1][2]))
    return found


def device_times(kernels: list[tuple[Span, str]], begin: float, end: float) -> dict[str, float]:
    """Divide the time of the GPU by phase; of kernels at the same time, the first one counts."""
    communication = merged((s.start, s.end) for s, _ in kernels if "nccl" in s.name.lower())
    copies = merged((s.start, s.end) for s, _ in kernels if s.kind != "kernel")
    times: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    computing: list[Interval] = []
    until = begin
    for span, phase in kernels:
        if span.kind == "kernel" and "nccl" not in span.name.lower():
            times[phase] += max(0.0, span.end - max(span.start, until))
            until = max(until, span.end)
            computing.append((span.start, span.end))
    computing = merged(computing)
    times["all-reduce"] += length_outside(communication, computing)
    times["copies"] = length_outside(copies, merged([*computing, *communication]))
    times["idle"] = max(0.0, end - begin - sum(times.values()))
    return times


def device_operators(
    kernels: list[tuple[Span, str]], spans: list[Span]
) -> dict[str, tuple[float, int]]:
    """Return by operator the time of the kernels that it launched, and their number."""
    names = {
        span.details["External id"]: span.name
        for span in spans
        if span.kind == "cpu_op" and "External id" in span.details
    }
    found: dict[str, tuple[float, int]] = {}
    for span, _ in kernels:
        name = names.get(span.details.get("External id"), span.name)
        time, count = found.get(name, (0.0, 0))
        found[name] = time + span.end - span.start, count + 1
    return found


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as intervals that do not touch, by start."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def length_outside(intervals: list[Interval], cover: list[Interval]) -> float:
    """Return how long the intervals are where the others are not; both as merged returns them."""
    covered = position = 0
    for start, end in intervals:
        while position < len(cover) and cover[position][1] <= start:
            position += 1
        at = position
        while at < len(cover) and cover[at][0] < end:
            covered += min(end, cover[at][1]) - max(start, cover[at][0])
            at += 1
    return sum(end - start for start, end in intervals) - covered
