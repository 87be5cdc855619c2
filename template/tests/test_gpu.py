"""What no CPU can show. Run with: make test-gpu (one GPU; two for NCCL, SyncBatchNorm and FSDP)."""

import os
import shutil

import pytest
import torch
from ragged import Deep, Ragged
from runs import change, make_config, records, status, train, weights
from world import run_world

pytestmark = pytest.mark.gpu
gpus = torch.cuda.device_count() if os.environ.get("CUDA_VISIBLE_DEVICES") != "-1" else 0
needs_one = pytest.mark.skipif(gpus < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(gpus < 2, reason="needs two GPUs")


@needs_one
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_one_gpu_trains_like_the_cpu(tmp_path, precision, monkeypatch):
    config = make_config(tmp_path, precision=precision, tf32=False)
    run_world(1, train, config)
    reference = change(config, run_name="cpu", precision="no")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    run_world(1, train_on_cpu, reference)
    tolerance = 1e-4 if precision == "no" else 0.05
    assert [r["loss"] for r in records(config)] == pytest.approx(
        [r["loss"] for r in records(reference)], rel=tolerance
    )


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


@needs_one
def test_deterministic_resume_is_bit_identical(tmp_path):
    whole = make_config(tmp_path, Ragged(dropout=0.2), run_name="whole", deterministic=True)
    run_world(1, train, whole)
    parts = change(whole, run_name="parts", steps=5, optim__schedule="constant")
    whole = change(parts, run_name="constant", steps=10)
    run_world(1, train, whole)
    run_world(1, train, parts)
    run_world(1, train, change(parts, steps=10))
    ours, theirs = weights(parts.folder / "export"), weights(whole.folder / "export")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("several", [2, 4, 8])
def test_nccl_gives_the_curve_of_one_process(tmp_path, several):
    if gpus < several:
        pytest.skip(f"needs {several} GPUs")
    curves = []
    for processes in (1, several):
        config = make_config(
            tmp_path, run_name=str(processes), tf32=False, batches__micro_batch_size=2
        )
        run_world(processes, train, config)
        curves.append([r["loss"] for r in records(config)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.parametrize("processes", [1, 2])
def test_records_have_the_phases_by_cuda_events_and_the_sensors(tmp_path, processes):
    if gpus < processes:
        pytest.skip(f"needs {processes} GPUs")
    config = make_config(tmp_path, steps=12, telemetry__every_steps=3, telemetry__peak_tflops=1.0)
    run_world(processes, train, config)
    for record in records(config):
        phases = [record[f"{name}_share"] for name in ("data", "forward", "backward", "optimizer")]
        assert all(share > 0 for share in phases)
        assert sum(phases) <= 1.001
        assert 0 < record["rank_seconds_min"] <= record["rank_seconds_max"]
        assert record["peak_memory_bytes"] == pytest.approx(1e7, rel=10)
        assert record["mfu"] > 0, "counted on fake tensors of the GPU"


@needs_two
def test_sync_batch_norm_sees_the_micro_batches_of_all_processes(tmp_path):
    """2 processes with micro-batch 8 and SyncBN normalise like one with micro-batch 16."""
    recipe = Ragged(batch_norm=True)
    one = make_config(tmp_path, recipe, run_name="one", batches__micro_batch_size=16, tf32=False)
    run_world(1, train, one)
    two = change(one, run_name="two", batches__micro_batch_size=8, distributed__sync_batchnorm=True)
    run_world(2, train, two)
    assert [r["loss"] for r in records(one)] == pytest.approx(
        [r["loss"] for r in records(two)], rel=1e-3
    )


def train_sharded(config) -> int:
    """Train with FSDP2, as an accelerate config asks for it."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_AUTO_WRAP_POLICY="NO_WRAP", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        ACCELERATE_MIXED_PRECISION="no",
    )  # fmt: skip
    return train(config)


@needs_two
def test_fsdp_trains_like_ddp_saves_in_shards_and_resumes_on_any_number(tmp_path):
    ddp = make_config(tmp_path, Deep(), run_name="ddp", tf32=False, checkpoints__every_steps=5)
    run_world(2, train, ddp)
    fsdp = change(ddp, run_name="fsdp")
    run_world(2, train_sharded, fsdp)
    assert [r["loss"] for r in records(ddp)] == pytest.approx(
        [r["loss"] for r in records(fsdp)], rel=1e-4
    )
    shards = list((fsdp.folder / "checkpoints/step_00000005").glob("model.rank_*.safetensors"))
    assert len(shards) == 2
    theirs = weights(ddp.folder / "export")
    for processes in (2, 1):
        again = change(fsdp, run_name=f"on_{processes}")
        shutil.copytree(fsdp.folder, again.folder)
        shutil.rmtree(again.folder / "checkpoints/step_00000010")
        shutil.rmtree(again.folder / "export")
        (again.folder / "status.json").write_text('{"outcome": "running", "steps": 10}')
        run_world(processes, train_sharded, again)
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
