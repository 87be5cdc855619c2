"""Let one process prepare the data while the others wait; they then reuse its result.

One process of the run goes first; then one of each node, since caches may be local to a node; then
all others at once. Where the first one fails or dies, the next one does the work. The locks are
files in the runs folder, which the nodes share, so no process group is needed. The operating system
releases a lock when its process ends, for whatever reason.
"""

import fcntl
import logging
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..files import writing

logger = logging.getLogger(__name__)


@contextmanager
def until_all_are_done(folder: Path, run_name: str) -> Iterator[None]:
    """Run the block, then wait until every other process has finished it.

    Otherwise the ranks that finish first would wait in the process group, which has a timeout.
    """
    with writing(folder):
        file = (folder / f".{run_name}.preparing").open("a+b")
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)  # upgrading two shared locks would deadlock
            fcntl.lockf(file, fcntl.LOCK_EX)


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait for this process's turn; the lock files lie in a folder that all nodes share."""
    with first_alone(folder / f".prepare_data.{socket.gethostname()}.lock") as is_first:
        with first_alone(folder / ".prepare_data.lock") if is_first else nullcontext():
            yield


@contextmanager
def first_alone(path: Path) -> Iterator[bool]:
    """Let one process go first, alone, then all others at once; yield whether this one is first."""
    unfinished = path.with_suffix(".unfinished")  # it is there until the first one has finished
    lock = FileLock(path, mode=0o666, poll_interval=0.2)
    held: AbstractContextManager
    try:
        held, waited = lock.acquire(blocking=False), False
    except Timeout:
        held, waited = lock.acquire(), True
    except OSError as error:  # a file system without locks
        logger.warning("no file locks (%s): each process prepares the data itself", error)
        held, waited = nullcontext(), False
    with held:
        is_first = not waited or unfinished.exists()
        if is_first:
            unfinished.touch()
            yield True
            unfinished.unlink(missing_ok=True)
    if not is_first:
        yield False
