"""Fetch from a run's mirror what its folder lacks, before a start or for a command."""

import errno
import hashlib
import json
import logging
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator

from ..config import Config
from ..files import (
    ConfigError,
    discard,
    from_object,
    read_json,
    read_own,
    temporary_folder,
    unused_name,
    write_atomically,
    writing,
)
from ..loading.prepare import first_alone, until_all_are_done
from ..manifest import find_damage, put_in_place
from ..ranks import gather_on_main, on_main_then_broadcast
from ..run_files import RunInfo, checkpoint_step, checkpoints, read_info
from ..run_folder import Run, starts_over_now
from .store import (
    FOLDERS,
    PARTIAL,
    Part,
    Store,
    chain,
    checkpoint_name,
    complete_steps,
    is_safe,
    parts_among,
    sha256_of,
    store_needed,
    transfer,
    url_of,
)

logger = logging.getLogger(__name__)


def fetch_from_mirror(config: Config) -> None:
    """If the run has a mirror, fetch from it what the run folder lacks.

    Called by every process before any process group starts, since a fetch can be slow. One process
    of each node fetches, since the folder may be local to a node.

    Raises:
        ConfigError: the mirror cannot be used, or holds a different run.
    """
    if not config.checkpoints.mirror:
        return
    if "://" not in config.checkpoints.mirror:
        raise ConfigError(
            f"checkpoints.mirror is {config.checkpoints.mirror}, but must be a URL such as"
            " s3://bucket/prefix."
        )
    store, folder = Store(url_of(config)), Path(config.runs_folder)
    with until_all_are_done(folder, f"{config.run_name}.fetch"):
        fetch_in_turn(store, config.folder, config=config)


def fetch_in_turn(store: Store, folder: Path, **options: Any) -> None:
    """Call fetch_run in one process of each node; if nodes share the folder, one goes first."""
    lock = folder.with_name(f".{folder.name}.fetch.{socket.gethostname()}.lock")
    with first_alone(lock) as is_first:
        if is_first:
            with first_alone(folder.with_name(f".{folder.name}.fetch.lock")), store_needed(store):
                fetch_run(store, folder, **options)


def fetch_run(
    store: Store,
    folder: Path,
    *,
    config: Config | None = None,
    is_copy: bool = False,
    only: int | None = None,
) -> None:
    """If the mirror has a newer checkpoint than a run folder, fetch it and the files beside it.

    This is also done if the folder does not exist yet, or if it is a copy and best/ or status.json
    have changed. run.json is written last, so the next call repeats a first fetch that was killed.

    Args:
        store: the mirror.
        folder: the run folder, or the path that it will have.
        config: the config of the run that starts; None for a command.
        is_copy: whether the folder is a copy, in which nothing is trained.
        only: the step of the only checkpoint to fetch; None: fetch the newest intact one.

    Raises:
        ConfigError: the mirror holds a different run.
    """
    names, local = store.names(), read_info(folder)
    if "run.json" not in names:
        return
    remote = from_object(RunInfo, store.read_json("run.json"), is_strict=False)
    # the run folder and the run in the mirror will be moved aside
    if config and starts_over_now(config, remote):
        return
    if is_copy and local.run != remote.run:
        discard(folder)
    elif local.run not in ("", remote.run):
        if config and config.resume == "never":  # this disk holds an older run: Run.begin moves it
            return
        raise ConfigError(
            f"{store.url} holds run {remote.run}, but {folder} holds run {local.run}: choose"
            " another --run_name, or --resume never, which moves both aside."
        )
    if is_copy:
        _clean_up_copy(store, folder, names, only)
    own = (path for path in reversed(checkpoints(folder)) if only in (None, checkpoint_step(path)))
    newest = next((checkpoint_step(path) for path in own if not find_damage(path)), -1)
    wanted = (step for step in reversed(complete_steps(names)) if only in (None, step))
    newer = [step for step in wanted if step > newest]
    if local.run and not newer and not (is_copy and _has_changed(store, folder)):
        return
    logger.info("fetching %s", store.url)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        hashes = {f: h for f, h in store.read_json(f"{name}.json").items() if is_safe(f)}
        find_problem = partial(_find_difference, hashes)
        is_there = not find_problem(folder / name)
        is_there = is_there or _fetch_folder(store, folder, name, [*hashes], find_problem)
        if is_there and is_copy:  # for _has_changed
            write_atomically(folder / f"{name}.json", json.dumps(hashes))
    for name in ("config.yaml", "status.json", "starts.jsonl"):
        if name in names:
            _fetch_text(store, folder / name)
    if "evaluations.jsonl" in names and not (folder / "evaluations.jsonl").exists():
        # an existing one is not replaced, since evaluate --follow may be appending to it
        _fetch_text(store, folder / "evaluations.jsonl")
    codes = [name for name in names if re.fullmatch(r"starts/[\w.-]+/[\w.-]+", name)]
    transfer(store.fetch, codes, map(folder.joinpath, codes))
    _fetch_metrics(store, folder / "metrics.jsonl")
    any(_fetch_checkpoint(store, folder, names, step) for step in newer)  # the newest intact one
    _fetch_text(store, folder / "run.json")


