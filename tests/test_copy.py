"""The loop and a recipe in existing repositories, by hand (recipes/README.md) and by command."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks
from runs import quick
from shell import succeed
from test_generate import RENAMED, Desk, tree

REPOSITORY = Path(__file__).parents[1]
HOW_TO = (REPOSITORY / "recipes/README.md").read_text()
SHORT = " --epochs null --steps 3 --evaluation.every_steps null"
LAYOUTS = {"flat": "your_package", "nested": "src/your_package/vision"}
DOTTED = {"flat": "your_package", "nested": "your_package.vision"}
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


def make_repository(folder: Path, layout: str) -> tuple[Path, Path, dict[str, str]]:
    """Make a repository with a package; return both, and the environment for commands there."""
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
        "PACKAGE": DOTTED[layout],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(repository / "src" if layout == "nested" else repository),
    }
    return repository, package, environment


def bash(command: str, folder: Path, environment: dict[str, str]) -> str:
    return succeed("bash", "-ec", command, cwd=folder, env=environment)


def outcome(repository: Path, run: str) -> dict:
    return json.loads((repository / "runs" / run / "status.json").read_text())


@pytest.mark.slow
def test_copied_by_hand_the_loop_and_a_recipe_run(tmp_path: Path):
    repository, package, environment = make_repository(tmp_path, "flat")
    _, copying, launching = blocks(HOW_TO, "bash")
    bash(copying, REPOSITORY, environment)
    bash(launching.strip() + SHORT, repository, environment)
    run = repository / "runs/image_classification"
    assert outcome(repository, "image_classification")["outcome"] == "finished"
    assert "your_package.image_classification" in (run / "config.yaml").read_text()
    bash(copying, REPOSITORY, environment)
    assert "0 file(s) written" in copied("image_classification", package)

    # exactly the text that shows how an existing model and dataset become a recipe
    (package / "data.py").write_text(DATA)
    (package / "model.py").write_text(MODEL)
    own, others = blocks(HOW_TO, "python")
    (package / "own.py").write_text(own)
    (package / "others.py").write_text(others)
    (config,) = blocks(HOW_TO, "yaml")
    for name, path in {
        "own": "own.Own",
        "data": "others.OtherData",
        "model": "others.OtherModel",
    }.items():
        (repository / f"configs/{name}.yaml").write_text(config.replace("own.Own", path))
        run = f"python -m your_package.training.train --config configs/{name}.yaml"
        bash(run, repository, environment | {"ACCELERATE_USE_CPU": "true"})
        result = outcome(repository, name)["result"]
        assert result["validation/loss"] < 0.5, "by chance it were ln 3 = 1.1"


@pytest.mark.parametrize(("layout", "tools"), quick(1, [("nested", True), ("flat", False)]))
def test_by_hand_and_by_command_copy_the_same(tmp_path: Path, layout: str, tools: bool):
    _, copying, _ = blocks(HOW_TO, "bash")
    trees = []
    for way in ("hand", "command"):
        repository, package, environment = make_repository(tmp_path / way, layout)
        if way == "hand":
            if tools:
                copying = copying.replace("; do  # and", "")
                copying = copying.replace("tools/report\n", "tools/report; do\n")
            bash(copying, REPOSITORY, environment)
            files = tree(repository).items()
            assert [file for file, (content, _) in files if b"my_project" in content] == []
            bash(copying, REPOSITORY, environment)
            assert (repository / ".gitignore").read_text() == "\n/runs/\n", "once"
        else:
            shown = copied("image_classification", package, *(["--tools"] if tools else []))
            for need in ("accelerate", "torchvision"):  # of the loop, of the recipe
                assert re.search(rf'^add to your dependencies: .*"{need}>=[\d.]+"', shown, re.M)
        assert not any(path.is_symlink() for path in repository.rglob("*"))
        assert (package / "training/tools").exists() == tools
        files = tree(repository).items()
        trees.append({file: it for file, it in files if not Path(file).name.startswith(".")})
    assert trees[0] == trees[1]


def by_command(recipe: str, package: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", REPOSITORY / "recipes/copy_recipe.py", recipe, package, *flags],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip


def copied(recipe: str, package: Path, *flags: str) -> str:
    done = by_command(recipe, package, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(recipe: str, package: Path, *flags: str) -> str:
    """Run the command; it must write nothing."""
    above = package.parent.parent
    before = tree(above)
    done = by_command(recipe, package, *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert tree(above) == before
    return done.stderr


def as_if_older(package: Path, *files: str) -> None:
    """Change files as if an older version of the template had been copied."""
    path = package / "training/.copied.json"
    record = json.loads(path.read_text())
    repository = package.parent
    for file in files:
        (repository / file).write_text("# an older version\n")
        record["files"][file] = hashlib.sha256((repository / file).read_bytes()).hexdigest()
    path.write_text(json.dumps(record))


NAMED = [
    ("my_project", ["my_project/__init__.py"], "my_project", "", "segmentation.Segmentation"),
    ("src/company/pkg", [], "company.pkg", "PYTHONPATH=src ", "finetune.Finetune"),
    ("pkg", ["pkg/lib.py", "pkg/tests/__init__.py"], "pkg", "", "causal_lm.CausalLM"),
    ("p/lib", ["p/__init__.py", "p/lib/nets/__init__.py"], "p.lib", "", "embedding.Embedding"),
    ("my code/pkg", [], "pkg", "PYTHONPATH='my code' ", "image_classification.Image"),
]


@pytest.mark.parametrize(("folder", "files", "dotted", "root", "recipe"), quick(2, NAMED))
def test_the_package_is_named_as_it_is_imported(tmp_path, folder, files, dotted, root, recipe):
    repository = tmp_path / "their repo"
    (repository / folder).mkdir(parents=True)
    for file in [".git", *files]:
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).touch()
    name, _, _ = recipe.partition(".")
    shown = copied(name, repository / folder)
    assert "0 file(s) written" in copied(name, repository / folder)
    config = (repository / f"configs/{name}.yaml").read_text()
    assert re.search(rf"class_path: {dotted}.{recipe}", config)
    last = shown.splitlines()[-1]
    assert last.startswith(f"{root}accelerate launch ")
    assert f" -m {dotted}.training.train " in last


@pytest.mark.slow
def test_the_line_that_is_printed_trains(tmp_path: Path):
    repository, package, environment = make_repository(tmp_path, "nested")
    done = by_command("causal_lm", package)
    line = done.stdout.strip().splitlines()[-1]
    del environment["PYTHONPATH"]
    (repository / "texts").mkdir()
    (repository / "texts/one.txt").write_text("to be or not to be " * 2000)
    data = " --recipe.init_args.data files --recipe.init_args.data_path texts"
    size = " --batches.global_batch_size 4 --batches.micro_batch_size 2"
    # a single document leaves none for validation
    size += " --evaluation.best_metric null --run_name causal_lm"
    shown = bash(line + SHORT + data + size, repository, environment)
    assert "finished, all steps done: weights in runs/causal_lm/export" in shown
    assert outcome(repository, "causal_lm")["outcome"] == "finished"
    copied("causal_lm", package, "--tools")
    doctor = f"PYTHONPATH=src python -m {DOTTED['nested']}.training doctor runs/causal_lm"
    assert "finished" in bash(doctor, repository, environment)


def test_a_second_call_updates_what_is_as_it_was_copied(tmp_path: Path):
    repository, package, _ = make_repository(tmp_path, "flat")
    ignored = repository / ".gitignore"
    ignored.write_bytes(b"\xe9t\xe9/\r\nmy_runs/\r\n#runs/\r\n")
    copied("image_classification", package)
    copied("image_classification", package, "--tools")
    assert "0 file(s) written" in copied("image_classification", package)
    assert ignored.read_bytes() == b"\xe9t\xe9/\r\nmy_runs/\r\n#runs/\r\n/runs/\r\n", "once"
    recipe, module = package / "image_classification.py", package / "training/optim.py"
    config = "configs/image_classification.yaml"
    loop = [f"your_package/training/{name}.py" for name in ("optim", "gone", "loading/gone")]
    as_if_older(package, *loop, "your_package/training/tools/planner.py", config)
    recipe.write_text("# mine now\n")
    shown = copied("image_classification", package)
    assert "3 file(s) written" in shown
    assert "kept, since they are yours: your_package/image_classification.py\n" in shown
    assert f"no longer part of the loop: {', '.join(loop[1:])}\n" in shown
    assert "an older version" not in module.read_text() + (repository / config).read_text()
    assert recipe.read_text() == "# mine now\n"
    shutil.rmtree(package / "training/tools")  # the repository no longer wants it
    assert "0 file(s) written" in copied("image_classification", package)


def test_a_file_that_was_deleted_is_not_copied_again(tmp_path: Path):
    """Of the loop: a module and a room; an accelerate config; the example and its config."""
    repository, package, _ = make_repository(tmp_path, "flat")
    copied("causal_lm", package, "--tools")
    deleted = [
        *("your_package/training/ema.py", "your_package/training/mirror/store.py"),
        *("your_package/training/tools/runs.py", "accelerate_configs/cpu.yaml"),
        *("your_package/causal_lm.py", "configs/causal_lm.yaml"),
    ]
    for file in deleted:
        (repository / file).unlink()
    as_if_older(package, "your_package/training/optim.py")
    for recipe, written in (("causal_lm", 1), ("segmentation", 2), ("causal_lm", 0)):
        shown = copied(recipe, package)
        assert f"{written} file(s) written" in shown
        assert "left out, since you have deleted them (" in shown
        wanted = deleted if recipe == "causal_lm" else deleted[:-2]
        assert all(file in shown for file in wanted)
        assert not any((repository / file).exists() for file in deleted)
    record = package / "training/.copied.json"
    lines = record.read_text().splitlines()
    record.write_text("\n".join(line for line in lines if "training/ema.py" not in line))
    assert "1 file(s) written" in copied("causal_lm", package)
    assert (package / "training/ema.py").exists()


def test_an_edited_module_of_the_loop_is_kept_until_both_sides_change(tmp_path: Path):
    _, package, _ = make_repository(tmp_path, "flat")
    copied("causal_lm", package)
    loader, optim = package / "training/loading/loader.py", package / "training/optim.py"
    loader.write_text(loader.read_text() + "# mine\n")
    optim.write_bytes(optim.read_bytes().replace(b"\n", b"\r\n"))
    shown = copied("segmentation", package)
    assert "2 file(s) written" in shown
    assert "kept, since they are yours: your_package/training/loading/loader.py\n" in shown

    as_if_older(
        package, "your_package/training/loading/loader.py", "your_package/training/optim.py"
    )
    loader.write_text("# an older version, with something of mine\n")
    shown = refused("causal_lm", package)
    assert "exist and differ: your_package/training/loading/loader.py;" in shown
    assert "updated: your_package/training/optim.py\n" in copied("causal_lm", package, "--keep")
    assert "of mine" in loader.read_text()
    assert "0 file(s) written" in copied("causal_lm", package)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("your_package/training/optim.py", ""),
        ("your_package/causal_lm.py", ""),
        ("accelerate_configs/cpu.yaml", ""),
        # an import has the same name, so one would hide the other
        ("your_package/training.py", ""),
        ("your_package/training/loading/loops.py", ""),
        ("your_package/training/loading/loader/loops.py", "your_package/training/loading/loader"),
        ("your_package/causal_lm/model.py", "your_package/causal_lm"),
    ],
)
def test_what_stands_in_the_way_is_named(tmp_path: Path, file: str, named: str):
    repository, package, _ = make_repository(tmp_path, "flat")
    (repository / file).parent.mkdir(parents=True, exist_ok=True)
    (repository / file).write_text("theirs")
    shown = refused("causal_lm", package)
    assert f"nothing was copied, since these exist and differ: {named or file};" in shown
    assert shown == refused("causal_lm", package, "--keep")


def test_nothing_is_written_through_a_link(tmp_path: Path):
    repository, package, _ = make_repository(tmp_path, "flat")
    (package / "embedding.py").symlink_to(tmp_path / "elsewhere.py")
    assert "exist and differ: your_package/embedding.py;" in refused("embedding", package)
    assert not (tmp_path / "elsewhere.py").exists()
    (package / "embedding.py").unlink()
    copied("embedding", package)
    as_if_older(package, "your_package/training/optim.py")
    (package / "training/optim.py").rename(tmp_path / "elsewhere.py")
    (package / "training/optim.py").symlink_to(tmp_path / "elsewhere.py")
    assert "exist and differ: your_package/training/optim.py;" in refused("embedding", package)
    (repository / "link").symlink_to(package)
    refused("embedding", repository / "link")


@pytest.mark.parametrize(
    ("recipe", "folder", "sentence"),
    [
        ("cats", "your_package", "there is no recipe cats; the recipes are causal_lm, "),
        ("causal_lm", "nowhere", "nowhere is not a folder"),
        ("causal_lm", "my-things", "my-things cannot be imported as a package"),
        ("causal_lm", "", "their-repo is a repository (.git); give the folder of its package"),
        ("causal_lm", "src", "src/one"),
        ("causal_lm", "your_package", ".copied.json is damaged; fix it, or remove it"),
    ],
)
def test_what_cannot_be_copied_is_refused(tmp_path, recipe, folder, sentence):
    repository, package, _ = make_repository(tmp_path, "flat")
    (repository / "my-things").mkdir()
    (repository / "src/one").mkdir(parents=True)
    (repository / "src/one/__init__.py").touch()
    if "damaged" in sentence:
        copied(recipe, package)
        (package / "training/.copied.json").write_text("<<<<<<< HEAD")
    assert sentence in refused(recipe, repository / folder)


def test_a_generated_project_takes_another_recipe(tmp_path: Path, template: Path):
    project = Desk(tmp_path).generate(template, **RENAMED)
    package = project / "src/leafscan"
    shown = copied("causal_lm", package)
    assert "2 file(s) written" in shown
    assert "another version" not in shown
    assert (package / "recipes/causal_lm.py").is_file()
    config = (project / "configs/causal_lm.yaml").read_text()
    assert "class_path: leafscan.recipes.causal_lm.CausalLM" in config
    assert "-m leafscan.train --config configs/causal_lm.yaml" in shown
    assert "has a loop of its own, which is not copied" in refused("causal_lm", package, "--tools")
    assert not (package / "training").exists()
    for file in (package / "recipe.py", project / "configs/causal_lm.yaml"):
        file.write_text(file.read_text() + "# mine\n")
    shown = copied("causal_lm", package)
    assert "its recipe.py is from another version" in shown
    assert "kept, since they are yours: configs/causal_lm.yaml\n" in shown
