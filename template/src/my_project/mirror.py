"""Mirror a run to an object store, so that it outlives the machine that trains it.

    <checkpoints.mirror>/<run_name>/
      checkpoints/step_00000100/   as in the run folder; its manifest.json is uploaded last
      best/, export/               best.json and export.json list their files, and come last
      metrics/                     metrics.jsonl in parts: a save uploads what is new
      config.yaml, run.json, status.json, starts.jsonl

The run folder stays the truth while the machine lives. A thread of rank 0 uploads what is new after
each save; a slow or failed upload costs no step, and the next save tries again. A start fetches
what the mirror has and the run folder lacks. Any URL that fsspec knows is a mirror; fsspec is
imported when one is given.
"""

import hashlib
import json
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator

from .checkpoint.resuming import kept_steps
from .checkpoint.saving import Checkpoints
from .config import Config, ConfigError
from .files import (
    TransientError,
    discard,
    flush_to_disk,
    open_own,
    read_own,
    temporary_folder,
    unused_name,
    write_atomically,
    writing,
)
from .loading.prepare import first_alone, until_all_are_done
from .manifest import find_damage, put_in_place
from .ranks import on_main_then_broadcast
from .run_files import checkpoints, read_info, step_of
from .safety.redaction import mask

logger = logging.getLogger(__name__)
FILES = ("config.yaml", "run.json", "status.json", "starts.jsonl")  # uploaded whole when changed
FOLDERS = ("best", "export")
BLOCK_BYTES = 16 << 20  # of one request; S3 takes 10,000 for an object
THREADS = 4  # that transfer files of a folder
WAIT_SECONDS = 20.0  # between two collectives while rank 0 uploads
TRIES = 4  # of the last upload of a run
PARTIAL = ".partial"


# ---- the store -----------------------------------------------------------------------------------
class Store:
    """A folder of an object store. Names are relative to it, with slashes."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet.

        Args:
            url: of the folder, of any kind that fsspec knows.

        Raises:
            ConfigError: it is of another kind, or a package is missing.
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoints.mirror {self.url} cannot be used: {error}. s3:// needs the extra s3"
                " of this project, gs:// gcs, az:// azure (pip install -e '.[s3]')."
            ) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        if self.is_local:
            self.fs.auto_mkdir = True

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what the libraries of stores raise into an OSError without secrets."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # botocore's, aiohttp's and others have no common class
            text = " ".join(str(error).split()) or type(error).__name__
            raise OSError(f"{self.url}: {mask(text)}") from error

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of each file, by name."""
        at = f"{self.root}/{below}".rstrip("/")
        with self._errors():
            self.fs.invalidate_cache()
            try:
                listed = self.fs.find(at, detail=True)
            except FileNotFoundError:
                return {}
        skip = len(self.root) + 1
        names = {path[skip:]: int(about["size"] or 0) for path, about in listed.items()}
        return {name: size for name, size in names.items() if is_safe(name)}

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it cannot be read.
        """
        with self._errors():
            return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, content: bytes | Path) -> None:
        """Replace a file.

        Args:
            name: of the file.
            content: of it, or the file that is copied.

        Raises:
            FileNotFoundError: there is no such local file.
            OSError: it cannot be written, or has another size afterwards.
        """
        target = f"{self.root}/{name}"
        at = f"{target}{PARTIAL}" if self.is_local else target  # others replace atomically
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        with self._errors():
            if isinstance(content, Path):
                block = max(BLOCK_BYTES, size // 9000)
                with content.open("rb") as source, self.fs.open(at, "wb", block_size=block) as file:
                    while data := source.read(BLOCK_BYTES):
                        file.write(data)
            else:
                self.fs.pipe_file(at, content)
            if (there := self.fs.info(at)["size"]) != size:
                raise OSError(f"{name} has {there} bytes there, not {size}")
            if self.is_local:
                self.fs.mv(at, target)

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file into a local one, and flush it to disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self.fs.get_file(f"{self.root}/{name}", str(path))
        flush_to_disk(path)

    def remove(self, *names: str) -> None:
        """Remove files, one after the other; one that is gone is passed over."""
        for name in names:
            with self._errors(), suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")

    def move(self, names: list[str], old: str, new: str) -> None:
        """Move files from below one name to below another; those that complete a folder first."""
        for name in names:
            with self._errors():
                self.fs.cp_file(f"{self.root}/{name}", f"{self.root}/{new}{name[len(old) :]}")
        self.remove(*sorted(names, key=lambda name: not name.endswith(".json")))


def is_safe(name: str) -> bool:
    """Return whether a name leads to a place below the folder that it is joined to."""
    parts = name.split("/")
    return not any(p in ("", ".", "..") or "\\" in p for p in parts) and not name.endswith(PARTIAL)


def transfer(function: Any, *arguments: Any) -> None:
    """Call a function for each file, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(function, *arguments))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore


