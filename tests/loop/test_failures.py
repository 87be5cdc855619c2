"""The fields of a failure: each kind is written, and read back without parsing its message."""

import errno
import json
import multiprocessing.connection
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from my_project import exits, failures, run_files, run_folder, watchdog
from my_project.config import ConfigError
from my_project.files import from_object
from my_project.launching.launch import as_failed
from my_project.run_files import Status
from my_project.run_folder import Run, failures_recorded
from my_project.state import NotFiniteError
from my_project.step_sums import StepSums, read_on_host
from runs import make_config
from torch._utils import ExceptionWrapper
from torch.autograd import graph
from torch.cuda import streams
from torch.nn.parallel import DistributedDataParallel


class DistStoreError(RuntimeError):
    """Has the name of an exception of torch.distributed."""


def raise_(error: BaseException) -> None:
    raise error


def raise_from(error: Exception, cause: Exception) -> None:
    try:
        raise cause
    except Exception:
        raise error  # noqa: B904 - as libraries do


def failed(cause: str, **fields: Any) -> failures.Failure:
    return replace(failures.record(reason="", cause=cause), **fields)


def closed_pipe() -> multiprocessing.connection.Connection:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    return ours


@pytest.mark.parametrize("message", ["no such shard", "no such shard."])
def test_a_note_is_a_sentence_of_its_own(message):
    error = ValueError(message)
    error.add_note("This was lane 0 of the stream.")
    wanted = "ValueError: no such shard. This was lane 0 of the stream."
    assert failures.exception_reason(error) == wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (KeyError("no such shard"), "KeyError: 'no such shard' This was lane 0."),
        (
            RuntimeError("CUDA error:\n  no kernel\n"),
            "RuntimeError: CUDA error: no kernel This was",
        ),
        (DistStoreError("gone"), "DistStoreError: gone This was lane 0."),
        (
            UnicodeDecodeError("ascii", b"a", 0, 1, "no"),
            "RuntimeError: UnicodeDecodeError: 'ascii'",
        ),
    ],
    ids=repr,
)
def test_the_message_and_the_notes_of_a_loader_worker_are_one_line(error, wanted):
    error.add_note("This was lane 0.")
    try:
        raise_(error)
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(Exception, match="Original Traceback") as told:
        wrapper.reraise()
    reason = failures.exception_reason(told.value)
    assert reason.startswith(wanted)
    assert reason.endswith("lane 0. (in a loader worker)")


KINDS = {
    "setting": lambda: raise_(ConfigError("lr is -1.")),
    "exception": lambda: raise_(KeyError("labels")),
    "stopped": lambda: raise_(KeyboardInterrupt("by a second signal, SIGTERM")),
    "out of memory": lambda: raise_(RuntimeError("CUDA error: out of memory")),
    "out of memory, of cuDNN": lambda: raise_(
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")
    ),
    "device error": lambda: raise_(RuntimeError("CUDA error: device-side assert triggered")),
    "out of host memory": lambda: bytearray(1 << 60),
    "full disk": lambda: raise_(OSError(errno.ENOSPC, "No space left on device")),
    "full shared memory": lambda: raise_(
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space (28)")
    ),
    "too many open files": lambda: raise_(OSError(errno.EMFILE, "Too many open files")),
    "too many open files, in a worker": lambda: raise_(RuntimeError("received 0 items of ancdata")),
    "loader worker": lambda: raise_(RuntimeError("DataLoader worker (pid 7) exited unexpectedly")),
    "loader worker, a closed pipe": lambda: closed_pipe().recv(),
    "loader worker, no socket": lambda: multiprocessing.connection.Client("/no/socket"),
    "exception, of a connection": lambda: raise_(ConnectionResetError("by peer")),
    "exception, of a download": lambda: raise_from(ValueError("no file"), TimeoutError()),
    "exception, of a disk": lambda: raise_from(OSError("no file"), OSError(errno.EIO, "failed")),
    "mismatched collectives": lambda: raise_(RuntimeError("gloo/transport: collective mismatch")),
    "lost contact": lambda: raise_(DistStoreError("Connection was likely closed.")),
    "not finite": lambda: raise_(NotFiniteError("skipped", skipped_from=3, skipped_to=5)),
}
ERRNO = {
    "full disk": "ENOSPC",
    "too many open files": "EMFILE",
    "loader worker, no socket": "ENOENT",
}


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_failure_is_written_and_read_back(tmp_path, monkeypatch, kind, has_stepped):
    cause, _, _ = kind.partition(",")
    run = Run(make_config(tmp_path), rank=0)
    run.begin()
    run.hosts = ["here", "here"]
    step = 7 if has_stepped else 0
    run.step, run.progress_time = step, 123.5
    monkeypatch.setattr(failures.LAUNCHER, "stop_signal", "SIGTERM")
    with pytest.raises((Exception, KeyboardInterrupt)), failures_recorded(run):
        KINDS[kind]()
    (failure,) = run_files.read_errors(run.folder, run.token)
    assert (failure.rank, failure.step, failure.launch) == (0, step, run.token)
    assert (failure.progress_time, failure.cause, failure.signal) == (123.5, cause, "SIGTERM")
    if cause in ("setting", "not finite", "loader worker"):
        assert failure.at is None
    else:
        assert failure.at
        assert Path(failure.at.file) == Path(__file__)
        assert failure.at.function in ("raise_", "raise_from", "<lambda>")
    assert failure.skipped_to == (5 if cause == "not finite" else None)
    assert failure.errno == ERRNO.get(kind)
    # a typo would fail again; code that has worked for some steps may work again
    would_repeat = cause == "setting" or (kind == "exception" and not has_stepped)
    assert failure.exit_code == (2 if would_repeat else 1)
    status = run.status()
    assert (status.outcome, status.step) == ("failed", step)
    assert status.failure == replace(failure, frames=(), details="", source=None)


