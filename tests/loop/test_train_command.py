"""The command train, typed into a real terminal: what is last on the screen, and the exit code."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import HAS_TOOLS, PROJECT
from my_project.config import BatchesConfig, ConfigError
from my_project.launching import train as train_command
from my_project.launching.train import choose, read_options
from my_project.settings import split
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
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- what is chosen ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpus", "options", "batch", "chosen"),
    [
        (0, "", (16, 0), ("cpu", 1)),
        (8, "", (64, 0), ("multi_gpu", 8)),
        (7, "", (64, 0), ("multi_gpu", 7)),
        (7, "", (64, 4), ("multi_gpu", 7)),
        (8, "", (64, 16), ("multi_gpu", 4)),
        (8, "", (64, 24), ("multi_gpu", 3)),
        (8, "", (6, 0), ("multi_gpu", 6)),
        (8, "", (64, 64), ("gpu", 1)),
        (4, "--where cpu_2_processes", (64, 0), ("cpu_2_processes", 2)),
        (0, "--where multi_gpu", (64, 0), ("multi_gpu", 8)),
        (4, "--where multi_gpu", (64, 0), ("multi_gpu", 4)),
        (16, "--where multi_gpu", (64, 0), ("multi_gpu", 8)),
        (4, "--num_processes 2", (64, 0), ("multi_gpu", 2)),
        (0, "--num_processes 3", (64, 0), ("cpu_2_processes", 3)),
    ],
)
def test_where_follows_from_the_gpus_and_the_global_batch(
    monkeypatch, gpus, options, batch, chosen
):
    monkeypatch.setattr(train_command, "count_gpus", lambda: gpus)
    total, size = batch
    batches = BatchesConfig(global_batch_size=total, micro_batch_size=size)
    path, processes = choose(read_options(options.split())[0], batches)
    assert (path.stem, processes) == chosen


def test_a_where_for_several_nodes_or_of_another_name_is_refused():
    with pytest.raises(ConfigError, match=r"multi_node.* is for 2 nodes, but this command starts"):
        choose(read_options(["--where", "multi_node"])[0], BatchesConfig(global_batch_size=16))
    with pytest.raises(ConfigError, match=r"cpuu.*did you mean cpu\?"):
        choose(read_options(["--where", "cpuu"])[0], BatchesConfig(global_batch_size=16))
    with pytest.raises(ConfigError, match=r"there is no my/gpu.yaml in .*did you mean gpu"):
        choose(read_options(["--where", "my/gpu.yaml"])[0], BatchesConfig(global_batch_size=16))
    with pytest.raises(ConfigError, match="--num_processes is 0"):
        choose(read_options(["--num_processes", "0"])[0], BatchesConfig(global_batch_size=16))


def test_config_files_come_first_and_options_in_any_order():
    words = "configs/tiny.yaml b.yaml --seed 1 --where=gpu --optim.lr=2 --num-processes 2"
    options, settings = read_options([*words.split(), "--max_restarts", "0"])
    assert (options.where, options.num_processes, options.max_restarts) == ("gpu", 2, 0)
    assert settings == ["configs/tiny.yaml", "b.yaml", "--seed", "1", "--optim.lr=2"]
    assert split(settings)[0] == [Path("configs/tiny.yaml"), Path("b.yaml")]


def run_main(monkeypatch, words: str, kind: str = "finished") -> list:
    """Run the command without training; return the launch, and the command that continues it."""
    given = []
    ending = SimpleNamespace(kind=kind, tell=lambda: 1)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(train_command, "count_gpus", lambda: 0)
    monkeypatch.setattr(train_command.launch, "get_ready", lambda _: None)
    monkeypatch.setattr(train_command.launch, "run", lambda *run: given.append(run) or ending)
    assert train_command.main(words.split()) == 1
    ((launch, _, command),) = given
    return [launch, command.removeprefix("python -m my_project train ")]


@pytest.mark.parametrize(
    "words",
    ["--resume never F --seed 1", "--resume=never F --seed 1", "F --resume never --seed 1",
     "F --seed 1 --resume=never"],
)  # fmt: skip
def test_the_command_that_continues_does_not_start_over(monkeypatch, words):
    _, command = run_main(monkeypatch, words.replace("F", "configs/tiny.yaml"))
    assert command == "configs/tiny.yaml --seed 1 --resume auto"
    _, command = run_main(monkeypatch, "configs/tiny.yaml --resume never-2")
    assert command == "configs/tiny.yaml --resume never-2"
    Path("configs/never.yaml").write_text("resume: never")
    _, command = run_main(monkeypatch, "configs/tiny.yaml configs/never.yaml")
    assert command == "configs/tiny.yaml configs/never.yaml --resume auto"
    launch, _ = run_main(monkeypatch, command)
    assert launch.config.resume == "auto"


@pytest.mark.parametrize("kind", ["failed", "refused"])
def test_a_dry_run_has_no_mirror_and_keeps_its_folder_if_it_fails(monkeypatch, kind):
    words = "configs/tiny.yaml --checkpoints.mirror copies --dry-run"
    launch, _ = run_main(monkeypatch, words, kind)
    assert launch.config.checkpoints.mirror is None
    assert launch.config.folder.parent.exists() == (kind == "failed"), "its summary names the logs"


def test_a_dry_run_accepts_the_schedule_plateau(monkeypatch):
    words = "--optim.schedule plateau --evaluation.best_metric loss --evaluation.every_steps 4"
    launch, _ = run_main(monkeypatch, f"configs/tiny.yaml {words} --dry-run", "failed")
    assert launch.config.optim.schedule == "plateau"


def test_gpus_that_are_not_used_are_named_only_if_the_file_uses_gpus(monkeypatch, capsys):
    monkeypatch.setattr(train_command, "count_gpus", lambda: 8)
    batches = BatchesConfig(global_batch_size=4, micro_batch_size=1)
    for where, is_named in (("multi_gpu", True), ("cpu_2_processes", False)):
        choose(read_options(["--where", where])[0], batches)
        assert ("using 4 of 8 GPUs" in capsys.readouterr().out) == is_named
    content = Path("accelerate_configs/multi_gpu.yaml").read_text()
    Path("own.yaml").write_text(content.replace("num_processes: 8", "num_processes: 2"))
    assert choose(read_options(["--where", "own.yaml"])[0], batches) == (Path("own.yaml"), 2)
    assert "using 2 of 8 GPUs: num_processes of own.yaml" in capsys.readouterr().out


# ---- typed into a terminal -----------------------------------------------------------------------
def typed(words: str, folder: Path) -> Terminal:
    return Terminal(["train", *words.split()], folder)


def test_what_is_refused_before_the_first_step_is_one_line(project):
    words = "--where cpu_2_processes --num_processes 5"
    lines, code = typed(f"configs/tiny.yaml {words}", project).end()
    assert code == 2
    assert lines[-1].startswith("error: ")
    assert "16 gives 4 micro-batches of at most 4 samples, fewer than 5 processes" in lines[-1]
    assert not (project / "runs").exists(), "a refused launch leaves no folder"


@pytest.mark.slow
def test_what_the_processes_refuse_leaves_no_logs(project):
    lines, code = typed("configs/tiny.yaml --optim.class_path torch.optim.Nope", project).end()
    assert code == 2
    assert "torch.optim.Nope" in lines[-1]
    assert [path.name for path in project.rglob("logs/*/*")] == []


@pytest.mark.slow
def test_a_failure_ends_in_one_block(project):
    words = "--recipe.fault raise --recipe.fault_at 5 --recipe.fault_on_rank 0 --run_name other"
    lines, code = typed(f"configs/tiny.yaml {words}", project).end()
    shown = " ".join(" ".join(lines).split())
    assert code == 1
    assert "ValueError: this rank was told to fail" in shown
    source = (TESTS / "ragged.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(source, 1) if "was told to fail" in text]
    assert f"ragged.py, line {line}, in " in shown, "the user's line"
    assert "Traceback" not in shown
    assert lines[-1].startswith("  python -m my_project train configs/tiny.yaml ")
    assert "continues from step 4" in shown
    left = json.loads((project / "runs/other/status.json").read_text())
    assert 0 < left["goodput"]["calendar"]["kept"] < 1, "up to the checkpoint of step 4"
    log = next((project / "runs/other/logs/node_0").glob("*/rank_00000.log")).read_text()
    assert "this rank was told to fail" in log


@pytest.mark.slow
def test_stopped_continued_finished_and_shown_again(project):
    """One run, as its owner would type it: Ctrl-C three times, then the same command."""
    words = "configs/tiny.yaml --steps 100000 --telemetry.every_steps 1"
    terminal = typed(words, project)
    terminal.read(lambda shown: "run folder" in shown)
    terminal.read(lambda shown: re.search(r"step +[1-9]\d*/1", shown) is not None)
    for _ in range(3):
        terminal.type("\x03")
        time.sleep(0.2)
    lines, code = terminal.end()
    shown = "\n".join(lines)
    assert code == 75, shown
    (step,) = re.findall(r"--- stopped: saved at step (\d+) of 100000 -", shown)
    assert "saved and stopped" not in shown, "the line without a launcher"
    # the terminal shows the last of them below the block, where the run has ended before
    *_, last = (one for one in lines if one.replace("^C", ""))
    assert last == f"  python -m my_project train {words}"
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h"), "the cursor"
    log = next((project / "runs/tiny/logs/node_0").glob("*/rank_00000.log")).read_text()
    assert "\x1b" not in log, "of the bar"
    assert f"step {step} of 100000: loss" in log
    assert "1 process on CPU, float32\nglobal batch 16 = micro-batch" in log
    assert shown.count("global batch") == 1

    words = f"configs/tiny.yaml --steps {int(step) + 2} --evaluation.best_metric validation/auroc"
    terminal = typed(words, project)
    lines, code = terminal.end()
    shown = "\n".join(lines)
    assert f"resumed from runs/tiny/checkpoints/step_{int(step):08d}" in " ".join(lines)
    assert code == 0, shown
    assert "--- finished: runs/tiny -" in shown
    assert "  best     validation/auroc" in shown
    assert lines[-1] == "  python -m my_project evaluate runs/tiny"
    assert "my_project predict" not in shown, "the recipe has no predict_samples"

    lines, code = typed(words, project).end()
    assert code == 0
    assert [line for line in lines if "already finished, so nothing is trained" in line]


@pytest.mark.slow
def test_a_terminal_that_is_closed_is_a_preemption(project):
    terminal = typed("configs/tiny.yaml --steps 100000 --telemetry.every_steps 1", project)
    terminal.read(lambda shown: re.search(r"step +[1-9]\d*/1", shown) is not None)
    os.close(terminal.master)
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    left = json.loads((project / "runs/tiny/status.json").read_text())
    assert left["outcome"] == "preempted", left


@pytest.mark.slow
def test_a_dry_run_says_what_the_whole_run_will_take_and_keeps_nothing(project):
    # DDP in a world of one process too
    where = "--where cpu_2_processes --num_processes 1"
    terminal = typed(f"configs/tiny.yaml --epochs 10 --dry-run {where}", project)
    lines, code = terminal.end()
    assert code == 0, terminal.shown
    assert re.search(r"whole +40 steps: about", "\n".join(lines))
    assert not [path for path in (project / "runs").rglob("*") if path.is_dir()]


# ---- warnings and progress bars ------------------------------------------------------------------
LIBRARY = """
import logging
import warnings

