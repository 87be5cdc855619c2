"""The loop and a recipe in repositories that exist, by hand (recipes/README.md) and by command."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SHORT = " --epochs null --steps 3 --evaluation.every_steps null"
LAYOUTS = {"flat": "your_package", "src": "src/your_package", "nested": "your_package/vision"}
DATA = """
import torch

class Rings(torch.utils.data.Dataset):
    def __init__(self, count, rings, seed):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % rings
        angle = torch.rand(count, generator=draw) * 6.2832
        radius = self.labels + 1 + 0.1 * torch.randn(count, generator=draw)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, index):
        return self.points[index], self.labels[index]
"""
MODEL = """
from torch import nn

class Classifier(nn.Sequential):
    def __init__(self, width, classes):
        super().__init__(nn.Linear(2, width), nn.GELU(), nn.Linear(width, classes))
"""


def blocks(language: str = "bash") -> list[str]:
    text = (REPOSITORY / "recipes/README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def make_repository(folder: Path, layout: str) -> tuple[Path, Path, dict[str, str]]:
    """Make a repository with a package; return them and the environment to work there."""
    repository = folder / "their-repo"
    package = repository / LAYOUTS[layout]
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Their own code."""\n')
    if layout == "nested":
        (package.parent / "__init__.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    environment = dict(os.environ) | {
        "REPO": str(repository),
        "FOLDER": str(package),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(repository / "src" if layout == "src" else repository),
    }
    return repository, package, environment


