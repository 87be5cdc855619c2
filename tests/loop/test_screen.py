"""The lines of a log; the bar of a terminal is in test_train_command.py."""

import pytest
from my_project.records import screen
from my_project.records.screen import line_of
from my_project.run_folder import Run
from runs import make_config


def test_a_line_of_a_log_holds_no_control_characters():
    evaluation = {"kind": "evaluation", "step": 4, "seconds": 1.0, "is_best": True}
    results = {
        "validation/accuracy": 0.8125,
        "validation/\x1b[2J": None,
        "sample": "one\ntwo\x1b[2J",
    }
    line = line_of(evaluation | results, 8)
    assert line.startswith("step 4 of 8: validation/accuracy 0.8125, ")
    assert "\x1b" not in line


@pytest.mark.parametrize(("asked", "is_said"), [(110, True), (440, False), (900, False)])
def test_a_finished_run_of_more_steps_than_were_asked_for_is_said(tmp_path, capsys, asked, is_said):
    """More are asked for where it was stopped early."""
    run = Run(make_config(tmp_path), rank=0)
    run.step = run.total_steps = 440
    run.write_status("finished", result={})
    run.total_steps = asked
    screen.log_finished(run, before=True)
    assert ("440 steps, you asked for 110" in capsys.readouterr().out) == is_said
