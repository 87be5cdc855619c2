"""Checkpoints survive a kill, a damaged file, a full disk; nothing in them runs code."""

import errno
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from argparse import Namespace
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from my_project import commands, ema, optim, run_files
from my_project import manifest as manifests
from my_project.checkpoint import exporting, resuming, saving, shards
from my_project.config import Config, ConfigError
from my_project.files import TransientError, wait_until
from my_project.run_files import checkpoints
from my_project.run_folder import Run, refuse_other_run
from my_project.state import TrainState
from ragged import Ragged
from runs import assert_same_weights, change, choose, make_config, records, status, train, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_damage import DEEP, fill_up, small_disk
from test_resume import open_run
from world import World, run_world


def folder_of(config: Config, step: int) -> Path:
    return config.folder / "checkpoints" / f"step_{step:08d}"


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in paths if path.name != ".lock"}


def names(config: Config) -> list[str]:
    return sorted(path.name for path in (config.folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Config:
    """A run with checkpoints of steps 4, 6, 8 and 10."""
    recipe = Ragged(dtype="float64", dropout=0.2, noise=0.1)
    config = make_config(tmp_path_factory.mktemp("runs"), recipe, optim__ema_decay=0.8)
    config = change(config, checkpoints__every_steps=2, checkpoints__keep=4)
    run_world(2, train, config)
    return config


@pytest.fixture
def copied(trained, tmp_path) -> Config:
    config = change(trained, runs_folder=str(tmp_path))
    shutil.copytree(trained.folder, config.folder)
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 9, "steps": 10}')
    return config


# ---- damage --------------------------------------------------------------------------------------
FILES = ["model.safetensors", "optimizer.safetensors", "ema.safetensors"]
EACH = runs.quick(2, ["manifest.json", *FILES])


def flip_one_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << random.Random(position).randrange(8)
    path.write_bytes(content)


def damages(path: Path):
    """Damage a file in every way, one after the other; it is whole again in the end."""
    whole = path.read_bytes()
    for kept in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        yield f"cut off after {kept} bytes"
    path.write_bytes(bytes(len(whole)))
    yield "zeroed"
    path.unlink()
    yield "removed"
    draw = random.Random(path.name)
    for position in [0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(30))]:
        path.write_bytes(whole)
        flip_one_bit(path, position)
        yield f"one bit of byte {position} flipped"
    path.write_bytes(whole)


def make_checkpoints(config: Config) -> saving.Checkpoints:
    model = config.recipe.build_model({"features": 6})
    optimizer = optim.build_optimizer(config.optim, config.recipe, model)
    saver = saving.Checkpoints(Run(config, 0), model, optimizer, None)
    saver.ema = ema.EMA(model, 0.8)
    return saver


def put_back(config: Config) -> None:
    for aside in (config.folder / "checkpoints").glob("*.old-1"):
        aside.rename(aside.with_suffix(""))


def assert_same_state(ours: saving.Checkpoints, theirs: saving.Checkpoints) -> None:
    states = [
        (c.model.state_dict(), c.optimizer.state_dict(), c.ema.averages) for c in (ours, theirs)
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("name", EACH)
def test_every_damage_is_noticed_and_the_checkpoint_before_taken(copied, name, caplog):
    newest = folder_of(copied, 10)
    assert manifests.find_damage(newest) == ""
    before, resumed = make_checkpoints(copied), make_checkpoints(copied)
    before.load(folder_of(copied, 8))
    for how in damages(newest / name):
        assert manifests.find_damage(newest), f"{name} {how}"
        chosen = choose(resumed.run)
        assert chosen == folder_of(copied, 8), how
        assert resumed.resume(chosen)["step"] == 8
        assert f"{newest} is skipped: " in caplog.text
        assert newest.with_name("step_00000010.old-1").is_dir(), "moved aside"
        assert_same_state(resumed, before)
        put_back(copied)
        caplog.clear()
    assert choose(resumed.run) == newest
    assert resumed.resume(newest)["step"] == 10
    assert not caplog.text


def test_where_every_checkpoint_is_damaged_the_run_starts_from_step_0(copied, caplog):
    for step in (4, 6, 8, 10):
        flip_one_bit(folder_of(copied, step) / "model.safetensors", 300)
    assert choose(make_checkpoints(copied).run) is None
    assert names(copied) == [f"step_{step:08d}.old-1" for step in (4, 6, 8, 10)]
    assert "training starts from step 0" in caplog.text


def test_a_path_whose_checkpoint_does_not_fit_moves_nothing_aside(copied, tmp_path):
    other = tmp_path / "other/step_00000004"
    shutil.copytree(folder_of(copied, 4), other)
    given = make_checkpoints(change(copied, resume=str(other)))
    given.model = copied.recipe.build_model({"features": 5})
    assert choose(given.run) == other
    with pytest.raises(ConfigError, match="has shape"):
        given.resume(other)
    assert folder_of(copied, 10).is_dir()


def test_an_evaluation_is_not_added_to_a_checkpoint_of_another_branch(copied, tmp_path):
    own, other = folder_of(copied, 4), tmp_path / "other/step_00000004"
    shutil.copytree(own, other)
    saver = make_checkpoints(change(copied, resume=str(other)))
    before = manifests.read_manifest(own)
    for folder, is_added in ((other, False), (own, True)):
        saver.load(folder)
        saver.add_evaluation(TrainState(step=4, evaluated_step=4, best=0.25))
        saver.wait()
        assert (manifests.read_manifest(own) != before) == is_added


def write_manifest(folder: Path, **changed: object) -> None:
    content = manifests.read_manifest(folder)
    listed = {name: sha256((folder / name).read_bytes()).hexdigest() for name in content["files"]}
    (folder / "manifest.json").write_text(
        manifests.manifest_text(content | {"files": listed} | changed)
    )


def write_text(folder: Path, content: Any) -> None:
    (folder / "manifest.json").write_text(manifests.manifest_text(content))


def rename(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_00000008"), folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (rename, "its manifest.json has step 8"),
        (lambda folder: (folder / "manifest.json").write_bytes(DEEP), "manifest.json is damaged"),
        (lambda folder: write_manifest(folder, step=None), "manifest.json is damaged"),
        (lambda folder: write_text(folder, {"format": 1, "step": 10}), "manifest.json is damaged"),
    ],
)
def test_a_checkpoint_of_another_step_is_passed_over(copied, damage, sentence, caplog):
    newest = folder_of(copied, 10)
    damage(newest)
    given = change(copied, resume=str(newest))
    with pytest.raises(ConfigError, match=sentence):
        choose(Run(given, rank=0))
    assert choose(Run(copied, rank=0)) == newest.with_name("step_00000008")
    assert f"{newest} is skipped: {sentence}." in caplog.text


