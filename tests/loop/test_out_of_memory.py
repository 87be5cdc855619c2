"""Out of memory before a step is saved: smaller micro-batches in the same run, or a clear error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_launch
import torch
from documents import HAS_TOOLS, PROJECT
from my_project.checkpoint.saving import Checkpoints
from my_project.files import read_json
from my_project.launching import memory
from my_project.launching.nodes import interfaces
from my_project.loading.layout import batch_layout
from my_project.memory import smaller_micro_batch
from my_project.process import LOGS
from my_project.run_files import each_start
from my_project.run_folder import Run
from ragged import Ragged
from runs import assert_same_weights, make_config, quick, train
from test_launch import CONFIG
from test_launch_node import launched_in_fork, parsed
from test_rendezvous import meet, node
from world import free_port

TOO_LARGE = """
import os
from dataclasses import dataclass, field

import torch
from ragged import QUIET, Ragged

@dataclass(frozen=True, kw_only=True)
class TooLarge(Ragged):
    most: int = field(default=2, metadata=QUIET)  # samples that fit
    from_step: int = field(default=0, metadata=QUIET)  # 1: when an optimizer has a state
    on_rank: int = field(default=0, metadata=QUIET)
    kind: str = field(default="device", metadata=QUIET)
    compares_samples: bool = False

    def loss(self, model, batch, step):
        is_here = self.on_rank == int(os.environ.get("RANK", "0")) and model.training
        if is_here and step >= self.from_step and len(batch["x"]) > self.most:
            if self.kind == "device":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            if self.kind == "host":
                torch.empty(2**46)
            self.kept = bytearray(int(self.kind))  # more than a control group has
        return super().loss(model, batch, step)
"""


class Mean(Ragged):
    def loss(self, model, batch, step):
        loss_sum, num_items, *scalars = super().loss(model, batch, step)
        return loss_sum / num_items, num_items, *scalars


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Write the recipe into the current folder."""
    (tmp_path / "too_large.py").write_text(TOO_LARGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def words(**recipe: object) -> tuple[str, ...]:
    settings = {"dtype": "float64", "dropout": 0.2} | recipe
    flat = [(f"--recipe.{name}", str(value)) for name, value in settings.items()]
    return ("--recipe", "too_large.TooLarge", *[word for pair in flat for word in pair],
            "--telemetry.trackers", "[]", "--telemetry.every_steps", "1")  # fmt: skip


def launched(folder: Path, processes: int, *words: str, launcher="", flags=()) -> tuple[int, str]:
    if not launcher:
        return launched_in_fork(folder, processes, *words, flags=flags)
    where = "cpu" if processes == 1 else "cpu_2_processes"
    with test_launch.launch(folder, *words, launcher=launcher, where=where) as run:
        shown, _ = run.communicate(timeout=600)
    return run.returncode, shown


def sizes(folder: Path) -> list[int | None]:
    """Return the lowered size of each start, as starts.jsonl has it."""
    return [begin.micro_batch_size for begin, _ in each_start(folder / "runs/tiny")]


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


# ---- smaller micro-batches -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("processes", "recipe"),
    quick(
        1,
        [
            (2, {"on_rank": 1, "from_step": 1}),
            (1, {"kind": "host"}),
            (2, {"most": 1}),
        ],
    ),
)
def test_the_run_goes_on_with_micro_batches_that_fit(small, processes, recipe):
    """Its losses are those of a run that had this size from the start, to 1e-9."""
    fitting = recipe.get("most", 2)
    arguments = words(**recipe)
    code, shown = launched(small, processes, *arguments, "--steps", "5")
    assert code == 0, shown
    assert sizes(small) == [None, 2, 1][: 2 + (fitting == 1)]
    causes = [end and end.cause for _, end in each_start(small / "runs/tiny")]
    kind = "out of host memory" if recipe.get("kind") else "out of memory"
    assert causes[:-1] == [kind] * (len(causes) - 1)
    line = f"batches.micro_batch_size is {fitting}, since larger micro-batches did not fit"
    assert shown.count(line) == 1
    assert f"micro_batch_size: {fitting}\n" in (small / "runs/tiny/config.yaml").read_text()
    whole = ("--run_name", "whole", f"--batches.micro_batch_size={fitting}", "--steps", "5")
    code, shown = launched(small, processes, *words(most=99), *whole)
    assert code == 0, shown
    torch.testing.assert_close(losses(small, "tiny"), losses(small, "whole"), rtol=0, atol=1e-9)
    runs = (SimpleNamespace(folder=small / "runs" / name) for name in ("tiny", "whole"))
    assert_same_weights(*runs, 1e-9)
    if HAS_TOOLS:
        from my_project.tools.doctor import diagnose

        (known,) = [text for text in diagnose(small / "runs/tiny")["known"] if "memory" in text]
        assert f"lowered to {fitting}" in known


