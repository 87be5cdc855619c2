"""make test-gpu, as far as it can be run without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_without_a_gpu_it_says_so_in_one_sentence():
    done = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks/gpu.py"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: torch finds no NVIDIA GPU here; make test-all needs none.\n"


def test_a_report_becomes_a_table_of_every_test(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_it_holds(): pass\n"
        "def test_it_does_not(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs two GPUs')\n"
        "def test_of_two(): pass\n"
    )
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", tmp_path / "test_some.py"],
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("gpu", REPOSITORY / "benchmarks/gpu.py")
    assert spec
    assert spec.loader
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    assert gpu.table(report).splitlines() == [
        "| test | outcome | seconds |",
        "|---|---|---|",
        "| it holds | passed | 0 |",
        "| it does not | **failed** | 0 |",
        "| of two | skipped: needs two GPUs | 0 |",
    ]