def is_file_with(path: Path, digest: str) -> bool:
    """Return whether a file is there, with this SHA-256."""
    return path.is_file() and sha256_of(path) == digest


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint."""
    return run_folder / "checkpoints" / f"step_{step:08d}"


def remote_steps(names: dict[str, int]) -> list[int]:
    """Return the steps of the complete checkpoints among the files of a mirror, oldest first."""
    folders = [name.split("/") for name in names if name.endswith("/manifest.json")]
    steps = [step_of(Path(parts[1])) for parts in folders if len(parts) == 3]
    return sorted(step for step in steps if step >= 0)


# ---- the records, in parts -----------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of metrics.jsonl: an object of the mirror, all that it is stands in its name."""

    number: int  # of the upload; a later one replaces what it overlaps
    begin: int  # its first byte
    size: int  # in bytes
    digest: str  # of its bytes

    @property
    def name(self) -> str:
        """Return its name in the mirror."""
        return f"metrics/{self.number:08d}-{self.begin}-{self.size}-{self.digest}.jsonl"

    @property
    def end(self) -> int:
        """Return the byte behind its last one."""
        return self.begin + self.size


PART = re.compile(r"metrics/(\d+)-(\d+)-(\d+)-([0-9a-f]{64})\.jsonl")


def chain(names: dict[str, int]) -> list[Part]:
    """Return the parts that make up the newest metrics.jsonl of a mirror, in order.

    An upload that was interrupted leaves parts that are not among them.
    """
    found = [match.groups() for match in map(PART.fullmatch, names) if match]
    parts = [Part(number=int(n), begin=int(b), size=int(s), digest=d) for n, b, s, d in found]
    result: list[Part] = []
    for part in sorted(parts, key=lambda part: part.number, reverse=True):
        if not result or part.end == result[-1].begin:
            result.append(part)
    return result[::-1] if result and result[-1].begin == 0 else []


def is_part_of(file: IO[bytes], part: Part) -> bool:
    """Return whether a file holds a part."""
    file.seek(part.begin)
    return hashlib.sha256(file.read(part.size)).hexdigest() == part.digest


