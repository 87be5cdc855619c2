"""A run that loses its machine and disk continues from its mirror, bit for bit."""

import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from ragged import QUIET, Ragged
from runs import (
    EXPORTED,
    assert_same_weights,
    change,
    make_config,
    quick,
    records,
    status,
    train,
    values,
    weights,
)
from world import World, run_world

from my_project.config import ConfigError
from my_project.files import TransientError
from my_project.manifest import find_damage, manifest_text, read_manifest
from my_project.mirror import download, store, upload
from my_project.process import PREEMPTED
from my_project.run_files import checkpoint_step, checkpoints, local_folder

STEPS = 10


# ---- an object store with faults -----------------------------------------------------------------
class FaultyStore(LocalFileSystem):
    """A store in a local folder.

    The variable FAULT is "<kind> <number of the first change> <count of changes>". The kinds "lie"
    (zeros are stored) and "wait" are for files whose names end with ABOUT.
    """

    protocol = "faulty"
    changes = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def meet_fault(self, name: str) -> bool:
        """Cause the fault, if it is due; return whether to store zeros."""
        kind, begin, count = os.environ.get("FAULT", "none 0 0").split()
        FaultyStore.changes += 1
        if not int(begin) <= FaultyStore.changes < int(begin) + int(count):
            return False
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "fail":
            raise OSError(f"the server refused the key {os.environ.get('AWS_SECRET_ACCESS_KEY')}")
        is_about = name.endswith(os.environ.get("ABOUT", ""))
        if kind == "wait" and is_about:
            released = Path(os.environ["RELEASED"])
            released.with_suffix(".reached").touch()
            while not released.exists():
                time.sleep(0.01)
        return kind == "lie" and is_about

    def pipe_file(self, path, value, **_):
        is_lie = self.meet_fault(path)
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(len(value)) if is_lie else value)

    def mv(self, path1, path2, **more):
        self.meet_fault(path2)
        super().mv(path1, path2, **more)

    def _open(self, path, mode="rb", **more):
        return Upload(self, path) if mode == "wb" else super()._open(path, mode, **more)

    def rm_file(self, path):
        self.meet_fault(path)
        super().rm_file(path)

    def cp_file(self, path1, path2, **more):
        self.meet_fault(path2)
        super().cp_file(path1, path2, **more)


class Upload:
    def __init__(self, store: FaultyStore, path: str) -> None:
        self.store, self.path, self.parts = store, path, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.pipe_file(self.path, b"".join(self.parts))

    def write(self, data: bytes) -> None:
        self.parts.append(data)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)


def mirrored(folder: Path, recipe: Ragged | None = None, **settings):
    defaults = {
        "checkpoints__every_steps": 2,
        "checkpoints__mirror": f"faulty://{folder}/mirror",
        "evaluation__every_steps": 4,
        "evaluation__best_metric": "validation/accuracy",
        "run_name": "here",
        "steps": STEPS,
    }
    return make_config(folder / "runs", recipe or Ragged(dropout=0.1), **defaults | settings)


def train_with(fault: str, config, environment: dict[str, str] | None = None) -> int:
    """Train in a process, with a fault of the store; large files are uploaded in blocks."""
    store.BLOCK_BYTES = 512
    os.environ.update({"FAULT": fault} | (environment or {}))
    return train(config)


def stopped_at(step: int, config, fault: str = "none 0 0", **environment: str) -> list[int]:
    """Train until a SIGTERM at a step."""
    recipe = Ragged(dropout=0.1, fault="preempt", fault_at=step, fault_on_rank=0)
    return run_world(1, train_with, fault, change(config, recipe=recipe), environment)


def lose_disk(config) -> None:
    shutil.rmtree(config.runs_folder)


def at_mirror(config) -> Path:
    return Path(config.checkpoints.mirror.partition("://")[2]) / config.run_name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    config = mirrored(tmp_path_factory.mktemp("whole"), checkpoints__mirror=None)
    assert run_world(1, train, config) == [0]
    return config


