"""Upload a run to its mirror, in a thread of rank 0.

The run folder stays authoritative while the machine lives. What is new is uploaded after each save;
training does not wait for an upload, and if one fails, the next save tries again.
"""

import hashlib
import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from pathlib import Path

from accelerate import Accelerator

from ..checkpoint.resuming import kept_steps, remove
from ..checkpoint.saving import Checkpoints
from ..config import ConfigError
from ..files import Json, TransientError, open_own, write_atomically
from ..ranks import on_main_then_broadcast
from ..run_files import checkpoint_step, checkpoints, read_info, write_status
from .store import (
    FOLDERS,
    FULL,
    IN_CHECKPOINT,
    Part,
    Store,
    chain,
    checkpoint_name,
    complete_steps,
    is_part_of,
    parts_among,
    parts_to_keep,
    sha256_of,
    store_needed,
    transfer,
    url_of,
)

logger = logging.getLogger(__name__)
FILES = ("config.yaml", "run.json", "status.json", "starts.jsonl")  # uploaded whole when changed
WAIT_SECONDS = 20.0  # time between two collectives while rank 0 uploads
COLLECT_SECONDS = 1.0  # time between two listings of what other nodes have written
PARTS = "parts"  # the folder for files of saves, on their way from other nodes to rank 0
TRIES = 4  # the number of tries for the last upload of a run


def start_mirror(accelerator: Accelerator, saving: Checkpoints) -> None:
    """If the run has a mirror, upload its saves from now on. Called by every rank.

    Raises:
        ConfigError: nothing can be written to the mirror.
    """
    if saving.config.checkpoints.mirror:
        mirror = saving.mirror = Mirror(saving)
        on_main_then_broadcast(accelerator, mirror.begin)
        mirror.share_status(accelerator)
        if mirror.has_other_disk and mirror.run.is_first_on_disk:
            # the node still has the checkpoints that earlier starts fetched
            for folder in checkpoints(mirror.run.folder)[: -saving.config.checkpoints.keep]:
                remove(folder)


def finish_mirror(accelerator: Accelerator, saving: Checkpoints, *, is_stop: bool) -> None:
    """Wait until the mirror contains the final state of a run. Called by every rank.

    Args:
        accelerator: this process's Accelerator.
        saving: the run's Checkpoints.
        is_stop: whether the run was told to stop; this function then waits at most mirror_seconds.

    Raises:
        TransientError: the run has finished, but its end could not be uploaded in TRIES tries, or
            another launch has taken over the mirror.
    """
    if mirror := saving.mirror:
        seconds = saving.config.checkpoints.mirror_seconds if is_stop else math.inf
        deadline = time.monotonic() + seconds
        # each call is a collective, which has a timeout
        while not on_main_then_broadcast(accelerator, lambda: mirror.has_finished(deadline)):
            saving.run.note_progress()
        mirror.share_status(accelerator)


