"""What only a GPU can show. Run with: make test-gpu.

If there are enough GPUs, each process has one and uses NCCL; otherwise all share one, over gloo.
"""

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragged import Deep, Ragged
from runs import assert_same_weights, change, make_config, records, status, train, values, weights
from torch import nn
from world import free_port, run_world

from my_project.config import Config

pytestmark = pytest.mark.gpu
gpus = torch.cuda.device_count() if os.environ.get("CUDA_VISIBLE_DEVICES") != "-1" else 0
needs_one = pytest.mark.skipif(gpus < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(gpus < 2, reason="needs two GPUs")


def on_gpus(processes: int, function: Callable, *arguments: Any) -> list[Any]:
    """Run each process on its GPU or, if there are too few, all on the first one, over gloo."""
    if gpus >= processes:
        return run_world(processes, function, *arguments)
    return run_world(processes, on_one_gpu, function, *arguments)


def on_one_gpu(function: Callable, *arguments: Any) -> Any:
    init_process_group = torch.distributed.init_process_group
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group = lambda **options: init_process_group(
        **options | {"backend": "gloo"}  # NCCL refuses two ranks on one GPU
    )
    return function(*arguments)


@needs_one
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_one_gpu_trains_like_the_cpu(tmp_path, precision, optimizer, monkeypatch):
    """Even if the first steps are skipped, because of the loss scale of fp16."""
    settings = {"optim__class_path": f"torch.optim.{optimizer}", "optim__lr": 0.02, "tf32": False}
    if optimizer == "SGD":
        settings["optim__init_args"] = {"momentum": 0.9}
    config = make_config(tmp_path, precision=precision, steps=14, **settings)
    run_world(1, train, config)
    skipped = tuple(step for step, loss in enumerate(values(config)) if loss is None)
    assert bool(skipped) == (precision == "fp16")
    reference = change(config, run_name="cpu", precision="no", recipe=Ragged(explode_at=skipped))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    run_world(1, train_on_cpu, reference)
    tolerance = 1e-4 if precision == "no" else 0.05
    assert values(config) == pytest.approx(values(reference), rel=tolerance)


def train_on_cpu(config) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    return train(config)


@needs_one
def test_fp16_overflow_is_skipped_and_the_scale_recovers(tmp_path):
    config = make_config(tmp_path, Ragged(explode_at=(3,)), precision="fp16", steps=8)
    run_world(1, train, config)
    assert records(config)[-1]["skipped_steps"] >= 1
    assert status(config)["outcome"] == "finished"
    assert all(value.isfinite().all() for value in weights(config.folder / "export").values())


class Convolutional(Ragged):
    """A convolution over the samples as small images."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        convolution = nn.Conv2d(3, 3, 3, padding=1)
        layers = (nn.Unflatten(1, (3, 3)), convolution, nn.Flatten(1, 2), nn.Tanh())
        return nn.Sequential(*layers, nn.Linear(data_info["features"], 1))


@needs_one
@pytest.mark.parametrize(
    ("recipe", "channels_last"), [(Ragged(dropout=0.2), False), (Convolutional(), True)]
)
def test_deterministic_resume_is_bit_identical(tmp_path, recipe, channels_last):
    settings = {"deterministic": True, "channels_last": channels_last}
    whole = make_config(tmp_path, recipe, run_name="whole", optim__schedule="constant", **settings)
    parts = change(whole, run_name="parts")
    run_world(1, train, whole)
    run_world(1, train, change(parts, steps=5))
    run_world(1, train, parts)
    assert_same_weights(parts, whole)


@needs_one
def test_a_killed_process_is_forked_again_and_ends_with_the_same_weights(tmp_path):
    """The launcher that forks it has imported torch, but must not have initialized CUDA."""
    pytest.importorskip("my_project.launching.launch")
    from test_launch import launch, wait_for_steps, workers

    finals = []
    for name in ("whole", "killed"):
        (folder := tmp_path / name).mkdir()
        arguments = (
            "--steps", "120", "--checkpoints.every_steps", "5", "--telemetry.every_steps", "1",
            "--deterministic", "true", "--recipe.init_args.seconds", "0.02",
        )  # fmt: skip
        with launch(folder, *arguments, launcher="my_project.launch", where="gpu") as run:
            if name == "killed":
                wait_for_steps(folder, 20)
                os.kill(workers(run.pid)[0], signal.SIGKILL)
            shown, _ = run.communicate(timeout=600)
        assert run.returncode == 0, shown
        assert "imports torch itself" not in shown
        starts = (folder / "runs/tiny/starts.jsonl").read_text().count('"event": "start"')
        assert starts == (2 if name == "killed" else 1), shown
        finals.append((folder / "runs/tiny/export/model.safetensors").read_bytes())
    assert finals[0] == finals[1]


def train_compiled(config: Config, regional: bool) -> int:
    """Train as with an accelerate config that has dynamo_config."""
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(regional)
    return train(config)


@needs_one
@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_trains_like_an_eager_one(tmp_path, regional):
    eager = make_config(tmp_path, Deep(), run_name="eager", tf32=False)
    run_world(1, train, eager)
    compiled = change(eager, run_name="compiled")
    run_world(1, train_compiled, compiled, regional)
    assert values(compiled) == pytest.approx(values(eager), rel=1e-4)
    assert records(compiled)[0]["compilations"] > 0


@needs_one
@pytest.mark.parametrize("several", [2, 4, 8])
def test_several_processes_give_the_curve_of_one(tmp_path, several):
    curves = []
    for processes in (1, several):
        config = make_config(
            tmp_path, run_name=str(processes), tf32=False, batches__micro_batch_size=2
        )
        on_gpus(processes, train, config)
        curves.append(values(config))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@needs_one
@pytest.mark.parametrize("processes", [1, 2])
def test_records_have_the_seconds_of_ranks_by_cuda_events_and_the_sensors(tmp_path, processes):
    config = make_config(tmp_path, steps=12, telemetry__every_steps=3, telemetry__peak_tflops=1.0)
    on_gpus(processes, train, config)
    for record in records(config):
        assert 0 < record["data_share"] < 1
        assert 0 < record["rank_seconds_min"] <= record["rank_seconds_max"]
        assert record["peak_memory_bytes"] == pytest.approx(1e7, rel=10)
        assert record["mfu"] > 0, "counted on fake tensors of the GPU"


class Normalized(nn.Module):
    """A batch norm over all axes but the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class BatchNormalized(Ragged):
    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        layers = (nn.Linear(data_info["features"], 8), Normalized(8), nn.Tanh(), nn.Linear(8, 1))
        return nn.Sequential(*layers)


@needs_two
def test_sync_batch_norm_sees_the_micro_batches_of_all_processes(tmp_path):
    """2 processes with micro-batch 8 and SyncBN normalize like one with micro-batch 16."""
    one = make_config(
        tmp_path, BatchNormalized(), run_name="one", batches__micro_batch_size=16, tf32=False
    )
    run_world(1, train, one)
    two = change(one, run_name="two", batches__micro_batch_size=8, distributed__sync_batchnorm=True)
    run_world(2, train, two)
    assert values(one) == pytest.approx(values(two), rel=1e-3)


def train_sharded(config: Config) -> int:
    """Train with FSDP2, as with an accelerate config; a single process gets a group of one."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        ACCELERATE_MIXED_PRECISION=config.precision or "no",
    )  # fmt: skip
    if "RANK" not in os.environ:
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in alone.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    return train(config)


@needs_one
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_fsdp_on_one_gpu_trains_like_no_fsdp_and_resumes(tmp_path, precision, optimizer):
    plain = make_config(
        tmp_path, Deep(), run_name="plain", tf32=False, precision=precision, optim__lr=0.02,
        optim__class_path=f"torch.optim.{optimizer}", optim__schedule="constant",
        evaluation__every_steps=5,
    )  # fmt: skip
    run_world(1, train, plain)
    fsdp = change(plain, run_name="fsdp")
    run_world(1, train_sharded, change(fsdp, steps=5))
    run_world(1, train_sharded, fsdp)
    tolerance = 1e-4 if precision == "no" else 0.05
    for name in ("loss", "validation/accuracy"):
        wanted = values(plain, name)
        assert values(fsdp, name) == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    assert status(fsdp)["outcome"] == "finished"


@needs_one
def test_fsdp_trains_like_ddp_saves_in_shards_and_resumes_on_any_number(tmp_path):
    ddp = make_config(tmp_path, Deep(), run_name="ddp", tf32=False, checkpoints__every_steps=5)
    on_gpus(2, train, ddp)
    fsdp = change(ddp, run_name="fsdp")
    on_gpus(2, train_sharded, fsdp)
    assert values(ddp) == pytest.approx(values(fsdp), rel=1e-4)
    shards = list((fsdp.folder / "checkpoints/step_00000005").glob("model.rank_*.safetensors"))
    assert len(shards) == 2
    theirs = weights(ddp.folder / "export")
    for processes in (2, 1):
        again = change(fsdp, run_name=f"on_{processes}")
        shutil.copytree(fsdp.folder, again.folder)
        shutil.rmtree(again.folder / "checkpoints/step_00000010")
        shutil.rmtree(again.folder / "export")
        (again.folder / "status.json").write_text('{"outcome": "running", "steps": 10}')
        on_gpus(processes, train_sharded, again)
        ours = weights(again.folder / "export")
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


@needs_two
def test_a_hang_under_nccl_leaves_a_trace_of_the_flight_recorder(tmp_path):
    recipe = Ragged(fault="hang", fault_at=3)
    config = make_config(tmp_path, recipe, distributed__timeout_seconds=5)
    with pytest.raises(RuntimeError, match="the process died"):
        run_world(2, train, config)
    traces = list((config.folder / "errors").glob("nccl_trace_rank_*"))
    assert len(traces) == 2
    assert "pg" in traces[0].read_text()
