"""Signals, hangs and failures: every process exits in time, and the status says why."""

import json
import multiprocessing
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ragged
from ragged import Ragged
from runs import change, make_config, quick, records, status, train
from test_resume import interrupted_at
from torch.utils.data._utils import signal_handling
from world import TESTS, World, run_world

from my_project import stopping
from my_project.config import Config, ConfigError, parse_duration
from my_project.failures import Failure, first_failure
from my_project.files import wait_until
from my_project.run_files import read_errors, read_info, read_status

HERE = socket.gethostname()


def errors(config: Config) -> dict[int, str]:
    """Return the content of the error files as text, by rank."""
    texts = {}
    for path in sorted((config.folder / "errors").glob("*.json")):
        error = json.loads(path.read_text())
        head = f"rank {error['rank']} on {error['host']}, step {error['step']}\n"
        texts[error["rank"]] = f"{head}{error['reason']}\n{error['details']}"
    return texts


def root_cause(config: Config) -> Failure:
    """Return the failure that the launcher considers the first."""
    first = first_failure(read_errors(config.folder, read_info(config.folder).launch))
    assert first
    return first


def fails(config: Config, processes: int = 2) -> str:
    """Run processes that fail; all of them must exit soon after the first."""
    world = World(processes, train, config)
    with pytest.raises(RuntimeError) as failure:
        world.results(60)
    assert status(config)["outcome"] == "failed"
    return str(failure.value)


def with_fault(folder: Path, fault: str, at: int = 3, **settings) -> Config:
    recipe = Ragged(fault=fault, fault_at=at)
    return make_config(folder, recipe, distributed__timeout_seconds=2, **settings)


# ---- failures ------------------------------------------------------------------------------------
def test_a_process_that_is_gone_is_named_by_those_that_are_left(tmp_path):
    config = with_fault(tmp_path, "leave")
    fails(config)
    reports = errors(config)
    assert reports.keys() == {0}
    assert f"rank 0 on {HERE}, step 3\n" in reports[0]
    assert "lost contact with another process" in status(config)["reason"]
    hosts = json.loads((config.folder / "run.json").read_text())["hosts"]
    assert hosts == [HERE, HERE]
    launch = pytest.importorskip("my_project.launching.launch")
    corrected = launch.as_failed(config.folder, read_status(config.folder), [root_cause(config)])
    assert f"No report from rank 1 on {HERE}" in corrected.reason


def test_an_exception_on_one_rank_is_the_reason_whatever_it_causes(tmp_path):
    config = with_fault(tmp_path, "raise")
    fails(config)
    reports = errors(config)
    assert reports.keys() == {0, 1}
    assert f"rank 1 on {HERE}, step 3\n" in reports[1]
    assert "ValueError: this rank was told to fail" in reports[1]
    assert "Traceback" in reports[1]
    assert "lost contact with another process" in reports[0]
    launch = pytest.importorskip("my_project.launching.launch")
    failed = launch.as_failed(config.folder, read_status(config.folder), [root_cause(config)])
    assert failed.reason == f"rank 1 on {HERE}, step 3: ValueError: this rank was told to fail"
    noted = failed.failure
    assert noted
    assert noted.at
    assert (noted.rank, noted.host, noted.step) == (1, HERE, 3)
    assert (noted.cause, noted.at.function) == ("exception", "strike")


def run_under_torchrun(config: Config, restarts: str) -> None:
    from my_project import exits

    os.environ["TORCHELASTIC_MAX_RESTARTS"] = restarts
    exits.run_on_all_ranks(train, config)


def test_a_recipe_that_calls_sys_exit_has_failed(tmp_path):
    config = make_config(tmp_path, Ragged(fault="exit", fault_at=0, fault_on_rank=0))
    with pytest.raises(RuntimeError, match="the process died"):  # by os._exit(1)
        run_world(1, run_under_torchrun, config, "0")
    assert status(config)["outcome"] == "failed"
    assert status(config)["reason"] == f"rank 0 on {HERE}, step 0: SystemExit: 0"
    assert status(config)["failure"]["at"]["file"] == ragged.__file__
    assert "sys.exit(0)" in errors(config)[0]


@pytest.mark.parametrize(("restarts", "code"), [("0", 75), ("3", 0)])
def test_a_preempted_run_exits_with_75_or_0_if_torchrun_would_restart_it(tmp_path, restarts, code):
    config = make_config(tmp_path, stop_after="0s")
    assert run_world(1, run_under_torchrun, config, restarts) == [code]


def test_an_exception_in_a_loader_worker_ends_the_run_and_is_named(tmp_path):
    recipe = Ragged(bad_sample=5)
    config = make_config(tmp_path, recipe, batches__workers=1, distributed__timeout_seconds=5)
    fails(config)
    text = "\n".join(errors(config).values())
    assert "sample 5 cannot be read" in text
    assert "sample 5 cannot be read" in status(config)["reason"]


def train_with_a_late_signal(config: Config) -> int:
    exception_failure = stopping.failures.exception_failure

    def raise_as_torch_does() -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    def interrupted(*arguments, **options):
        signal_handling._error_if_any_worker_fails = raise_as_torch_does
        os.kill(os.getpid(), signal.SIGCHLD)
        return exception_failure(*arguments, **options)

    stopping.failures.exception_failure = interrupted
    return train(config)


