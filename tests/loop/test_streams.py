"""Streams give each step the same samples in the same order, for any split, after any resume."""

import json
import random
import traceback
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project.config import Config, ConfigError
from my_project.loading.seeding import SampleSeeds, derive_seed, seed_rng
from my_project.loading.streams import LaneReader
from my_project.manifest import read_manifest
from runs import assert_same_weights, change, make_config, quick, records, train
from streamed import Streamed
from test_checkpoint import folder_of
from world import run_world

STEPS = 8
MICRO_BATCHES = 4  # in each step


def run_config(folder, run_name, **recipe) -> Config:
    book = folder / f"book_{run_name}"
    book.mkdir(exist_ok=True)
    return make_config(
        folder, Streamed(book=str(book), noise=0.1, **recipe), run_name=run_name, steps=STEPS,
        optim__schedule="constant", optim__warmup_steps=0,
        checks__data=False, checks__ranks=False,  # which open lanes too
    )  # fmt: skip


def expected(config: Config) -> list[list[int]]:
    """Say which samples each step sees, by the definition: lane i feeds fixed places."""
    stream, _ = config.recipe.build_datasets({"features": 6})
    each = config.batches.global_batch_size // stream.lanes
    lanes = [
        [k for epoch in range(9) for k in stream.indices(i, epoch)] for i in range(stream.lanes)
    ]
    return [
        [index for lane in lanes for index in lane[step * each : (step + 1) * each]]
        for step in range(config.steps)
    ]


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
            if (place := j * processes + rank) < MICRO_BATCHES:
                parts[int(step), place] = json.loads(indices)
            else:  # without weight
                assert json.loads(indices) == parts[int(step), rank]
    steps = {}
    for step, place in sorted(parts):
        steps.setdefault(step, []).extend(parts[step, place])
    return steps


def noted(config: Config, rank: int, what: str) -> list[list[int]]:
    """List (lane, start) of the lanes opened, or (lane, position) of what was read."""
    return [list(map(int, line.split())) for line in book(config, f"{what}_{rank}")]


def first_read(config: Config, rank: int) -> dict[int, int]:
    """Say at which position each lane was read first."""
    first = {}
    for lane, position in noted(config, rank, "read"):
        first.setdefault(lane, position)
    return first


def saved_states(config: Config, step: int) -> list[Any]:
    return read_manifest(folder_of(config, step))["state"]["stream_states"]


