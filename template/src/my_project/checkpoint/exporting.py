"""Write the exports of a run, export/ and best/: weights that load without accelerate.

    export/
      model.safetensors        with the keys of the plain module, without wrappers
      config.yaml              the run's config
      data_info.json           what the recipe's prepare_data returned
      step.json                the step of the weights, and their origin
      README.md                the model card; in export/ only

A recipe may write other files than model.safetensors (recipe.py). weights.py reads exports.
"""

import json
from pathlib import Path

from torch import Tensor, nn

from .. import contract
from ..config import to_yaml
from ..files import Json
from ..model_card import write_model_card
from ..recipe import DataInfo, optional
from ..run_folder import Run
from .saving import Checkpoints, Read
from .shards import in_file_order, is_sharded, model_tensors, require_finite, save_tensors


def export(
    run: Run,
    data_info: DataInfo,
    model: nn.Module,
    checkpoints: Checkpoints,
    name: str = "export",
) -> None:
    """Replace export/ or best/. Called by every rank; rank 0 writes.

    The tensors are read one at a time from the files of a checkpoint (Checkpoints.replace_export);
    for best/, this happens while training continues. If a recipe's `export` returns no tensors, it
    writes all files itself. This function then waits for it, since `export` may draw random numbers
    and read the model, which training would change. If the model is sharded, the recipe's `export`
    gets an unsharded copy for this.

    Args:
        run: the run and its folder.
        data_info: from the recipe's prepare_data.
        model: the model, with the EMA swapped in if there is one.
        checkpoints: the run's checkpoints.
        name: "export" or "best".

    Raises:
        ValueError: a value is not finite. If this function does not wait until best/ is written,
            the next save or export raises the error.
    """
    recipe = run.config.recipe
    state = model_tensors(model)
    recipe_export = optional(recipe, "export")
    chosen = recipe_export(model, data_info, state, None) if recipe_export else ("model", state)
    stem, weights = chosen or ("model", state)
    weights = dict(sorted(weights.items()))  # in the same order on all ranks
    needs_whole = not chosen and is_sharded(model)
    if not chosen and not needs_whole:
        weights = {}

    def fill(folder: Path) -> None:
        if not weights:  # otherwise, values are checked when the shards are written
            for key, tensor in state.items():
                require_finite(key, tensor)
        if recipe_export and not needs_whole:
            recipe_export(model, data_info, state, folder)
        (folder / "config.yaml").write_text(to_yaml(run.config), encoding="utf-8")
        (folder / "data_info.json").write_text(json.dumps(data_info))
        step_info: dict[str, Json] = {"step": run.step}
        step_info |= {"provenance": vars(run.provenance)}
        (folder / "step.json").write_text(json.dumps(step_info))
        if name == "export":  # best/ has no card (model_card.py)
            write_model_card(run, model, folder)

    def write(folder: Path, read: Read) -> None:
        def value(key: str) -> Tensor:
            # FSDP saves float32, and an earlier start of this run may have used FSDP
            return read(key).to(weights[key].dtype)

        if not needs_whole:
            stored = in_file_order({key: weights[key] for key in weights if key not in aliases})
            metadata = {"format": "pt"} | aliases
            save_tensors(stored, folder / f"{stem}.safetensors", map(value, stored), metadata)
            return
        plain = contract.build_model(run.config, data_info)
        whole = model_tensors(plain)
        for key, tensor in whole.items():
            tensor.copy_(value(key))
        recipe_export(plain, data_info, whole, folder)

    keys = {id(tensor): key for key, tensor in state.items()}
    saved_names = {key: keys.get(id(tensor)) for key, tensor in weights.items()}
    aliases = _aliases(saved_names, checkpoints.first_names)
    checkpoints.replace_export(run.folder / name, fill, weights, saved_names, write)
    if name == "export" or needs_whole:
        checkpoints.wait()


def _aliases(saved_names: dict[str, str | None], first_names: dict[str, str]) -> dict[str, str]:
    """Return the aliases of tied tensors: {another key: the key under which it is written}."""
    keys = {name: key for key, name in saved_names.items() if name}
    first_keys = {key: keys.get(first_names.get(name, name), key) for name, key in keys.items()}
    return {key: first for key, first in first_keys.items() if key != first}
