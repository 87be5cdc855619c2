"""Every command in the README and four pages runs, changed only by settings that shorten it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documents import HAS_LAUNCHERS, HAS_TOOLS, PROJECT, blocks, commands, run_as_typed, text_of
from my_project import __main__
from world import run_world

WATCHING = "docs/watching-runs.md"
PAGES = ("README.md", WATCHING, "docs/interruptions.md", "docs/clusters.md", "docs/promises.md")
COMMANDS = [
    command.replace("--profile.steps 20:25", "--profile.steps 2:2")
    for page in PAGES
    for command in sorted(commands(text_of(page)), key=lambda one: "--profile.steps" not in one)
]
SHORT = " --steps 4 --evaluation.every_steps null"
NEEDS_TOOLS = r"my_project[ .](tools|runs|report|doctor|planner|preflight)|--preflight"


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return run_as_typed(command, folder, PYTHONPATH=str(PROJECT / "src"), **environment)


# without a shell; train with --where is typed to one
HERE = r"python -m my_project (runs|report|doctor|predict|evaluate|planner|train(?!.*where)) [^*]*$"


def call(command: str, folder: Path) -> int:
    """Run a command in this process, which has imported torch already."""
    os.chdir(folder)
    sys.argv = shlex.split(command)[2:]
    __main__.main()
    return 0


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, so that runs land elsewhere."""
    folder = tmp_path_factory.mktemp("project")
    names = "configs accelerate_configs launch src tests Makefile pyproject.toml README.md"
    for name in names.split():
        (folder / name).symlink_to(PROJECT / name)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all of them, one after the other
def test_every_command_of_the_readme_does_what_it_says(project):
    done = []
    for command in dict.fromkeys(COMMANDS):
        if command.startswith(("python3 -m venv", "pip install", "uv ")):
            continue  # how this environment came to be
        if command.startswith(("make test", "make lint", "tensorboard")):
            continue  # these tests; below; a server
        if not HAS_TOOLS and re.search(NEEDS_TOOLS, command):
            continue
        if not HAS_LAUNCHERS and "launch/" in command:
            continue
        if command.startswith(("sbatch", "kubectl")):
            assert all((project / name).is_file() for name in re.findall(r"launch/\S+", command))
            continue  # tried on a cluster, in the tests of the template
        if re.search(r"train (--config|configs/)", command):
            command += SHORT
        if "launch/" in command and "_configs" not in command:
            result = run(command + SHORT, project, **on_this_machine(project))
        elif "--num_machines" in command:
            result = run(two_nodes(command), project, CUDA_VISIBLE_DEVICES="-1")
        elif re.match(HERE, f"{command} "):
            (code,) = run_world(1, call, command, project)
            result = subprocess.CompletedProcess(command, code, "", "")
        else:
            result = run(command, project)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        done.append(command)
    assert len(done) >= (10 if HAS_TOOLS and HAS_LAUNCHERS else 7)
    name = "image_classification-lr=0.003"
    assert (project / f"runs/{name}/export/model.safetensors").is_file()
    assert (project / "weights.safetensors").is_file()
    if HAS_TOOLS:
        assert (project / "compared.html").is_file()
        code, _ = blocks(text_of(WATCHING), "python")
        code = code.replace("import pandas\n", "").split("print(")[0]
        assert run(f"python -c {shlex.quote(code)}", project).returncode == 0
    nodes = json.loads((project / "runs/two_nodes/run.json").read_text())
    assert nodes["environment"]["WORLD_SIZE"] == "2"


def on_this_machine(project: Path) -> dict[str, str]:
    """Make the nodes of hosts.txt processes of this machine, reached by a shell in place of ssh."""
    (project / "hosts.txt").write_text("gpu-a slots=1\ngpu-b slots=1\n")
    ssh = project / "ssh"
    ssh.write_text('#!/bin/bash\nexec bash -c "$2"\n')
    ssh.chmod(0o755)
    where = {"ADDRESS": "127.0.0.1", "PORT": "29519", "WHERE": "multi_node_cpu"}
    return {"SSH": str(ssh), "CUDA_VISIBLE_DEVICES": "-1"} | where


def two_nodes(command: str) -> str:
    """Start the command once per node, here both on this machine, with a process each."""
    for there, here in {
        "--num_processes 16": "--num_processes 2",
        "10.0.0.1": "127.0.0.1",
        "29500": "29517",
    }.items():
        assert there in command
        command = command.replace(there, here)
    command += " --run_name two_nodes"
    second = command.replace("--machine_rank 0", "--machine_rank 1")
    return f"{second} & {command} && wait $!"
