"""What a terminal shows of a run: the last evaluations, where it is, and its numbers.

         step  validation/accuracy  validation/loss
          110               0.9581           0.1412
          165*              0.9722           0.1080
    ⠹ step 196/330  ━━━━━━━━━━━━━━━━━━━   59%  1:23, 0:52 left
    epoch 3.20  loss 0.4312  lr 9.1e-03  3021 samples/s  data 2%
    saved 12 s ago  restart 2

No line is wrapped and no number is cut. What does not fit is left out: of the line with the step
the percent, the bar, the elapsed and then the remaining time; of the numbers, which have two lines,
the names in LEAST_IMPORTANT in this order; of the table the last columns (the best metric is first)
and the oldest rows (never the best). Imported only on a terminal: it imports rich.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from ..process import LAUNCHER
from .history import EVALUATIONS, History, is_finite, numbers, results
from .outcome import format_metric
from .pace import format_time

REFRESHES_PER_SECOND = 4
ROWS = 4  # evaluations that are shown while the run goes on, and the best where it is older
LEAST_BAR = 5  # columns
SLOW_SECONDS = 5.0  # a step that takes longer is said to be under way; a pause after 1 s
LEAST_IMPORTANT = (
    "restarts", "mfu", "skipped", "learning rate", "straggler", "saved", "data", "epoch", "speed",
    "under way",
)  # fmt: skip
SPINNERS = {False: "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", True: "|/-\\"}  # for terminals with ASCII only


class View:
    """A history as it is drawn; rich asks for it several times per second, in its own thread."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.has_ended = False
        self.frame = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        spinner = SPINNERS[options.ascii_only]
        self.frame += 1
        rows = EVALUATIONS if self.has_ended else min(ROWS, console.height - 6)
        yield from table(self.history, rows, width)
        mark = "" if self.has_ended else f"{spinner[self.frame % len(spinner)]} "
        yield from position(self.history, mark, self.has_ended, width)
        yield from lines(items(self.history, self.has_ended), width)


class LiveLines(Live):
    """A live display that leaves what the launcher prints at a stop signal on the screen.

    It would be erased with the lines above it, since the launcher is another process. So the lines
    are drawn anew below.
    """

    is_below = False

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        """Return what is drawn: first a control that moves up to the first of the lines."""
        drawn = super().process_renderables(renderables)
        if LAUNCHER.has_told_to_stop and not self.is_below and isinstance(drawn[0], Control):
            self.is_below = True
            drawn[0] = Text("")  # end the last of the lines
        return drawn


def live(history: History, stream: Any) -> Live:
    """Return the live display of a history on a terminal; printed text appears above it."""
    return LiveLines(
        View(history),  # pyright: ignore[reportArgumentType] - rich asks for any such object
        console=Console(file=OpenOrClosed(stream)),  # pyright: ignore[reportArgumentType]
        refresh_per_second=REFRESHES_PER_SECOND,
        vertical_overflow="crop",
    )


