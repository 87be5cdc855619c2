"""Prepare the data in one process first, while the others wait."""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..config import Config
from ..contract import described, refuse
from ..files import open_own, writing
from ..process import STDERR, stderr_on_terminal
from ..recipe import DataInfo
from .seeding import derive_seed, seed_rng

logger = logging.getLogger(__name__)


def prepare_data(config: Config) -> DataInfo:
    """Call the recipe's prepare_data in one process first; the other processes find the work done.

    There is no timeout, since tokenizing can take hours. The random state does not depend on the
    config's seed, since the content of a cache must not depend on the run that fills it.

    Returns:
        data_info.

    Raises:
        ConfigError: data_info is not a dict of plain JSON.
    """
    recipe, folder = config.recipe, Path(config.runs_folder)
    with until_all_are_done(folder, config.run_name), in_turn(folder):
        seed_rng(derive_seed("prepare_data"))
        data_info = recipe.prepare_data()
    if not isinstance(data_info, dict):
        refuse(recipe, "prepare_data", f"returned {described(data_info)}, not a dict.")
    try:
        return dict(json.loads(json.dumps(data_info)))
    except (TypeError, ValueError) as error:
        problem = f"did not return plain JSON ({error}): convert it with int(x) or x.tolist()."
        refuse(recipe, "prepare_data", problem)


@contextmanager
def until_all_are_done(folder: Path, run_name: str) -> Iterator[None]:
    """Run the block, then wait until every other process has finished it.

    Otherwise the ranks that finish first would wait in the process group, which has a timeout.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_own(folder / f".{run_name}.preparing", "ab+")
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)  # two processes upgrading shared locks would deadlock
            fcntl.lockf(file, fcntl.LOCK_EX)


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait for this process's turn.

    One process of the run goes first; then one of each node, since caches may be local to a node;
    then all others together. The first process of a node may write to the terminal, for a progress
    bar. If the first process fails or dies, the next one does the work. The locks are files in the
    runs folder, which the nodes share, so no process group is needed. The operating system releases
    a lock when its process ends, for whatever reason.
    """
    with first_alone(folder / f".prepare_data.{socket.gethostname()}.lock") as is_first:
        alone = first_alone(folder / ".prepare_data.lock") if is_first else nullcontext()
        with alone, stderr_on_terminal() if is_first and STDERR else nullcontext():
            yield


@contextmanager
def first_alone(path: Path) -> Iterator[bool]:
    """Let one process run the block first, then all others; yield whether this process is first."""
    unfinished = path.with_suffix(".unfinished")  # exists until the first process has finished
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
        is_first = not waited or os.path.lexists(unfinished)
        if is_first:
            with writing(path.parent):
                open_own(unfinished, "ab").close()
            yield True
            unfinished.unlink(missing_ok=True)
    if not is_first:
        yield False
