"""Streams: the same samples at the same places for any split, from any step on."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project.config import Config, ConfigError
from my_project.loading.streams import LaneReader
from ragged import Streamed
from runs import change, make_config, records, train, weights
from world import run_world

STEPS = 8


def config_of(folder, run_name, **recipe) -> Config:
    book = folder / f"book_{run_name}"
    book.mkdir(exist_ok=True)
    return make_config(
        folder, Streamed(book=str(book), noise=0.1, **recipe), run_name=run_name, steps=STEPS,
        optim__schedule="constant", optim__warmup_steps=0,
    )  # fmt: skip


def expected(config: Config) -> list[list[int]]:
    """Say which samples each step sees, by the definition: lane i feeds fixed places."""
    stream, _ = config.recipe.build_datasets({"features": 6})
    size = config.batches.global_batch_size
    steps: list[list[int]] = []
    epoch = 0
    while len(steps) < config.steps:
        lanes = [stream.indices(i, epoch) for i in range(stream.lanes)]
        each = size // stream.lanes
        for k in range(min(len(lane) // each for lane in lanes)):
            steps.append([index for lane in lanes for index in lane[k * each : (k + 1) * each]])
        epoch += 1
    return steps[: config.steps]


def book(config: Config, name: str) -> list[str]:
    return (Path(config.recipe.book) / name).read_text().splitlines()


def seen(config: Config, processes: int) -> dict[int, list[int]]:
    """Read the book: the samples of each step in the order of their places."""
    parts = {}
    for rank in range(processes):
        in_step = {}
        for line in book(config, f"seen_{rank}"):
            step, _, indices = line.partition(" ")
            j = in_step[step] = in_step.get(step, -1) + 1
            parts[int(step), j * processes + rank] = json.loads(indices)
    steps = {}
    for step, place in sorted(parts):
        steps.setdefault(step, []).extend(parts[step, place])
    return steps


def opened(config: Config, rank: int, what: str = "opened") -> list[list[int]]:
    """List (epoch, lane, start) of the lanes opened, or (epoch, lane, index) of what was read."""
    return [list(map(int, line.split())) for line in book(config, f"{what}_{rank}")]


def first_read(config: Config, rank: int, epoch: int) -> dict[int, int]:
    """Say at which index each lane was read first in an epoch."""
    first = {}
    for its_epoch, lane, index in opened(config, rank, "read"):
        if its_epoch == epoch:
            first.setdefault(lane, index)
    return first


def saved_state(config: Config, step: int) -> dict[str, Any]:
    path = config.folder / f"checkpoints/step_{step:08d}/state.json"
    return json.loads(path.read_text())


def elsewhere(config: Config, folder: Path, **recipe: Any) -> Config:
    """Write what follows into a book of its own."""
    folder.mkdir()
    recipe = dataclasses.replace(config.recipe, book=str(folder), **recipe)
    return dataclasses.replace(config, recipe=recipe)


def test_the_same_curve_for_any_split_and_any_workers(tmp_path):
    one = config_of(tmp_path, "one")
    assert train(one) == 0
    wanted = expected(one)
    assert seen(one, 1) == dict(enumerate(wanted))
    losses = [record["loss"] for record in records(one)]
    own = {1: [[*range(8)]], 2: [[0, 1, 4, 5], [2, 3, 6, 7]], 4: [[0, 1], [2, 3], [4, 5], [6, 7]]}
    for processes, workers in ((1, 2), (2, 2), (4, 0)):
        name = f"{processes}_{workers}"
        config = change(config_of(tmp_path, name, state="saved"), batches__workers=workers)
        assert run_world(processes, train, config) == [0] * processes
        assert seen(config, processes) == dict(enumerate(wanted))
        assert [record["loss"] for record in records(config)] == pytest.approx(losses, rel=1e-5)
        for rank in range(processes):
            lanes = sorted(lane for epoch, lane, _ in opened(config, rank) if epoch == 0)
            assert lanes == own[processes][rank], "each lane once, also by several workers"


@pytest.mark.parametrize("state", ["", "saved"])
def test_a_resumed_stream_goes_on_where_it_stopped_at_any_step(tmp_path, state):
    whole = config_of(tmp_path, "whole")
    assert train(whole) == 0
    theirs = weights(whole.folder / "export")
    at_an_end = []
    for stop in range(1, STEPS):
        config = change(config_of(tmp_path, f"stop_{stop}", state=state), steps=stop)
        assert train(config) == 0
        saved = saved_state(config, stop)
        position = 2 * (stop - saved["epoch_start"])  # samples of each lane in this epoch
        assert saved["lane_states"] == ([{"index": position}] * 8 if state else [])
        longer = elsewhere(change(config, steps=STEPS), tmp_path / f"more_{stop}")
        assert train(longer) == 0
        wanted = {k: samples for k, samples in seen(whole, 1).items() if k >= stop}
        assert seen(longer, 1) == wanted, f"stopped after {stop} steps"
        ours = weights(longer.folder / "export")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        first = first_read(longer, 0, saved["epoch"])
        assert set(first.values()) <= {position if state else 0}, "what was read before is not"
        starts = {start for epoch, _, start in opened(longer, 0) if epoch == saved["epoch"]}
        assert starts == {0 if state else position}
        next_epoch = first_read(longer, 0, saved["epoch"] + 1)
        assert set(next_epoch.values()) <= {0}, "the next epoch is read from its start"
        at_an_end += [stop] if len(first) < 8 else []
    assert 0 < len(at_an_end) < STEPS - 1, "stopped at the end of an epoch, and elsewhere"


@pytest.mark.slow
def test_a_resumed_stream_goes_on_with_another_number_of_processes(tmp_path):
    whole = config_of(tmp_path, "whole")
    assert train(whole) == 0
    for before, after, workers in ((4, 2, 1), (1, 2, 0)):
        config = config_of(tmp_path, f"from_{before}", state="saved")
        config = change(config, steps=5, batches__workers=workers)
        assert run_world(before, train, config) == [0] * before
        assert saved_state(config, 5)["lane_states"] == [{"index": 2}] * 8, "of all ranks"
        longer = elsewhere(change(config, steps=STEPS), tmp_path / f"to_{before}")
        assert run_world(after, train, longer) == [0] * after
        assert seen(longer, after) == {k: v for k, v in seen(whole, 1).items() if k >= 5}
        losses = [record["loss"] for record in records(whole)]
        assert [record["loss"] for record in records(longer)] == pytest.approx(losses, rel=1e-5)
        lanes = [first_read(longer, rank, epoch=2) for rank in range(after)]
        assert lanes == [dict.fromkeys(own, 2) for own in ([0, 1, 4, 5], [2, 3, 6, 7])]


@pytest.mark.parametrize(("before", "after"), [("", "saved"), ("saved", "")])
def test_a_stream_that_gains_or_loses_its_states_goes_on(tmp_path, before, after):
    whole = config_of(tmp_path, "whole")
    assert train(whole) == 0
    config = change(config_of(tmp_path, "one", state=before), steps=2)
    assert train(config) == 0
    longer = elsewhere(change(config, steps=STEPS), tmp_path / "more", state=after)
    assert train(longer) == 0
    assert seen(longer, 1) == {k: v for k, v in seen(whole, 1).items() if k >= 2}
    assert set(first_read(longer, 0, epoch=0).values()) == {0}, "passed over, as there is no state"


def test_a_run_that_begins_at_a_checkpoint_of_other_lanes_does_not_take_their_states(tmp_path):
    config = change(config_of(tmp_path, "one", state="saved"), steps=2)
    assert train(config) == 0
    other = change(
        config_of(tmp_path, "other", state="saved", lanes=4),
        resume=str(config.folder / "checkpoints/step_00000002"),
    )
    assert train(other) == 0
    assert first_read(other, 0, epoch=0) == dict.fromkeys(range(4), 0)
    wanted = {k: samples for k, samples in enumerate(expected(other)) if k >= 2}
    assert seen(other, 1) == wanted


@pytest.mark.parametrize(
    ("state", "sentence"),
    [("tensor", "must return plain JSON"), ("half", "needs both state_dict and load_state_dict")],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path, state, sentence):
    with pytest.raises(ConfigError, match=sentence):
        train(config_of(tmp_path, "one", state=state))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe": {"lanes": 5}}, "5 lanes must divide"),
        ({"recipe": {"lanes": 2}}, "2 lanes"),
        ({"steps": None, "epochs": 2.0}, "a stream has no length"),
        ({"recipe": {"samples": 20}}, "ends before its first global batch"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path, settings, sentence):
    config = config_of(tmp_path, "one", **settings.get("recipe", {}))
    config = change(config, **{k: v for k, v in settings.items() if k != "recipe"})
    with pytest.raises(ConfigError, match=sentence):
        train(config)


# ---- random numbers ------------------------------------------------------------------------------
class DrawsLate:
    """A stream of four lanes, of which one begins to draw after 7 samples."""

    lanes = 4

    def lane(self, i: int, epoch: int, start: int, seed: int) -> Iterator[tuple]:
        for position in range(start, 20):
            draws = i == 2 and position >= 7
            drawn = (random.random(), np.random.rand()) if draws else ()
            yield i, position, torch.rand(()).item(), *drawn


def test_what_a_stream_first_draws_late_is_what_seeding_each_sample_gives():
    def read(how: Any, start: int = 0) -> list[Any]:
        reader = LaneReader(DrawsLate(), [range(4)], 2, 0, 0, start, how, {})
        return [{i: samples for i, (samples, _) in part.items()} for part in reader if part]

    wanted = read(True)
    assert len(wanted) == 10
    assert read("auto") == wanted
    assert read("auto", start=8) == wanted[4:]
