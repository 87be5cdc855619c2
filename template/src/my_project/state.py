"""The state of training that a checkpoint holds besides tensors, and what follows from it.

The loop passes in the numbers of each finished step and the results of each evaluation; the state
decides when an evaluation is due, which weights are the best, and when the run has ended.
"""

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .config import Config, ConfigError
from .contract import no_such_metric
from .files import Json
from .run_folder import Run

logger = logging.getLogger(__name__)

# A relative tolerance. Rounding on another CPU or world size changes the sums by less than this.
ROUNDING = 1e-6


class NotFiniteError(RuntimeError):
    """Too many steps were skipped, since their gradient was not finite or they had no items.

    Args:
        message: what happened.
        facts: more fields of the error file (docs/run-folder.md).
    """

    def __init__(self, message: str, **facts: float | None) -> None:
        super().__init__(message)
        self.facts = facts


class StepReport(NamedTuple):
    """The numbers of a finished step; sums are over micro-batches and, unless noted, all ranks."""

    step: int
    grad_norm: float  # before clipping
    own_loss_sum: float  # of this rank alone
    loss_sum: float
    num_items: float  # examples or tokens, as the recipe counts them
    stop_votes: float  # number of ranks that have been asked to stop
    save_votes: float  # 1 if a time-based save is due on rank 0
    scalars: dict[str, float]  # sums of the recipe's scalars, by name
    own_seconds: float = 0.0  # from the step's start until this rank starts the all-reduce

    @property
    def is_skipped(self) -> bool:
        """Return whether the step has left weights and optimizer state untouched."""
        return not (math.isfinite(self.grad_norm) and self.num_items > 0)


