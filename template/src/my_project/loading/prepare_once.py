"""Let one process prepare the data while the others wait; they then reuse its result.

One process of the run goes first; then one of each node, since caches may be local to a node; then
all others at once. The locks are files in the runs folder, which the nodes share, so no process
group is needed. The operating system releases a lock when its process ends, for whatever reason.
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

from ..config import ConfigError
from ..files import TransientError, writing

logger = logging.getLogger(__name__)


def launch_name() -> str:
    """Return a name of this launch: equal on all its processes, almost surely unique to it."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    found = [os.environ[name] for name in names if name in os.environ]
    if not found:
        return f"process {os.getpid()} on {socket.gethostname()}"
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return " ".join(found + [socket.gethostname()] * is_one_node)


@contextmanager
def until_all_are_done(folder: Path, run_name: str) -> Iterator[None]:
    """Run the block, then wait until every other process has finished it.

    Otherwise the ranks that finish first would wait in the process group, which has a timeout.
    """
    with _open(folder / f".{run_name}.preparing") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)  # upgrading two shared locks would deadlock
            fcntl.lockf(file, fcntl.LOCK_EX)


@contextmanager
def in_turn(folder: Path, who: str) -> Iterator[None]:
    """Wait for this process's turn.

    Args:
        folder: where the lock files lie, shared by all nodes.
        who: the name of this process, for the messages of waiting processes.

    Raises:
        TransientError: the process that this one waited for has ended.
    """
    node = folder / f".prepare_data.{socket.gethostname()}.lock"
    with first_alone(node, who) as is_first:
        with first_alone(folder / ".prepare_data.lock", who) if is_first else nullcontext():
            yield


@contextmanager
def first_alone(path: Path, who: str) -> Iterator[bool]:
    """Let one process go first, alone, then all others at once; yield whether this one is first.

    Raises:
        TransientError: the first process of this launch has ended early, or failed.
    """
    with _open(path) as file:
        is_first = _lock(file)
        if not is_first:
            yield False
            return
        _set_error(file, f"{who} has ended before the data was prepared")
        try:
            yield True
        except ConfigError as error:
            if isinstance(error, TransientError):
                _set_error(file, str(error))
            else:  # the others meet this error themselves
                file.truncate(0)
            raise
        except Exception as error:
            _set_error(file, f"{who} failed to prepare the data: {type(error).__name__}: {error}")
            raise
        file.truncate(0)


def _open(path: Path) -> FileIO:
    """Open a lock file, which other users' processes may share."""
    with writing(path.parent):
        file = open(  # noqa: SIM115 - the caller closes it; unbuffered, so closing cannot fail
            path,
            "r+b",
            buffering=0,
            opener=lambda name, flags: os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666),
        )
    with suppress(OSError):  # the file of another user
        os.fchmod(file.fileno(), 0o666)
    return file


def _set_error(file: FileIO, failure: str) -> None:
    """Write the failure that waiting processes raise, unless the file is emptied."""
    with writing(Path(str(file.name)).parent):
        file.truncate(0)
        os.pwrite(file.fileno(), f"{launch_name()}\n{failure}".encode(), 0)


def _lock(file: FileIO) -> bool:
    """Return whether this process is the first; in the others, wait until the first is done.

    POSIX locks are used, since forked processes do not inherit them.
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
        text = os.pread(file.fileno(), 1 << 16, 0).decode(errors="replace")
        launch, _, failure = text.partition("\n")
        if not launch:
            return False
        if launch == launch_name():
            raise TransientError(failure)
        fcntl.lockf(file, fcntl.LOCK_UN)  # the failure of another launch: start over
        time.sleep(random.uniform(0, 0.1))