def test_the_same_command_does_not_try_again_what_did_not_fit(small):
    """A command with another setting does."""
    stopped = (*words(), "--stop_after", "0s")
    assert launched(small, 1, *stopped)[0] == 75
    assert launched(small, 1, *stopped)[0] == 75
    assert sizes(small) == [None, 2, 2]
    code, shown = launched(small, 1, *words(most=9))
    assert code == 0, shown
    assert sizes(small) == [None, 2, 2, None]


@pytest.mark.slow
def test_a_micro_batch_that_follows_from_the_processes_is_halved_too(small):
    code, shown = launched(small, 2, *words(most=5), "--batches.micro_batch_size", "0")
    assert code == 0, shown
    assert sizes(small) == [None, 4]
    assert "micro-batch 4 x 2 processes x accumulation 2" in shown


@pytest.mark.slow
def test_a_spawned_process_gets_the_smaller_size_too(small):
    """As where an import has started a thread, so that no process is forked."""
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (small / "too_large.py").write_text(f"{text}\n{TOO_LARGE}")
    code, shown = launched(small, 1, *words(), launcher="my_project.launch")
    assert code == 0, shown
    assert "each process imports torch itself" in shown
    assert sizes(small) == [None, 2]


def test_without_restarts_the_run_ends_and_names_the_size(small):
    code, shown = launched(small, 1, *words(), flags=("--max_restarts", "0"))
    assert code == 1, shown
    assert "batches.micro_batch_size 2 is the next to try" in " ".join(shown.split())
    assert sizes(small) == [None]


@pytest.mark.slow
def test_without_our_launcher_the_error_names_the_size(small):
    code, shown = launched(small, 2, *words(), launcher="accelerate.commands.launch")
    assert code == 1
    assert "batches.micro_batch_size 2 is the next to try" in " ".join(shown.split())


# ---- no smaller micro-batch ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "code", "said"),
    quick(
        1,
        [
            ({"batch_norm": True}, 2, "2 may fit, but .* the BatchNorm 1 is in train mode"),
            ({"compares_samples": True}, 2, "2 may fit, but .* the loss compares the samples"),
            ({"most": 0}, 1, "batches.micro_batch_size cannot be less than 1 here"),
        ],
    ),
)
def test_a_run_that_would_change_or_cannot_shrink_ends(small, settings, code, said):
    ended, shown = launched(small, 1, *words(**settings))
    assert ended == code, shown
    text = " ".join(shown.split())
    assert re.search(said, text), shown
    assert sizes(small) == [None, 2, 1][: 3 if code == 1 else 1]


def test_a_later_start_knows_that_the_loss_is_no_sum(tmp_path):
    """It does not check the loss again."""
    config = make_config(tmp_path, Mean(), steps=2, telemetry__every_steps=1)
    assert train(config) == 0
    run = Run(config, 1)
    layout = batch_layout(config.batches, 1)
    model = torch.nn.Linear(1, 1)
    smaller = smaller_micro_batch(run, layout, model, [])
    assert smaller.next_micro_batch_size is None
    assert "it may change the curve, since the loss is not a sum" in smaller.advice
    (config.folder / "metrics.jsonl").unlink()
    assert smaller_micro_batch(run, layout, model, []).next_micro_batch_size == 2
    run.resumed_from = "runs/other/checkpoints/step_00000002"
    assert "the loss was not checked" in smaller_micro_batch(run, layout, model, []).advice


def test_every_rank_knows_that_the_run_began_from_another_ones_checkpoint(small):
    code, shown = launched(small, 2, *words(most=9), "--run_name", "old", "--steps", "2")
    assert code == 0, shown
    given = ("--resume", "runs/old/checkpoints/step_00000002", "--steps", "4")
    code, shown = launched(small, 2, *words(on_rank=1), *given)
    assert code == 2, shown
    assert "so the loss was not checked" in " ".join(shown.split())
    assert sizes(small) == [None]


def test_the_note_for_the_launcher_changes_once_the_loss_is_no_sum(tmp_path, monkeypatch):
    """The kernel may kill the process without a record of what the check has found."""
    monkeypatch.setenv(LOGS, str(tmp_path))
    notes = []

    class Killed(Mean):
        def loss(self, model, batch, step):
            if torch.is_grad_enabled():
                notes.append(read_json(tmp_path / "micro_batch_rank_00000.json"))
            return super().loss(model, batch, step)

    assert train(make_config(tmp_path, Killed(), steps=1)) == 0
    assert notes[0]["next_micro_batch_size"] is None
    assert notes[0]["exit_code"] == 2