@pytest.mark.slow
def test_the_signal_of_a_killed_worker_does_not_interrupt_the_report(tmp_path):
    config = make_config(tmp_path, Ragged(bad_sample=5, fault="leave"), batches__workers=1)
    with pytest.raises(RuntimeError):
        run_world(1, train_with_a_late_signal, config)
    assert "a loader worker exited" in errors(config)[0]
    assert status(config)["outcome"] == "failed"


# ---- told to stop --------------------------------------------------------------------------------
def wait_for_records(config: Config, steps: int) -> None:
    path = config.folder / "metrics.jsonl"
    assert wait_until(lambda: path.exists() and len(records(config)) >= steps, 600, 0.02)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize("name", quick(1, ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"]))
def test_a_signal_to_one_process_and_to_all_loader_workers(tmp_path, name):
    """A scheduler sends its signal to all processes together, loader workers included."""
    config = make_config(tmp_path, steps=5000, batches__workers=1)
    with closing(World(2, train, config)) as world:
        wait_for_records(config, 3)
        workers = [child for w in world.workers for child in children(w.pid)]
        assert len(workers) == 2
        for pid in [*workers, world.workers[1].pid]:
            os.kill(pid, getattr(signal, name))
        assert world.results(30) == [75, 75]
    left = status(config)
    assert left["outcome"] == "preempted"
    assert left["reason"] == f"{name}, on rank 1 ({HERE})"
    assert left["step"] == records(config)[-1]["step"] < 5000
    saved = [p.name for p in (config.folder / "checkpoints").iterdir()]
    assert saved == [f"step_{left['step']:08d}"]


def signals_of_a_loader_worker() -> list[bool]:
    from my_project.loading import loader

    loader.ignore_signals_except_parents(0)
    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return [signal.getsignal(number) is signal.SIG_IGN for number in numbers]


def test_loader_workers_that_inherit_no_handler_ignore_signals_too():
    """These workers are spawned, not forked."""
    assert run_world(1, signals_of_a_loader_worker) == [[True, True, True]]


def work_in_a_loader_worker(ready: Any) -> None:
    from my_project.loading import loader

    loader.ignore_signals_except_parents(0)
    ready.send(None)
    time.sleep(600)


def test_the_training_process_ends_its_workers_though_a_server_forked_them():
    context = multiprocessing.get_context("forkserver")
    receiver, ready = context.Pipe(duplex=False)
    worker = context.Process(target=work_in_a_loader_worker, args=(ready,), daemon=True)
    worker.start()
    assert receiver.poll(600)
    worker.terminate()
    worker.join(30)
    code = worker.exitcode
    worker.kill()
    assert code == 0


def train_signalled_twice(config: Config, seconds_between: float) -> int:
    def strike_twice(fault: str) -> None:
        strike(fault)
        time.sleep(seconds_between)
        strike(fault)

    stopping.SECOND_SIGNAL_AFTER_SECONDS = 0.5
    strike, ragged.strike = ragged.strike, strike_twice
    return train(config)


def test_a_second_signal_exits_immediately_unless_it_follows_too_soon(tmp_path):
    config = interrupted_at(make_config(tmp_path, run_name="soon"), 2, rank=0)
    assert run_world(1, train_signalled_twice, config, 0.1) == [75]
    config = change(config, run_name="later")
    with pytest.raises(RuntimeError, match="KeyboardInterrupt: by a second signal, SIGTERM"):
        run_world(1, train_signalled_twice, config, 0.8)
    assert not (config.folder / "checkpoints").exists()


def test_the_first_signal_after_stop_after_is_no_second_one(tmp_path):
    """The run is told to stop by stop_after, and then by the scheduler."""
    config = make_config(tmp_path, stop_after="0s")
    assert run_world(1, train, interrupted_at(config, 1, rank=0)) == [75]
    assert status(config)["reason"] == "stop_after 0s has elapsed"


def test_a_signal_in_start_up_is_heeded_by_all_after_the_first_steps(tmp_path):
    config = make_config(tmp_path, Ragged(fault="preempt", fault_in="build_model"))
    assert run_world(2, train, config) == [75, 75]
    assert status(config)["step"] == 2


def test_stop_after_counts_from_the_process_start_by_a_monotonic_clock(monkeypatch):
    config = make_config(TESTS, stop_after="1h")
    stop = stopping.StopRequest(config)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert not stop.requested, "a changed clock does not count"
    monkeypatch.undo()
    assert not stop.requested
    monkeypatch.setattr("psutil.Process.create_time", lambda _: time.time() - 3601)
    assert stopping.StopRequest(config).requested, "the process started an hour ago"


def test_durations():
    assert parse_duration("3h55m") == 14100
    assert parse_duration("1d") == 86400
    assert parse_duration("90s") == 90
    for wrong in ("", "90", "3.5h", "5m3h", "-3h"):
        with pytest.raises(ConfigError, match="such as 3h55m"):
            parse_duration(wrong)


def test_after_the_loop_a_launcher_that_is_gone_ends_the_process_again(tmp_path):
    with stopping.StopRequest(make_config(tmp_path)) as stop:
        stop.loop_begins()
        assert not stopping.LAUNCHER.ends_process, "the loop saves first"
    assert stopping.LAUNCHER.ends_process


def test_a_run_forgets_the_signal_of_an_earlier_run_and_restores_handlers(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    stopping.LAUNCHER.stop_signal = "SIGINT"
    with stopping.StopRequest(make_config(tmp_path)) as stop:
        assert stopping.LAUNCHER.stop_signal == ""
        stop._handlers[signal.SIGUSR1] = None  # that of C code, which Python cannot restore
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    signal.signal(signal.SIGUSR1, before)