def test_a_run_that_began_at_a_path_goes_back_to_it_and_to_no_other_branch(copied, tmp_path):
    other = tmp_path / "other/step_00000004"
    shutil.copytree(folder_of(copied, 4), other)
    write_manifest(folder_of(copied, 10), resumed_from=str(other))
    given = make_checkpoints(change(copied, resume=f"{other}/"))
    assert choose(given.run) == folder_of(copied, 10)
    flip_one_bit(folder_of(copied, 10) / "model.safetensors", 300)
    assert choose(given.run) == other, "not step 8, at which it did not begin"
    assert given.run.resumed_from == str(other)


def test_a_checkpoint_of_another_run_replaces_no_run(trained, copied, tmp_path):
    """A copy of the run and a run that began at the path are not other runs."""
    other = change(trained, run_name="other", runs_folder=str(tmp_path), steps=4)
    assert train(other) == 0
    given, before = folder_of(other, 4), content(copied.folder)
    with pytest.raises(ConfigError, match=r"holds a run, but no .*another --run_name"):
        train(change(copied, resume=str(given), steps=12))
    assert content(copied.folder) == before
    new = change(other, run_name="new", resume=str(given), steps=3)
    with pytest.raises(ConfigError, match="is at step 4, but the run ends at 3"):
        train(new)
    for steps in (5, 6):  # the second start finds the checkpoint of the first
        assert train(change(new, steps=steps)) == 0
    shutil.copytree(given, tmp_path / "backup/step_00000004")
    backup = tmp_path / "backup/step_00000004"
    assert train(change(other, resume=str(backup), steps=6)) == 0


def refusal(config: Config) -> str:
    try:
        refuse_other_run(config, 100)
    except ConfigError as error:
        return str(error)
    return ""


def test_only_a_run_that_surely_began_elsewhere_is_refused(copied, tmp_path):
    """What cannot be read, or is not there, is for resuming.choose to judge."""
    given = tmp_path / "other/checkpoints/step_00000004"
    shutil.copytree(folder_of(copied, 4), given)
    write_manifest(given, provenance={"run": "other"})
    begun = change(copied, resume=str(given))
    assert "but no checkpoint shows" in refusal(begun)
    assert refusal(change(copied, resume=str(tmp_path / "gone/step_00000400"))) == ""
    elsewhere = tmp_path / "elsewhere"
    (copied.folder / "checkpoints").rename(elsewhere)
    (copied.folder / "checkpoints").symlink_to(elsewhere)
    assert refusal(change(copied, resume=str(elsewhere / "step_00000004"))) == ""
    write_manifest(folder_of(copied, 8), resumed_from=str(given))
    assert refusal(begun) == ""
    for step in (4, 6, 8, 10):
        (folder_of(copied, step) / "manifest.json").write_text("{")
    assert refusal(begun) == "", "the run may have begun there"
    (copied.folder / "checkpoints").unlink()
    assert "but no checkpoint shows" in refusal(begun), "it has an export"


def test_a_link_to_a_run_folder_is_the_same_run(tmp_path):
    """Also after --resume never, which moves what is in it aside, but for the lock."""
    mine = Run(make_config(tmp_path, resume="never"), rank=0)
    (tmp_path / "link").symlink_to(mine.folder)
    linked = make_config(tmp_path, run_name="link")
    for _ in range(2):
        mine.begin()
        for config in (linked, mine.config):
            with pytest.raises(RuntimeError, match="is in use by process"):
                run_world(1, open_run, config)
    assert (tmp_path / "run.old-1/run.json").is_file()
    del mine
    assert run_world(1, open_run, linked) == [None]


