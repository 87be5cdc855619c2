"""The page on debugging, notebooks and sweeps: its commands and its code run."""

import os
import re
import shutil
import sys
from importlib.util import find_spec

import pytest
from documents import PROJECT, blocks, commands, run_as_typed, text_of, train_as_typed
from my_project.tools.runs import list_runs
from terminal import Terminal
from world import free_port

PAGE = "docs/working-with-runs.md"
NAME = re.findall(r"configs/(\w+)\.yaml", text_of(PAGE))[0]  # of the project's recipe
QUICK = '"--steps", "2", "--batches.workers", "0", "--telemetry.every_steps", "1", "--config"'


@pytest.fixture
def project(tmp_path):
    for name in ("src", "configs", "accelerate_configs"):
        shutil.copytree(PROJECT / name, tmp_path / name)
    return tmp_path


def run_cells(cells: list[str], folder) -> str:
    """Run cells in one Python process, with few steps; return what they print."""
    assert all("--config" in cell for cell in cells if "parse([" in cell)
    text = "\n".join(cells).replace('"--config"', QUICK)
    text = text.replace('"--steps", "60", ', "").replace("n_trials=8", "n_trials=2")
    text = text.replace("29500", str(free_port()))
    (folder / "cells.py").write_text(text)
    path = os.pathsep.join([str(folder / "src"), *filter(None, sys.path)])
    done = run_as_typed("python cells.py", folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_cells_of_the_notebook_and_of_optuna_run_in_one_process(project):
    section = text_of(PAGE, "## Notebook").split("### Several processes")[0]
    cells = blocks(section, "python")
    assert len(cells) == 2
    (sweep,) = blocks(text_of(PAGE, "## Sweeps"), "python")
    has_optuna = find_spec("optuna") is not None
    shown = run_cells(cells + [sweep] * has_optuna, project)
    assert "step 1 of 2: loss" in shown, "the steps are shown"
    assert re.search(r"dtype: float64 +validation/\w+", shown), "the table"
    runs = {summary.run.folder.name: summary for summary in list_runs(project / "runs")}
    assert f"{NAME}-seed=1" in runs
    if not has_optuna:
        pytest.skip("the sweep was left out: optuna is not installed")
    trials = [summary.best for name, summary in runs.items() if name.startswith(f"{NAME}-lr=")]
    assert len(trials) == 2
    (best,) = re.findall(r"\{'lr': [\d.e-]+\} ([\d.]+)", shown)
    assert float(best) == max(trials)


@pytest.mark.slow
def test_notebook_launcher_trains_on_two_processes(project):
    shown = run_cells(blocks(text_of(PAGE, "### Several processes"), "python"), project)
    assert "2 processes on CPU" in shown
    assert (project / "runs/forked/export/model.safetensors").is_file()


@pytest.mark.slow
def test_a_breakpoint_in_a_recipe_has_the_terminal_and_the_watchdog_waits(project, monkeypatch):
    overfit, debug = commands(text_of(PAGE, "## Debugging"))
    recipe = project / "src/my_project/recipes" / f"{NAME}.py"
    text = recipe.read_text()
    stop = "        if step == 2:\n            breakpoint()\n"
    at = text.index('        """\n', text.index("    def loss(")) + 12
    recipe.write_text(text[:at] + stop + text[at:])
    short = "--steps 6 --telemetry.every_steps 1 --distributed.timeout_seconds 1"
    start, *words = f"{debug} {short} --batches.micro_batch_size 0".split()
    assert (start, *words[:2]) == ("python", "-m", "my_project")
    environment = {"PYTHONPATH": str(project / "src")}
    terminal = Terminal(words[2:], project, 60, environment)

    terminal.wait_for("(Pdb) ", seconds=600)
    assert terminal.shows_nothing(4), "longer than the watchdog's limit"
    terminal.type("p step * 1000\n")
    terminal.wait_for("(Pdb) ", terminal.wait_for("2000\r\n"))
    terminal.type("c\n")
    _, code = terminal.end()
    assert code == 0

    monkeypatch.chdir(project)
    train_as_typed(overfit, "--steps 2 --batches.workers 0")
    assert (project / "runs" / f"{NAME}-overfit_batches=1/export").is_dir()