class Mirror:
    """Upload a run, in a thread of rank 0."""

    def __init__(self, saving: Checkpoints) -> None:
        """Upload nothing yet; `begin` starts the thread, on rank 0."""
        self.run = saving.run
        self.saving = saving
        self.store = Store(url_of(self.run.config))
        self.needed: set[int] = set()  # the step of the checkpoint being uploaded: it must stay
        self.failure: Exception | None = None  # why the newest upload failed
        self._superseded: ConfigError | None = None  # another launch has begun the run
        self._sent: dict[str, object] = {}  # what the mirror contains so far, by name
        self._parts: list[Part] | None = None  # the parts of metrics.jsonl in the mirror
        self._requested = self._done = 0  # count the calls of `upload`; a failed one is done too
        self._tries = 0  # the number of tries for the run's last upload
        self._collected_at = -math.inf
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Take over the mirror for this launch, and move aside what does not belong to its run.

        Raises:
            ConfigError: nothing can be written to the mirror.
        """
        with store_needed(self.store):
            names = self.store.names()
            before = self.store.read_json("run.json").get("run")
            if before not in (None, self.run.id):  # most often after --resume never
                self.store.move_aside()
                names = []
            for step in complete_steps(names):
                if step > self.run.step:  # damaged, or of a different branch of the run
                    newer = Store(f"{self.store.url}/{checkpoint_name(step)}")
                    aside = newer.move_aside()
                    text = "%s is newer than the chosen checkpoint: moved aside to %s"
                    logger.warning(text, newer.url, aside)
            self.store.remove(*(name for name in names if name.startswith(f"{PARTS}/")))
            # once run.json is in the mirror, an older launch begins no further upload
            for name in ("config.yaml", "run.json", "status.json"):
                self._put_file(name)
            matches = filter(None, map(IN_CHECKPOINT.fullmatch, names))
            complete = {*map(checkpoint_name, complete_steps(names))}
            # files of checkpoints whose upload was killed
            for match in (match for match in matches if match[1] not in complete):
                self.store.remove(match[0], f"{match[1]}/manifest.json")
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def check(self) -> None:
        """Raise a TransientError if another launch has taken over the mirror."""
        if self._superseded:
            raise self._superseded

    def upload(self) -> None:
        """Ask the thread to upload what is new; return immediately."""
        with self._changed:
            self._requested += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until no upload is pending; return False if one is still pending after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done == self._requested, seconds)

    def has_finished(self, deadline: float) -> bool:
        """Wait up to WAIT_SECONDS for the run's last upload; return whether the wait is over.

        Args:
            deadline: when to stop waiting, as time.monotonic(). If it is math.inf, a failure of all
                tries is an error; otherwise, a warning.

        Raises:
            TransientError: all tries have failed, or another launch has taken over the mirror.
        """
        if not self._tries:
            self._tries = 1
            self.upload()
        left = max(0.0, deadline - time.monotonic())
        is_over = self.wait(min(WAIT_SECONDS, left))
        self.check()
        if is_over and not self.failure:
            return True
        if left and not is_over:
            return False
        if left and self._tries < TRIES:
            time.sleep(min(left, 2.0**self._tries))
            self._tries += 1
            self.upload()
            return False
        if deadline == math.inf:
            raise TransientError(f"the run has ended, but {self.saving.note}")
        reason = self.failure or "checkpoints.mirror_seconds have passed"
        text = "%s lacks what this start saved last, which is only in %s: %s"
        logger.warning(text, self.store.url, self.run.folder, reason)
        return True

    # ---- nodes without shared storage ------------------------------------------------------------
    @property
    def has_other_disk(self) -> bool:
        """Return whether this rank writes to a different disk than rank 0."""
        return not self.run.is_shared and self.run.hosts[self.run.rank] != self.run.hosts[0]

    def share_status(self, accelerator: Accelerator) -> None:
        """Write rank 0's status.json and run.json on other disks, for the launchers there."""
        if not self.run.is_shared:
            folder = self.run.folder
            status = on_main_then_broadcast(accelerator, self.run.status)
            info = on_main_then_broadcast(accelerator, lambda: asdict(read_info(folder)))
            if self.has_other_disk:
                folder.mkdir(parents=True, exist_ok=True)
                write_status(folder, status)
                write_atomically(folder / "run.json", json.dumps(info, indent=1) + "\n")

    def send_parts(self, temporary: Path) -> None:
        """Send this rank's parts of a save to rank 0, if rank 0 has a different disk.

        Args:
            temporary: the folder of the save, on this node.
        """
        if not self.has_other_disk:
            return
        own = [path for path in temporary.iterdir() if f"rank_{self.run.rank:05d}" in path.name]
        # the report (written.rank_* or failed.rank_*) comes last: rank 0 waits for it
        for path in sorted(own, key=lambda path: path.suffix != ".safetensors"):
            self.store.write(f"{PARTS}/{temporary.name}/{path.name}", path)
            path.unlink()
        with suppress(OSError):  # not empty: other ranks of this node still write there
            temporary.rmdir()

    def collect_parts(self, temporary: Path) -> None:
        """Fetch the parts of a save from ranks on other nodes. Called by rank 0, repeatedly.

        If a request fails, the next call tries again.

        Args:
            temporary: the folder of the save, on this node.
        """
        if self.run.is_shared or time.monotonic() < self._collected_at + COLLECT_SECONDS:
            return
        self._collected_at = time.monotonic()
        try:
            names = self.store.names(f"{PARTS}/{temporary.name}")
            for report in (name for name in names if not name.endswith(".safetensors")):
                rank = report.rpartition(".")[2]
                own = [name for name in names if f".{rank}." in name]
                for name in (*own, report):
                    self.store.fetch(name, temporary / name.rpartition("/")[2])
                self.store.remove(*own, report)
        except OSError as error:
            if error.errno in FULL:
                raise
            logger.warning("the shards of other nodes cannot be fetched now: %s", error)

    # ---- the thread ------------------------------------------------------------------------------
    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._requested)
                requested = self._requested
            try:
                self._upload_new()
                self.failure = None
            except ConfigError as error:
                self._superseded = error
            except Exception as error:
                self.failure = error
                note = f"the mirror could not be brought up to date: {error}".removesuffix(".")
                self.saving.note = note
                logger.warning("%s. The next save tries again.", self.saving.note)
            finally:
                self.needed = set()
            with self._changed:
                self._done = requested
                self._changed.notify_all()

    def _upload_new(self) -> None:
        """Upload what is new, in an order such that a kill at any time loses no record."""
        self._check_fence()
        # manifests are read first and uploaded after best/ and the records they refer to
        manifests = []
        for folder in checkpoints(self.run.folder):
            with suppress(FileNotFoundError):  # a save has removed it just now
                manifests.append((folder, (folder / "manifest.json").read_bytes()))
        for name in FOLDERS:
            with suppress(FileNotFoundError):  # it is being replaced, and another upload follows
                self._put_folder(name)
        names = self.store.names()
        self._put_metrics(names)
        if manifests:
            newest, text = manifests[-1]
            state = json.loads(text)["manifest"]["state"]
            steps = {checkpoint_step(folder) for folder, _ in manifests}
            # the newest one and those that the rotation keeps; it would soon remove the others
            wanted = kept_steps(steps, self.run.config.checkpoints, state, keep=1)
            are_sent = [
                self._put_checkpoint(folder, text)
                for folder, text in reversed(manifests)
                if checkpoint_step(folder) in wanted
            ]
            if all(are_sent) and not state["consecutive_skipped_steps"]:
                self._rotate(names, state, checkpoint_step(newest))
        codes = (path for path in self.run.folder.glob("starts/*/*") if path.is_file())
        for name in (*(str(path.relative_to(self.run.folder)) for path in codes), *FILES):
            self._put_file(name)

    def _check_fence(self) -> None:
        # if run.json cannot be read, this upload fails; only another launch's run.json ends the run
        if json.loads(self.store.read("run.json")).get("launch") != self.run.token:
            raise TransientError(
                f"another launch has begun this run at {self.store.url}, so this older one ends"
                " and uploads nothing more: choose another --run_name for one of them."
            )

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
        hashes = {file: sha256_of(path) for file, path in paths.items()}
        if self.store.read_json(f"{name}.json") != hashes:  # equal if an earlier start sent them
            before = self.store.names(name)
            self.store.remove(f"{name}.json")
            names = [f"{name}/{file}" for file in paths]
            transfer(self.store.write, names, paths.values())
            self.store.remove(*{*before}.difference(names))
            if mark_of(folder) != mark:  # it was replaced meanwhile, and another upload follows
                return
            self.store.write(f"{name}.json", json.dumps(hashes).encode())
        self._sent[name] = mark

    def _put_metrics(self, names: list[str]) -> None:
        """Upload the new lines of metrics.jsonl; merge parts, so that there are few of them."""
        listed = parts_among(names)
        with suppress(FileNotFoundError), open_own(self.run.folder / "metrics.jsonl") as file:
            if self._parts is None:  # this start may have dropped records that the mirror contains
                self._parts = list(takewhile(partial(is_part_of, file), chain(listed)))
            end = self._parts[-1].end if self._parts else 0
            # the size of the whole lines
            size = file.seek(end) + len(file.read().rpartition(b"\n")[0]) + 1
            if end + 1 < size:
                kept = parts_to_keep(self._parts, size)
                begin = kept[-1].end if kept else 0
                file.seek(begin)
                content = file.read(size - begin)
                digest = hashlib.sha256(content).hexdigest()
                number = 1 + max((part.number for part in listed), default=0)
                new = Part(number=number, begin=begin, size=len(content), digest=digest)
                self.store.write(new.name, content)
                self._parts = [*kept, new]
            self.store.remove(*(part.name for part in listed if part not in self._parts))

    def _put_checkpoint(self, folder: Path, text: bytes) -> bool:
        """Upload a checkpoint; return False if a save has removed it meanwhile."""
        name = f"checkpoints/{folder.name}"
        if self._sent.get(name) == text:
            return True
        content, manifest = json.loads(text), f"{name}/manifest.json"
        files = content["manifest"]["files"]
        remote = self.store.read_json(manifest)
        if remote != content:
            # an evaluation changes the manifest alone
            if remote.get("manifest", {}).get("files") != files:
                self.store.remove(manifest)
                self.needed = {checkpoint_step(folder)}
                names = [f"{name}/{file}" for file in files]
                try:
                    transfer(self.store.write, names, map(folder.joinpath, files))
                except FileNotFoundError:
                    if folder.exists():
                        raise
                    return False  # the rotation removed the checkpoint before reading `needed`
                self._check_fence()
            self.store.write(manifest, text)
        self._sent[name] = text
        return True

    def _rotate(self, names: list[str], state: dict[str, Json], newest: int) -> None:
        """Remove checkpoints that need not be kept, the manifest of each first.

        This includes partial uploads of checkpoints that a save removed during the upload.
        """
        # an older launch may have uploaded a checkpoint of a later step: do not count it
        steps = {newest, *(step for step in complete_steps(names) if step < newest)}
        kept = kept_steps(steps, self.run.config.checkpoints, state)
        older = {int(match[2]) for match in map(IN_CHECKPOINT.fullmatch, names) if match}
        for name in map(checkpoint_name, {step for step in older if step < newest} - kept):
            files = [file for file in names if file.startswith(f"{name}/")]
            self.store.remove(f"{name}/manifest.json", *files)
            self._sent.pop(name, None)


def mark_of(folder: Path) -> tuple[int, int]:
    """Return values that change when a folder is replaced."""
    stat = folder.stat()
    return stat.st_ino, stat.st_mtime_ns
