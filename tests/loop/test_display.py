"""The bar of a terminal, the lines of a log, and who else has the terminal."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
from my_project.records.display import Progress
from my_project.records.lines import format_speed, line_of
from terminal import Terminal

RUN = """
import pdb
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
"""
INTERVAL = {
    "kind": "interval", "step": 190, "epoch": 3.1, "elapsed_seconds": 76.0,
    "steps": 10, "skipped": 0, "skipped_steps": 3, "step_seconds": 0.5,
    "loss": 0.4312, "learning_rate": 9.1e-3, "samples_per_second": 3021.4, "mfu": 0.41,
    "data_share": 0.02, "gradient_norm": 0.123456, "slowest_rank": 3,
}  # fmt: skip


# ---- the lines of a log --------------------------------------------------------------------------
def test_a_log_has_a_line_for_each_record():
    assert line_of(INTERVAL, 330) == (
        "step 190 of 330: loss 0.4312, lr 9.1e-03, 3021 samples/s, MFU 41%, data 2%,"
        " 3 steps skipped in all, gradient norm 0.1235, epoch 3.1,"
        " 1 min 16 s elapsed, 1 min 10 s left"
    )
    skipped = {"loss": None, "skipped": 10, "skipped_steps": 10, "gradient_norm": None}
    assert "loss not finite, 10 of 10 steps skipped, lr" in line_of(INTERVAL | skipped, 330)
    evaluation = {"kind": "evaluation", "step": 4, "seconds": 1.0, "is_best": True}
    results = {"validation/accuracy": 0.8125, "[red]\x1b[2J": None, "sample": "one\ntwo\x1b[2J"}
    assert line_of(evaluation | results, 8) == (
        "step 4 of 8: validation/accuracy 0.8125, [red]?[2J not a number, the best so far, in 1 s"
        "\n  one\n  two?[2J"
    )
    assert line_of({"kind": "start", "step": 0}, 8) == ""
    speeds = {9.314: "9.31", 3021.4: "3021", 312_345.0: "312k", 1_212_345.0: "1.21M"}
    assert [format_speed(speed) for speed in speeds] == [*speeds.values()]


class FakeTerminal(io.StringIO):
    """A terminal that can be closed."""

    is_open = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.is_open:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_closed_terminal_and_a_dumb_one_do_not_disturb_the_run(monkeypatch, caplog):
    caplog.set_level("INFO")
    run: object = SimpleNamespace(total_steps=330)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    progress = Progress(run)
    progress.start(0)
    terminal.is_open = False
    progress.bar.refresh()  # as its thread does
    print("a line of the recipe")
    progress.step_ended(1)
    progress.show({"kind": "evaluation", "step": 1, "seconds": 1.0, "is_best": False, "a": 1.0})
    progress.stop()
    assert sys.stdout is terminal
    assert not caplog.records

    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(run)
    progress.start(0)
    progress.step_ended(1)
    progress.show(INTERVAL | {"step": 1})
    progress.stop()
    assert terminal.getvalue() == "", "it cannot move its cursor"
    assert "step 1 of 330: loss 0.4312" in caplog.text


# ---- in a real terminal --------------------------------------------------------------------------
LIVE = """
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
def test_the_bar_stays_below_what_is_printed_and_logs_have_plain_lines(tmp_path):
    (tmp_path / "live.py").write_text(RUN + LIVE)
    terminal = Terminal([], tmp_path, columns=60, module="live")
    try:
        terminal.wait_for("data 2%  evaluation", seconds=600)
        assert terminal.screen[-4:-2] == ["a line of the recipe, 3", "a line of the recipe, 4"]
        assert terminal.screen[-2].startswith("step 4/8 ")
    finally:
        (tmp_path / "evaluated").touch()
        _, code = terminal.end()
    assert code == 0, terminal.shown
    *printed, evaluation, position, numbers, end, nothing = terminal.screen
    assert printed == [f"a line of the recipe, {step}" for step in range(1, 5)]
    scores = "validation/accuracy 0.8125, the best so far, in 1 s"
    assert evaluation == f"step 4 of 8: {scores}"
    assert re.fullmatch(r"step 8/8 ━+ 100% \d:\d\d:\d\d \d:\d\d:\d\d", position)
    assert numbers.startswith("loss not finite, 4 of 4 steps skipped")
    assert (end, nothing) == ("the end True", "")
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"
    log = (tmp_path / "log").read_text().splitlines()
    assert "\x1b" not in "".join(log)
    assert log[4].startswith("step 4 of 8: loss 0.5000, lr 9.1e-03, 9 samples/s, data 2%,")
    assert log[5] == f"step 4 of 8: {scores}"
    assert log[-1] == "the end True"


LOOP = """
def loss(step):
    if step == 2:
        breakpoint()
    if step == 4:
        pdb.set_trace()
    total = 100 + step
    return total

interaction = pdb.Pdb.interaction
progress.start(0)
for step in range(8):
    loss(step)
    progress.step_ended(step + 1)
    time.sleep(0.2)
try:
    1 / 0
except ZeroDivisionError as error:
    pdb.post_mortem(error.__traceback__)
progress.stop()
print("patched:", pdb.Pdb.interaction is not interaction)
"""
PROMPT = "(Pdb) "


@pytest.mark.slow
def test_the_bar_leaves_the_terminal_to_a_debugger(tmp_path):
    (tmp_path / "loop.py").write_text(RUN + LOOP)
    terminal = Terminal([], tmp_path, columns=60, module="loop")

    def type_line(line: str) -> int:
        terminal.type(f"{line}\n")
        return len(terminal.text)

    def check(command: str, answer: str) -> None:
        terminal.wait_for(PROMPT, terminal.wait_for(answer, type_line(command)))
        assert terminal.shows_nothing(0.6), "the bar is drawn four times a second"

    terminal.wait_for(PROMPT)
    assert "2/8" in terminal.text, "the lines were there before"
    assert not any("/8" in line for line in terminal.screen), "they are gone"
    assert terminal.shows_nothing(0.6)
    check("p step * 1000", "2000\r\n")
    check("p 'a' * 100", "a" * 100)  # not wrapped by rich
    check("r", "-> return total")
    check("p total", "102\r\n")
    check("b loss, step == 6", "Breakpoint 1 at")
    for stop, shown in ((4, "3/8"), (6, "6/8")):  # pdb.set_trace, and the breakpoint above
        terminal.wait_for(PROMPT, terminal.wait_for(shown, type_line("c")))
        assert terminal.shows_nothing(0.6)
        check("p step * 1000", f"{stop}000\r\n")
    at = terminal.wait_for("8/8", type_line("c"))
    terminal.wait_for(PROMPT, terminal.wait_for("-> 1 / 0", at))
    check("p 3 + 4", "7\r\n")
    type_line("q")
    lines, code = terminal.end()
    assert code == 0
    assert lines[-1] == "patched: False", "as if nothing had been shown"
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"
