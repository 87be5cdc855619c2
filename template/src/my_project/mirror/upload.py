"""Upload a run to its mirror, in a thread of rank 0.

The run folder stays the truth while the machine lives. What is new is uploaded after each save; a
slow or failed upload costs no step, and the next save tries again.
"""

import hashlib
import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..checkpoint.resuming import kept_steps, remove
from ..checkpoint.saving import Checkpoints
from ..config import ConfigError
from ..files import TransientError, open_own
from ..ranks import on_main_then_broadcast
from ..run_files import checkpoints, step_of, write_status
from .store import (
    FOLDERS,
    PART,
    Part,
    Store,
    chain,
    is_part_of,
    parsed,
    refused_without,
    remote_steps,
    sha256_of,
    transfer,
    url_of,
    without_small,
)

logger = logging.getLogger(__name__)
FILES = ("config.yaml", "run.json", "status.json", "starts.jsonl")  # uploaded whole when changed
WAIT_SECONDS = 20.0  # between two collectives while rank 0 uploads
COLLECT_SECONDS = 1.0  # between two looks for what other nodes have written
PARTS = "parts"  # of saves, on their way from other nodes to rank 0
TRIES = 4  # of the last upload of a run


def start_mirror(accelerator: Accelerator, saving: Checkpoints) -> None:
    """Have the saves of a run uploaded, if it has a mirror. Called by every rank.

    Raises:
        ConfigError: nothing can be written there.
    """
    if saving.config.checkpoints.mirror:
        mirror = saving.mirror = Mirror(saving)
        on_main_then_broadcast(accelerator, mirror.begin)
        mirror.share_status(accelerator)
        if not mirror.run.is_shared and not mirror.has_disk_of_rank_0:
            # what earlier starts have fetched to this node
            for folder in checkpoints(mirror.run.folder)[: -saving.config.checkpoints.keep]:
                remove(folder)


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
        mirror.share_status(accelerator)


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
        self._collected_at = -math.inf
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
            self.store.remove(*(name for name in names if name.startswith(f"{PARTS}/")))
            # from here on an older launch uploads nothing more
            for name in ("config.yaml", "run.json", "status.json"):
                self._put_file(name)
            folders = {name.rpartition("/")[0] for name in names}
            for folder in folders:  # what a killed upload has left
                if is_checkpoint(folder) and f"{folder}/manifest.json" not in names:
                    self.store.remove(*(n for n in names if n.startswith(f"{folder}/")))
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

    @property
    def failure(self) -> Exception | None:
        """Return why the newest upload has failed; None if it has not."""
        return self._superseded or self._failure

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

    @property
    def needed(self) -> set[int]:
        """Return the step of a checkpoint that is being uploaded and must not be removed."""
        return {step_of(self.uploading)} if self.uploading else set()

    # ---- nodes without shared storage ------------------------------------------------------------
    @property
    def has_disk_of_rank_0(self) -> bool:
        """Return whether this rank is on the host of rank 0."""
        return self.run.hosts[self.run.rank] == self.run.hosts[0]

    def share_status(self, accelerator: Accelerator) -> None:
        """Write rank 0's status.json on nodes with other disks, whose launchers read it."""
        if not self.run.is_shared:
            status = on_main_then_broadcast(accelerator, self.run.status)
            if not self.has_disk_of_rank_0:
                self.run.folder.mkdir(parents=True, exist_ok=True)
                write_status(self.run.folder, status)

    def send_parts(self, temporary: Path) -> None:
        """Send what this rank has written of a save to rank 0, where it has another disk.

        Args:
            temporary: the folder of the save, on this node.
        """
        if self.run.is_shared or self.has_disk_of_rank_0:
            return
        own = [path for path in temporary.iterdir() if f"rank_{self.run.rank:05d}" in path.name]
        # its report comes last
        for path in sorted(own, key=lambda path: path.suffix != ".safetensors"):
            self.store.write(f"{PARTS}/{temporary.name}/{path.name}", path)
            path.unlink()
        with suppress(OSError):  # other ranks of this node write there
            temporary.rmdir()

    def collect_parts(self, temporary: Path) -> None:
        """Fetch what ranks on other nodes have written of a save. Called by rank 0, repeatedly.

        Args:
            temporary: the folder of the save, on this node.
        """
        if self.run.is_shared or time.monotonic() < self._collected_at + COLLECT_SECONDS:
            return
        self._collected_at = time.monotonic()
        names = self.store.sizes(f"{PARTS}/{temporary.name}")
        for report in (name for name in names if not name.endswith(".safetensors")):
            rank = report.rpartition(".")[2]
            own = [name for name in names if f".{rank}." in name]
            for name in (*own, report):
                self.store.fetch(name, temporary / name.rpartition("/")[2])
            self.store.remove(*own, report)

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
        manifests = []
        for folder in checkpoints(self.run.folder):
            with suppress(FileNotFoundError):  # a save has removed it just now
                manifests.append((folder, (folder / "manifest.json").read_bytes()))
        for name in FOLDERS:
            with suppress(FileNotFoundError):  # it is being replaced, and another upload follows
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
        codes = (path for path in self.run.folder.glob("starts/*/*") if path.is_file())
        for name in (*(str(path.relative_to(self.run.folder)) for path in codes), *FILES):
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
            path = self.run.folder / name
            if self._sent.get(name) != (digest := sha256_of(path)):
                self.store.write(name, path)
                self._sent[name] = digest

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
            end = self._parts[-1].end if self._parts else 0
            size = file.seek(end) + len(file.read().rpartition(b"\n")[0]) + 1  # of whole lines
            if end + 1 < size:
                kept = without_small(self._parts, size)
                begin = kept[-1].end if kept else 0
                file.seek(begin)
                content = file.read(size - begin)
                digest = hashlib.sha256(content).hexdigest()
                number = 1 + max((int(m[1]) for m in map(PART.fullmatch, names) if m), default=0)
                new = Part(number=number, begin=begin, size=len(content), digest=digest)
                self.store.write(new.name, content)
                self._parts = [*kept, new]
        current = {part.name for part in self._parts}
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


def is_checkpoint(name: str) -> bool:
    """Return whether a folder of a mirror has the name of a checkpoint."""
    parent, _, folder = name.rpartition("/")
    return parent == "checkpoints" and step_of(Path(folder)) >= 0


def mark_of(folder: Path) -> tuple[int, int]:
    """Return what changes when a folder is replaced by another one."""
    about = folder.stat()
    return about.st_ino, about.st_mtime_ns