@dataclass(kw_only=True)
class TrainState:
    """What the loop must remember besides tensors: the field `state` of a checkpoint's manifest."""

    step: int = 0  # optimizer steps done; data, schedule and random numbers follow from it
    stream_states: list[Json] = field(default_factory=list)  # by lane; [] if lanes have none
    results: dict[str, float] = field(default_factory=dict)  # results of the last evaluation
    evaluated_step: int = -1
    best: float | None = None  # best value of evaluation.best_metric
    best_of: str = ""  # the mode and the metric that `best` is for
    best_step: int = 0
    evaluations_since_best: int = 0
    lr_reductions: int = 0  # number of reductions by the schedule plateau
    interval_loss_sum: float = 0.0  # summed since the last record
    interval_num_items: float = 0.0  # items since the last record
    interval_scalars: dict[str, float] = field(default_factory=dict)  # sums since the last record
    interval_steps: int = 0  # since the last record
    interval_skipped_steps: int = 0  # since the last record
    skipped_steps: int = 0
    consecutive_skipped_steps: int = 0

    def to_dict(self) -> dict[str, Json]:
        """Return the fields by name, as a manifest holds them."""
        return dataclasses.asdict(self)

    def restore(self, saved: dict[str, Json], config: Config, *, is_own: bool = True) -> None:
        """Restore the fields from a checkpoint.

        A field that was added after the save keeps its default. The best value is dropped if it is
        for another metric or mode, or from another run.

        Args:
            saved: the field `state` of the checkpoint's manifest.
            config: the config of this run.
            is_own: whether this run has saved the checkpoint.

        Raises:
            ConfigError: a field has a value of a wrong type.
        """
        for f in dataclasses.fields(self):
            before = getattr(self, f.name)
            value = saved.get(f.name, before)
            kind = (int, float) if isinstance(before, int | float | None) else type(before)
            if value is not before and not isinstance(value, kind):
                raise ConfigError(f"a checkpoint's state has {f.name} {value!r}: it is damaged.")
            setattr(self, f.name, value)
        is_same = self.best_of in ("", best_criterion(config))  # "": no best value yet
        if not (is_own and is_same):
            self.best = None
            self.evaluations_since_best = 0
        if not is_own:
            self.best_step = 0

    def observe(self, report: StepReport) -> None:
        """Count a finished step."""
        self.interval_steps += 1
        if report.is_skipped:
            self.skipped_steps += 1
            self.interval_skipped_steps += 1
            self.consecutive_skipped_steps += 1
            if self.consecutive_skipped_steps == 1 and not math.isfinite(report.own_loss_sum):
                text = "step %d is skipped: the loss on this rank is %s"
                logger.warning(text, report.step + 1, report.own_loss_sum)
            return
        self.consecutive_skipped_steps = 0
        if math.isfinite(report.loss_sum):
            self.interval_loss_sum += report.loss_sum
            self.interval_num_items += report.num_items
            for name, value in report.scalars.items():
                self.interval_scalars[name] = self.interval_scalars.get(name, 0.0) + value
        else:
            text = "step %d: the loss is %s, but its gradient is finite; the records omit this loss"
            logger.warning(text, report.step + 1, report.loss_sum)

    def check_skipped(self, report: StepReport, limit: int) -> None:
        """Check that the last `limit` steps were not all skipped.

        Raises:
            NotFiniteError: all of them were skipped; raised on all ranks.
        """
        step, loss, in_a_row = report.step + 1, report.own_loss_sum, self.consecutive_skipped_steps
        if in_a_row < limit:
            return
        has_items = report.num_items != 0
        problem = "gradient was not finite" if has_items else "recipe's loss returned num_items 0"
        raise NotFiniteError(
            f"the {problem} in {in_a_row} steps in a row, up to step {step}; the loss on this rank"
            f" is {loss} (optim.max_skipped_steps is {limit}): check the data and labels, or lower"
            " optim.lr",
            skipped_from=step + 1 - in_a_row,
            skipped_to=step,
            num_items=report.num_items,
            loss_is_finite=math.isfinite(loss),
        )

    def begin_interval(self) -> None:
        """Reset the sums and counts of the interval after a record."""
        self.interval_loss_sum = 0.0
        self.interval_num_items = 0.0
        self.interval_scalars = {}
        self.interval_steps = 0
        self.interval_skipped_steps = 0

    def evaluation_is_due(self, run: Run) -> bool:
        """Return whether an evaluation is due at this step and has not been done."""
        due = self.step >= run.total_steps
        due |= self.step > 0 and is_due(run.config.evaluation.every_steps, self.step)
        return due and self.evaluated_step != self.step

    def record_evaluation(self, config: Config, results: dict[str, float]) -> bool:
        """Record the results of an evaluation; return whether they are the best so far.

        Raises:
            ConfigError: evaluation.best_metric is not among the results.
        """
        self.results = results
        self.evaluated_step = self.step
        name = config.evaluation.best_metric
        if name is None:
            return False
        if name not in results:
            raise no_such_metric(name, results)
        sign = 1 if config.evaluation.best_mode == "max" else -1
        value, best = results[name], self.best
        is_better = math.isfinite(value) and (
            best is None or sign * (value - best) > ROUNDING * min(abs(value), abs(best))
        )
        if is_better:
            self.best = value
            self.best_of = best_criterion(config)
            self.best_step = self.step
        self.evaluations_since_best = 0 if is_better else self.evaluations_since_best + 1
        is_plateau = not is_better and config.optim.schedule == "plateau"
        if is_plateau and self.evaluations_since_best % config.optim.plateau_patience == 0:
            self.lr_reductions += 1
        return is_better

    def end_reason(self, run: Run) -> str:
        """Return why the run ends; an empty string while it continues."""
        if self.step >= run.total_steps and not self.evaluation_is_due(run):
            return "all steps done"
        evaluation = run.config.evaluation
        if evaluation.patience is not None and self.evaluations_since_best >= evaluation.patience:
            return f"{evaluation.best_metric} has not improved in {evaluation.patience} evaluations"
        return ""

    def check_trained(self) -> None:
        """Refuse to finish a run in which no step has changed the weights."""
        if self.skipped_steps >= self.step:
            raise NotFiniteError(
                f"all {self.step} steps were skipped (the gradient was not finite, or num_items was"
                " 0), so no weight has changed: train longer (fp16 finds its loss scale in the"
                " first steps), check the data, or lower optim.lr",
                skipped_from=1,
                skipped_to=self.step,
            )


def best_criterion(config: Config) -> str:
    """Return the mode and name of the metric that decides which weights are best."""
    return f"{config.evaluation.best_mode} {config.evaluation.best_metric}"


def is_due(every_steps: int | None, step: int) -> bool:
    """Return whether an action with this interval is due after this step; None: never."""
    return every_steps is not None and step % every_steps == 0
