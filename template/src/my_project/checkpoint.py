"""Save, rotate and resume the state of a run; export its weights. Also a command, which merges.

    checkpoints/step_00000100/
      model.safetensors        the plain module's keys, whatever wrapped it
      optimizer.safetensors    "<parameter>/<slot>", so any number of processes reads them
      average.safetensors      with optim.ema_decay
      state.json               the step, the optimizer's numbers, the best value, the fp16 scale,
                               the numerics that it was trained with
      manifest.json            size and SHA-256 of each file, written last; evaluation results;
                               the path given by --resume at which the run began

    python -m my_project.checkpoint <run>/checkpoints/step_00000100 weights.safetensors

A folder is written under a temporary name, flushed to disk, and renamed when it is whole. Tensors
and JSON only: nothing here runs code when it is loaded. Sharded tensors (FSDP) are written by the
processes that hold them, into model.rank_00002.safetensors and so on, and read by any number of
processes. Random generators are not saved: what is drawn at a step follows from (seed, step), see
batches.py and runtime.seed_draws.
"""

import argparse
import json
import logging
import math
import os
import re
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from .config import Config, ConfigError, to_yaml
from .files import (
    FORMAT,
    Piece,
    Tensors,
    complete,
    damage,
    discard,
    fingerprint,
    flush_to_disk,
    manifest_text,
    own_piece,
    read_manifest,
    replace_folder,
    save_pieces,
    save_tensors,
    step_of,
)
from .optim import Average
from .recipe import optional
from .run import Run, unused_name, write_atomically
from .state import EVALUATION

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
        is_main: bool,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        average: Average | None,
    ) -> None:
        self.run, self.config, self.folder = run, run.config, run.folder / "checkpoints"
        self.is_main, self.model, self.optimizer = is_main, model, optimizer
        self.scaler, self.average = scaler, average
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

    def save(self, state: dict[str, Any]) -> None:
        """Save the state after state["step"] steps. Called by every process."""
        self.wait()
        state = dict(state)  # the loop goes on with its own
        groups, numbers, slots = self._optimizer_state()
        kinds: dict[str, dict[str, Tensor]] = {
            "model": self._weights(),
            "optimizer": slots,
        }
        if self.average:
            kinds["average"] = self._averaged(self.average)
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

    def add_evaluation(self, state: dict[str, Any]) -> None:
        """Add the results of an evaluation to the checkpoint of its step, if there is one.

        The state is saved before it is evaluated, so that nothing is lost there. The results go
        into the manifest, which is replaced in one instant; no tensor is written again.
        """
        if self.is_main:
            self._start(self._add_evaluation, {key: state[key] for key in EVALUATION})

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
        """Restore weights, optimizer, fp16 scale and average in place; return the other state."""
        try:
            state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            state |= read_manifest(folder).get("evaluation", {})
            saved, scale = state.pop("optimizer"), state.pop("scaler")
            self.run.compare_numerics(folder, state.pop("numerics", None))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder}/state.json is damaged: {error!r}.") from error
        Tensors(folder, "model").fill(self._weights())
        self._load_optimizer(folder, saved)
        if self.average:
            Tensors(folder, "average").fill(self._averaged(self.average))
        if self.scaler and scale:
            self.scaler.load_state_dict(scale)
        elif self.scaler or scale:
            logger.warning(
                "the precision is not that of %s: the fp16 loss scale starts anew", folder
            )
        return state

    def _weights(self) -> dict[str, Tensor]:
        tensors: dict[str, Any] = get_model_state_dict(self.model)
        return tensors

    @staticmethod
    def _averaged(average: Average) -> dict[str, Tensor]:
        return dict(zip(map(plain_name, average.names), average.average, strict=True))

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


