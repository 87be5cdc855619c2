"""A process that a launcher started ends when the launcher is gone: no orphan trains on.

A launcher that is killed tells nobody, so its processes look whether it is still their parent. What
a person starts without a launcher survives its shell. No word of it needs torch, since a launcher
may be killed while its processes import.
"""

import os
import threading
import time
from contextlib import suppress

POLL_SECONDS = 1.0
REACHES_LOOP_WITHIN = 30.0  # seconds, when told to stop before: others may wait for who has gone
SET_BY_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # accelerate, torchrun


class Launcher:
    """The parent of this process, if a launcher started it."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.ends_process = True  # at once; the training loop saves first (faults.StopRequest)
        self.leave_at = float("inf")

    @property
    def is_gone(self) -> bool:
        """Tell whether a launcher started this process and has ended."""
        return self.pid is not None and os.getppid() != self.pid

    def watch(self) -> None:
        """End this process when the launcher has ended, or has told it to and it does not."""
        if self.pid is None and any(name in os.environ for name in SET_BY_LAUNCHERS):
            self.pid = os.getppid()
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def told_to_stop(self) -> None:
        """Give this process some time to reach the loop, where all processes agree to leave."""
        self.leave_at = time.monotonic() + REACHES_LOOP_WITHIN

    def _watch(self) -> None:
        while not (self.ends_process and (self.is_gone or time.monotonic() > self.leave_at)):
            time.sleep(POLL_SECONDS)
        why = "the launcher is gone" if self.is_gone else "told to stop before the first step"
        said = f"rank {os.environ.get('RANK', '0')}: {why}, so this process ends\n"
        with suppress(OSError):  # whoever read it may be gone too
            os.write(2, said.encode())
        with suppress(Exception):
            import psutil

            for process in psutil.Process().children(recursive=True):  # such as a recipe's pool
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        os._exit(1)


LAUNCHER = Launcher()
