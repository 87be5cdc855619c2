"""Choose the checkpoint to continue from, which saving.py loads, and move or remove others.

With --resume never, Run.begin has already moved the checkpoints of the run aside.
"""

import errno
import logging
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from ..config import CheckpointsConfig, ConfigError
from ..files import Json, TransientError, discard, unused_name
from ..manifest import UNREADABLE, find_damage, read_manifest
from ..mirror.download import in_every_folder
from ..ranks import gather_on_main, on_main_then_broadcast
from ..run_files import checkpoint_step
from ..run_folder import Run, began_at

logger = logging.getLogger(__name__)


def choose(accelerator: Accelerator, run: Run) -> Path | None:
    """Return the checkpoint to continue from; None to start from step 0. Called by every rank.

    This is the newest intact checkpoint of the run. With --resume <path>, it is the newest intact
    checkpoint of the run that descends from the checkpoint at that path or, if there is none, the
    checkpoint at the path.

    Raises:
        ConfigError: the checkpoint at the path is damaged.
        TransientError: the storage of a checkpoint does not answer.
    """
    chosen, find = None, partial(_candidates, run)
    if run.is_first_on_disk:
        clean_up(run.folder)
    candidates = on_main_then_broadcast(accelerator, find)
    candidates = in_every_folder(accelerator, run, candidates, find)  # with a mirror
    for folder in candidates:
        problem = find_damage_together(accelerator, folder, is_shared=run.is_shared)
        if not problem:
            chosen = folder
            break
        if problem.startswith(UNREADABLE):
            raise TransientError(
                f"{folder} {problem}, so it may be intact: start again; if the error stays, move"
                " this checkpoint away."
            )
        if folder == Path(run.config.resume):
            raise ConfigError(
                f"--resume {folder} cannot be used: {problem}; give another checkpoint, auto or"
                " never."
            )
        if run.rank == 0:
            logger.warning("%s is skipped: %s.", folder, problem)
    if chosen:
        is_given = chosen == Path(run.config.resume)
        path = chosen
        run.resumed_from = on_main_then_broadcast(
            accelerator,
            lambda: os.path.abspath(path) if is_given else read_manifest(path)["resumed_from"],
        )
    elif run.rank == 0 and candidates:
        logger.warning("no checkpoint of %s can be used: training starts from step 0.", run.folder)
    if not chosen:
        move_newer_aside(run, -1)
    return chosen


def _candidates(run: Run) -> list[Path]:
    """Return the checkpoints to try, in order. Called by rank 0."""
    folders = (run.folder / "checkpoints").glob("step_*")
    own = sorted((p for p in folders if checkpoint_step(p) >= 0), key=checkpoint_step, reverse=True)
    given = run.config.resume
    if given in ("auto", "never"):
        return own
    return [*(folder for folder in own if began_at(folder, given)), Path(given)]


def find_damage_together(accelerator: Accelerator, folder: Path, *, is_shared: bool = True) -> str:
    """Return a checkpoint's problem, or "". Called by every rank; each rank reads some files.

    Args:
        accelerator: this process's Accelerator.
        folder: the checkpoint.
        is_shared: whether all nodes share the folder; if not, each node reads all of its own files.
    """
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    if not is_shared:
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = slice(accelerator.local_process_index, None, ranks_of_node)
    problems = gather_on_main(accelerator, find_damage(folder, share))
    return on_main_then_broadcast(accelerator, lambda: next(filter(None, problems), ""))


def clean_up(run_folder: Path) -> None:
    """Remove what a killed save or fetch left in a run folder, and restore what it had moved."""
    paths = (*run_folder.glob(".*"), *(run_folder / "checkpoints").glob(".step_*"))
    # the highest number first: before-10, then before-9
    for path in sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True):
        before = re.fullmatch(r"\.(best|export|step_\d+)\.before-\d+", path.name)
        if before and not os.path.lexists(final := path.with_name(before[1])):
            os.replace(path, final)
        elif before or re.fullmatch(
            r"\.(best|export|step)(_\d[\w.]*)?\.(partial|removed)", path.name
        ):
            discard(path)


def move_newer_aside(run: Run, step: int) -> None:
    """Move aside newer checkpoints, which are damaged or from another branch of the run.

    Called by every rank; one rank of each disk moves them.
    """
    for folder in (run.folder / "checkpoints").glob("step_*") if run.is_first_on_disk else ():
        if checkpoint_step(folder) > step:
            aside = unused_name(folder)
            folder.rename(aside)
            logger.warning(
                "%s is newer than the chosen checkpoint: moved aside to %s", folder, aside.name
            )


def kept_steps(
    steps: Iterable[int], settings: CheckpointsConfig, state: dict[str, Json], keep: int = 0
) -> set[int]:
    """Return the steps whose checkpoints have to be kept.

    Args:
        steps: the steps of all checkpoints.
        settings: the rules.
        state: the state of the newest checkpoint.
        keep: how many of the newest to keep, instead of settings.keep; 0 means settings.keep.
    """
    steps = sorted(steps)
    newest, every = steps[-(keep or settings.keep) :], settings.keep_every_steps
    return {
        step
        for step in steps
        if step in newest or (every and step % every == 0) or step == state["best_step"]
    }


def remove(folder: Path) -> None:
    """Remove a checkpoint, unless it contains files that are not in its manifest.

    A checkpoint whose manifest cannot be used is kept too.
    """
    try:
        listed = read_manifest(folder)["files"].keys() | {"manifest.json"}
    except ValueError:
        return
    names = {path.name for path in folder.iterdir()}
    if all(name in listed or name.startswith(".manifest.json.") for name in names):
        # Rename first, so that a kill while files are removed leaves no partial checkpoint.
        removed = folder.with_name(f".{folder.name}.removed")
        discard(removed)
        try:
            os.replace(folder, removed)
        except OSError as error:
            # another host has one of the files open: a later save removes the folder
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
        discard(removed)
