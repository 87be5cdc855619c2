"""Answers of the recipe at each evaluation: `predict_samples` for a few validation samples.

<run folder>/samples/step_00000110/ holds answers.txt and what the recipe has written, such as
pictures. What fails here is a warning, unless the model is sharded: then the other ranks would wait
in a gather for the one that failed. The random state is as before.
"""

import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset

from ..config import Config
from ..evaluate import evaluation_mode
from ..loading.loader import Fetch, identity, make_loader
from ..loading.seeding import fork_rng, seed_forward
from ..recipe import optional
from ..run_folder import Run

logger = logging.getLogger(__name__)
KEPT = 3  # newest folders, so that a long run does not fill the disk
MAX_CHARACTERS = 10_000  # of a text in the record; the file holds all of it
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
REPORTED: set[tuple[str, str]] = set()  # starts of runs, and what has failed in them


class LoadedSubset(Subset):
    """A torch.utils.data.Subset whose samples are in memory, and given on a device."""

    def __init__(self, data: Any, indices: list[int], loaded: list[Any], device: Any) -> None:
        super().__init__(data, indices)
        self.loaded = loaded
        self.device = device

    def __getitem__(self, index: Any) -> Any:
        return send_to_device(self.loaded[index], self.device)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def show(
    accelerator: Accelerator,
    run: Run,
    model: Any,
    data_info: dict[str, Any],
    validation_sets: dict[str, Any],
) -> dict[str, Any]:
    """Let the recipe answer with the weights as they are; on every rank, after an evaluation.

    Args:
        accelerator: this process's Accelerator.
        run: the run folder, at its step.
        model: prepared; called with a function of the plain model (sharding.RecipeModule).
        data_info: of prepare_data.
        validation_sets: by name; the samples are of the first.

    Returns:
        On rank 0, where the recipe gives them: "sample", a text, and "pictures", paths relative to
        the run folder. Elsewhere nothing.
    """
    config, device = run.config, accelerator.device
    predict_samples = optional(config.recipe, "predict_samples")
    wanted = config.evaluation.samples if predict_samples and validation_sets else 0
    if not wanted:
        return {}
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    gpus = [device] if device.type == "cuda" else []
    shown: dict[str, Any] = {}
    with (
        fork_rng(),
        torch.random.fork_rng(devices=gpus),
        evaluation_mode(accelerator, model),  # a collective of all ranks
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        if not (is_sharded or accelerator.is_main_process):  # rank 0 has the whole model
            return {}
        data = None
        with reported(run, "reading the samples"):
            data = choose(config, validation_sets, wanted, device)
        seed_forward(config.seed, 0, 0, device)  # what is drawn at random stays the same
        if is_sharded and not on_every_rank(accelerator, data is not None):
            data = None
        if data is not None:
            with nullcontext() if is_sharded else reported(run, "predict_samples"):
                answer = model(predict_samples, data_info, data, Path(folder))
                if accelerator.is_main_process:
                    with reported(run, "writing"):
                        shown = keep(run, text_of(answer), Path(folder))
    return shown


@contextmanager
def reported(run: Run, what: str) -> Iterator[None]:
    """Report an error in a line, once in a start; training goes on."""
    try:
        yield
    except Exception as error:
        if (run.token, what) not in REPORTED:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("samples: %s failed, and the run goes on: %s", what, reason)
        REPORTED.add((run.token, what))


def on_every_rank(accelerator: Accelerator, is_true: bool) -> bool:
    """Return whether all ranks are: one alone would wait in the forward of a sharded model."""
    everywhere = torch.tensor(int(is_true), device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
    return bool(everywhere)


def choose(config: Config, validation_sets: dict[str, Any], wanted: int, device: Any) -> Any:
    """Read evenly spaced samples of the first validation set."""
    data = next(iter(validation_sets.values()))
    count = min(wanted, len(data))
    indices = [i * len(data) // count for i in range(count)]
    return LoadedSubset(data, indices, load(config, data, indices), device)


def load(config: Config, data: Any, indices: list[int]) -> list[Any]:
    """Read samples as an evaluation does: in a loader worker, if the config has any.

    In this process the dataset may open a file, whose offset later workers would share.
    """
    fetch = Fetch(data, identity, config.seed, config.batches.seed_samples)
    keys = [[("evaluation", i) for i in indices]]
    brief = {"max_workers": 1, "persistent_workers": False, "pin_memory": False}
    loader = make_loader(config.batches, fetch, torch.device("cpu"), batch_sampler=keys, **brief)
    (loaded,) = loader
    return loaded


def text_of(answer: Any) -> str:
    """Return a text, or a table or another renderable of rich as one."""
    if isinstance(answer, str):
        return answer
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=100, color_system=None).print(answer)
    return file.getvalue()


# ---- files ---------------------------------------------------------------------------------------
def keep(run: Run, answer: str, answers: Path) -> dict[str, Any]:
    """Write the answer and copy files into the run folder, and remove older ones."""
    files = sorted(path for path in answers.iterdir() if path.is_file())
    if not answer and not files:
        return {}
    folder = run.folder / "samples" / f"step_{run.step:08d}"
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "answers.txt").write_text(answer, encoding="utf-8")
    for path in files:
        shutil.copyfile(path, partial / path.name)
    # the newest before this step stay; later ones are of steps not done
    others = sorted(folder.parent.glob("step_????????"))
    before = [path for path in others if path.name < folder.name]
    for path in {*others} - {*before[1 - KEPT :]}:
        shutil.rmtree(path)
    os.replace(partial, folder)
    shown: dict[str, Any] = {"sample": answer[:MAX_CHARACTERS]} if answer else {}
    if pictures := [path.name for path in files if path.suffix.lower() in IMAGES]:
        shown["pictures"] = [f"samples/{folder.name}/{name}" for name in pictures]
    return shown