@pytest.mark.parametrize("done", [2, 3])
def test_a_kill_while_a_run_is_moved_aside_loses_no_record(copied, monkeypatch, done):
    """A start without checkpoints drops the records that are there, so they are moved first."""
    rename, moved = os.rename, []

    def killed(old: Path, new: Path) -> None:
        if len(moved) == done:
            raise KeyboardInterrupt
        moved.append(old.name)
        rename(old, new)

    before = (copied.folder / "metrics.jsonl").read_bytes()
    again = Run(change(copied, resume="never"), rank=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            again.begin()
    del again
    assert train(copied) == 0
    aside = copied.folder.with_name(f"{copied.run_name}.old-1")
    assert (aside / "metrics.jsonl").read_bytes() == before


def test_a_begin_that_was_killed_leaves_nothing_to_move_aside(tmp_path, monkeypatch):
    config = make_config(tmp_path, resume="never")

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, closing(Run(config, 0)) as run:
        patch.setattr(run, "write_status", kill)
        with pytest.raises(KeyboardInterrupt):
            run.begin()
    assert (config.folder / "starts").is_dir()
    with closing(Run(config, 0)) as run:
        run.begin()
    assert os.listdir(tmp_path) == [config.run_name]


def test_a_run_of_another_version_is_refused_and_left_as_it_is(copied):
    """With --resume auto and with a path; it can start over."""
    folder = folder_of(copied, 10)
    write_manifest(folder, format=manifests.FORMAT + 1)
    (copied.folder / "status.json").write_text('{"outcome": "preempted"}')

    before = content(copied.folder)
    for resume in ("auto", str(folder.with_name("step_00000004"))):
        with pytest.raises(ConfigError, match=r"another version .*--resume never"):
            train(change(copied, resume=resume))
        assert content(copied.folder) == before
    assert train(change(copied, resume="never")) == 0


def test_a_run_whose_folder_is_removed_writes_into_no_other(tmp_path):
    saver = make_checkpoints(make_config(tmp_path))
    saver.run.begin()
    saver.run.folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="moved or removed since this launch locked it"):
        saver.run.begin()
    with closing(make_checkpoints(make_config(tmp_path)).run.lock):  # that of another launch
        with pytest.raises(ConfigError, match="moved or removed since this launch locked it"):
            saver.save(TrainState(step=1))
    assert not saver.folder.exists()


def test_a_run_with_damaged_checkpoints_goes_on_from_the_one_before(copied, trained):
    flip_one_bit(folder_of(copied, 10) / "model.safetensors", 300)
    (folder_of(copied, 8) / "ema.safetensors").unlink()
    for foreign in ("step_00000012", "notes"):
        (copied.folder / "checkpoints" / foreign).mkdir()
    (copied.folder / "checkpoints" / "notes" / "mine.txt").write_text("mine")
    run_world(2, train, copied)
    assert_same_weights(copied, trained)
    assert [r["step"] for r in records(copied)] == list(range(1, 11))
    kept = names(copied)
    for aside in ("step_00000008.old-1", "step_00000010.old-1", "step_00000012.old-1", "notes"):
        assert aside in kept, "nothing of the user's is removed or overwritten"
    assert (copied.folder / "checkpoints/notes/mine.txt").read_text() == "mine"


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["MALICIOUS_FOLDER"],)


@pytest.mark.parametrize("name", EACH)
def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(copied, name, tmp_path, monkeypatch):
    """Also by whoever can write a manifest that fits."""
    monkeypatch.setenv("MALICIOUS_FOLDER", str(tmp_path / "made"))
    newest = folder_of(copied, 10)
    evil, content = pickle.dumps(Malicious()), manifests.read_manifest(newest)
    (newest / name).write_bytes(evil)
    assert manifests.find_damage(newest)
    if name != "manifest.json":
        listed = {file: sha256((newest / file).read_bytes()).hexdigest() for file in FILES}
        text = manifests.manifest_text(content | {"files": listed})
        (newest / "manifest.json").write_text(text)
        assert not manifests.find_damage(newest), "hashes alone do not help here"
    with pytest.raises(RuntimeError, match=r"ConfigError|UnicodeDecodeError"):
        run_world(1, train, change(copied, resume=str(newest), steps=12))
    assert not (tmp_path / "made").exists()
    pickle.loads(evil)
    assert (tmp_path / "made").exists(), "the pickle would have run"


# ---- what is kept --------------------------------------------------------------------------------
def test_rotation_keeps_the_newest_the_best_and_every_nth(tmp_path):
    config = make_config(
        tmp_path, steps=12, evaluation__every_steps=1,
        evaluation__best_metric="validation/accuracy", checkpoints__every_steps=1,
        checkpoints__keep=2, checkpoints__keep_every_steps=4,
    )  # fmt: skip
    foreign = folder_of(config, 3)
    foreign.mkdir(parents=True)
    (foreign / "mine.txt").write_text("mine")
    run_world(1, train, config)
    values = {r["step"]: r["validation/accuracy"] for r in records(config, "validation/accuracy")}
    best = max(values, key=lambda step: (values[step], -step))
    wanted = {best, 4, 8, 11, 12}
    assert {run_files.checkpoint_step(f) for f in checkpoints(config.folder)} == wanted
    assert best not in {4, 8, 11, 12}, "else the best one's staying shows nothing"
    assert (foreign.with_name("step_00000003.old-1") / "mine.txt").exists()


