"""Let one process prepare the data while the others wait; they then reuse its result.

One process of the run goes first; then one of each node, since caches may be local to a node; then
all others at once. The locks are files in the runs folder, which the nodes share, so no process
group is needed. The operating system releases a lock when its process ends, for whatever reason.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..config import ConfigError
from ..files import TransientError, write_atomically, writing

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
    failed = path.with_suffix(".failed")  # why the first process ended, unless it has finished
    with ExitStack() as stack:
        lock, waited = FileLock(path, mode=0o666, poll_interval=0.2), False
        try:
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except Timeout:
                waited = True
                stack.enter_context(lock.acquire())
        except OSError as error:
            logger.warning("no file locks (%s): each process prepares the data itself", error)
            waited = True
        text = failed.read_text(errors="replace") if failed.exists() else ""
        launch, _, failure = text.partition("\n")
        if waited and not launch:
            stack.close()
            yield False
            return
        if waited and launch == launch_name():
            raise TransientError(failure)
        _write(failed, f"{who} has ended before the data was prepared")
        try:
            yield True
        except TransientError as error:
            _write(failed, str(error))
            raise
        except ConfigError:  # the others meet this error themselves
            failed.unlink(missing_ok=True)
            raise
        except Exception as error:
            _write(failed, f"{who} failed to prepare the data: {type(error).__name__}: {error}")
            raise
        failed.unlink(missing_ok=True)


def _write(failed: Path, failure: str) -> None:
    """Write what waiting processes of this launch raise."""
    with writing(failed.parent):
        write_atomically(failed, f"{launch_name()}\n{failure}")
