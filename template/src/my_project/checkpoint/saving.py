"""Save, rotate and restore the state of a run.

    checkpoints/step_00000100/
      model.safetensors        with the keys of the plain module, without wrappers
      optimizer.safetensors    "<parameter>/<slot>", independent of the world size
      ema.safetensors          the EMA, with optim.ema_decay
      state.json               the step, the optimizer's non-tensor state, the best value, the fp16
                               loss scale, the numerics of the run, the states of a stream's lanes
      manifest.json            size and SHA-256 of each file, written last; evaluation results;
                               the --resume path at which the run began

A folder is written under a temporary name, flushed to disk, and renamed when it is complete. It
holds tensors and JSON only, so that loading never runs code. Each rank writes its shards (FSDP) to
a file of its own, such as model.rank_00002.safetensors; any world size can read them. Random states
are not saved: random numbers follow from (seed, step), see loading/seeding.py.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import ConfigError
from ..files import (
    FORMAT,
    complete,
    fill_temporary,
    fingerprint,
    flush_to_disk,
    manifest_text,
    put_in_place,
    read_manifest,
    step_of,
    wait_until,
    write_atomically,
)
from ..optim import EMA
from ..run_folder import Run
from ..state import EVALUATION, TrainState
from .resuming import checkpoints, mark_of, move_newer_aside, remove
from .shards import (
    Shard,
    TensorReader,
    model_tensors,
    own_shard,
    plain_name,
    save_shards,
)

logger = logging.getLogger(__name__)
REMOVAL_SECONDS = 60  # waited for other ranks before a folder that they may write to is removed


class Checkpoints:
    """Save and load the training state; one save at a time, in a background thread by default."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        ema: EMA | None,
    ) -> None:
        self.run = run
        self.config = run.config
        self.folder = run.folder / "checkpoints"
        self.rank = run.rank
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        self.failure: Exception | None = None  # of the last save
        self.best_failure: Exception | None = None  # of the last best/
        self._saved_at = time.monotonic()
        self._buffers: dict[str, Tensor] = {}
        self._listed: Collection[str] = ()  # the files of the checkpoint that load reads
        self._thread: threading.Thread | None = None  # the newest; it waits for those before
        self._best_thread: threading.Thread | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Wait for the current save, with a timeout if the run has failed."""
        if kind is None:
            self.wait()
        elif self._thread:
            is_second_signal = not issubclass(kind, Exception)
            self._thread.join(60 if is_second_signal else self.config.distributed.timeout_seconds)

    @property
    def note(self) -> str:
        """Return a note for the status if the last save or best/ has failed; otherwise ""."""
        if self.failure:
            return f"the last checkpoint could not be saved: {self.failure}"
        if self.best_failure:
            return f"the last best/ could not be written: {self.best_failure}"
        return ""

    @property
    def is_due(self) -> bool:
        """Return whether the last save is too long ago; only the clock of rank 0 is asked."""
        seconds = 60 * self.config.checkpoints.minutes if self.rank == 0 else 0
        return seconds > 0 and time.monotonic() - self._saved_at > seconds

    def save(self, train_state: TrainState, *, by_time: bool = False) -> None:
        """Save the state after train_state.step steps, marked if by time. Called by every rank."""
        self.wait()
        self._saved_at = time.monotonic()
        state = train_state.to_dict()  # a copy: training goes on
        groups, numbers, slots = self._optimizer_state()
        kinds: dict[str, dict[str, Tensor]] = {
            "model": model_tensors(self.model),
            "optimizer": slots,
        }
        if self.ema:
            kinds["ema"] = self._ema_tensors(self.ema)
        sharded = any(
            isinstance(t, DTensor) for tensors in kinds.values() for t in tensors.values()
        )
        if self.rank != 0 and not sharded:
            return
        shards = {
            kind: {
                name: shard
                for name, tensor in tensors.items()
                if (shard := own_shard(tensor, self.rank))
            }
            for kind, tensors in kinds.items()
        }
        background = self.config.checkpoints.background
        if background or any(t.is_cuda for t in kinds["model"].values()):
            shards = self._copied(shards)
        text = json.dumps(
            state
            | {
                "optimizer": {"groups": groups, "numbers": numbers},
                "scaler": self.scaler.state_dict() if self.scaler else None,
                "numerics": self.run.numerics,
            }
        )
        writers = len(self.run.hosts) if sharded else 1
        self._start(self._write, state, shards, text, writers, by_time)

    def add_evaluation(self, state: TrainState) -> None:
        """Add the results of an evaluation to the checkpoint of its step, if there is one.

        The state is saved before the evaluation, so that a failed evaluation loses no step. The
        results go into the manifest, which is replaced atomically; no tensor is written again.
        """
        if self.rank == 0:
            self._start(self._add_evaluation, {name: getattr(state, name) for name in EVALUATION})

    def replace_best(
        self,
        weights: dict[str, Tensor],
        write_others: Callable[[Path], None],
        write_weights: Callable[[Path, Callable[[str], Tensor]], None],
    ) -> None:
        """Write best/: the weights in the thread, after the saves before it.

        Called by every rank. Of sharded weights, the thread of each rank writes its shards to a
        temporary file, as of a checkpoint and without a collective; that of rank 0 reads them.

        Args:
            weights: with the same names on all ranks.
            write_others: writes all other files into a folder; called by rank 0, at once.
            write_weights: writes the weights into the folder, and gets a function that reads one by
                its name; called by rank 0 in the thread.
        """
        sharded = any(isinstance(tensor, DTensor) for tensor in weights.values())
        if self.rank != 0 and not sharded:
            return
        self._wait_for_best()
        shards = {n: shard for n, t in weights.items() if (shard := own_shard(t, self.rank))}
        if self.config.checkpoints.background:
            shards = self._copied({"best": shards})["best"]
        best = self.run.folder / "best"
        temporary = best.with_name(".best.partial")  # of fill_temporary
        parts = best.with_name(f".best_{self.run.step:08d}.partial")
        failure: Exception | None = None
        if self.rank == 0:
            try:
                fill_temporary(best, write_others)
            except (OSError, SafetensorError) as error:
                failure = error  # of this rank: the others write their shards

        def write() -> None:
            try:
                read: Callable[[str], Tensor] = {n: s.tensor for n, s in shards.items()}.__getitem__
                if sharded:
                    files = self._write_shards(parts, {"model": shards}, len(self.run.hosts))
                    if self.rank != 0:
                        return
                    read = TensorReader(parts, "model", files).read
                if failure:
                    raise failure
                write_weights(temporary, read)
                put_in_place(best)
            except ConfigError as error:  # a file that cannot be read back
                raise OSError(str(error)) from error
            finally:
                if self.rank == 0:
                    shutil.rmtree(parts, ignore_errors=True)
                    shutil.rmtree(temporary, ignore_errors=True)  # put in place, unless it failed

        self._start_best(write)

    def replace_best_now(self, fill: Callable[[Path], None]) -> None:
        """Fill best/ before this returns; only flushing it to disk is left to the thread."""
        self._wait_for_best()
        folder = self.run.folder / "best"
        self._write_best(lambda: fill_temporary(folder, fill))
        self._raise_failures()
        if not self.best_failure:
            self._start_best(lambda: put_in_place(folder))

    def _wait_for_best(self) -> None:
        """Wait for the previous best/: its buffers and its temporary folder are used again."""
        if self._best_thread:
            self._best_thread.join()
            self._best_thread = None
            self._raise_failures()

    def _start_best(self, write: Callable[[], None]) -> None:
        self._best_thread = self._start(self._write_best, write)

    def _start(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Run a function in a thread after the previous one; wait for it unless in background."""
        before = self._thread

        def work() -> None:
            if before:
                before.join()
            function(*arguments)

        self._thread = thread = threading.Thread(target=work, name="checkpoint")
        thread.start()
        if not self.config.checkpoints.background:
            self.wait()
        return thread

    def wait(self) -> None:
        """Wait for the current save, and for best/.

        Raises:
            Exception: one of them failed for another reason than the disk.
        """
        if self._thread:
            self._thread.join()
            self._thread = self._best_thread = None
            self._raise_failures()

    def _raise_failures(self) -> None:
        for failure in (self.failure, self.best_failure):
            if failure and not isinstance(failure, OSError):
                raise failure

    def check_last(self) -> None:
        """Raise an OSError if the last save has failed; called at the end of a run."""
        if self.failure:
            raise OSError(self.note) from self.failure

    def resume(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint whose hashes have been checked; return its state besides tensors.

        Newer checkpoints are moved aside after this only: it may not fit the model.
        """
        state = self.load(folder)
        if self.rank == 0:
            move_newer_aside(self.run, folder)
        return state

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore weights, optimizer, fp16 loss scale and EMA in place; return the other state."""
        self.run.continued_from = str(folder)
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        manifest = read_manifest(folder)
        self._listed = manifest["files"].keys()
        state |= manifest.get("evaluation", {})
        saved, scale = state.pop("optimizer"), state.pop("scaler")
        self.run.compare_numerics(folder, state.pop("numerics", None))
        self._fill(folder, "model", model_tensors(self.model))
        self._load_optimizer(folder, saved)
        if self.ema:
            self._fill(folder, "ema", self._ema_tensors(self.ema))
        if self.scaler and scale:
            self.scaler.load_state_dict(scale)
        elif self.scaler or scale:
            logger.warning("%s has another precision: the fp16 loss scale is reset", folder)
        return state

    def _fill(self, folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
        TensorReader(folder, kind, self._listed).fill(tensors)

    @staticmethod
    def _ema_tensors(ema: EMA) -> dict[str, Tensor]:
        return dict(zip(map(plain_name, ema.names), ema.averages, strict=True))

    def _copied(self, shards: dict[str, dict[str, Shard]]) -> dict[str, dict[str, Shard]]:
        """Copy into host buffers that are reused, in pinned memory for GPU tensors."""
        copies: dict[str, dict[str, Shard]] = {}
        on_gpu = False
        for kind, named in shards.items():
            copies[kind] = {}
            for name, shard in named.items():
                tensor, key = shard.tensor, f"{kind} {name}"
                buffer = self._buffers.get(key)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    pinned = tensor.is_cuda
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                    self._buffers[key] = buffer
                buffer.copy_(tensor, non_blocking=True)
                on_gpu |= tensor.is_cuda
                copies[kind][name] = Shard(buffer, shard.offset, shard.shape)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    # ---- the optimizer's state, by parameter name ------------------------------------------------
    def _optimizer_state(self) -> tuple[list[dict], dict[str, Any], dict[str, Tensor]]:
        """Return the groups, the JSON values and the tensors, by parameter name."""
        groups = [
            group | {"params": [self.names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        numbers: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for parameter, slots in self.optimizer.state.items():
            for slot, value in slots.items():
                kind: dict[str, Any] = tensors if isinstance(value, Tensor) else numbers
                kind[f"{self.names[id(parameter)]}/{slot}"] = value
        return groups, numbers, tensors

    def _load_optimizer(self, folder: Path, saved: dict[str, Any]) -> None:
        groups = self.optimizer.param_groups
        names = [[self.names[id(p)] for p in group["params"]] for group in groups]
        if names != [group["params"] for group in saved["groups"]]:
            raise ConfigError(
                f"{folder}: its optimizer has other parameter groups than this model; restore the"
                " recipe's model and parameter_groups, or choose another --run_name."
            )
        # The form of load_state_dict: parameters by their index in the list of all groups.
        order = [name for group in names for name in group]
        parameters = [p for group in groups for p in group["params"]]
        index = {name: i for i, name in enumerate(order)}
        values = dict(saved["numbers"])
        if any(name.startswith("optimizer.") for name in self._listed):  # plain SGD has no tensors
            tensors = TensorReader(folder, "optimizer", self._listed)
            for key in tensors.shards:
                parameter = parameters[index[key.rpartition("/")[0]]]
                same_shape = tensors.shapes[key] == tuple(parameter.shape)
                values[key] = tensors.read_like(key, parameter) if same_shape else tensors.read(key)
        state: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, slot = key.rpartition("/")
            state.setdefault(index[name], {})[slot] = value
        param_groups = [
            group | {"params": [index[name] for name in group["params"]]}
            for group in saved["groups"]
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": param_groups})

    # ---- writing, in the thread ------------------------------------------------------------------
    def _write(
        self,
        state: dict[str, Any],
        shards: dict[str, dict[str, Shard]],
        text: str,
        writers: int,
        by_time: bool,
    ) -> None:
        """Write this rank's files; rank 0 waits for all ranks, then writes the manifest."""
        folder = self.folder / f"step_{state['step']:08d}"
        temporary = folder.with_name(f".{folder.name}.partial")
        self.failure = None
        try:
            files = self._write_shards(temporary, shards, writers)
            if self.rank != 0:
                return
            (temporary / "state.json").write_text(text, encoding="utf-8")
            flush_to_disk(temporary / "state.json")
            files["state.json"] = fingerprint(temporary / "state.json")
            content = {"format": FORMAT, "step": state["step"], "files": files}
            content["resumed_from"] = self.run.resumed_from
            if state.get("evaluated_step") == state["step"]:
                content["evaluation"] = {key: state[key] for key in EVALUATION}
            # Before the folder is complete: after a kill a mark may lack its checkpoint, but no
            # save by time lacks its mark, which would rotate one of the owner's away.
            mark_of(folder).unlink(missing_ok=True)
            if by_time:
                mark_of(folder).touch()
            complete(temporary, folder, content)
            self._rotate(state["best_step"])
        except Exception as error:
            self.failure = error
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            logger.error(
                "%s could not be saved: %s. Earlier checkpoints are unchanged; the next save tries"
                " again.",
                folder,
                error,
            )

    def _write_shards(
        self, temporary: Path, shards: dict[str, dict[str, Shard]], writers: int
    ) -> dict[str, Any]:
        """Write a file of each kind; rank 0 waits for all ranks.

        Returns:
            The size and SHA-256 of each file by its name; on rank 0 of the files of all ranks.
        """
        part = f".rank_{self.rank:05d}" if writers > 1 else ""
        files: dict[str, Any] = {}
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            for kind, named in shards.items():
                if named:
                    name = f"{kind}{part}.safetensors"
                    files[name] = save_shards(named, temporary / name)
                    flush_to_disk(temporary / name)
            if self.rank != 0:
                write_atomically(temporary / f"written{part}", json.dumps(files))
        except Exception:
            with suppress(OSError):
                (temporary / f"failed.rank_{self.rank:05d}").touch()
                if self.rank == 0:
                    self._files_of_other_ranks(temporary, writers)
            raise
        return files | self._files_of_other_ranks(temporary, writers) if self.rank == 0 else files

    def _write_best(self, write: Callable[[], None]) -> None:
        """Write best/; if that fails (a full disk), the previous one is kept."""
        self.best_failure = None
        try:
            write()
        except Exception as error:
            # recipes may write by safetensors, whose exception for errors of the disk is its own
            is_disk = isinstance(error, SafetensorError)
            self.best_failure = OSError(str(error)) if is_disk else error
            logger.error(
                "%s/best: not written, the previous export is kept: %s", self.run.folder, error
            )

    def _add_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Rewrite the manifest with these results."""
        folder = self.folder / f"step_{evaluation['evaluated_step']:08d}"
        try:
            content = read_manifest(folder)
        except ValueError:  # no checkpoint was saved at this step
            return
        try:
            write_atomically(
                folder / "manifest.json", manifest_text(content | {"evaluation": evaluation})
            )
            flush_to_disk(folder)
            self._rotate(evaluation["best_step"])
        except OSError as error:
            logger.error(
                "evaluation results could not be added to %s: %s. A run resumed from there"
                " evaluates again.",
                folder,
                error,
            )

    def _files_of_other_ranks(self, temporary: Path, writers: int) -> dict[str, Any]:
        """Wait for the file in which each rank lists its shards; return these lists merged.

        After a failure it waits a little for the other ranks, since the folder is then removed.
        """
        files: dict[str, Any] = {}
        waiting = set(range(1, writers))
        failed: set[int] = set()

        def all_have_written() -> bool:
            # one listing: to ask for each rank's file would be 2 N requests per look
            for path in sorted(temporary.iterdir()):
                kind, _, rank = path.name.partition(".rank_")
                if kind == "failed":
                    failed.add(int(rank))
                    waiting.discard(int(rank))
                if kind == "written":
                    files.update(json.loads(path.read_text()))
                    path.unlink()
                    waiting.discard(int(rank))
            return not waiting

        limit = self.config.distributed.startup_timeout_seconds
        wait_until(lambda: all_have_written() or bool(failed), limit, poll_seconds=0.05)
        if failed:
            wait_until(all_have_written, min(limit, REMOVAL_SECONDS), poll_seconds=0.05)
            host = self.run.hosts[min(failed)]
            raise OSError(f"rank {min(failed)} on {host} could not write its shards")
        if waiting:
            raise OSError(
                f"rank(s) {sorted(waiting)} did not write their shards within {limit} s"
                " (distributed.startup_timeout_seconds)"
            )
        return files

    def _rotate(self, best_step: int) -> None:
        """Remove checkpoints that need not be kept; only files that a manifest lists."""
        settings = self.config.checkpoints
        every = settings.keep_every_steps
        found = checkpoints(self.run.folder)
        by_time = [folder for folder in found if mark_of(folder).exists()]
        others = [folder for folder in found if folder not in by_time]
        keep = set(others[-settings.keep :])
        # an earlier one by time stays while there are too few others to go back to
        keep |= set(by_time[-max(1, settings.keep - len(others)) :])
        keep |= {folder for folder in found if every and step_of(folder) % every == 0}
        keep |= {folder for folder in found if step_of(folder) == best_step}
        for folder in found:
            if folder not in keep:
                remove(folder)
