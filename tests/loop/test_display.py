"""The bar of a terminal, and the lines of a log."""

import pytest
from my_project.records.lines import line_of
from terminal import Terminal


def test_a_line_of_a_log_holds_no_control_characters():
    evaluation = {"kind": "evaluation", "step": 4, "seconds": 1.0, "is_best": True}
    results = {"validation/accuracy": 0.8125, "[red]\x1b[2J": None, "sample": "one\ntwo\x1b[2J"}
    line = line_of(evaluation | results, 8)
    assert line.startswith("step 4 of 8: validation/accuracy 0.8125, ")
    assert "\x1b" not in line


# ---- in a real terminal --------------------------------------------------------------------------
LIVE = """
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from my_project.process import CopiedStream
from my_project.records.display import Progress

progress = Progress(SimpleNamespace(total_steps=8))
interval = {
    "kind": "interval", "epoch": 0.5, "elapsed_seconds": 1.0, "steps": 4, "skipped": 0,
    "skipped_steps": 0, "loss": 0.5, "learning_rate": 9.1e-3, "gradient_norm": 1.0,
    "samples_per_second": 9.0, "step_seconds": 0.5, "data_share": 0.02,
}
stdout = sys.stdout
sys.stdout = copied = CopiedStream(sys.stdout, open("log", "ab", buffering=0))
progress.start(0)
for step in range(1, 5):
    progress.step_ended(step)
    print(f"a line of the recipe, {step}")
progress.show(interval | {"step": 4})
progress.pause("evaluation")
while not Path("evaluated").exists():
    time.sleep(0.05)
scores = {"validation/accuracy": 0.8125}
progress.show({"kind": "evaluation", "step": 4, "seconds": 1.0, "is_best": True} | scores)
progress.pause("")
for step in range(5, 9):
    progress.step_ended(step)
progress.show(interval | {"step": 8, "loss": None, "skipped": 4, "skipped_steps": 4})
progress.stop()
print("the end", sys.stdout is copied)
"""


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_a_log_plain_lines(tmp_path):
    (tmp_path / "live.py").write_text(LIVE)
    terminal = Terminal([], tmp_path, columns=60, module="live")
    try:
        terminal.wait_for("evaluation", seconds=600)
        assert "4/8" in terminal.text
    finally:
        (tmp_path / "evaluated").touch()
        _, code = terminal.end()
    assert code == 0, terminal.shown
    for line in ("a line of the recipe, 1\n", "validation/accuracy 0.8125", "8/8", "the end True"):
        assert line in terminal.shown
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"
    log = (tmp_path / "log").read_text().splitlines()
    assert "\x1b" not in "".join(log)
    assert log[4].startswith("step 4 of 8: loss 0.5000, ")
    assert "validation/accuracy 0.8125" in log[5]
    assert log[-1] == "the end True"
