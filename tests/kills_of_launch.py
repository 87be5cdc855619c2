"""Kill launchers and their processes at random instants; for faults.py and test_faults.py; Linux.

Each case is a run of one or two processes; about half of the runs use --resume never, to replace an
earlier run. One or two of the processes (the launcher included) get SIGKILL or SIGTERM: at the
start, during a fork, while the old run is moved aside, in a step, in a save, in a restart in place,
or at the end. Then the same command continues the run, without --resume never if the new run exists
by then.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import faults
import psutil

CONFIG = """\
run_name: killed
recipe: {class_path: ragged.Ragged, init_args: {dropout: 0.2, seconds: 0.01, dtype: float64}}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
optim: {lr: 0.01}
steps: 24
checkpoints: {every_steps: 2}
telemetry: {every_steps: 1, trackers: []}
evaluation: {best_metric: validation/auroc, best_mode: max, every_steps: 8}
"""
OLD = "--optim.lr", "0.02"
MOMENTS = ("start", "fork", "begin", "step", "save", "restart", "end")
WEIGHTS = "export/model.safetensors"
LONGEST_START, LONGEST_AFTER = 2.0, 0.05  # maximum seconds until a kill


class Launched:
    """A launcher that is forked from this process, which has imported everything."""

    def __init__(self, folder: Path, processes: int, *more: str) -> None:
        self.run = folder / "runs/killed"
        self.starts_over = "never" in more
        words = faults.command(processes)[3:]
        words[words.index("--max_restarts") + 1] = "3"
        (folder / "run.yaml").write_text(CONFIG)
        if not (pid := os.fork()):
            faults.launched(folder, [*words, *more])
        self.pid = pid
        self.code: int | None = None

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        if self.code is None and (reaped := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(reaped[1])
        return self.code is not None

    def wait(self, condition: Callable[[], object] = lambda: False) -> None:
        """Wait until a condition holds, or the launcher has ended."""
        while not self.has_ended() and not condition():
            time.sleep(0.001)

    def ranks(self) -> list[int]:
        """Return the pids of the training processes."""
        ranks = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children():
                with suppress(OSError):
                    if Path(f"/proc/{process.pid}/comm").read_text().startswith("rank "):
                        ranks.append(process.pid)
        return ranks

    def wait_for(self, moment: str, draw: random.Random) -> None:
        """Wait for a random instant of a moment, one of MOMENTS."""
        conditions: dict[str, Callable[[], object]] = {
            "start": lambda: True,
            "fork": self.ranks,
            "begin": lambda: [*self.run.parent.glob("killed.old-*")],
            "step": lambda: faults.steps(self.run) > 2,
            "save": lambda: [*self.run.glob("checkpoints/.step_*.partial")],
            "restart": self.ranks,
            "end": (self.run / "export").exists,
        }
        if self.starts_over and moment not in ("start", "fork"):
            self.wait(conditions["begin"])
        self.wait(conditions["step" if moment == "restart" else moment])
        if moment == "restart" and (before := self.ranks()):
            kill(draw.choice(before), signal.SIGKILL)
            self.wait(lambda: {*self.ranks()} - {*before})
        longest = {"start": LONGEST_START, "step": 0.5, "begin": LONGEST_AFTER / 10}
        time.sleep(draw.uniform(0, longest.get(moment, LONGEST_AFTER)))


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def case(number: int, seed: int, folder: Path, whole: dict[int, bytes]) -> str:
    """Kill processes of a run, continue it, and return a description of the case.

    Args:
        number: the number of the case.
        seed: the case is drawn from the seed and the number.
        folder: an empty folder.
        whole: the weights of runs that are never killed, by number of processes; filled here.

    Raises:
        AssertionError: the weights differ, a process or another run is left, or an exit code is
            wrong.
    """
    draw = random.Random(f"{seed} {number}")
    processes, moment = draw.choice((1, 2)), MOMENTS[number % len(MOMENTS)]
    never = ("--resume", "never") if draw.random() < 0.5 or moment == "begin" else ()
    if processes not in whole:
        (own := folder / f"whole_{processes}").mkdir()
        Launched(own, processes).wait()
        whole[processes] = (own / "runs/killed" / WEIGHTS).read_bytes()
    if never:
        Launched(folder, processes, *OLD).wait()
    old = faults.steps(folder / "runs/killed") and (folder / "runs/killed/run.json").read_text()
    first = Launched(folder, processes, *never)
    first.wait_for(moment, draw)
    alive = [first.pid, *first.ranks()] if not first.has_ended() else []
    victims = draw.sample(alive, min(len(alive), draw.choice((1, 1, 2))))
    sent = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
    for pid in victims:
        kill(pid, sent)
    names = ["launcher" if pid == first.pid else "rank" for pid in victims]
    did = f"{number}: {processes} {' '.join(never)} {moment}: {sent.name} to {names}"
    first.wait()
    assert first.code in (0, 75, -9, -15), f"{did}: {first.code}"
    leave_nothing(did)
    about = first.run / "run.json"
    for _ in range(3):
        has_begun = about.exists() and about.read_text() != old
        again = Launched(folder, processes, *(() if has_begun else never))
        again.wait()
        leave_nothing(did)
        if again.code == 0:
            break
    assert again.code == 0, f"{did}: then {again.code}"
    assert (first.run / WEIGHTS).read_bytes() == whole[processes], f"{did}: other weights"
    recorded = faults.steps(first.run)
    assert recorded == 24, f"{did}: {recorded} records"
    runs = {path.name for path in folder.glob("runs/[!.]*")} - {"killed"}
    kept = [path for name in runs for path in (folder / "runs" / name).glob("run.json")]
    assert [path.read_text() for path in kept] == [old] * bool(never), f"{did}: {runs}"
    return did


def leave_nothing(did: str) -> None:
    """Wait until all descendants have ended, and reap them; ranks save when their launcher ends."""
    deadline = time.monotonic() + 60
    while left := psutil.Process().children(recursive=True):
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert time.monotonic() < deadline, f"{did}: left {left}"
        time.sleep(0.01)


def kill_launches(numbers: list[int], seed: int, folder: Path) -> None:
    """Run cases; print the description of each."""
    from my_project.process import PR_SET_CHILD_SUBREAPER, prctl

    prctl(PR_SET_CHILD_SUBREAPER, 1)
    whole: dict[int, bytes] = {}
    for number in numbers:
        (own := folder / str(number)).mkdir()
        print(case(number, seed, own, whole), flush=True)
        shutil.rmtree(own)
