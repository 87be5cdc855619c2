"""Find damage in a checkpoint on all ranks together: each rank hashes its part of the files."""

from collections.abc import Callable
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
        asked = (folder, files.read_manifest(folder)["files"])
        broadcast_object_list([asked])
        return next(filter(None, _problems(accelerator, *asked)), "")

    def choose_on_main() -> Any:
        try:
            return function(find)
        finally:
            broadcast_object_list([None])

    if not accelerator.is_main_process:
        asked: list[Any] = [None]
        while broadcast_object_list(asked)[0]:  # until rank 0 asks for no other checkpoint
            _problems(accelerator, *asked[0])
    return on_main_then_broadcast(accelerator, choose_on_main)


def _problems(accelerator: Accelerator, folder: Path, listed: dict[str, Any]) -> list[str]:
    """Hash this rank's part of the files; return on rank 0 what each rank has found wrong."""
    problem = ""
    for name in sorted(listed)[accelerator.process_index :: accelerator.num_processes]:
        try:
            is_intact = files.fingerprint(folder / name) == listed[name]
            problem = problem or ("" if is_intact else files.hash_problem(name))
        except OSError as error:
            problem = f"{name} cannot be read: {error}"
    return gather_on_main(accelerator, problem)
