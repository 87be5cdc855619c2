"""Stop a run early (preemption): on a signal, at a time limit, or when the launcher ends."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import psutil

from . import failures
from .config import Config, parse_duration
from .process import LAUNCHER, STOP_SIGNALS

SECOND_SIGNAL_AFTER_SECONDS = 5.0


class StopRequest:
    """A request to stop, made by a signal, by config.stop_after or by the end of the launcher.

    The loop votes for a stop in the step's all-reduce, so all ranks exit after the same step. A
    second signal ends the process immediately, but only if it comes at least 5 s after the first,
    since launchers forward signals that their workers have already received from the terminal or
    scheduler.
    """

    def __init__(self, config: Config) -> None:
        self.reason = ""
        self._first_signal_time: float | None = None  # time.monotonic()
        self._stop_after = config.stop_after
        self._stop_at = float("inf")
        if config.stop_after:
            # stop_after counts from the start of our launcher, across restarts; without our
            # launcher (also under torchrun), from the start of this process, before its imports
            began = float(os.environ.get("LAUNCH_TIME") or psutil.Process().create_time())
            self._stop_at = (
                time.monotonic() + began + parse_duration(config.stop_after) - time.time()
            )
        self._handlers: dict[int, Callable | int | None] = {}  # by signal

    @property
    def requested(self) -> bool:
        """Return whether this process has been asked to stop."""
        if not self.reason and time.monotonic() > self._stop_at:
            self.reason = f"stop_after {self._stop_after} has elapsed"
        if not self.reason and LAUNCHER.is_gone:
            self.reason = "the launcher has exited"
        if not self.reason and LAUNCHER.leave_at < float("inf"):
            self.reason = "told to stop by a signal (another module had replaced the handler)"
        return bool(self.reason)

    def loop_begins(self) -> None:
        """From now on, if the launcher exits or a signal comes, let the loop save first."""
        LAUNCHER.ends_process = False
        for number in self._handlers:  # again, since an import may have replaced the handlers
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._first_signal_time is None:
            self.reason = self.reason or name
            self._first_signal_time = time.monotonic()
            failures.note_signal(name)
            note = f"{name}: saving and exiting within two steps; send it again after 5 s to exit"
            with suppress(OSError):  # the reader of stderr may be gone too
                # not print: the signal may have interrupted a print
                os.write(2, f"{note} immediately\n".encode())
        elif time.monotonic() - self._first_signal_time > SECOND_SIGNAL_AFTER_SECONDS:
            raise KeyboardInterrupt(f"by a second signal, {name}")

    def __enter__(self) -> "StopRequest":
        LAUNCHER.stop_signal = ""  # an earlier run of this process may have been told to stop
        if threading.current_thread() is threading.main_thread():
            numbers = {*STOP_SIGNALS}
            # a closed terminal sends SIGHUP; under nohup it is ignored, but torchrun forwards it
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            if not is_ignored or "TORCHELASTIC_RUN_ID" in os.environ:
                numbers.add(signal.SIGHUP)
            self._handlers = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        LAUNCHER.leave_at = float("inf")
        LAUNCHER.ends_process = True
        for number, handler in self._handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: C code had installed it


def first_reason(reasons: list[str], hosts: list[str]) -> str:
    """Return why a run was asked to stop: rank 0's reason, or another rank's with its host.

    Args:
        reasons: the reason of each rank; "" if the rank was not asked to stop.
        hosts: the host of each rank.
    """
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if rank == 0 else f"{reason}, on rank {rank} ({hosts[rank]})"
    return "asked to stop"
