"""Records of intervals cover their steps and all ranks; records of starts note what changed."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from my_project import provenance, run_files, step_sums
from my_project.config import Config, ConfigError
from my_project.launching import attempts
from my_project.loading.layout import batch_layout
from my_project.manifest import read_manifest
from my_project.records import performance, recorder
from my_project.records.recorder import RecordFile
from my_project.run_folder import Run
from my_project.state import NotFiniteError, StepReport, TrainState
from ragged import Noting, Ragged
from runs import change, make_config, records, train
from world import run_world

PHASES = ("data", "evaluation", "saving")
SHARES = [f"{phase}_share" for phase in PHASES]


class Clock:
    """Stands still until it is told to go on."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def time(self) -> float:
        return self.now + 1e9


def micro_batches(clock: Clock, seconds: float) -> Iterator[int]:
    """Yield micro-batches, each of which takes some seconds."""
    while True:
        clock.now += seconds
        yield 0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (recorder, performance):
        monkeypatch.setattr(module, "time", clock)
    return clock


def writer_of(folder: Path, steps: int, **settings: Any) -> recorder.Recorder:
    config = make_config(folder, steps=steps, **settings)
    run = Run(config, rank=0)
    run.total_steps = steps
    run.lengths = {"the training set": 70}
    run.hosts = ["here"]
    run.folder.mkdir(exist_ok=True)
    accelerator: Any = SimpleNamespace(
        is_main_process=True, process_index=0, device=torch.device("cpu"), trackers=[],
        mixed_precision="no",
        log=lambda values, step: None,
    )  # fmt: skip
    layout = batch_layout(config.batches, 1)
    state = TrainState()
    return recorder.Recorder(accelerator, run, layout, state, torch.nn.Linear(1, 1))


def take_steps(log: recorder.Recorder, clock: Clock, seconds: list[float]) -> None:
    """Take steps of so many seconds each; a save or an evaluation after steps 4, 5, 7 and 8."""
    samples = log.timed(micro_batches(clock, 0.25))
    unread: list[StepReport] = []
    for step, whole in enumerate(seconds):
        next(samples)
        clock.now += 0.125  # forward
        clock.now += whole - 0.5
        clock.now += 0.125
        log.step_ended(step)
        unread.append(StepReport(step, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, {}, own_seconds=0.375))
        if len(unread) > 1:  # the numbers of a step come after the next one
            log.observe(unread.pop(0))
        if step + 1 in (4, 5, 7, 8):
            log.observe(unread.pop())
            with log.paused("saving" if step + 1 == 4 else "evaluation"):
                clock.now += 100
            clock.now += 10 if step + 1 == 4 else 0  # not in a pause: part of the next interval


def test_a_record_has_the_time_of_its_own_steps(tmp_path, clock):
    """A record every two steps."""
    log = writer_of(tmp_path, steps=8, telemetry__every_steps=2)
    with log.paused("evaluation"):  # the sanity check
        clock.now += 1000
    take_steps(log, clock, [1, 3, 2, 6, 4, 4, 0.5, 1.5])
    seen = [(r["step"], r["step_seconds"]) for r in records(log.run.config)]
    assert seen == [(2, 2), (4, 4), (6, 9), (8, 1)]
    for record in records(log.run.config):
        rate = record["samples_per_second"]
        assert rate == pytest.approx(16 / record["step_seconds"], rel=1e-3)
        assert record["items_per_second"] == pytest.approx(rate / 16, rel=1e-3), "one each step"
    assert log.fields("of_run") == {"samples per second": 8 * 16 / (4 + 8 + 18 + 2)}
    # the wait for data in two steps, and each pause
    seconds = [0.5, 100, 100]
    shares = [records(log.run.config)[2][name] for name in SHARES]
    assert shares == pytest.approx([part / 218 for part in seconds], rel=1e-3)
    for record in records(log.run.config):
        assert record["rank_seconds_max"] == 0.375, "until a rank needs the others, per step"
        assert record["data_seconds_max"] == 0.25


def test_a_ranks_own_seconds_end_before_the_all_reduce(monkeypatch):
    """Of the step that is read, not of the one after it."""
    clock = Clock()
    monkeypatch.setattr(step_sums, "time", clock)
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    reader = step_sums.DelayedReader(accelerator)
    reports = []
    for step, own in enumerate((0.25, 2.0, 0.5)):
        sums = reader.begin()
        sums.add(torch.ones(()), 1.0)
        clock.now += own
        sums.start_all_reduce(False, False)
        clock.now += 8  # the backward pass, which waits for the others
        reports.append(reader.push(step, sums, 1.0))
    reports.append(reader.flush())
    assert [r.own_seconds for r in reports if r] == [0.25, 2.0, 0.5]