def kept_steps(config: Config) -> list[int]:
    return [run_files.checkpoint_step(folder) for folder in checkpoints(config.folder)]


def test_nothing_is_rotated_away_while_steps_are_skipped(tmp_path):
    """The weights may have become NaN; then no later step is ever taken."""
    saver = make_checkpoints(make_config(tmp_path, checkpoints__keep=1))
    for step, skipped, wanted in [(1, 0, [1]), (2, 1, [1, 2]), (3, 2, [1, 2, 3]), (4, 0, [4])]:
        state = TrainState(step=step, evaluated_step=step)
        state.consecutive_skipped_steps = skipped
        saver.save(state)
        saver.add_evaluation(state)
        saver.wait()
        assert kept_steps(saver.config) == wanted


def test_a_rotation_that_fails_is_not_a_save_that_fails(tmp_path, monkeypatch, caplog):
    saver = make_checkpoints(make_config(tmp_path, checkpoints__keep=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_to_remove(os.replace))
        for step in range(1, saving.FIRST_SAVES + 2):
            saver.save(TrainState(step=step))
        saver.wait()
    assert kept_steps(saver.config) == [1, 2, 3, 4, 5]
    assert not saver.failures
    assert f"{folder_of(saver.config, 1)} could not be removed: [Errno 5]" in caplog.text
    saver.save(TrainState(step=6))
    saver.wait()
    assert kept_steps(saver.config) == [6]


def fail_to_remove(replace):
    def act(source, target):
        if Path(target).suffix == ".removed":
            raise OSError(5, "Input/output error")
        replace(source, target)

    return act


@pytest.mark.parametrize(
    ("minutes", "every_steps", "rank", "is_due"),
    [
        ("auto", None, 0, True),
        ("auto", 100, 0, False),
        (10.0, 100, 0, True),
        (10.0, 100, 1, False),  # the clock of rank 0 decides
        (11.0, None, 0, False),
        (0.0, None, 0, False),
        (None, None, 0, False),
    ],
)
def test_the_setting_says_when_a_save_is_due(tmp_path, minutes, every_steps, rank, is_due):
    settings = {"checkpoints__every_minutes": minutes, "checkpoints__every_steps": every_steps}
    saver = make_checkpoints(make_config(tmp_path, **settings))
    saver.rank = rank
    saver._saved_at -= 601
    assert saver.is_due_by_time == is_due


@pytest.mark.slow
def test_a_run_saves_by_time_on_all_ranks_and_not_at_skipped_steps(tmp_path, trained):
    """The settings of the other run, which saves at other steps, give the same weights."""
    config = change(
        trained, runs_folder=str(tmp_path), checkpoints__every_minutes=1e-5,
        checkpoints__every_steps=5, checkpoints__keep=2,
    )  # fmt: skip
    run_world(2, train, config)
    assert_same_weights(config, trained)
    saved = [r["step"] for r in records(config, "kind") if r["kind"] == "checkpoint"]
    assert saved[:2] == [2, 4], "the vote of a step is read after the next"
    assert {5, 10} < {*saved}
    assert kept_steps(config) == [9, 10], "a save by time is one like any other"
    skipping = change(config, runs_folder=str(tmp_path / "skipping"), recipe__explode_at=(3, 4, 5))
    run_world(2, train, change(skipping, checkpoints__every_steps=None))
    saved = [r["step"] for r in records(skipping, "kind") if r["kind"] == "checkpoint"]
    assert not {4, 5, 6} & {*saved}
    assert 7 in saved


def test_rotation_leaves_what_is_not_its_own(copied):
    (folder_of(copied, 4) / "notes.txt").write_text("mine")
    resuming.remove(folder_of(copied, 4))
    resuming.remove(folder_of(copied, 6))
    assert names(copied) == ["step_00000004", "step_00000008", "step_00000010"]
    assert manifests.find_damage(folder_of(copied, 4)) == ""


# ---- the files ---------------------------------------------------------------------------------
def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 120, (2, 3, 16), generator=draw, dtype=torch.uint8)
    found = {"bool": bits % 2 == 1}
    for name in ("int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32",
                 "float64", "float8_e4m3fn", "float8_e5m2"):  # fmt: skip
        found[name] = bits.view(getattr(torch, name))
    image = torch.rand(2, 3, 5, 7, generator=draw)
    found["channels_last"] = image.to(memory_format=torch.channels_last)
    found["transposed"], found["expanded"] = image[0, 0].T, torch.tensor(3.0).expand(4)
    found["a step of 2"] = torch.arange(11, dtype=torch.int16)[::2]
    found["no dimensions"], found["no elements"] = torch.tensor(2.5), torch.empty(0, 4)
    found["first"] = found["tied"] = image
    found['ünï "quoted" \n'] = torch.arange(3)
    return found


