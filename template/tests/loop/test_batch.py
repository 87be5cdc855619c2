"""The samples of a step, as the command batch lists them: those that the loop has fetched."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from ragged import Ragged, Streamed
from runs import change, make_config, train
from torch import Tensor, nn
from world import run_world

from my_project.config import Config, ConfigError, to_yaml
from my_project.records.batch import describe, print_batch

Places = dict[tuple[int, int, int], list[int]]  # samples by step, rank and micro-batch


@dataclass(frozen=True, kw_only=True)
class Booked(Ragged):
    """Write down the samples of each micro-batch that the loss is given."""

    book: str = field(default="", metadata={"changes_curve": False})

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        with open(f"{self.book}/{os.environ.get('RANK', '0')}", "a") as file:
            file.write(f"{step + 1} {batch['index'].tolist()}\n")
        return super().loss(model, batch, step)


def read_book(book: Path) -> Places:
    """Read and remove the books of all ranks, in each of which micro-batches stand in order."""
    seen: Places = {}
    for path in book.iterdir():
        for line in path.read_text().splitlines():
            step, _, indices = line.partition(" ")
            j = sum(key[:2] == (int(step), int(path.name)) for key in seen)
            seen[int(step), int(path.name), j] = json.loads(indices)
        path.unlink()
    return seen


def listed(folder: Path, steps: range, **options: Any) -> Places:
    found: Places = {}
    for step in steps:
        batch = describe(folder, step, options.get("processes"), options.get("samples"))
        for rank, micro_batches in enumerate(batch["ranks"]):
            found |= {(step, rank, j): indices for j, indices in enumerate(micro_batches)}
    return found


def write_starts(folder: Path, *starts: dict[str, Any]) -> None:
    """Write the records of the starts of a run, and one of a step."""
    records = [{"kind": "start"} | start for start in starts] + [{"step": 2, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))


def booked(folder: Path, **settings: Any) -> tuple[Config, Path]:
    book = folder / "book"
    book.mkdir()
    return make_config(folder, Booked(book=str(book)), **settings), book


def test_it_lists_what_the_loop_fetched_on_any_number_of_processes_over_two_epochs(tmp_path):
    config, book = booked(tmp_path, steps=5)
    assert run_world(2, train, config) == [0, 0]
    first = read_book(book)
    assert set(first) == {(k, r, j) for k in range(1, 6) for r in (0, 1) for j in (0, 1)}
    assert train(change(config, steps=9)) == 0  # resumed on one process
    then = read_book(book)
    assert min(then) == (6, 0, 0)
    assert listed(config.folder, range(1, 10)) == first | then
    assert describe(config.folder, 4, None, None)["epoch"] == 0
    assert describe(config.folder, 5, None, None)["epoch"] == 1, "70 // 16 = 4 steps"
    again = listed(config.folder, range(1, 2), processes=4).values()
    there = [first[1, r, j] for r in (0, 1) for j in (0, 1)]
    assert sorted(chain(*again)) == sorted(chain(*there)), "the same for any number of processes"


def test_overfitted_batches_are_listed_by_their_indices_in_the_whole_dataset(tmp_path):
    config, book = booked(tmp_path, steps=5, overfit_batches=2)
    assert train(config) == 0
    seen = read_book(book)
    assert max(max(indices) for indices in seen.values()) > 31, "else the test shows little"
    assert listed(config.folder, range(1, 6), processes=1) == seen
    assert seen[1, 0, 0] != seen[3, 0, 0], "in another order in each epoch"
    about = config.folder / "run.json"
    record = json.loads(about.read_text())
    del record["lengths"]["the whole training set"]  # as in a run of an earlier version
    about.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="does not have the length of the whole training set"):
        describe(config.folder, 1, 1, None)
    assert listed(config.folder, range(1, 6), processes=1, samples=70) == seen


# ---- streams -------------------------------------------------------------------------------------
def streamed(folder: Path, **settings: Any) -> Config:
    book = folder / "lanes"
    book.mkdir()
    return make_config(folder, Streamed(book=str(book)), steps=8, **settings)


def test_of_a_stream_it_lists_lanes_and_the_positions_in_them(tmp_path):
    config = streamed(tmp_path, checkpoints__every_steps=1, checkpoints__keep=20)
    assert run_world(2, train, config) == [0, 0]
    stream, _ = config.recipe.build_datasets({"features": 6})
    seen: Places = {}
    for rank in (0, 1):
        for line in (tmp_path / f"lanes/seen_{rank}").read_text().splitlines():
            step, _, indices = line.partition(" ")
            j = int((int(step) + 1, rank, 0) in seen)
            seen[int(step) + 1, rank, j] = json.loads(indices)
    found: Places = {}
    epochs = set()
    for step in range(1, 9):
        batch = describe(config.folder, step, 2, None)
        epochs.add(batch["epoch"])
        first, last = batch["positions"]
        for rank, micro_batches in enumerate(batch["ranks"]):
            for j, lanes in enumerate(micro_batches):
                of = [stream.indices(lane, batch["epoch"])[first : last + 1] for lane in lanes]
                found[step, rank, j] = [*chain(*of)]
    assert len(epochs) >= 3
    assert found == seen


def test_what_is_not_known_of_a_stream_is_said_in_one_sentence(tmp_path, capsys):
    config = streamed(tmp_path)  # one checkpoint, at the end
    assert train(config) == 0
    (state,) = config.folder.glob("checkpoints/step_*/state.json")
    saved = json.loads(state.read_text())
    epoch, start = saved["epoch"], saved["epoch_start"]
    assert epoch > 1
    known = describe(config.folder, start + 1, 1, None)
    assert (known["epoch"], known["positions"]) == (epoch, [0, 1])
    before = describe(config.folder, start, 1, None)
    assert before["positions"] is None
    assert before["ranks"] == known["ranks"], "the lanes are the same in each step"
    print_batch(before)
    assert (
        "the positions in the lanes are not known, since no checkpoint" in capsys.readouterr().out
    )


def test_a_record_of_an_epoch_that_may_be_a_step_late_makes_no_wrong_claim(tmp_path):
    """A record at step 3 with epoch 1: step 3 or step 4 was the first of epoch 1."""
    folder = write_run(tmp_path, lengths={"the lanes of the stream": 8})
    text = "".join(
        json.dumps({"step": step, "epoch": epoch}) + "\n" for step, epoch in ((2, 0), (3, 1))
    )
    (folder / "metrics.jsonl").write_text(text)
    found = [describe(folder, step, 1, None)["epoch"] for step in (1, 2, 3, 4)]
    assert found == [0, 0, None, None]


# ---- without a run -------------------------------------------------------------------------------
def write_run(folder: Path, lengths: dict[str, int] | None = None, **settings: Any) -> Path:
    """Write the files of a run that are read."""
    config = make_config(folder, **settings)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(to_yaml(config))
    known = {"the training set": 70} if lengths is None else lengths
    (config.folder / "run.json").write_text(json.dumps({"lengths": known}))
    write_starts(config.folder, {"step": 0, "world_size": 2})
    return config.folder


def test_the_processes_are_those_of_the_last_start_that_did_the_step(tmp_path):
    folder = write_run(tmp_path)
    starts = [(0, 1), (4, 4), (2, 2)]  # the second start was killed before it saved
    write_starts(folder, *({"step": step, "world_size": size} for step, size in starts))
    assert [describe(folder, k, None, None)["processes"] for k in (1, 2, 3, 4, 5, 10)] == (
        [1, 1, 2, 2, 2, 2]
    )
    assert describe(folder, 1, 4, None)["processes"] == 4, "unless another number is typed"
    write_starts(folder, {"step": 0, "world_size": 2, "micro_batch_size": 2})
    assert describe(folder, 1, None, None)["accumulation"] == 4, "may differ from config.yaml's"


def test_what_cannot_be_listed_is_refused_in_one_sentence(tmp_path):
    folder = write_run(tmp_path)

    def refuse(match: str, step: int = 1, processes: int | None = 1, samples: int | None = None):
        with pytest.raises(ConfigError, match=match) as raised:
            describe(folder, step, processes, samples)
        assert "\n" not in str(raised.value)

    refuse("--step is 0, but must be at least 1: steps are numbered from 1", step=0)
    refuse("--step is -4, but must be", step=-4)
    refuse("step 11 is beyond the end of the run, which has 10 steps", step=11)
    refuse("--processes is 0, but must be at least 1", processes=0)
    refuse("global_batch_size 16 does not split over 3", processes=3)
    refuse("the training set has 15 samples, fewer than one global batch of 16", samples=15)
    assert describe(folder, 1, None, 2**53), "an order of any length"
    write_starts(folder, {"step": 0, "world_size": "2"}, {"step": 5, "world_size": True})
    refuse("does not say on how many processes step 1 ran; add --processes N", processes=None)
    (folder / "run.json").write_text("damaged")
    refuse("does not have the length of the training set; add --samples N")
    (folder / "config.yaml").unlink()
    refuse("config.yaml cannot be read")
    folder = tmp_path / "elsewhere"
    refuse("elsewhere is not a run folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "1"}, "seed is '1'"),
        ({"steps": True}, "steps is 'True'"),
        ({"steps": -1}, "steps is '-1'"),
        ({"steps": 2**60}, "steps is"),
        ({"steps": None, "epochs": float("nan")}, "epochs is 'nan'"),
        ({"batches": {"global_batch_size": [16]}}, "global_batch_size is"),
        ({"batches": [16]}, "lacks batches"),
        ({"batches": {}}, "global_batch_size is 0, but must be at least 1"),
    ],
)
def test_numbers_of_a_run_folder_are_checked(tmp_path, changes, message):
    folder = write_run(tmp_path)
    settings = yaml.safe_load((folder / "config.yaml").read_text()) | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=message):
        describe(folder, 1, 1, None)


def test_the_command_runs_no_code_of_the_run_folder_and_prints_a_line_per_micro_batch(tmp_path):
    folder = write_run(tmp_path)
    (folder / "harm.py").write_text("open('harmed', 'w')")
    text = (folder / "config.yaml").read_text().replace("ragged.Ragged", "harm.Ragged")
    (folder / "config.yaml").write_text(text)
    call = [sys.executable, "-m", "my_project", "batch", ".", "--step", "5"]
    shown = subprocess.run(call, cwd=folder, capture_output=True, text=True, check=True)
    assert not (folder / "harmed").exists()
    title, layout, *lines = shown.stdout.splitlines()
    assert title == ".: step 5, epoch 1 (the first is 0)"
    assert layout == "global batch 16 = micro-batch 4 x processes 2 x accumulation 2"
    found = describe(folder, 5, None, None)["ranks"]
    assert lines == [
        f"rank {rank}, micro-batch {j}: {' '.join(map(str, found[rank][j]))}"
        for rank in (0, 1)
        for j in (0, 1)
    ]


def test_lines_are_wrapped_to_a_terminal_and_json_has_all(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path, batches__micro_batch_size=16)
    found = describe(folder, 1, 1, None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    print_batch(found)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    words = " ".join(lines).split()
    assert words[:4] == ["rank", "0,", "micro-batch", "0:"]
    assert [int(word) for word in words[4:]] == found["ranks"][0][0]
    assert json.loads(json.dumps(found)) == found
