"""The trackers of a run: accelerate's, by their names. One that fails never ends the run.

The project is the package (W&B: or WANDB_PROJECT). A resumed run goes on in TensorBoard and W&B,
which get texts and pictures too; any other tracker gets a run for each start.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from accelerate import Accelerator

from ..config import to_dict, to_yaml
from ..contract import TRAIN
from ..files import flat
from ..run_folder import Run

logger = logging.getLogger(__name__)
ABOUT = {"kind", "step", "epoch", "elapsed_seconds", "time"}  # in every record
LEFT_OUT = (ABOUT - TRAIN) | {"steps", "skipped", "slowest_rank", "slowest_host"}
WITH_SAMPLES = {"tensorboard", "wandb"}  # take texts and pictures


class Trackers:
    """The trackers of a run, on rank 0; one that fails is left out from then on."""

    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        self.accelerator = accelerator
        self.run = run
        self.logged: dict[str, int] = {}

    def start(self, step: int, logged: dict[str, int] | None = None) -> None:
        """Start the trackers one by one, so that a failing one does not affect the others.

        Args:
            step: steps done; a resumed run continues the same curves.
            logged: by kind, the step of the newest record that an earlier start has logged. A
                killed run repeats steps, of which W&B already holds the values.
        """
        self.logged = logged or {}
        package = __name__.partition(".")[0]
        settings = {
            name: value if value is None or isinstance(value, (str, int, float)) else str(value)
            for name, value in flat(to_dict(self.run.config)).items()
        }
        started: list[Any] = []
        for kind in self.accelerator.log_with:
            tracker = str(kind)
            self.accelerator.log_with = [kind]
            self.accelerator.trackers = []
            try:
                project, config = package, settings
                if tracker == "tensorboard":  # takes the run's name here; its config is below
                    project, config = self.run.config.run_name, None
                elif tracker == "wandb":
                    project = os.environ.get("WANDB_PROJECT") or package
                kwargs = {tracker: self._init_kwargs(tracker, step)}
                self.accelerator.init_trackers(project, config, kwargs)
                started += self.accelerator.trackers
            except Exception as error:
                report(tracker, "start", error)
        self.accelerator.trackers = started
        self._each("store the config", lambda tracker: self._store_config(tracker, settings, step))

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, and its text and pictures."""
        kind, step = record.get("kind", ""), record["step"]
        if values := values_of(record):
            self._each("log", lambda tracker: tracker.log({**values}, step=step), kind, step)
        text = record.get("sample")
        pictures = [self.run.folder / path for path in record.get("pictures") or ()]
        if text or pictures:
            show_in = partial(show, text=text, pictures=pictures, step=step)
            self._each("show samples", show_in, kind, step, disables=False)

    def finish(self) -> None:
        """Flush and close each tracker."""
        self._each("finish", lambda tracker: tracker.finish())

    def _each(
        self,
        action: str,
        function: Callable[[Any], Any],
        kind: str = "",
        step: int = 0,
        *,
        disables: bool = True,
    ) -> None:
        for tracker in [*self.accelerator.trackers]:
            # TensorBoard discards what comes after the step that a run resumes from
            if tracker.name == "wandb" and kind and self.logged.get(kind, -1) >= step:
                continue
            try:
                function(tracker)
            except Exception as error:
                report(tracker.name, action, error, "is disabled" if disables else "goes on")
                if disables:
                    self.accelerator.trackers.remove(tracker)

    def _init_kwargs(self, tracker: str, step: int) -> dict[str, Any]:
        """Return what accelerate passes on to the tool."""
        if tracker == "tensorboard":
            return {"purge_step": step + 1}
        if tracker == "wandb":
            runs = Path(self.run.config.runs_folder).absolute()
            folder = os.environ.get("WANDB_DIR") or str(runs)
            name = self.run.config.run_name
            return {"name": name, "id": self.run.id, "resume": "allow", "dir": folder}
        return {}

    def _store_config(self, tracker: Any, settings: dict[str, Any], step: int) -> None:
        """Write the config into TensorBoard's event files: a text, and once as hyperparameters."""
        if tracker.name != "tensorboard":
            return
        writer = tracker.tracker
        writer.add_text("config", indent(to_yaml(self.run.config), "    "), step)  # as it stands
        if len([*Path(writer.log_dir).glob("events.out.tfevents.*")]) == 1:  # the first start
            hparams = import_module("torch.utils.tensorboard.summary").hparams
            # The writer's add_hparams would open another file, note the end of the run, and name
            # the columns of the table: TensorBoard then leaves out what only other runs have.
            named = {name: "null" if value is None else value for name, value in settings.items()}
            _, start, _ = hparams(named, {})
            writer.file_writer.add_summary(start)
        writer.flush()


def report(tracker: str, action: str, error: Exception, effect: str = "is disabled") -> None:
    """Log in one line which tracker failed."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    logger.error("tracker %s could not %s and %s: %s", tracker, action, effect, reason)


# ---- what is logged ------------------------------------------------------------------------------
def values_of(record: dict[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a record by their tags: train/, perf/, or as the recipe named them."""
    kind = record.get("kind")
    numbers = {
        name: value
        for name, value in record.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if kind == "interval":
        return {
            name if "/" in name else f"{'train' if name in TRAIN else 'perf'}/{name}": value
            for name, value in numbers.items()
            if name not in LEFT_OUT
        }
    if kind not in ("evaluation", "checkpoint"):
        return {}
    seconds = numbers.pop("seconds", None)
    values = {name: value for name, value in numbers.items() if name not in ABOUT}
    return values | ({} if seconds is None else {f"perf/{kind}_seconds": seconds})


def show(tracker: Any, text: str | None, pictures: list[Path], step: int) -> None:
    """Log a text of several lines as it stands, and pictures by the names of their files."""
    import numpy as np

    is_wandb = tracker.name == "wandb"
    if tracker.name not in WITH_SAMPLES:
        return
    if text and is_wandb:
        page = f"<pre style='white-space: pre-wrap'>{escape(text)}</pre>"
        html = import_module("wandb").Html(page, inject=False)
        tracker.log({"samples/text": html}, step=step)
    elif text:  # Markdown, in which an indented text is literal
        tracker.log({"samples/text": indent(text, "    ")}, step=step)
    if pictures:
        read = import_module("PIL.Image").open
        images = {f"samples/{p.stem}": np.asarray(read(p).convert("RGB"))[None] for p in pictures}
        tracker.log_images(images, step=step, **({} if is_wandb else {"dataformats": "NHWC"}))
