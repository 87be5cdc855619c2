"""Find damage in a checkpoint on all ranks together: each rank hashes its part of the files."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from .. import files
from ..collectives import gather_on_main, on_main_then_broadcast
from ..run_folder import Run
from . import resuming


def choose(accelerator: Accelerator, run: Run) -> Path | None:
    """Return the checkpoint to continue from; None to start from step 0. Called by every rank."""
    found: Path | None = on_main_with_hashes(accelerator, lambda find: resuming.choose(run, find))
    return found


def choose_before(accelerator: Accelerator, run: Run, damaged: Path, problem: str) -> Path:
    """Return the checkpoint to continue from in place of a damaged one. Called by every rank."""

    def function(find: Callable[[Path], str]) -> Path:
        return resuming.choose_before(run, damaged, problem, find)

    instead: Path = on_main_with_hashes(accelerator, function)
    return instead


def on_main_with_hashes(
    accelerator: Accelerator, function: Callable[[Callable[[Path], str]], Any]
) -> Any:
    """Call a function on rank 0, and return its result on every rank.

    Args:
        accelerator: of this process.
        function: called with a function that returns what is wrong with a checkpoint, or "". All
            ranks hash its files meanwhile: one rank would read all the shards of a large model.

    Raises:
        ConfigError: on every rank, what the function raised on rank 0.
    """
    if accelerator.num_processes == 1:
        return function(files.find_damage)

    def find(folder: Path) -> str:
        if problem := files.find_damage(folder, hashes=False):
            return problem
        broadcast_object_list([folder])
        return damage_of(accelerator, folder, {})

    def choose_on_main() -> Any:
        try:
            return function(find)
        finally:
            broadcast_object_list([None])

    if not accelerator.is_main_process:
        asked: list[Any] = [None]
        while broadcast_object_list(asked)[0]:  # until rank 0 asks for no other checkpoint
            damage_of(accelerator, asked[0], {})
    return on_main_then_broadcast(accelerator, choose_on_main)


def damage_of(accelerator: Accelerator, folder: Path, hashes: dict[str, str]) -> str:
    """Return which file of a checkpoint is damaged, the same on every rank, or "".

    Called by every rank. Files that no rank has read whole, such as one large file of which each
    rank has read its shards, are hashed here, each by one rank.

    Args:
        accelerator: of this process.
        folder: the checkpoint; rank 0 has checked its state.json.
        hashes: of the files that this rank has read whole already.
    """
    read = gather_on_main(accelerator, hashes)

    def list_unread() -> list[str]:
        listed = files.read_manifest(folder)["files"]
        return sorted(listed.keys() - set().union(*read) - {"state.json"})

    unread = on_main_then_broadcast(accelerator, list_unread)
    mine = {}
    for name in unread[accelerator.process_index :: accelerator.num_processes]:
        with suppress(OSError):
            mine[name] = files.fingerprint(folder / name)["sha256"]
    found = gather_on_main(accelerator, mine)

    def compare() -> str:
        listed = files.read_manifest(folder)["files"]
        pairs = [pair for one in (*read, *found) for pair in one.items()]
        wrong = sorted({name for name, sha256 in pairs if listed[name]["sha256"] != sha256})
        if wrong:
            return files.hash_problem(wrong[0])
        missing = sorted(set(unread) - {name for name, _ in pairs})
        return f"{missing[0]} is missing" if missing else ""

    problem: str = on_main_then_broadcast(accelerator, compare)
    return problem
