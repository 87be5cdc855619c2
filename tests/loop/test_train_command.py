"""The command train, typed into a real terminal: what is last on the screen, and the exit code."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from documents import PROJECT
from my_project import train_command
from my_project.command_line import check
from my_project.config import Config, ConfigError
from my_project.train_command import Options, choose, count_gpus, read_options
from terminal import Terminal
from world import TESTS

CONFIG = """
recipe: {class_path: ragged.Ragged}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
steps: 8
checkpoints: {every_steps: 4}
telemetry: {every_steps: 2, trackers: []}
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "accelerate_configs").symlink_to(PROJECT / "accelerate_configs")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.yaml").write_text(CONFIG)
    (tmp_path / "configs/wrong.yaml").write_text(CONFIG + "optim: {lrr: 1}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- what is chosen ------------------------------------------------------------------------------
@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a command nvidia-smi first in PATH that lists so many GPUs."""

    def list_gpus(number: int) -> None:
        lines = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i}a)'\n" for i in range(number))
        path = tmp_path / "bin/nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 9\n{lines}')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return list_gpus


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        (None, 4),
        ("", 0),
        ("2,3", 2),
        ("1,-1,2", 1),
        ("0,9,1", 1),
        ("GPU-0a", 1),
    ],
)
def test_gpus_are_counted_as_cuda_sees_them(nvidia_smi, monkeypatch, visible, wanted):
    nvidia_smi(4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == wanted


@pytest.mark.parametrize(
    ("gpus", "where", "batch", "chosen", "why"),
    [
        (0, "", 16, ("cpu", 1), "no GPU (nvidia-smi)"),
        (8, "", 64, ("multi_gpu", 8), "8 GPUs (nvidia-smi);"),
        (8, "", 12, ("multi_gpu", 6), "8 GPUs (nvidia-smi), of which 6 divide the global batch"),
        (4, "cpu_2_processes", 64, ("cpu_2_processes", 2), ""),
        (0, "multi_gpu", 64, ("multi_gpu", 8), ""),  # ROCm: nvidia-smi finds none
        (4, "accelerate_configs/gpu.yaml", 64, ("gpu", 1), ""),
    ],
)
def test_where_follows_from_the_gpus_and_the_global_batch(
    nvidia_smi, gpus, where, batch, chosen, why
):
    nvidia_smi(gpus)
    path, processes, reason = choose(Options(where=where), batch)
    assert (path.stem, processes) == chosen
    assert why in reason


def test_the_number_of_processes_may_be_typed(nvidia_smi):
    nvidia_smi(4)
    assert choose(Options(num_processes=2), 64)[:2] == (
        Path("accelerate_configs/multi_gpu.yaml"),
        2,
    )
    nvidia_smi(0)
    found = choose(Options(num_processes=3), 64)
    assert found[:2] == (Path("accelerate_configs/cpu_2_processes.yaml"), 3)
    with pytest.raises(ConfigError, match="--num_processes is 0, but must be"):
        read_options(["--num_processes", "0"])


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("multi_gpus", "there is no accelerate_configs/multi_gpus.yaml; did you mean multi_gpu?"),
        ("xyz", "there are cpu, cpu_2_processes, "),
        ("multi_node", "is for 2 nodes, but this command starts one: use launch/slurm.sbatch"),
    ],
)
def test_a_where_that_cannot_be_is_refused(where, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        choose(Options(where=where), 16)


def test_outside_of_a_project_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "configs")
    with pytest.raises(ConfigError, match="run the command in the project's folder"):
        choose(Options(), 16)


def test_config_files_come_first_and_options_in_any_order():
    words = "configs/tiny.yaml b.yaml --seed 1 --where=gpu --optim.lr=2 --num-processes 2"
    settings = "--config configs/tiny.yaml --config b.yaml --seed 1 --optim.lr=2"
    options = Options(where="gpu", num_processes=2, settings=tuple(settings.split()))
    assert read_options(words.split()) == options


# ---- typed into a terminal -----------------------------------------------------------------------
def typed(words: str, folder: Path, **environment: str) -> Terminal:
    return Terminal(["train", *words.split()], folder, 80, environment)


REFUSED = {
    "typo in an option": ("configs/tiny.yaml --optim.lrr 1", "did you mean --optim.lr?"),
    "typo in a path": ("configs/tinny.yaml", "did you mean configs/tiny.yaml?"),
    "typo in a YAML key": (
        "configs/wrong.yaml",
        "configs/wrong.yaml: there is no setting optim.lrr",
    ),
    "typo in where": ("configs/tiny.yaml --where cpuu", "did you mean cpu?"),
    "a batch that does not split": (
        "configs/tiny.yaml --where cpu_2_processes --num_processes 3",
        "16 does not split over 3 processes: 16 / 3 = 5.33333",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_anything_starts_is_one_line(project, case):
    words, sentence = REFUSED[case]
    terminal = typed(words, project)
    lines, code = terminal.end()
    assert code == 2
    (line,) = lines
    assert line.startswith("error: ")
    assert sentence in line
    assert not (project / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--recipe.sampels 3", "'sampels' is not accepted; did you mean samples?"),
        ("--where gpu", "the accelerate config asks for a GPU, but torch finds none"),
    ],
    ids=["typo in a recipe's field", "a missing GPU"],
)
def test_what_torch_is_needed_for_is_refused_in_one_line_too(project, words, sentence):
    terminal = typed(f"configs/tiny.yaml {words}", project, CUDA_VISIBLE_DEVICES="")
    lines, code = terminal.end()
    assert code == 2
    assert lines[-1].startswith("error: ")
    assert sentence in lines[-1]
    assert not (project / "runs").exists(), "a refused launch leaves no folder"


FAILURES = {
    "NaN": ("--recipe.fault nan --optim.max_skipped_steps 1", "the gradient was not finite"),
    "a bug in loss": ("--recipe.fault raise", "ValueError: this rank was told to fail"),
    "an exception in a loader worker": (
        "--recipe.bad_sample 7 --batches.workers 1",
        "ValueError: sample 7 cannot be read (in a loader worker)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_ends_in_one_block(project, case):
    words, reason = FAILURES[case]
    at = "--recipe.fault_at 5 --recipe.fault_on_rank 0 --run_name tiny"
    lines, code = typed(f"configs/tiny.yaml {at} {words}", project).end()
    shown = " ".join(" ".join(lines).split())
    assert code == 1
    assert reason in shown
    if case != "NaN":
        raised = "was told to fail" if "raise" in words else 'raise ValueError(f"sample'
        source = (TESTS / "ragged.py").read_text().splitlines()
        (line,) = [number for number, text in enumerate(source, 1) if raised in text]
        assert re.search(rf"at \S*ragged.py, line {line}, in ", shown), "the user's line"
        assert "in torch" in shown or "frame" in shown
    assert "Traceback" not in shown
    assert "logs runs/tiny/logs" in shown
    assert lines[-1].startswith("  python -m my_project train configs/tiny.yaml ")
    continues = "continues from step 4" if case != "an exception in a loader worker" else "starts"
    assert continues in shown
    log = next((project / "runs/tiny/logs/node_0").glob("*/rank_00000.log")).read_text()
    assert reason.split(" (in")[0] in log


@pytest.mark.slow
def test_stopped_continued_finished_shown_again_and_refused(project):
    """One run, as its owner would type it: Ctrl-C three times, then the same command."""
    words = "configs/tiny.yaml --steps 100000 --telemetry.every_steps 1"
    terminal = typed(words, project)
    terminal.read(lambda shown: "run folder" in shown or "runs/tiny, new" in shown)
    assert "batch" in terminal.read(lambda shown: "accelerate launch --config_file" in shown)
    terminal.read(lambda shown: re.search(r"step +[1-9]\d*/1", shown) is not None)
    for _ in range(3):
        terminal.type("\x03")
        time.sleep(0.2)
    lines, code = terminal.end()
    shown = "\n".join(lines)
    assert code == 75, shown
    (step,) = re.findall(r"--- stopped: saved at step (\d+) of 100000 -", shown)
    assert f"the same command continues from step {step}:" in shown
    assert lines[-1] == f"  python -m my_project train {words}"

    words = f"configs/tiny.yaml --steps {int(step) + 2} --evaluation.best_metric validation/auroc"
    terminal = typed(words, project)
    lines, code = terminal.end()
    shown = "\n".join(lines)
    assert f"runs/tiny, continues from step {step}" in terminal.shown
    assert code == 0, shown
    assert "--- finished: runs/tiny -" in shown
    assert "  best     validation/auroc" in shown
    assert lines[-1] == "  python -m my_project evaluate runs/tiny"

    lines, code = typed(words, project).end()
    assert code == 0
    assert lines[0] == "already finished, so nothing is trained"

    lines, code = typed("configs/tiny.yaml --seed 1 --run_name tiny", project).end()
    assert code == 2
    assert "error: runs/tiny was trained with other settings: seed (0 there, 1 here)" in lines[-1]


@pytest.mark.slow
def test_a_terminal_that_is_closed_is_a_preemption_and_a_broken_recipe_is_named(project):
    terminal = typed("configs/tiny.yaml --steps 100000 --telemetry.every_steps 1", project)
    terminal.read(lambda shown: re.search(r"step +[1-9]\d*/1", shown) is not None)
    os.close(terminal.master)
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    left = json.loads((project / "runs/tiny/status.json").read_text())
    assert left["outcome"] == "preempted", left

    for name, code, line in (("syntax", "def loss(:", 1), ("raises", "\nx = {}['missing']", 2)):
        (project / f"{name}.py").write_text(f"{code}\n\nclass Recipe: ...\n")
        words = f"configs/tiny.yaml --recipe.class_path {name}.Recipe --run_name broken"
        lines, code = typed(words, project).end()
        shown = " ".join(" ".join(lines).split())
        assert code == 1
        assert re.search(rf"at {name}\.py, line {line}, in <module>", shown), shown
        assert ("SyntaxError" if name == "syntax" else "KeyError: 'missing'") in shown


@pytest.mark.slow
def test_a_dry_run_says_what_the_whole_run_will_take_and_keeps_nothing(project):
    # DDP in a world of one process too
    where = "--where cpu_2_processes --num_processes 1"
    terminal = typed(f"configs/tiny.yaml --epochs 10 --dry-run {where}", project)
    lines, code = terminal.end()
    shown = "\n".join(lines)
    assert code == 0, terminal.shown
    assert "--- dry run: two steps, an evaluation, a save and an export work" in shown
    assert re.search(r"whole +40 steps with 10 such pause\(s\): about", shown), shown
    assert re.search(r"step +\S+ s, \S+ samples per second", shown)
    assert not [path for path in (project / "runs").rglob("*") if path.is_dir()]


def test_a_finished_run_is_shown_only_for_the_settings_it_was_trained_with(project, monkeypatch):
    from my_project.command_line import parse
    from my_project.config import to_yaml

    def is_shown(config: Config) -> bool:
        return train_command.differing(config)[1] and train_command.is_finished(config)

    config = check(["--config", "configs/tiny.yaml"])
    folder = project / "runs/tiny"
    (folder / "export").mkdir(parents=True)
    (folder / "status.json").write_text('{"outcome": "finished", "step": 8, "result": {}}')
    assert not is_shown(config), "there is no config.yaml"
    (folder / "config.yaml").write_text(to_yaml(parse(["--config", "configs/tiny.yaml"])))
    assert is_shown(config)
    for change in ("--steps 9", "--seed 1", "--recipe.samples 71"):
        words = ["--config", "configs/tiny.yaml", "--run_name", "tiny", *change.split()]
        assert not is_shown(check(words)), change
    monkeypatch.setattr(train_command, "fields_of", lambda _: ({"samples": 99}, set()))
    assert not is_shown(config), "a default in the recipe's code was changed"


def test_other_settings_are_refused_before_torch_is_imported(project):
    from my_project.command_line import parse
    from my_project.config import to_yaml

    (project / "runs/tiny").mkdir(parents=True)
    saved = to_yaml(parse(["--config", "configs/tiny.yaml", "--run_name", "tiny"]))
    (project / "runs/tiny/config.yaml").write_text(saved)
    for change, sentence in {
        "--seed 1": "seed (0 there, 1 here)",
        "--recipe.samples 71": "recipe.samples (70 there, 71 here)",
        "--recipe.dtype float64": "recipe.dtype ('float32' there, 'float64' here)",
    }.items():
        words = f"configs/tiny.yaml --run_name tiny {change}"
        with pytest.raises(ConfigError, match=re.escape(f"with other settings: {sentence}")):
            train_command.main(words.split())


def test_a_changed_recipe_is_named_where_a_run_has_finished(project, capsys):
    (project / "runs/tiny").mkdir(parents=True)
    (project / "runs/tiny/run.json").write_text('{"recipe_sha256": "0"}')
    train_command.print_earlier(check(["--config", "configs/tiny.yaml"]))
    shown = capsys.readouterr().out
    assert "already finished, so nothing is trained" in shown
    assert "ragged.py has changed since: --resume never trains it again" in " ".join(shown.split())
