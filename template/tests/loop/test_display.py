"""The live lines of a terminal: what is on them at any width, and who else has the terminal."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from terminal import CONTROL, Terminal, standing

from my_project.process import LAUNCHER
from my_project.records import history, screen
from my_project.records.display import Progress
from my_project.records.history import History

RUN = """
import pdb
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from my_project.process import CopiedStream
from my_project.records import screen
from my_project.records.display import Progress

evaluation = SimpleNamespace(every_steps=4, best_metric="validation/accuracy")
config = SimpleNamespace(evaluation=evaluation, checkpoints=SimpleNamespace(every_steps=None))
progress = Progress(SimpleNamespace(total_steps=8, config=config, folder=Path("run")))
"""


# ---- what is drawn -------------------------------------------------------------------------------
class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def every_save_is_complete(monkeypatch):
    """As if manifest.json of every checkpoint were there."""
    monkeypatch.setattr(history, "is_complete", lambda path: True)


def make_run(total_steps: int = 330) -> SimpleNamespace:
    evaluation = SimpleNamespace(every_steps=55, best_metric="validation/accuracy")
    config = SimpleNamespace(evaluation=evaluation, checkpoints=SimpleNamespace(every_steps=None))
    return SimpleNamespace(total_steps=total_steps, config=config, folder=Path("run"))


INTERVAL = {
    "kind": "interval", "step": 190, "epoch": 3.1, "elapsed_seconds": 76.0,
    "steps": 10, "skipped": 0, "skipped_steps": 3,
    "loss": 0.4312, "learning_rate": 9.1e-3, "samples_per_second": 3021.4, "mfu": 0.41,
    "data_share": 0.02, "slowest_rank": 3,
}  # fmt: skip


def make_history(
    interval: dict | None = None, total_steps: int = 330, waited: float = 7.0
) -> History:
    """Return a run at step 196, with an evaluation every 20 steps, of which that at 80 was best."""
    clock = Clock()
    history = History(make_run(total_steps), clock)
    starts = [{"kind": "start", "step": 0}] * 3
    history.start(0, [*starts, {"kind": "checkpoint", "step": 0}])
    for step in range(1, 197):
        clock.now += 0.4
        history.pace.step_ended(step)
        if step % 20 == 0:
            score = 0.9 if step == 80 else step / 1000
            results = {"validation/loss": 1 - score, "validation/accuracy": score}
            results |= {f"validation/recall_{i}": score for i in range(9)}
            history.add({"kind": "evaluation", "step": step, "is_best": step == 80} | results)
    found = {"rank": 3, "host": "node-2", "seconds": 0.9, "median": 0.5, "cause": "data wait"}
    history.add({"kind": "straggler", "step": 190} | found)
    history.add(INTERVAL | (interval or {}))
    clock.now += waited
    return history


def drawn(history: History, columns: int, height: int = 24, encoding: str = "utf-8") -> list[str]:
    bytes_written = io.BytesIO()
    file = io.TextIOWrapper(bytes_written, encoding=encoding, write_through=True)
    console = Console(
        file=file, width=columns, height=height, force_terminal=True, color_system=None
    )
    console.print(screen.View(history))
    return bytes_written.getvalue().decode(encoding).splitlines()


def test_all_that_matters_is_on_a_terminal_of_60_columns():
    *table, position, numbers, more = drawn(make_history({"mfu": None}, waited=1.0), 60)
    assert re.fullmatch(r". step 196/330  [━╸]+ *   59%  1:17, 0:\d\d left", position)
    assert numbers == "epoch 3.20  loss 0.4312  lr 9.1e-03  3021 samples/s  data 2%"
    assert more.startswith("rank 3 (node-2) 1.8x as slow  saved 1 min ago")
    assert [row.split()[:3] for row in table] == [
        ["step", "accuracy", "loss"],  # the best metric comes first
        ["80*", "0.9000", "0.1000"],  # the best is older than the last four, and stays
        ["120", "0.1200", "0.8800"],
        ["140", "0.1400", "0.8600"],
        ["160", "0.1600", "0.8400"],
        ["180", "0.1800", "0.8200"],
    ]


@pytest.mark.parametrize("interval", [{}, {"loss": None, "skipped": 10}])
@pytest.mark.parametrize("total_steps", [330, 123_456_789])
def test_nothing_is_wrapped_or_cut_at_any_width(interval, total_steps):
    history = make_history(interval, total_steps)
    whole = {word.strip(",") for line in drawn(history, 300) for word in line.split()}
    short = {"step", "accuracy", "loss", *(f"recall_{i}" for i in range(9))}
    for columns in range(12, 160):
        lines = drawn(history, columns)
        assert all(len(line) <= columns for line in lines), (columns, lines)
        words = {word.strip(",") for line in lines for word in line.split()}
        bar_or_spinner = re.compile(r"[━╸╺]+|[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]")
        cut = {w for w in words if not bar_or_spinner.fullmatch(w)} - whole - short - {"196"}
        assert not cut, (columns, lines)
        assert any(f"{196}/{total_steps}" in line for line in lines) or columns < 20


def test_the_least_important_numbers_are_dropped_first():
    items = screen.items(make_history(), has_ended=False)
    dropped: list[str] = []
    for columns in range(150, 10, -1):
        shown = "  ".join(line.plain for line in screen.lines(items, columns))
        gone = [name for name in items if items[name].plain not in shown]
        dropped += [name for name in screen.LEAST_IMPORTANT if name in gone and name not in dropped]
    assert dropped == [name for name in screen.LEAST_IMPORTANT if name in items]
    assert "under way" in items, "a step of 7 s is said to be under way"


def test_a_loss_that_is_not_finite_is_said_in_red_even_where_it_is_narrow():
    items = screen.items(make_history({"loss": None, "skipped": 10}), has_ended=False)
    assert items["loss"].plain == "loss not finite, 10 of 10 steps skipped"
    assert items["loss"].style == "red"
    assert any("not finite" in line.plain for line in screen.lines(items, 40))
    assert screen.items(make_history(), has_ended=False)["loss"].style == ""


def test_a_low_terminal_and_one_without_unicode_get_the_lines_that_they_can_show():
    assert len(drawn(make_history(), 60)) == 9
    for height in range(4, 12):
        assert len(drawn(make_history(), 60, height)) < height
    assert "step 196/330" in "".join(drawn(make_history(), 60, encoding="ascii"))


def test_names_from_a_recipe_are_text():
    history = History(make_run(), Clock())
    history.start(0, [])
    history.add({"kind": "evaluation", "step": 0, "[red]\x1b[2J": 0.5, "x" * 300: 0.1})
    history.add({"kind": "straggler", "step": 0, "rank": 3, "host": "\x1b[31m", "seconds": 0.9})
    history.straggler_found["median"] = 0.5
    shown = "\n".join(drawn(history, 200))
    assert "rank 3 (?[31m) 1.8x" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b[31m" not in shown
    assert "[red]?[2J" in shown


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
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    progress = Progress(make_run())
    progress.start(0, [])
    terminal.is_open = False
    progress.live.refresh()  # as its thread does
    print("a line of the recipe")
    progress.step_ended(1)
    progress.show(INTERVAL | {"kind": "spike", "step": 1})
    progress.stop()
    assert sys.stdout is terminal
    assert not caplog.records

    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(make_run())
    progress.start(0, [])
    progress.step_ended(1)
    progress.show(INTERVAL | {"step": 1})
    progress.stop()
    assert terminal.getvalue() == "", "it cannot move its cursor"
    assert "step 1 of 330: loss 0.4312" in caplog.text


def test_what_a_launcher_prints_at_a_stop_signal_stays_and_the_lines_say_it_too(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    progress = Progress(make_run())
    progress.start(0, [])
    progress.step_ended(1)
    progress.live.refresh()
    terminal.write("^C\nSIGINT: stopping\n")  # by another process
    monkeypatch.setattr(LAUNCHER, "leave_at", 1.0)
    for step in (2, 3):
        progress.step_ended(step)
        progress.live.refresh()
    shown = [CONTROL.sub("", line).strip() for line in standing(terminal.getvalue())]
    progress.stop()
    before = shown.index("SIGINT: stopping")
    assert "step 1/330" in shown[before - 2]
    assert "step 3/330" in shown[-2], "the lines have gone on below"
    assert "step 2/330" not in "\n".join(shown), "and are erased as before"
    assert shown[-1] == "not saved yet  stopping after this step"


# ---- in a real terminal --------------------------------------------------------------------------
LIVE = """
def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.05)

