"""Storage on which an operation fails, is slow or has no effect; launches of one run at once."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import file_faults
import pytest
from documents import PROJECT
from my_project import files, run_files
from my_project.config import ConfigError
from my_project.launching.attempts import Starts, status_locked
from my_project.run_folder import Run
from runs import make_config, status

# The others are in tests/faults.py --files.
IN_ALL_TESTS = (
    "no fsync of folders", "no rename of folders", "checkpoints/ is read-only", "a rotation",
    "a save without a rename", "no results in a save", "an export without a rename",
    "checkpoints stay",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[file_faults.Runs]:
    where = PROJECT / "accelerate_configs/cpu.yaml"
    runs = file_faults.Runs(tmp_path_factory.mktemp("faults"), where)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def digest(runs) -> str:
    return file_faults.prepare(runs)


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_ALL_TESTS)
def test_no_fault_of_the_storage_costs_a_checkpoint_or_ends_without_a_word(runs, digest, case):
    assert file_faults.what_is_wrong(runs, case, digest) == ""


# ---- two launches of one run ---------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ENOLCK", "none"])
def test_without_locks_the_older_launch_ends_and_overwrites_nothing(runs, fault):
    name, words = f"two_{fault}", ("--recipe.seconds=0.1", "--steps=20")
    faults = f"lock {fault} * 0"
    older = runs.start(name, *words, faults=faults, log=f"{name}_older")
    saved = runs.path(name) / "checkpoints/step_00000002/manifest.json"
    assert files.wait_until(saved.exists, 200)
    newer = runs.start(name, *words, faults=faults, log=f"{name}_newer")
    assert (runs.end(older), runs.end(newer)) == (1, 0)
    assert "another launch has begun" in (runs.folder / f"{name}_older.log").read_text()
    left = run_files.read_status(runs.path(name))
    assert (left.outcome, left.step) == ("finished", 20)
    steps = [record["step"] for record in file_faults.intervals(runs.path(name))]
    assert steps == list(range(1, 21)), "the older one adds no records"
    assert runs.run(f"{name}_alone", *words)[0] == 0
    assert runs.digest(name) == runs.digest(f"{name}_alone")


@pytest.mark.slow
def test_of_two_launches_at_once_the_refused_one_says_nothing_of_the_other(runs):
    both = [runs.start("at_once", "--recipe.seconds=0.1", log=f"at_once_{n}") for n in range(2)]
    assert sorted(map(runs.end, both)) == [0, 1]
    assert run_files.read_status(runs.path("at_once")).outcome == "finished"


def test_a_launch_that_another_has_followed_saves_nothing(tmp_path):
    """Locks of one process do not exclude each other."""
    older, newer = (Run(make_config(tmp_path), rank=0) for _ in range(2))
    older.begin()
    newer.begin()
    older.write_status("failed", "of the older one")
    assert status(newer.config)["outcome"] == "running"
    with pytest.raises(files.TransientError, match="another launch has begun"):
        older.check_lock()
    newer.check_lock()


def test_a_file_that_another_thread_writes_too_is_replaced_whole(tmp_path, monkeypatch):
    path, flush = tmp_path / "status.json", os.fsync

    def write_too(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", flush)
        files.write_atomically(path, "the other's")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", write_too)
    files.write_atomically(path, "ours")
    assert path.read_text() == "ours"
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_launcher_takes_no_start_of_another_one_for_its_own(tmp_path):
    first, second = (Starts(folder=tmp_path, limit=3, about={"nodes": 1}) for _ in range(2))
    (tmp_path / "run.json").write_text(json.dumps({"launch": first.id}))
    assert (first.is_new, second.is_new) == (True, False)


def test_a_launcher_writes_no_status_while_another_launch_holds_the_lock(tmp_path):
    code = "import fcntl; file = open('.lock', 'a'); fcntl.lockf(file, 2); print(); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(BlockingIOError), status_locked(tmp_path):
            raise AssertionError("another one has it")
        other.communicate(b"\n")
    with status_locked(tmp_path):
        pass


# ---- folders for temporary files, shared memory --------------------------------------------------
@pytest.mark.parametrize("has_workers", [True, False])
def test_a_long_tmpdir_is_refused_where_there_are_loader_workers(monkeypatch, has_workers):
    longest = "/" + "x" * (files.SOCKET_BYTES - len(files.SOCKET) - 1)
    monkeypatch.setattr(tempfile, "tempdir", longest)
    files.check_temporary_folder(has_workers=has_workers)
    monkeypatch.setattr(tempfile, "tempdir", longest + "x")
    if has_workers:
        with pytest.raises(ConfigError, match=f"{len(longest) + 1} bytes .* {len(longest)}"):
            files.check_temporary_folder(has_workers=True)
    else:
        files.check_temporary_folder(has_workers=False)


@pytest.mark.slow
def test_without_a_folder_for_sockets_a_run_with_workers_is_refused(runs, tmp_path):
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    more = {"TMPDIR": str(folder)}
    code, shown = runs.run("long", "--batches.workers=1", **more)
    assert code == 2, shown
    assert f"{len(str(folder))} bytes" in shown
    assert runs.run("long", **more)[0] == 0, "without workers there are no sockets"


IN_NAMESPACE = ["unshare", "--mount", "bash", "-c"]
HAS_NAMESPACES = not subprocess.run(
    [*IN_NAMESPACE, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False
).returncode
FULL = """
import multiprocessing
from my_project.failures import exception_cause
try:
    [multiprocessing.Queue() for _ in range(9)]
except OSError as error:
    print(exception_cause(error))
"""


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, to mount")
def test_a_full_dev_shm_is_a_cause_of_its_own():
    mounted = 'mount -t tmpfs -o size=8k tmpfs /dev/shm; exec "$0" -c "$1"'
    command = [*IN_NAMESPACE, mounted, sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "full shared memory"


@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, to mount")
def test_without_a_folder_for_temporary_files_a_launch_is_one_sentence():
    """The current folder is the last one that Python tries."""
    mounted = "for one in /tmp /var/tmp /usr/tmp; do mount --bind -o ro $one $one; done; cd /proc; "
    command = [*IN_NAMESPACE, f'{mounted} exec "$0" -m my_project.launch', sys.executable]
    environment = {
        name: text for name, text in os.environ.items() if name not in ("TMPDIR", "TMP", "TEMP")
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: there is no folder for temporary files")


def test_a_save_is_tried_in_each_file_system_of_a_run(tmp_path):
    """A link to nothing, and a file, in the place of checkpoints/."""
    run = Run(make_config(tmp_path), rank=0)
    path = run.folder / "checkpoints"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be written to"):
        run.begin()
    path.unlink()
    path.touch()
    with pytest.raises(ConfigError, match="no save would work"):
        run.begin()
    assert path.is_file()
    path.unlink()
    run.begin()
    assert not [one for one in Path(run.folder).iterdir() if one.name.startswith(".step")]