logger = logging.getLogger("library")
own = logging.getLogger("library.own")  # as transformers': to a stream of its own for stderr
own.addHandler(logging.StreamHandler(open(2, "w", closefd=False)))
hidden = logging.getLogger("library.hidden")  # to a file of its own
hidden.addHandler(logging.NullHandler())
own.propagate = hidden.propagate = False

def log():
    logger.warning("logged %s", 1)
    own.error("logged by its own handler")
    hidden.warning("in its own file")

def warn(text, category=UserWarning):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(text, category, stacklevel=2)
"""
WARNING = """
import sys, threading, time
from dataclasses import dataclass
from pathlib import Path
from ragged import Ragged, Samples
from torch.nn.functional import mse_loss
from tqdm import tqdm
sys.path.insert(0, "site-packages")
import library

class Read(Samples):
    def __getitem__(self, index):
        library.warn("reading")
        return super().__getitem__(index)

@dataclass(frozen=True, kw_only=True)
class Warning(Ragged):
    def prepare_data(self):
        library.warn("preparing")
        for _ in tqdm(range(20 * (not Path("cache").exists())), mininterval=0):
            time.sleep(0.02)
        Path("cache").touch()
        return super().prepare_data()

    def build_datasets(self, data_info):
        return Read(self.samples, 6, self.dtype, 1, 0.0), super().build_datasets(data_info)[1]

    def loss(self, model, batch, step):
        library.log()
        library.warn("token=abcdef123456 \\x1b[2J " + 400 * "long ")
        library.warn("old", DeprecationWarning)
        library.warn("will be old", FutureWarning)
        thread = threading.Thread(target=lambda: library.warn("in a thread"))
        thread.start()
        thread.join()
        mse_loss(batch["y"][:, :1], batch["y"][:, 0])
        print("printed", file=sys.stderr)
        return super().loss(model, batch, step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_terminal", [True, False])
def test_warnings_of_rank_0_and_the_bar_of_prepare_data_are_shown(project, on_terminal):
    (project / "site-packages").mkdir()
    (project / "site-packages/library.py").write_text(LIBRARY)
    (project / "warned.py").write_text(WARNING)
    words = "configs/tiny.yaml --run_name tiny --recipe warned.Warning --batches.workers 2"
    words += " --where cpu_2_processes" if on_terminal else " --where cpu"
    if on_terminal:
        terminal = Terminal(["train", *words.split()], project, columns=600)
        _, code = terminal.end()
        text, shown = terminal.text, terminal.shown
    else:
        command = [sys.executable, "-m", "my_project", "train", *words.split()]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        code, text, shown = done.returncode, done.stdout, done.stdout
    assert code == 0, shown
    lines = [line for line in shown.splitlines() if line.startswith("warning: ")]
    said = ("preparing", "reading", "logged 1", "logged by its own handler", "token=*** ?[2J long")
    for words in (*said, "in a thread", "Using a target size"):
        assert sum(words in line for line in lines) == 1, words
    assert len(lines) == 7
    assert max(map(len, lines)) < 450
    places = [line.rpartition(" (")[2] for line in lines]
    assert all(re.fullmatch(r"(warned|library)\.py:\d+\)", place) for place in places), places
    assert "\x1b[2J" not in text
    assert "20/20" in shown
    assert text.count("%|") > 10, "the bar is drawn again and again"

    left = json.loads((project / "runs/tiny/status.json").read_text())
    assert left["warnings"] == 9, "with those for developers"
    (log,) = (project / "runs/tiny/logs/node_0").glob("*/rank_00000.log")
    assert f"  warnings 9, in {log.relative_to(project)}" in shown
    in_log = log.read_text()
    for words in (*said[:4], "token=***", "DeprecationWarning: old", "printed"):
        assert words in in_log
    assert "printed" not in shown
    assert "20/20" not in "".join(path.read_text() for path in log.parent.glob("*.log"))
    if not HAS_TOOLS:
        return
    from my_project.tools import doctor

    diagnosis = doctor.diagnose(project / "runs/tiny")
    assert diagnosis["known"][0] == "no failure"
    assert "(9)" in diagnosis["known"][1]
    assert str(log) in diagnosis["known"][1]
