"""A project whose owner has no cluster deletes what is for one; all the rest goes on as before."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from test_generate import RENAMED, Desk
from test_wheel import IMPORT_ALL

QUICK = (
    "structure",
    "cli",
    "launch_node",
    "readme",
    "documents",
    "accelerate_configs",
    "redaction",
)
TWO = ["--config_file", "accelerate_configs/multi_node_cpu.yaml"]
TRAIN = ["-m", "leafscan.train", "--config", "configs/image_classification.yaml"]
SHORT = ["--epochs", "null", "--steps", "3", "--evaluation.every_steps", "null"]


@pytest.mark.slow
def test_without_cluster_its_tests_and_launch_everything_else_works(template: Path, tmp_path: Path):
    desk = Desk(tmp_path)
    project = desk.generate(template, **RENAMED)
    shutil.rmtree(project / "src/leafscan/cluster")
    shutil.rmtree(project / "launch")
    shutil.rmtree(project / "tests/cluster")
    desk.environment |= {"PYTHONPATH": str(project / "src"), "HOME": os.environ["HOME"]}
    python = [sys.executable, "-m"]

    assert "leafscan.train\n" in desk.succeed(sys.executable, "-c", IMPORT_ALL, cwd=project)
    listed = desk.succeed(*python, "leafscan", cwd=project).splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ")]
    ours = ["train", "evaluate", "predict", "export", "logs", "runs", "report", "doctor", "batch"]
    assert names == [*ours, "launch"]

    alone = ["--config_file", "accelerate_configs/cpu_2_processes.yaml"]
    desk.succeed(*python, "leafscan", "launch", *alone, *TRAIN, *SHORT, cwd=project)
    run = project / "runs/image_classification"
    assert json.loads((run / "status.json").read_text())["outcome"] == "finished"
    assert json.loads((run / "run.json").read_text())["environment"]["WORLD_SIZE"] == "2"

    for wants in ([*TWO, "--num_processes", "2", *TRAIN], [*alone, "--preflight", *TRAIN]):
        refused = desk.run(*python, "leafscan", "launch", *wants, cwd=project)
        assert refused.returncode == 2
        (sentence,) = refused.stderr.splitlines()
        assert "need the package's folder cluster/, which is missing" in sentence
        assert refused.stdout == ""

    desk.succeed("make", "lint", cwd=project)
    tests = [*python, "pytest", "-q", "-m", "not slow and not gpu"]
    desk.succeed(*tests, "--collect-only", cwd=project)
    quick = [str(next((project / "tests").rglob(f"test_{name}.py"))) for name in QUICK]
    shown = desk.succeed(*tests, *quick, cwd=project)
    assert " passed" in shown
    print(shown)
