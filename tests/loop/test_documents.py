"""What the documents say is there: files, links, messages. Their commands fit a page, and run."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from documents import (
    DOCUMENTS,
    HAS_LAUNCHERS,
    HAS_TOOLS,
    PROJECT,
    blocks,
    commands,
    predict_as_typed,
    run_as_typed,
    text_of,
    train_as_typed,
)
from my_project.end_block import print_finished
from runs import assert_same_weights, records, status, weights
from safetensors.torch import load_file

SOURCE = PROJECT / "src/my_project"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_or_a_heading(document):
    text = text_of(document)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            path = (PROJECT / document).parent / target.partition("#")[0]
            assert path.exists(), target
            assert Path(os.path.normpath(path)).is_relative_to(PROJECT), f"{target} lies outside"


@pytest.mark.parametrize("document", ["AGENTS.md", "docs/how-a-step-works.md"])
def test_every_module_that_is_named_is_there(document):
    named = re.findall(r"`(?:src/my_project/)?([a-z_/]+(?:\.py|/))`", text_of(document))
    assert named
    for name in named:
        is_deleted = name.startswith("tools/") and not HAS_TOOLS
        is_deleted |= name.startswith("launch/") and not HAS_LAUNCHERS
        if not is_deleted:
            assert (SOURCE / name).exists() or (PROJECT / name).exists(), name


# ---- troubleshooting -----------------------------------------------------------------------------
@pytest.fixture
def project(tmp_path):
    """A copy of what the commands need, so that it may be edited."""
    for name in ("src", "configs", "accelerate_configs"):
        shutil.copytree(PROJECT / name, tmp_path / name)
    return tmp_path


def run_short(command: str, project: Path, **how) -> subprocess.CompletedProcess:
    short = f"{command} --epochs null --steps 2 --evaluation.every_steps null"
    environment = {"PYTHONPATH": str(project / "src"), "WANDB_MODE": "offline", "WANDB_DIR": "runs"}
    return run_as_typed(short, project, **environment, **how)


COMMANDS = {
    (re.findall(r"--run_name (\w+)", command) or [command.split(" --")[-1].split()[0]])[0]: command
    for command in commands(text_of("docs/troubleshooting.md"))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_commands_of_troubleshooting_run_as_they_stand(project, name):
    # the C++ compiler takes minutes for a model of any size
    result = run_short(COMMANDS[name].replace("inductor", "aot_eager"), project)
    if name == "with_wandb" and find_spec("wandb") is None:
        assert "telemetry.trackers names wandb" in result.stderr
        return
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("2 processes on CPU" in result.stdout) == (name == "by_torchrun")


# ---- your own recipe -----------------------------------------------------------------------------
@pytest.mark.slow
def test_the_commands_of_watching_runs_run_as_they_stand(project):
    """Of one run with a profile, in place of the two that the page names."""
    found = commands(text_of("docs/watching-runs.md"))
    (train,) = [command for command in found if " train " in command]
    assert "--steps 30 --profile.steps 20:25" in train
    train = train.replace("--steps 30 --profile.steps 20:25", "--profile.steps 2:2")
    result = run_short(train, project)
    assert result.returncode == 0, result.stdout + result.stderr
    (project / "runs/image_classification").symlink_to("profiled")
    for command in found:
        if " train " not in command and not command.startswith("tensorboard"):
            words = command.replace("runs/image_classification runs/profiled", "runs/profiled")
            result = run_as_typed(words, project, PYTHONPATH=str(project / "src"))
            assert result.returncode == 0, command + result.stdout + result.stderr
    assert (project / "runs/profiled/report.html").is_file()
    code, _ = blocks(text_of("docs/watching-runs.md"), "python")
    done = subprocess.run(
        [sys.executable, "-c", code.replace("import pandas\n", "").split("print(")[0]],
        cwd=project, env=os.environ | {"PYTHONPATH": str(project / "src")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0


PAGE = "docs/your-own-recipe.md"
OWN = text_of(PAGE, "## A recipe on one page")
SHOWN = text_of(PAGE, "## What a run has learned")
RECIPE = blocks(OWN, "python")[0]
EXAMPLE = r"(?m)^class (\w+)\((?:Table|Started)\)"  # is put below it
EXAMPLES = [block for block in blocks(text_of(PAGE), "python") if re.search(EXAMPLE, block)]
(MUON,) = [block for block in blocks(text_of(PAGE), "python") if "class MuonAdamW" in block]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the recipe, its examples and its config, copied out of the document."""
    import my_project.recipes

    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/table.yaml").write_text(blocks(OWN, "yaml")[0])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/table.py").write_text("\n\n".join([RECIPE, *EXAMPLES]))
    (tmp_path / "muon.py").write_text(MUON)
    for package, folder in ((my_project, tmp_path), (my_project.recipes, tmp_path / "recipes")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, "my_project.recipes.table", raising=False)
    return tmp_path


