"""The lines of a log; the bar of a terminal is in test_train_command.py."""

import logging
import os
from types import SimpleNamespace

import pytest
from my_project.records import log, screen
from my_project.records.log import format_record
from my_project.run_files import Record
from my_project.run_folder import Run
from runs import make_config


def test_a_format_record_a_log_holds_no_control_characters():
    evaluation = {"seconds": 1.0, "is_best": True}
    results = {
        "validation/accuracy": 0.8125,
        "validation/\x1b[2J": None,
        "sample": "one\ntwo\x1b[2J",
    }
    line = format_record(Record(kind="evaluation", step=4, values=evaluation | results), 8)
    assert line.startswith("step 4 of 8: validation/accuracy 0.8125, ")
    assert "\x1b" not in line


@pytest.mark.parametrize(("asked", "is_said"), [(110, True), (440, False), (900, False)])
def test_a_finished_run_of_more_steps_than_were_asked_for_is_said(tmp_path, capsys, asked, is_said):
    """More are asked for where it was stopped early."""
    run = Run(make_config(tmp_path), rank=0)
    run.step = run.total_steps = 440
    run.write_status("finished", result={})
    run.total_steps = asked
    log.log_finished(run, before=True)
    more = " 440 steps, more than the 110 that you asked for" if is_said else ""
    message = f"this run has already finished{more}, so nothing is trained; "
    assert capsys.readouterr().out.startswith(message)


def test_a_result_without_a_reason_is_said_without_one(tmp_path, capsys):
    """A full disk loses the reason."""
    log.log_finished(Run(make_config(tmp_path), rank=0))
    assert capsys.readouterr().out.startswith("finished: weights in ")


@pytest.mark.parametrize("is_under_launcher", [False, True])
def test_a_stop_is_said_once(monkeypatch, is_under_launcher):
    """The launcher says it in its summary."""
    if is_under_launcher:
        monkeypatch.setenv("LAUNCH_LOGS", "logs")
    stop = Record(kind="stop", step=4, values={"reason": "stop_after 1h has elapsed"})
    line = "step 4 of 8: saved and stopped: stop_after 1h has elapsed; "
    assert format_record(stop, 8).startswith(line) != is_under_launcher
    assert bool(format_record(stop, 8)) != is_under_launcher


@pytest.mark.parametrize(
    ("kind", "values", "part"),
    [
        ("checkpoint", {"seconds": 0.0123}, "waited 0.012 s"),
        ("checkpoint", {"seconds": 123.4}, "waited 2 min 3 s"),
        ("evaluation", {"seconds": 1234.0, "is_best": False}, "in 20 min 34 s"),
        ("interval", {"gradient_norm": 0.0}, ", gradient norm 0, "),
        ("interval", {"gradient_norm": None}, "no loss, lr nan, 0 s elapsed"),
        ("interval", {"items_per_second": 1234567.0}, ", 1,235,000 items/s, "),
        ("interval", {"items_per_second": 0.012341}, ", 0.01234 items/s, "),
        ("interval", {"skipped_steps": 1}, ", 1 step skipped, "),
        ("interval", {"skipped_steps": 30}, ", 30 steps skipped, "),
    ],
)
def test_a_line_has_numbers_as_people_write_them(kind, values, part):
    record = Record(kind=kind, step=4, values={"skipped_steps": 0} | values)
    assert part in format_record(record, 8)


@pytest.mark.parametrize("columns", [8, 20, 60, 80, 200])
def test_the_bar_leaves_out_whole_parts_that_do_not_fit(columns, monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    bar = screen.Screen(SimpleNamespace(total_steps=123456))  # type: ignore[arg-type]
    bar.is_terminal, bar.step = True, 1234
    bar.numbers = ["loss 0.4312", "52 s left", "lr 9.1e-03", "3,021 samples/s", "MFU 41.2%"]
    drawn: list[str] = []
    monkeypatch.setattr(bar, "_put", drawn.append)
    bar.pause("evaluation")
    (line,) = drawn
    shown = line.removeprefix("\r\x1b[K")
    assert len(shown) < columns
    whole = ["step 1234/123456", "[                    ] 1%", "evaluation", *bar.numbers]
    for part in whole:
        shown = shown.replace(part, "", 1)
    assert not shown.strip() or columns < 20
    assert ("MFU" in line) == (columns == 200)


def test_the_bar_leaves_the_handlers_of_the_log_as_they_were():
    handlers = logging.getLogger().handlers
    before = [[*handler.filters] for handler in handlers]
    bar = screen.Screen(SimpleNamespace(total_steps=2))  # type: ignore[arg-type]
    bar.start(0, {})
    assert [handler.filters for handler in handlers] != before
    bar.close()
    assert [handler.filters for handler in handlers] == before


def test_a_text_that_is_cut_off_is_marked():
    for words in (20, 200):
        values = {"seconds": 1.0, "is_best": False, "sample": "word " * words}
        line = format_record(Record(kind="evaluation", step=4, values=values), 8)
        assert line.endswith("...") == (words == 200)
