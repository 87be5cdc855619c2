"""Show, at each evaluation, what the recipe's `predict_samples` answers for validation samples.

<run folder>/samples/step_00000110/ contains the answer (answers.txt) and files that the recipe has
written, such as pictures. An error here is only a warning. But if the model is sharded, an error in
predict_samples ends the run: the other ranks would wait in a gather for the rank that failed.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from ..failures import exception_frames, exception_reason, own_frame
from ..files import Json, T, discard
from ..loading.layout import evenly_spaced
from ..loading.loader import Fetch, identity, make_loader
from ..loading.seeding import seed_forward
from ..ranks import gather_on_main, on_main_then_broadcast
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
        model: the prepared model, whose forward calls a function with the plain model
            (contract.RecipeModule).
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
    with evaluation_mode(accelerator, model), ExitStack() as stack:  # a collective of all ranks
        if not (is_sharded or accelerator.is_main_process):  # rank 0 has the whole model
            return {}
        data = None
        with reported():
            directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            folder = stack.enter_context(directory)
            data = read(config, next(iter(validation_sets.values())), device)
        if is_sharded:  # no rank may begin a forward without the others
            have_data = gather_on_main(accelerator, data is not None)
            data = data if on_main_then_broadcast(accelerator, lambda: all(have_data)) else None
        if data is None:
            return {}
        with nullcontext() if is_sharded else reported():
            seed_forward(config.seed, 0, 0, device)  # random numbers are the same each time
            answer = model(predict_samples, data_info, data, Path(folder)) or ""  # "": only files
            if accelerator.is_main_process:
                with reported():
                    return keep(run, rendered(answer), Path(folder))
    return {}


@contextmanager
def reported() -> Iterator[None]:
    """Log an exception of the block in one line, with its place in the code, and suppress it."""
    try:
        yield
    except Exception as error:
        frame = own_frame(exception_frames(error))
        place = f" ({short_path(frame.file)}, line {frame.line})" if frame else ""
        reason = exception_reason(error)
        logger.warning("the samples of this evaluation are left out: %s%s", reason, place)


def read(config: Config, data: Dataset, device: torch.device) -> LoadedSubset:
    """Read samples onto a device as an evaluation does: in a loader worker, if the run has workers.

    If this process read them, the dataset might open a file here, and workers that are forked later
    would share the file's offset.
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
    """Write the answer and copy the files into a folder for this step; return the record's fields.

    Only the newest folders are kept.
    """
    files = sorted(path for path in answers.iterdir() if path.is_file())
    if not answer and not files:
        return {}
    folder = run.folder / "samples" / f"step_{run.step:08d}"
    discard(folder)  # an earlier start may have trained this step too
    folder.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    if answer:  # last, since one of the files may have this name
        (folder / "answers.txt").write_text(answer, encoding="utf-8")
    folders = sorted(folder.parent.glob("step_????????"))
    # an earlier start may have left folders of later steps, which this run has not done yet
    done = [path for path in folders if path.name <= folder.name]
    for path in {*folders} - {*done[-KEPT:]}:
        discard(path)
    shown: dict[str, Json] = {"sample": shortened(answer, MAX_CHARACTERS)} if answer else {}
    if pictures := [path.name for path in files if path.suffix.lower() in IMAGES]:
        shown["pictures"] = [f"samples/{folder.name}/{name}" for name in pictures]
    return shown
