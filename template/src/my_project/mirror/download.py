"""Fetch what a mirror has of a run and its folder lacks, before a start or for a command."""

import hashlib
import logging
import re
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..config import Config
from ..files import (
    ConfigError,
    discard,
    read_own,
    temporary_folder,
    unused_name,
    write_atomically,
    writing,
)
from ..manifest import find_damage, put_in_place
from ..ranks import gather_on_main, on_main_then_broadcast
from ..run_files import checkpoints, read_info, step_of
from ..run_folder import Run
from .store import (
    FOLDERS,
    PARTIAL,
    Part,
    Store,
    chain,
    checkpoint_folder,
    is_file_with,
    is_safe,
    parsed,
    refused_without,
    remote_steps,
    transfer,
    url_of,
)

logger = logging.getLogger(__name__)


def fetch_from_mirror(config: Config) -> None:
    """Fetch what the mirror has of a run, and its folder lacks, if the run has a mirror.

    Called by every process before any process group starts: it may take long. One process of each
    node does it, since the folder may be local to a node.

    Raises:
        ConfigError: the mirror cannot be used, or holds another run.
    """
    from ..loading.prepare import until_all_are_done

    if not config.checkpoints.mirror:
        return
    if "://" not in config.checkpoints.mirror:
        raise ConfigError(
            f"checkpoints.mirror is {config.checkpoints.mirror}, but must be a URL such as"
            " s3://bucket/prefix."
        )
    store, folder = Store(url_of(config)), Path(config.runs_folder)
    with until_all_are_done(folder, f"{config.run_name}.fetch"):
        fetch_in_turn(store, config.folder, starts_over=config.resume == "never")


def fetch_in_turn(store: Store, folder: Path, **more: Any) -> None:
    """Call fetch_run in one process of each node; where they share the folder, one goes first."""
    from ..loading.prepare import first_alone  # which needs torch

    lock = folder.with_name(f".{folder.name}.fetch.{socket.gethostname()}.lock")
    with first_alone(lock) as is_first:
        if is_first:
            with first_alone(folder.with_name(f".{folder.name}.fetch.lock")):
                with refused_without(store):
                    fetch_run(store, folder, **more)


def fetch_run(
    store: Store,
    folder: Path,
    *,
    starts_over: bool = False,
    is_copy: bool = False,
    only: int | None = None,
) -> None:
    """Bring a run folder up to date with its mirror; the newest intact checkpoint of both stays.

    What is fetched first is fetched again where a kill interrupts it: run.json comes last.

    Args:
        store: the mirror.
        folder: the run folder, or where it will be.
        starts_over: --resume never is given.
        is_copy: nothing is trained in the folder.
        only: the step of the only checkpoint that is needed.

    Raises:
        ConfigError: the mirror holds another run.
    """
    names, local = store.sizes(), read_info(folder)
    if "run.json" not in names:
        return
    remote = str(parsed(store.read("run.json")).get("run"))
    if is_copy and local.run != remote:
        discard(folder)
    elif local.run not in ("", remote):
        if starts_over:  # killed while it moved the run aside, here and there
            return
        raise ConfigError(
            f"{store.url} holds another run ({remote}) than {folder} ({local.run}): choose another"
            " --run_name, or --resume never, which moves both aside."
        )
    steps, own = (
        [s for s in some if only in (None, s)]
        for some in (remote_steps(names), map(step_of, checkpoints(folder)))
    )
    intact = (s for s in reversed(own) if not find_damage(checkpoint_folder(folder, s)))
    newest = next(intact, -1)
    is_newer = max(steps, default=-1) > newest
    if local.run and not is_newer and not (is_copy and _has_ended_since(store, folder)):
        return
    logger.info("fetching %s", store.url)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        _fetch_folder(store, folder, name)
    for name in ("config.yaml", "status.json", "starts.jsonl"):
        if name in names:
            _fetch_text(store, folder / name)
    if "evaluations.jsonl" in names and not (folder / "evaluations.jsonl").exists():
        _fetch_text(store, folder / "evaluations.jsonl")  # else follow is writing it here
    codes = [name for name in names if re.fullmatch(r"starts/[\w.-]+/[\w.-]+", name)]
    transfer(store.fetch, codes, map(folder.joinpath, codes))
    _fetch_metrics(store, folder / "metrics.jsonl", chain(names))
    newer = (step for step in reversed(steps) if step > newest)
    any(_fetch_checkpoint(store, folder, step, names) for step in newer)
    _fetch_text(store, folder / "run.json")


def _has_ended_since(store: Store, folder: Path) -> bool:
    """Return whether status.json is another one, as after the last checkpoint of a run."""
    with suppress(FileNotFoundError):
        return store.read("status.json") != read_own(folder / "status.json")
    return True


