"""The lines of a log; the bar of a terminal is in test_train_command.py."""

from my_project.records.screen import line_of


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
