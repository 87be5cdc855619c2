"""The profiler: what it writes, and that it changes and ends no run."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from my_project.config import ProfileConfig
from ragged import Ragged
from runs import assert_same_weights, change, make_config, train
from world import run_world


def steps_in(path: Path) -> list[str]:
    """Return the ranges of steps in a trace; read as Perfetto and chrome://tracing do."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ranges = [e for e in events if e.get("ph") == "X" and e["name"].startswith("ProfilerStep#")]
    assert all(e["ts"] + e["dur"] <= then["ts"] for e, then in pairwise(ranges))
    assert {"aten::addmm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in events}
    return [event["name"].removeprefix("ProfilerStep#") for event in ranges]


@pytest.mark.slow
def test_a_run_profiles_two_ranks_and_trains_as_without(tmp_path):
    settings = {"steps": 6, "evaluation__every_steps": 4, "run_name": "plain"}
    plain = make_config(tmp_path, **settings)
    profiled = change(plain, run_name="profiled", profile__steps="3:5", profile__ranks=[0, 1])
    for config in (plain, profiled):
        assert run_world(2, train, config) == [0, 0]
    assert not (plain.folder / "profile").exists()
    names = sorted(path.name for path in (profiled.folder / "profile").iterdir())
    assert names == [
        f"rank_0000{rank}_steps_3_5.{ending}" for rank in (0, 1) for ending in ("json.gz", "txt")
    ]
    for rank in (0, 1):
        path = profiled.folder / f"profile/rank_0000{rank}_steps_3_5.json.gz"
        assert steps_in(path) == ["3", "4", "5"]
    assert_same_weights(profiled, plain)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("3:8", "no step is profiled: profile.steps is 3:8, but this start trains 1:2"),
        ("2:8", ""),
    ],
)
def test_a_run_without_a_step_to_profile_says_so(tmp_path, caplog, steps, told):
    config = make_config(tmp_path, steps=2, profile=ProfileConfig(steps=steps))
    assert train(config) == 0
    assert told in caplog.text
    assert (config.folder / "profile").exists() == (not told)
    assert ("no step is profiled" in caplog.text) == bool(told)


def test_a_run_that_ends_before_its_steps_are_profiled_says_so(tmp_path, caplog):
    config = make_config(tmp_path, stop_after="0s", profile=ProfileConfig(steps="8:9"))
    assert train(config) == 75
    assert "no step is profiled: the run ended before step 8" in caplog.text
    assert not (config.folder / "profile").exists()


def test_a_run_that_fails_while_it_is_profiled_keeps_the_profile(tmp_path):
    recipe = Ragged(fault="raise", fault_at=4, fault_on_rank=0)
    config = make_config(tmp_path, recipe, profile=ProfileConfig(steps="3:8"))
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    names = sorted(path.name for path in (config.folder / "profile").iterdir())
    assert names == ["rank_00000_steps_3_4.json.gz", "rank_00000_steps_3_4.txt"]
