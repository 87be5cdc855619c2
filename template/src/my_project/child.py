"""The process of `accelerate launch` on this node, with all its descendants: signals, and its end.

This process outlives it, forwards signals to it, and leaves none of its descendants running.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from .process import PREEMPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A second stop signal kills the run if it comes this long after the first: launchers and
# schedulers send each signal twice, at almost the same time.
KILL_AFTER_SECONDS = 5.0
STOPPING = "stopping; a run saves after its step; again in 5 s to end it at once"


class Child:
    """The process of `accelerate launch` on this node, with all its descendants."""

    def __init__(self, *, torchrun: bool) -> None:
        self.torchrun = torchrun  # False: accelerate starts a single process without torchrun
        self.process: subprocess.Popen | None = None
        self.stop_signal = ""  # the name of the first stop signal
        self.stop_signal_at: float | None = None  # time.monotonic()
        self.stop_signal_time = float("inf")  # time.time(), as error files have it
        self.was_killed = False  # by a second stop signal
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: object) -> None:
        now = time.monotonic()
        is_first = self.stop_signal_at is None
        self.stop_signal_at = self.stop_signal_at or now
        if is_first:
            self.stop_signal, self.stop_signal_time = signal.Signals(number).name, time.time()
        if self.process is None:
            raise SystemExit(PREEMPTED)  # nothing has started; the same command starts it
        if is_first:
            with suppress(OSError):  # a closed terminal; print may be what was interrupted
                os.write(1, f"\n{self.stop_signal}: {STOPPING}\n".encode())
            for process in self._signal_targets():
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif now - self.stop_signal_at > KILL_AFTER_SECONDS:
            self.was_killed = True
            self.kill_all()

    def _signal_targets(self) -> list[psutil.Process]:
        """Return the processes to signal: torchrun, which forwards signals, or the training one."""
        assert self.process
        try:
            accelerate = psutil.Process(self.process.pid)
            return (not self.torchrun and accelerate.children()) or [accelerate]
        except psutil.NoSuchProcess:
            return []

    def run(self, command: list[str], log: Path | None = None) -> int:
        """Run a command; return its exit code when it and all its descendants have ended.

        Args:
            command: the command and its arguments.
            log: the file for what it writes to stderr; None for this process's.
        """
        stderr = log.open("ab") if log else None
        # a signal is held back until there is a process to forward it to
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process = subprocess.Popen(
                command,
                preexec_fn=partial(_exit_with_parent, os.getpid()),  # noqa: PLW1509 - system calls
                start_new_session=True,  # Ctrl-C in a terminal signals this process only
                stderr=stderr,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return self.process.wait()
        finally:
            self.kill_all()
            self.process = None
            if stderr:
                stderr.close()

    def kill_all(self) -> None:
        """Kill all descendants: a launcher that was killed leaves its processes training."""
        running = psutil.Process().children(recursive=True)
        for process in running:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([p for p in running if not self.process or p.pid != self.process.pid], 10)


def _exit_with_parent(parent: int) -> None:
    """Reset the signal handlers in a new child process, and let it end with its parent."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the mask outlives exec
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if LIBC:
        LIBC.prctl(option, value)


def stop_at_end_of_input() -> None:
    """Send SIGTERM to this process when its standard input ends."""

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the main thread handles them
        while os.read(0, 4096):  # not sys.stdin, whose lock would still be held at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
