"""Save, rotate and load the state of a run.

    checkpoints/step_00000100/
      model.safetensors        with the keys of the plain module, without wrappers
      optimizer.safetensors    "<parameter>/<slot>" and "/<group>/<setting>", independent of the
                               world size
      ema.safetensors          the EMA weights, if optim.ema_decay is set
      manifest.json            written last: the SHA-256 of each file, and the rest of the state:
                               the step, the optimizer's settings and numbers, the results of
                               evaluations, the fp16 loss scale, precision and sharding
                               (accelerator.numerics), and the position in each lane of a
                               stream (loading/streams.py)

A tied weight is written once, under its first name; the file's metadata lists its other names.

A folder is written under a temporary name, flushed to disk, and renamed when it is complete. It
contains only tensors and JSON, so loading it never runs code. With FSDP, each rank writes its
shards to its own file, such as model.rank_00002.safetensors; any world size can read them. Random
states are not saved: random numbers follow from (seed, step), see loading/seeding.py.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .. import files, run_files
from .. import manifest as manifests
from ..config import ConfigError
from ..ema import EMA
from ..failures import CONSEQUENCES, exception_cause
from ..files import Json, TransientError, discard, flush_to_disk, write_atomically
from ..manifest import Manifest, read_manifest
from ..optim import has_two_views
from ..run_files import checkpoint_step
from ..run_folder import Run
from ..state import TrainState
from .resuming import kept_steps, move_newer_aside, remove
from .shards import (
    Shard,
    TensorReader,
    is_sharded,
    load_optimizer,
    model_tensors,
    optimizer_state,
    own_shard,
    plain_name,
    save_shards,
)

logger = logging.getLogger(__name__)
NICENESS = 10  # of the saving thread, not of the process: training gets the cores first
FIRST_SAVES = 4  # if the first 4 saves after a start fail, the run ends before it loses more steps
END_SECONDS = 20  # how long to wait for other ranks once a save has failed or a rank is gone

Read = Callable[[str], Tensor]  # reads a tensor by its name


class Checkpoints:
    """Load the training state; save it, and write best/ and export/, in background threads.

    Each job has its own thread, and begins when the previous job has ended.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.run = run
        self.config = run.config
        self.folder = run.folder / "checkpoints"
        self.rank = run.rank
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema: EMA | None = None  # if the run has one
        self.names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        # a tied weight has several names; files use the first
        every_name = model.named_parameters(remove_duplicate=False)
        self.first_names = {plain_name(name): self.names[id(p)] for name, p in every_name}
        self.aliases = {name: first for name, first in self.first_names.items() if name != first}
        self.writers = len(run.hosts) if is_sharded(model) else 1  # number of ranks that write
        self.failures: dict[str, Exception] = {}  # by kind of job: why the last one failed
        self.note = ""  # the newest failure, shown when the run ends even if a later save succeeded
        self.mirror: Any = None  # mirror.Mirror, if the run has one
        self._first_failed = 0.0  # number of failed saves; -inf once a save has succeeded
        self._save_seconds = 60 * run.config.checkpoints.minutes
        self._saved_at = time.monotonic()
        self._saved_step = -1  # step of the checkpoint last saved to or loaded from `folder`
        self._buffers: dict[str, Tensor] = {}
        self._optimizer_numbers: dict[str, float] = {}
        self._has_lost_contact = threading.Event()
        self._thread: threading.Thread | None = None  # runs the newest job

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        """Wait for the jobs, with a timeout if the run has failed."""
        if error is None:
            self.wait()
        elif self._thread:
            if exception_cause(error) in CONSEQUENCES:
                self._has_lost_contact.set()
            is_second_signal = not isinstance(error, Exception)
            self._thread.join(60 if is_second_signal else self.config.distributed.timeout_seconds)

    @property
    def is_due_by_time(self) -> bool:
        """Return whether checkpoints.minutes have passed since the last save; only on rank 0."""
        seconds = time.monotonic() - self._saved_at
        return self.rank == 0 and 0 < self._save_seconds < seconds

    def check_optimizer(self) -> None:
        """Refuse an optimizer that cannot be resumed. Called after each of the first two steps.

        Raises:
            ConfigError: a checkpoint cannot hold the optimizer's state, or the optimizer keeps a
                counter elsewhere.
        """
        optimizer_state(self.optimizer, self.names)
        before = self._optimizer_numbers
        items = vars(self.optimizer).items()
        numbers = {name: n for name, n in items if type(n) in (int, float) and name[0] != "_"}
        if changed := [name for name in before if before[name] != numbers.get(name)]:
            raise ConfigError(
                f"{type(self.optimizer).__name__} cannot be resumed: it keeps a counter in its"
                f" attribute {changed[0]}, not in its state. Choose another optim.class_path."
            )
        self._optimizer_numbers = numbers

    def save(self, train_state: TrainState) -> None:
        """Save the state after train_state.step steps. Called by every rank."""
        self.wait()
        if self.rank == 0:
            self.run.check_lock()
        if self.mirror:
            self.mirror.check()
        self._saved_at = time.monotonic()
        self._saved_step = train_state.step
        if self.rank >= self.writers:
            return
        settings, slots = optimizer_state(self.optimizer, self.names)
        if has_two_views(self.optimizer):
            settings["has_two_views"] = True  # so that nothing evaluates or exports these weights
        kinds = {"model": self._weights(), "optimizer": slots}
        if self.ema:
            kinds["ema"] = self.ema.named()
        shards = self._copy_to_host(kinds)
        scale = self.scaler.state_dict() if self.scaler else None
        state = train_state.to_dict() | {"optimizer": settings, "scaler": scale}
        text = json.dumps(state | {"numerics": self.run.numerics})  # before training changes it
        step = train_state.step
        folder = self.folder / f"step_{step:08d}"
        # named after this launch: without file locks, another launch may write the same step
        temporary = folder.with_name(f".{folder.name}_{self.run.token}.partial")

        def write() -> None:
            listed = self._write_shards(temporary, shards, self.aliases)
            if self.rank != 0:
                return
            self.run.check_lock()
            content: Manifest = {
                "format": manifests.FORMAT,
                "step": step,
                "files": listed,
                "resumed_from": self.run.resumed_from,
                "state": json.loads(text) | {"best_failed": "best" in self.failures},
                "provenance": vars(self.run.provenance),
            }
            manifests.complete(temporary, folder, content)
            self._rotate(content["state"])

        self._start("checkpoint", folder.name, write, temporary)

    def add_evaluation(self, state: TrainState) -> None:
        """Add the results of an evaluation to the checkpoint of its step, if there is one.

        The state is saved before the evaluation, so that a failed evaluation loses no step. The
        results go into the manifest, which is replaced atomically; no tensor is written again.
        """
        # if this process has not saved this step, a checkpoint of it is from another branch of the
        # run
        if self.rank != 0 or self._saved_step != state.evaluated_step:
            return
        saved = state.to_dict()
        folder = self.folder / f"step_{state.evaluated_step:08d}"

        def write() -> None:
            if "best" in self.failures and saved["best_step"] == saved["evaluated_step"]:
                return  # without these results, a run resumed from here evaluates again
            try:
                content = read_manifest(folder)
            except ValueError:  # no checkpoint was saved at this step
                return
            content["state"] |= saved | {"best_failed": "best" in self.failures}
            self.run.check_lock()
            write_atomically(folder / "manifest.json", manifests.manifest_text(content))
            flush_to_disk(folder)
            self._rotate(saved)

        self._start("evaluation", f"the evaluation of {folder.name}", write)

    def replace_export(
        self,
        folder: Path,
        fill: Callable[[Path], None],
        weights: dict[str, Tensor],
        saved_names: dict[str, str | None],
        write: Callable[[Path, Read], None],
    ) -> None:
        """Replace best/ or export/ once the previous jobs have ended. Called by every rank.

        The weights are read from the checkpoint of this step. If there is none, or if it lacks some
        of the weights, each rank's thread first writes the rank's shards to a temporary folder,
        without a collective, as a save does.

        Args:
            folder: best/ or export/.
            fill: writes files into the temporary folder; called by rank 0, immediately.
            weights: the tensors to write, by the same names on all ranks; {} if `fill` writes them.
            saved_names: the names of these tensors in a checkpoint; None if a tensor is not saved.
            write: writes the weights into the temporary folder, given a function that reads a
                tensor by its name; called by rank 0 in the thread.
        """
        # if several ranks write, all must decide alike, but a rank may not know that a save failed
        has_failed = self.writers == 1 and "checkpoint" in self.failures
        is_of_step = self._saved_step == self.run.step and not has_failed
        is_saved = is_of_step and None not in saved_names.values()
        # with two views, a checkpoint has the weights of optimizer.train(), not those to export
        is_saved &= not has_two_views(self.optimizer)
        if not is_saved:
            self.wait()  # until no job uses the buffers and the temporary folder
        if self.rank >= self.writers:
            return
        stem = f".{folder.name}_{self.run.step:08d}_{self.run.token}"  # see `save`
        temporary = folder.with_name(f"{stem}.partial")
        parts = folder.with_name(f"{stem}.shards.partial")
        saved = self.folder / f"step_{self.run.step:08d}"
        shards = {} if is_saved or not weights else self._copy_to_host({"model": weights})
        failure: Exception | None = None
        if self.rank == 0:
            self.run.check_lock()
            discard(temporary)
            try:
                temporary.mkdir(parents=True)
                fill(temporary)
            except Exception as error:
                failure = error  # raised in the thread, once the other ranks have written shards

        def write_all() -> None:
            listed = self._write_shards(parts, shards, {}) if shards else {}
            if self.rank != 0:
                return
            if failure:
                raise failure
            if shards:
                write(temporary, TensorReader(parts, "model", listed).read)
            elif weights:
                read: Read = TensorReader(saved, "model").read
                if self.ema:
                    read = self.ema.reader(saved, read, self.first_names)
                write(temporary, lambda name: read(saved_names[name] or ""))
            self.run.check_lock()
            for path in temporary.rglob("*"):  # a recipe's export may have subfolders
                flush_to_disk(path)
            manifests.put_in_place(temporary, folder)

        self._start(folder.name, f"{folder.name}/", write_all, parts, temporary)

    def _start(self, kind: str, name: str, job: Callable[[], None], *temporary: Path) -> None:
        """Run a job in a thread after the previous jobs; wait if checkpoints.background is false.

        Args:
            kind: the kind of job; a failure is kept until a job of this kind succeeds.
            name: the name of what the job writes.
            job: the function that writes it.
            temporary: folders that rank 0 removes afterward.
        """
        before = self._thread

        def work() -> None:
            torch.set_num_threads(1)  # for this thread only: training keeps its number of threads
            if sys.platform == "linux":
                os.nice(NICENESS)
            if before:
                before.join()
            try:
                job()
                self.failures.pop(kind, None)
                if self.mirror:
                    self.mirror.upload()
                if kind == "checkpoint":
                    self._first_failed = -math.inf
            except Exception as error:
                self.note = f"{name} could not be saved: {error}".removesuffix(".")
                logger.error("%s. The earlier files are unchanged.", self.note)
                self.failures[kind] = error
                # SafetensorError may come from a recipe's export, ConfigError from a TensorReader
                may_pass = isinstance(error, (OSError, SafetensorError, ConfigError))
                if may_pass and not isinstance(error, TransientError):  # from Run.check_lock
                    self.failures[kind] = OSError(self.note)
                    self.failures[kind].__cause__ = error
                self._first_failed += kind == "checkpoint"
            finally:
                for folder in temporary if self.rank == 0 else ():
                    discard(folder)

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()
        is_last_try = self._first_failed >= FIRST_SAVES - 1
        if is_last_try or not self.config.checkpoints.background:
            self.wait()

    def wait(self) -> None:
        """Wait for the jobs.

        Raises:
            Exception: a job failed for a reason other than the disk, or the first FIRST_SAVES saves
                of this process all failed.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
            for failure in self.failures.values():
                if not isinstance(failure, OSError):
                    raise failure
            if self._first_failed >= FIRST_SAVES:
                raise OSError(f"all {FIRST_SAVES} saves since the start have failed: {self.note}")

    def check(self, *kinds: str) -> None:
        """Raise the error if the last job of one of these kinds failed. Called as a run ends."""
        for kind in kinds:
            if failure := self.failures.get(kind):
                raise failure

    # ---- loading ---------------------------------------------------------------------------------
    def resume(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint whose hashes have been checked; return its state without the tensors.

        Newer checkpoints are moved aside only after the load, since this one may not fit the model.
        """
        try:
            state = self.load(folder)
        except (LookupError, TypeError, AttributeError) as error:  # untrusted values, of any type
            problem = f"its manifest.json is not that of a checkpoint ({error!r})"
            raise ConfigError(f"{folder} cannot be used: {problem}.") from error
        move_newer_aside(self.run, state["step"])
        return state

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore tensors and the fp16 loss scale in place; return the rest of the state."""
        self.run.continued_from = str(folder)
        manifest = read_manifest(folder)
        state = manifest["state"]
        listed = manifest["files"].keys()
        saved, scale = state.pop("optimizer"), state.pop("scaler")
        self.run.compare_numerics(folder, state.pop("numerics"))
        if state.pop("best_failed", False):
            text = "best/ could not be saved at step %s: the next evaluation counts as the best"
            logger.warning(text, state["best_step"])
            state |= {"best": None, "evaluated_step": -1}
        TensorReader(folder, "model", listed).fill(model_tensors(self.model))
        has_slots = any(name.startswith("optimizer.") for name in listed)  # plain SGD has none
        slots = TensorReader(folder, "optimizer", listed) if has_slots else None
        load_optimizer(self.optimizer, self.names, folder, saved, slots)
        if self.ema:
            TensorReader(folder, "ema", listed).fill(self.ema.named())
        if self.scaler and scale:
            self.scaler.load_state_dict(scale)
        elif self.scaler or scale:
            logger.warning("%s has a different precision: its fp16 loss scale is not used", folder)
        if folder.parent.resolve() == self.folder.resolve():
            self._saved_step = state["step"]
        return state

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights and buffers by name; a tied weight by its first name."""
        tensors = model_tensors(self.model)
        return {name: tensors[name] for name in tensors if self.aliases.get(name) not in tensors}

    # ---- what this rank writes -------------------------------------------------------------------
    def _copy_to_host(self, kinds: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        """Copy this rank's shards into reused host buffers, which are pinned for GPU tensors.

        If checkpoints.background is false, tensors on the CPU are written without a copy.
        """
        shards: dict[str, dict[str, Shard]] = {kind: {} for kind in kinds}
        on_gpu = False
        for kind, tensors in kinds.items():
            for name, whole in tensors.items():
                shard = own_shard(whole, self.rank)
                if shard is None:
                    continue
                shards[kind][name] = shard
                tensor, key = shard.tensor, f"{kind} {name}"
                if not (tensor.is_cuda or self.config.checkpoints.background):
                    continue
                buffer = self._buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    pinned = tensor.is_cuda
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                    self._buffers[key] = buffer
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                on_gpu |= tensor.is_cuda
                shards[kind][name] = Shard(buffer, shard.offset, shard.shape)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return shards

    def _write_shards(
        self, temporary: Path, shards: dict[str, dict[str, Shard]], aliases: dict[str, str]
    ) -> dict[str, str]:
        """Write one file per kind; ranks other than 0 also leave a file that reports the outcome.

        Returns:
            The SHA-256 of each file by name; on rank 0, for the files of all ranks.
        """
        part = f".rank_{self.rank:05d}" if self.writers > 1 else ""
        listed: dict[str, str] = {}
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            for kind, named in shards.items():
                if named:
                    path = temporary / f"{kind}{part}.safetensors"
                    listed[path.name] = save_shards(named, path, aliases if kind == "model" else {})
                    flush_to_disk(path)
            if self.rank != 0:
                write_atomically(temporary / f"written{part}", json.dumps(listed))
                if self.mirror:
                    self.mirror.send_parts(temporary)
        except Exception:
            with suppress(OSError):
                if self.rank != 0:
                    (temporary / f"failed{part}").touch()
                    if self.mirror:
                        self.mirror.send_parts(temporary)
                else:  # the folder is removed afterward, so no rank may still write into it
                    self._await_other_ranks(temporary, END_SECONDS)
            raise
        if self.rank != 0:
            return listed
        limit = self.config.distributed.startup_timeout_seconds
        return listed | self._await_other_ranks(temporary, limit)

    def _await_other_ranks(self, temporary: Path, seconds: float) -> dict[str, str]:
        """Wait until the other ranks have reported their files; return the SHA-256 of each file."""
        waiting = {f"rank_{rank:05d}": rank for rank in range(1, self.writers)}
        names, failed = [*waiting], []

        def have_reported() -> bool:
            if self.mirror:
                self.mirror.collect_parts(temporary)
            # list the folder once: to check for each rank's file would take N requests per poll
            for report in os.listdir(temporary):
                word, _, name = report.partition(".")
                if name in waiting and word in ("written", "failed"):
                    rank = waiting.pop(name)
                    failed.extend([rank] * (word == "failed"))
            return not waiting

        def is_over() -> bool:
            return have_reported() or bool(failed) or self._has_lost_contact.is_set()

        files.wait_until(is_over, seconds, poll_seconds=0.05)
        # let the other ranks end their writing before the folder is removed
        if failed or self._has_lost_contact.is_set():
            files.wait_until(have_reported, END_SECONDS, poll_seconds=0.05)
        if failed:
            host = self.run.hosts[min(failed)]
            raise OSError(f"rank {min(failed)} on {host} could not write its shards")
        if waiting:
            raise OSError(f"{', '.join(waiting)} did not report their shards in time")
        listed: dict[str, str] = {}
        for name in names:
            report = temporary / f"written.{name}"
            listed |= json.loads(report.read_text(encoding="utf-8"))
            report.unlink()
        return listed

    def _rotate(self, state: dict[str, Json]) -> None:
        """Remove checkpoints that need not be kept, if they contain only files of their manifest.

        No checkpoint is removed while steps are skipped: the weights may have become NaN, in which
        case every later step is skipped, and only an earlier checkpoint is useful.
        """
        if state["consecutive_skipped_steps"]:
            return
        saved = run_files.checkpoints(self.run.folder)
        kept = kept_steps(map(checkpoint_step, saved), self.config.checkpoints, state)
        if self.mirror:
            kept |= self.mirror.needed
        for folder in saved:
            if checkpoint_step(folder) not in kept:
                try:
                    remove(folder)
                except OSError as error:  # the new checkpoint is complete, so the save has worked
                    logger.warning("%s could not be removed: %s", folder, error)
