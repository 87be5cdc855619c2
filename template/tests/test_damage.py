"""A damaged run folder: only checkpoints and config.yaml decide whether a run continues."""

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ragged import Ragged
from runs import change, choose, make_config, records, status, train
from world import run_world

from my_project import manifest as manifests
from my_project.checkpoint import resuming
from my_project.config import Config, ConfigError
from my_project.failures import exception_failure
from my_project.files import read_yaml
from my_project.run_files import checkpoints, read_errors
from my_project.run_folder import Run
from my_project.settings import parse

DEEP = b"[" * 100_000
KINDS = {
    "empty": b"",
    "zeros": bytes(300),
    "null": b"null\n",
    "list": b'["finished", 6]\n',
    "text": b'"finished"\n',
    "not UTF-8": b'{"outcome": "\xff", "step": 6}\n',
    "deep": DEEP + b"\n",
}


def fill_up(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Config:
    """A finished run of 6 steps with checkpoints of steps 2, 4 and 6."""
    config = make_config(
        tmp_path_factory.mktemp("runs"), steps=6, checkpoints__every_steps=2, checkpoints__keep=9
    )
    run_world(1, train, config)
    return config


@pytest.fixture
def copied(trained, tmp_path) -> Config:
    config = change(trained, runs_folder=str(tmp_path))
    shutil.copytree(trained.folder, config.folder)
    return config


def steps(config: Config) -> list[int]:
    return [record["step"] for record in records(config)]


def refuse_to_train(self, model=None, batch=None, step=0) -> None:
    raise AssertionError("this trains a step")


# ---- files that only report ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_reports_neither_stop_a_run_nor_train_it_again(copied, kind, monkeypatch):
    folder, exported = copied.folder, (copied.folder / "export/model.safetensors").read_bytes()
    for name in ("status.json", "run.json"):
        (folder / name).write_bytes(KINDS[kind])
    with monkeypatch.context() as patch:
        patch.setattr(Ragged, "loss", refuse_to_train)
        assert train(copied) == 0
    assert status(copied)["outcome"] == "finished"
    assert status(copied)["result"]["validation/accuracy"] >= 0
    assert steps(copied) == [1, 2, 3, 4, 5, 6]
    assert (folder / "export/model.safetensors").read_bytes() == exported
    assert json.loads((folder / "run.json").read_text())["run"]
    for name in ("status.json", "run.json", "metrics.jsonl"):
        (folder / name).write_bytes(KINDS[kind])
    assert train(change(copied, steps=7)) == 0
    assert steps(copied) == [7], "continues after the last step"
    assert status(copied)["outcome"] == "finished"
    if kind != "empty":
        assert (folder / "metrics.jsonl.damaged-1").read_bytes() == KINDS[kind]


NO_RECORDS = [b"[3]", b"null", b"", bytes(20), b'{"loss": 1.0}', b'{"step": "3"}', b"\xff", DEEP]


def test_damaged_lines_cost_no_other_record(copied):
    path = copied.folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    damaged = b"\n".join([*lines[:-1], *NO_RECORDS, lines[-1], b'{"step": 6, "lo'])
    path.write_bytes(damaged)
    (copied.folder / "status.json").write_bytes(DEEP)
    assert run_world(2, train, change(copied, steps=7)) == [0, 0]
    assert steps(copied) == [1, 2, 3, 4, 5, 6, 7]
    assert (copied.folder / "metrics.jsonl.damaged-1").read_bytes() == damaged


def test_damaged_error_files_name_no_rank(copied):
    now = Run(copied, rank=1)
    now.token = "abc"
    now.record_error(exception_failure(RuntimeError("it failed")))
    for kind in ("empty", "zeros", "not UTF-8"):
        name = f"20200101T000000_rank_00003_step_{len(kind):08d}.json"
        (copied.folder / "errors" / name).write_bytes(KINDS[kind])
    assert [error.rank for error in read_errors(copied.folder, "abc")] == [1]


def test_a_run_that_began_at_a_path_goes_on_with_and_without_its_status(trained, tmp_path):
    given = str(trained.folder / "checkpoints/step_00000004")
    other = change(trained, runs_folder=str(tmp_path), resume=given)
    assert train(other) == 0
    assert train(change(other, steps=7)) == 0
    (other.folder / "status.json").write_bytes(b"")
    assert train(change(other, steps=8)) == 0
    assert steps(other) == [5, 6, 7, 8]
    assert not list(other.folder.glob("checkpoints/*.old-1")), "it did not begin again there"


# ---- config.yaml ---------------------------------------------------------------------------------
SETTINGS = b"recipe: {class_path: ragged.Ragged}\nbatches: {global_batch_size: 16}\nsteps: 5\n"
TENFOLD = [b"- &a%d [%s]\n" % (n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)]
BOMB = SETTINGS + b"optim:\n  init_args:\n    x:\n    - &a0 [1, 2]\n    " + b"    ".join(TENFOLD)
CONFIGS = KINDS | {
    "cut off": b"recipe:\n  class_path: rag",
    "alias of itself": SETTINGS + b"optim: &a [*a]\n",
    "aliases of aliases": BOMB,
    "nested": SETTINGS + b"optim: " + DEEP,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_damaged_config_is_one_sentence_with_a_remedy(copied, kind):
    path = copied.folder / "config.yaml"
    path.write_bytes(CONFIGS[kind])
    with pytest.raises(ConfigError) as error:
        train(copied)
    if "trained with different settings" not in str(error.value):
        assert re.search(r"config\.yaml (cannot|holds|is empty)", str(error.value))
        assert "restore the file" in str(error.value)
        assert f"--resume {checkpoints(copied.folder)[-1]}" in str(error.value)


def test_a_run_whose_config_is_missing_does_not_go_on_with_other_settings(copied):
    (copied.folder / "config.yaml").unlink()
    other = change(copied, optim=change(copied.optim, lr=copied.optim.lr / 2), steps=7)
    with pytest.raises(ConfigError, match="the settings of this run are not known"):
        train(other)
    assert steps(copied) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["aliases of aliases", "nested"])
def test_yaml_that_would_take_all_memory_is_refused_everywhere(tmp_path, kind):
    # the message on nesting depends on the version of PyYAML
    sentence = "has 90 aliases|maximum (nesting|recursion) depth|did not find expected node content"
    path = tmp_path / "config.yaml"
    path.write_bytes(CONFIGS[kind])
    for read in (lambda: read_yaml(path), lambda: parse(["--config", str(path)])):
        with pytest.raises(ConfigError, match=sentence):
            read()


# ---- what a kill leaves --------------------------------------------------------------------------
def test_what_a_killed_export_or_save_has_left_is_removed_and_nothing_else(copied):
    """Else the next save of a step takes a rank's old report for that of its new file."""
    old, others = [".export.partial", ".best.partial"], [".notes.txt.17", ".config.yaml.swp"]
    for folder in (".best_00000004.partial", "checkpoints/.step_00000004_a1.0.partial",
                   "checkpoints/.step_00000002.removed"):  # fmt: skip
        old.append(f"{folder}/written.rank_00001")
    for name in old + others:
        (copied.folder / name).parent.mkdir(exist_ok=True)
        (copied.folder / name).write_text("half")
    now = Run(copied, rank=0)
    now.begin()
    assert choose(now)
    assert [name for name in old + others if (copied.folder / name).exists()] == others


def test_a_linked_checkpoint_is_rotated_by_its_link_alone(copied, tmp_path):
    linked = copied.folder / "checkpoints/step_00000002"
    elsewhere = linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(elsewhere)
    resuming.remove(linked)
    assert sorted(os.listdir(linked.parent)) == ["step_00000004", "step_00000006"]
    assert manifests.find_damage(elsewhere) == "", "the run does not own the link's target"


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def make_link(path: Path) -> None:
    make_folder(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


MAKES: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("mine"),
    "folder": make_folder,
    "link": make_link,
    "broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", MAKES)
def test_a_folder_is_replaced_whatever_is_in_its_place(tmp_path, kind):
    MAKES[kind](tmp_path / "export")
    (tmp_path / ".export.partial").mkdir()
    (tmp_path / ".export.partial/new").touch()
    manifests.put_in_place(tmp_path / ".export.partial", tmp_path / "export")
    left = {"export", *(["elsewhere"] if kind == "link" else [])}
    left |= {"export.old-1"} if kind != "folder" else set()
    assert os.listdir(tmp_path / "export") == ["new"]
    assert set(os.listdir(tmp_path)) == left
    if kind == "link":
        assert (tmp_path / "elsewhere/mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    def fail(old: Path, new: Path) -> None:
        if old.suffix == ".partial":
            raise OSError(errno.EIO, "Input/output error")
        replace(old, new)

    replace = os.replace
    monkeypatch.setattr(os, "replace", fail)
    for name in ("export", ".export.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "export/mine.txt").touch()
    with pytest.raises(OSError, match="Input/output"):
        manifests.put_in_place(tmp_path / ".export.partial", tmp_path / "export")
    assert os.listdir(tmp_path / "export") == ["mine.txt"]


# ---- a folder that cannot be written to ----------------------------------------------------------
@pytest.mark.parametrize("where", ["{}/file/runs", "/proc/nowhere/runs", "/dev/full"])
def test_a_runs_folder_that_cannot_be_is_one_sentence(tmp_path, monkeypatch, where):
    monkeypatch.setattr("my_project.train.start_accelerator", refuse_to_train)
    (tmp_path / "file").write_text("mine")
    config = make_config(tmp_path, runs_folder=where.format(tmp_path))
    for start in (lambda: train(config), lambda: Run(config, rank=0)):
        with pytest.raises(ConfigError, match=r"cannot be written to \(.*another --runs_folder"):
            start()


@contextmanager
def small_disk(folder: Path, options: str = "size=512k") -> Iterator[None]:
    """Mount a small file system at a folder."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("options", ["size=512k", "ro"])
def test_a_full_or_read_only_disk_is_one_sentence(tmp_path, options):
    with small_disk(tmp_path, options):
        if options != "ro":
            fill_up(tmp_path / "filler")
        with pytest.raises(ConfigError, match=r"cannot be written to \(.*(space|Read-only)"):
            train(make_config(tmp_path))