def checkpoints(run_folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first, whether they are damaged or not."""
    found = [p.parent for p in run_folder.glob("checkpoints/step_*/manifest.json")]
    return sorted((p for p in found if step_of(p) >= 0), key=step_of)


def best_of(folders: list[Path], config: Config) -> Path | None:
    """Find the best checkpoint by evaluation.best_metric."""
    values = {}
    for folder in folders:
        try:
            results = read_manifest(folder).get("evaluation", {}).get("results", {})
        except ValueError:
            continue
        value = results.get(config.evaluation.best_metric, math.nan)
        if not math.isnan(value):
            values[folder] = value
    choose = max if config.evaluation.best_mode == "max" else min
    return choose(values, key=values.__getitem__) if values else None


def remove(folder: Path) -> None:
    """Remove a checkpoint; a folder that holds anything of somebody else stays."""
    try:
        own = read_manifest(folder)["files"].keys() | {"manifest.json"}
    except ValueError:
        return
    names = {path.name for path in folder.iterdir()}
    if all(name in own or name.startswith(".manifest.json.") for name in names):
        removed = folder.with_name(f".{folder.name}.removed")  # so that a kill leaves no half
        discard(removed)
        os.replace(folder, removed)
        discard(removed)


# ---- where to continue ---------------------------------------------------------------------------
def tidy(run_folder: Path) -> None:
    """Remove what a kill during a save has left. Main process only, before anything is saved."""
    for name in ("export", "best"):
        before = run_folder / f".{name}.before"
        if before.is_dir() and not os.path.lexists(run_folder / name):
            os.replace(before, run_folder / name)
        discard(run_folder / f".{name}.partial")
    for path in (run_folder / "checkpoints").glob(".step_*"):
        if re.fullmatch(r"\.step_\d+\.(partial|removed)", path.name):
            discard(path)


def check_path(config: Config) -> None:
    """Refuse a checkpoint given by hand that is none, before any process group starts."""
    if config.resume in ("auto", "never"):
        return
    folder, own = Path(config.resume), checkpoints(config.folder)
    with suppress(ValueError):
        if own and read_manifest(own[-1]).get("resumed_from") == config.resume:
            return  # the run has saved since, and goes on by itself
    if problem := damage(folder, hashes=False):
        raise ConfigError(
            f"resume {folder} cannot be used: {problem}; give a folder such as"
            " runs/<run_name>/checkpoints/step_00000100, or auto."
        )


def choose(run: Run) -> Path | None:
    """Choose the checkpoint to continue from; None to start anew. Main process only.

    Newer ones, which are damaged or of another course of the run, are moved aside, never removed.
    """
    tidy(run.folder)
    given = run.config.resume
    chosen = _newest_good(run)
    run.resumed_from = read_manifest(chosen).get("resumed_from") if chosen else None
    # A path given by hand is where this run begins; once it has saved, it goes on by itself.
    if given not in ("auto", "never") and run.resumed_from != given:
        if problem := damage(Path(given)):
            raise ConfigError(f"resume {given} cannot be used: {problem}.")
        chosen, run.resumed_from = Path(given), given
    step = read_manifest(chosen)["step"] if chosen else -1
    for folder in (run.folder / "checkpoints").glob("step_*"):
        if step_of(folder) > step:
            aside = unused_name(folder)
            folder.rename(aside)
            logger.warning(
                "%s is newer than what is continued from: moved aside to %s", folder, aside.name
            )
    return chosen


def _newest_good(run: Run) -> Path | None:
    folder = run.folder / "checkpoints"
    found = sorted((p for p in folder.glob("[!.]*") if ".old-" not in p.name), key=step_of)
    for path in reversed(found):
        problem = damage(path) if step_of(path) >= 0 else "it is no checkpoint of this run"
        if not problem:
            return path
        logger.warning("%s is passed over: %s.", path, problem)
    if found and run.config.resume in ("auto", "never"):
        logger.warning("no checkpoint in %s can be used: training starts anew.", folder)
    return None


# ---- weights for use -----------------------------------------------------------------------------
def check(folder: Path) -> None:
    """Refuse a checkpoint that is damaged."""
    if problem := damage(folder):
        raise ConfigError(f"{folder} cannot be used: {problem}.")


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into the plain module, the averaged ones where it has them.

    Every key must fit.
    """
    Tensors(folder, "model").fill(model.state_dict())
    if any(folder.glob("average.*")):
        averages = Tensors(folder, "average")
        named = model.named_parameters()
        averages.fill({name: p.detach() for name, p in named if name in averages.shapes})


def export(
    folder: Path, config: Config, data_info: dict[str, Any], model: nn.Module, is_main: bool
) -> None:
    """Write what predict.py needs. Called by every process, written by the main one."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=whole)
    if not is_main:
        return

    def fill(temporary: Path) -> None:
        if export_of := optional(config.recipe, "export"):
            plain = model
            if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
                plain = config.recipe.build_model(data_info)
                plain.load_state_dict(weights)
            export_of(plain, data_info, temporary)
        else:
            save_tensors(weights, temporary / "model.safetensors")
        (temporary / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (temporary / "data_info.json").write_text(json.dumps(data_info))

    replace_folder(folder, fill)


def export_best(run: Run, data_info: dict[str, Any], model: nn.Module, is_main: bool) -> None:
    """Export to best/; a full disk leaves there what was there before, and does not end the run."""
    try:
        export(run.folder / "best", run.config, data_info, model, is_main)
    except (OSError, SafetensorError) as error:
        logger.error("%s/best could not be written, it is as it was: %s", run.folder, error)


def merge(arguments: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, sharded or not, into one safetensors file."""
    folder, path = Path(arguments.folder), Path(arguments.file)
    check(folder)
    if path.exists() or not path.parent.is_dir():
        problem = "exists" if path.exists() else "lies in a folder that does not exist"
        raise ConfigError(f"{path} {problem}; give the name of a new file.")
    merged: dict[str, Tensor] = {}
    for kind in ["model", "average"] if arguments.average else ["model"]:
        tensors = Tensors(folder, kind)
        merged |= {name: tensors.read(name) for name in tensors.shapes}
    save_tensors(merged, path)
    print(f"{path}: {len(merged)} tensors, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    from . import runtime

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", help="a checkpoint")
    parser.add_argument("file", help="the safetensors file to write")
    parser.add_argument("--average", action="store_true", help="the averaged weights (ema_decay)")
    runtime.command(merge, parser.parse_args())