def goes_on(config: Config, first: Config, step: int) -> Config:
    """Let a run begin at a checkpoint of another one."""
    return change(config, resume=str(folder_of(first, step)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Config]:
    """Runs with a checkpoint of each step, by what their lanes return."""
    folder, configs = tmp_path_factory.mktemp("whole"), {}
    for state in ("", "saved"):
        config = run_config(folder, f"whole_{state}", state=state)
        configs[state] = change(config, checkpoints__every_steps=1, checkpoints__keep=STEPS)
        assert train(configs[state]) == 0
    return configs


@pytest.mark.parametrize("splits", quick(1, [[(2, 2), (3, 0)], [(1, 2), (3, 2), (4, 0)]]))
def test_the_same_curve_for_any_split_and_any_workers(tmp_path, whole, splits):
    one = whole[""]
    wanted = expected(one)
    assert seen(one, 1) == dict(enumerate(wanted))
    assert len({*wanted[0], *wanted[1], *wanted[2], *wanted[3]}) < 64, "lanes begin again, uneven"
    losses = [record["loss"] for record in records(one)]
    assert "epoch" not in records(one)[0]
    own = {1: [[*range(8)]], 2: [[0, 1, 4, 5], [2, 3, 6, 7]], 4: [[0, 1], [2, 3], [4, 5], [6, 7]]}
    own[3] = [[0, 1, 6, 7], [2, 3], [4, 5]]
    for processes, workers in splits:
        name = f"{processes}_{workers}"
        config = change(run_config(tmp_path, name, state="saved"), batches__workers=workers)
        assert run_world(processes, train, config) == [0] * processes
        assert seen(config, processes) == dict(enumerate(wanted))
        assert [record["loss"] for record in records(config)] == pytest.approx(losses, rel=1e-5)
        for rank in range(processes):
            lanes = sorted(lane for lane, _ in noted(config, rank, "opened"))
            assert lanes == own[processes][rank], "each lane once, also by several workers"


def states_of(config: Config, step: int) -> list[dict[str, int]]:
    """Say the states of all lanes before a step, by the definition."""
    stream, _ = config.recipe.build_datasets({"features": 6})
    states = []
    for i in range(stream.lanes):
        epoch, index = 0, 2 * step
        while index > (size := len(stream.indices(i, epoch))):  # a lane notices its end at the next
            epoch, index = epoch + 1, index - size
        states.append({"epoch": epoch, "index": index, "count": 2 * step})
    return states


@pytest.mark.parametrize(
    ("before", "after", "stops"),
    [
        pytest.param("", "", range(1, STEPS), marks=pytest.mark.slow),
        pytest.param("saved", "saved", [1, 2, 4, 5, 7], marks=pytest.mark.slow),
        ("saved", "saved", [3, 6]),
        ("", "saved", [2]),
        ("saved", "", [2]),
    ],
)
def test_a_resumed_stream_goes_on_where_it_stopped_at_any_step(
    tmp_path, whole, before, after, stops
):
    """Also where its lanes have gained or lost their states."""
    first = whole[before]
    has_states = before == after == "saved"
    for stop in stops:
        states = states_of(first, stop) if before else []
        assert str(saved_states(first, stop)) == str(states), "in their order"
        config = goes_on(run_config(tmp_path, f"from_{stop}", state=after), first, stop)
        assert train(config) == 0
        wanted = {k: samples for k, samples in seen(first, 1).items() if k >= stop}
        assert seen(config, 1) == wanted, f"stopped after {stop} steps"
        assert_same_weights(config, first)
        read = first_read(config, 0)
        assert read == dict.fromkeys(range(8), 2 * stop if has_states else 0), "none is read again"
        starts = {start for _, start in noted(config, 0, "opened")}
        assert starts == {0 if has_states else 2 * stop}


@pytest.mark.parametrize("workers", quick(1, [0, 2]))
def test_a_lane_that_gives_no_state_is_read_from_its_beginning(tmp_path, whole, workers):
    """In place of the position that it gave some steps before."""
    config = run_config(tmp_path, "forgets", state="forgets")
    every = {"checkpoints__every_steps": 1, "checkpoints__keep": STEPS}
    config = change(config, batches__workers=workers, **every)
    assert train(config) == 0
    states = [saved_states(config, step) for step in range(1, STEPS + 1)]
    wanted = [states_of(config, step) if step in (1, 2, 3, 6) else [] for step in range(1, 9)]
    assert str(states) == str(wanted)
    for step in (5, 6):
        resumed = goes_on(run_config(tmp_path, f"from_{step}", state="forgets"), config, step)
        assert train(change(resumed, batches__workers=workers)) == 0
        assert seen(resumed, 1) == {k: v for k, v in seen(whole[""], 1).items() if k >= step}
        assert_same_weights(resumed, config)


@pytest.mark.slow
def test_a_resumed_stream_goes_on_with_another_number_of_processes(tmp_path, whole):
    for before, after, workers in ((4, 2, 1), (1, 2, 0), (3, 2, 0)):
        config = run_config(tmp_path, f"from_{before}", state="saved")
        config = change(config, steps=5, batches__workers=workers)
        assert run_world(before, train, config) == [0] * before
        assert saved_states(config, 5) == states_of(config, 5), "of all ranks"
        longer = goes_on(run_config(tmp_path, f"to_{before}", state="saved"), config, 5)
        longer = change(longer, batches__workers=workers)
        assert run_world(after, train, longer) == [0] * after
        assert seen(longer, after) == {k: v for k, v in seen(whole[""], 1).items() if k >= 5}
        losses = [record["loss"] for record in records(whole[""])][5:]
        assert [record["loss"] for record in records(longer)] == pytest.approx(losses, rel=1e-5)
        lanes = [first_read(longer, rank) for rank in range(after)]
        assert lanes == [dict.fromkeys(own, 10) for own in ([0, 1, 4, 5], [2, 3, 6, 7])]


def test_a_checkpoint_of_other_lanes_does_not_give_a_run_their_states(tmp_path, whole):
    other = goes_on(run_config(tmp_path, "other", state="saved", lanes=4), whole["saved"], 2)
    assert train(other) == 0
    assert first_read(other, 0) == dict.fromkeys(range(4), 0)
    wanted = {k: samples for k, samples in enumerate(expected(other)) if k >= 2}
    assert seen(other, 1) == wanted


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("tensor", "Tensor is not JSON serializable"),
        ("nan", "what JSON would change"),
        ("tuple", "what JSON would change"),
        ("key", "what JSON would change"),
        ("nested", "recursion"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path, state, sentence):
    with pytest.raises((TypeError, ValueError, RecursionError), match=sentence) as raised:
        train(run_config(tmp_path, "one", state=state))
    assert raised.value.__notes__ == ["This was lane 0 of the stream."]


@pytest.mark.parametrize("workers", quick(1, [0, 1]))
def test_an_error_in_a_lane_names_it(tmp_path, workers):
    with pytest.raises(KeyError) as raised:
        train(change(run_config(tmp_path, "one", state="raises"), batches__workers=workers))
    shown = "".join(traceback.format_exception(raised.value))
    assert "This was lane 0 of the stream." in shown
    assert "no such shard" in shown


@pytest.mark.parametrize("workers", quick(1, [0, 2]))
def test_a_lane_that_ends_is_refused(tmp_path, workers):
    config = change(run_config(tmp_path, "one", ends=1), batches__workers=workers)
    with pytest.raises(
        ConfigError, match=r"^lane 1 of the stream \(.*\) has ended after 9 samples"
    ):
        train(config)
    assert [*seen(config, 1)] == [0, 1, 2, 3], "what the lane had was trained"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe__lanes": 5}, "5 lanes must divide"),
        ({"recipe__lanes": 2}, "2 lanes must divide .* 1 process, .*micro_batch_size can be 8, 16"),
        ({"recipe__lanes": 5}, "5 lanes must divide .* choose a different number of lanes"),
        ({"steps": None, "epochs": 2.0}, "a stream has no length"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path, settings, sentence):
    config = change(run_config(tmp_path, "one"), **settings)
    with pytest.raises(ConfigError, match=sentence) as refusal:
        train(config)
    assert refusal.value.exit_code == 2


# ---- random numbers ------------------------------------------------------------------------------
class DrawsLate:
    """A stream of four lanes, of which one begins to draw after 7 samples."""

    lanes = 4

    def lane(self, i: int, start: int, seed: int) -> Iterator[tuple]:
        for position in count(start):
            draws = i == 2 and position >= 7
            drawn = (random.random(), np.random.rand()) if draws else ()
            yield i, position, torch.rand(()).item(), *drawn


def test_each_sample_of_a_stream_is_drawn_by_its_lane_and_position():
    def read(start: int) -> list[Any]:
        reader = LaneReader(
            stream=DrawsLate(), lanes=[range(4)], per_step=2, start=start,
            seeds=SampleSeeds(0, True), states={},
        )  # fmt: skip
        parts = islice(reader, 10 - start // 2)
        return [{i: samples for i, (samples, _) in part.items()} for part in parts]

    whole = read(0)
    assert read(8) == whole[4:]
    for step, part in enumerate(whole):
        for lane, samples in part.items():
            for k, (i, position, *drawn) in enumerate(samples):
                assert (i, position) == (lane, 2 * step + k)
                seed_rng(derive_seed(0, "sample", f"0/{lane}", position))
                wanted = [torch.rand(()).item(), random.random(), np.random.rand()]
                if lane != 2 or position < 7:
                    wanted = wanted[:1]
                assert sorted(drawn) == sorted(wanted)


@pytest.mark.parametrize(
    ("seed_samples", "draws"), quick(2, [("auto", True), (False, False), (True, True)])
)
def test_a_streams_samples_are_seeded_as_batches_seed_samples_says(
    tmp_path, seed_samples, draws, monkeypatch
):
    seeded = []
    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda number: [seeded.append(number), seed(number)])
    config = change(run_config(tmp_path, "one"), batches__seed_samples=seed_samples, steps=2)
    assert train(config) == 0
    of_samples = {derive_seed(0, "sample", f"0/{lane}", 0) % 2**32 for lane in range(8)}
    assert (of_samples <= {*seeded}) == draws
