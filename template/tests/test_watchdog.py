"""A run without progress ends itself. Delete this file together with watchdog.py (AGENTS.md)."""

import time

import pytest
import ragged
from ragged import Ragged
from runs import make_config, train
from test_stopping import HERE, errors, fails, root_cause, with_fault
from world import run_world


@pytest.mark.slow
@pytest.mark.parametrize(("step", "limit"), [(3, 2), (0, 4)])
def test_a_hang_ends_the_run_and_every_process_says_where_it_is(tmp_path, step, limit):
    config = with_fault(tmp_path, "hang", step, distributed__startup_timeout_seconds=4)
    started = time.monotonic()
    fails(config)
    assert time.monotonic() - started < 300, "long before gloo's own timeout"
    reports = errors(config)
    assert reports.keys() == {0, 1}
    for rank, text in reports.items():
        assert text.startswith(f"rank {rank} on {HERE}, step {step}\n")
        assert f"no progress for {limit} s" in text
    assert "in strike" in reports[1], "rank 1 hangs"
    assert "in strike" not in reports[0]
    places = ("sums.wait()", "in backward", "in check_sums")  # where rank 0 waits for rank 1
    assert any(place in reports[0] for place in places)
    failed = root_cause(config)
    assert failed.at
    assert (failed.rank, failed.cause, failed.at.function) == (1, "stalled", "strike")
    assert failed.idle_seconds >= limit


class StuckExport(Ragged):
    def export(self, model, data_info, tensors, folder):
        if folder:
            ragged.strike("hang")


@pytest.mark.slow
def test_an_export_that_hangs_is_blamed_on_the_main_process(tmp_path):
    """The other ranks have nothing left to do, and a rank that exited must not be blamed."""
    limits = {"distributed__timeout_seconds": 2, "distributed__startup_timeout_seconds": 4}
    config = make_config(tmp_path, StuckExport(), steps=1, **limits)
    fails(config)
    failed = root_cause(config)
    assert failed.at
    assert (failed.rank, failed.cause, failed.at.function) == (0, "stalled", "strike")


def test_data_that_cannot_be_opened_ends_the_run_in_time(tmp_path):
    recipe = Ragged(fault="hang", fault_in="build_datasets", fault_on_rank=0)
    limits = {"distributed__timeout_seconds": 2, "distributed__startup_timeout_seconds": 2}
    config = make_config(tmp_path, recipe, **limits)
    with pytest.raises(RuntimeError, match="the process died"):
        run_world(1, train, config)
    assert "no progress for 2 s; stalled at strike (" in errors(config)[0]