def _fetch_text(store: Store, path: Path) -> None:
    text = store.read(path.name).decode(errors="replace")
    if path.name == "starts.jsonl":  # to which the launcher has written this start
        with suppress(FileNotFoundError):
            own = read_own(path).decode(errors="replace").splitlines(keepends=True)
            text += "".join(line for line in own if line not in text)
    write_atomically(path, text)


def _fetch_metrics(store: Store, path: Path, parts: list[Part]) -> None:
    content = b""
    for part in parts:
        content += (data := store.read(part.name))
        if hashlib.sha256(data).hexdigest() != part.digest:
            logger.warning("%s/%s is damaged: later records are lost", store.url, part.name)
            content = content[: part.begin]
            break
    with suppress(FileNotFoundError):
        if not content.startswith(read_own(path)):
            path.rename(unused_name(path))
    if content:
        write_atomically(path, content.decode(errors="replace"))


def _fetch_folder(store: Store, folder: Path, name: str) -> None:
    try:
        hashes = {f: h for f, h in parsed(store.read(f"{name}.json")).items() if is_safe(f)}
    except FileNotFoundError:
        return
    if all(is_file_with(folder / name / file, digest) for file, digest in hashes.items()):
        return
    temporary = folder / f".{name}_0_{uuid.uuid4().hex}{PARTIAL}"  # clean_up knows such names
    try:
        temporary.mkdir()
        with suppress(FileNotFoundError):  # it is being replaced
            transfer(store.fetch, (f"{name}/{f}" for f in hashes), map(temporary.joinpath, hashes))
            if all(is_file_with(temporary / file, digest) for file, digest in hashes.items()):
                put_in_place(temporary, folder / name)
                return
        logger.warning("%s/%s is damaged, and not fetched", store.url, name)
    finally:
        discard(temporary)


def _fetch_checkpoint(store: Store, folder: Path, step: int, names: dict[str, int]) -> bool:
    """Fetch a checkpoint; return whether it is intact."""
    final = checkpoint_folder(folder, step)
    name = f"checkpoints/{final.name}"
    temporary = final.with_name(f".{final.name}_{uuid.uuid4().hex}{PARTIAL}")
    files = [file for file in names if file.startswith(f"{name}/") and file.count("/") == 2]
    try:
        paths = [temporary / file.rpartition("/")[2] for file in files]
        with suppress(FileNotFoundError):  # it was removed just now
            transfer(store.fetch, files, paths)
        if problem := find_damage(temporary):
            logger.warning("%s/%s is skipped: %s", store.url, name, problem)
            return False
        if final.exists():  # damaged
            final.rename(unused_name(final))
        put_in_place(temporary, final)
        return True
    finally:
        discard(temporary)


def in_every_folder(accelerator: Accelerator, run: Run, candidates: list[Path]) -> list[Path]:
    """Return the checkpoints that every node has, where each has a run folder of its own.

    Called by every rank.
    """
    if run.is_shared:
        return candidates
    everywhere = gather_on_main(accelerator, {path.name for path in checkpoints(run.folder)})
    own = [path for path in candidates if path.parent == run.folder / "checkpoints"]
    return on_main_then_broadcast(
        accelerator, lambda: [path for path in own if all(path.name in one for one in everywhere)]
    )


def local_copy(path: str) -> Path:
    """Fetch what a URL names into a temporary folder; return its path there.

    Args:
        path: the URL of a run in its mirror, of its best/ or export/, or of a checkpoint.

    Raises:
        ConfigError: there is nothing at the URL.
    """
    matched = re.fullmatch(r"(.+?)(?:/(best|export|checkpoints/step_(\d+)))?/*", path)
    url, below, step = matched.groups() if matched else (path, None, None)
    store = Store(url)
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = temporary_folder() / digest / url.rpartition("/")[2]
    folder.parent.mkdir(exist_ok=True)
    fetch_in_turn(store, folder, is_copy=True, only=int(step) if step else None)
    if not (folder / "run.json").is_file():
        raise ConfigError(f"there is no run at {url}: give the URL of its folder in the mirror.")
    return folder / (below or "")


def fetch_newest(given: str) -> None:
    """Fetch the newest checkpoint of the run at a URL, in place of those that were fetched before.

    Args:
        given: the URL; a path is not fetched.
    """
    from ..checkpoint.resuming import remove

    if "://" in given:
        for folder in checkpoints(local_copy(given))[:-1]:
            remove(folder)


def send_evaluations(given: str, path: Path) -> None:
    """Upload evaluations.jsonl to the mirror that it belongs to; the next line tries again.

    Args:
        given: the URL of the run; a path has nothing to upload.
        path: of the file.
    """
    if "://" in given:
        try:
            Store(given).write(path.name, path)
        except OSError as error:
            logger.warning("%s is not in the mirror yet: %s", path.name, error)
