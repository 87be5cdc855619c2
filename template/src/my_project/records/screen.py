"""What a terminal shows of a run, below all that is printed: a bar, and the newest numbers.

    step 196/330 ━━━━━━━━━━━━━━━━━━━╸               59% 0:01:23 0:00:52
    loss 0.4312  lr 9.1e-03  3021 samples/s  data 2%

Imported only on a terminal: it imports rich.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.text import Text

from ..process import LAUNCHER

REFRESHES_PER_SECOND = 4


class Bar(progress.Progress):
    """The bar; a thread of rich's draws it."""

    def __init__(self, stream: Any, step: int, total_steps: int) -> None:
        """Begin at a step.

        Args:
            stream: the terminal.
            step: steps done.
            total_steps: of the whole run.
        """
        self.step = step  # steps done: set after each step, which costs less than an update
        self.numbers = ""
        self.pause = ""  # what training waits for
        super().__init__(
            progress.TextColumn("step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=OpenOrClosed(stream)),  # pyright: ignore[reportArgumentType]
            refresh_per_second=REFRESHES_PER_SECOND,
            speed_estimate_period=3600,  # seconds: a step may take long, and so may an evaluation
            expand=True,
        )
        self.add_task("", completed=step, total=total_steps)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what is drawn."""
        for task in self.task_ids:  # none yet where rich's constructor asks
            self.update(task, completed=self.step)
        yield self.make_tasks_table(self.tasks)
        # what the launcher says of the signal is soon drawn over
        pause = self.pause if LAUNCHER.leave_at == float("inf") else "stopping after this step"
        shown = "  ".join(filter(None, [self.numbers, pause]))
        yield Text(shown, no_wrap=True, overflow="ellipsis")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(Text(line), soft_wrap=True)


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
