"""The lines of a log; the bar of a terminal is in test_train_command.py."""

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
    assert ("440 steps, you asked for 110" in capsys.readouterr().out) == is_said


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


def test_a_text_that_is_cut_off_is_marked():
    for words in (20, 200):
        values = {"seconds": 1.0, "is_best": False, "sample": "word " * words}
        line = format_record(Record(kind="evaluation", step=4, values=values), 8)
        assert line.endswith("...") == (words == 200)
