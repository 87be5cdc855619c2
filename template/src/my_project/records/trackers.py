"""Log to accelerate's trackers, given by name, each in a daemon thread with a queue.

If a tracker raises an exception or SystemExit, or waits without holding the GIL, the run loses only
records in that tracker. A run does not survive os._exit, or C code that holds the GIL for good.

The project is named after the package (W&B prefers WANDB_PROJECT). TensorBoard and W&B continue the
curves of a resumed run, and get texts and pictures too; any other tracker gets a run per start.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from shlex import quote
from textwrap import indent
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ..config import Config, ConfigError, to_dict, to_yaml
from ..contract import TRAIN_TAGS
from ..files import is_number
from ..run_files import Record, flat
from ..run_folder import Run

logger = logging.getLogger(__name__)
WITH_NUMBERS = {"interval", "evaluation", "checkpoint"}  # kinds of records
LEFT_OUT = {"steps", "skipped", "slowest_rank"}  # names of fields
# How long the first step waits for trackers: no loader worker should fork while a tracker imports.
START_SECONDS = 30.0
FINISH_SECONDS = 30.0
FAILED_SECONDS = 2.0  # the limit after a failure: other ranks wait until this rank reports it
MAX_WAITING = 10_000  # maximum number of records in a queue
WITH_SAMPLES = {"tensorboard", "wandb"}  # trackers that take texts and pictures


class TrackerThread(threading.Thread):
    """A thread that opens a tracker, and then calls the functions in the queue with it."""

    def __init__(self, name: str, open_tracker: Callable[[], GeneralTracker]) -> None:
        super().__init__(name=name, daemon=True)
        self.open_tracker = open_tracker
        self.queue: queue.Queue[tuple[str, Callable]] = queue.Queue()
        self.is_open = threading.Event()  # also set if opening has failed
        self.has_lost_records = False
        self.start()

    def put(self, action: str, function: Callable[[GeneralTracker], None]) -> None:
        """Queue a function to be called with the tracker; do nothing if the tracker has failed."""
        if self.is_alive():
            if self.queue.qsize() < MAX_WAITING or action == "finish":
                self.queue.put((action, function))
            elif not self.has_lost_records:  # one line: it may lose a record in each interval
                self.has_lost_records = True
                text = "tracker %s loses records: its queue already holds %d records"
                logger.error(text, self.name, MAX_WAITING)

    def run(self) -> None:
        """Work until the tracker has finished or failed."""
        action = "start"
        try:
            tracker = self.open_tracker()
            self.is_open.set()
            while action != "finish":
                action, function = self.queue.get()
                function(tracker)
        except BaseException as error:  # even SystemExit ends only this thread
            report(self.name, action, error)
        finally:
            self.is_open.set()


class Trackers:
    """The trackers of a run, on rank 0; a tracker that fails is left out from then on."""

    def __init__(self, run: Run, *_: object) -> None:
        self.run = run
        self.threads: list[TrackerThread] = []
        self.finish_seconds = FINISH_SECONDS
        self.finish: dict[str, Callable] = {}  # by tracker; default: its finish()

    @staticmethod
    def check(config: Config) -> None:
        """Refuse a tracker that is not installed."""
        trackers = [str(tracker) for tracker in get_available_trackers()]
        if unknown := set(config.telemetry.trackers) - set(trackers):
            names = ", ".join(sorted(unknown))
            raise ConfigError(
                f"telemetry.trackers names {names}, which accelerate does not find here;"
                f" installed: {', '.join(trackers)}."
            )

    def start(self, step: int, logged: dict[str, int]) -> None:
        """Open the trackers, and wait for them for a while.

        Args:
            step: the number of steps done.
            logged: the newest step that an earlier start has logged, by kind of record. A run that
                was killed repeats steps whose values W&B already has.
        """
        self.logged = logged
        for name in self.run.config.telemetry.trackers:
            self.threads.append(TrackerThread(name, partial(self._open, name, step)))
        deadline = time.monotonic() + START_SECONDS
        for thread in self.threads:
            if not thread.is_open.wait(max(0.0, deadline - time.monotonic())):
                text = "tracker %s did not start within %.0f s; training does not wait for it"
                logger.error(text, thread.name, START_SECONDS)
        for link in [*self.run.trackers.values()]:  # a copy: a slow tracker may add a link
            logger.info(link)

    def _open(self, name: str, step: int) -> GeneralTracker:
        """Open a tracker by accelerate's class, as init_trackers does; called in its thread."""
        config, kind = self.run.config, LOGGER_TYPE_TO_CLASS[name]
        where = (config.runs_folder,) if kind.requires_logging_directory else ()
        if name == "tensorboard":  # its class takes the name of the run, not of the project
            tracker = kind(config.run_name, *where, purge_step=step + 1)
            tracker.start()
            # store_init_configuration would open another file, which is shown as another run
            tracker.log({"config": indent(to_yaml(config), "    ")}, step=step)  # literal Markdown
            self.run.trackers[name] = f"tensorboard --logdir {quote(config.runs_folder)}"
            return tracker
        project = __name__.partition(".")[0]
        options: dict[str, str] = {}
        if name == "wandb":
            project = os.environ.get("WANDB_PROJECT") or project
            folder = os.environ.get("WANDB_DIR") or str(Path(config.runs_folder).absolute())
            options = {"name": config.run_name, "id": self.run.id, "resume": "allow", "dir": folder}
        if name == "mlflow":  # by default it would write into the current folder
            folder = Path(config.runs_folder).absolute()
            os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
            options = {"run_name": config.run_name, "logging_dir": str(folder / "mlartifacts")}
        tracker = kind(project, *where, **options)
        tracker.start()
        tracker.store_init_configuration(flat(to_dict(config)))
        if name == "wandb":
            offline = f"wandb sync {Path(tracker.tracker.dir).parent}"
            self.run.trackers[name] = tracker.tracker.url or offline
        if name == "mlflow":
            store = os.environ["MLFLOW_TRACKING_URI"]
            is_server = store.startswith("http")
            self.run.trackers[name] = (
                store if is_server else f"mlflow ui --backend-store-uri {store}"
            )
        return tracker

    def write(self, record: Record) -> None:
        """Log the numbers of a record, and its text and pictures."""
        kind, step = record.kind, record.step
        values = tracked_values(record)
        text = record.text("sample")
        pictures = [self.run.folder / str(path) for path in record.texts("pictures")]
        for thread in self.threads:
            # TensorBoard itself discards values after the step that a run resumes from
            if thread.name == "wandb" and self.logged.get(kind, -1) >= step:
                continue
            if values:
                thread.put("log", partial(log_values, values=values, step=step))
            if (text or pictures) and thread.name in WITH_SAMPLES:
                thread.put("show samples", partial(show, text=text, pictures=pictures, step=step))

    def failed(self) -> None:
        """Let W&B and MLflow show the run as failed."""
        self.finish_seconds = FAILED_SECONDS
        self.finish["wandb"] = lambda tracker: tracker.tracker.finish(exit_code=1)
        self.finish["mlflow"] = lambda _: import_module("mlflow").end_run("FAILED")

    def close(self) -> None:
        """Flush and close each tracker; leave those that have not ended in time."""
        for thread in self.threads:
            thread.put("finish", self.finish.get(thread.name, lambda tracker: tracker.finish()))
        deadline = time.monotonic() + self.finish_seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                text = "tracker %s did not finish within %.0f s; it may lack records"
                logger.error(text, thread.name, self.finish_seconds)