@pytest.mark.timeout(60)
def test_a_cycle_of_exceptions_has_an_end(tmp_path):
    first, second = ValueError("the first"), ValueError("the second")
    first.__cause__, second.__context__ = second, first
    with (
        pytest.raises(ValueError, match="the first"),
        failures_recorded(Run(make_config(tmp_path), rank=0)),
    ):
        raise first
    assert not failures.is_transient(first)
    second.__cause__ = TimeoutError()
    assert failures.is_transient(first)


def test_another_rank_that_fails_keeps_the_trackers_in_the_status(tmp_path):
    run, other = (Run(make_config(tmp_path), rank=rank) for rank in (0, 1))
    run.trackers = {"tensorboard": "runs/x"}
    other.sees(run.begin())
    other.fail(failed("exception", rank=1))
    assert run.status().failure
    assert run.status().trackers == run.trackers


def test_a_start_that_cannot_begin_the_run_leaves_its_outcome(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(make_config(tmp_path), rank=0)
    run.write_status("finished", result={"loss": 1.0})
    monkeypatch.setattr(run_folder, "keep_code", fail)
    with pytest.raises(ConfigError, match="cannot be written to"), failures_recorded(run):
        run.begin()
    assert (run.status().outcome, run.token) == ("finished", "")


def test_until_the_run_is_open_a_rank_may_wait_for_others_too(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(watchdog, "waits_for_others", lambda file: True)
    monkeypatch.setattr(watchdog, "ABORT_WAIT_SECONDS", 0.0)
    run = Run(make_config(tmp_path), rank=0)
    watchdog.Watchdog(run)._report(3.0)
    (failure,) = run_files.read_errors(run.folder, "")
    assert failure.cause == "waiting"


def test_a_package_whose_name_begins_like_the_projects_is_a_library(monkeypatch):
    folder = "/python/site-packages/my_project"
    monkeypatch.setattr(failures, "PACKAGE_FOLDER", folder)
    assert failures.library_of(f"{folder}/train.py") is None
    assert failures.library_of(f"{folder}_tools/a.py") == "my_project_tools"


def test_a_report_from_before_the_run_is_open_is_in_the_log_folder(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("LAUNCH_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("RANK", "3")
    failures.note_signal(signal.SIGUSR1.name)
    told = json.loads((tmp_path / "logs/signal_rank_00003.json").read_text())
    assert (told["rank"], told["signal"]) == (3, "SIGUSR1")
    failures.report_once(KeyError("labels"))
    (found,) = run_files.read_failures([tmp_path / "logs/rank_00003.json"])
    assert (found.rank, found.cause, found.signal) == (3, "exception", "SIGUSR1")
    failures.LAUNCHER.stop_signal = ""


def test_the_context_that_reports_an_error_is_not_among_its_frames(tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCH_LOGS", str(tmp_path))
    outcome = exits.Outcome()
    with exits.errors_reported(outcome):
        KINDS["exception"]()
    found = run_files.read_failure(tmp_path / "rank_00000.json")
    assert found
    assert "raise_" in [frame.function for frame in found.frames]
    assert not [frame for frame in found.frames if frame.file == exits.__file__]
    assert outcome.code == 2


def test_a_rank_that_went_on_after_the_others_gave_up_is_the_first_failure():
    waited = failed("waiting", rank=0, time=110.0, progress_time=100.0)
    lost = failed("lost contact", rank=1, time=111.0, progress_time=100.0)
    assert failures.first_failure([waited, lost]) is waited
    bug = failed("exception", rank=2, time=112.0)
    assert failures.first_failure([waited, lost, bug]) is bug
    later = replace(bug, rank=3, time=113.0)
    assert failures.first_failure([later, bug]) is bug, "files are read in any order"
    lost = replace(lost, time=130.0)
    assert failures.first_failure([waited, lost]) is lost


def test_of_ranks_that_skipped_steps_one_with_no_finite_loss_is_first():
    one, other = (failed("not finite", rank=n, loss_is_finite=n == 0) for n in (0, 1))
    assert failures.first_failure([one, other]) is other


def test_the_status_names_the_cause_whichever_rank_reports_first(tmp_path):
    lost = failed("lost contact", reason="it noticed", step=7, time=1.0)
    bug = failed("exception", reason="it failed", step=7, time=2.0)
    last = replace(lost, time=3.0)
    for order in ([lost, bug, last], [bug, lost, last]):
        run = Run(make_config(tmp_path, run_name=f"run_{order.index(bug)}"), rank=0)
        run.begin()
        for failure in order:
            run.fail(failure)
        noted = run.status().failure
        assert noted == bug
        for noted in (lost, bug):
            status = Status(outcome="failed", failure=noted)
            assert as_failed(run.folder, status, [lost, bug, last]).failure is bug


def test_a_failure_before_the_loop_leaves_the_step_of_the_status(tmp_path):
    early = failures.record(reason="no data", cause="exception")
    assert early.step is None
    assert as_failed(tmp_path, Status(outcome="running", step=500), [early]).step == 500


WAIT_FOR_OTHERS = (
    StepSums.wait,
    read_on_host,
    dist.all_reduce,
    DistributedDataParallel.forward,
    graph._engine_run_backward,
    streams.Event.synchronize,
)


@pytest.mark.parametrize("function", WAIT_FOR_OTHERS)
def test_a_rank_in_these_functions_waits_for_other_ranks(function):
    assert watchdog.waits_for_others(function.__code__.co_filename)
    assert not watchdog.waits_for_others(make_config.__code__.co_filename)


DAMAGE = {"rank": "0", "time": None, "frames": [{"file": 3}], "at": 7, "exit_code": True}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_error_file_is_none_and_an_unknown_field_is_passed_over(tmp_path, name):
    frames = (failures.frame_at("a.py", 3, "main"),)
    failure = failed("exception", frames=frames, at=frames[0])
    content = json.loads(json.dumps(failure.to_json()))
    path = tmp_path / "error.json"
    path.write_text(json.dumps(content | {"unknown": []}))
    assert run_files.read_failure(path) == replace(failure, source=path)
    path.write_text(json.dumps(content | {name: DAMAGE[name]}))
    assert run_files.read_failure(path) is None


@pytest.mark.parametrize("kind", [Status, run_files.RunInfo])
def test_a_field_of_another_type_has_its_default(kind):
    default = kind()
    for damage in (object(), [object()], {"a": object()}, True, "text", 1.5, None):
        content = dict.fromkeys(vars(default), damage)
        read = from_object(kind, content, is_strict=False)
        for name, value in vars(read).items():
            assert value in (damage, getattr(default, name), (damage,)), (name, damage)


@pytest.mark.parametrize("missing", ["", "timer_create"])
def test_the_last_resort_is_set_anew_even_if_no_thread_can_write_stacks(monkeypatch, missing):
    """Or its earlier setting would end a run that makes progress."""
    called: list[str] = []
    names = {"sysv_signal", "timer_create", "timer_settime", "timer_delete"} - {missing}
    libc = {name: lambda *_, name=name: called.append(name) for name in names}
    monkeypatch.setattr(watchdog, "LIBC", SimpleNamespace(abs=0, **libc))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    last_resort = watchdog.LastResort(0)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", fail)
    with pytest.raises(RuntimeError):
        last_resort.set(60.0)
    last_resort.close()
    assert called == (
        [] if missing else ["timer_create", "sysv_signal", "timer_settime", "timer_delete"]
    )


@pytest.mark.parametrize(
    ("cause", "is_memory"),
    [
        ("is killed by signal: Killed. ", True),
        ("is killed by signal: Segmentation fault. ", False),
        ("exited unexpectedly with exit code 3.", False),
    ],
)
def test_only_a_loader_worker_that_may_have_been_killed_is_said_to_lack_memory(cause, is_memory):
    """torch names the signal or the exit code in the message, or only in the cause."""
    caused = RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly")
    caused.__cause__ = RuntimeError(f"DataLoader worker (pid 5) {cause}")
    for error in (caused, caused.__cause__):
        reason = failures.exception_failure(error).reason
        assert reason.startswith("a loader worker exited")
        assert ("lack of memory" in reason) == is_memory