def test_files_equal_those_of_safetensors(tmp_path):
    tensors = tensors_of_every_kind()
    paths = tmp_path / "ours", tmp_path / "theirs"
    named = {name: shards.own_shard(tensor, 0) for name, tensor in tensors.items()}
    named["part"] = shards.Shard(torch.ones(2, 3), (4, 0), (9, 3))
    saving.save_shards(named, paths[0], {"alias": "first"})
    separate = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"alias": "first", "offsets": json.dumps({"part": [[4, 0], [9, 3]]})}
    save_file(separate | {"part": torch.ones(2, 3)}, paths[1], metadata=metadata)
    ours, theirs = map(load_file, paths)
    assert ours.keys() == theirs.keys() == tensors.keys() | {"part"}
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        same = [t.contiguous().flatten().view(torch.uint8) for t in (ours[name], tensor)]
        assert torch.equal(*same), name
        assert ours[name].data_ptr() % tensor.element_size() == 0, "aligned"
    with safe_open(paths[0], "pt") as one, safe_open(paths[1], "pt") as other:
        assert one.metadata() == other.metadata()
    saving.save_shards({}, paths[0], {})
    assert load_file(paths[0]) == {}


def test_a_job_uses_one_thread_and_leaves_those_of_training_as_they_are(tmp_path):
    """A team of threads would take the cores from that of a step."""
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    saver = make_checkpoints(make_config(tmp_path))
    saver._start("checkpoint", "a job", lambda: seen.append(torch.get_num_threads()))
    saver.wait()
    assert (seen, torch.get_num_threads()) == ([1], 2)
    torch.set_num_threads(before)


@pytest.mark.parametrize("own", [False, True])
def test_an_export_of_a_value_that_is_not_finite_is_refused_by_name(tmp_path, own):
    class Own(Ragged):
        def export(self, model, data_info, tensors, folder) -> None:
            assert folder is None, "nothing is written"

    recipe = (Own if own else Ragged)(batch_norm=True)
    saver = make_checkpoints(make_config(tmp_path, recipe))
    buffers = dict(saver.model.named_buffers())
    name = next(name for name in buffers if name.endswith("running_var"))
    buffers[name].fill_(float("inf"))
    for kind in ("export", "best"):
        with pytest.raises(ValueError, match=f"^{name} holds values that are not finite"), saver:
            exporting.export(saver.run, {"features": 6}, saver.model, saver, kind)
    assert os.listdir(tmp_path / "run") == [".lock"], "nothing is left"


def poison(patch: Any, place: str, at: int) -> None:
    """Make a value NaN at the end of a step of the runs that follow."""
    build, update, steps = optim.build_optimizer, ema.EMA.update, iter(range(1, 99))
    tensors: dict[str, Any] = {}

    def build_optimizer(config: Any, recipe: Any, model: Any) -> Any:
        tensors["weight"], tensors["buffer"] = model[0].weight, model[1].running_var
        tensors["frozen"] = model[0].bias.requires_grad_(False)
        tensors["optimizer"] = build(config, recipe, model)
        return tensors["optimizer"]

    def update_and_poison(ema: Any) -> None:
        update(ema)
        if next(steps) == at:
            tensors["slot"] = tensors["optimizer"].state[tensors["weight"]]["exp_avg"]
            tensors["average"] = ema.averages[0]
            tensors[place].detach().view(-1)[0] = float("nan")

    patch.setattr(optim, "build_optimizer", build_optimizer)
    patch.setattr(ema.EMA, "update", update_and_poison)


@pytest.mark.parametrize("place", runs.quick(1, ["weight", "frozen", "buffer", "slot", "average"]))
def test_a_value_that_is_not_finite_is_in_no_checkpoint_and_no_export(tmp_path, monkeypatch, place):
    """Set at the first step, in the middle, at a skipped step, and at the last one."""
    for at in (1, 3, 4, 6):
        config = make_config(
            tmp_path, Ragged(batch_norm=True, explode_at=(3,)), run_name=f"{place}{at}", steps=6,
            optim__ema_decay=0.9, checkpoints__every_steps=1, checkpoints__keep=1,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            poison(patch, place, at)
            with pytest.raises(ValueError, match="holds values that are not finite"):
                train(config)
        assert status(config)["outcome"] == "failed"
        assert not (config.folder / "export").exists()
        saved = checkpoints(config.folder)
        assert len(saved) >= (at > 1), "the one before is kept"
        for file in config.folder.rglob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(file).values())


# ---- kills ---------------------------------------------------------------------------------------
def train_on_a_slow_disk(config: Config) -> int:
    """Make the time in which a save can be hit wide."""
    fsync = os.fsync

    def slowly(descriptor: int) -> None:
        time.sleep(0.05)
        fsync(descriptor)

    os.fsync = slowly
    return train(config)


def kill_at_random(config: Config, draw: random.Random, *, in_save: bool) -> bool:
    """Kill both processes around the begin or the end of a save; return whether one was hit."""

    def is_saving() -> bool:
        return any(config.folder.glob("checkpoints/.step_*.partial"))

    def is_reached() -> bool:
        return is_saving() if in_save else len(checkpoints(config.folder)) > before

    before = len(checkpoints(config.folder))
    world = World(2, train_on_a_slow_disk, config)
    wait_until(is_reached, 30, 0.005)
    time.sleep(draw.uniform(0, 0.3))
    world.close()
    return is_saving()


