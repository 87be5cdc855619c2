"""Elapsed and remaining time, and the plain lines of a log, by a clock of the test."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from my_project.records.display import Progress
from my_project.records.history import History
from my_project.records.pace import WARM_UP_STEPS, format_age, format_time, number_due


def make_run(total_steps: int = 100, evaluate_every: int | None = 50, save_every: int = 50):
    evaluation = SimpleNamespace(every_steps=evaluate_every, best_metric="validation/accuracy")
    checkpoints = SimpleNamespace(every_steps=save_every)
    config = SimpleNamespace(evaluation=evaluation, checkpoints=checkpoints)
    return SimpleNamespace(total_steps=total_steps, config=config, folder=Path("run"))


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def go(history: History, clock: Clock, first: int, last: int, seconds: float) -> None:
    """Do the steps up to the last, with a record every 10."""
    for step in range(first, last + 1):
        clock.now += seconds
        history.pace.step_ended(step)
        if step % 10 == 0:
            history.add({"kind": "interval", "step": step, "loss": 1.0})


def pause(history: History, clock: Clock, kind: str, what: str, step: int, seconds: float) -> None:
    history.pace.set_pause(what)
    clock.now += seconds
    history.add({"kind": kind, "step": step, "seconds": seconds})
    history.pace.set_pause("")


# ---- remaining time ------------------------------------------------------------------------------
def test_the_remaining_time_is_not_known_in_the_first_steps(clock):
    history = History(make_run(), clock)
    history.start(0, [])
    assert history.times == ("0:00", "- left")
    go(history, clock, 1, WARM_UP_STEPS, seconds=60)
    assert history.times == (f"{WARM_UP_STEPS}:00", "- left")
    go(history, clock, WARM_UP_STEPS + 1, WARM_UP_STEPS + 1, seconds=1)
    assert history.times[1] == f"1:{100 - WARM_UP_STEPS - 1 - 60:02} left"


def test_warm_up_and_pauses_do_not_count_as_steps_but_pauses_to_come_do(clock):
    history = History(make_run(), clock)
    history.start(0, [])
    go(history, clock, 1, WARM_UP_STEPS, seconds=100)
    go(history, clock, WARM_UP_STEPS + 1, 50, seconds=2)
    pause(history, clock, "checkpoint", "saving", 50, seconds=7)
    pause(history, clock, "evaluation", "evaluation", 50, seconds=30)
    go(history, clock, 51, 60, seconds=2)
    assert history.pace.step_seconds == 2
    assert history.pace.remaining_seconds == 40 * 2 + 7 + 30
    go(history, clock, 61, 100, seconds=2)
    assert history.pace.remaining_seconds == 7 + 30, "both are due after the last step"


def test_the_remaining_time_counts_down_in_a_step_and_in_a_pause_but_not_below_what_follows(clock):
    history = History(make_run(), clock)
    history.start(0, [])
    go(history, clock, 1, 50, seconds=2)
    pause(history, clock, "evaluation", "evaluation", 50, seconds=30)
    go(history, clock, 51, 60, seconds=2)
    clock.now += 1.5
    assert history.pace.remaining_seconds == 40 * 2 + 30 - 1.5
    clock.now += 1000
    assert history.pace.remaining_seconds == 39 * 2 + 30
    assert history.pace.waited_seconds == 1001.5, "the step under way"
    go(history, clock, 61, 100, seconds=2)
    left = history.pace.remaining_seconds
    history.pace.set_pause("evaluation")
    clock.now += 20
    assert left is not None
    assert history.pace.remaining_seconds == left - 20
    clock.now += 1000
    assert history.pace.remaining_seconds == left - 30
    assert history.pace.waited_seconds == 1020, "the evaluation under way"


def test_steps_that_become_slower_are_noticed_within_some_intervals(clock):
    history = History(make_run(100_000), clock)
    history.start(0, [])
    go(history, clock, 1, 1000, seconds=1)
    go(history, clock, 1001, 1300, seconds=3)
    assert history.pace.step_seconds == pytest.approx(3)


@pytest.mark.parametrize(
    ("every", "after", "last", "due"),
    [(50, 0, 100, 2), (50, 50, 100, 1), (30, 0, 100, 4), (None, 0, 100, 1), (None, 99, 100, 1),
     (200, 0, 100, 1), (50, 100, 100, 0), (10, 95, 103, 2)],
)  # fmt: skip
def test_what_is_due_is_counted_up_to_the_last_step_where_it_always_is(every, after, last, due):
    assert number_due(every, after, last) == due


# ---- a run that continues ------------------------------------------------------------------------
def test_a_resumed_run_knows_its_records(clock):
    history = History(make_run(), clock)
    records = [
        {"step": 10, "loss": 1.0, "samples_per_second": 5.0},  # of an older version: no kind
        {"step": 10, "validation/accuracy": 0.5},
        {"step": 10, "changed": {"tf32": [True, False]}},
        {"kind": "start", "step": 10, "elapsed_seconds": "60"},  # damaged
        {"kind": "checkpoint", "step": 50, "seconds": 7.0, "elapsed_seconds": 100.0},
        {"kind": "evaluation", "step": 50, "seconds": 30.0, "validation/accuracy": 0.7,
         "is_best": True, "elapsed_seconds": 130.0, "sample": "text", "pictures": ["a.png"]},
        {"kind": "start", "step": 50, "world_size": 2, "elapsed_seconds": 140.0, "epoch": 5.0},
    ]  # fmt: skip
    history.start(50, records)
    assert history.restarts == 2
    assert [record["step"] for record in history.evaluations] == [10, 50]
    assert history.best["validation/accuracy"] == 0.7
    assert history.times == ("2:20", "- left")
    assert history.epoch == "epoch 5.00"
    assert history.interval == {}, "throughput and loss are of this start"
    go(history, clock, 51, 60, seconds=2)
    assert history.pace.remaining_seconds == 40 * 2 + 7 + 30, "pauses as in the start before"
    assert history.epoch == "epoch 6.00"
    assert history.times[0] == "2:40"


def test_the_first_start_is_no_restart_and_the_epoch_of_a_stream_is_its_number(clock):
    history = History(make_run(), clock)
    history.start(0, [{"kind": "start", "step": 0, "epoch": 2, "elapsed_seconds": 0.0}])
    assert history.restarts == 0
    go(history, clock, 1, 5, seconds=1)
    assert history.epoch == "epoch 2"
    history.start(0, [{"kind": "start", "step": 0, "epoch": 0.0}])
    assert history.epoch == "", "how much of it a step is, is not known yet"


# ---- plain lines ---------------------------------------------------------------------------------
INTERVAL = {
    "kind": "interval",
    "step": 10,
    "epoch": 0.3,
    "elapsed_seconds": 83.0,
    "steps": 10,
    "skipped": 0,
    "skipped_steps": 0,
    "loss": 0.43,
    "learning_rate": 9.1e-3,
    "gradient_norm": 1.25,
    "samples_per_second": 3021.4,
    "data_share": 0.02,
}


def test_without_a_terminal_there_are_plain_lines_with_the_remaining_time_and_no_rich(
    monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "rich", None)  # to import it raises
    progress = Progress(make_run())
    progress.history.pace.clock = Clock()
    progress.start(0, [{"kind": "start", "step": 0, "elapsed_seconds": 0.0}])
    progress.show({"kind": "start", "step": 0, "elapsed_seconds": 0.0})
    go(progress.history, progress.history.pace.clock, 1, 9, seconds=1)
    progress.history.pace.clock.now += 1
    progress.step_ended(10)
    progress.show(INTERVAL)
    progress.pause("saving")
    progress.show({"kind": "checkpoint", "step": 50, "seconds": 0.31})
    progress.pause("")
    scores = {"validation/accuracy": 0.9581, "validation/loss": None}
    progress.show({"kind": "evaluation", "step": 50, "seconds": 2.0, "is_best": True} | scores)
    progress.show({"kind": "spike", "step": 60, "name": "loss", "value": 8.0, "median": 0.4})
    progress.show({"kind": "numerics", "step": 60, "changed": {"tf32": [True, False]}})
    progress.show(
        INTERVAL | {"step": 70, "epoch": 2.1, "loss": None, "skipped": 10, "gradient_norm": None}
    )
    progress.show({"step": 80, "loss": 0.5, "samples_per_second": 9.0})  # of an older version
    progress.show({"kind": "stop", "step": 80, "reason": "SIGTERM"})
    progress.stop()
    assert [record.message for record in caplog.records] == [
        "step 10 of 100: loss 0.4300, lr 9.1e-03, 3021 samples/s, data 2%, gradient norm 1.25,"
        " epoch 0.30, 1:23 elapsed, 1:30 left",
        "step 50 of 100: a save, for which training waited 0.31 s",
        "step 50 of 100: validation/accuracy 0.9581, validation/loss not a number,"
        " the best so far, in 2 s",
        "step 60 of 100: loss 8.0000, a spike: its median was 0.4000",
        "step 70 of 100: loss not finite, 10 of 10 steps skipped, lr 9.1e-03, 3021 samples/s,"
        " data 2%, epoch 2.10, 1:23 elapsed, 1:32 left",
        "step 80 of 100: loss 0.5000, 9 samples/s, 1:23 elapsed, 1:32 left",
    ]


@pytest.mark.parametrize(
    ("seconds", "time", "age"),
    [
        (None, "-", None),
        (-1, "0:00", "0 s"),
        (52.4, "0:52", "52 s"),
        (59.9, "1:00", "59 s"),
        (83, "1:23", "1 min"),
        (3600, "1:00:00", "1 h"),
        (43451, "12:04:11", "12 h"),
        (360000, "4 d 04 h", "4 d"),
    ],
)
def test_times_and_ages_are_short(seconds, time, age):
    assert format_time(seconds) == time
    assert seconds is None or format_age(seconds) == age


def test_a_log_has_the_text_of_the_recipe_without_what_controls_a_terminal():
    text = "def f():\n\x1b[2J    return 1\n" + "x" * 1000
    record = {"kind": "evaluation", "step": 50, "validation/loss": 0.5, "sample": text}
    lines = History(make_run(), lambda: 0.0).line(record).splitlines()
    assert lines[:3] == [
        "step 50 of 100: validation/loss 0.5000", "  def f():", "  ?[2J    return 1"
    ]  # fmt: skip
    assert len(lines[3]) < 600
