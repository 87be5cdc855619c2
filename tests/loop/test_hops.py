"""How many functions of the package are called between the command and the loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import TESTS

PROJECT = TESTS.parent
PACKAGE = PROJECT / "src/my_project"
MOST = 8
# Trains nothing: in place of train.main, each process notes the functions that have called it.
CODE = """
import json, sys, traceback
from pathlib import Path
import my_project.train
from my_project import __main__

def note(config):
    calls = [[frame.filename, frame.name] for frame in traceback.extract_stack()]
    Path(sys.argv[-1]).write_text(json.dumps(calls))
    return 0

noted, *words = sys.argv[1:]
my_project.train.main = note
sys.argv = ["my_project", *words, "--runs_folder", noted]
__main__.main()
"""


@pytest.mark.slow
def test_the_command_reaches_the_loop_in_few_functions(tmp_path: Path):
    pytest.importorskip("my_project.launching")
    runs = tmp_path / "runs"
    (tmp_path / "tiny.yaml").write_text(
        "recipe: {class_path: ragged.Ragged}\n"
        "batches: {global_batch_size: 4, micro_batch_size: 2, workers: 0}\n"
        "steps: 2\n"
    )
    code = CODE.replace("sys.argv[-1]", repr(str(tmp_path / "calls.json")))
    where = PROJECT / "accelerate_configs/cpu_2_processes.yaml"
    subprocess.run(
        [sys.executable, "-c", code, runs, "train", tmp_path / "tiny.yaml", "--where", where],
        env=os.environ | {"PYTHONPATH": f"{PROJECT / 'src'}:{TESTS}"},
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    calls = json.loads((tmp_path / "calls.json").read_text())
    found = [
        f"{Path(file).stem}.{name}" for file, name in calls if Path(file).is_relative_to(PACKAGE)
    ]
    functions = [name for name in found if not name.endswith("<module>")]
    assert functions[0] == "__main__.main"
    assert len(functions) <= MOST, functions
