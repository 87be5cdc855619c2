"""The bar on a terminal: it leaves the terminal to a debugger that reads commands."""

import pytest
from terminal import Terminal

LOOP = """
import pdb
import time
from types import SimpleNamespace

from my_project.records.display import Progress

def loss(step):
    if step == 2:
        breakpoint()
    if step == 4:
        pdb.set_trace()
    total = 100 + step
    return total

interaction = pdb.Pdb.interaction
progress = Progress(SimpleNamespace(total_steps=8))
progress.start(0)
for step in range(8):
    loss(step)
    progress.show({"step": step + 1, "loss": 0.5, "samples_per_second": 9.0})
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
    (tmp_path / "loop.py").write_text(LOOP)
    terminal = Terminal([], tmp_path, columns=60, module="loop")

    def type_line(line: str) -> int:
        terminal.type(f"{line}\n")
        return len(terminal.text)

    def check(command: str, answer: str) -> None:
        terminal.wait_for(PROMPT, terminal.wait_for(answer, type_line(command)))
        assert terminal.shows_nothing(0.3), "the bar is drawn ten times a second"

    terminal.wait_for(PROMPT)
    assert "2/8" in terminal.text, "the bar was there before"
    assert terminal.shows_nothing()
    check("p step * 1000", "2000\r\n")
    check("p 'a' * 100", "a" * 100)  # not wrapped by the bar
    check("r", "-> return total")
    check("p total", "102\r\n")
    check("b loss, step == 6", "Breakpoint 1 at")
    for stop, bar in ((4, "3/8"), (6, "6/8")):  # pdb.set_trace, and the breakpoint above
        terminal.wait_for(PROMPT, terminal.wait_for(bar, type_line("c")))
        assert terminal.shows_nothing()
        check("p step * 1000", f"{stop}000\r\n")
    at = terminal.wait_for("8/8", type_line("c"))
    terminal.wait_for(PROMPT, terminal.wait_for("-> 1 / 0", at))
    check("p 3 + 4", "7\r\n")
    type_line("q")
    lines, code = terminal.end()
    assert code == 0
    assert lines[-1] == "patched: False", "as if there had been no bar"
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"
