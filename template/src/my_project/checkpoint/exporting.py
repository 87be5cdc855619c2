"""Write the exports of a run, export/ and best/: weights for use, which load without accelerate.

    export/
      model.safetensors        with the keys of the plain module, without wrappers; above 5 GB
                               several files, and the index model.safetensors.index.json
      config.yaml              of the run
      data_info.json           what the recipe's prepare_data has returned

A recipe may write other files than model.safetensors, see recipe.py. export.py reads exports.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import to_yaml
from ..files import replace_folder
from ..recipe import Recipe, optional
from ..run_folder import Run
from .saving import Checkpoints
from .shards import gather, in_file_order, model_tensors, save_tensors

MAX_FILE_BYTES = 5 * 10**9  # of the tensors in one file; transformers' default is 50 GB

Files = dict[str, dict[str, Tensor]]  # the tensors of each file, by their names


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What the export of a model holds."""

    tensors: dict[str, Any]
    files: Files
    is_written_by_recipe: bool


def export(run: Run, data_info: dict[str, Any], model: nn.Module) -> None:
    """Write what predict needs to export/. Called by every rank; rank 0 writes.

    Of a sharded model rank 0 holds one whole tensor at a time, unless the recipe has an `export`
    without `export_tensors`: it gets a whole model.
    """
    content = _content(run.config.recipe, model)
    with _gathered(content.files) as values:
        if run.rank == 0:
            replace_folder(
                run.folder / "export", lambda to: _fill(run, data_info, model, content, values, to)
            )


def export_best(
    run: Run, data_info: dict[str, Any], model: nn.Module, checkpoints: Checkpoints
) -> None:
    """Export to best/ as checkpoints are saved: in the background. Called by every rank.

    A recipe's own `export` is called before this returns: it may read the model, which training
    changes, and draw random numbers; only flushing to disk is left to the background.
    """
    content = _content(run.config.recipe, model)
    if content.is_written_by_recipe:
        with _gathered(content.files) as values:
            if run.rank == 0:
                checkpoints.replace_best_now(
                    lambda to: _fill(run, data_info, model, content, values, to)
                )
        return

    def write_weights(folder: Path, read: Callable[[str], Tensor]) -> None:
        def value(name: str) -> Tensor:
            tensor = content.tensors[name]  # of an empty one there is no shard
            return read(name) if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)

        _save_files(content.files, map(value, _names(content.files)), folder)

    checkpoints.replace_best(
        content.tensors, lambda to: _write_others(run, data_info, model, to), write_weights
    )


def _content(recipe: Recipe, model: nn.Module) -> _Content:
    """Return the tensors to write: those that the recipe chooses of a sharded model, or all."""
    kind, tensors = "model", model_tensors(model)
    by_recipe = optional(recipe, "export") is not None
    choose = optional(recipe, "export_tensors")
    if choose and is_sharded(model) and (chosen := choose(model, tensors)):
        kind, tensors = chosen[0], dict(sorted(chosen[1].items()))  # one order on all ranks
        by_recipe = False
    files = split_into_files(tensors, kind)
    return _Content(tensors=tensors, files=files, is_written_by_recipe=by_recipe)


def split_into_files(tensors: dict[str, Tensor], kind: str = "model") -> Files:
    """Group the tensors by file, in their order; only a tensor above the limit exceeds it."""
    groups: list[dict[str, Tensor]] = [{}]
    free = MAX_FILE_BYTES
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > free:
            groups.append({})
            free = MAX_FILE_BYTES
        groups[-1][name] = tensor
        free -= tensor.nbytes
    if len(groups) == 1:
        return {f"{kind}.safetensors": in_file_order(groups[0])}
    return {
        f"{kind}-{number:05d}-of-{len(groups):05d}.safetensors": in_file_order(group)
        for number, group in enumerate(groups, start=1)
    }


def _names(files: Files) -> list[str]:
    return [name for tensors in files.values() for name in tensors]


def _values(files: Files) -> Iterator[Tensor]:
    """Gather the tensors one at a time, in the order of the files; keep none."""
    return (gather(tensor) for tensors in files.values() for tensor in tensors.values())


@contextmanager
def _gathered(files: Files) -> Iterator[Iterator[Tensor]]:
    """Yield _values(files), in which all ranks take part to the end.

    What a block leaves is gathered and dropped, also if it fails on rank 0 (a full disk).
    """
    values = _values(files)
    try:
        yield values
    except Exception:
        deque(values, maxlen=0)
        raise
    deque(values, maxlen=0)


def _save_files(files: Files, values: Iterator[Tensor], folder: Path) -> None:
    """Write the tensors and, of several files, the index that transformers reads."""
    for name, tensors in files.items():
        save_tensors(tensors, folder / name, values)
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(t.nbytes for part in files.values() for t in part.values())},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    kind = next(iter(files)).rpartition("-00001-of-")[0]
    (folder / f"{kind}.safetensors.index.json").write_text(text, encoding="utf-8")


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has sharded the model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _fill(
    run: Run,
    data_info: dict[str, Any],
    model: nn.Module,
    content: _Content,
    values: Iterator[Tensor],
    folder: Path,
) -> None:
    recipe = run.config.recipe
    if content.is_written_by_recipe:
        plain = model
        if is_sharded(model):
            plain = recipe.build_model(data_info)
            state, names = model_tensors(plain), _names(content.files)
            if differing := sorted(state.keys() ^ set(names)):
                raise ValueError(f"build_model returned a model that differs in {differing}.")
            for name in names:
                state[name].copy_(next(values))
        optional(recipe, "export")(plain, data_info, folder)
        _describe(run, data_info, folder)
    else:
        _write_others(run, data_info, model, folder)
        _save_files(content.files, values, folder)


def _write_others(run: Run, data_info: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Write what is not weights."""
    if write := optional(run.config.recipe, "export_files"):
        write(model, data_info, folder)
    _describe(run, data_info, folder)


def _describe(run: Run, data_info: dict[str, Any], folder: Path) -> None:
    (folder / "config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
    (folder / "data_info.json").write_text(json.dumps(data_info))
