"""Write the exports of a run, export/ and best/: weights for use, which load without accelerate.

    export/
      model.safetensors        with the keys of the plain module, without wrappers; above 5 GB
                               several files, and the index model.safetensors.index.json
      config.yaml              of the run
      data_info.json           what the recipe's prepare_data has returned

A recipe may write other files than model.safetensors, see recipe.py. export.py reads exports.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import to_yaml
from ..recipe import optional
from ..run_folder import Run
from .saving import Checkpoints, Read
from .shards import check_finite, in_file_order, is_sharded, model_tensors, save_tensors

MAX_FILE_BYTES = 5 * 10**9  # of the tensors in one file; transformers' default is 50 GB


def export(
    run: Run,
    data_info: dict[str, Any],
    model: nn.Module,
    checkpoints: Checkpoints,
    name: str = "export",
) -> None:
    """Replace export/ or best/. Called by every rank; rank 0 writes.

    A tensor at a time is read from the files of a checkpoint (Checkpoints.replace_export), best/
    beside training. But where the recipe's `export` names no tensors it writes all by itself,
    before this returns: it may read the model, which training changes, and draw random numbers. Of
    a sharded model it gets a whole one.

    Args:
        run: the run folder.
        data_info: from the recipe's prepare_data.
        model: with the EMA swapped in, if there is one.
        checkpoints: of the run.
        name: export or best.

    Raises:
        ValueError: a value is not finite; for best/ at the next save.
    """
    recipe = run.config.recipe
    state = model_tensors(model)
    own = optional(recipe, "export")
    chosen = own(model, data_info, state, None) if own else ("model", state)
    stem, weights = chosen or ("model", state)
    if own:
        weights = dict(sorted(weights.items()))  # in one order on all ranks
    needs_whole = not chosen and is_sharded(model)
    if not chosen and not needs_whole:
        weights = {}

    def fill(folder: Path) -> None:
        if not weights:  # others were looked at when they were written as shards
            for key, tensor in state.items():
                check_finite(key, tensor)
        if own and not needs_whole:
            own(model, data_info, state, folder)
        (folder / "config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
        (folder / "data_info.json").write_text(json.dumps(data_info))
        (folder / "step.json").write_text(json.dumps({"step": run.step}))

    def write(folder: Path, read: Read) -> None:
        def value(key: str) -> Tensor:
            tensor = weights[key]  # of an empty one there is no shard
            return read(key) if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)

        if not needs_whole:
            once = {key: tensor for key, tensor in weights.items() if key not in aliases}
            _save_files(split_into_files(once, stem), value, folder, aliases)
            return
        plain = recipe.build_model(data_info)
        whole = plain.state_dict()
        for key, tensor in whole.items():
            tensor.copy_(value(key))
        own(plain, data_info, whole, folder)

    keys = {id(tensor): key for key, tensor in state.items()}
    saved_names = {key: keys.get(id(tensor)) for key, tensor in weights.items()}
    aliases = _aliases(saved_names, checkpoints.first_names)
    checkpoints.replace_export(run.folder / name, fill, weights, saved_names, write)
    if name == "export" or needs_whole:
        checkpoints.wait()


def _aliases(saved_names: dict[str, str | None], first_names: dict[str, str]) -> dict[str, str]:
    """Return which exported tensors are tied to another one, that of the model's first name."""
    keys = {name: key for key, name in saved_names.items() if name}
    found = {key: keys.get(first_names.get(name, name), key) for name, key in keys.items()}
    return {key: first for key, first in found.items() if key != first}


def split_into_files(
    tensors: dict[str, Tensor], stem: str = "model"
) -> dict[str, dict[str, Tensor]]:
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
        return {f"{stem}.safetensors": in_file_order(groups[0])}
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": in_file_order(group)
        for number, group in enumerate(groups, start=1)
    }


def _save_files(
    files: dict[str, dict[str, Tensor]], read: Read, folder: Path, aliases: dict[str, str]
) -> None:
    """Write the tensors and, of several files, the index that transformers reads."""
    for name, tensors in files.items():
        save_tensors(tensors, folder / name, map(read, tensors), {"format": "pt"} | aliases)
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(t.nbytes for part in files.values() for t in part.values())},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    stem = next(iter(files)).rpartition("-00001-of-")[0]
    (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
