"""Processes of a launcher end with it, at any time; without one, a run outlives its shell."""

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_launch
from my_project import process
from my_project import train as loop
from my_project.config import Config
from my_project.files import wait_until
from my_project.launching import workers
from my_project.run_folder import Run
from ragged import Ragged
from runs import make_config, quick, status, train
from test_launch import outcome, steps_done
from test_resume import interrupted_at
from world import World, run_world

ACCELERATE, LAUNCH = "accelerate.commands.launch", "my_project.launch"


def wait_for(condition: Callable[[], object]) -> None:
    assert wait_until(lambda: bool(condition()), 120, 0.05)


def script(text: str, *arguments: str, **environment: str) -> list[str]:
    """Run a script to its end; return the words of each line that it printed."""
    inherited = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
    done = subprocess.run(
        [*arguments, sys.executable, "-c", text], env=inherited | environment,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout.split()


# ---- without torch: a parent that has ended ------------------------------------------------------
ORPHAN = """
import os, subprocess, sys, threading, time
from my_project import process
process.POLL_SECONDS = 0.01
os.write(1, b"started ")
process.LAUNCHER.watch()
others = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)  # such as a recipe's pool
before = os.getppid()
{in_loop}
os.write(1, b"ready ")
while os.getppid() == before:
    time.sleep(0.01)
{then}
"""
IN_LOOP = {
    "in_loop": "process.LAUNCHER.ends_process = False",
    "then": """
while not process.LAUNCHER.is_gone:
    time.sleep(0.01)
time.sleep(0.2)
os.write(1, b"saved ")
process.LAUNCHER.ends_process = True
time.sleep(600)
""",
}
BEFORE = {"in_loop": "", "then": "time.sleep(600)"}
ALONE = {
    "in_loop": "",
    "then": "others.kill(); os.write(1, str(threading.active_count()).encode())",
}


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        (BEFORE, {"ACCELERATE_DYNAMO_MODE": "default"}, b"started ready "),
        (IN_LOOP, {"TORCHELASTIC_RUN_ID": "none"}, b"started ready saved "),
        (ALONE, {}, b"started ready 1"),
        (ALONE, {"ACCELERATE_MIXED_PRECISION": "bf16"}, b"started ready 1"),  # of a shell
    ],
)
def test_a_process_whose_launcher_is_gone_ends_with_all_it_started(text, environment, said):
    with subprocess.Popen(
        ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", ORPHAN.format(**text)],
        env=environment | {"PYTHONPATH": os.environ["PYTHONPATH"], "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as shell:  # fmt: skip
        assert shell.stdout
        assert shell.stderr
        shown = b""
        while not shown.endswith(b"ready "):
            shown += os.read(shell.stdout.fileno(), 100)
        shell.kill()
        shown += shell.stdout.read()  # it ends when no process is left
        assert shown == said
        assert (b"the launcher has exited" in shell.stderr.read()) == (text != ALONE)


TOLD = """
import os, signal, time
from my_project import process
process.POLL_SECONDS, process.REACH_LOOP_SECONDS = 0.01, 0.1
process.LAUNCHER.watch()
process.LAUNCHER.ends_process = {ends}
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep({seconds})
print("still there")
"""


def test_who_is_told_to_stop_before_the_loop_has_some_time_to_reach_it():
    launched = {"TORCHELASTIC_RUN_ID": "none"}
    assert script(TOLD.format(ends=True, seconds=600), **launched) == []
    assert script(TOLD.format(ends=False, seconds=1), **launched) == ["still", "there"]


# ---- signals around the start of a process -------------------------------------------------------
WORKERS = """
import os, signal, sys
from types import SimpleNamespace
cuda = SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, set_num_threads=lambda number: print(number))
from my_project import process
from my_project.launching import workers
ours = workers.Workers()
one = [{"OMP_NUM_THREADS": "3", "PATH": os.environ["PATH"]}]
never = lambda *_: False
run = lambda *words: ours.run(lambda: os.execlp(words[0], *words), one, never)
ours.run(lambda: print(os.getsid(0) == os.getpid()), one, never)
run("grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
work = workers._work
def signal_and_work(*arguments):  # in the new process, while signals are blocked
    os.kill(os.getppid(), signal.SIGTERM)
    work(*arguments)
workers._work = signal_and_work
print(run("sleep", "600")[0], bool(ours.stop_signal), flush=True)
"""


@pytest.mark.parametrize("before", [["env", "--default-signal=HUP"], ["nohup"]])
def test_a_signal_while_a_process_starts_reaches_it_and_nohup_holds(before):
    threads, has_own_session, _, blocked, _, ignored, *said, code, stopped = script(
        WORKERS, *before, OPENBLAS_NUM_THREADS="1"
    )
    assert (threads, has_own_session) == ("3", "True")
    assert (code, stopped) == (str(-signal.SIGTERM), "True")
    assert " ".join(said).startswith("SIGTERM: stopping; a run in training saves")
    assert int(blocked, 16) == 0
    assert bool(int(ignored, 16) & 1 << signal.SIGHUP - 1) == (before == ["nohup"])


ENDING_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from my_project import process
from my_project.launching import workers
def chosen():
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(str, range(8)))
    return workers.start_method()[0]
print({chosen() for _ in range(300)})
"""


@pytest.mark.slow
def test_threads_that_have_been_joined_do_not_prevent_a_fork():
    assert script(ENDING_THREADS, OPENBLAS_NUM_THREADS="1") == ["{'fork'}"]


# ---- what forks would share, and signal handlers that imports install ----------------------------
def test_open_files_are_those_that_have_a_position_to_share(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(bytes(4096))
    before = workers.open_files()
    with (
        tempfile.TemporaryFile() as deleted,
        open(tmp_path / "log", "a") as log,
        open(os.devnull) as device,
        open(os.memfd_create("memory")) as buffer,
        socket.socket() as connection,
        path.open("rb") as mapped,
        mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ) as memory,
    ):
        pipe = os.pipe()
        found = {number for number, _ in workers.open_files() - before}
        assert found >= {deleted.fileno(), connection.fileno(), pipe[0]}
        without = {file.fileno() for file in (log, device, buffer, mapped)} | {pipe[1]}
        assert not found & without
        assert len(memory) == 4096
    for end in pipe:
        os.close(end)


@dataclass(frozen=True, kw_only=True)
class Deaf(Ragged):
    """Replaces the signal handler in a method; is told to stop later."""

    method: str = "build_model"

    def build_model(self, data_info: Any) -> Any:
        if self.method == "build_model":
            signal.signal(signal.SIGTERM, lambda *_: None)
        return super().build_model(data_info)

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if self.method == "loss" and step == 2:
            signal.signal(signal.SIGTERM, lambda *_: None)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until the launcher's thread has seen the signal
        return super().loss(model, batch, step)


def train_launched(config: Config) -> int:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    process.LAUNCHER.watch()
    return train(config)


@pytest.mark.parametrize(
    ("method", "main"), quick(1, [("build_model", train), ("loss", train_launched)])
)
def test_a_signal_is_heeded_though_a_library_has_replaced_the_handler(tmp_path, method, main):
    config = make_config(tmp_path, Deaf(method=method), steps=20)
    assert run_world(1, main, config) == [75]
    assert 4 <= status(config)["step"] <= 6


def with_dead_stderr(config: Config) -> int:
    """Train while nobody reads stderr any more, such as a tee that Ctrl-C has ended."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.dup2(write_end, 2)
    return train(config)


def test_a_stop_signal_is_heeded_though_nobody_reads_stderr(tmp_path):
    config = interrupted_at(make_config(tmp_path), 2, rank=0)
    assert run_world(1, with_dead_stderr, config) == [75]
    assert status(config)["outcome"] == "preempted"


def test_a_hang_ends_the_run_though_nobody_reads_stderr(tmp_path):
    limits = {"distributed__timeout_seconds": 2, "distributed__startup_timeout_seconds": 2}
    recipe = Ragged(fault="hang", fault_in="build_model", fault_on_rank=0)
    config = make_config(tmp_path, recipe, **limits)
    with closing(World(1, with_dead_stderr, config)) as world:
        with pytest.raises(RuntimeError, match="the process died"):
            world.results(60)
    assert "no progress for 2 s; stalled at strike (" in status(config)["reason"]


# ---- several runs in one process -----------------------------------------------------------------
LOCKED = """
from pathlib import Path
from my_project.run_files import is_locked
print(is_locked(Path({folder!r})))
"""


def locks_of_two_runs(config: Config) -> list[list[str]]:
    kept = []

    def keep(*arguments: Any) -> Run:  # as a cycle of references does
        kept.append(Run(*arguments))
        return kept[-1]

    loop.Run = keep
    assert loop.main(config) == 75
    look = LOCKED.format(folder=str(config.folder))
    after_first = script(look)
    kept[:] = [Run(config, 0)]  # this frees the first one only after it has opened the second
    return [after_first, script(look)]


def test_a_run_is_unlocked_when_it_ends_and_not_while_the_next_one_trains(tmp_path):
    config = make_config(tmp_path, stop_after="0s")
    assert run_world(1, locks_of_two_runs, config) == [[["False"], ["True"]]]


def fail_at_the_end(config: Config) -> int:
    start = loop.start_accelerator

    @contextmanager
    def failing(config: Config) -> Iterator[Any]:
        with start(config) as accelerator:
            yield accelerator
        raise OSError("the teardown has failed")

    loop.start_accelerator = failing
    return train(config)


@pytest.mark.parametrize(("stop_after", "outcome"), [(None, "finished"), ("0s", "preempted")])
def test_an_error_in_the_teardown_does_not_change_the_outcome(tmp_path, stop_after, outcome):
    config = make_config(tmp_path, steps=2, stop_after=stop_after)
    with pytest.raises(RuntimeError, match="the teardown has failed"):
        run_world(1, fail_at_the_end, config)
    assert status(config)["outcome"] == outcome
    assert bool(status(config)["result"]) == (outcome == "finished")


# ---- the real launchers --------------------------------------------------------------------------
# Steps of 0.8 s: two of them, in which all ranks agree to stop, last longer than POLL_SECONDS.
SLOW = ("--steps", "1000", "--recipe.init_args.seconds", "0.2", "--telemetry.every_steps", "1")
WAITING = """
import os, time
from dataclasses import dataclass
from pathlib import Path
from ragged import Ragged

@dataclass(frozen=True, kw_only=True)
class Waiting(Ragged):
    def build_datasets(self, data_info):
        if os.environ["RANK"] == "1":
            Path("waiting").touch()
            time.sleep(600)
        return super().build_datasets(data_info)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # five starts
def test_whichever_launcher_dies_nothing_is_left_and_the_run_continues(tmp_path):
    # In startup: while one rank builds its data and the other waits for it.
    (tmp_path / "waiting.py").write_text(WAITING)
    lock = tmp_path / "runs/tiny/.lock"
    for launcher in (LAUNCH, ACCELERATE):
        (tmp_path / "waiting").unlink(missing_ok=True)
        with test_launch.launch(tmp_path, "--recipe", "waiting.Waiting", launcher=launcher) as run:
            wait_for(lambda: (tmp_path / "waiting").exists() and lock.exists() and lock.read_text())
            os.kill(run.pid, signal.SIGKILL)
            shown, _ = run.communicate(timeout=600)
        in_log = "".join(path.read_text() for path in tmp_path.glob("runs/tiny/logs/*/*/*.log"))
        said = shown if launcher == ACCELERATE else in_log
        assert "rank 1: the launcher has exited, so this process exits" in said
    # In the loop: the processes save.
    for launcher, where, number in (
        (ACCELERATE, "cpu", signal.SIGTERM),
        (LAUNCH, "cpu_2_processes", signal.SIGKILL),
    ):
        before = steps_done(tmp_path)
        with test_launch.launch(tmp_path, *SLOW, launcher=launcher, where=where) as run:
            wait_for(lambda before=before: steps_done(tmp_path) > before)
            os.kill(run.pid, number)
            shown, _ = run.communicate(timeout=600)
        left = outcome(tmp_path)
        assert left["outcome"] == "preempted", shown
        assert "the launcher has exited" in left["reason"] or where != "cpu"
        assert left["step"] == steps_done(tmp_path)
    # Without a launcher, from a shell that hangs up, the run goes on to its end.
    words = [sys.executable, "-m", "my_project.train", "--config", "tiny.yaml", *SLOW]
    words += ["--steps", str(left["step"] + 3)]
    shell = subprocess.run(
        ["sh", "-c", 'nohup "$@" > said 2>&1 & echo $!', "sh", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    wait_for(lambda: f"process {shell.stdout.strip()} on" in lock.read_text())
    os.kill(int(shell.stdout), signal.SIGHUP)
    wait_for(lambda: outcome(tmp_path)["outcome"] == "finished")
    said = (tmp_path / "said").read_text()
    assert f"resumed from runs/tiny/checkpoints/step_{left['step']:08d}" in said


# ---- garbage collection --------------------------------------------------------------------------
class Cycle:
    """Garbage that only the collector frees."""

    alive = 0
    alive_by_step: dict[int, int] = {}

    def __init__(self) -> None:
        self.me = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@dataclass(frozen=True, kw_only=True)
class Littering(Ragged):
    cycles: int = 1500  # per step
    validation_samples: int = 0

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        Cycle.alive_by_step[step] = Cycle.alive
        for _ in range(self.cycles):
            Cycle()
        return super().loss(model, batch, step)


def litter(config: Config) -> tuple[int, bool]:
    """Return the maximum of garbage alive, and whether the collector's settings were restored."""
    gc.enable()
    gc.set_threshold(600, 9, 8)
    before = gc.isenabled(), gc.get_threshold()
    train(config)
    return max(Cycle.alive_by_step.values()), (gc.isenabled(), gc.get_threshold()) == before


def test_gpus_are_counted_without_a_thread_that_would_stay(monkeypatch):
    def as_nvml_does() -> int:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return 2

    monkeypatch.setattr(workers, "threads", lambda: ["main"])  # the test process has more threads
    before = threading.active_count()
    assert workers.count_in_child(as_nvml_does) == 2
    assert threading.active_count() == before


def test_garbage_is_bounded_however_rare_the_records_are(tmp_path: Path):
    config = make_config(
        tmp_path, Littering(), steps=23, telemetry__every_steps=10_000,
        batches__global_batch_size=4, batches__micro_batch_size=4,
    )  # fmt: skip
    ((alive, is_restored),) = run_world(1, litter, config)
    assert 5_000 < alive <= 12_000 < 23 * 1500
    assert is_restored
