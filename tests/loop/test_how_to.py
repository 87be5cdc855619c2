"""The recipe on one page and the how-to pages: their code runs unchanged, and does what it says.

A new page needs an entry in CHECKS: what shows that its code works.
"""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from documents import PROJECT, blocks, commands, predict_as_typed, text_of, train_as_typed
from my_project.launching.summary import print_finished
from my_project.process import PREEMPTED
from my_project.run_files import read_status
from runs import records, status, weights
from safetensors.torch import load_file
from test_fsdp_on_cpu import ask_for_fsdp
from world import run_world

SOURCE = PROJECT / "src/my_project"
PAGE = "docs/your-own-recipe.md"
OWN = text_of(PAGE, "## A recipe on one page")
RECIPE = blocks(OWN, "python")[0]
SHOWN = text_of(PAGE, "## What a run has learned")
CONFIG = blocks(OWN, "yaml")[0]
HOW_TO = sorted(path.stem for path in (PROJECT / "docs/how-to").glob("*.md"))
CONSTANT = "--optim.schedule constant"  # so that fewer steps are a part of the same curve
CLASS = r"(?m)^class (\w+)\((?:Table|FromWeights)\)"


def page_of(name: str) -> str:
    return text_of(f"docs/how-to/{name}.md")


def files_of(name: str = "") -> dict[str, str]:
    """Return the files that a page asks for: below Table, or a module that it names."""
    files = {"recipes/table.py": RECIPE}
    page = page_of(name) if name else ""
    module = re.search(r"in\s`src/my_project/(\w+\.py)`:", page)
    if module:
        files[module[1]] = blocks(page, "python")[0]
    elif re.search(CLASS, page):
        imports = re.findall(r"`((?:import|from) [\w. ]+)`", page)
        head = RECIPE.replace("import csv\n", "\n".join(["import csv", *imports, ""]))
        files["recipes/table.py"] = f"{head}\n\n{blocks(page, 'python')[0]}"
    return files


