"""`runs --reproduce`: its commands, in an empty folder, give the same weights, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from documents import PROJECT
from my_project.config import to_yaml
from my_project.provenance import Kept
from my_project.run_files import RunInfo
from my_project.tools import reproduce as reproduce_module
from ragged import Ragged
from runs import make_config, train

TESTS = Path(__file__).resolve().parents[1]


def run_command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
    environment = {"HOME": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1"} | variables
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def make_project(folder: Path, in_git: bool) -> Path:
    """Make a project in a subfolder; if it is in git, change it after its commit."""
    project = folder / "large/team"
    for name in ("my_project", "ragged.py"):
        source = PROJECT / "src" / name if name == "my_project" else PROJECT / "tests" / name
        target = project / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source.resolve(), target)
    shutil.copytree(PROJECT / "accelerate_configs", project / "accelerate_configs")
    (project.parent / ".gitignore").write_text("runs/\n__pycache__/\n")
    (project / "tiny.yaml").write_text(to_yaml(make_config(Path("runs"), Ragged(dropout=0.1))))
    who = ("-c", "user.name=me", "-c", "user.email=me@here")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]) if in_git else ():
        run_command(project.parent, "git", *words)
    recipe = project / "src/ragged.py"
    changed = recipe.read_text().replace('(data_info["features"], 8)', '(data_info["features"], 9)')
    changed = changed.replace("nn.Linear(8, 1)", "nn.Linear(own.WIDTH, 1)")
    changed = changed.replace("import torch\n", "import torch\nfrom my_project import own\n", 1)
    assert changed.count("own") == 2
    recipe.write_text(changed)
    (project / "src/my_project/own.py").write_text("WIDTH = 9\n")
    return project


PYTHON = sys.executable
REPRODUCE = (PYTHON, "-m", "my_project", "runs", "--reproduce")


@pytest.mark.parametrize(
    ("in_git", "train_as", "in_environment"),
    [
        (True, "my_project.train --config tiny.yaml", False),
        pytest.param(True, "my_project train tiny.yaml --num_processes 2", True,
                     marks=pytest.mark.slow),
        pytest.param(False, "my_project train tiny.yaml --where cpu", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_commands_give_the_same_weights(tmp_path, in_git, train_as, in_environment):
    project = make_project(tmp_path, in_git)
    run_command(project, PYTHON, "-m", *train_as.split(), PYTHONPATH="src")
    run = tmp_path / "kept"
    shutil.move(next((project / "runs").glob("[!.]*")), run)
    if in_git:  # remove what was not committed
        run_command(project.parent, "git", "clean", "-fdxq")
        run_command(project.parent, "git", "checkout", "-q", ".")
    else:
        shutil.rmtree(project.parent)
    source = str(PROJECT / "src")
    script = run_command(tmp_path, *REPRODUCE, str(run), PYTHONPATH=source).stdout
    assert "WARNING" not in script
    site = sysconfig.get_path("purelib")
    venv = f"python{sys.version_info[0]}.{sys.version_info[1]} -m venv .venv\n"
    assert venv in script
    if in_environment:  # a new one, which sees the packages that are here; pip checks versions
        inside = f".venv/lib/python3.{sys.version_info[1]}/site-packages"
        beside = f"echo {site} > {inside}/here.pth\nrm -rf {inside}/setuptools*\n"
        script = script.replace(venv, venv + beside)
    else:
        for line in script.splitlines():
            if line.startswith(("pip install", ". .venv")) or f"{line}\n" == venv:
                script = script.replace(f"{line}\n", "")
    empty = tmp_path / "empty"
    empty.mkdir()
    run_command(empty, "bash", "-euc", script, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    (again,) = empty.rglob("kept-again")
    first, second = (folder / "export/model.safetensors" for folder in (run, again))
    assert first.read_bytes() == second.read_bytes()


def reproduce(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*REPRODUCE, str(run)], capture_output=True, text=True, check=False, cwd=run.parent
    )


def test_what_is_masked_missing_or_from_a_stranger_is_said(tmp_path):
    config = make_config(tmp_path, steps=2)
    assert train(config) == 0
    name = json.loads((config.folder / "run.json").read_text())["launch"]
    path = config.folder / "starts" / name / "start.json"
    kept = json.loads(path.read_text())
    worse = kept | {"masked": ["a.py"], "not_kept": "it\nrm -rf ~", "search_path": ["$(touch x)"]}
    path.write_text(json.dumps(worse | {"files": {"sources.zip": "0"}, "repository": "--x;y"}))
    said = reproduce(config.folder).stdout.splitlines()
    assert "# WARNING: a secret in a.py is masked (***): put it back before the run" in said
    assert "# WARNING: sources.zip is missing or not what the start wrote" in said
    assert not [line for line in said if line.startswith("rm")]
    assert "export PYTHONPATH=$PWD/'$(touch x)'" in said
    for damaged in (kept | {"package": "a; b"}, kept | {"commit": "HEAD"}, {}):
        path.write_text(json.dumps(damaged))
        refused = reproduce(config.folder)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert len(refused.stderr.splitlines()) == 1


def commands(kept: dict[str, Any], **info: Any) -> list[str]:
    """Return the commands of a run in the folder runs/a."""
    start = Kept(code="", python="3.13.0+", **kept)
    lines = reproduce_module.code_lines(start, Path("/s"), "a-code")
    return [*lines, *reproduce_module.run_lines(start, RunInfo(**info), Path("/runs/a"))]


def test_submodules_in_submodules_are_updated_in_these():
    said = commands({"commit": "1" * 40, "submodules": {"a": "2" * 40, "a/b c": "3" * 40}})
    assert "git -C . submodule --quiet update --init -- a" in said
    assert "git -C a submodule --quiet update --init -- 'b c'" in said


def test_a_repository_that_is_gone_and_had_no_remote_is_said(tmp_path):
    said = commands({"commit": "1" * 40, "repository": str(tmp_path / "gone")})
    assert any(text.startswith("# WARNING: this repository is not here") for text in said)
    assert f"git clone --quiet --no-checkout -- {tmp_path}/gone a-code" in said


@pytest.mark.parametrize(
    ("launcher", "told", "command"),
    [
        (
            "/bin/python /bin/accelerate launch --machine_rank 0 -m my_project.train --config a",
            "run this on each host, with its own --machine_rank",
            "accelerate launch --machine_rank 0 -m my_project.train",
        ),
        (
            "/bin/python -m my_project launch --config_file a -m my_project.train --config a",
            "run this on each host",
            "python -m my_project launch --config_file a -m my_project.train",
        ),
        (
            "/bin/python /env/bin/my-project launch --config_file a -m my_project.train --config a",
            "run this on each host",
            "python -m my_project launch --config_file a -m my_project.train",
        ),
        (
            "",
            "run this on each host",
            "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint"
            " gpu-a:29500 -m my_project.train",
        ),
    ],
)
def test_a_run_on_several_hosts_is_launched_in_the_same_way(launcher, told, command):
    hosts = ("gpu-a",) * 8 + ("gpu-b",) * 8
    *_, note, last = commands({}, launcher=tuple(launcher.split()), hosts=hosts)
    assert note == f"# 16 processes ran on 2 hosts: {told}"
    assert last == f"{command} --config /runs/a/config.yaml --run_name a-again"


def test_a_python_that_was_built_from_its_repository_is_no_damage(tmp_path, capsys):
    config = make_config(tmp_path, steps=2)
    assert train(config) == 0
    name = json.loads((config.folder / "run.json").read_text())["launch"]
    path = config.folder / "starts" / name / "start.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "3.13.0+"}))
    reproduce_module.print_commands(config.folder)
    assert "python3.13 -m venv .venv" in capsys.readouterr().out


def test_a_start_with_the_code_of_an_earlier_one_is_brought_back_by_that(tmp_path):
    config = make_config(tmp_path, steps=2)
    assert train(config) == 0
    path = config.folder / "run.json"
    about = json.loads(path.read_text())
    start = config.folder / "starts" / about["launch"]
    path.write_text(json.dumps(about | {"launch": "later.0"}))
    assert reproduce(config.folder).returncode == 2
    (start / "same_code.txt").write_text("other.0\nlater.0\n")
    assert f"# the code of the start {start.name}\n" in reproduce(config.folder).stdout
