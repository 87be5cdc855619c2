"""Files, links and messages in the documents exist; commands in them fit a page, and run."""

import os
import re
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import (
    DOCUMENTS,
    HAS_LAUNCHERS,
    HAS_TOOLS,
    PROJECT,
    commands,
    run_as_typed,
    text_of,
    train_as_typed,
)
from world import run_world

SOURCE = PROJECT / "src/my_project"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_or_a_heading(document):
    text = text_of(document)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
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


SHORT = "--epochs null --steps 2 --evaluation.every_steps null"


def train_there(command: str, project: Path) -> None:
    """Train in this process of a world, which has imported torch already."""
    os.chdir(project)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": "runs"}
    train_as_typed(command, SHORT)


COMMANDS = {
    (re.findall(r"--run_name (\w+)", command) or [command.split(" --")[-1].split()[0]])[0]: command
    for command in commands(text_of("docs/troubleshooting.md"))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_commands_of_troubleshooting_run_as_they_stand(project, name):
    command = COMMANDS[name]
    if command.startswith("python -m my_project train "):
        is_refused = name == "with_wandb" and find_spec("wandb") is None
        sentence = "telemetry.trackers names wandb"
        with pytest.raises(RuntimeError, match=sentence) if is_refused else nullcontext():
            run_world(1, train_there, command, project)
        return
    # the C++ compiler takes minutes for a model of any size
    command = f"{command.replace('inductor', 'aot_eager')} {SHORT}"
    result = run_as_typed(command, project, PYTHONPATH=str(project / "src"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("2 processes on CPU" in result.stdout) == (name == "by_torchrun")