def use(folder: Path) -> None:
    """Let modules in the folder be modules of the package, and train.py there take its place."""
    import my_project.recipes

    for package, path in ((my_project, folder), (my_project.recipes, folder / "recipes")):
        package.__path__ = [*package.__path__, str(path)]
    if (folder / "src/my_project/train.py").exists():
        path = folder / "src/my_project/train.py"
        spec: Any = importlib.util.spec_from_file_location("my_project.train", path)
        module = sys.modules["my_project.train"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    os.chdir(folder)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the recipe of the page and its config; `own(name)` adds those of a how-to."""
    import my_project.recipes

    monkeypatch.chdir(tmp_path)
    for package in (my_project, my_project.recipes):
        monkeypatch.setattr(package, "__path__", package.__path__)
    monkeypatch.delitem(sys.modules, "my_project.recipes.table", raising=False)
    monkeypatch.delattr(my_project.recipes, "table", raising=False)

    def write(name: str = "") -> Path:
        for folder in ("configs", "recipes"):
            (tmp_path / folder).mkdir()
        (tmp_path / "configs/table.yaml").write_text(CONFIG)
        for file, text in files_of(name).items():
            (tmp_path / file).write_text(text)
        use(tmp_path)
        return tmp_path

    return write


def table() -> Any:
    return importlib.import_module("my_project.recipes.table")


def command(name: str, more: str = "") -> str:
    recipe = f"--recipe my_project.recipes.table.{name} --run_name {name}"
    return f"configs/table.yaml {recipe} --epochs null --steps 60 {more}"


def train_example(name: str, more: str = "") -> Any:
    return train_as_typed(f"python -m my_project train {command(name, more)}")


def train_there(folder: Path, words: str, sharded: bool) -> None:
    """Train in this process of a world."""
    use(folder)
    if sharded:
        ask_for_fsdp()
    train_as_typed(f"python -m my_project train {words}")


def train_in(
    processes: int, name: str, more: str, sharded: bool = False, runs: str = "runs"
) -> Path:
    """Train in processes of their own, with the same micro-batches; return the run folder."""
    run = Path(runs) / f"{name}_{processes}{'_sharded' * sharded}"
    words = f"{more} --batches.micro_batch_size 16 --telemetry.every_steps 1"
    words += f" --runs_folder {runs} --run_name {run.name}"
    run_world(processes, train_there, Path.cwd(), command(name, words), sharded)
    assert len(json.loads((run / "run.json").read_text())["hosts"]) == processes
    return run


def assert_resumes(whole: Path, processes: int, name: str, more: str, sharded=False) -> None:
    """Train the same again, in two starts, and compare the weights to the bit."""
    train_in(processes, name, f"{more} --steps 25", sharded, "resumed")
    resumed = train_in(processes, name, more, sharded, "resumed")
    ours, theirs = weights(resumed / "export"), weights(whole / "export")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def curve_of(run: Path) -> torch.Tensor:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([record["loss"] for record in lines if "loss" in record])


# ---- what shows that a page works ----------------------------------------------------------------
def check_class_weights() -> None:
    recipe = table().Weighted()
    model = recipe.build_model({"features": 2, "classes": ["lily", "rose"]})
    x, y = torch.randn(9, 2), torch.arange(9) % 2
    loss_sum, items = recipe.loss(model, (x, y), 0)
    mean = torch.nn.functional.cross_entropy(model(x), y, weight=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(loss_sum / items, mean)
    assert "class_weights" not in weights(train_example("Weighted").folder / "export")


def check_freeze_layers() -> None:
    given = train_example("Frozen", "--steps 1 --optim.lr 0").folder
    frozen = train_example("Frozen", "--run_name frozen").folder
    before, after = weights(given / "export"), weights(frozen / "export")
    assert before["0.0.weight"].equal(after["0.0.weight"])
    assert not before["1.weight"].equal(after["1.weight"])
    taught = train_example("Distilled")
    assert "0.teacher.0.weight" in weights(taught.folder / "export")
    losses = [record["loss"] for record in records(taught)]
    assert losses[-1] < losses[0]
    model = table().Distilled().build_model({"features": 2, "classes": ["lily", "rose"]}).train()
    assert model[0].training
    assert not any(module.training for module in model[0].teacher.modules())


def check_hub() -> None:
    upload, download, predict = commands(page_of("hub"))
    for line in (upload, download):
        _, *words = line.split()
        hf = str(Path(sys.executable).with_name("hf"))
        shown = subprocess.run([hf, words[0], "--help"], capture_output=True, text=True, check=True)
        assert all(word in shown.stdout for word in words if word.startswith("--"))
    run = train_as_typed("python -m my_project train configs/table.yaml")
    shutil.copytree(run.folder / "export", "downloaded")
    assert predict_as_typed(predict) in ("lily\n", "rose\n")


def check_huggingface_stream() -> None:
    Path("data/flowers").mkdir(parents=True)
    rows = [",".join(map(str, row)) for row in table().Table().rows()]
    for file in range(6):  # of unequal length
        lines = ["petal,sepal,kind", *rows[file * 20 : (file + 1) * 20 + file]]
        Path(f"data/flowers/{file}.csv").write_text("\n".join(lines) + "\n")
    how = 2, "Streamed", CONSTANT
    whole = train_in(*how)
    assert_resumes(whole, *how)
    torch.testing.assert_close(curve_of(train_in(1, *how[1:])), curve_of(whole))


def check_image_at_evaluations() -> None:
    run = train_example("WithPicture")
    assert records(run, "pictures")[-1]["pictures"][0].endswith("/plane.png")
    shown = predict_as_typed(f"python -m my_project predict {run.folder}")
    assert shown.endswith("/plane.png\n")


def check_lion() -> None:
    check_optimizer("--optim.class_path my_project.lion.Lion --optim.lr 1e-2", 1e-5)
    from my_project import lion  # pyright: ignore[reportAttributeAccessIssue]

    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = lion.Lion([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    for gradient in ([4.0, -4.0], [-3.0, 5.0], [0.1, -0.6]):  # averages 1, -1; then 0, 0.5
        weight.grad = torch.tensor(gradient)
        optimizer.step()  # by the signs +, -; -, +; +, -
    torch.testing.assert_close(weight.data, torch.tensor([0.762125, -0.762125]))


def check_mlflow() -> None:
    mlflow = pytest.importorskip("mlflow")
    run = train_as_typed(commands(page_of("mlflow"))[1], "--epochs null --steps 5")
    found = mlflow.search_runs(search_all_experiments=True)
    assert [*found["tags.mlflow.runName"]] == [run.run_name]
    assert Path("runs/mlflow.db").is_file()
    assert not Path("mlflow.db").exists()


def check_muon() -> None:
    check_optimizer("--optim.class_path my_project.muon.MuonAdamW", 1e-2)
    slots = load_file("runs/Table_1/checkpoints/step_00000060/optimizer.safetensors")
    assert {"0.weight/momentum_buffer", "0.bias/exp_avg"} < {*slots}


def check_optimizer(optimizer: str, tolerance: float) -> None:
    """One curve on one process, under DDP and under FSDP2, also after a resume."""
    how = "Table", f"{optimizer} {CONSTANT}"
    reference = curve_of(train_in(1, *how))
    assert reference[-1] < reference[0] - 0.1
    for sharded in (False, True):
        whole = train_in(2, *how, sharded)
        torch.testing.assert_close(curve_of(whole), reference, rtol=0, atol=tolerance)
        assert_resumes(whole, 2, *how, sharded)


def check_onnx() -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    train_as_typed("python -m my_project train configs/table.yaml", "--epochs null --steps 5")
    writing, reading = blocks(page_of("onnx"), "python")
    exec(writing, written := {})
    exec(reading, found := {})
    with torch.no_grad():
        ours = written["model"](torch.from_numpy(found["numbers"]))
    torch.testing.assert_close(torch.from_numpy(found["logits"]), ours)


def check_pretokenized_shards() -> None:
    Path("data").mkdir()
    text = np.frombuffer(Path(table().__file__).read_bytes() * 4, np.uint8).astype(np.uint16)
    shards = np.split(text, [1000, 5000, 9129])
    for number, shard in enumerate(shards):
        shard.tofile(f"data/{number}.bin")
    train, _ = table().NextToken().build_datasets({})
    expected = [
        shard[start : start + 65].tolist()
        for shard in shards[:3]
        for start in range(0, len(shard) - 64, 64)
    ]
    assert [window.tolist() for window in train] == expected
    result = status(train_example("NextToken"))["result"]
    assert result["validation/loss"] < 5, "by chance it were ln 256 = 5.5"


def check_reproduce() -> None:
    lines = commands(page_of("reproduce"))
    run = train_as_typed("python -m my_project train configs/table.yaml")
    command = [sys.executable, *lines[0].split()[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "table-again" in shown.splitlines()[-1]
    again = train_as_typed(lines[1])
    torch.testing.assert_close(
        weights(again.folder / "export"), weights(run.folder / "export"), rtol=0, atol=0
    )


def check_schedule() -> None:
    from my_project import optim
    from my_project.config import OptimConfig

    (line,) = blocks(page_of("schedule"), "python")
    code = inspect.getsource(optim.learning_rate)
    first = '        "constant": 1.0'
    assert code.count(first) == 1
    exec(code.replace(first, line + first), names := {**vars(optim)})
    config = OptimConfig(lr=1.0, schedule="rsqrt", warmup_steps=4)  # type: ignore[arg-type]
    rates = [names["learning_rate"](step, 100, config) for step in (1, 4, 16, 64)]
    assert rates == [0.5, 1.0, 0.5, 0.25]


def check_spot() -> None:
    task = yaml.safe_load(blocks(page_of("spot"), "yaml")[0])
    assert len(blocks(page_of("spot"), "yaml")[0].splitlines()) <= 20
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]
    Path("python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    Path("python").chmod(0o755)
    path = {"PATH": f"{Path.cwd()}:/usr/bin:/bin"}
    words = subprocess.run(
        ["bash", "-ec", task["run"]],
        env=path | task["envs"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[:3] == ["-m", "my_project", "train"]
    assert (PROJECT / words[3]).is_file()
    assert words[-2:] == ["--checkpoints.mirror", "s3://my-bucket/runs"]
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def check_start_from_weights() -> None:
    given = train_example("Table", "--steps 2").folder / "export"
    started = train_example("FromWeights", f"--optim.lr 0 --recipe.start {given}/model.safetensors")
    after, before = weights(started.folder / "export"), weights(given)
    assert after["0.weight"].equal(before["0.weight"])
    assert not after["2.weight"].equal(before["2.weight"])


def check_state_in_a_buffer() -> None:
    how = "Centered", f"--optim.class_path torch.optim.SGD --optim.lr 0.1 {CONSTANT}"
    one, two, sharded = train_in(1, *how), train_in(2, *how), train_in(2, *how, sharded=True)
    state = weights(one / "export")
    assert state["center"].abs().max() > 1e-3
    for run in (two, sharded):
        torch.testing.assert_close(weights(run / "export"), state)
    assert_resumes(two, 2, *how)


def check_training_scalar() -> None:
    accuracies = [record["train/accuracy"] for record in records(train_example("WithAccuracy"))]
    assert accuracies[0] < 0.75 < accuracies[-1]


def check_two_optimizers() -> None:
    Path("src/my_project").mkdir(parents=True)
    shutil.copy(SOURCE / "train.py", "src/my_project/train.py")
    (diff,) = blocks(page_of("two-optimizers"), "diff")
    subprocess.run(["git", "apply", "-p0"], input=diff, text=True, check=True)
    gan = f"--distributed.ddp.find_unused_parameters true {CONSTANT}"
    whole = train_in(2, "Gan", gan)
    slots = load_file(whole / "checkpoints/step_00000060/optimizer.safetensors")
    assert {slots[f"{part}.0.weight/step"].item() for part in ("generator", "discriminator")} == {
        60
    }
    assert_resumes(whole, 2, "Gan", gan)
    # SGD sees a wrong gradient scale, to which AdamW is blind
    sgd = f"{gan} --optim.class_path torch.optim.SGD --optim.lr 0.1 --optim.clip_norm null"
    one, two = (curve_of(train_in(n, "Gan", sgd, runs="sgd")) for n in (1, 2))
    sharded = curve_of(train_in(2, "Gan", sgd, runs="sharded", sharded=True))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sharded, one, rtol=1e-4, atol=1e-4)


def check_vscode() -> None:
    (text,) = blocks(page_of("vscode"), "json")
    (debugged,) = json.loads(text)["configurations"]
    assert importlib.util.find_spec(debugged["module"])
    words = " ".join(debugged["args"])
    for _ in range(2):
        run = train_as_typed(f"python -m my_project train {words}")
    assert (run.folder.name, run.batches.workers) == ("debug", 0)


def check_wandb_sweeps() -> None:
    sweep = yaml.safe_load(blocks(page_of("wandb-sweeps"), "yaml")[0])
    typed = {"optim.lr": 3e-3, "recipe.width": sweep["parameters"]["recipe.width"]["values"][1]}
    assert typed.keys() == sweep["parameters"].keys()
    words = [word for word in sweep["command"] if not word.startswith("--telemetry")]
    words[-1:] = [f"--{name}={value}" for name, value in typed.items()]
    run = train_as_typed(" ".join(words))
    assert run.run_name == "table-lr=0.003-width=64"
    assert sweep["metric"]["name"] in status(run)["result"]


def check_weighted_sampling() -> None:
    data = table().WeightedSamples("abc", [0, 1, 3])
    drawn = [data[i] for i in range(4000)]
    assert drawn.count("a") == 0
    assert 2850 < drawn.count("c") < 3150
    train_example("Balanced")


CHECKS = {
    name.removeprefix("check_").replace("_", "-"): check
    for name, check in globals().items()
    if name.startswith("check_")
}


# several processes
SLOW = {"huggingface-stream", "lion", "muon", "onnx", "state-in-a-buffer", "two-optimizers"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in HOW_TO]
)
def test_the_code_of_a_how_to_does_what_it_says(own, name):
    own(name)
    CHECKS[name]()


def test_the_recipe_of_the_document_learns_and_shows_it_as_it_stands(own, capsys):
    own()
    config, wider = (train_as_typed(command) for command in commands(OWN))
    assert status(config)["result"]["validation/loss"] < 0.2, "by chance it were ln 2 = 0.7"
    assert wider.run_name == "table-width=64"
    samples, answer = commands(SHOWN)
    print_finished(config.folder, read_status(config.folder))
    assert samples in capsys.readouterr().out
    lines = predict_as_typed(samples).splitlines()
    right = ("truth rose, answer rose", "truth lily, answer lily")
    assert sum(line in right for line in lines) > 13
    assert predict_as_typed(answer) == "lily\n"


def test_the_metrics_of_the_document_are_measured(own):
    folder = own()
    (block,) = blocks(text_of(PAGE, "## What an evaluation measures"), "python")
    (folder / "recipes/table.py").write_text(f"{RECIPE}\n\n{block}")
    result = status(train_example("WithMetrics"))["result"]
    assert result["validation/accuracy"] > 0.8
    assert result["validation/loss"] < 0.6


def test_the_code_of_the_documents_passes_the_lint_of_a_project(tmp_path):
    measured = blocks(text_of(PAGE, "## What an evaluation measures"), "python")[0]
    code = {"measured": f"{RECIPE}\n\n{measured}"}
    for name in HOW_TO:
        code |= {f"{name}_{Path(file).stem}": text for file, text in files_of(name).items()}
    for name, text in code.items():
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(text)
    settings = ["--config", str(PROJECT / "pyproject.toml")]
    for how in (["check", "--ignore=I001"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *how, *settings, str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
