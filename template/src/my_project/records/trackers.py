"""Accelerate's trackers; a tracker that fails never ends the run."""

import logging
import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from ..run_folder import Run

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of a run; one that fails is left out from then on."""

    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        self.accelerator = accelerator
        self.run = run

    def start(self, step: int) -> None:
        """Start the trackers one by one, so that a failing one does not affect the others.

        Args:
            step: steps done; a resumed run continues the same curves.
        """
        name = self.run.config.run_name
        started: list[Any] = []
        init_kwargs = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"name": name, "id": self.run.id, "resume": "allow"},
        }
        for tracker in self.accelerator.log_with:
            is_wandb = str(tracker) == "wandb"  # there, one project holds all runs
            project = os.environ.get("WANDB_PROJECT") or __name__.partition(".")[0]
            self.accelerator.log_with = [tracker]
            self.accelerator.trackers = []
            try:
                self.accelerator.init_trackers(
                    project if is_wandb else name, init_kwargs=init_kwargs
                )
                started += self.accelerator.trackers
            except Exception as error:
                report(str(tracker), "start", error)
        self.accelerator.trackers = started

    def log(self, record: dict[str, Any]) -> None:
        """Log a record of metrics.jsonl."""
        if record["kind"] not in ("interval", "evaluation"):
            return
        values = {
            name: value
            for name, value in record.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        self._each("log", lambda tracker: tracker.log(dict(values), step=record["step"]))

    def finish(self) -> None:
        """Flush and close each tracker."""
        self._each("finish", lambda tracker: tracker.finish())

    def _each(self, action: str, function: Callable[[Any], Any]) -> None:
        for tracker in [*self.accelerator.trackers]:
            try:
                function(tracker)
            except Exception as error:
                report(tracker.name, action, error)
                self.accelerator.trackers.remove(tracker)


def report(tracker: str, action: str, error: Exception) -> None:
    """Log in one line which tracker failed."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    logger.error("tracker %s could not %s and is disabled: %s", tracker, action, reason)