def make_long_run(folder: Path, steps: int) -> Config:
    recipe = Ragged(dtype="float64", dropout=0.2, noise=0.1)
    return make_config(
        folder, recipe, steps=steps, optim__ema_decay=0.8, checkpoints__every_steps=2,
        evaluation__every_steps=5, evaluation__best_metric="validation/auroc",
    )  # fmt: skip


@pytest.mark.slow
def test_killed_at_any_instant_the_same_command_ends_with_the_same_weights(tmp_path):
    kills, steps, draw = 10, 60, random.Random(0)
    reference = make_long_run(tmp_path / "reference", steps)
    config = make_long_run(tmp_path / "killed", steps)
    run_world(2, train, reference)
    hits = [kill_at_random(config, draw, in_save=kill % 2 == 1) for kill in range(kills)]
    assert sum(hits) >= kills // 4, "some kills must hit a save"
    assert status(config)["outcome"] == "running", "each kill hit a run that was under way"
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "killed", half)
    run_world(2, train, config)
    assert_same_weights(config, reference)
    assert [r["step"] for r in records(config)] == list(range(1, steps + 1))
    aurocs = [status(one)["result"]["validation/auroc"] for one in (config, reference)]
    assert aurocs[0] == aurocs[1]
    for processes in (1, 4):  # to float tolerance
        again = change(config, runs_folder=str(tmp_path / f"on_{processes}"))
        shutil.copytree(half, again.runs_folder)
        run_world(processes, train, again)
        assert_same_weights(again, reference, 1e-9)


# ---- trouble with the disk -----------------------------------------------------------------------
def limit_file_size(limit: int, failing: int) -> None:
    """Let one save, or all by 0, fail at the first file of more than so many bytes, as if full."""
    write = saving.save_shards
    calls = [0]

    def limited(named, path, aliases):
        calls[0] += path.name.startswith("model")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        soft = limit if failing in (0, calls[0]) else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        try:
            return write(named, path, aliases)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    saving.save_shards = limited


def train_with_file_limit(config: Config, limit: int, failing: int = 2) -> int:
    limit_file_size(limit, failing)
    return train(config)


@pytest.mark.parametrize("background", runs.quick(1, [True, False]))
def test_a_failing_save_is_reported_and_the_run_goes_on(tmp_path, background, trained):
    config = change(
        trained, runs_folder=str(tmp_path), checkpoints__background=background,
        checkpoints__keep=9,
    )  # fmt: skip
    run_world(2, train_with_file_limit, config, 200)
    assert_same_weights(config, trained)
    assert names(config) == [f"step_{k:08d}" for k in (2, 6, 8, 10)], "all but the failed one"
    for folder in checkpoints(config.folder):
        assert manifests.find_damage(folder) == ""


