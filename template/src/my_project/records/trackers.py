"""The trackers of a run: accelerate's, by their names. One that fails never ends the run.

The project is the package or, where it is set, the tool's own variable (WANDB_PROJECT and the
like); in it a run has the name of its folder, and a resumed run goes on under it.
"""

import logging
import os
import posixpath
import re
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from accelerate import Accelerator

from ..config import Config, to_dict
from ..run_folder import Run
from . import event_files

logger = logging.getLogger(__name__)
TRAIN = {"loss", "learning_rate", "gradient_norm", "epoch", "skipped_steps"}
ABOUT = {"kind", "step", "epoch", "elapsed_seconds", "time"}  # in every record
LEFT_OUT = (ABOUT - TRAIN) | {"steps", "skipped", "slowest_rank", "slowest_host"}
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "clearml": "CLEARML_PROJECT",
    "swanlab": "SWANLAB_PROJ_NAME",
}
WITH_OWN_CONFIG = {"tensorboard", "mlflow"}  # accelerate's would open a file, or fail on a resume
WITH_SAMPLES = {"tensorboard", "wandb", "mlflow", "trackio"}  # take texts and pictures
RUN_TAG = "run_folder_id"  # of MLflow: "run" in run.json


class Trackers:
    """The trackers of a run, on rank 0; one that fails is left out from then on."""

    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        self.accelerator = accelerator
        self.run = run
        self.logged: dict[str, int] = {}
        self.with_samples = set(WITH_SAMPLES)
        self.variables: list[str] = []  # of the environment, set by this run

    def start(self, step: int, logged: dict[str, int] | None = None) -> None:
        """Start the trackers one by one, so that a failing one does not affect the others.

        Args:
            step: steps done; a resumed run continues the same curves.
            logged: by kind, the step of the newest record that an earlier start has logged. A
                killed run repeats steps, of which trackers already hold the values.
        """
        self.logged = logged or {}
        package, name = __name__.partition(".")[0], self.run.config.run_name
        settings = flat(self.run.config)
        started: list[Any] = []
        for kind in self.accelerator.log_with:
            tracker = str(kind)
            self.accelerator.log_with = [kind]
            self.accelerator.trackers = []
            try:
                kwargs = self._init_kwargs(step)
                project = os.environ.get(PROJECT_VARIABLES.get(tracker, "")) or package
                if tracker == "mlflow":
                    kwargs["mlflow"] |= self._use_local_mlflow()
                    kwargs["mlflow"] |= find_mlflow_run(project, self.run.id)
                # two take the name of the run here, the others that of the project
                first = {"tensorboard": event_files.folder_of(self.run), "aim": name}
                config = None if tracker in WITH_OWN_CONFIG else settings
                self.accelerator.init_trackers(first.get(tracker, project), config, kwargs)
                started += self.accelerator.trackers
            except Exception as error:
                report(tracker, "start", error)
        self.accelerator.trackers = started
        self._each("store the config", lambda tracker: self._store_config(tracker, settings, step))

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, and its text and pictures."""
        kind, step = record.get("kind", ""), record["step"]
        if values := values_of(record):
            self._each("log", lambda tracker: log_values(tracker, values, step), kind, step)
        text = record.get("sample")
        paths = [self.run.folder / path for path in record.get("pictures") or ()]
        images = {path.stem: path for path in paths}
        if text or images:
            self._each("show", lambda tracker: self._show(tracker, text, images, step), kind, step)

    def finish(self) -> None:
        """Flush and close each tracker."""
        self._each("finish", lambda tracker: tracker.finish())
        for name in self.variables:
            os.environ.pop(name, None)

    def _each(
        self, action: str, function: Callable[[Any], Any], kind: str = "", step: int = 0
    ) -> None:
        for tracker in [*self.accelerator.trackers]:
            # TensorBoard alone discards what comes after the step that a run resumes from
            is_logged = kind and self.logged.get(kind, -1) >= step
            if is_logged and tracker.name != "tensorboard":
                continue
            try:
                function(tracker)
            except Exception as error:
                report(tracker.name, action, error)
                self.accelerator.trackers.remove(tracker)

    def _init_kwargs(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what accelerate passes on to each tool."""
        config, run_id = self.run.config, self.run.id
        name = config.run_name
        same_run = {"name": name, "id": run_id, "resume": "allow"}
        folder = os.environ.get("WANDB_DIR") or str(Path(config.runs_folder).absolute())
        return {
            "tensorboard": {"purge_step": step + 1},
            "wandb": same_run | {"dir": folder},
            "swanlab": same_run,
            # found by the name alone: a run that starts anew is another one
            "trackio": {"name": name, "resume": "allow" if step else "never"},
            "mlflow": {"run_name": name},
            "comet_ml": {"experiment_key": 4 * run_id},  # at least 32 characters
            "clearml": {"task_name": name},
            "dvclive": {"dir": str(self.run.folder / "dvclive"), "resume": step > 0},
        }

    def _store_config(self, tracker: Any, settings: dict[str, Any], step: int) -> None:
        if tracker.name == "tensorboard":
            event_files.write_config(tracker.tracker, self.run, settings, step)
        elif tracker.name == "mlflow":
            store_in_mlflow(tracker, self.run, settings)
        elif tracker.name == "comet_ml":
            tracker.tracker.set_name(self.run.config.run_name)

    def _use_local_mlflow(self) -> dict[str, str]:
        """Let MLflow write into the runs folder, unless its variable names another place."""
        if os.environ.get("MLFLOW_TRACKING_URI"):
            return {}
        folder = Path(self.run.config.runs_folder).absolute()
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
        self.variables.append("MLFLOW_TRACKING_URI")
        return {"logging_dir": str(folder / "mlflow.artifacts")}

    def _show(self, tracker: Any, text: str | None, images: dict[str, Path], step: int) -> None:
        """Log a text and pictures; where that fails, the tracker keeps to numbers."""
        if tracker.name not in self.with_samples:
            return
        try:
            if text:
                log_text(tracker, text, step)
            if images:
                log_images(tracker, images, step)
        except Exception as error:
            self.with_samples.remove(tracker.name)
            report(tracker.name, "log a sample", error, "gets no more of them")


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
            f"{'train' if name in TRAIN else 'perf'}/{name}": value
            for name, value in numbers.items()
            if name not in LEFT_OUT
        }
    if kind not in ("evaluation", "checkpoint"):
        return {}
    seconds = numbers.pop("seconds", None)
    values = {name: value for name, value in numbers.items() if name not in ABOUT}
    return values | ({} if seconds is None else {f"perf/{kind}_seconds": seconds})


