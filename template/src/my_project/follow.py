"""Evaluate the checkpoints of a run beside its training, as they appear: `evaluate --follow`.

The command runs on another GPU, on the CPU, or on another host that sees the run folder. Each
evaluation is a line of evaluations.jsonl (docs/run-folder.md). Nothing else in the run folder is
written or locked, so training never waits, with one exception: a training run that starts waits
while this command prepares the data. If training removes a checkpoint while it is read, the
checkpoint is skipped. Checkpoints without a line are evaluated, the oldest first, so the same
command, run again, continues where it ended. It ends when the run has finished and no checkpoint is
left.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from . import commands, weights
from .accelerator import check_launch, start_accelerator
from .checkpoint.resuming import find_damage_together
from .config import Config, ConfigError
from .evaluate import evaluate
from .files import FormatError, Json, TransientError, finite, open_own
from .manifest import read_manifest
from .mirror.download import exchange_evaluations, fetch_next
from .process import world
from .ranks import gather_on_main, on_main_then_broadcast
from .run_files import checkpoints, local_folder, parse_record, read_info, read_status

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0
Version = tuple[str, int, int]  # identifies the content of a checkpoint's folder (read_version)


def follow_run(arguments: argparse.Namespace, output: TextIO | None = None) -> int:
    """Evaluate the checkpoints of a run until it has finished; print each result.

    Raises:
        ConfigError: the folder is not a run, or its checkpoints do not fit the model.
        TransientError: another process is following the run, the run was started over, or a line
            cannot be written.
    """
    size = str(world()[0])
    if "://" in arguments.folder and os.environ.get("LOCAL_WORLD_SIZE", size) != size:
        raise ConfigError(f"{arguments.folder} is a URL: follow it with processes on one host.")
    run = local_folder(arguments.folder)
    if not (run / "run.json").is_file():
        raise ConfigError(f"no run has begun in {run}; give the folder of one that has.")
    config = weights.config_beside(run, arguments.trust, run)
    check_launch(config)
    with Evaluations(given=arguments.folder, run=run, config=config) as results:
        data_info, datasets = commands.validation_sets(config)
        with start_accelerator(config) as accelerator:
            model = commands.prepared_model(accelerator, config, data_info)
            if accelerator.is_main_process:
                commands.warn_of_other_data(data_info, run)
            while True:
                checkpoint, is_finished = on_main_then_broadcast(accelerator, results.look)
                if not checkpoint and is_finished:
                    return 0
                if not checkpoint:
                    time.sleep(POLL_SECONDS)
                    continue
                began, values = time.monotonic(), dict[str, float]()
                problem = load_together(accelerator, checkpoint, model.model)
                if not problem:
                    values = evaluate(accelerator, config, model, datasets, checkpoint.step)
                note = partial(results.note, checkpoint, problem, values, time.monotonic() - began)
                line = on_main_then_broadcast(accelerator, note)
                if line and accelerator.is_main_process and arguments.json:
                    print(line, file=output, flush=True)
                elif line and accelerator.is_main_process:
                    commands.say_results(checkpoint.folder, values)


# ---- checkpoints ---------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    weights: str  # a hash of the files' hashes, which differs if the step is trained again
    version: Version


def read_version(folder: Path) -> Version:
    """Return values that change whenever the folder or its manifest is replaced.

    Raises:
        OSError: the folder was removed.
    """
    stat = folder.stat()
    return folder.name, stat.st_ino, stat.st_mtime_ns


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the manifest of a checkpoint; return None if it was removed or is damaged.

    Raises:
        FormatError: another version of this project saved it.
    """
    try:
        version = read_version(folder)
        manifest = read_manifest(folder)
    except FormatError:
        raise
    except (OSError, ValueError):
        return None
    step, digest = manifest["step"], digest_files(manifest["files"])
    return Checkpoint(folder=folder, step=step, weights=digest, version=version)