# ---- uploads -------------------------------------------------------------------------------------
class Mirror:
    """Upload a run, in a thread of rank 0."""

    def __init__(self, saving: Checkpoints) -> None:
        """Upload nothing yet; `begin` does, on rank 0."""
        self.run = saving.run
        self.saving = saving
        self.store = Store(url_of(self.run.config))
        self.uploading: Path | None = None  # the checkpoint that rotation has to keep
        self._superseded: ConfigError | None = None  # another launch has begun the run
        self._sent: dict[str, object] = {}  # what the mirror holds by now, by name
        self._parts: list[Part] | None = None  # of metrics.jsonl
        self._failure: Exception | None = None  # of the newest upload
        self._asked = self._tried = 0  # uploads
        self._tries = 0  # of the last one
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Take the mirror over for this launch, move aside what does not belong to its run.

        Raises:
            ConfigError: nothing can be written there.
        """
        with refused_without(self.store):
            names = self.store.sizes()
            before = self._remote_info(names).get("run")
            if before not in (None, self.run.id):  # --resume never
                self._move_aside(names, "")
                names = {}
            for step in remote_steps(names):
                if step > self.run.step:  # damaged, or of another branch of the run
                    self._move_aside(names, f"checkpoints/step_{step:08d}")
            # from here on an older launch uploads nothing more
            for name in ("config.yaml", "run.json", "status.json"):
                self._put_file(name)
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def check(self) -> None:
        """Raise a TransientError if another launch has taken the mirror over."""
        if self._superseded:
            raise self._superseded

    def upload(self) -> None:
        """Have what is new uploaded; returns immediately."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until all that was asked for has been uploaded, or has failed; return whether."""
        with self._changed:
            return self._changed.wait_for(lambda: self._tried == self._asked, seconds)

    def has_finished(self, deadline: float) -> bool:
        """Wait for a while until the end of the run is uploaded; return whether it is, or too late.

        Args:
            deadline: a time.monotonic() after which nobody waits; a failure before it is an error
                only if there is none.

        Raises:
            ConfigError: it has failed too often, or another launch has taken the mirror over.
        """
        if not self._tries:
            self._tries = 1
            self.upload()
        left = max(0.0, deadline - time.monotonic())
        is_over = self.wait(min(WAIT_SECONDS, left))
        self.check()
        if is_over and not self._failure:
            return True
        if is_over and self._tries < TRIES and left:
            time.sleep(min(left, 2.0**self._tries))
            self._tries += 1
            self.upload()
            return False
        if is_over and deadline == math.inf:
            raise TransientError(f"the run has ended, but {self.saving.note}")
        if is_over or not left:
            text = "the end of this start is not at %s, but in %s: %s"
            reason = self._failure or "checkpoints.mirror_seconds have passed"
            logger.warning(text, self.store.url, self.run.folder, reason)
            return True
        return False

    def needs(self, folder: Path) -> bool:
        """Return whether a checkpoint is being uploaded, so that it must not be removed."""
        return folder == self.uploading

    # ---- the thread ------------------------------------------------------------------------------
    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tried < self._asked)
                asked = self._asked
            try:
                self._upload_new()
                self._failure = None
            except ConfigError as error:
                self._superseded = error
            except Exception as error:
                self._failure = error
                self.saving.note = f"the mirror could not be brought up to date: {error}"
                logger.warning("%s. The next save tries again.", self.saving.note)
            finally:
                self.uploading = None
            with self._changed:
                self._tried = asked
                self._changed.notify_all()

    def _upload_new(self) -> None:
        """Upload what is new, in an order in which a kill at any time loses no record."""
        self._check_fence()
        # read first: the results of an evaluation come after best/ and their record
        manifests = [(f, (f / "manifest.json").read_bytes()) for f in checkpoints(self.run.folder)]
        for name in FOLDERS:
            self._put_folder(name)
        names = self.store.sizes()
        self._put_metrics(names)
        for folder, text in manifests[-1:]:
            state = json.loads(text)["manifest"]["state"]
            steps = {step_of(folder) for folder, _ in manifests}
            # what the next save removes is not uploaded any more, if it has not been before
            uploaded = kept_steps(steps, self.run.config.checkpoints, state, keep=1)
            for local, its_text in reversed(manifests):
                if step_of(local) in uploaded:
                    self._put_checkpoint(local, its_text, names)
            if not state["consecutive_skipped_steps"]:
                self._rotate(names, state, step_of(folder))
        for name in FILES:
            self._put_file(name)

    def _check_fence(self) -> None:
        if self._remote_info().get("launch") != self.run.token:
            raise TransientError(
                f"another launch has begun this run at {self.store.url}, so this older one ends"
                " and uploads nothing more: choose another --run_name for one of them."
            )

    def _remote_info(self, names: dict[str, int] | None = None) -> dict[str, Any]:
        if names is not None and "run.json" not in names:
            return {}
        return parsed(self.store.read("run.json"))

    def _put_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            content = (self.run.folder / name).read_bytes()
            if self._sent.get(name) != content:
                self.store.write(name, content)
                self._sent[name] = content

    def _put_folder(self, name: str) -> None:
        """Upload best/ or export/, which is replaced as a whole."""
        folder = self.run.folder / name
        if not folder.is_dir() or self._sent.get(name) == (mark := mark_of(folder)):
            return
        paths = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        listed = json.dumps({file: sha256_of(path) for file, path in paths.items()}).encode()
        there = self.store.sizes(name)
        with suppress(FileNotFoundError):
            if self.store.read(f"{name}.json") == listed:  # by an earlier start
                self._sent[name] = mark
                return
        self.store.remove(f"{name}.json")
        names = [f"{name}/{file}" for file in paths]
        transfer(self.store.write, names, paths.values())
        self.store.remove(*(there.keys() - {*names}))
        if mark_of(folder) == mark:  # else it was replaced meanwhile, which the next upload takes
            self.store.write(f"{name}.json", listed)
            self._sent[name] = mark

    def _put_metrics(self, names: dict[str, int]) -> None:
        """Upload the new lines of metrics.jsonl; merge parts, so that there are few of them."""
        try:
            file = open_own(self.run.folder / "metrics.jsonl")
        except FileNotFoundError:
            return
        with file:
            if self._parts is None:  # a start may have dropped records that the mirror has
                self._parts = list(takewhile(partial(is_part_of, file), chain(names)))
            parts = self._parts
            begin = parts[-1].end if parts else 0
            size = file.seek(begin) + len(file.read().rpartition(b"\n")[0]) + 1
            if begin + 1 < size:
                while parts and parts[-1].size <= size - begin:
                    begin = parts.pop().begin
                file.seek(begin)
                content = file.read(size - begin)
                digest = hashlib.sha256(content).hexdigest()
                number = 1 + max((int(m[1]) for m in map(PART.fullmatch, names) if m), default=0)
                new = Part(number=number, begin=begin, size=len(content), digest=digest)
                self.store.write(new.name, content)
                parts.append(new)
        current = {part.name for part in parts}
        self.store.remove(*(n for n in names if PART.fullmatch(n) and n not in current))

    def _put_checkpoint(self, folder: Path, text: bytes, names: dict[str, int]) -> None:
        name = f"checkpoints/{folder.name}"
        if self._sent.get(name) == text:
            return
        files = json.loads(text)["manifest"]["files"]
        manifest = f"{name}/manifest.json"
        there = self.store.read(manifest) if manifest in names else b""
        if there != text:
            # an evaluation changes the manifest alone
            if parsed(there).get("manifest", {}).get("files") != files:
                self.store.remove(manifest)
                self.uploading = folder
                try:
                    transfer(
                        self.store.write,
                        (f"{name}/{f}" for f in files),
                        map(folder.joinpath, files),
                    )
                except FileNotFoundError:
                    if folder.exists():
                        raise
                    return  # it was removed before rotation knew that it is uploaded
                self._check_fence()
            self.store.write(manifest, text)
        self._sent[name] = text

    def _rotate(self, names: dict[str, int], state: dict[str, Any], newest: int) -> None:
        """Remove checkpoints that need not be kept, each one's manifest first."""
        # an older launch may have uploaded a newer one, which does not count
        steps = {newest, *(step for step in remote_steps(names) if step < newest)}
        for step in steps - kept_steps(steps, self.run.config.checkpoints, state):
            name = f"checkpoints/step_{step:08d}"
            files = [file for file in names if file.startswith(f"{name}/")]
            self.store.remove(f"{name}/manifest.json", *files)
            self._sent.pop(name, None)

    def _move_aside(self, names: dict[str, int], folder: str) -> None:
        """Move a folder of the mirror, or all of it, to an unused name beside it."""
        if folder:
            number = 1
            while any(name.startswith(f"{folder}.old-{number}/") for name in names):
                number += 1
            moved = [name for name in names if name.startswith(f"{folder}/")]
            self.store.move(moved, folder, f"{folder}.old-{number}")
            logger.warning(
                "%s/%s is newer than the chosen checkpoint: moved aside to .old-%d",
                self.store.url,
                folder,
                number,
            )
            return
        number = 1
        while (aside := Store(f"{self.store.url}.old-{number}")).sizes():
            number += 1
        whole = Store(self.store.url.rpartition("/")[0])
        old = self.store.url.rpartition("/")[2]
        new = aside.url.rpartition("/")[2]
        whole.move([f"{old}/{name}" for name in names], old, new)


