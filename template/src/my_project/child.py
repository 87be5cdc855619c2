"""The process of `accelerate launch` on this node, with all its descendants: signals, and its end.

This process outlives it, forwards signals to it, and leaves none of its descendants running.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

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
        self.pid = 0  # while it runs
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
        if not self.pid:
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
        try:
            accelerate = psutil.Process(self.pid)
            return (not self.torchrun and accelerate.children()) or [accelerate]
        except psutil.NoSuchProcess:
            return []

    def run(self, function: Callable[[], object], log: Path | None = None) -> int:
        """Call a function in a forked process, which has imported what this one has.

        Args:
            function: accelerate's launcher; it computes nothing and opens no device.
            log: the file for what is written to stderr; None for this process's.

        Returns:
            The exit code, once the process and all its descendants have ended.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        # a signal is held back until there is a process to forward it to
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        parent = os.getpid()
        try:
            self.pid = os.fork()
            if not self.pid:
                _call(function, log, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        finally:
            self.kill_all()
            self.pid = 0

    def kill_all(self) -> None:
        """Kill all descendants: a launcher that was killed leaves its processes training."""
        running = psutil.Process().children(recursive=True)
        for process in running:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([one for one in running if one.pid != self.pid], 10)


def _call(function: Callable[[], object], log: Path | None, parent: int) -> NoReturn:
    """Call a function in a new child process, which ends with its parent."""
    code = 1
    try:
        _exit_with_parent(parent)
        os.setsid()  # Ctrl-C in a terminal signals the parent only
        if log:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):  # a closed terminal
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_with_parent(parent: int) -> None:
    """Reset the signal handlers in a new child process, and let it end with its parent."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
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
