"""Save, rotate and restore the state of a run.

    checkpoints/step_00000100/
      model.safetensors        the plain module's keys, whatever wrapped it
      optimizer.safetensors    "<parameter>/<slot>", so any number of processes reads them
      average.safetensors      with optim.ema_decay
      state.json               the step, the optimizer's numbers, the best value, the fp16 scale,
                               the numerics that it was trained with
      manifest.json            size and SHA-256 of each file, written last; evaluation results;
                               the path given by --resume at which the run began

A folder is written under a temporary name, flushed to disk, and renamed when it is whole. Tensors
and JSON only: nothing here runs code when it is loaded. Sharded tensors (FSDP) are written by the
processes that hold them, into model.rank_00002.safetensors and so on, and read by any number of
processes. Random generators are not saved: what is drawn at a step follows from (seed, step), see
loading/seeding.py.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ..config import ConfigError
from ..files import (
    FORMAT,
    complete,
    fingerprint,
    flush_to_disk,
    manifest_text,
    read_manifest,
    step_of,
    write_atomically,
)
from ..optim import EMA
from ..run_folder import Run
from ..state import EVALUATION, TrainState
from .resuming import best_of, checkpoints, remove
from .shards import Piece, Tensors, own_piece, save_pieces

logger = logging.getLogger(__name__)


def plain_name(name: str) -> str:
    """Drop what activation checkpointing and torch.compile put into parameter names."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


