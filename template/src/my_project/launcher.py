"""What launched this process: its rank and world size, and whether the launcher is still there.

A launcher that is killed tells nobody, so its processes look whether it is still their parent, and
end when it is gone: no orphan trains on. What a person starts without a launcher survives its
shell. Imports no torch, since a launcher may be killed while its processes import.
"""

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress


def world() -> tuple[int, int]:
    """Read (processes, rank) as the launcher gave them, before there is a process group."""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def process_name() -> str:
    """Name this process, before there is a process group too."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"


POLL_SECONDS = 1.0
TELL_TO_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
REACHES_LOOP_WITHIN = 30.0  # seconds, when told to stop before: others may wait for who has gone
SET_BY_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # accelerate, torchrun


class Launcher:
    """The parent of this process, if a launcher started it."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.ends_process = True  # at once; the training loop saves first (stopping.StopRequest)
        self.leave_at = float("inf")
        self._signals = -1  # a pipe: the number of each signal for which Python has a handler

    @property
    def is_gone(self) -> bool:
        """Tell whether a launcher started this process and has ended."""
        return self.pid is not None and os.getppid() != self.pid

    def watch(self) -> None:
        """End this process when the launcher has ended, or has told it to and it does not."""
        if self.pid is None and any(name in os.environ for name in SET_BY_LAUNCHERS):
            self.pid = os.getppid()
            # Handlers run in the main thread, which may wait in C code for processes that are gone.
            self._signals, written = os.pipe()
            os.set_blocking(written, False)
            signal.set_wakeup_fd(written, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while not (self.ends_process and (self.is_gone or time.monotonic() > self.leave_at)):
            came, _, _ = select.select([self._signals], [], [], POLL_SECONDS)
            if came and TELL_TO_STOP & set(os.read(self._signals, 4096)):
                self.leave_at = min(self.leave_at, time.monotonic() + REACHES_LOOP_WITHIN)
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
