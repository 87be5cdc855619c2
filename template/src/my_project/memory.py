"""Find a smaller micro-batch to try when memory runs out before this start has saved a step.

The launcher starts all processes again with that size (launching/memory.py); without the launcher,
the error names the size. The global batch stays the same, and so does the curve, except for
dropout. A saved step shows that a micro-batch fits. The first step alone does not show it: the
optimizer allocates its state at the end of that step, so often only the second step runs out of
memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from traceback import walk_tb

from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .checkpoint.saving import Checkpoints
from .evaluate import evaluate
from .failures import WORKER_TRACEBACK, exception_cause, write_to_logs
from .loading import layout as layouts
from .loading.layout import BatchLayout
from .recipe import Dataset
from .run_files import newest_checkpoint, records
from .run_folder import Run

NOTE = "micro_batch_rank"  # prefix of a file in the log folder, which the launcher reads


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """What to do if a micro-batch does not fit in memory."""

    advice: str
    next_micro_batch_size: int | None = None  # the size that the launcher tries
    exit_code: int = 1


@contextmanager
def memory_explained(
    accelerator: Accelerator, run: Run, layout: BatchLayout, model: nn.Module, train_set: Dataset
) -> Iterator[None]:
    """Add advice to an out-of-memory error.

    If host memory runs out, advice is added only if training runs on the CPU and the error is not
    that of a loader worker: fewer workers would help there.
    """
    first_step, is_on_cpu = run.step, accelerator.device.type == "cpu"

    def write_note() -> None:
        smaller = smaller_micro_batch(run, layout, model, train_set)
        write_to_logs(NOTE, asdict(smaller) | {"launch": run.token, "first_step": first_step})

    if is_on_cpu:  # the kernel may kill this process: the launcher then reads the note
        write_note()
        run.when_loss_is_no_sum = write_note
    try:
        yield
    except Exception as error:
        kind = exception_cause(error)
        is_trainer = is_on_cpu and WORKER_TRACEBACK not in str(error)
        is_full = kind == "out of memory" or (kind == "out of host memory" and is_trainer)
        if is_full and _is_from(Checkpoints.save, error):
            setattr(error, "facts", {})  # noqa: B010 - a save does not depend on the micro-batch
        elif is_full and (newest_checkpoint(run.folder) or 0) <= first_step:
            _explain(error, run, smaller_micro_batch(run, layout, model, train_set))
        raise


def _explain(error: Exception, run: Run, smaller: Smaller) -> None:
    """Add the advice to an error, and the facts that its error file states for the launcher."""
    size = run.config.evaluation.batch_size
    if size and _is_from(evaluate, error):
        smaller = Smaller(advice=f"Lower evaluation.batch_size, which is {size}.")
    error.add_note(smaller.advice)
    facts = asdict(smaller)
    del facts["advice"]
    setattr(error, "facts", facts)  # noqa: B010 - see failures.exception_failure


def _is_from(function: Callable, error: Exception) -> bool:
    """Return whether an error was raised in a function, or in what it called."""
    return any(frame.f_code is function.__code__ for frame, _ in walk_tb(error.__traceback__))


def smaller_micro_batch(run: Run, layout: BatchLayout, model: nn.Module, data: Dataset) -> Smaller:
    """Return what to do if the micro-batches of a layout do not fit in memory."""
    size, total, lanes = layout.micro_batch_size, layout.global_batch_size, 0
    lanes = data.lanes if layouts.is_stream(data) else 0
    sizes = [n for n in range(size // 2, 0, -1) if not lanes % -(-total // n)]
    if not sizes:
        return Smaller(
            advice=f"batches.micro_batch_size cannot be less than {size} here, where the global"
            f" batch has {total} samples: save memory with --precision bf16,"
            " --distributed.activation_checkpointing true, or FSDP2."
        )
    if why := _why_the_curve_would_change(run, model):
        return Smaller(
            advice=f"batches.micro_batch_size {sizes[0]} may fit, but you have to set it yourself:"
            f" it may change the curve, since {why}.",
            exit_code=2,
        )
    return Smaller(
        advice=f"Micro-batches of {size} do not fit; batches.micro_batch_size {sizes[0]} is the"
        " next to try: accumulation rises to match, so the curve is the same except for dropout.",
        next_micro_batch_size=sizes[0],
    )


def _why_the_curve_would_change(run: Run, model: nn.Module) -> str:
    """Return why the loss or the model depends on the size of a micro-batch; "" if neither does."""
    if getattr(run.config.recipe, "compares_samples", False):
        return "the loss compares the samples of a micro-batch (compares_samples)"
    # checks/recipe.py looks only before the first step; a later start reads what it recorded
    found = (record.text("problem") for record in records(run.folder, "check"))
    loss = f"{type(run.config.recipe).__name__}.loss ("
    if not run.is_loss_a_sum or any(problem.startswith(loss) for problem in found):
        return "the loss is not a sum over samples (checks.recipe)"
    if run.resumed_from:
        return "this run began from another one's checkpoint, so the loss was not checked"
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            return f"the BatchNorm {name} is in train mode"
    return ""