def flat(config: Config) -> dict[str, str | int | float | bool | None]:
    """Return the settings by their dotted names, as on the command line; lists as texts."""
    plain = to_dict(config)
    recipe = plain.pop("recipe")
    found: dict[str, Any] = {"recipe": recipe["class_path"]}

    def add(prefix: str, settings: dict[Any, Any]) -> None:
        for name, value in settings.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                is_plain = value is None or isinstance(value, (str, int, float))
                found[f"{prefix}{name}"] = value if is_plain else str(value)

    add("recipe.", recipe["init_args"])
    add("", plain)
    return found


def log_values(tracker: Any, values: dict[str, int | float], step: int) -> None:
    """Log numbers; what a tracker does to its dict is no other's concern."""
    is_mlflow = tracker.name == "mlflow"
    tracker.log({mlflow_name(n) if is_mlflow else n: v for n, v in values.items()}, step=step)


def log_text(tracker: Any, text: str, step: int) -> None:
    """Log a text of several lines as it stands."""
    if tracker.name == "mlflow":
        import_module("mlflow").log_text(text, f"samples/step_{step:08d}/text.txt")
    elif tracker.name == "wandb":
        page = f"<pre style='white-space: pre-wrap'>{escape(text)}</pre>"
        html = import_module("wandb").Html(page, inject=False)
        tracker.log({"samples/text": html}, step=step)
    else:  # Markdown, in which an indented text is literal
        is_trackio = tracker.name == "trackio"
        markdown = getattr(import_module("trackio"), "Markdown", str) if is_trackio else str
        tracker.log({"samples/text": markdown(indent(text, "    "))}, step=step)


def log_images(tracker: Any, images: dict[str, Path], step: int) -> None:
    """Log image files by the names of the files."""
    if tracker.name == "mlflow":
        for path in images.values():
            tracker.log_artifact(str(path), f"samples/step_{step:08d}")
        return
    if tracker.name == "trackio":
        image_of = import_module("trackio").Image
        tracker.log({f"samples/{name}": image_of(p) for name, p in images.items()}, step=step)
        return
    import numpy as np

    read = import_module("PIL.Image").open
    pixels = {f"samples/{n}": np.asarray(read(p).convert("RGB")) for n, p in images.items()}
    how = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
    tracker.log_images({name: image[None] for name, image in pixels.items()}, step=step, **how)


# ---- MLflow --------------------------------------------------------------------------------------
def mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses in names, such as @."""
    return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name))


def find_mlflow_run(project: str, run_id: str) -> dict[str, str]:
    """Return the MLflow run of a run folder as an argument, if there is one."""
    mlflow = import_module("mlflow")
    experiment = mlflow.get_experiment_by_name(project)
    found = experiment and mlflow.search_runs(
        [experiment.experiment_id],
        filter_string=f"tags.{RUN_TAG} = '{run_id}'",
        output_format="list",
    )
    return {"run_id": found[0].info.run_id} if found else {}


def store_in_mlflow(tracker: Any, run: Run, settings: dict[str, Any]) -> None:
    """Store the settings that the MLflow run lacks: a parameter cannot change."""
    mlflow = import_module("mlflow")
    mlflow.set_tag(RUN_TAG, run.id)
    held = mlflow.get_run(tracker.tracker.info.run_id).data.params
    named = {mlflow_name(name): value for name, value in settings.items()}
    tracker.store_init_configuration({n: v for n, v in named.items() if n not in held})