def train_logging_to(path: Path, config: Config) -> int:
    logging.getLogger().addHandler(logging.FileHandler(path))
    return train(config)


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_run_and_loses_nothing(tmp_path, tmp_path_factory):
    """Neither checkpoints nor records nor, when there is room again, anything else."""
    config = make_config(
        tmp_path, Ragged(seconds=0.01), steps=100_000, checkpoints__every_steps=5,
        telemetry__trackers=["tensorboard"], evaluation__every_steps=3,
        evaluation__best_metric="validation/accuracy",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with small_disk(tmp_path), closing(World(2, train_logging_to, log, config)) as world:
        assert wait_until(lambda: len(checkpoints(config.folder)) == 2, 600)
        fill_up(tmp_path / "filler")
        assert wait_until(lambda: log.read_text().count("could not be saved") >= 3, 600)
        kept = checkpoints(config.folder)
        assert kept
        assert [manifests.find_damage(folder) for folder in kept] == [""] * len(kept)
        (tmp_path / "filler").unlink()
        newest = run_files.checkpoint_step(kept[-1])
        assert wait_until(lambda: kept_steps(config)[-1] > newest + 5, 600)
        os.kill(world.workers[1].pid, signal.SIGTERM)
        assert world.results(30) == [75, 75]
        left = status(config)
        assert left["outcome"] == "preempted"
        assert [r["step"] for r in records(config)] == list(range(1, left["step"] + 1))
        assert run_files.checkpoint_step(checkpoints(config.folder)[-1]) == left["step"]
        assert weights(config.folder / "best"), "the best weights are whole too"


def train_with_late_best(config: Config, kill_in: int) -> list[bool]:
    """Write best/ late, and be killed in the second; return which were written in a thread."""
    write, in_thread = exporting.save_tensors, []

    def late(tensors, path, *arguments):
        if ".best" in str(path):
            in_thread.append(threading.current_thread() is not threading.main_thread())
            time.sleep(0.3)  # long enough for later steps, and for the manifest if it came first
            if len(in_thread) == kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
        write(tensors, path, *arguments)

    exporting.save_tensors = late
    train(config)
    return in_thread


@pytest.mark.slow
def test_best_weights_in_the_background_are_those_of_their_evaluation(tmp_path):
    """Also when a kill comes first: the next start evaluates, and writes them, again."""
    recipe = Ragged(dtype="float64", dropout=0.2, noise=0.1, seconds=0.01, batch_norm=True)
    plain = make_config(
        tmp_path, recipe, run_name="plain", steps=9, optim__ema_decay=0.5,
        evaluation__every_steps=2, evaluation__best_metric="validation/auroc",
        checkpoints__every_steps=2, checkpoints__background=False,
    )  # fmt: skip
    killed = change(plain, run_name="killed", checkpoints__background=True)
    run_world(1, train, plain)
    best_step = manifests.read_manifest(folder_of(plain, 9))["state"]["best_step"]
    assert 2 < best_step < 9, "training went on after the best"
    with pytest.raises(RuntimeError):
        run_world(1, train_with_late_best, killed, best_step // 2)
    assert status(killed)["outcome"] == "running"
    (in_thread,) = run_world(1, train_with_late_best, killed, 0)
    assert in_thread, "the newest best/ of the killed start is written by the next"
    assert all(in_thread)
    assert_same_weights(killed, plain, part="best")
    assert not list(killed.folder.glob(".best.*"))


def test_a_save_is_not_waited_for_once_another_rank_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "END_SECONDS", 0.1)
    saver = make_checkpoints(make_config(tmp_path, distributed__timeout_seconds=60))
    saver.writers, saver.run.hosts = 2, ["here", "there"]
    saver.save(TrainState(step=1))
    writing = saver._thread
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    saver.__exit__(RuntimeError, lost, None)
    assert not writing.is_alive(), "it would wait for startup_timeout_seconds"
    assert "rank_00001 did not report their shards" in str(saver.failures["checkpoint"])
    assert names(saver.config) == []


@pytest.mark.parametrize(("stop_after", "saves"), runs.quick(1, [(None, 2), ("0s", 1)]))
def test_a_run_whose_last_save_fails_has_failed_also_if_told_to_stop(tmp_path, stop_after, saves):
    """The next start goes on from the checkpoint before, if any."""
    config = make_config(tmp_path, checkpoints__every_steps=5)
    with pytest.raises(RuntimeError, match=r"could not be saved: .*File too large"):
        run_world(1, train_with_file_limit, change(config, stop_after=stop_after), 200, saves)
    assert status(config)["outcome"] == "failed"
    assert names(config) == ["step_00000005"] * (saves - 1)
    assert stop_after or weights(config.folder / "export"), "the result is there"
    assert run_world(1, train, config) == [0]
    assert names(config) == ["step_00000005", "step_00000010"]


def test_a_start_whose_first_saves_have_all_failed_ends(tmp_path):
    """Not one that has saved before, which may go on for as long as its disk is full."""
    config = make_config(tmp_path, checkpoints__every_steps=1, steps=100)
    with pytest.raises(RuntimeError, match=r"all 4 saves .*step_00000004 could not be saved"):
        run_world(1, train_with_file_limit, config, 200, 0)
    assert status(config)["outcome"] == "failed"
    assert status(config)["step"] == saving.FIRST_SAVES
    assert names(config) == []


def test_the_last_of_the_first_saves_is_tried_before_the_run_ends(tmp_path, monkeypatch):
    """An export, or an evaluation, between the failed saves does not end the run."""
    saver, tries = make_checkpoints(make_config(tmp_path)), []

    def write(*arguments: Any, **settings: Any) -> Any:
        tries.append(1)
        if len(tries) < saving.FIRST_SAVES:
            raise OSError(28, "No space left on device")
        return save_shards(*arguments, **settings)

    save_shards = saving.save_shards
    monkeypatch.setattr(saving, "save_shards", write)
    for step in range(1, saving.FIRST_SAVES + 2):
        saver.save(TrainState(step=step))
        saver.add_evaluation(TrainState(step=step, evaluated_step=step))
        saver.wait()
    assert names(saver.config) == ["step_00000004", "step_00000005"]


def train_without_room_for_best(config: Config) -> int:
    write = exporting.save_tensors

    def full(tensors, path, *arguments):
        if ".best" in str(path):
            raise OSError(28, "No space left on device")
        write(tensors, path, *arguments)

    exporting.save_tensors = full
    return train(config)


def test_a_best_that_could_not_be_written_is_written_by_the_next_start(tmp_path):
    config = make_config(tmp_path, evaluation__best_metric="validation/auroc")
    with pytest.raises(RuntimeError, match=r"best/ could not be saved: .*No space left"):
        run_world(1, train_without_room_for_best, config)
    assert status(config)["failure"]["cause"] == "full disk"
    assert not (config.folder / "best").exists()
    assert run_world(1, train, config) == [0]
    ours, theirs = weights(config.folder / "best"), weights(config.folder / "export")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_best_that_an_earlier_start_could_not_write_is_not_forgotten(tmp_path):
    config = make_config(
        tmp_path,
        evaluation__best_metric="validation/auroc",
        evaluation__best_mode="min",  # the first evaluation is the best
        evaluation__every_steps=5,
        checkpoints__every_steps=5,
    )
    with pytest.raises(RuntimeError, match=r"best/ could not be saved: .*No space left"):
        run_world(1, train_without_room_for_best, config)
    state = json.loads((folder_of(config, 10) / "manifest.json").read_text())["manifest"]["state"]
    assert (state["best_step"], state["best_failed"]) == (5, True)
    assert run_world(1, train, config) == [0]
    state = json.loads((folder_of(config, 10) / "manifest.json").read_text())["manifest"]["state"]
    assert (state["best_step"], state["best_failed"]) == (10, False), "or it is forgotten again"
    ours, theirs = weights(config.folder / "best"), weights(config.folder / "export")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_merge_writes_one_file_of_the_weights_or_of_their_average(trained, tmp_path):
    exported = weights(trained.folder / "export")
    for average in (False, True):
        path = tmp_path / f"{average}.safetensors"
        folder = str(folder_of(trained, 10))
        commands.write_one_file(Namespace(folder=folder, file=str(path), ema=average))
        model = trained.recipe.build_model({"features": 6})
        model.load_state_dict(load_file(path))
        same = all(torch.equal(v, exported[k]) for k, v in model.state_dict().items())
        assert same == average, "the export of a run with ema_decay is the average"


def test_an_optimizer_slot_keeps_its_memory_order():
    """Rounding of a product depends on it; a contiguous slot needs no stride."""
    slots = torch.zeros(3, 2), torch.zeros(3, 2).T
    packed = [shards.pack(slot, "a", {}) for slot in slots]
    assert packed == [{"tensor": "a", "stride": None}, {"tensor": "a", "stride": (1, 2)}]


def test_a_checkpoint_whose_storage_does_not_answer_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """Or a run would start over beside its intact checkpoints."""
    config = make_config(tmp_path, steps=2, checkpoints__every_steps=1)
    assert train(config) == 0
    before = [path.name for path in run_files.checkpoints(config.folder)]
    longer = change(config, steps=4)
    with monkeypatch.context() as patch:
        opened = manifests.open_own

        def fail(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == "model.safetensors":
                raise OSError(errno.EIO, "Input/output error", str(path))
            return opened(path, *arguments, **options)

        patch.setattr(manifests, "open_own", fail)
        with pytest.raises(TransientError, match=r"cannot be read now .*so it may be intact"):
            train(longer)
    assert [path.name for path in run_files.checkpoints(config.folder)] == before
    assert train(longer) == 0
    assert records(config)[-1]["step"] == 4


def test_a_launch_goes_on_if_the_storage_of_its_lock_does_not_answer_for_a_moment(
    tmp_path, monkeypatch
):
    with closing(Run(make_config(tmp_path), 0)) as run:

        def fail(*_: object) -> bool:
            raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(os.path, "samefile", fail)
        run.check_lock()


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 1), (errno.ENOSPC, 2)])
def test_a_start_is_tried_again_if_its_storage_does_not_answer(tmp_path, monkeypatch, number, code):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with closing(Run(make_config(tmp_path), 0)) as run:
        monkeypatch.setattr("my_project.files.write_atomically", fail)
        with pytest.raises(ConfigError, match="cannot be written to") as error:
            run.begin()
    assert error.value.exit_code == code