def digest_files(hashes: dict[str, str]) -> str:
    """Return a hash of the hashes of a checkpoint's files."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def load_together(accelerator: Accelerator, checkpoint: Checkpoint, model: nn.Module) -> str:
    """Load a checkpoint on every rank; return why it cannot be evaluated, "" if it can.

    Raises:
        ConfigError: the checkpoint is intact, but does not fit the model.
    """
    if problem := find_damage_together(accelerator, checkpoint.folder):
        return problem
    try:
        weights.refuse_trained_view(checkpoint.folder)
        weights.load_weights(checkpoint.folder, model)
    except (OSError, ValueError, SafetensorError) as error:
        problem = str(error)
    problems = gather_on_main(accelerator, problem)

    def judge() -> str:
        current, problem = read_checkpoint(checkpoint.folder), next(filter(None, problems), "")
        # a rank may have read the old or the new files
        if current and current.weights != checkpoint.weights:
            return "it was saved again"
        if current and problem:
            raise ConfigError(problem)
        return problem  # "", or what a rank lacked because the files were removed meanwhile

    return on_main_then_broadcast(accelerator, judge)


# ---- evaluations.jsonl ---------------------------------------------------------------------------
@dataclass(kw_only=True)
class Evaluations:
    """The lines of evaluations.jsonl, which rank 0 alone reads and writes."""

    given: str  # a path or a URL
    run: Path
    config: Config
    done: set[str] = field(default_factory=set)  # Checkpoint.weights of evaluated checkpoints
    seen: set[tuple[str, int]] = field(default_factory=set)  # see fetch_next
    problem: str = ""  # why the last fetch failed; "" if it did not
    settled: set[Version] = field(default_factory=set)  # checkpoints that need not be read again
    outcome: str = ""  # of the run, as it was last logged
    file: IO[bytes] = field(init=False)  # only on rank 0

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.run / "evaluations.jsonl"

    def __enter__(self) -> "Evaluations":
        """Lock and read the file; if a kill has cut off its last line, drop that line.

        The file stays open: if `--resume never` moves it and its run aside, lines for that run
        are still appended to it.

        Raises:
            ConfigError: the file cannot be written to.
            TransientError: another process has locked it.
        """
        if world()[1] != 0:
            return self
        try:
            self.file = open_own(self.path, "ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written to: {error.strerror}.") from error
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise TransientError(f"another process is following {self.run}: end it.") from None
        except OSError:  # storage without locks
            logger.warning("%s has no file locks: start only one follower", self.run)
        self.file.seek(0)
        self.file.truncate(self.file.read().rfind(b"\n") + 1)
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        if world()[1] == 0:
            self.file.close()

    def _read(self) -> None:
        """Add the lines of followers on other hosts, and note which checkpoints have a line."""
        exchange_evaluations(self.given, self.file)  # with a mirror
        self.file.seek(0)
        lines = self.file.read().splitlines()
        self.done = {str(parse_record(line).values.get("weights")) for line in lines}

    def look(self) -> tuple[Checkpoint | None, bool]:
        """Return the oldest checkpoint without a line, if any, and whether the run has finished.

        Raises:
            TransientError: the run was started over, so its config may differ.
        """
        try:
            fetch_next(self.given, self._is_new, self.seen)  # from a mirror
            self.problem = ""
        except TransientError as error:  # the next call tries again
            if self.problem != str(error):
                logger.warning("%s", error)
            self.problem = str(error)
            return None, False
        is_same_file = False
        with suppress(OSError):
            is_same_file = os.path.samefile(self.path, self.file.fileno())
        if not is_same_file:
            raise TransientError(
                f"{self.run} was moved, removed or started over: follow the run that is there now."
            )
        # read before the checkpoints, since the last one is saved before the run has finished
        outcome = read_status(self.run).outcome
        is_finished = outcome == "finished"
        for folder in checkpoints(self.run):
            with suppress(OSError):  # the checkpoint was removed
                is_new = read_version(folder) not in self.settled
                checkpoint = read_checkpoint(folder) if is_new else None
                if checkpoint and checkpoint.weights not in self.done:
                    return checkpoint, is_finished
                if checkpoint:
                    self.settled.add(checkpoint.version)
        if outcome not in ("", "running", "finished", self.outcome):
            logger.info("outcome of the run: %s; waiting for its next start (Ctrl-C ends)", outcome)
        self.outcome = outcome
        return None, is_finished

    def _is_new(self, hashes: dict[str, str]) -> bool:
        """Return whether a checkpoint has no line."""
        return digest_files(hashes) not in self.done

    def note(
        self, checkpoint: Checkpoint, problem: str, values: dict[str, float], seconds: float
    ) -> str:
        """Append a line in one write and return it; for a checkpoint with a problem, return "".

        Raises:
            TransientError: the line could not be written.
        """
        if problem:
            self.settled.add(checkpoint.version)
            if read_checkpoint(checkpoint.folder) == checkpoint:  # training has not removed it
                logger.warning("%s is skipped: %s.", checkpoint.folder, problem)
            return ""
        record: dict[str, Json] = {"kind": "evaluation", "step": checkpoint.step}
        samples = read_info(self.run).lengths.get("the training set", 0)  # 0 for a stream
        if steps := samples // self.config.batches.global_batch_size:
            record["epoch"] = round(checkpoint.step / steps, 4)
        record |= {"time": round(time.time(), 3), "seconds": round(seconds, 3)}
        record |= {"checkpoint": f"checkpoints/{checkpoint.folder.name}"}
        record |= {"weights": checkpoint.weights, "host": socket.gethostname()}
        line = json.dumps(record | finite(values), allow_nan=False)
        size, is_written = os.fstat(self.file.fileno()).st_size, False
        with suppress(OSError):
            is_written = self.file.write(f"{line}\n".encode()) == len(line) + 1
        if not is_written:
            self.file.truncate(size)
            raise TransientError(f"{self.path} cannot be written to: free disk space there.")
        self._read()
        return line
