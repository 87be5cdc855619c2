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
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO
from pathlib import Path

from ..config import ConfigError, TransientError
from ..files import writing

logger = logging.getLogger(__name__)


def launch_name() -> str:
    """Name this launch, the same on all its processes and hardly ever on those of another."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    found = [os.environ[name] for name in names if name in os.environ]
    if not found:
        return f"process {os.getpid()} on {socket.gethostname()}"
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return " ".join(found + [socket.gethostname()] * is_one_node)


@contextmanager
def no_node_at_work(folder: Path, run_name: str) -> Iterator[None]:
    """Do this process's part of the work, then wait until no other process does any.

    Else the nodes that are done would wait in the process group, for which there is a limit.
    """
    with _open(folder / f".{run_name}.preparing") as file:
        with suppress(OSError):  # no locks there
            fcntl.lockf(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)  # two that upgrade would wait for each other
            fcntl.lockf(file, fcntl.LOCK_EX)


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
        TransientError: the process of this launch that was waited for is gone, or has failed.
    """
    with _open(path) as file:
        is_first = _lock(file)
        if not is_first:
            yield False
            return
        _leave_word(file, f"{who} has ended before the data was prepared")
        try:
            yield True
        except ConfigError as error:
            if isinstance(error, TransientError):
                _leave_word(file, str(error))
            else:  # the others meet it too, and say so themselves
                file.truncate(0)
            raise
        except Exception as error:
            _leave_word(file, f"{who} failed to prepare the data: {type(error).__name__}: {error}")
            raise
        file.truncate(0)


def _open(path: Path) -> FileIO:
    """Open a lock file, which processes of other users may use too."""
    with writing(path.parent):
        file = open(  # noqa: SIM115 - the caller closes it; unbuffered, nothing fails at the end
            path, "r+b", buffering=0,
            opener=lambda name, flags: os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666),
        )  # fmt: skip
    with suppress(OSError):  # of another user
        os.fchmod(file.fileno(), 0o666)
    return file


def _leave_word(file: FileIO, sentence: str) -> None:
    """Leave what those that wait raise, unless the file is emptied."""
    with writing(Path(str(file.name)).parent):
        file.truncate(0)
        os.pwrite(file.fileno(), f"{launch_name()}\n{sentence}".encode(), 0)


def _lock(file: FileIO) -> bool:
    """Return whether this process is the first; the others return when the first is done.

    The locks are those of POSIX, which a process that is forked meanwhile does not inherit.
    """
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            fcntl.lockf(file, fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("no file locks (%s): each process prepares the data itself", error)
            return False
        else:
            return True
        word = os.pread(file.fileno(), 1 << 16, 0).decode(errors="replace")
        launch, _, sentence = word.partition("\n")
        if not launch:
            return False
        if launch == launch_name():
            raise TransientError(sentence)
        fcntl.lockf(file, fcntl.LOCK_UN)  # it was of another launch: begin again
        time.sleep(random.uniform(0, 0.1))