def parsed(content: bytes) -> dict[str, Any]:
    """Return a JSON object; {} for what is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}


def mark_of(folder: Path) -> tuple[int, int]:
    """Return what changes when a folder is replaced by another one."""
    about = folder.stat()
    return about.st_ino, about.st_mtime_ns


def url_of(config: Config) -> str:
    """Return the URL of a run in its mirror."""
    return f"{config.checkpoints.mirror}".rstrip("/") + f"/{config.run_name}"


@contextmanager
def refused_without(store: Store) -> Iterator[None]:
    """Turn an error of a store into one that ends a start, which cannot do without."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(
            f"checkpoints.mirror {error}. Set the credentials of the store in the environment."
        ) from error
    except OSError as error:
        raise TransientError(
            f"checkpoints.mirror {store.url} cannot be used ({error}), so nobody knows what the run"
            " has saved there: see that the bucket exists and can be reached, or leave"
            " checkpoints.mirror out."
        ) from error


def start_mirror(accelerator: Accelerator, saving: Checkpoints) -> None:
    """Have the saves of a run uploaded, if it has a mirror. Called by every rank.

    Raises:
        ConfigError: nothing can be written there.
    """
    if saving.config.checkpoints.mirror:
        mirror = saving.mirror = Mirror(saving)
        on_main_then_broadcast(accelerator, mirror.begin)