def test_a_save_without_memory_gives_no_advice_on_the_micro_batch(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    config = make_config(tmp_path, steps=3, checkpoints__every_steps=1)
    monkeypatch.setattr(Checkpoints, "_copy_to_host", fail)
    with pytest.raises(torch.OutOfMemoryError) as told:
        train(config)
    assert not getattr(told.value, "__notes__", [])


@pytest.mark.slow
def test_after_a_step_was_kept_the_run_ends_as_before(small):
    saved = ("--checkpoints.every_steps", "2", "--checkpoints.background", "false")
    code, shown = launched(small, 1, *words(from_step=3), *saved)
    assert code == 1, shown
    assert "Lower batches.micro_batch_size" in shown
    assert sizes(small) == [None]
    # the next start continues from there with smaller micro-batches
    code, shown = launched(small, 1, *words(from_step=3), *saved)
    assert code == 0, shown
    assert sizes(small) == [None, None, 2]


# ---- killed by the kernel ------------------------------------------------------------------------
GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
MAY_GROUP = GROUPS.is_dir() and os.access(GROUPS, os.W_OK) and os.geteuid() == 0


@pytest.fixture
def control_group():
    """Put what this process starts into a control group with little memory."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = GROUPS / dict(line.split(":")[1:] for line in lines)["memory"].lstrip("/")
    group = GROUPS / f"out_of_memory_{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1_500_000_000))
        (group / "cgroup.procs").write_text("0")
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (own / "cgroup.procs").write_text(pid)
        group.rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("control_group")
@pytest.mark.skipif(not MAY_GROUP, reason="needs root and control groups of version 1")
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_kill_by_the_kernel_is_followed_by_smaller_ones(small, batch_norm):
    arguments = words(kind="3000000000", batch_norm=batch_norm)
    code, shown = launched(small, 1, *arguments, launcher="my_project.launch")
    assert code == (2 if batch_norm else 0), shown
    assert sizes(small) == ([None] if batch_norm else [None, 2])
    _, end = each_start(small / "runs/tiny")[0]
    assert end
    assert (end.outcome, end.cause) == ("failed", "out of host memory")
    (error,) = map(read_json, (small / "runs/tiny/errors").glob("*.json"))
    assert error["reason"].startswith("killed by the kernel")
    assert error["next_micro_batch_size"] == (None if batch_norm else 2)


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/job/step", "job/step/memory.events", "oom 4\noom_kill 3\n", 3),
        ("0::/of/host", "memory.events", "oom 4\noom_kill 3\n", 3),  # in a container
        ("4:memory:/job\n0::/", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n", 3),
        ("9:memory:/of/host", "memory/memory.oom_control", "under_oom 0\noom_kill 3\n", 3),
        ("0::/", "other", "", 0),
        ("broken", "memory.events", "oom_kill 3\n", 0),
    ],
)
def test_kills_are_counted_in_both_versions(tmp_path, monkeypatch, groups, file, text, kills):
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(groups)
    (path := tmp_path / "groups" / file).parent.mkdir(parents=True)
    path.write_text(text)
    assert memory.count_memory_kills() == kills


# ---- several nodes -------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(not interfaces(), reason="nodes need a network interface")
def test_two_nodes_go_on_with_the_same_size(small):
    (small / "tiny.yaml").write_text(CONFIG)
    port, where = str(free_port()), PROJECT / "accelerate_configs/multi_node_cpu.yaml"
    commands = [
        [sys.executable, "-m", "my_project.launch", "--config_file", str(where),
         "--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank),
         "--main_process_ip", "127.0.0.1", "--main_process_port", port,
         "-m", "my_project.train", "--config", "tiny.yaml", *words(on_rank=1)]
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [small / f"output_{rank}" for rank in (0, 1)]
    nodes = []
    try:
        for command, output in zip(commands, outputs, strict=True):
            with output.open("w") as file:
                nodes.append(subprocess.Popen(command, stdout=file, stderr=file))
        codes = [launcher.wait(300) for launcher in nodes]
    finally:
        for launcher in nodes:
            launcher.kill()
            launcher.wait()
    shown = [output.read_text() for output in outputs]
    assert codes == [0, 0], shown
    assert all("batches.micro_batch_size is 2, since larger" in text for text in shown)
    assert sizes(small) == [None, 2]


def test_the_smallest_size_that_a_node_asks_for_is_that_of_all(tmp_path, monkeypatch):
    asked = {0: 0, 1: 4, 2: 2}
    nodes = meet(*(node(rank, lowered_micro_batch_size=size) for rank, size in asked.items()))
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG.replace("micro_batch_size: 4", "micro_batch_size: 0"))
    given = parsed("cpu")
    for others in nodes:
        kept, here = memory.with_lowered_micro_batch(given, given, others)
        assert kept.lowered_micro_batch_size == here.config.batches.micro_batch_size == 2
        assert kept.config is given.config
        assert here.arguments[-1] == "--batches.micro_batch_size=2"
