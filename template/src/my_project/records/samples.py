"""Show, at each evaluation, what the recipe's `predict_samples` answers for validation samples.

<run folder>/samples/step_00000110/ contains answers.txt and files that the recipe has written, such
as pictures. An error here is only a warning, unless the model is sharded: the other ranks would
then wait in a gather for the rank that failed.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset

from ..config import Config
from ..evaluate import evaluation_mode
from ..failures import exception_frames, own_frame
from ..files import Json, T, discard
from ..loading.layout import evenly_spaced
from ..loading.loader import Fetch, identity, make_loader
from ..loading.seeding import seed_forward
from ..recipe import DataInfo, Dataset, Datasets, optional
from ..run_folder import Run
from ..words import rendered, short_path, shortened

logger = logging.getLogger(__name__)
KEPT = 3  # the number of newest folders that are kept: a long run must not fill the disk
MAX_CHARACTERS = 10_000  # maximum length of a text in the record; the file has the whole text
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}


class LoadedSubset(Subset[T]):
    """A torch.utils.data.Subset whose samples are already loaded."""

    def __init__(self, data: Any, indices: list[int], loaded: Any) -> None:
        super().__init__(data, indices)
        self.loaded = loaded

    def __getitem__(self, index: int) -> T:
        return self.loaded[index]

    def __getitems__(self, indices: list[int]) -> list[T]:
        return [self[index] for index in indices]


def show(
    accelerator: Accelerator,
    run: Run,
    model: nn.Module,
    data_info: DataInfo,
    validation_sets: Datasets,
) -> dict[str, Json]:
    """Let the recipe answer with the current weights. Called by every rank after an evaluation.

    Args:
        accelerator: this process's Accelerator.
        run: the run folder.
        model: the prepared model, called with a function of the plain one (contract.RecipeModule).
        data_info: the result of prepare_data.
        validation_sets: the validation sets, by name; the samples are from the first one.

    Returns:
        On rank 0, if the recipe gives them, "sample" (a text) and "pictures" (paths relative to the
        run folder); otherwise {}.
    """
    config, device = run.config, accelerator.device
    predict_samples = optional(config.recipe, "predict_samples")
    if not (predict_samples and validation_sets and config.evaluation.samples):
        return {}
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    answer: Any = None
    with (
        evaluation_mode(accelerator, model),  # a collective of all ranks
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        if not (is_sharded or accelerator.is_main_process):  # rank 0 has the whole model
            return {}
        with nullcontext() if is_sharded else reported():
            data = read(config, next(iter(validation_sets.values())), device)
            seed_forward(config.seed, 0, 0, device)  # random numbers are the same each time
            answer = model(predict_samples, data_info, data, Path(folder)) or ""  # "": only files
        if answer is not None and accelerator.is_main_process:
            with reported():
                return keep(run, rendered(answer), Path(folder))
    return {}


@contextmanager
def reported() -> Iterator[None]:
    """Log an error of the block in one line, with its place in the code; training goes on."""
    try:
        yield
    except Exception as error:
        frame = own_frame(exception_frames(error))
        place = f" ({short_path(frame.file)}, line {frame.line})" if frame else ""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("the samples of this evaluation are left out: %s%s", reason, place)


def read(config: Config, data: Dataset, device: torch.device) -> LoadedSubset:
    """Read samples onto a device as an evaluation does: in a loader worker, if there are any.

    In this process the dataset might open a file, whose offset later workers would share.
    """
    indices = evenly_spaced(data, config.evaluation.samples)
    fetch = Fetch(data, identity, config.seed, config.batches.seed_samples)
    keys = [[("evaluation", i) for i in indices]]
    options = {"max_workers": 1, "persistent_workers": False, "pin_memory": False}
    loader = make_loader(config.batches, fetch, torch.device("cpu"), batch_sampler=keys, **options)
    (loaded,) = loader
    return LoadedSubset(data, indices, send_to_device(loaded, device))


# ---- files ---------------------------------------------------------------------------------------
def keep(run: Run, answer: str, answers: Path) -> dict[str, Json]:
    """Write the answer and copy files into a folder for this step, and remove older folders."""
    files = sorted(path for path in answers.iterdir() if path.is_file())
    if not answer and not files:
        return {}
    folder = run.folder / "samples" / f"step_{run.step:08d}"
    discard(folder)  # left by a start that trained this step before
    folder.mkdir(parents=True)
    (folder / "answers.txt").write_text(answer, encoding="utf-8")
    for path in files:
        shutil.copyfile(path, folder / path.name)
    folders = sorted(folder.parent.glob("step_????????"))
    done = [path for path in folders if path.name <= folder.name]  # later ones will be replaced
    for path in {*folders} - {*done[-KEPT:]}:
        shutil.rmtree(path)
    shown: dict[str, Json] = {"sample": shortened(answer, MAX_CHARACTERS)} if answer else {}
    if pictures := [path.name for path in files if path.suffix.lower() in IMAGES]:
        shown["pictures"] = [f"samples/{folder.name}/{name}" for name in pictures]
    return shown