class OpenOrClosed:
    """A terminal that may have been closed: the run goes on, to save."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write, if the terminal is open."""
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if the terminal is open."""
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# ---- where the run is ----------------------------------------------------------------------------
def position(history: History, mark: str, has_ended: bool, width: int) -> Iterator[Any]:
    """Yield the parts of one line: step, bar, percent, elapsed and remaining time."""
    pace = history.pace
    step, total = pace.latest.step, pace.total_steps
    percent = f"{100 * step // max(total, 1):3}%"
    elapsed, left = history.times
    if has_ended and step >= total:
        both = left = elapsed
    else:
        both = f"{elapsed}, {left}"
    head = f"{mark}step {step}/{total}"
    for tail, has_bar in ((f"{percent}  {both}", True), (both, True), (both, False), (left, False)):
        room = width - len(head) - len(tail) - 2
        if room >= (LEAST_BAR + 2) * has_bar:
            yield Text(f"{head}  ", end="")
            if has_bar:
                yield ProgressBar(
                    total, step, width=room - 2, complete_style="cyan", finished_style="green"
                )
                yield Text("  ", end="")
            yield Text(tail)
            return
    short = f"{step}/{total}"
    yield Text(next((text for text in (head, short, str(step)) if len(text) <= width), ""))


# ---- numbers -------------------------------------------------------------------------------------
def items(history: History, has_ended: bool) -> dict[str, Text]:
    """Return the numbers that are shown, by name, in their order."""
    interval, pace = history.interval, history.pace
    said = {"epoch": history.epoch} | (numbers(interval) if interval else {})
    said["straggler"] = history.straggler
    said["saved"] = "" if has_ended else history.saved  # an age would not stay true
    said["restarts"] = f"restart {history.restarts}" if history.restarts else ""
    waited = pace.waited_seconds
    usual = 1.0 if pace.pause else SLOW_SECONDS
    is_long = waited > usual or (not pace.pause and (pace.step_seconds or 0) > usual)
    if LAUNCHER.has_told_to_stop and not pace.pause and not has_ended:
        said["under way"] = "stopping after this step"
    elif is_long and not has_ended:
        said["under way"] = f"{pace.pause or 'this step'} {format_time(waited)}"
    is_red = bool(interval) and not is_finite(interval)
    styles = {"loss": "red" if is_red else ""}
    return {name: Text(text, styles.get(name, "")) for name, text in said.items() if text}


def lines(items: dict[str, Text], width: int) -> list[Text]:
    """Return the items in at most two lines, without the least important if they do not fit."""
    shown = {name: item for name, item in items.items() if item.cell_len <= width}
    for name in ("", *LEAST_IMPORTANT, "loss"):
        shown.pop(name, None)
        flowed: list[Text] = []
        for item in shown.values():
            if flowed and flowed[-1].cell_len + 2 + item.cell_len <= width:
                flowed[-1].append("  ").append_text(item)
            else:
                flowed.append(item.copy())
        if len(flowed) <= 2:
            return flowed
    return []


# ---- the last evaluations ------------------------------------------------------------------------
def table(history: History, rows: int, width: int) -> list[Text]:
    """Return the last evaluations, a row each under a header; the best is marked."""
    best = history.best
    shown = list(history.evaluations)[-rows:] if rows > 0 else []
    if shown and best and not any(record is best for record in shown):
        shown.insert(0, best)
    found = [results(record) for record in shown]
    names = list(dict.fromkeys(name for values in found for name in values))
    names.sort(key=lambda name: name != history.best_metric)  # that one first
    prefixes = {name.rpartition("/")[0] for name in names}
    headers = names
    if len(prefixes) == 1 and sum(len(name) + 2 for name in names) > width - 8:
        headers = [name.rpartition("/")[2] for name in names]  # all of one validation set
    steps = [f"{record['step']}{'*' if record is best else ' '}" for record in shown]
    columns = [column(shown, [*steps], "step ", best)]
    for name, header in zip(names, headers, strict=True):
        values = [result.get(name, "") for result in found]
        more = [*columns, column(shown, values, header, best)]
        if sum(cells[0].cell_len + 2 for cells in more) - 2 > width:
            break
        columns = more
    return [Text("  ").join(cells) for cells in zip(*columns, strict=True)] if columns[1:] else []


def column(
    shown: list[dict[str, Any]], values: list[float | str | None], header: str, best: dict[str, Any]
) -> list[Text]:
    """Return the cells of a column, all of one width: the header, and a value per evaluation."""
    cells = [Text(header, "dim")]
    for record, value in zip(shown, values, strict=True):
        text = value if isinstance(value, str) else format_metric(value)
        style = "red" if value is None else "green" if record is best else ""
        cells.append(Text(text, style))
    most = max(cell.cell_len for cell in cells)
    return [Text(" " * (most - cell.cell_len)).append_text(cell) for cell in cells]
