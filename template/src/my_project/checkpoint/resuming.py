"""List, remove and choose the checkpoints of a run."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import files
from ..config import ConfigError
from ..files import discard, read_manifest, step_of, unused_name
from ..run_folder import Run

logger = logging.getLogger(__name__)
Find = Callable[[Path], str]  # returns what is wrong with a checkpoint; "" for nothing


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first, including damaged ones."""
    found = [p.parent for p in run_folder.glob("checkpoints/step_*/manifest.json")]
    return sorted((p for p in found if step_of(p) >= 0), key=step_of)


def mark_of(folder: Path) -> Path:
    """Return the path of the file that marks a checkpoint as saved by time."""
    return folder.with_name(f".{folder.name}.by_time")


def remove(folder: Path) -> None:
    """Remove a checkpoint; it is kept if it holds foreign files."""
    try:
        own = read_manifest(folder)["files"].keys() | {"manifest.json"}
    except ValueError:
        return
    names = {path.name for path in folder.iterdir()}
    if all(name in own or name.startswith(".manifest.json.") for name in names):
        # Renamed first: a kill while files are removed must not leave a partial checkpoint.
        removed = folder.with_name(f".{folder.name}.removed")
        discard(removed)
        os.replace(folder, removed)
        discard(mark_of(folder))
        discard(removed)


# ---- where to continue ---------------------------------------------------------------------------
def clean_up(run_folder: Path) -> None:
    """Remove what a killed save has left. Called by rank 0, before anything is saved."""
    for name in ("export", "best"):
        before = run_folder / f".{name}.before"
        if before.is_dir() and not os.path.lexists(run_folder / name):
            os.replace(before, run_folder / name)
        discard(run_folder / f".{name}.partial")
    for path in (*run_folder.glob(".*"), *(run_folder / "checkpoints").glob(".step_*")):
        if re.fullmatch(r"\.(best|export|step)_\d+\.(partial|removed)", path.name):
            discard(path)
        if path.suffix == ".by_time" and not path.with_name(path.stem[1:]).exists():
            discard(path)


def choose_together(accelerator: Any, run: Run) -> Path | None:
    """Return the checkpoint to continue from; None to start from step 0. Called by every rank."""
    chosen: Path | None = hashing_together(accelerator, lambda find: choose(run, find))
    return chosen


def choose(run: Run, find: Find = files.find_damage) -> Path | None:
    """Return what choose_together does. Called by rank 0 only."""
    clean_up(run.folder)
    given = run.config.resume
    chosen = _newest_good(run, find)
    # The run begins at a path given by --resume; later, its own checkpoints take precedence.
    if given not in ("auto", "never") and run.resumed_from != given:
        check(Path(given), find)
        run.resumed_from = given
        return Path(given)  # newer ones are moved aside once it has been loaded
    move_newer_aside(run, chosen)
    return chosen


def move_newer_aside(run: Run, chosen: Path | None) -> None:
    """Move newer checkpoints, damaged or of another branch of the run, aside; remove none."""
    step = read_manifest(chosen)["step"] if chosen else -1
    for folder in (run.folder / "checkpoints").glob("step_*"):
        if step_of(folder) > step:
            aside = unused_name(folder)
            folder.rename(aside)
            logger.warning(
                "%s is newer than the chosen checkpoint: moved aside to %s", folder, aside.name
            )


def _newest_good(run: Run, find: Find) -> Path | None:
    folder = run.folder / "checkpoints"
    found = sorted((p for p in folder.glob("[!.]*") if ".old-" not in p.name), key=step_of)
    chosen = None
    for path in reversed(found):
        problem = find(path) if step_of(path) >= 0 else "it is not a checkpoint of this run"
        if not problem:
            chosen = path
            break
        logger.warning("%s is skipped: %s.", path, problem)
    if not chosen and found and run.config.resume in ("auto", "never"):
        logger.warning("no checkpoint in %s can be used: training starts from step 0.", folder)
    run.resumed_from = read_manifest(chosen).get("resumed_from") if chosen else None
    return chosen


def check(folder: Path, find: Find = files.find_damage) -> None:
    """Raise a ConfigError for a damaged checkpoint."""
    if problem := find(folder):
        raise ConfigError(f"{folder} cannot be used: {problem}; give another checkpoint.")


# ---- hashing on all ranks ------------------------------------------------------------------------
def hashing_together(accelerator: Any, function: Callable[[Find], Any]) -> Any:
    """Call a function on rank 0, and return its result on every rank. Called by every rank.

    Args:
        accelerator: of this process.
        function: called with a function that returns what is wrong with a checkpoint, or "". All
            ranks hash its files meanwhile: one rank would read all the shards of a large model.

    Raises:
        ConfigError: on every rank, what the function raised on rank 0.
    """
    from accelerate.utils import broadcast_object_list  # predict does without accelerate

    from ..collectives import gather_on_main, on_main_then_broadcast

    def hash_part(folder: Path, listed: dict[str, Any]) -> list[str]:
        """Hash this rank's part of the files; return on rank 0 what each rank found wrong."""
        problem = ""
        for name in sorted(listed)[accelerator.process_index :: accelerator.num_processes]:
            try:
                is_intact = files.fingerprint(folder / name) == listed[name]
                problem = problem or ("" if is_intact else files.hash_problem(name))
            except OSError as error:
                problem = f"{name} cannot be read: {error}"
        return gather_on_main(accelerator, problem)

    def find(folder: Path) -> str:
        if problem := files.find_damage(folder, hashes=False):
            return problem
        asked = (folder, read_manifest(folder)["files"])
        broadcast_object_list([asked])
        return next(filter(None, hash_part(*asked)), "")

    def call_on_main() -> Any:
        try:
            return function(find)
        finally:
            broadcast_object_list([None])

    if accelerator.num_processes == 1:
        return function(files.find_damage)
    asked: list[Any] = [None]
    while not accelerator.is_main_process and broadcast_object_list(asked)[0]:
        hash_part(*asked[0])  # until rank 0 asks for no other checkpoint
    return on_main_then_broadcast(accelerator, call_on_main)