def test_the_last_interval_of_a_run_that_skips_too_many_steps_has_their_time(tmp_path, clock):
    """Not that of the step after them, whose numbers are not read."""
    log = writer_of(tmp_path, steps=8, telemetry__every_steps=5)
    take_steps(log, clock, [2, 2, 5])
    log.__exit__(NotFiniteError)
    (record,) = records(log.run.config)
    assert (record["step"], record["step_seconds"]) == (2, 2)


def test_an_error_at_the_end_of_training_fails_the_outputs(tmp_path, clock, monkeypatch):
    """A tracker would wait longer, and show the run as finished."""
    log = writer_of(tmp_path, steps=8)
    called: list[str] = []
    monkeypatch.setattr(recorder, "call", lambda _, name, *__: called.append(name) or [])
    monkeypatch.setattr(log, "_write_pending", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.__exit__(None)
    assert called == ["stop", "failed", "close"]


def test_numbers_of_a_rank_fit_if_a_recipe_sets_the_default_dtype():
    torch.set_default_dtype(torch.float16)
    try:
        reports = performance.RankReports(0.5, 0.25, 1, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert reports.summarize(["here"])["peak_memory_bytes"] > 65_504  # the largest float16


def numerics(config: Config) -> dict[str, Any]:
    return json.loads((config.folder / "run.json").read_text())["numerics"]


def train_compiled(config: Config) -> int:
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"
    return train(config)


@pytest.mark.slow
def test_what_a_run_is_continued_with_is_recorded_and_a_change_told(tmp_path, caplog):
    config = make_config(tmp_path, Ragged(validation_samples=0), steps=2)
    plain = {
        "precision": "no", "tf32": True, "deterministic": False, "sharding": "none",
        "comm_hook": "no", "torch_compile": False, "scheduled_steps": 2,
    }  # fmt: skip
    train(config)
    assert numerics(config) == plain
    assert records(config, "changed") == []
    other = change(
        config, steps=4, precision="bf16", tf32=False, distributed__ddp={"comm_hook": "bf16"}
    )
    changed = {
        "precision": ["no", "bf16"], "tf32": [True, False], "comm_hook": ["no", "bf16"],
        "torch_compile": [False, True], "scheduled_steps": [2, 4],
    }  # fmt: skip
    run_world(2, train_compiled, other)
    assert [(r["step"], r["changed"]) for r in records(config, "changed")] == [(2, changed)]
    assert numerics(config) == plain | {name: now for name, (_, now) in changed.items()}
    newest = config.folder / "checkpoints/step_00000004"
    assert read_manifest(newest)["state"]["numerics"] == numerics(config)

    shutil.rmtree(newest)  # continued from step 2, so the change never was
    train(change(config, steps=6))
    (told,) = records(config, "changed")
    assert told["changed"] == {"scheduled_steps": [2, 6]}, "of its cosine"
    assert "trained with scheduled_steps 2 (now 6): the curve may differ" in caplog.text
    assert [r["step"] for r in records(config)] == [*range(1, 7)]


# ---- a whole run ---------------------------------------------------------------------------------
ALL = {"kind", "step", "epoch", "elapsed_seconds", "time"}
PER_RANK = {f"{what}_{how}" for what in ("rank_seconds", "data_seconds")
            for how in ("min", "median", "max")}  # fmt: skip
INTERVAL = {
    "steps", "skipped", "skipped_steps", "loss", "learning_rate", "gradient_norm",
    "samples_per_second", "items_per_second", "step_seconds", "slowest_rank", "slowest_host",
    "peak_memory_bytes",
}  # fmt: skip
FIELDS = {
    "start": {"world_size", "micro_batch_size", "hosts", "resumed_from"},
    "interval": INTERVAL | PER_RANK | {*SHARES},
    "evaluation": {"seconds", "is_best", "validation/accuracy", "validation/auroc"},
    "checkpoint": {"seconds"},
    "stop": {"reason"},
}


def kinds(config: Config) -> list[tuple[str, int]]:
    """List the kind and step of each record."""
    return [(record["kind"], record["step"]) for record in records(config, "kind")]


def test_the_records_of_a_run_that_is_preempted_and_continued(tmp_path):
    config = make_config(
        tmp_path, Noting(), steps=8, telemetry__every_steps=4, evaluation__every_steps=3,
        evaluation__best_metric="validation/accuracy", checkpoints__every_steps=4,
        checkpoints__keep=9,
    )  # fmt: skip
    assert run_world(2, train, change(config, stop_after="0s")) == [75, 75]
    stopped = kinds(config)
    step = stopped[-1][1]  # the first at which the vote of the step before is known
    assert stopped[0] == ("start", 0)
    assert stopped[-2:] == [("checkpoint", step), ("stop", step)]
    assert records(config, "reason")[0]["reason"] == "stop_after 0s has elapsed"

    assert run_world(2, train, config) == [0, 0]
    intervals = [("interval", k) for k in (4, 8) if k > step]
    assert kinds(config)[: len(stopped)] == stopped
    assert kinds(config)[len(stopped)] == ("start", step)
    assert [one for one in kinds(config)[len(stopped) :] if one[0] == "interval"] == intervals
    assert kinds(config)[-3:] == [("interval", 8), ("checkpoint", 8), ("evaluation", 8)]
    seen = records(config, "kind")
    for record in seen:
        scalars = {"train/root", "train/twice"} if record["kind"] == "interval" else set()
        assert record.keys() == ALL | FIELDS[record["kind"]] | scalars, record["kind"]
        assert record["epoch"] == record["step"] / 4, "70 samples make 4 global batches of 16"
    for name in ("elapsed_seconds", "time"):
        assert [r[name] for r in seen] == sorted(r[name] for r in seen), name
    starts = [r for r in seen if r["kind"] == "start"]
    assert [r["resumed_from"] for r in starts] == [
        None, str(config.folder / f"checkpoints/step_{step:08d}")
    ]  # fmt: skip
    assert {(r["world_size"], len(r["hosts"])) for r in starts} == {(2, 2)}
    for record in records(config, "loss"):
        assert record["steps"] == 4, "also of an interval in which the run was stopped"
        assert record["train/twice"] == 2.0, "the same for the sums of a recipe's scalars"
        parts = [record[name] for name in SHARES]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= 1.001  # rounded
        assert record["slowest_rank"] in (0, 1)
        low, middle, high = (record[f"rank_seconds_{how}"] for how in ("min", "median", "max"))
        assert low <= middle <= high


def test_steps_that_are_skipped_are_counted_in_their_interval(tmp_path):
    config = make_config(
        tmp_path, Ragged(explode_at=(2, 3, 5), validation_samples=0), steps=6,
        telemetry__every_steps=2,
    )  # fmt: skip
    assert train(config) == 0
    seen = [(r["steps"], r["skipped"], r["skipped_steps"]) for r in records(config)]
    assert seen == [(2, 0, 0), (2, 2, 2), (2, 1, 3)]
    assert [r["loss"] is None for r in records(config)] == [False, True, False]


# ---- MFU -----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputed(Ragged):
    """Says that its model recomputes activations."""

    is_recomputed: bool = False

    def build_model(self, *arguments: Any) -> torch.nn.Module:
        model: Any = super().build_model(*arguments)
        model.gradient_checkpointing = self.is_recomputed
        return model


class Multiplying(torch.optim.AdamW):
    """Multiplies matrices, as Muon does."""

    def step(self, closure: Any = None) -> Any:
        torch.ones(100, 100) @ torch.ones(100, 100)
        return super().step(closure)


@pytest.mark.parametrize(("processes", "micro_batch_size"), [(2, 8), (2, 2), (3, 0), (3, 4)])
def test_mfu_is_recorded_for_any_recipe(tmp_path, processes, micro_batch_size):
    """By hand: two linear layers, forward; backward for both weights and one input."""
    recipe = Ragged(validation_samples=0)
    config = make_config(
        tmp_path, recipe, steps=2, telemetry__peak_tflops=1e-6, telemetry__every_steps=2,
        batches__micro_batch_size=micro_batch_size, optim__class_path="test_records.Multiplying",
    )  # fmt: skip
    positions = recipe.build_datasets(recipe.prepare_data())[0][0]["x"].shape[0]
    by_hand = 2 * positions * (6 * 8 + 8 * 1) * 2 + 2 * positions * 8
    run_world(processes, train, config)
    (record,) = records(config)
    mfu = record["samples_per_second"] * by_hand / (1e6 * processes)
    assert record["mfu"] == pytest.approx(mfu, rel=2e-3)


def test_recomputed_operators_do_not_count_twice(tmp_path):
    """With the attribute that transformers sets in gradient_checkpointing_enable."""
    for is_recomputed in (False, True):
        recipe = Recomputed(is_recomputed=is_recomputed, validation_samples=0)
        name = f"recomputed_{is_recomputed}"
        config = make_config(tmp_path, recipe, steps=1, run_name=name, telemetry__peak_tflops=1e-6)
        assert train(config) == 0
        assert ["mfu" in record for record in records(config)] == [not is_recomputed]


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI325X", 1307),
        ("AMD Instinct MI355X", 2517),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A1000", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_by_its_name(monkeypatch, name, bf16):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert performance.peak_tflops(torch.device("cuda"), "bf16", tf32=False) == bf16


def test_the_commit_is_of_the_recipes_repository_or_unknown_without_git(tmp_path, monkeypatch):
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            "import os\nimport numpy\ndef loss():\n    from packaging.version import Version\n"
        )
    mine = str(tmp_path / "project/mine.py")
    monkeypatch.chdir(tmp_path / "elsewhere")

    def known(source: str) -> tuple:
        about = provenance.provenance(source)
        return about["git_commit"], about["git_dirty"]

    assert known(mine) == (None, None)
    who = ["-c", "user.name=me", "-c", "user.email=me@here"]
    for folder in ("project", "elsewhere"):
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", folder]):
            subprocess.run(["git", *words], cwd=tmp_path / folder, check=True)
    head = ["git", "-C", str(tmp_path / "project"), "rev-parse", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere/.git"))  # as in a hook
    assert known(mine) == (commit, False)
    Path(mine).write_text(Path(mine).read_text() + "\n")
    assert known(mine) == (commit, True)
    # an environment in the project: what is installed there has no commit of its own
    (tmp_path / "project/.gitignore").write_text(".venv\n")
    installed = tmp_path / "project/.venv/mine.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert known(str(installed)) == (None, None)
    packages = provenance.installed(mine)
    assert {"torch", "numpy", "packaging"} <= packages.keys()
    assert "os" not in packages


def file_of(folder: Path, lines: list[bytes]) -> RecordFile:
    """Return the records of a run, of which a start reads the end."""
    run = Run(make_config(folder, run_name=f"run_{len(lines)}"), rank=0)
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "metrics.jsonl").write_bytes(b"".join(lines))
    return RecordFile(run)


def interval(step: int) -> bytes:
    record = {"kind": "interval", "step": step, "elapsed_seconds": step / 10, "loss": 1 / 3}
    return json.dumps(record).encode() + b"\n"


def test_a_start_reads_as_much_of_a_long_run_as_of_a_short_one(tmp_path, monkeypatch):
    """A run with a million records would take minutes to start again."""
    read = []
    parse = run_files.parse_record
    monkeypatch.setattr(run_files, "parse_record", lambda line: read.append(line) or parse(line))
    for length in (1_000, 100_000):
        lines = [interval(step) for step in range(1, length + 1)]
        file = file_of(tmp_path, lines)
        read.clear()
        file.drop_newer(TrainState(step=length - 5))
        assert len(read) == 7, "the five that go, that of the state's step, and one before"
        assert file.path.read_bytes() == b"".join(lines[:-5])
        assert file.newest == {"interval": length}
        assert file.elapsed_before == (length - 5) / 10
        assert attempts.last_record(file.run.folder).step == length - 5
        assert len(read) == 8


@pytest.mark.parametrize("block", [7, 64, 1 << 16])
@pytest.mark.parametrize("end", [b"", b"\n", b'{"step": 9, "kin', b'{"step": 9}'])
def test_records_from_the_end_are_those_from_the_beginning(tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(run_files, "BLOCK_BYTES", block)
    path = tmp_path / "metrics.jsonl"
    for lines in ([], [interval(1)], [interval(1), b"[3]\n", bytes(20) + b"\n", interval(2)]):
        path.write_bytes(b"".join(lines) + end)
        found = [*run_files.each_record_backward(path)]
        assert [record for *_, record in found][::-1] == [*run_files.each_record(path)]
        for at, line, _ in found:
            assert path.read_bytes()[at : at + len(line)] == line


def test_a_state_without_a_new_field_is_restored_and_a_wrong_type_is_refused(tmp_path):
    config, saved = make_config(tmp_path), TrainState(step=7, skipped_steps=2).to_dict()
    del saved["lr_reductions"]  # as if this field had been added after the save
    state = TrainState()
    state.restore(saved, config)
    assert state == TrainState(step=7, skipped_steps=2)
    for name, value in (("step", None), ("best", "0.5"), ("results", None)):
        with pytest.raises(ConfigError, match=f"state has {name} .*: it is damaged"):
            TrainState().restore(saved | {name: value}, config)


def test_of_the_step_of_the_state_what_is_not_written_again_stays(tmp_path):
    evaluation = b'{"kind": "evaluation", "step": 4}\n'
    lines = [interval(3)[:-1], b"\n", interval(4), evaluation, interval(5), b'{"kind": "in']
    for evaluated, wanted in ((4, lines[:4]), (0, lines[:3])):
        file = file_of(tmp_path / str(evaluated), lines)
        file.drop_newer(TrainState(step=4, evaluated_step=evaluated))
        assert file.path.read_bytes() == b"".join(wanted)
    file = file_of(tmp_path, [interval(3)[:-1]])
    file.drop_newer(TrainState(step=4))
    assert file.path.read_bytes() == interval(3), "the next record begins a line"