def test_the_recipe_of_the_document_learns_and_shows_it_as_it_stands(own, capsys):
    config, wider = (train_as_typed(command) for command in commands(OWN))
    assert status(config)["result"]["validation/loss"] < 0.2, "by chance it were ln 2 = 0.7"
    assert wider.run_name == "table-width=64"
    samples, answer = commands(SHOWN)
    print_finished(config.folder, status(config))
    assert samples in capsys.readouterr().out
    lines = predict_as_typed(samples).splitlines()
    right = ("truth rose, answer rose", "truth lily, answer lily")
    assert sum(line in right for line in lines) > 13
    assert predict_as_typed(answer) == "lily\n"


@pytest.mark.parametrize("code", [RECIPE, "\n\n".join([RECIPE, *EXAMPLES]), MUON])
def test_the_code_of_the_document_passes_the_lint_of_a_project(code):
    name = f"--stdin-filename={SOURCE}/recipes/table.py"
    for how in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *how, name, "-"]
        done = subprocess.run(ruff, input=code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def train_example(name: str, more: str = "") -> Any:
    command = (
        f"python -m my_project train configs/table.yaml --recipe my_project.recipes.table.{name}"
    )
    return train_as_typed(f"{command} --run_name {name}", f"--epochs null --steps 60 {more}")


def test_each_example_of_the_document_does_what_it_says(own):
    names = re.findall(EXAMPLE, "".join(EXAMPLES))
    from_there = f"--recipe.start {train_example('Table').folder}/export/model.safetensors"
    runs = {
        name: train_example(name, from_there if name in ("Started", "Frozen") else "")
        for name in names
    }
    assert len(runs) == 8
    results = {name: status(config)["result"] for name, config in runs.items()}
    assert results["Measured"]["validation/accuracy"] > 0.8
    assert results["Measured"]["validation/loss"] < results["Gan"]["validation/loss"]
    accuracies = [record["train/accuracy"] for record in records(runs["Counted"])]
    assert accuracies[0] < 0.75 < accuracies[-1]
    assert records(runs["Pictured"], "pictures")[-1]["pictures"][0].endswith("/plane.png")
    pictured = runs["Pictured"].folder
    assert predict_as_typed(f"python -m my_project predict {pictured}").endswith("/plane.png\n")
    frozen, given = weights(runs["Frozen"].folder / "export"), weights(own / "runs/Table/export")
    assert frozen["0.0.weight"].equal(given["0.weight"])
    assert not weights(runs["Started"].folder / "export")["0.weight"].equal(given["0.weight"])
    assert "train/judge" in records(runs["Gan"])[-1]


def test_samples_are_drawn_by_their_weights(own):
    from my_project.recipes import table  # pyright: ignore[reportAttributeAccessIssue]

    drawn = [table.Drawn("abc", [0, 1, 3])[i] for i in range(4000)]
    assert drawn.count("a") == 0
    assert 2850 < drawn.count("c") < 3150


def test_the_optimizer_of_the_document_resumes_where_it_was(own):
    muon = "--optim.class_path my_project.muon.MuonAdamW --optim.schedule constant"
    whole = train_example("Table", muon)
    train_example("Table", f"{muon} --runs_folder resumed --steps 30")
    resumed = train_example("Table", f"{muon} --runs_folder resumed")
    assert_same_weights(whole, resumed)
    slots = load_file(whole.folder / "checkpoints/step_00000060/optimizer.safetensors")
    assert {"0.weight/momentum_buffer", "0.bias/exp_avg"} < {*slots}


def test_the_schedule_of_the_document_is_a_line_of_the_function():
    from my_project import optim
    from my_project.config import OptimConfig

    (line,) = blocks(text_of(PAGE, "### Another schedule"), "python")
    code = inspect.getsource(optim.learning_rate)
    first = '        "constant": 1.0'
    assert code.count(first) == 1
    exec(code.replace(first, line + first), names := {**vars(optim)})
    config = OptimConfig(lr=1.0, schedule="rsqrt", warmup_steps=4)  # type: ignore[arg-type]
    rates = [names["learning_rate"](step, 100, config) for step in (1, 4, 16, 64)]
    assert rates == [0.5, 1.0, 0.5, 0.25]


def test_the_lanes_of_the_document_go_on_at_their_states(tmp_path):
    import torch

    (code,) = blocks(text_of("docs/your-own-recipe.md", "## Data that is a stream"), "python")
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    numbers = {}
    for file in range(10):  # of one to four lines: lane 1 reads the second and the last
        numbers[file] = [str(10 * file + line) for line in range(1 + file % 4)]
        (tmp_path / f"{file}").write_text("\n".join(numbers[file]))
    stream = names["Numbers"]([tmp_path / f"{file}" for file in range(10)])
    wanted = [float(number) for number in numbers[1] + numbers[9]]
    lane, states = stream.lane(1, 0, 0), []
    for number in islice(lane, 12):
        assert number == wanted[len(states) % len(wanted)]
        states.append(json.dumps(lane.state_dict()))
    for position, state in enumerate(states, 1):
        resumed = stream.lane(1, 0, 0)
        resumed.load_state_dict(json.loads(state))
        at = position % len(wanted)
        assert [*islice(resumed, 4)] == [*islice(stream.lane(1, position, 0), 4)]
        assert [*islice(stream.lane(1, position, 0), 4)] == (wanted * 2)[at : at + 4]
    with pytest.raises(ValueError, match="a lane has no numbers"):
        stream.__class__([tmp_path / "0"]).lane(1, 0, 0)