# ---- the checkpoints of a run --------------------------------------------------------------------
class Checkpoints:
    """Save and load the whole state of a run; one save at a time, beside training if wanted."""

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
        self.is_main = run.rank == 0
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.names = {id(p): plain_name(name) for name, p in model.named_parameters()}
        self.failure: Exception | None = None  # of the last save
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Wait for the save that is under way; not without end when the run has failed."""
        if kind is None:
            self.wait()
        elif self._thread:
            in_a_hurry = not issubclass(kind, Exception)  # a second signal
            self._thread.join(60 if in_a_hurry else self.config.distributed.timeout_seconds)

    @property
    def note(self) -> str:
        """Say, behind a reason, that the last checkpoint is missing."""
        return f"; the last checkpoint could not be saved: {self.failure}" if self.failure else ""

    def save(self, train_state: TrainState) -> None:
        """Save the state after train_state.step steps. Called by every rank."""
        self.wait()
        state = train_state.to_dict()  # a copy, since the loop goes on
        groups, numbers, slots = self._optimizer_state()
        kinds: dict[str, dict[str, Tensor]] = {
            "model": self._weights(),
            "optimizer": slots,
        }
        if self.ema:
            kinds["average"] = self._averages(self.ema)
        sharded = any(
            isinstance(t, DTensor) for tensors in kinds.values() for t in tensors.values()
        )
        if not (self.is_main or sharded):
            return
        pieces = {
            kind: {
                name: piece
                for name, tensor in tensors.items()
                if (piece := own_piece(tensor, self.is_main))
            }
            for kind, tensors in kinds.items()
        }
        background = self.config.checkpoints.background
        if background or any(t.is_cuda for t in kinds["model"].values()):
            pieces = self._copied(pieces)
        text = json.dumps(
            state
            | {
                "optimizer": {"groups": groups, "numbers": numbers},
                "scaler": self.scaler.state_dict() if self.scaler else None,
                "numerics": self.run.numerics,
            }
        )
        writers = len(self.run.hosts) if sharded else 1
        self._start(self._write, state, pieces, text, writers)

    def add_evaluation(self, state: TrainState) -> None:
        """Add the results of an evaluation to the checkpoint of its step, if there is one.

        The state is saved before it is evaluated, so that nothing is lost there. The results go
        into the manifest, which is replaced in one instant; no tensor is written again.
        """
        if self.is_main:
            self._start(self._add_evaluation, {name: getattr(state, name) for name in EVALUATION})

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        """Work in a thread, after the one before it, and wait for it unless it may lag behind."""
        before = self._thread

        def work() -> None:
            if before:
                before.join()
            function(*arguments)

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()
        if not self.config.checkpoints.background:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            OSError: it failed, and checkpoints.on_failure is "end".
            Exception: a mistake in what is saved, not a trouble of the disk.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
            may_go_on = self.config.checkpoints.on_failure == "continue"
            if self.failure and not (may_go_on and isinstance(self.failure, OSError)):
                raise self.failure

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore weights, optimizer, fp16 scale and EMA in place; return the other state."""
        try:
            state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            state |= read_manifest(folder).get("evaluation", {})
            saved, scale = state.pop("optimizer"), state.pop("scaler")
            self.run.compare_numerics(folder, state.pop("numerics", None))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder}/state.json is damaged: {error!r}.") from error
        Tensors(folder, "model").fill(self._weights())
        self._load_optimizer(folder, saved)
        if self.ema:
            Tensors(folder, "average").fill(self._averages(self.ema))
        if self.scaler and scale:
            self.scaler.load_state_dict(scale)
        elif self.scaler or scale:
            logger.warning(
                "the precision is not that of %s: the fp16 loss scale starts again", folder
            )
        return state

    def _weights(self) -> dict[str, Tensor]:
        tensors: dict[str, Any] = get_model_state_dict(self.model)
        return tensors

    @staticmethod
    def _averages(ema: EMA) -> dict[str, Tensor]:
        return dict(zip(map(plain_name, ema.names), ema.averages, strict=True))

    def _copied(self, pieces: dict[str, dict[str, Piece]]) -> dict[str, dict[str, Piece]]:
        """Copy into host memory that is kept, pinned where there is a GPU."""
        copies: dict[str, dict[str, Piece]] = {}
        on_gpu = False
        for kind, named in pieces.items():
            copies[kind] = {}
            for name, piece in named.items():
                tensor, key = piece.tensor, f"{kind} {name}"
                kept = self._buffers.get(key)
                if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    self._buffers[key] = kept
                kept.copy_(tensor, non_blocking=True)
                on_gpu |= tensor.is_cuda
                copies[kind][name] = Piece(kept, piece.offset, piece.shape)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    # ---- the optimizer's state, by parameter name ------------------------------------------------
    def _optimizer_state(self) -> tuple[list[dict], dict[str, Any], dict[str, Tensor]]:
        """Take the state apart: the groups, what is plain JSON, and the tensors."""
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
            raise ConfigError(f"{folder}: the optimizer's parameter groups are not the model's.")
        # torch's own form: parameters by their place in the list of all groups' parameters
        order = [name for group in names for name in group]
        parameters = [p for group in groups for p in group["params"]]
        place = {name: i for i, name in enumerate(order)}
        values = dict(saved["numbers"])
        if any(folder.glob("optimizer.*")):  # plain SGD has no tensors
            tensors = Tensors(folder, "optimizer")
            for key, shape in tensors.shapes.items():
                parameter = parameters[place[key.rpartition("/")[0]]]
                is_like_it = shape == tuple(parameter.shape)
                values[key] = tensors.read_like(key, parameter) if is_like_it else tensors.read(key)
        state: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, slot = key.rpartition("/")
            state.setdefault(place[name], {})[slot] = value
        param_groups = [
            group | {"params": [place[name] for name in group["params"]]}
            for group in saved["groups"]
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": param_groups})

    # ---- writing, in a thread of its own ---------------------------------------------------------
    def _write(
        self, state: dict[str, Any], pieces: dict[str, dict[str, Piece]], text: str, writers: int
    ) -> None:
        """Write this process's files; the main one waits for those of all, and completes."""
        folder = self.folder / f"step_{state['step']:08d}"
        temporary = folder.with_name(f".{folder.name}.partial")
        part = f".rank_{self.run.rank:05d}" if writers > 1 else ""
        self.failure = None
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            names = []
            for kind, named in pieces.items():
                if named:
                    names.append(f"{kind}{part}.safetensors")
                    save_pieces(named, temporary / names[-1])
            if self.is_main:
                names.append("state.json")
                (temporary / "state.json").write_text(text, encoding="utf-8")
            files = {}
            for name in names:
                flush_to_disk(temporary / name)
                files[name] = fingerprint(temporary / name)
            if not self.is_main:
                write_atomically(temporary / f"written{part}", json.dumps(files))
                return
            files |= self._files_of_others(temporary, writers)
            content = {"format": FORMAT, "step": state["step"], "files": files}
            content["resumed_from"] = self.run.resumed_from
            if state.get("evaluated_step") == state["step"]:
                content["evaluation"] = {key: state[key] for key in EVALUATION}
            complete(temporary, folder, content)
            self._rotate()
        except Exception as error:
            # safetensors has an exception of its own for what the disk refuses
            self.failure = OSError(str(error)) if isinstance(error, SafetensorError) else error
            if self.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                with suppress(OSError):
                    (temporary / f"failed{part}").touch()
            logger.error(
                "%s could not be saved: %s. The checkpoints before it are as they were; the next"
                " save tries again.", folder, error,
            )  # fmt: skip

    def _add_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Write the manifest again, with these results."""
        folder = self.folder / f"step_{evaluation['evaluated_step']:08d}"
        try:
            content = read_manifest(folder)
        except ValueError:  # none was saved at this step
            return
        try:
            write_atomically(
                folder / "manifest.json", manifest_text(content | {"evaluation": evaluation})
            )
            flush_to_disk(folder)
            self._rotate()
        except OSError as error:
            logger.error(
                "the results of an evaluation could not be added to %s: %s. A start from there"
                " evaluates again.", folder, error,
            )  # fmt: skip

    def _files_of_others(self, temporary: Path, writers: int) -> dict[str, Any]:
        """Wait until every process has written its shards: a file says so, no message is needed."""
        files: dict[str, Any] = {}
        deadline = time.monotonic() + self.config.distributed.startup_timeout_seconds
        waiting = set(range(1, writers))
        while waiting:
            for rank in sorted(waiting):
                if (temporary / f"failed.rank_{rank:05d}").exists():
                    raise OSError(f"rank {rank} on {self.run.hosts[rank]} could not write")
                path = temporary / f"written.rank_{rank:05d}"
                if path.exists():
                    files |= json.loads(path.read_text())
                    path.unlink()
                    waiting.remove(rank)
            if time.monotonic() > deadline:
                raise OSError(f"rank(s) {sorted(waiting)} have not written in time")
            time.sleep(0.05 if waiting else 0)
        return files

    def _rotate(self) -> None:
        """Remove what need not be kept; only files that a manifest lists."""
        settings = self.config.checkpoints
        every = settings.keep_every_steps
        found = checkpoints(self.run.folder)
        keep = set(found[-settings.keep :])
        keep |= {folder for folder in found if every and step_of(folder) % every == 0}
        if settings.keep_best and (best := best_of(found, self.config)):
            keep.add(best)
        for folder in found:
            if folder not in keep:
                remove(folder)
