"""The owner of a project deletes tools/ and launch/; the rest works as before."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from test_generate import RENAMED, REPOSITORY, Desk
from test_wheel import IMPORT_ALL

QUICK = [
    f"tests/loop/test_{name}.py"
    for name in ("structure", "cli", "launch_node", "readme", "documents")
] + ["tests/test_accelerate_configs.py"]
TOOLS = ("report", "doctor", "planner", "preflight", "runs")
SHORT = ["--epochs", "null", "--steps", "3", "--evaluation.every_steps", "null"]


@pytest.mark.slow
def test_without_tools_all_else_works_and_names_no_command_that_is_gone(
    template: Path, tmp_path: Path
):
    desk = Desk(tmp_path)
    project = desk.generate(template, **RENAMED)
    for folder in ("src/leafscan/tools", "launch"):
        shutil.rmtree(project / folder)
    desk.environment |= {"PYTHONPATH": str(project / "src"), "HOME": os.environ["HOME"]}
    desk.environment["TMPDIR"] = tempfile.gettempdir()  # for sockets, whose paths are short
    python = [sys.executable, "-m"]

    assert "leafscan.train\n" in desk.succeed(sys.executable, "-c", IMPORT_ALL, cwd=project)
    listed = desk.succeed(*python, "leafscan", cwd=project).splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ")]
    assert names == ["train", "evaluate", "predict", "export", "launch"]

    config = ["configs/image_classification.yaml", *SHORT, "--where", "cpu_2_processes"]
    train = [*python, "leafscan", "train", *config]
    stopped = desk.run(*train, "--stop_after", "0s", cwd=project)
    assert stopped.returncode == 75, stopped.stderr
    printed = stopped.stdout + desk.succeed(*train, cwd=project)
    run = project / "runs/image_classification"
    assert json.loads((run / "status.json").read_text())["outcome"] == "finished"
    assert json.loads((run / "run.json").read_text())["environment"]["WORLD_SIZE"] == "2"
    desk.succeed(*python, "leafscan", "evaluate", str(run), cwd=project)
    failed = desk.run(*train, "--run_name", "failed", "--batches.loader", "{x: 1}", cwd=project)
    assert failed.returncode == 2
    printed += failed.stdout + failed.stderr
    assert not [name for name in TOOLS if f"leafscan {name}" in printed]

    tests = [sys.executable, str(REPOSITORY / "tests/in_project.py"), str(project)]
    tests += ["-m", "not slow and not gpu"]
    desk.succeed(*tests, "--collect-only")
    assert " passed" in desk.succeed(*tests, *QUICK)
    # cookiecutter copies the repository, and would fail at links to a project that is gone
    shutil.rmtree(REPOSITORY / "build/in_project" / project.name)
