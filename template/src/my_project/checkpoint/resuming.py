"""List, remove and choose the checkpoints of a run."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from ..config import ConfigError
from ..files import discard, find_damage, read_manifest, step_of, unused_name
from ..run_folder import Run

logger = logging.getLogger(__name__)


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


def choose(run: Run, find: Callable[[Path], str] = find_damage) -> Path | None:
    """Return the checkpoint to continue from; None to start from step 0. Called by rank 0 only.

    Args:
        run: the run folder.
        find: returns what is wrong with a checkpoint, with hashes; on several ranks one of
            verification.py, so that all of them read the files.
    """
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


def _newest_good(run: Run, find: Callable[[Path], str]) -> Path | None:
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


def check(folder: Path, find: Callable[[Path], str] = find_damage) -> None:
    """Raise a ConfigError for a damaged checkpoint; find is that of choose."""
    if problem := find(folder):
        raise ConfigError(f"{folder} cannot be used: {problem}; give another checkpoint.")