stdout = sys.stdout
sys.stdout = copied = CopiedStream(sys.stdout, open("log", "ab", buffering=0))
screen.SLOW_SECONDS = 0.5
progress.start(0, [{"kind": "start", "step": 0, "elapsed_seconds": 0.0}])
for step in range(1, 5):
    progress.step_ended(step)
    progress.show({"kind": "interval", "step": step, "loss": 0.5, "samples_per_second": 9.0})
    print(f"a line of the recipe, {step}")
progress.pause("evaluation")
wait_for("evaluated")
scores = {"validation/accuracy": 0.8125}
progress.show({"kind": "evaluation", "step": 4, "seconds": 1.0, "is_best": True} | scores)
progress.pause("")
wait_for("slow step done")
for step in range(5, 9):
    progress.step_ended(step)
progress.show({"kind": "interval", "step": 8, "loss": None, "steps": 4, "skipped": 4})
scores = {"validation/accuracy": 0.75}
progress.show({"kind": "evaluation", "step": 8, "seconds": 1.0, "is_best": False} | scores)
progress.stop()
print("the end", sys.stdout is copied)
"""


@pytest.mark.slow
def test_the_lines_go_on_while_a_step_is_slow_and_the_last_evaluations_stay(tmp_path):
    (tmp_path / "live.py").write_text(RUN + LIVE)
    terminal = Terminal([], tmp_path, columns=60, module="live")

    def see_seconds_pass(what: str) -> None:
        seen = re.compile(rf"{what} (\d:\d\d)")
        terminal.read(lambda _: len(set(seen.findall(terminal.text))) > 2)

    try:
        see_seconds_pass("evaluation")
        assert terminal.screen[-3] == "a line of the recipe, 4", "printed lines are above"
        (tmp_path / "evaluated").touch()
        see_seconds_pass("this step")
    finally:
        (tmp_path / "evaluated").touch()
        (tmp_path / "slow step done").touch()
        _, code = terminal.end()
    assert code == 0, terminal.shown
    *printed, header, first, second, position, numbers, end, nothing = terminal.screen
    assert printed == [f"a line of the recipe, {step}" for step in range(1, 5)]
    assert header.split() == ["step", "validation/accuracy"]
    assert first.split() == ["4*", "0.8125"]
    assert second.split() == ["8", "0.7500"]
    assert re.fullmatch(r"step 8/8  ━+  100%  0:\d\d", position)
    assert numbers == "loss not finite, 4 of 4 steps skipped"
    assert (end, nothing) == ("the end True", "")
    assert max(map(len, terminal.shown.splitlines())) <= 60, "nothing was wrapped at any time"
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"

    log = (tmp_path / "log").read_text().splitlines()
    assert "\x1b" not in "".join(log), "a log has plain lines"
    for step in range(1, 5):
        assert log[2 * step - 1] == f"a line of the recipe, {step}"
        assert log[2 * step - 2].startswith(f"step {step} of 8: loss 0.5000, 9 samples/s, 0:")
    assert log[8] == "step 4 of 8: validation/accuracy 0.8125, the best so far, in 1 s"
    assert log[9].startswith("step 8 of 8: loss not finite, 4 of 4 steps skipped, 0:")
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
progress.start(0, [])
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
def test_the_lines_leave_the_terminal_to_a_debugger(tmp_path):
    (tmp_path / "loop.py").write_text(RUN + LOOP)
    terminal = Terminal([], tmp_path, columns=60, module="loop")

    def type_line(line: str) -> int:
        terminal.type(f"{line}\n")
        return len(terminal.text)

    def check(command: str, answer: str) -> None:
        terminal.wait_for(PROMPT, terminal.wait_for(answer, type_line(command)))
        assert terminal.shows_nothing(0.6), "the lines are drawn four times a second"

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
