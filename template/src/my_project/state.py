"""Where a run stands: which evaluation is due, the best value so far, and when the run has ended.

The state is what a checkpoint holds besides tensors, a dict that train.py makes.
"""

import math
from typing import Any

from . import contract
from .config import Config, ConfigError

EVALUATION = ("results", "evaluated_step", "best", "evaluations_since_best")  # keys of the state
ROUNDING = 1e-6  # relative: sums differ by less on another CPU or number of processes


def check_best_metric(config: Config, data_sets: dict[str, Any]) -> None:
    """Refuse metrics that are none, and a best_metric that no evaluation will give."""
    wanted = config.evaluation.best_metric
    metrics = contract.build_metrics(config.recipe) if data_sets else {}
    names = [f"{data}/{metric}" for data in data_sets for metric in metrics]
    if wanted and not any(wanted == name or wanted.startswith(f"{name}/") for name in names):
        raise ConfigError(
            f"evaluation.best_metric {wanted} is none of {', '.join(names) or 'no metrics at all'}."
        )


def evaluation_is_due(config: Config, state: dict[str, Any], total_steps: int) -> bool:
    """Return whether the weights of the newest step are to be evaluated, and are not yet."""
    step, every_steps = state["step"], config.evaluation.every_steps
    due = step >= total_steps or (every_steps is not None and step > 0 and step % every_steps == 0)
    return due and state["evaluated_step"] != step


def note_best(config: Config, state: dict[str, Any], results: dict[str, float]) -> bool:
    """Return whether these results are the best so far, and count those that were not."""
    state["results"], state["evaluated_step"] = results, state["step"]
    name = config.evaluation.best_metric
    if name is None:
        return False
    if name not in results:
        raise ConfigError(
            f"evaluation.best_metric {name} is none of the results, {', '.join(results)}."
        )
    sign = 1 if config.evaluation.best_mode == "max" else -1
    value, best = results[name], state["best"]
    better = not math.isnan(value) and (
        best is None or sign * (value - best) > ROUNDING * min(abs(value), abs(best))
    )
    state["best"] = value if better else best
    state["evaluations_since_best"] = 0 if better else state["evaluations_since_best"] + 1
    return better


def end_of(config: Config, state: dict[str, Any], total_steps: int) -> str:
    """Say why the run is at its end, or nothing."""
    if state["step"] >= total_steps and not evaluation_is_due(config, state, total_steps):
        return "all steps done"
    patience = config.evaluation.patience
    if patience is not None and state["evaluations_since_best"] >= patience:
        return f"{config.evaluation.best_metric} has not got better in {patience} evaluations"
    return ""


def check_trained(state: dict[str, Any], *, is_fp16: bool) -> None:
    """Refuse to finish a run in which no step has changed the weights."""
    if state["skipped_steps"] >= state["step"]:
        remedy = "train more steps: the first ones find the loss scale of fp16, or " * is_fp16
        raise RuntimeError(
            f"all {state['step']} steps were skipped, since the gradient was not finite or the loss"
            f" counted no item, so the weights are those of the start: {remedy}check the data, or"
            " lower optim.lr"
        )


def is_due(every_steps: int | None, step: int) -> bool:
    """Tell whether something that happens every so many steps happens now."""
    return every_steps is not None and step % every_steps == 0
