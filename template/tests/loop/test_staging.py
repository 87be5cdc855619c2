"""Data on a node's own disk: copied once, whole, and right after whatever has happened before."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Ragged
from runs import make_config, records, train
from world import run_world

from my_project.config import ConfigError
from my_project.loading import staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromFiles(Ragged):
    """Reads its samples from files, one each."""

    path: str = dataclasses.field(default="", metadata={"changes_curve": False, "staged": True})
    only: str = dataclasses.field(default="", metadata={"changes_curve": False})

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.only:
            assert self.path.startswith(self.only), self.path
        _, validation = super().build_datasets(data_info)
        return [torch.load(file) for file in sorted(Path(self.path).rglob("*.pt"))], validation


def write(folder: Path, count: int = 30) -> Path:
    for number in range(count):
        file = folder / f"part_{number % 3}" / f"{number:03}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(1000 + number))
    return folder


def content(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def staged(folder: Path, to: Path) -> Path:
    """Stage as a launch of its own would."""
    for mark in to.glob("*/.checked_*"):
        mark.unlink()
    return Path(staging.staged(FromFiles(path=str(folder)), str(to)).path)


def test_a_copy_is_equal_and_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "disk"))
    source = write(tmp_path / "data")
    recipe = staging.staged(FromFiles(path=str(source)), "$LOCAL_DISK")
    copied = Path(recipe.path)
    assert copied.is_relative_to(tmp_path / "disk")
    assert content(copied) == content(source)
    monkeypatch.setattr(staging, "_copy_file", None)
    assert staged(source, tmp_path / "disk") == copied, "nothing is copied again"


def test_a_restart_mends_what_is_missing_cut_off_changed_or_gone(tmp_path, monkeypatch):
    source, disk = write(tmp_path / "data"), tmp_path / "disk"
    copied = staged(source, disk)
    (copied / "part_0/000.bin").unlink()
    with (copied / "part_1/001.bin").open("r+b") as file:
        file.truncate(5)
    (copied / "part_2/.002.bin.partial").write_bytes(b"of a killed launch")
    (source / "part_0/003.bin").write_bytes(b"x" * 1003)  # as long as before
    (source / "part_1/004.bin").unlink()
    again, real = [], staging._copy_file
    monkeypatch.setattr(staging, "_copy_file", lambda s, t: (again.append(t.name), real(s, t)))
    assert staged(source, disk) == copied
    assert sorted(again) == ["000.bin", "001.bin", "003.bin"]
    assert content(copied) == content(source)


def test_a_copy_that_reads_back_differently_is_an_error(tmp_path, monkeypatch):
    source = write(tmp_path / "data", 1)
    real = staging.hashlib.file_digest

    def faulty(file, kind):
        return real(file, kind) if "disk" not in file.name else staging.hashlib.sha256(b"")

    monkeypatch.setattr(staging.hashlib, "file_digest", faulty)
    with pytest.raises(OSError, match="has another hash"):
        staged(source, tmp_path / "disk")
    assert not list((tmp_path / "disk").rglob("000.bin"))


def stage_and_count(source: Path, disk: Path) -> tuple[int, int]:
    """Stage in a process of a node; count how often it looked at the source, and what it copied."""
    looked, copied = [], []
    update, copy_file = staging.update, staging._copy_file
    staging.update = lambda s, t: (looked.append(s), update(s, t))
    staging._copy_file = lambda s, t: (copied.append(s), copy_file(s, t))
    staging.staged(FromFiles(path=str(source)), str(disk))
    return len(looked), len(copied)


def test_one_process_of_a_node_copies_and_the_others_wait(tmp_path):
    source = write(tmp_path / "data")
    done = run_world(3, stage_and_count, source, tmp_path / "disk")
    assert sorted(done) == [(0, 0), (0, 0), (1, 30)]


STAGE = """
import sys
from pathlib import Path
from my_project.loading import staging
print(staging.copy(Path(sys.argv[1]), Path(sys.argv[2])).joinpath("part_0/000.bin").stat().st_size)
"""


def test_a_launch_whose_pid_another_had_sees_what_has_changed(tmp_path):
    """In containers the launcher has number 1 each time."""
    source, disk = write(tmp_path / "data", 1), tmp_path / "disk"
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    command = [*unshare, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", STAGE]

    def launch() -> int:
        done = subprocess.run(
            [*command, str(source), str(disk)], capture_output=True, text=True, check=False
        )
        if done.stderr.startswith("unshare"):
            pytest.skip("needs namespaces of processes")
        return int(done.stdout)

    assert launch() == 1000
    (source / "part_0/000.bin").write_bytes(b"x" * 77)
    assert launch() == 77
    (mark,) = disk.glob("*/.checked_*")
    assert "_1_" in mark.name, "both had number 1, and only the mark of the last is left"


@pytest.mark.parametrize(
    ("to", "path", "sentence"),
    [
        ("$NO_SUCH_DISK/x", "data", r"stage_to is \$NO_SUCH_DISK/x, but that variable is not set"),
        ("disk", "nowhere", "FromFiles names no data to copy"),
    ],
)
def test_what_cannot_be_staged_is_refused(tmp_path, monkeypatch, to, path, sentence):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", 1)
    with pytest.raises(ConfigError, match=sentence):
        staging.staged(FromFiles(path=path), to)


def test_too_small_a_disk_is_refused_before_anything_is_copied(tmp_path, monkeypatch):
    source = write(tmp_path / "data")
    usage = staging.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="give stage_to a larger disk"):
        staged(source, tmp_path / "disk")
    assert not list((tmp_path / "disk").rglob("*.bin"))


def test_a_run_reads_the_copy_and_learns_the_same(tmp_path):
    samples = Ragged().build_datasets({"features": 6})[0]
    (tmp_path / "data").mkdir()
    for number in range(70):
        torch.save(samples[number], tmp_path / f"data/{number:03}.pt")
    path = str(tmp_path / "data")
    plain = make_config(tmp_path, FromFiles(path=path), run_name="plain")
    disk = str(tmp_path / "disk")
    local = make_config(tmp_path, FromFiles(path=path, only=disk), run_name="local", stage_to=disk)
    assert train(plain) == train(local) == 0
    assert [r["loss"] for r in records(plain)] == [r["loss"] for r in records(local)]
