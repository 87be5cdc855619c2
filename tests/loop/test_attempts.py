"""The attempts of a launch, under every launcher: what continues, what ends, what is printed."""

import errno
import itertools
import os
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import test_launch
from my_project import failures
from my_project import manifest as manifests
from my_project.checkpoint.resuming import clean_up
from my_project.config import Config
from my_project.files import read_json, wait_until
from my_project.launching.attempts import Starts
from my_project.run_files import Status
from my_project.run_folder import Run
from runs import make_config
from terminal import Terminal
from test_launch import outcome, steps_done, wait_for_steps
from test_process import script
from world import run_world

ACCELERATE, LAUNCH = "accelerate.commands.launch", "my_project.launch"
TORCHRUN = "torch.distributed.run"


def in_place(launch: str, attempt: int, **more: str) -> dict[str, str]:
    return {"LAUNCH_START": f"{launch}.{attempt}", "TORCHELASTIC_RESTART_COUNT": "9"} | more


def by_torchrun(launch: str, attempt: int) -> dict[str, str]:
    file = f"/tmp/torchelastic_x/none_{launch}/attempt_{attempt}/0/error.json" if launch else ""
    names = {"TORCHELASTIC_ERROR_FILE": file, "TORCHELASTIC_RUN_ID": "none"}
    return names | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}


def in_job(job: str, restarts: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}