def _clean_up_copy(store: Store, folder: Path, names: list[str], only: int | None) -> None:
    """Remove what a killed fetch left in a copy, and checkpoints whose steps were trained again."""
    from ..checkpoint.resuming import clean_up

    clean_up(folder)
    newest = max(complete_steps(names), default=-1)
    for path in checkpoints(folder):
        if only in (None, step := checkpoint_step(path)):
            name = f"{checkpoint_name(step)}/manifest.json"
            own, there = (
                content.get("manifest", {}).get("files")
                for content in (read_json(folder / name), store.read_json(name))
            )
            if step > newest or there not in (None, own):
                discard(path)


def _has_changed(store: Store, folder: Path) -> bool:
    """Return whether the mirror has a different best/ or status.json than a copy.

    Both may change after a run's last checkpoint.
    """
    with suppress(FileNotFoundError):
        is_best = store.read_json("best.json") == read_json(folder / "best.json")
        return not is_best or store.read("status.json") != read_own(folder / "status.json")
    return True


def _find_difference(hashes: dict[str, str], folder: Path) -> str:
    """Return what is wrong with a folder whose files must have these hashes; "" if nothing is."""
    for file, digest in hashes.items():
        if not (folder / file).is_file() or sha256_of(folder / file) != digest:
            return f"{file} is missing or damaged"
    return ""


def _fetch_text(store: Store, path: Path) -> None:
    text = store.read(path.name).decode(errors="replace")
    if path.name == "starts.jsonl":  # the launcher has added this start to the local file
        with suppress(FileNotFoundError):
            own = read_own(path).decode(errors="replace").splitlines(keepends=True)
            text += "".join(line for line in own if line not in text)
    write_atomically(path, text)


def _read_parts(store: Store) -> list[tuple[Part, bytes]]:
    """Read the parts of metrics.jsonl; list them again if an upload has merged some meanwhile."""
    before: list[Part] | None = None
    while True:
        parts = chain(parts_among(store.names("metrics")))
        try:
            return [(part, store.read(part.name)) for part in parts]
        except FileNotFoundError:
            if parts == before:  # a part is listed, but gone
                raise
            before = parts


def _fetch_metrics(store: Store, path: Path) -> None:
    content = b""
    for part, data in _read_parts(store):
        content += data
        if hashlib.sha256(data).hexdigest() != part.digest:
            logger.warning("%s/%s is damaged: later records are lost", store.url, part.name)
            content = content[: part.begin]
            break
    with suppress(FileNotFoundError):
        if not content.startswith(read_own(path, most=sys.maxsize)):
            path.rename(unused_name(path))
    if content:
        write_atomically(path, content.decode(errors="replace"))


def _fetch_folder(
    store: Store, folder: Path, name: str, files: list[str], find_problem: Callable[[Path], str]
) -> bool:
    """Fetch a folder of the run; if it is intact, put it in place; return whether it is intact."""
    final = folder / name
    # after a kill, resuming.clean_up removes folders with such names
    temporary = final.with_name(f".{final.name}_0_{uuid.uuid4().hex}{PARTIAL}")
    try:
        with suppress(FileNotFoundError):  # the folder was removed or replaced just now
            transfer(store.fetch, (f"{name}/{f}" for f in files), map(temporary.joinpath, files))
        if problem := find_problem(temporary):
            logger.warning("%s/%s is skipped: %s", store.url, name, problem)
            return False
        if name not in FOLDERS and final.exists():  # a damaged checkpoint
            final.rename(unused_name(final))
        put_in_place(temporary, final)
        return True
    finally:
        discard(temporary)


def _fetch_checkpoint(store: Store, folder: Path, names: list[str], step: int) -> bool:
    """Fetch a checkpoint that the run folder lacks; return whether it is there and intact."""
    name = checkpoint_name(step)
    manifest = f"{name}/manifest.json"
    is_there = store.read_json(manifest) == read_json(folder / manifest)
    if is_there and not find_damage(folder / name):
        return True
    files = [file.removeprefix(f"{name}/") for file in names if file.startswith(f"{name}/")]
    return _fetch_folder(store, folder, name, files, find_damage)