def finish_mirror(accelerator: Accelerator, saving: Checkpoints, *, is_stop: bool) -> None:
    """Wait until the mirror has the end of a run. Called by every rank.

    Args:
        accelerator: of this process.
        saving: what saves the run.
        is_stop: the run was asked to stop, and has checkpoints.mirror_seconds for it.

    Raises:
        TransientError: the end of a run that has finished is not in the mirror, after some tries.
    """
    if mirror := saving.mirror:
        seconds = saving.config.checkpoints.mirror_seconds if is_stop else math.inf
        deadline = time.monotonic() + seconds
        # each is a collective, which has a timeout
        while not on_main_then_broadcast(accelerator, lambda: mirror.has_finished(deadline)):
            saving.run.note_progress()


# ---- downloads -----------------------------------------------------------------------------------
def fetch(config: Config) -> None:
    """Fetch what the mirror has of a run, and its folder lacks, if the run has a mirror.

    Called by every process before any process group starts: it may take long. One process of each
    node does it, since the folder may be local to a node.

    Raises:
        ConfigError: the mirror cannot be used, or holds another run.
    """
    if not config.checkpoints.mirror:
        return
    store, folder = Store(url_of(config)), Path(config.runs_folder)
    with until_all_are_done(folder, f"{config.run_name}.fetch"):
        fetch_in_turn(store, config.folder, starts_over=config.resume == "never")


def fetch_in_turn(store: Store, folder: Path, **more: Any) -> None:
    """Call fetch_run in one process of each node; where they share the folder, one goes first."""
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
    if local.run and max(steps, default=-1) <= newest and not is_copy:
        return
    logger.info("fetching %s", store.url)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            _fetch_folder(store, folder, name)
        for name in ("config.yaml", "status.json", "starts.jsonl"):
            if name in names:
                _fetch_text(store, folder / name)
        _fetch_metrics(store, folder / "metrics.jsonl", chain(names))
        newer = (step for step in reversed(steps) if step > newest)
        any(_fetch_checkpoint(store, folder, step, names) for step in newer)
        _fetch_text(store, folder / "run.json")


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


def local_copy(path: str) -> Path:
    """Return a path of this machine; what a URL names is fetched into a temporary folder.

    Args:
        path: a path, or the URL of a run in its mirror, of its best/ or export/ or of a checkpoint.

    Raises:
        ConfigError: there is nothing at the URL.
    """
    if "://" not in path:
        return Path(path)
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