def call(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def succeed(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = call(command, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outcome(repository: Path, run: str) -> dict:
    return json.loads((repository / "runs" / run / "status.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copied_by_hand_the_loop_and_a_recipe_run(tmp_path: Path, layout: str):
    repository, package, environment = make_repository(tmp_path, layout)
    _, copying, launching = blocks()
    dotted = "your_package.vision" if layout == "nested" else "your_package"
    copying = copying.replace("/your_package/", f"/{dotted}/")
    launching = launching.replace("-m your_package.", f"-m {dotted}.")
    succeed(copying, REPOSITORY, environment)
    succeed(launching.strip() + SHORT, repository, environment)
    run = repository / "runs/image_classification"
    assert outcome(repository, "image_classification")["outcome"] == "finished"
    assert f"{dotted}.image_classification" in (run / "config.yaml").read_text()
    assert "my_project" not in "".join(p.read_text() for p in package.rglob("*.yaml"))
    if layout == "flat":
        own_model_and_data(repository, package, environment)


def own_model_and_data(repository: Path, package: Path, environment: dict[str, str]) -> None:
    """Run exactly the text that shows how a model and data set of one's own become a recipe."""
    (package / "data.py").write_text(DATA)
    (package / "model.py").write_text(MODEL)
    own, others = blocks("python")
    (package / "own.py").write_text(own)
    (package / "others.py").write_text(others)
    (config,) = blocks("yaml")
    for name, path in {
        "own": "own.Own",
        "data": "others.OtherData",
        "model": "others.OtherModel",
    }.items():
        text = config.replace("own.Own", path)
        text = text.replace("rings: 3", "rings: 2") if name == "data" else text
        (repository / f"configs/{name}.yaml").write_text(text)
        run = f"python -m your_package.training.train --config configs/{name}.yaml"
        succeed(run, repository, environment | {"ACCELERATE_USE_CPU": "true"})
        result = outcome(repository, name)["result"]
        assert result["validation/loss"] < 0.5, "by chance it were ln 3 = 1.1"


def by_command(recipe: str, package: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", REPOSITORY / "recipes/copy_recipe.py", recipe, package],
        capture_output=True, text=True, check=False, cwd=package,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copied_by_command_everything_has_its_place(tmp_path: Path, layout: str):
    repository, package, _ = make_repository(tmp_path, layout)
    done = by_command("causal_lm", package)
    assert done.returncode == 0, done.stderr
    dotted = "your_package.vision" if layout == "nested" else "your_package"
    assert (package / "training/train.py").is_file()
    assert (package / "causal_lm.py").is_file()
    assert (repository / "accelerate_configs/multi_node.yaml").is_file()
    config = (repository / "configs/causal_lm.yaml").read_text()
    assert f"class_path: {dotted}.causal_lm.CausalLM" in config
    assert '"tokenizers>=0.20"' in done.stdout
    assert '"accelerate>=1.6"' in done.stdout
    assert f"-m {dotted}.training.train --config configs/causal_lm.yaml" in done.stdout
    left = [p for p in repository.rglob("*") if p.is_file() and "my_project" in p.read_text()]
    assert left == []
    assert not any(path.is_symlink() for path in repository.rglob("*"))


@pytest.mark.slow
def test_the_line_that_is_printed_trains(tmp_path: Path):
    repository, package, environment = make_repository(tmp_path, "src")
    done = by_command("causal_lm", package)
    line = done.stdout.strip().splitlines()[-1]
    del environment["PYTHONPATH"]
    (repository / "texts").mkdir()
    (repository / "texts/one.txt").write_text("to be or not to be " * 2000)
    data = " --recipe.init_args.data files --recipe.init_args.data_path texts"
    size = " --batches.global_batch_size 4 --batches.micro_batch_size 2"
    size += " --evaluation.best_metric null"  # one document leaves none for validation
    succeed(line + SHORT + data + size, repository, environment)
    assert outcome(repository, "causal_lm")["outcome"] == "finished"


def test_a_second_call_updates_the_loop_and_leaves_what_is_theirs(tmp_path: Path):
    repository, package, _ = make_repository(tmp_path, "flat")
    by_command("image_classification", package)
    recipe, config = package / "image_classification.py", repository / "configs/causal_lm.yaml"
    recipe.write_text("# mine now\n")
    record = package / "training/.copied.json"
    old = json.loads(record.read_text())
    module = package / "training/optim.py"
    module.write_text("# as an older version was copied\n")
    old["your_package/training/optim.py"] = hashlib.sha256(module.read_bytes()).hexdigest()
    record.write_text(json.dumps(old))
    done = by_command("image_classification", package)
    assert done.returncode == 0, done.stderr
    assert "1 file(s) written" in done.stdout
    assert "as an older version" not in module.read_text()
    assert recipe.read_text() == "# mine now\n"
    assert "0 file(s) written" in by_command("image_classification", package).stdout
    assert "2 file(s) written" in by_command("causal_lm", package).stdout
    assert config.is_file()


@pytest.mark.parametrize(
    "file",
    [
        "your_package/training/optim.py",
        "your_package/causal_lm.py",
        "configs/causal_lm.yaml",
        "accelerate_configs/cpu.yaml",
    ],
)
def test_nothing_that_exists_is_overwritten(tmp_path: Path, file: str):
    repository, package, _ = make_repository(tmp_path, "flat")
    (repository / file).parent.mkdir(parents=True, exist_ok=True)
    (repository / file).write_text("theirs")
    before = sorted(repository.rglob("*"))
    done = by_command("causal_lm", package)
    assert done.returncode == 2
    assert f"nothing was copied, since these exist and differ: {file};" in done.stderr
    assert sorted(repository.rglob("*")) == before
    assert (repository / file).read_text() == "theirs"


def test_a_changed_file_of_the_loop_is_named_by_a_second_call(tmp_path: Path):
    _, package, _ = make_repository(tmp_path, "flat")
    by_command("causal_lm", package)
    with (package / "training/train.py").open("a") as train:
        train.write("# mine\n")
    done = by_command("causal_lm", package)
    assert done.returncode == 2
    assert "exist and differ: your_package/training/train.py;" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "folder", "sentence"),
    [
        ("cats", "your_package", "there is no recipe cats; there are causal_lm, "),
        ("causal_lm", "nowhere", "nowhere is no folder"),
        ("causal_lm", "my-things", "my-things cannot be imported as a package"),
    ],
)
def test_what_cannot_be_copied_is_refused(tmp_path, recipe, folder, sentence):
    repository, package, _ = make_repository(tmp_path, "flat")
    (repository / "my-things").mkdir()
    done = by_command(recipe, package) if folder == "your_package" else subprocess.run(
        [sys.executable, REPOSITORY / "recipes/copy_recipe.py", recipe, repository / folder],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_recipes_are_listed():
    shown = subprocess.run(
        [sys.executable, REPOSITORY / "recipes/copy_recipe.py", "--list"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    listed = {line.split()[0] for line in shown.splitlines()}
    there = {path.stem for path in (REPOSITORY / "recipes").glob("*.py")} - {"copy_recipe"}
    assert listed == there
    assert "causal_lm               Pretrain a GPT on any text" in shown


@pytest.mark.slow
def test_every_recipe_and_its_config_find_each_other(tmp_path: Path):
    repository, package, environment = make_repository(tmp_path, "flat")
    for recipe in sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")):
        done = by_command(recipe, package)
        assert done.returncode == 0, done.stderr
        parse = f"parse(['--config', 'configs/{recipe}.yaml'])"
        script = f"from your_package.training.config import parse; print({parse}.recipe)"
        shown = succeed(f'python -c "{script}"', repository, environment)
        assert re.match(r"\w+\(", shown)


def test_a_generated_project_takes_another_recipe(tmp_path: Path):
    project = tmp_path / "leaf-scanner"
    package = project / "src/leafscan"
    (package / "recipes").mkdir(parents=True)
    for name in ("__init__.py", "train.py", "recipe.py", "recipes/__init__.py"):
        (package / name).write_text("")
    (project / "pyproject.toml").write_text("")
    done = by_command("causal_lm", package)
    assert done.returncode == 0, done.stderr
    assert "2 file(s) written" in done.stdout
    assert (package / "recipes/causal_lm.py").is_file()
    config = (project / "configs/causal_lm.yaml").read_text()
    assert "class_path: leafscan.recipes.causal_lm.CausalLM" in config
    assert "-m leafscan.train --config configs/causal_lm.yaml" in done.stdout
    assert not (package / "training").exists()
