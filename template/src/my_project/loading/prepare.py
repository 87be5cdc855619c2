"""Prepare the data in one process first, while the others wait."""

import fcntl
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from ..config import Config, to_dict
from ..contract import described, refuse
from ..files import open_own, read_json, writing
from ..process import STDERR, stderr_on_terminal
from ..recipe import DataInfo
from .seeding import derive_seed, seed_rng

logger = logging.getLogger(__name__)


def prepare_data(config: Config) -> DataInfo:
    """Call the recipe's prepare_data in one process first; the other processes find the work done.

    Tokenizing can take hours, so there is no timeout; only if each node has its own runs folder,
    there is one (until_all_are_done). The random state does not depend on the config's seed, since
    the content of a cache must not depend on the run that fills it.

    Returns:
        data_info.

    Raises:
        ConfigError: data_info is not a dict of plain JSON, or the runs folder cannot be written to.
    """
    recipe, folder = config.recipe, Path(config.runs_folder)
    work = f"{derive_seed(to_dict(config)['recipe']):016x}"  # the recipe's class and settings
    with until_all_are_done(folder, config.run_name), in_turn(folder, work):
        seed_rng(derive_seed("prepare_data"))
        data_info = recipe.prepare_data()
    if not isinstance(data_info, dict):
        refuse(recipe, "prepare_data", f"returned {described(data_info)}, not a dict.")
    try:
        copied = dict(json.loads(json.dumps(data_info)))
        if not has_text_keys(data_info):
            raise ValueError("a key is not text")
        return copied
    except (TypeError, ValueError) as error:
        problem = f"did not return plain JSON ({error}): convert it with int(x) or x.tolist()."
        refuse(recipe, "prepare_data", problem)


def has_text_keys(value: Any) -> bool:
    """Return whether all keys in a value are strings; JSON would silently convert other keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and has_text_keys(part) for key, part in value.items())
    return not isinstance(value, (list, tuple)) or all(map(has_text_keys, value))


def let_all_users_lock(file: IO[bytes]) -> None:
    """Let every user of a shared runs folder open this lock file."""
    with suppress(PermissionError):  # it is another user's file
        os.fchmod(file.fileno(), 0o666)


@contextmanager
def until_all_are_done(folder: Path, run_name: str) -> Iterator[None]:
    """Run the block, then wait until every process that has begun it has finished it.

    Otherwise the ranks that finish first would wait in the process group, which has a timeout
    (distributed.startup_timeout_seconds). A process that begins later, or has another runs folder,
    has to finish within this timeout.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_own(folder / f".{run_name}.preparing", "ab+")
    with file:
        let_all_users_lock(file)
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)  # two processes upgrading shared locks would deadlock
            fcntl.lockf(file, fcntl.LOCK_EX)


@contextmanager
def in_turn(folder: Path, work: str) -> Iterator[None]:
    """Wait for this process's turn.

    One process goes first; then one of each node, since caches may be local to a node; then all
    others together. Processes with other work, which may fill the same cache, take turns with
    these. The first process of a node may write to the terminal, for a progress bar. If the first
    process fails or dies, the next one does the work. The locks are files in the runs folder, so no
    process group is needed; if each node has its own runs folder, each node has a first process.
    The operating system releases a lock when its process ends, for whatever reason.

    Args:
        folder: the runs folder.
        work: a name that is the same in processes that prepare the same data.
    """
    with first_alone(folder / f".prepare_data.{socket.gethostname()}.lock", work) as is_first:
        alone = first_alone(folder / ".prepare_data.lock", work) if is_first else nullcontext()
        with alone, stderr_on_terminal() if is_first and STDERR else nullcontext():
            yield


@contextmanager
def first_alone(path: Path, work: str = "all") -> Iterator[bool]:
    """Let one process run the block first, then all others; yield whether this process is first.

    Processes with other work use the same lock, but each work has a first process of its own.
    """
    finished = path.with_suffix(f".{work}.finished")  # rewritten when a first process has finished
    with writing(path.parent):
        lock = open_own(path, "ab")
    with lock:
        let_all_users_lock(lock)
        before = read_json(finished)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # unlike flock, not inherited by a forked process
        except OSError as error:  # a file system without locks
            logger.warning("no file locks (%s): each process prepares the data itself", error)
        is_first = read_json(finished) == before  # nobody finished the work during the wait
        if is_first:
            yield True
            with suppress(OSError), open_own(finished, "wb") as file:
                file.write(json.dumps({"by": uuid.uuid4().hex}).encode())
    if not is_first:
        yield False