class Typed(Ragged):
    """Its model has the dtype of the start, as with FSDP2 in bf16 and without."""

    def build_model(self, data_info: Any) -> Any:
        return super().build_model(data_info).to(DTYPES[0])

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        return super().loss(model, batch | {"x": batch["x"].to(DTYPES[0])}, step)

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        super().update_metrics(model, batch | {"x": batch["x"].to(DTYPES[0])}, metrics)


DTYPES = {0: torch.float64}


def test_an_export_has_the_dtype_of_the_model_whatever_that_of_the_checkpoint(
    tmp_path, monkeypatch
):
    config = make_config(tmp_path, Typed(), steps=2, checks__code="off")
    assert train(config) == 0
    shutil.rmtree(config.folder / "export")
    (config.folder / "status.json").write_text('{"outcome": "running", "step": 2, "steps": 2}')
    monkeypatch.setitem(DTYPES, 0, torch.float32)
    assert train(config) == 0
    exported = load_file(config.folder / "export/model.safetensors")
    assert {value.dtype for value in exported.values() if value.is_floating_point()} == {
        torch.float32
    }


def test_a_relative_path_to_begin_from_is_stored_as_an_absolute_one(tmp_path, monkeypatch):
    """Or a start from another working directory would begin there again."""
    first = make_config(tmp_path, run_name="first", steps=2)
    assert train(first) == 0
    monkeypatch.chdir(first.folder)
    path = "checkpoints/step_00000002"
    second = change(first, run_name="second", steps=4, resume=path)
    assert train(second) == 0
    content = manifests.read_manifest(folder_of(second, 4))
    assert content["resumed_from"] == str(first.folder / path)


def test_a_setting_of_the_numerics_that_is_new_is_no_change(tmp_path):
    with closing(Run(make_config(tmp_path), 0)) as run:
        run.numerics = {"precision": "no"}
        run.compare_numerics(tmp_path, {})
        assert run.notes == []
