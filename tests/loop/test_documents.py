"""What the documents say is there: files, links, messages. Their commands fit a page, and run."""

import ast
import json
import os
import random
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
from runs import records, status

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
@pytest.mark.skipif(not HAS_TOOLS, reason="some of the messages are those of tools/")
def test_every_message_that_is_quoted_is_one_of_the_code():
    messages = {
        " ".join(node.value.split())
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    quoted = re.findall(r"(?m)^> (.*)$", text_of("docs/troubleshooting.md"))
    assert len(quoted) >= 9
    for message in quoted:
        assert any(message in text for text in messages), message


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


OWN = text_of("docs/your-own-recipe.md", "## A recipe in 40 lines")
SHOWN = text_of("docs/your-own-recipe.md", "## What a run has learned")
RECORDED = text_of("docs/your-own-recipe.md", "## Numbers to record of the training")


def write_flowers(folder: Path) -> None:
    """Write a table of two classes that a small network can tell apart, and not by one number."""
    draw = random.Random(0)
    lines = ["petal,sepal,name"]
    for _ in range(400):
        petal, sepal = draw.uniform(-1, 1), draw.uniform(-1, 1)
        lines.append(f"{petal},{sepal},{'rose' if petal * sepal > 0 else 'lily'}")
    (folder / "data").mkdir()
    (folder / "data/flowers.csv").write_text("\n".join(lines))
    (folder / "flower.csv").write_text("0.5,-0.5")


def write_own(recipes: Path, configs: Path) -> None:
    (recipe,), (config,) = blocks(OWN, "python"), blocks(OWN, "yaml")
    for text in (RECORDED, SHOWN):
        first, _, methods = blocks(text, "python")[0].partition("\n")
        assert first.startswith("class Table:")
        recipe += f"\n{methods}"  # the class is what comes last
    (recipes / "table.py").write_text(recipe)
    (configs / "table.yaml").write_text(config)


def test_the_recipe_of_the_document_learns_and_shows_it(tmp_path, monkeypatch):
    import my_project.recipes

    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "configs"):
        (tmp_path / folder).mkdir()
    write_flowers(tmp_path)
    write_own(tmp_path / "recipes", tmp_path / "configs")
    where = [*my_project.recipes.__path__, str(tmp_path / "recipes")]
    monkeypatch.setattr(my_project.recipes, "__path__", where)
    config, wider = (train_as_typed(command) for command in commands(OWN))
    assert status(config)["result"]["validation/loss"] < 0.2, "by chance it were ln 2 = 0.7"
    assert wider.run_name == "table-width=64"
    right = [record["train/accuracy"] for record in records(config)]
    assert right[0] < 0.75 < right[-1]
    for command in commands(SHOWN):
        predict_as_typed(command)
    lines = predict_as_typed(commands(SHOWN)[0]).splitlines()
    right = ("truth rose, answer rose", "truth lily, answer lily")
    assert sum(line in right for line in lines) > 13


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
