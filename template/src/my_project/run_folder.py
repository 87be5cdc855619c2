"""The run folder: the same after every restart, and shared by all ranks, or by those of a node.

docs/run-folder.md describes each of its files and their fields.
"""

import fcntl
import inspect
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from . import failures, files, run_files
from . import manifest as manifests
from .config import (
    Config,
    ConfigError,
    fixed_settings,
    saved_fixed_settings,
    to_yaml,
    used_fixed_settings,
)
from .exits import WARNED
from .failures import Failure, first_failure, reason_in_status, report, write_error
from .process import NODES, START, attempts
from .provenance import Origin, keep_code, provenance
from .run_files import Status
from .safety.redaction import MASK, is_secret, mask

logger = logging.getLogger(__name__)
MAX_ERRORS = 1000  # error files that a start keeps in errors/, or two per rank if that is more


class Run:
    """A run folder, checked before any process group starts."""

    def __init__(self, config: Config, rank: int) -> None:
        """Refuse a run that is active elsewhere or differs from the run in the folder.

        Every rank compares the settings, so all ranks reach the same decision. Rank 0 also locks
        the folder, which refuses a run that another launch has locked.
        """
        self.folder = config.folder
        self.config = config
        self.rank = rank
        self.total_steps = 0  # 0 until the data is known
        self.step = 0  # steps done, for failure reports
        self.progress_time: float | None = None  # when progress was last noted
        # whether that was the end of a step, after which the watchdog's shorter limit applies
        self.is_stepping = False
        # False once checks/recipe.py finds that it is not, and then calls the function below
        self.is_loss_a_sum = True
        self.when_loss_is_no_sum: Callable[[], None] = lambda: None
        self.first_step_time: float | None = None  # when the first step of this start ended
        self.from_step: int | None = None  # the number of steps done before that first step
        self.id = uuid.uuid4().hex[:8]  # the run's ID, for trackers; set by its first launch
        # identifies this start (in run.json the field "launch"); set by begin() or sees()
        self.token = ""
        self.hosts: list[str] = []  # the host of each rank
        self.is_shared = True  # whether all nodes share the folder; if not, each has its own
        self.provenance = Origin()  # the code of this start; set on rank 0 only
        self.numerics: run_files.Numerics = {}  # accelerator.numerics() of this start
        self.notes: list[tuple[str, dict[str, files.Json]]] = []  # to record: (kind, values)
        self.began = time.monotonic()
        self.warned_before = WARNED.count  # warnings in earlier runs of this process
        self.paused_seconds = 0.0  # time that this start spent in evaluations and saves
        self.lengths: dict[str, int] = {}  # the length of each dataset
        self.trackers: dict[str, str] = {}  # where each tracker shows the run
        self.exit_code: int | None = None  # set when the run has ended: no later error counts
        self.lock: IO[bytes] | None = None
        self.resumed_from: str | None = None  # the --resume path from which this run began
        self.continued_from: str | None = None  # the checkpoint that this start continued
        if rank == 0:
            with files.writing(self.folder):
                self.lock = self._lock()
        refuse_other_settings(self.config, must_be_known=rank == 0)

    @property
    def is_first_on_disk(self) -> bool:
        """Return whether this rank moves and removes checkpoints: one rank for each run folder."""
        if self.is_shared:
            return self.rank == 0
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def status(self) -> Status:
        """Return the content of status.json."""
        return run_files.read_status(self.folder)

    def write_status(
        self,
        outcome: str,
        reason: str = "",
        *,
        note: str | None = None,
        result: dict[str, float] | None = None,
        patience: int | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Write the outcome to status.json; called by rank 0, or by a rank that fails.

        Nothing is written once another launch has begun the run.
        """
        if not self.is_current:
            return
        before = self.status() if self.rank else None  # rank 0 knows trackers and warnings
        trackers = before.trackers if before else dict(self.trackers)  # a thread may add one now
        status = Status(
            outcome=outcome,
            step=self.step if failure is None else failure.step or 0,
            steps=self.total_steps,
            reason=mask(reason),
            nodes=os.environ.get(NODES, ""),
            first_step_time=self.first_step_time,
            from_step=self.from_step,
            seconds=round(time.monotonic() - self.began, 1),
            paused_seconds=round(self.paused_seconds, 3),
            trackers={name: mask(link) for name, link in trackers.items()},
            warnings=before.warnings if before else WARNED.count - self.warned_before,
            note=note and mask(note),
            result=None if result is None else files.finite(result),
            patience=patience,
            failure=failure,
        )
        try:
            run_files.write_status(self.folder, status)
        except OSError as error:  # a full disk must not end the run
            logger.error("%s/status.json cannot be written: %s", self.folder, error)

    def note_progress(self, *, is_step: bool = False) -> None:
        """Note that a step has ended, or that something begins that may take longer than a step."""
        self.progress_time, self.is_stepping = time.time(), is_step

    def first_step_ended(self, step: int) -> None:
        """Note when the first step of this start ended, for its launcher."""
        self.first_step_time, self.from_step = time.time(), step
        if self.rank == 0 and self.status().outcome == "running":
            self.write_status("running")

    def fail(self, failure: Failure) -> None:
        """Write a failure into the status, unless another rank's failure came first.

        Two ranks may write simultaneously; the launcher, which has all error files, corrects this.
        """
        noted = self.status().failure
        if (
            self.exit_code is None
            and self.token
            and (not noted or first_failure([noted, failure]) is failure)
        ):
            self.write_status("failed", reason_in_status(failure), failure=failure)

    def record_error(self, failure: Failure) -> Failure:
        """Write an error file of this rank into errors/; return its content.

        If a setting is refused before this start has begun the run, no file is written: the folder
        may be another run's.
        """
        progress = {"step": self.step, "progress_time": self.progress_time}
        failure = replace(failure, rank=self.rank, launch=self.token, **progress)
        report(failure)
        try:
            if self.token or failure.cause != "setting":
                write_error(self.folder, failure)
        except OSError as error:
            logger.error("the error file cannot be written: %s", error)
        return failure

    @property
    def finished(self) -> bool:
        """Return whether the run has finished; raising steps or patience makes it unfinished."""
        status, patience = self.status(), self.config.evaluation.patience
        if status.outcome != "finished" or status.result is None:
            return False
        all_done = self.total_steps <= status.step
        stopped_early = patience is not None and patience <= (status.patience or 0)
        is_exported = (self.folder / "export").is_dir()
        return self.config.resume == "auto" and is_exported and (all_done or stopped_early)

    @property
    def is_current(self) -> bool:
        """Return whether no later launch has begun this run, as far as this rank knows."""
        run_files.refresh(self.folder)
        # not read_info, which is slower: this is called for each record
        launch = files.read_json(self.folder / "run.json").get("launch")
        return self.token in ("", launch or self.token)

    def begin(self) -> str:
        """Begin the run: record config, versions and launch. Called by rank 0 only.

        Returns:
            The token of this start.

        Raises:
            ConfigError: the folder is no longer this launch's, or has a different format or
                settings, or a save there would fail, or --resume names a checkpoint of another run.
        """
        self.check_lock()
        starts_over = starts_over_now(self.config)
        if not starts_over:
            refuse_other_settings(replace(self.config, resume="auto"))
            refuse_other_format(self.folder)
            refuse_other_run(self.config, self.total_steps)
        with files.writing(self.folder):
            for folder in (self.folder, self.folder / "checkpoints"):  # the second may be a link
                if os.path.lexists(folder):
                    manifests.try_saving(folder)
            if starts_over:
                self._start_over()
            failures.remove_old_errors(self.folder, max(MAX_ERRORS, 2 * len(self.hosts)))
            files.write_atomically(self.folder / "config.yaml", to_yaml(self.config))
            token = os.environ.get(START) or uuid.uuid4().hex
            before = run_files.read_info(self.folder)
            self.id = before.run or self.id
            self.provenance = keep_code(self.folder, self.config, self.id, token)
            info = run_files.RunInfo(
                format=run_files.RUN_FORMAT,
                run=self.id,
                launch=token,
                begun_by=attempts() if before.begun_by is None else before.begun_by,
                hosts=tuple(self.hosts),
                numerics=self.numerics,
                lengths=self.lengths,
                fixed_settings=tuple(used_fixed_settings(self.config)),
                **provenance(inspect.getsourcefile(type(self.config.recipe))),
            )
            text = json.dumps(asdict(info), indent=1) + "\n"
            # after the other writes, which may fail, and before run.json, which begins the start
            self.write_status("running")
            files.write_atomically(self.folder / "run.json", text)
            self.token = token
        return token

    def compare_numerics(self, folder: Path, before: run_files.Numerics) -> None:
        """Find the numerics that changed since a checkpoint was saved, and log a warning."""
        changed = {name: [before.get(name, now), now] for name, now in self.numerics.items()}
        changed = {name: values for name, values in changed.items() if values[0] != values[1]}
        if changed and self.rank == 0:
            self.notes.append(("numerics", {"changed": changed}))
            for name, (old, now) in changed.items():
                text = "%s was trained with %s %s (now %s): the curve may differ from here on"
                logger.warning(text, folder, name, old, now)

    def sees(self, token: str) -> bool:
        """Return whether this rank sees the run.json into which rank 0 wrote this launch's token.

        A network file system has 20 seconds to show the file, a folder on another disk 1 second.
        """
        self.token = token
        seconds = 20.0
        if self.rank and self.config.checkpoints.mirror:  # on rank 0, is_locked would free the lock
            # A node may have its own disk. Where locks work, rank 0's folder is locked; an unlocked
            # folder is on another disk.
            seconds = 1.0 if run_files.is_locked(self.folder) is False else 20.0  # only with mirror
        return files.wait_until(lambda: run_files.read_info(self.folder).launch == token, seconds)

    def close(self) -> None:
        """Release the lock, so that other processes can train this run.

        Closing any file object of the lock releases all locks of this process on it, so a run must
        be closed before the next one is opened: the garbage collector might close it later.
        """
        if lock := getattr(self, "lock", None):
            with suppress(OSError):  # on a full disk
                lock.close()

    __del__ = close

    def _lock(self) -> IO[bytes]:
        """Lock the folder for this launch; the lock is released when the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = run_files.lock_path(self.folder)
        lock = files.open_own(path, "ab+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                holder = lock.read(300).decode(errors="replace").strip() or "another process"
            raise files.TransientError(
                f"{self.folder} is in use by {holder}: wait for it, end it, or choose another"
                " --run_name."
            ) from None
        except OSError as error:
            text = "%s has no file locks (%s): if this run is launched twice, %s"
            logger.warning(text, self.folder, error, "the older launch ends at its next save")
        with suppress(OSError):  # the disk is full, which begin() will report
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            lock.flush()
        return lock

    def check_lock(self) -> None:
        """Refuse to continue if this launch has lost the run folder.

        The folder is lost if it was moved or removed with its lock, or if another launch has begun
        the run, which only a folder without a lock allows.

        Raises:
            TransientError: the folder is lost; a folder of that name may now be another launch's.
        """
        try:
            path = run_files.lock_path(self.folder)
            is_ours = not self.lock or os.path.samefile(path, self.lock.fileno())
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        except OSError:  # the storage does not answer: what is then written fails by itself
            return
        if not is_ours:
            raise files.TransientError(
                f"{self.folder} has been moved or removed since this launch locked it, so nothing"
                " more is written there: start again, or choose another --run_name."
            )
        if not self.is_current:
            raise files.TransientError(
                f"another launch has begun {self.folder} (its storage has no file locks, or this"
                " launch lost its lock), so this older one ends and saves nothing more there:"
                " choose another --run_name for one of them."
            )

    def _start_over(self) -> None:
        """Move the contents of the folder aside, except .lock and logs/.

        The logs of all launches stay, since those of this launch, on any node, are being written.

        The order ensures that a kill never leaves a partial run that looks whole: first the
        outcome, then the records, then the checkpoints and the export. A start that found records
        but no checkpoint would delete the records. run.json is moved last: while it is in the
        folder, the next attempt of this launch knows that it must move the rest.
        """
        names = {*os.listdir(self.folder)} - {"logs", ".lock"}
        # left by an earlier begin() that was killed
        if names <= {"config.yaml", "starts", "status.json"}:
            return
        aside = files.unused_name(self.folder.resolve())  # on the same disk
        aside.mkdir()
        first = ["status.json", "metrics.jsonl", "checkpoints", "export"]
        others = sorted(names - {*first, "run.json"})
        for name in [name for name in (*first, *others, "run.json") if name in names]:
            os.rename(self.folder / name, aside / name)


def starts_over_now(config: Config, info: run_files.RunInfo | None = None) -> bool:
    """Return whether `--resume never` must move aside the run that is now in the folder.

    It must not do so if an earlier attempt of this launch, or of this Slurm job, began that run.
    If `info` is given, it is used in place of the folder's run.json.
    """
    info = info or run_files.read_info(config.folder)
    begun_by, now = info.begun_by or {}, attempts()
    is_later = any(begun_by[name] < now[name] for name in begun_by.keys() & now.keys())
    return config.resume == "never" and not is_later


def refuse_other_settings(config: Config, *, must_be_known: bool = True) -> None:
    """Refuse a run folder if settings that affect its training curve differ from the config's.

    A folder in which a run has trained is also refused if its config.yaml cannot be read or, with
    `must_be_known`, is missing. (A node with its own disk may have only checkpoints.)

    A saved setting that no longer exists is ignored, unless it is in `fixed_settings` of run.json:
    then it had a value other than its default.
    """
    newest = run_files.checkpoints(config.folder)[-1:]
    is_begun = newest or (config.folder / "export").exists()
    path, saved = config.folder / "config.yaml", dict[str, files.Json]()
    is_absent = not (os.path.lexists(path) or must_be_known)
    if config.resume == "never" or not is_begun or is_absent:
        return
    problem = f"{path} is empty."
    try:
        saved = files.read_yaml(path, follow=False)
    except ConfigError as error:
        problem = str(error)
    if not saved:
        resume = f" and continue there with --resume {newest[0]}" if newest else ""
        raise ConfigError(
            f"{problem} So the settings of this run are not known: restore the file (best/ and"
            f" export/ have copies), or choose another --run_name{resume}."
        )
    before = saved_fixed_settings(saved, config)
    now = fixed_settings(config)
    used = run_files.read_info(config.folder).fixed_settings
    if used is not None:
        # a setting no longer exists if its module was deleted, or the recipe changed
        for name in before.keys() - now.keys():
            if not any(f"{other}.".startswith(f"{name}.") for other in used):
                del before[name]
    differing = [
        f"{name} ({_masked(name, before)} there, {_masked(name, now)} here)"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise ConfigError(
            f"{config.folder} was trained with different settings: {'; '.join(differing)}. Choose"
            " another --run_name, or --resume never, which moves the run folder aside."
        )


def refuse_other_format(folder: Path) -> None:
    """Refuse a run whose newest checkpoint was saved by a different version of this project."""
    for newest in run_files.checkpoints(folder)[-1:]:
        try:
            manifests.read_manifest(newest)
        except (ValueError, OSError) as error:  # resuming.choose skips a damaged checkpoint
            if isinstance(error, files.FormatError):
                raise


def refuse_other_run(config: Config, total_steps: int) -> None:
    """Refuse --resume <path> if the folder holds a run that did not begin there.

    The run's results would be replaced. If the folder holds no run, refuse a checkpoint from after
    the run's last step. A checkpoint that cannot be read is left to resuming.choose.
    """
    given = Path(config.resume)
    manifest = {} if config.resume in ("auto", "never") else _manifest(given)
    own = run_files.checkpoints(config.folder)
    folders = config.folder.resolve(), (config.folder / "checkpoints").resolve()  # may be a link
    is_own = any(given.resolve().is_relative_to(folder) for folder in folders)
    # a copy of an own checkpoint
    is_own |= run_files.read_info(config.folder).run == manifest.get("provenance", {}).get("run")
    if not manifest or is_own:
        return
    intact = [path for path in own if _manifest(path)]
    has_results = not own and (config.folder / "export").exists()
    if has_results or (intact and not any(began_at(path, config.resume) for path in intact)):
        raise ConfigError(
            f"{config.folder} holds a run, but no checkpoint shows that it began at {given}."
            " Its results would be replaced: set --resume auto, or choose another --run_name."
        )
    if not own and 0 < total_steps < manifest["step"]:
        raise ConfigError(
            f"--resume {given} is at step {manifest['step']}, but the run ends at {total_steps}:"
            " give more --steps or --epochs, or an earlier checkpoint."
        )


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; {} if it cannot be read."""
    with suppress(ValueError, OSError):
        return {**manifests.read_manifest(folder)}
    return {}


def began_at(folder: Path, given: str) -> bool:
    """Return whether the run of a checkpoint began with --resume and this path."""
    path = _manifest(folder).get("resumed_from")
    return bool(path) and os.path.realpath(path) == os.path.realpath(given)


def _masked(name: str, settings: dict[str, files.Json]) -> str:
    return MASK if is_secret(name) else mask(repr(settings.get(name)))


def not_shared(folder: Path, hosts: str, writer: str) -> str:
    """Return the message for hosts that do not see the folder into which rank 0 wrote.

    Args:
        folder: the run folder, as every process names it.
        hosts: the hosts that lack the files of rank 0.
        writer: the host of rank 0.
    """
    return (
        f"{folder.absolute()} on {hosts} is not the folder that rank 0 on {writer} wrote to: set"
        " --runs_folder to storage that all nodes share."
    )


@contextmanager
def failures_recorded(run: Run) -> Iterator[None]:
    """Record the exception that ends the run, with rank, host and step, and raise it again."""
    try:
        yield
    except BaseException as error:
        ignore_ended_workers()
        if failures.exception_cause(error) == "out of memory" and not hasattr(error, "facts"):
            error.add_note(
                "Lower batches.micro_batch_size: accumulation rises to match, so the global batch"
                " stays the same."
            )
        failure = failures.exception_failure(error)
        if run.step and failure.cause == "exception":
            # not exit code 2: a run that has done steps, even in an earlier start, may work again
            failure = replace(failure, exit_code=1)
        failure = run.record_error(failure)
        setattr(error, "failure", failure)  # noqa: B010 - see failures.report_once
        run.fail(failure)
        raise


def ignore_ended_workers() -> None:
    """Remove torch's SIGCHLD handler, which raises for each loader worker that died.

    SIGCHLD often arrives after the DataLoader's queue has already raised. The handler would then
    interrupt the report, and the reason for the failure would be lost.
    """
    while True:
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
        except RuntimeError:  # raised by torch's handler: the signal came just now
            continue
