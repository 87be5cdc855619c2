"""A real pseudo-terminal: type a command, and read what the screen shows."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """A terminal, `columns` wide, in which a command of the package runs."""

    def __init__(
        self, words: list[str], folder: Path, columns: int = 80, environment: dict | None = None
    ) -> None:
        self.text = ""
        self.started = time.monotonic()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        self.pid, self.master = pty.fork()
        if self.pid == 0:  # the child: its controlling terminal is the new one
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
            os.chdir(folder)
            variables = os.environ | {"TERM": "xterm-256color"} | (environment or {})
            for name in ("COLUMNS", "LINES"):
                variables.pop(name, None)
            # execv would pass on COLUMNS too, which readline sets unseen by os.environ
            os.execve(sys.executable, [sys.executable, "-m", "my_project", *words], variables)

    def read(self, until: Callable[[str], bool] | None = None, seconds: float = 600) -> str:
        """Read until a condition on `shown` is true, or until the command has ended."""
        deadline = time.monotonic() + seconds
        while not (until and until(self.shown)):
            assert time.monotonic() < deadline, f"still waiting after {seconds} s:\n{self.shown}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:  # how Linux reports the end of a terminal's output
                    break
                if not data:
                    break
                self.text += data.decode(errors="replace")
        return self.shown

    def wait_for(self, text: str, after: int = 0, seconds: float = 300) -> int:
        """Read until `self.text` has a text after a position; return the position after it."""
        self.read(lambda _: text in self.text[after:], seconds)
        assert text in self.text[after:], f"it ended without {text!r}: {self.text[after:]!r}"
        return self.text.index(text, after) + len(text)

    def shows_nothing(self, seconds: float = 0.5) -> bool:
        """Return whether nothing is printed for some time."""
        before, deadline = self.text, time.monotonic() + seconds
        self.read(lambda _: time.monotonic() > deadline, seconds + 1)
        return self.text == before

    @property
    def shown(self) -> str:
        """Return the text without control sequences; only the last text of an overwritten line."""
        lines = CONTROL.sub("", self.text).replace("\r\n", "\n").split("\n")
        return "\n".join(line.rpartition("\r")[2] for line in lines)

    def type(self, keys: str) -> None:
        """Type keys; Ctrl-C is the character with code 3."""
        os.write(self.master, keys.encode())

    def end(self, seconds: float = 600) -> tuple[list[str], int]:
        """Wait for the end; return the last 15 lines on the screen and the exit code."""
        try:
            self.read(seconds=seconds)
            _, status = os.waitpid(self.pid, 0)
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        finally:
            os.close(self.master)
        return self.shown.rstrip("\n").splitlines()[-15:], os.waitstatus_to_exitcode(status)
