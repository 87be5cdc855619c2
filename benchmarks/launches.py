"""Launches that restart.py, kills.py and goodput.py kill, and their processes."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "accelerate_configs"


def workers(launcher: int) -> list[psutil.Process]:
    """Return the training processes, by rank.

    A forked process has its rank in its name; any other process, in its environment.
    """
    by_rank = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error, OSError):
                name = Path(f"/proc/{process.pid}/comm").read_text()
                rank = name.removeprefix("rank ").strip() if name.startswith("rank ") else ""
                rank = rank or process.environ().get("RANK", "")
                # a loader worker has the rank of its parent, and comes after it
                if rank and int(rank) not in by_rank:
                    by_rank[int(rank)] = process
    return [by_rank[rank] for rank in sorted(by_rank)]


def kill_with_descendants(launcher: subprocess.Popen) -> None:
    """Kill a launcher and all processes that it has started, if they still run."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher.pid).children(recursive=True):
            process.kill()
    launcher.kill()
    launcher.wait()


class Run:
    """A run of the tests' recipe on CPU processes, which are killed at the end of the block."""

    def __init__(self, parent: Path, name: str, config: str) -> None:
        self.parent, self.name, self.config = parent, name, config
        self.folder = parent / "runs" / name
        self.where = CONFIGS / "cpu_2_processes.yaml"  # accelerate config of the next start
        self.launcher: subprocess.Popen | None = None
        self.begun = 0.0  # when the newest start, or restart in place, began; time.time()
        self.before: list[psutil.Process] = []  # the training processes before a restart in place

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher:
            kill_with_descendants(self.launcher)

    @property
    def is_running(self) -> bool:
        """Return whether a launcher runs."""
        return self.launcher is not None and self.launcher.poll() is None

    @property
    def workers(self) -> list[psutil.Process]:
        """Return the training processes, by rank."""
        return workers(self.launcher.pid) if self.launcher else []

    def start(self) -> subprocess.Popen:
        """Start a launcher, unless one is running."""
        if self.launcher is None or not self.is_running:
            self.begun, self.before = time.time(), []
            (self.parent / f"{self.name}.yaml").write_text(self.config)
            command = [sys.executable, "-m", "my_project", "train", f"{self.name}.yaml"]
            paths = [ROOT / part for part in ("template/src", "template/tests", "benchmarks")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
            with (self.parent / f"{self.name}.txt").open("a") as output:
                self.launcher = subprocess.Popen(
                    [*command, "--where", str(self.where), "--run_name", self.name],
                    cwd=self.parent, env=environment, stdout=output, stderr=output,
                )  # fmt: skip
        return self.launcher

    @property
    def status(self) -> dict[str, Any]:
        """Return the content of status.json; {} if there is none."""
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def has_stepped(self) -> bool:
        """Return whether the newest start has ended its first step."""
        return (self.status.get("first_step_time") or 0.0) > self.begun

    def wait_for_first_step(self) -> float:
        """Return the seconds from the beginning of the newest start to the end of its first step.

        Raises:
            RuntimeError: the launcher ended before that.
        """
        while not self.has_stepped:
            if not self.is_running:
                raise RuntimeError(self.output())
            time.sleep(0.01)
        return self.status["first_step_time"] - self.begun

    def kill(self, worker: psutil.Process) -> None:
        """Kill a training process; the launcher starts all of them again."""
        self.begun, self.before = time.time(), self.workers
        worker.kill()

    def output(self) -> str:
        """Return the end of what the launchers printed."""
        return (self.parent / f"{self.name}.txt").read_text()[-3000:]

    def weights(self) -> bytes:
        """Start the run until it has finished; return the content of the exported file."""
        for _ in range(10):
            if self.status.get("outcome") == "finished" and not self.is_running:
                break
            self.start().wait(600)
        else:
            raise RuntimeError(self.output())
        return (self.folder / "export/model.safetensors").read_bytes()
