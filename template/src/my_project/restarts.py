"""Whether failed processes are started again in place, from the newest checkpoint.

After a death by signal, lost contact with another process, or an error of a device. Not after any
other error, which would repeat, a lack of memory, or a stop signal.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from .failures import first_failure
from .files import read_json, step_of
from .process import PREEMPTED
from .records.outcome import checkpoints

CAUSES = ("lost contact", "device error")
REPORT_SECONDS = 5.0  # for the reports of the others when a process was ended by a signal
EXIT_SECONDS = 1.0  # when one has exited, which has reported why
SAVE_SECONDS = 10.0  # for a checkpoint that is being written


def failed(codes: Mapping[int, int | None]) -> dict[int, int]:
    """Return the exit codes of processes that have failed, by rank; -n: ended by signal n."""
    return {rank: code for rank, code in codes.items() if code and code != PREEMPTED}


def kills_for_memory() -> int:
    """Return how many processes of this cgroup the kernel has killed for lack of memory."""
    try:
        (own,) = re.findall(r"(?m)^0::(.*)$", Path("/proc/self/cgroup").read_text())
        events = Path(f"/sys/fs/cgroup{own}/memory.events").read_text()
        return int(re.findall(r"(?m)^oom_kill (\d+)$", events)[0])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(kw_only=True)
class Restarts:
    """The restarts of one launch on this node."""

    folder: Path
    limit: int  # without a new step in between
    count: int = 0
    _in_vain: int = 0  # since the last new step
    _furthest: int = 0
    _last: tuple[str, int] = ("", -1)  # the failure before: what and at which step
    _killed_for_memory: int = field(default_factory=kills_for_memory)

    def __post_init__(self) -> None:
        self._about_before = read_json(self.folder / "run.json")

    @property
    def attempt(self) -> int:
        """Return the number of this attempt; 0 until one has begun the run.

        So long --resume never holds: the run that it moves aside is still there.
        """
        return self.count if read_json(self.folder / "run.json") != self._about_before else 0

    def may_kill(self, codes: dict[int, int | None], seconds: float) -> bool:
        """Return whether the processes that are left need to be waited for no longer.

        Args:
            codes: by rank; None: still running.
            seconds: since the first has failed.
        """
        signals = [code for code in failed(codes).values() if code < 0]
        if not signals:
            return seconds > EXIT_SECONDS
        if self._in_vain >= self.limit or kills_for_memory() > self._killed_for_memory:
            return seconds > REPORT_SECONDS
        started = self.folder.glob("checkpoints/step_*")
        is_writing = any(not (path / "manifest.json").exists() for path in started)
        return not (is_writing and codes.get(0, 0) is None) or seconds > SAVE_SECONDS

    def refusal(self, codes: dict[int, int], failures: list[dict[str, Any]]) -> str:
        """Return why the processes are not started again; "" if they are.

        Args:
            codes: exit codes of the processes that failed by themselves, by rank.
            failures: the error files of this attempt.
        """
        first = first_failure(failures)
        signals = [-code for code in codes.values() if code < 0]
        if not signals and first.get("cause") not in CAUSES:
            return "the error would repeat"
        if kills_for_memory() > self._killed_for_memory:
            return "the kernel has killed a process for lack of memory"
        steps = [one["step"] or 0 for one in failures]
        step = max([*steps, *map(step_of, checkpoints(self.folder)[-1:])], default=0)
        what = Signals(signals[0]).name if signals else first["cause"]
        if (what, step) == self._last and what not in ("lost contact", SIGKILL.name):
            return f"{what} again at step {step}"
        self._last = (what, step)
        if step > self._furthest:
            self._furthest, self._in_vain = step, 0
        if self._in_vain >= self.limit:
            return (
                f"{self.limit} restarts have brought no new step" if self.limit else "no restarts"
            )
        self._in_vain += 1
        self.count += 1
        return ""