def report(tracker: str, action: str, error: BaseException, effect: str = "is disabled") -> None:
    """Log in one line which tracker failed, in what, and why."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    logger.error("tracker %s could not %s and %s: %s", tracker, action, effect, text)


# ---- what is logged ------------------------------------------------------------------------------
def tracked_values(record: Record) -> dict[str, float]:
    """Return the numbers of a record by tag: train/, perf/, or the name that the recipe gave."""
    values: dict[str, float] = {}
    if record.kind not in WITH_NUMBERS:
        return values
    epoch = {"epoch": record.epoch} if record.kind == "interval" else {}
    for name, value in (epoch | {**record.values}).items():
        if is_number(value) and name not in LEFT_OUT:
            tag = f"{record.kind}_seconds" if name == "seconds" else name
            group = "train" if name in TRAIN_TAGS else "perf"
            values[tag if "/" in tag else f"{group}/{tag}"] = value
    return values


def log_values(tracker: Any, values: dict[str, float], step: int) -> None:
    """Log numbers; for TensorBoard as a single event, five times as fast as an event per number."""
    if tracker.name != "tensorboard":
        tracker.log({**values}, step=step)
        return
    proto = import_module("tensorboard.compat.proto.summary_pb2").Summary
    summary = proto(value=[proto.Value(tag=n, simple_value=v) for n, v in values.items()])
    tracker.tracker.file_writer.add_summary(summary, step)
    tracker.tracker.flush()


def show(tracker: Any, text: str, pictures: list[Path], step: int) -> None:
    """Log a text with its line breaks, and pictures under the names of their files."""
    is_wandb = tracker.name == "wandb"
    try:
        if text and is_wandb:
            page = f"<pre style='white-space: pre-wrap'>{escape(text)}</pre>"
            html = import_module("wandb").Html(page, inject=False)
            tracker.log({"samples/text": html}, step=step)
        elif text:  # in Markdown, indented text is literal
            tracker.log({"samples/text": indent(text, "    ")}, step=step)
        for path in pictures:
            picture = np.asarray(import_module("PIL.Image").open(path).convert("RGB"))
            shape = {} if is_wandb else {"dataformats": "NHWC"}
            tracker.log_images({f"samples/{path.stem}": picture[None]}, step=step, **shape)
    except Exception as error:  # a picture may be gone: newer evaluations replace older ones
        report(tracker.name, "show samples", error, "goes on")