def assert_same_run(config, uninterrupted) -> None:
    assert status(config)["outcome"] == "finished"
    assert_same_weights(config, uninterrupted)
    assert_same_weights(config, uninterrupted, part="best")
    assert values(config, "loss") == values(uninterrupted, "loss")
    steps = [record["step"] for record in records(config)]
    assert steps == [*range(1, STEPS + 1)]


# ---- lost machines -------------------------------------------------------------------------------
def test_a_lost_disk_costs_no_step_that_was_uploaded(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    assert stopped_at(6, config) == [PREEMPTED]
    lose_disk(config)
    assert run_world(1, train_with, "none 0 0", config) == [0]
    assert status(config)["from_step"] >= 6
    assert_same_run(config, uninterrupted)
    codes = tree_of(config.folder / "starts")
    lose_disk(config)
    assert run_world(1, train_with, "none 0 0", config) == [0]  # it has finished already
    assert_same_run(config, uninterrupted)
    assert {path.name for path in (config.folder / "export").iterdir()} > EXPORTED
    assert tree_of(config.folder / "starts") == codes
    steps = [checkpoint_step(path) for path in checkpoints(at_mirror(config))]
    assert steps[-1] == STEPS
    assert len(steps) <= 3  # with that of the best evaluation


@pytest.mark.parametrize("first", quick(1, [0, 3, 5, 6]))
def test_a_kill_at_any_change_of_the_mirror_changes_no_bit(tmp_path, uninterrupted, first):
    """A kill at changes that uploads make, an eighth of them in each case; saves repeat them."""
    for at in range(1 + first, 1000, 8):
        config = mirrored(tmp_path / str(at))
        is_killed = is_finished = False
        try:
            run_world(1, train_with, f"kill {at} 1", config)
        except RuntimeError:
            is_killed = True
            assert not any(map(find_damage, checkpoints(at_mirror(config))))
            status_file = at_mirror(config) / "status.json"
            is_finished = status_file.exists() and "finished" in status_file.read_text()
            lose_disk(config)
            assert run_world(1, train_with, "none 0 0", config) == [0]
        assert_same_run(config, uninterrupted)
        files = [path for path in at_mirror(config).glob("checkpoints/*/*") if path.is_file()]
        incomplete = [path for path in files if not (path.parent / "manifest.json").exists()]
        assert incomplete == [] or is_finished, "a finished run is not uploaded again"
        shutil.rmtree(tmp_path / str(at))
        if not is_killed:
            break
    assert at > 8


def test_the_rest_of_a_killed_write_goes_with_its_checkpoint(tmp_path):
    config = mirrored(tmp_path)
    assert stopped_at(6, config) == [PREEMPTED]
    folders = checkpoints(at_mirror(config))
    for folder in folders:
        (folder / "manifest.json.partial").touch()
    (folders[0] / "manifest.json").unlink()  # so its upload was killed
    assert run_world(1, train_with, "none 0 0", config) == [0]
    left = [path for path in at_mirror(config).rglob("*.partial") if path.parent in folders]
    assert all((path.parent / "manifest.json").exists() for path in left), left
    assert not (folders[0] / "manifest.json.partial").exists()


@pytest.mark.parametrize("processes", quick(1, [2, 1]))
def test_killed_at_random_times_on_other_numbers_of_processes(tmp_path, uninterrupted, processes):
    rng = random.Random(processes)
    config = mirrored(tmp_path, Ragged(dropout=0.1, seconds=0.05))
    for count in (processes, 3 - processes, processes):
        killed_after(count, config, rng.random())
        lose_disk(config)
    assert run_world(processes, train_with, "none 0 0", config) == [0] * processes
    assert status(config)["outcome"] == "finished"
    assert_same_weights(config, uninterrupted, 1e-6)


def killed_after(processes: int, config, seconds: float) -> None:
    world = World(processes, train_with, "none 0 0", config)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (config.folder / "metrics.jsonl").exists():
        time.sleep(0.01)
    time.sleep(seconds)
    world.close()


# ---- a store that fails --------------------------------------------------------------------------
def test_uploads_that_fail_cost_no_step_and_are_repeated(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    secret = {"AWS_SECRET_ACCESS_KEY": "abcdefgh12345678"}
    assert run_world(1, train_with, "fail 8 2", config, secret) == [0]
    note = status(config)["note"]
    assert note.startswith("the mirror could not be brought up to date: faulty://")
    assert "the server refused the key ***" in note
    lose_disk(config)
    download.fetch_from_mirror(config)
    assert_same_run(config, uninterrupted)


def never_uploaded(config) -> str:
    upload.TRIES = 2
    with pytest.raises(TransientError) as error:
        train_with("fail 8 100000", config)
    return str(error.value)


def test_a_run_whose_end_never_arrived_fails_and_the_next_start_sends_it(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    (message,) = run_world(1, never_uploaded, config)
    assert message.startswith("the run has ended, but the mirror could not be brought up to date")
    assert status(config)["outcome"] == "failed"
    assert run_world(1, train_with, "none 0 0", config) == [0]
    lose_disk(config)
    download.fetch_from_mirror(config)
    assert_same_run(config, uninterrupted)


def test_a_stop_ends_in_time_without_its_upload(tmp_path, uninterrupted):
    config = mirrored(tmp_path, checkpoints__mirror_seconds=0.5)
    assert stopped_at(6, config, "wait 8 100000", RELEASED=str(tmp_path / "never")) == [PREEMPTED]
    assert checkpoint_step(checkpoints(config.folder)[-1]) > 6
    assert run_world(1, train_with, "none 0 0", config) == [0]
    assert_same_run(config, uninterrupted)


@dataclass(frozen=True, kw_only=True)
class MeetsUpload(Ragged):
    """Waits for a file in a late step."""

    file: str = field(default="", metadata=QUIET)

    def loss(self, model, batch, step):
        while step == STEPS - 3 and not Path(self.file).exists():
            time.sleep(0.01)
        return super().loss(model, batch, step)


def held_up(config, released: str) -> int:
    """Train while an upload waits until all steps are done; rotation keeps what it reads."""

    def release() -> None:
        path = config.folder / "metrics.jsonl"
        while not (path.exists() and f'"step": {STEPS}' in path.read_text()):
            time.sleep(0.01)
        kept.extend(map(checkpoint_step, checkpoints(config.folder)))
        Path(released).touch()

    kept: list[int] = []
    threading.Thread(target=release, daemon=True).start()
    about = {"RELEASED": released, "ABOUT": "model.safetensors.partial"}
    code = train_with("wait 1 100000", config, about)
    assert kept[0] < STEPS - 2, "the checkpoint that is being uploaded stays until then"
    return code


def test_training_goes_on_while_an_upload_takes_long(tmp_path, uninterrupted):
    recipe = MeetsUpload(dropout=0.1, file=str(tmp_path / "released.reached"))
    config = mirrored(tmp_path, recipe, checkpoints__keep=1, evaluation__best_metric=None)
    assert run_world(1, held_up, config, str(tmp_path / "released")) == [0]
    lose_disk(config)
    download.fetch_from_mirror(config)
    assert_same_weights(config, uninterrupted)
    assert values(config, "loss") == values(uninterrupted, "loss")


def with_leftover(config, leftover: Path) -> int:
    """Train; once a checkpoint is uploaded, the mirror has a part of an older one."""

    def leave() -> None:
        while not any(at_mirror(config).glob("checkpoints/*/manifest.json")):
            time.sleep(0.01)
        leftover.parent.mkdir()
        leftover.touch()
        Path(config.recipe.file).touch()

    threading.Thread(target=leave, daemon=True).start()
    return train_with("none 0 0", config)


def test_parts_of_a_checkpoint_that_a_save_removed_leave_the_mirror(tmp_path):
    leftover = tmp_path / "mirror/here/checkpoints/step_00000001/model.safetensors"
    config = mirrored(tmp_path, MeetsUpload(file=str(tmp_path / "is_left")))
    assert run_world(1, with_leftover, config, leftover) == [0]
    assert checkpoints(at_mirror(config))
    assert not leftover.exists()


def test_what_a_store_lies_about_is_passed_over(tmp_path, uninterrupted):
    """In the mirror the newest model has the right size, but is all zeros."""
    config = mirrored(tmp_path)
    about = "step_00000008/model.safetensors.partial"
    assert stopped_at(7, config, "lie 1 100000", ABOUT=about) == [PREEMPTED]
    before = [checkpoint_step(path) for path in checkpoints(at_mirror(config))]
    lose_disk(config)
    assert run_world(1, train_with, "none 0 0", config) == [0]
    assert before.pop() == 8
    assert status(config)["from_step"] == max(before, default=0)  # 6, where its upload kept up
    assert_same_run(config, uninterrupted)
    assert any((at_mirror(config) / "checkpoints").glob("step_00000008.old-1/*"))


def test_a_damaged_local_checkpoint_is_replaced_from_the_mirror(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    assert stopped_at(7, config) == [PREEMPTED]
    newest = checkpoints(config.folder)[-1]
    (newest / "model.safetensors").write_bytes(b"damaged")
    assert run_world(1, train_with, "none 0 0", config) == [0]
    assert status(config)["from_step"] == checkpoint_step(newest) == 8
    assert_same_run(config, uninterrupted)


def test_an_upload_whose_checkpoint_a_save_removes_removes_no_other(tmp_path, monkeypatch):
    config = mirrored(tmp_path, evaluation__best_metric=None)
    assert stopped_at(7, config) == [PREEMPTED]
    older, newest = checkpoints(config.folder)
    there = at_mirror(config) / "checkpoints"
    shutil.rmtree(there)
    shutil.copytree(older, there / older.name)

    def lose_race(*arguments):
        shutil.rmtree(newest)
        store.transfer(*arguments)

    monkeypatch.setattr(upload, "transfer", lose_race)
    token = json.loads((config.folder / "run.json").read_text())["launch"]
    config = change(config, checkpoints__keep=1)
    run = SimpleNamespace(config=config, folder=config.folder, token=token)
    upload.Mirror(SimpleNamespace(run=run))._upload_new()
    assert [path.name for path in checkpoints(at_mirror(config))] == [older.name]
    assert not newest.exists(), "the case that is tested"


def test_a_request_for_the_shards_of_other_nodes_is_repeated(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(upload, "COLLECT_SECONDS", 0)
    run = SimpleNamespace(config=mirrored(tmp_path), is_shared=False)
    mirror, temporary = upload.Mirror(SimpleNamespace(run=run)), tmp_path / "step"
    for name in ("model.rank_00001.safetensors", "written.rank_00001"):
        mirror.store.write(f"parts/step/{name}", b"")
    read = FaultyStore.get_file
    errors = [OSError(errno.ENOSPC, "No space left on device"), OSError("a time-out")]

    def get_file(*arguments, **options):
        if errors:
            raise errors.pop()
        read(*arguments, **options)

    monkeypatch.setattr(FaultyStore, "get_file", get_file)
    mirror.collect_parts(temporary)
    assert "a time-out" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        mirror.collect_parts(temporary)
    mirror.collect_parts(temporary)
    assert len([*temporary.iterdir()]) == 2
    assert mirror.store.names("parts") == []


# ---- whose mirror it is --------------------------------------------------------------------------
def superseded(config) -> str:
    def take_over() -> None:
        path = at_mirror(config) / "run.json"
        while not path.exists():
            time.sleep(0.001)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"launch": "another"}))

    threading.Thread(target=take_over, daemon=True).start()
    with pytest.raises(TransientError) as error:
        train_with("none 0 0", config)
    return str(error.value)


def test_an_older_launch_ends_once_another_has_begun_the_run(tmp_path):
    config = mirrored(tmp_path, Ragged(seconds=0.05))
    (message,) = run_world(1, superseded, config)
    assert "another launch has begun this run at faulty://" in message
    assert status(config)["outcome"] == "failed"


def test_another_run_of_the_name_is_refused_and_never_moves_it_aside(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    assert stopped_at(7, config) == [PREEMPTED]
    before = tree_of(at_mirror(config))
    lose_disk(config)
    assert run_world(1, train_with, "none 0 0", change(config, checkpoints__mirror=None)) == [0]
    with pytest.raises(ConfigError, match=r"holds run .*, but .*here holds run "):
        download.fetch_from_mirror(config)
    assert run_world(1, train_with, "none 0 0", change(config, resume="never")) == [0]
    assert_same_run(config, uninterrupted)
    assert tree_of(at_mirror(config).with_name("here.old-1")) == before
    lose_disk(config)
    download.fetch_from_mirror(config)
    assert_same_run(config, uninterrupted)


def test_never_moves_the_run_of_a_lost_disk_aside(tmp_path, uninterrupted):
    config = mirrored(tmp_path)
    assert stopped_at(7, config) == [PREEMPTED]
    before = tree_of(at_mirror(config))
    lose_disk(config)
    assert run_world(1, train_with, "none 0 0", change(config, resume="never")) == [0]
    assert [path.name for path in config.folder.parent.glob("here*")] == ["here"], "not fetched"
    assert status(config)["from_step"] == 0
    assert_same_run(config, uninterrupted)
    assert tree_of(at_mirror(config).with_name("here.old-1")) == before


def tree_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_mirror_that_cannot_be_used_is_refused_before_training(tmp_path):
    for url, message in {
        "nowhere://bucket": "mirror nowhere://bucket/here cannot be used",
        "/tmp/folder": "must be a URL such as s3",
        "s3://me:secret123@bucket": "mirror holds a secret",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            train(mirrored(tmp_path, checkpoints__mirror=url))
    with pytest.raises(ConfigError, match="takes such a URL"):
        make_config(tmp_path, runs_folder="s3://bucket/runs")
    assert not (tmp_path / "runs/here").exists() or not checkpoints(tmp_path / "runs/here")


@pytest.mark.parametrize("unlisted", ["", "checkpoints"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch, unlisted):
    """Or a new machine would begin at step 0, and move the run in the mirror aside."""
    config = mirrored(tmp_path, checkpoints__mirror=f"file://{tmp_path}/mirror", steps=4)
    assert train(config) == 0
    before = tree_of(at_mirror(config))
    lose_disk(config)
    listed = LocalFileSystem.ls

    def fail(store, path, *arguments, **options):
        if Path(store._strip_protocol(path)) == at_mirror(config) / unlisted:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return listed(store, path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "ls", fail)
        with pytest.raises(TransientError, match="Stale file handle"):
            train(config)
    assert tree_of(at_mirror(config)) == before
    assert train(config) == 0
    assert status(config)["step"] == 4


# ---- copies, names and records -------------------------------------------------------------------
def test_a_url_names_a_run_its_weights_or_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    config = mirrored(tmp_path)
    assert run_world(1, train_with, "none 0 0", config) == [0]
    url = f"{config.checkpoints.mirror}/here"
    for part in ("best", "export", "checkpoints/step_00000010"):
        copied = local_folder(f"{url}/{part}")
        assert weights(copied).keys() == weights(config.folder / part).keys()
        assert (copied / "model.safetensors").read_bytes() == (
            config.folder / part / "model.safetensors"
        ).read_bytes()
    assert (local_folder(url) / "metrics.jsonl").read_bytes() == (
        config.folder / "metrics.jsonl"
    ).read_bytes()
    assert local_folder("runs/here") == Path("runs/here")
    with pytest.raises(ConfigError, match="there is no run at"):
        local_folder(f"{url}/nothing")


def test_a_copy_follows_what_the_mirror_replaces(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    config = mirrored(tmp_path)
    assert run_world(1, train_with, "none 0 0", config) == [0]
    url, there = f"{config.checkpoints.mirror}/here", at_mirror(config)
    copied = local_folder(f"{url}/best").parent
    assert not checkpoints(copied), "best/ needs none"
    with (copied / "metrics.jsonl").open("ab") as file:
        file.truncate(1 + (1 << 28))  # larger than what read_own takes
    (there / "best/model.safetensors").write_bytes(b"other")
    hashes = {path.name: store.sha256_of(path) for path in (there / "best").iterdir()}
    (there / "best.json").write_text(json.dumps(hashes))
    assert (local_folder(f"{url}/best") / "model.safetensors").read_bytes() == b"other"
    assert (copied / "metrics.jsonl").read_bytes() == (config.folder / "metrics.jsonl").read_bytes()

    step = checkpoints(there)[-1].relative_to(there)
    local_folder(f"{url}/{step}")
    content = read_manifest(there / step)  # the step is trained again
    (there / step / "model.safetensors").write_bytes(b"other")
    content["files"]["model.safetensors"] = hashes["model.safetensors"]
    (there / step / "manifest.json").write_text(manifest_text(content))
    leftover = copied / f"checkpoints/.{step.name}_0_abc.partial"
    leftover.mkdir()
    assert (local_folder(f"{url}/{step}") / "model.safetensors").read_bytes() == b"other"
    assert [path.name for path in (copied / "checkpoints").iterdir()] == [step.name]

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FaultyStore, "get_file", fail)
    shutil.rmtree(copied)
    with pytest.raises(ConfigError, match=r"No space left.*: free disk space") as error:
        local_folder(url)
    assert not isinstance(error.value, TransientError), "another try fails too"


@pytest.mark.parametrize("part_is_lost", [False, True])
def test_parts_that_an_upload_merges_during_a_fetch_are_listed_again(tmp_path, part_is_lost):
    parts = [b'{"step": 1}\n', b'{"step": 2}\n']
    mirror = store.Store(f"file://{tmp_path}/mirror")

    def write(number: int, begin: int, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        part = store.Part(number=number, begin=begin, size=len(content), digest=digest)
        mirror.write(part.name, content)
        return part.name

    names = [write(1, 0, parts[0]), write(2, len(parts[0]), parts[1])]
    read = mirror.read

    def merge(name: str) -> bytes:
        if part_is_lost:
            raise FileNotFoundError(name)
        if (tmp_path / "mirror" / names[1]).exists():
            write(3, 0, b"".join(parts))
            mirror.remove(*names)
        return read(name)

    mirror.read = merge
    if part_is_lost:
        with pytest.raises(FileNotFoundError):
            download._fetch_metrics(mirror, tmp_path / "metrics.jsonl")
        return
    download._fetch_metrics(mirror, tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(parts)


def test_lines_that_a_full_disk_cuts_off_are_not_uploaded(tmp_path, caplog):
    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[: len(data) // 2])

    theirs = tmp_path / "mirror/evaluations.jsonl"
    theirs.parent.mkdir()
    theirs.write_text("first\nsecond\n")
    (tmp_path / "own").write_text("first\nthird\n")
    with Full(tmp_path / "own", "a+") as file:
        download.exchange_evaluations(f"file://{theirs.parent}", file)
    assert theirs.read_text() == "first\nsecond\n"
    assert (tmp_path / "own").read_text() == "first\nthird\n"
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//x", "a\\..\\x", ".", ""])
def test_no_name_in_a_mirror_leads_outside_the_run_folder(name):
    assert not store.is_safe(name)
    assert store.is_safe("checkpoints/step_00000100/model.safetensors")


def test_parts_of_the_records_are_few_and_the_newest_ones_count():
    """A file is appended to and cut by starts; some uploads are killed before they remove parts."""
    rng = random.Random(0)
    names: list[str] = []
    size = 0
    for number in range(300):
        size = max(0, size + rng.choice([1, 2, 5, -3]))
        parts = store.chain(store.parts_among(names))
        parts = [part for part in parts if part.end <= size]
        if size == (parts[-1].end if parts else 0):
            continue
        parts = store.parts_to_keep(parts, size)
        begin = parts[-1].end if parts else 0
        new = store.Part(number=number + 1, begin=begin, size=size - begin, digest=f"{number:064x}")
        names.append(new.name)
        if rng.random() < 0.5:
            kept = {part.name for part in [*parts, new]}
            names = [name for name in names if name in kept]
        chain = store.chain(store.parts_among(names))
        assert chain == [*parts, new]
        assert len(chain) <= 10
