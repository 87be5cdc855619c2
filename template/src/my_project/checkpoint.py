"""Save, rotate and resume the state of a run; export its weights.

    checkpoints/step_00000100/
      model.safetensors        the plain module's keys, whatever wrapped it
      optimizer.safetensors    tensors by parameter name, so any number of processes reads them
      average.safetensors      with optim.ema_decay
      state.json               the step, the optimizer's numbers, the best value, the fp16 scale

Tensors and JSON only: nothing here runs code when it is loaded. A folder is written under a
temporary name and renamed when it is whole. Random generators are not saved: what is drawn at a
step follows from (seed, step), see batches.py and runtime.seed_draws.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from .config import Config, ConfigError, to_yaml
from .optim import Average
from .recipe import optional

logger = logging.getLogger(__name__)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights on the CPU by the plain module's keys. Called by every process."""
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL)
    return weights


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors; those which share memory (tied weights) are written under each name."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(separate, path)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder appear whole, in place of the one before."""
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    fill(temporary)
    before = folder.with_name(f".{folder.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        os.replace(folder, before)
    os.replace(temporary, folder)
    shutil.rmtree(before, ignore_errors=True)


def checkpoints(run_folder: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first."""
    return sorted(p.parent for p in run_folder.glob("checkpoints/step_*/state.json"))


def save(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    average: Average | None,
    state: dict[str, Any],
    is_main: bool,
) -> None:
    """Save the state after state["step"] steps. Called by every process; the main one writes."""
    weights = full_weights(model)
    slots: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=FULL))
    if not is_main:
        return
    tensors: dict[str, Tensor] = {}  # "<parameter>.<slot>"
    numbers: dict[str, Any] = {"groups": slots["param_groups"], "state": {}}
    for parameter, state_of in slots["state"].items():
        for name, value in state_of.items():
            kind: dict[str, Any] = tensors if isinstance(value, Tensor) else numbers["state"]
            kind[f"{parameter}.{name}"] = value

    def fill(folder: Path) -> None:
        save_tensors(weights, folder / "model.safetensors")
        save_tensors(tensors, folder / "optimizer.safetensors")
        if average:
            named = dict(zip(average.names, average.average, strict=True))
            save_tensors(named, folder / "average.safetensors")
        scale = scaler.state_dict() if scaler else None
        (folder / "state.json").write_text(
            json.dumps(state | {"optimizer": numbers, "scaler": scale})
        )

    write_folder(config.folder / "checkpoints" / f"step_{state['step']:08d}", fill)
    for old in checkpoints(config.folder)[: -config.checkpoints.keep]:
        shutil.rmtree(old)


def find(config: Config) -> Path | None:
    """Choose the checkpoint to continue from; None to start anew."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return next(iter(reversed(checkpoints(config.folder))), None)
    path = Path(config.resume)
    if not (path / "state.json").is_file():
        raise ConfigError(
            f"resume {path} is no checkpoint: it has no state.json; give a folder such as"
            " runs/<run_name>/checkpoints/step_00000100, or auto."
        )
    return path


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    average: Average | None,
) -> dict[str, Any]:
    """Restore weights, optimizer, fp16 scale and average in place; return the rest of the state."""
    state = json.loads((folder / "state.json").read_text())
    load_weights(folder, model)
    numbers = state.pop("optimizer")
    slots: dict[str, Any] = {}
    for key, value in (load_file(folder / "optimizer.safetensors") | numbers["state"]).items():
        parameter, _, name = key.rpartition(".")
        slots.setdefault(parameter, {})[name] = value
    whole: dict[str, Any] = {"state": slots, "param_groups": numbers["groups"]}
    set_optimizer_state_dict(model, optimizer, whole, options=FULL)
    if average:
        saved = load_file(folder / "average.safetensors")
        for name, tensor in zip(average.names, average.average, strict=True):
            tensor.copy_(saved[name])
    scale = state.pop("scaler")
    if scaler and scale:
        scaler.load_state_dict(scale)
    return state


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load model.safetensors into the plain module; every key must fit."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no model.safetensors.")
    try:
        model.load_state_dict(load_file(path), strict=True)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error


def export(
    folder: Path, config: Config, data_info: dict[str, Any], model: nn.Module, is_main: bool
) -> None:
    """Write what predict.py needs. Called by every process, written by the main one."""
    weights = full_weights(model)
    if not is_main:
        return

    def fill(temporary: Path) -> None:
        if export_of := optional(config.recipe, "export"):
            export_of(model, data_info, temporary)
        else:
            save_tensors(weights, temporary / "model.safetensors")
        (temporary / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (temporary / "data_info.json").write_text(json.dumps(data_info))

    write_folder(folder, fill)