def in_every_folder(
    accelerator: Accelerator, run: Run, candidates: list[Path], find: Callable[[], list[Path]]
) -> list[Path]:
    """Return the checkpoints that every node has, if the nodes do not share the run folder.

    If the mirror has a newer one, each node first fetches it. Called by every rank.

    Args:
        accelerator: this process's Accelerator.
        run: the run and its folder.
        candidates: the checkpoints that rank 0 has found.
        find: finds them again; called by rank 0.

    Raises:
        ConfigError: rank 0 has checkpoints, but none of them is on every node.
    """
    if run.is_shared:
        return candidates
    store, given = Store(url_of(run.config)), Path(run.config.resume)

    def names_in_mirror() -> list[str]:
        with store_needed(store):  # after --resume never, it still holds the earlier run
            return store.names() if store.read_json("run.json").get("run") == run.id else []

    common = _in_common(accelerator, candidates)
    names = on_main_then_broadcast(accelerator, names_in_mirror)
    steps, own = complete_steps(names), run.folder / "checkpoints"
    newest = max((checkpoint_step(path) for path in common if path.parent == own), default=-1)
    if run.is_first_on_disk:
        with store_needed(store):
            newer = (step for step in reversed(steps) if step > newest)
            any(_fetch_checkpoint(store, run.folder, names, step) for step in newer)
            if given.parent == own and checkpoint_step(given) in steps:
                _fetch_checkpoint(store, run.folder, names, checkpoint_step(given))
    candidates = on_main_then_broadcast(accelerator, find)
    common = _in_common(accelerator, candidates)
    if candidates and not common:
        raise ConfigError(
            f"{candidates[0]} on {run.hosts[0]} is not on every node, and {store.url} has no other"
            " checkpoint to continue from: copy it to the same path on all nodes, or give --resume"
            " never, which moves the run folder aside."
        )
    return common


def _in_common(accelerator: Accelerator, candidates: list[Path]) -> list[Path]:
    """Return the checkpoints whose manifests, and so all hashes in them, are equal on all nodes."""
    own = [read_json(path / "manifest.json", follow=True).get("sha256") for path in candidates]
    digests = gather_on_main(accelerator, own)

    def common() -> list[Path]:
        rows = zip(candidates, *digests, strict=True)
        return [path for path, first, *others in rows if first and {first, *others} == {first}]

    return on_main_then_broadcast(accelerator, common)


def local_copy(path: str, only: int | None = None) -> Path:
    """Copy the folder at a URL into a temporary folder; return the path of the copy.

    Args:
        path: the URL of a run in its mirror, of its best/ or export/, or of a checkpoint.
        only: the step of the only checkpoint that is needed; -1 for none, None for any.

    Raises:
        ConfigError: there is no run at the URL.
    """
    match = re.fullmatch(r"(.+?)(?:/(best|export|checkpoints/step_(\d+)))?/*", path)
    url, below, step = match.groups() if match else (path, None, None)
    store = Store(url)
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = temporary_folder() / digest / url.rpartition("/")[2]
    folder.parent.mkdir(exist_ok=True)
    only = int(step) if step else -1 if below else only  # best/ needs no checkpoint
    fetch_in_turn(store, folder, is_copy=True, only=only)
    if not (folder / "run.json").is_file():
        raise ConfigError(f"there is no run at {url}: give the URL of its folder in the mirror.")
    return folder / (below or "")


def fetch_next(
    given: str, is_wanted: Callable[[dict[str, str]], bool], seen: set[tuple[str, int]]
) -> None:
    """Fetch the oldest wanted checkpoint of the run at a URL.

    If it is intact, all other checkpoints are removed from the local copy; the mirror keeps them.

    Args:
        given: the URL; nothing is done for a path.
        is_wanted: returns whether a checkpoint is wanted; takes the hashes of its files, by name.
        seen: the checkpoints about which the mirror need not be asked again, by launch and step;
            this call adds to them.
    """
    from ..checkpoint.resuming import remove

    if "://" not in given:
        return
    store, run = Store(given), local_copy(given, only=-1)
    with store_needed(store):
        launch = str(store.read_json("run.json").get("launch"))  # a later launch may repeat steps
        for step in complete_steps(store.names()):
            if (launch, step) in seen:
                continue
            name = checkpoint_name(step)
            manifest = store.read_json(f"{name}/manifest.json").get("manifest", {})
            is_next = is_wanted(manifest.get("files", {}))
            if is_next:
                local_copy(given, only=step)
            seen.add((launch, step))
            if is_next and (run / name).exists():  # intact, and not removed meanwhile
                for folder in checkpoints(run):
                    if folder != run / name:
                        remove(folder)
                return


def exchange_evaluations(given: str, file: IO[bytes]) -> None:
    """Append to evaluations.jsonl what only the run's mirror has, then upload it; log a failure.

    Args:
        given: the URL of the run; nothing is done for a path.
        file: the file, which is open for reading and appending.
    """
    if "://" not in given:
        return
    try:
        store, theirs, name = Store(given), b"", "evaluations.jsonl"
        with suppress(FileNotFoundError):
            theirs = store.read(name)
        file.seek(0)
        size = len(text := file.read())
        own = {*text.splitlines(keepends=True)}
        new = b"".join(line for line in theirs.splitlines(keepends=True) if line not in own)
        if file.write(new) != len(new):  # the disk is full
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.seek(0)
        if (content := file.read()) != theirs:
            store.write(name, content)
    except OSError as error:
        logger.warning("%s does not have all of evaluations.jsonl yet: %s", given, error)
