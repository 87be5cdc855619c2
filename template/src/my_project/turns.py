"""One process prepares the data, the others wait and find it done.

The first process of the run works alone; then the first of each node, since caches may be local to
a node; then all that are left, at once. The locks are files in the runs folder, which the nodes
share, so nothing here needs a process group. The operating system gives a lock back when its
process is gone, whatever ended it.
"""

import fcntl
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .config import ConfigError, TransientError
from .run import writing

logger = logging.getLogger(__name__)


def launch_name() -> str:
    """Name this launch, the same on all its processes and hardly ever on those of another."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    found = [os.environ[name] for name in names if name in os.environ]
    return " ".join(found) or f"process {os.getpid()}"


@contextmanager
def in_turn(folder: Path, who: str) -> Iterator[None]:
    """Wait for this process's turn.

    Args:
        folder: that all nodes share; where the locks lie.
        who: this process, for those that wait for it.

    Raises:
        TransientError: the process that was waited for is gone.
    """
    node = folder / f".prepare_data.{socket.gethostname()}.lock"
    with first_alone(node, who) as is_first:
        with first_alone(folder / ".prepare_data.lock", who) if is_first else nullcontext():
            yield


@contextmanager
def first_alone(path: Path, who: str) -> Iterator[bool]:
    """Let one process pass alone, and those that waited for it all at once; yield which it is.

    Raises:
        TransientError: the process of this launch that was waited for is gone.
    """
    with writing(path.parent):
        file = path.open("a+b", buffering=0)  # nothing is left to fail at the end
    with file:
        is_first = _lock(file.fileno())
        if is_first:  # what the file holds tells the others whether it has ended before its time
            with writing(path.parent):
                file.truncate(0)
                file.write(f"{launch_name()}\n{who}".encode())
        try:
            yield is_first
        except ConfigError:  # the others meet it too, and say so themselves
            if is_first:
                file.truncate(0)
            raise
        if is_first:
            file.truncate(0)


def _lock(descriptor: int) -> bool:
    """Return whether this process is the first; the others return when the first is done."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("no file locks (%s): each process prepares the data itself", error)
            return False
        else:
            return True
        launch, _, who = os.pread(descriptor, 1 << 12, 0).decode(errors="replace").partition("\n")
        if not launch:
            return False
        if launch == launch_name():
            raise TransientError(f"{who} has ended before the data was prepared")
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # it was of another launch: begin again
        time.sleep(random.uniform(0, 0.1))