# ---- --resume never ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "continues"),
    [
        (in_place("a", 0), in_place("a", 1), True),
        (in_place("a", 1), in_place("a", 3), True),  # the first attempt did not get that far
        (in_place("a", 0), in_place("b", 0), False),
        (in_place("a", 0), in_place("b", 1), False),
        ({}, in_place("b", 1), False),
        (by_torchrun("a", 0), by_torchrun("a", 1), True),
        (by_torchrun("a", 0), by_torchrun("b", 1), False),
        (by_torchrun("", 0), by_torchrun("", 1), True),  # --log_dir /dev/null
        (by_torchrun("", 1), by_torchrun("", 1), False),
        # a requeued job; another command in a requeued job; a job that did not begin this run
        (in_place("a", 2, **in_job("5", "")), in_place("b", 0, **in_job("5", "1")), True),
        (in_place("a", 0, **in_job("5", "1")), in_place("b", 0, **in_job("5", "1")), False),
        (in_place("a", 0, **in_job("4", "0")), in_place("b", 0, **in_job("5", "1")), False),
        (in_job("5", "0"), in_job("5", "1"), True),
        ({}, in_job("5", "1"), False),
        (in_place("a", 0), {"SLURM_RESTART_COUNT": "1"}, False),
        ({}, {}, False),
    ],
)
def test_never_is_done_once_in_a_launch(tmp_path, monkeypatch, first, second, continues):
    """This holds even if another launch has continued the run in between."""
    config = make_config(tmp_path, resume="never")
    names = {*first, *second, "LAUNCH_START", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"}
    auto = make_config(tmp_path), {"LAUNCH_START": "other.0"}
    for settings, environment in ((config, first), auto, (config, second)):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Run(settings, rank=0).begin()
        (config.folder / "metrics.jsonl").touch()
    asides = [path.name for path in tmp_path.iterdir() if ".old-" in path.name]
    assert asides == ([] if continues else [f"{config.run_name}.old-1"])


def begin_and_die(config: Config, number: int) -> None:
    """Begin a run, and die instead of the rename after so many."""
    rename, left = os.rename, iter(range(number))
    os.rename = lambda *names: os._exit(9) if next(left, None) is None else rename(*names)
    Run(config, rank=0).begin()


def test_a_kill_between_its_renames_leaves_no_mark_for_the_next_attempt(tmp_path):
    """After a kill at any rename nothing is lost, and the next attempt does the remaining ones."""
    files_of_a_run = {"best": None, "agreement.json": "{}", "metrics.jsonl": "{}", "export": None}
    for number in itertools.count():
        folder = tmp_path / str(number)
        config = make_config(folder)
        Run(config, rank=0).begin()
        for name, text in files_of_a_run.items():
            path = config.folder / name
            path.mkdir() if text is None else path.write_text(text)
        before = {path.name for path in config.folder.iterdir()} - {".lock"}
        with suppress(RuntimeError):  # it is killed
            run_world(1, begin_and_die, make_config(folder, resume="never"), number)
            break
        left = {path.name for path in config.folder.iterdir()} - {".lock"}
        assert "run.json" in left
        assert number == 0 or "status.json" not in left
        Run(make_config(folder, resume="never"), rank=0).begin()
        asides = [{path.name for path in aside.iterdir()} for aside in folder.glob("*.old-*")]
        assert set().union(*asides) == before
    assert number == len(before)


LONG = ("--steps", "60", "--checkpoints.every_steps", "4", "--telemetry.every_steps", "1",
        "--recipe.init_args.seconds", "0.05", "--recipe.init_args.dropout", "0.2",
        "--recipe.init_args.dtype", "float64", "--distributed.timeout_seconds", "60")  # fmt: skip
STARTED = [
    (LAUNCH, 2, ()),
    (TORCHRUN, 2, ("--standalone", "--nproc_per_node", "2", "--max_restarts", "2")),
    (TORCHRUN, 1, ("--max_restarts", "2")),
]


def started(folder: Path, launcher: str, processes: int, *flags: str, words: tuple[str, ...]):
    """Start a run by any launcher."""
    where = "cpu" if processes == 1 else "cpu_2_processes"
    where = "" if launcher == TORCHRUN else where
    return test_launch.launch(folder, *words, launcher=launcher, where=where, flags=flags)


def ranks(mark: str) -> list[psutil.Process]:
    """Return the training processes of a launch, by rank."""
    found = {}
    for pid in test_launch.processes_with(mark):
        with suppress(psutil.Error, OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            rank = (
                name[5:] if name.startswith("rank ") else psutil.Process(pid).environ().get("RANK")
            )
            if rank is not None:
                found.setdefault(int(rank), psutil.Process(pid))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launcher", "processes", "flags"), STARTED)
def test_a_run_that_never_began_again_goes_on_when_it_is_killed(
    tmp_path, monkeypatch, launcher, processes, flags
):
    """The folder holds a finished run; the reader of the output is gone, and takes no UTF-8."""
    old = tmp_path / "runs/tiny"
    old.mkdir(parents=True)
    (tmp_path / "rüns").symlink_to("runs")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    # otherwise restarted ranks of torchrun look for each other in the store of the first attempt
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    words = (*LONG, "--resume", "never", "--runs_folder", "rüns")
    (old / "run.json").write_text('{"run": "old", "launch": "old.0"}')
    (old / "status.json").write_text('{"outcome": "finished", "result": {}, "step": 60}')
    with started(tmp_path, launcher, processes, *flags, words=words) as run:
        wait_for_steps(tmp_path, 12)
        run.stdout.close()
        ranks(run.mark)[-1].kill()
        code = run.wait(600)
    assert code == 0
    assert outcome(tmp_path)["outcome"] == "finished"
    records = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    (first, *later) = re.findall(r'"resumed_from": (null|".*?")', records)
    assert first == "null"
    assert later, "the second attempt has gone on"
    assert (tmp_path / "runs/tiny.old-1/status.json").exists()
    assert {path.name for path in tmp_path.glob("runs/[!.]*")} == {"tiny", "tiny.old-1"}


# ---- suspended, and stuck with Python's lock -----------------------------------------------------
HOLDING = """
import ctypes, os
from dataclasses import dataclass, field
from my_project import watchdog
from ragged import Ragged

watchdog.HELD_SECONDS = 1.0

@dataclass(frozen=True, kw_only=True)
class Holding(Ragged):
    hold_at: int = field(default=-1, metadata={"changes_curve": False})

    def loss(self, model, batch, step):
        if step == self.hold_at and os.environ.get("RANK", "0") == "0":
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second one never ends
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return super().loss(model, batch, step)
"""
SUSPENDED = ("--recipe", "holding.Holding", "--recipe.seconds", "0.1", "--steps", "99999",
             "--telemetry.every_steps", "1", "--distributed.timeout_seconds", "2",
             "--distributed.startup_timeout_seconds", "30")  # fmt: skip


@pytest.mark.slow
def test_time_in_which_a_run_is_suspended_does_not_count(tmp_path):
    """Three are suspended twice, for longer than the watchdog's limit and HELD_SECONDS."""
    with ExitStack() as stack:
        runs = {}
        for number, kind in enumerate(((LAUNCH, 1), (LAUNCH, 2), (ACCELERATE, 1))):
            (folder := tmp_path / str(number)).mkdir()
            (folder / "holding.py").write_text(HOLDING)
            runs[folder] = stack.enter_context(started(folder, *kind, words=SUSPENDED))
        for further in (5, 10, 15):
            for folder, steps in [(folder, steps_done(folder) + further) for folder in runs]:
                wait_for_steps(folder, steps, runs[folder])
            marks = [run.mark for run in runs.values()]
            processes = [p for mark in marks for p in ranks(mark) or ranks_and_workers(mark)]
            assert len(processes) == 4
            for process in processes * (further < 15):
                process.suspend()
            time.sleep(6 * (further < 15))
            for process in processes:
                process.resume() if further < 15 else process.terminate()
        for folder, run in runs.items():
            shown, _ = run.communicate(timeout=600)
            assert outcome(folder)["outcome"] == "preempted", shown
    logs = "".join(path.read_text() for path in tmp_path.glob("*/runs/tiny/logs/*/*/*"))
    assert "Thread" not in logs, "no stacks"
    assert not list(tmp_path.glob("*/runs/tiny/logs/*/*/stacks*"))


@pytest.mark.slow
def test_a_process_whose_c_code_holds_pythons_lock_is_ended_and_named(tmp_path):
    (tmp_path / "holding.py").write_text(HOLDING)
    words = (*SUSPENDED, "--recipe.hold_at", "8")
    with started(tmp_path, LAUNCH, 1, words=words) as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 1, shown
    failure = outcome(tmp_path)["failure"]
    assert (failure["cause"], failure["rank"]) == ("stalled", 0)
    assert "GIL" in failure["reason"]
    assert "memory" not in shown
    (error,) = map(read_json, tmp_path.glob("runs/tiny/errors/*.json"))
    assert "in loss" in error["details"]


# ---- signals and processes that end at a bad moment ----------------------------------------------
SIGNALLED = """
import os, signal, sys, time
from types import SimpleNamespace
cuda = SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = SimpleNamespace(cuda=cuda, set_num_threads=lambda number: None)
from my_project.launching import workers
ours = workers.Workers()
one = [{"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}]
clock, steps = time.time, [0]
time.time = lambda: clock() + steps[0]

def told(codes, seconds):
    for _ in range(2 * (not steps[0])):
        os.kill(os.getpid(), signal.SIGUSR1)
        steps[0] += 3600
        time.sleep(0.01)
    return False

def ignore():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.write(1, b"waits ")
    time.sleep(2)

"""


def test_two_signals_with_a_clock_step_between_them_end_nothing_early():
    text = (
        SIGNALLED
        + "print(ours.run(ignore, one, lambda *_: told(*_) if time.sleep(1) else told(*_)))"
    )
    assert script(text, OPENBLAS_NUM_THREADS="1")[-2:] == ["{0:", "0}"]


def test_a_signal_after_the_processes_have_ended_restarts_nothing():
    text = """
print(ours.run(lambda: None, one, lambda *_: False))
os.kill(os.getpid(), signal.SIGTERM)
print(ours.stop_signal, ours.run(lambda: None, one, lambda *_: False))
"""
    *_, signalled, codes = script(SIGNALLED + text, OPENBLAS_NUM_THREADS="1")
    assert (signalled, codes) == ("SIGTERM", "{}")


def test_if_one_process_cannot_be_started_none_is_left():
    text = """
import psutil
fork, forks = os.fork, iter((os.fork, lambda: 1 / 0))
os.fork = lambda: next(forks)()
try:
    ours.run(lambda: time.sleep(600), 2 * one, lambda *_: False)
except ZeroDivisionError:
    print(psutil.Process().children())
"""
    assert script(SIGNALLED + text, OPENBLAS_NUM_THREADS="1") == ["[]"]


def test_a_signal_after_a_wait_that_failed_ends_nothing():
    text = """
try:
    with ours.stoppable():
        raise ValueError
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    print("unharmed")
"""
    assert script(SIGNALLED + text, OPENBLAS_NUM_THREADS="1")[-1:] == ["unharmed"]


ORPHANS = """
def leave_orphans():
    for _ in range(20):
        if not os.fork():
            if not os.fork():
                time.sleep(0.2)
            os._exit(0)
        os.wait()
    time.sleep(2)
import psutil
most = []
def count(codes, seconds):
    zombies = [one.status() == psutil.STATUS_ZOMBIE for one in psutil.Process().children()]
    most.append(sum(zombies))
    return False
ours.run(leave_orphans, one, count)
print(max(most[-5:-1]), len(most) > 10)
"""


def test_the_launcher_lets_orphans_go_that_it_has_adopted():
    assert script(SIGNALLED + ORPHANS, OPENBLAS_NUM_THREADS="1") == ["0", "True"]


WATCHING = """
import os, subprocess, time
from my_project import process
os.dup2(1, 2)
process.POLL_SECONDS = 0.01
with subprocess.Popen(["true"]) as ended:
    ended.wait()
process.LAUNCHER.watch(ended.pid)
time.sleep(600)
"""


def test_a_process_whose_launcher_ends_before_it_is_watched_ends_too():
    said = script(WATCHING, TORCHELASTIC_RUN_ID="none")
    assert said[2:5] == ["the", "launcher", "has"]


HANGING = """
import time
from dataclasses import dataclass
from ragged import Ragged, Samples

class Stuck(Samples):
    def __getitem__(self, index):
        if index == 5:
            open("hangs", "w").close()
            time.sleep(6000)
        return super().__getitem__(index)

@dataclass(frozen=True, kw_only=True)
class Hanging(Ragged):
    def build_datasets(self, data_info):
        return Stuck(self.samples, 6, self.dtype, 1, 0.0), super().build_datasets(data_info)[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["watchdog", "SIGKILL"])
def test_a_loader_worker_that_hangs_ends_with_its_process(tmp_path, by):
    """`started` checks at its end that no process is left."""
    (tmp_path / "hanging.py").write_text(HANGING)
    limit = "4" if by == "watchdog" else "600"
    words = ("--recipe", "hanging.Hanging", "--batches.workers", "1",
             *("--checks.data", "off", "--checks.recipe", "off"),
             "--distributed.timeout_seconds", limit,
             "--distributed.startup_timeout_seconds", limit)  # fmt: skip
    with started(tmp_path, ACCELERATE, 1, words=words) as run:
        if by == "SIGKILL":
            is_hanging = wait_until((tmp_path / "hangs").exists, 300)
            ranks_and_workers(run.mark)[0].kill()
        shown, _ = run.communicate(timeout=600)
    assert run.returncode != 0
    assert is_hanging if by == "SIGKILL" else "no progress for 4 s" in shown, shown


def ranks_and_workers(mark: str) -> list[psutil.Process]:
    """Return the processes of a launch except the launcher, oldest first."""
    processes = [psutil.Process(pid) for pid in test_launch.processes_with(mark)]
    return sorted(processes, key=lambda process: process.create_time())[1:]


# ---- how many restarts ---------------------------------------------------------------------------
def test_a_process_that_always_dies_in_one_step_gets_three_restarts(tmp_path):
    """This holds even if only the last failure comes with the step that a rank reports."""
    (tmp_path / "checkpoints/step_00000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000004/manifest.json").touch()
    starts = Starts(folder=tmp_path, limit=3)
    failure = replace(failures.record(reason="", cause="lost contact"), step=5)
    refusals = [starts.refusal({1: -9}, reported) for reported in ([], [], [], [failure])]
    assert [bool(refusal) for refusal in refusals] == [False, False, False, True]


def test_of_a_start_without_a_kept_step_no_goodput_is_shown():
    goodput = pytest.importorskip("my_project.tools.goodput")

    def shown(seconds: float) -> str:
        return goodput.in_words(Status(goodput={"calendar": {"kept": 0.0, "seconds": seconds}}))

    assert shown(4.0) == ""
    assert shown(4000.0) == "0% of 1 h 6 min since the first launch"


# ---- a folder that another host reads over NFS ---------------------------------------------------
def test_a_folder_that_somebody_keeps_busy_is_replaced(tmp_path, monkeypatch):
    """Its files stay as .nfs<number> while they are open."""
    replace, unlink, best = os.replace, os.unlink, tmp_path / "best"

    def leave(source, target):
        if source == best:
            (Path(source) / ".nfs0001").touch()
        replace(source, target)

    def keep(path, *arguments, **options):
        if Path(os.fsdecode(path)).name == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "replace", leave)
    monkeypatch.setattr(os, "unlink", keep)
    for text in ("first", "second", "third"):
        (tmp_path / ".best.partial").mkdir()
        (tmp_path / ".best.partial" / text).touch()
        manifests.put_in_place(tmp_path / ".best.partial", best)
        assert [path.name for path in best.iterdir()] == [text]
    monkeypatch.undo()
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.rglob("*")} == {"best", "third"}


def test_what_a_kill_left_under_another_name_is_restored_or_removed(tmp_path):
    saves = tmp_path / "checkpoints"
    for name in (".step_00000001_0_abc.partial", ".step_00000002.before-1", "step_00000002"):
        (saves / name).mkdir(parents=True)
    for path in (saves / ".step_00000003.before-1", *map(tmp_path.joinpath, EXPORTS)):
        path.mkdir()
        (path / path.suffix).touch()
    clean_up(tmp_path)
    paths = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert paths == {
        *("checkpoints", "checkpoints/step_00000002", "checkpoints/step_00000003"),
        *("checkpoints/step_00000003/.before-1", "export", "export/.before-10"),
    }


EXPORTS = (".export.before-9", ".export.before-10")


# ---- in the first seconds ------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["importing torch", "run folder"])
def test_the_first_seconds_and_ctrl_c_in_them_say_something(tmp_path, moment):
    (tmp_path / "tiny.yaml").write_text(test_launch.CONFIG)
    where = str(test_launch.PROJECT / "accelerate_configs/cpu.yaml")
    terminal = Terminal(["train", "tiny.yaml", "--where", where], tmp_path)
    terminal.read(lambda shown: moment in shown)
    terminal.type("\x03")
    lines, code = terminal.end()
    assert code == {"importing torch": 130, "run folder": 75}[moment], lines
    assert re.search("interrupted|SIGINT: stopped while", lines[-1]), lines
