"""fp16 and SyncBatchNorm, as far as a CPU can show them; the rest is in test_gpu.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from my_project import accelerator as accelerators
from my_project import contract, parallel
from my_project import train as training
from my_project.checkpoint import exporting
from my_project.checkpoint.saving import Checkpoints
from my_project.config import Config
from my_project.manifest import read_manifest
from my_project.run_folder import Run
from ragged import Ragged
from runs import assert_same_weights, change, make_config, records, train, weights
from test_fsdp_on_cpu import ask_for_fsdp
from world import run_world

SCALE = 2.0**6


@dataclass(frozen=True, kw_only=True)
class Overflowing(Ragged):
    """In one step, the gradient overflows in fp16, on one rank only."""

    overflow_at: int = 3
    overflow_on_rank: int = 1
    overflow_in_one_shard: bool = False  # that of rank 0: the one number of a bias

    def loss(self, model: Any, batch: dict[str, torch.Tensor], step: int) -> Any:
        loss_sum, num_items = super().loss(model, batch, step)
        assert model[0](batch["x"]).dtype == torch.float16
        if step == self.overflow_at and accelerators.world()[1] == self.overflow_on_rank:
            if self.overflow_in_one_shard:
                bias: torch.Tensor = model[-1].bias
                return loss_sum + 1e38 * (bias - bias.detach()).sum(), num_items
            loss_sum = loss_sum * 1e4
        return loss_sum, num_items


def train_fp16(config: Config, sharded: bool, scale: float | None = SCALE) -> list[float]:
    """Train with autocast to fp16 and a GradScaler, which accelerate makes on GPUs only.

    Args:
        config: of the run.
        sharded: with FSDP2.
        scale: that the first step has; None for the run's own.

    Returns:
        The scale after each step.
    """
    real, scales = accelerators.start_accelerator, []
    if sharded:
        ask_for_fsdp()

    class Scaler(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            scales.append(self.get_scale())

    @contextmanager
    def start(config: Config) -> Iterator[Any]:
        with real(config) as accelerator:
            accelerator.state._mixed_precision = "fp16"
            accelerator.native_amp = True
            first = scale or accelerators.initial_loss_scale(config).init_scale
            accelerator.scaler = Scaler("cpu", init_scale=first, growth_interval=4)
            yield accelerator

    training.start_accelerator = start  # type: ignore[assignment]
    try:
        assert train(config) == 0
    finally:
        training.start_accelerator = real
    return scales


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_saved(tmp_path, sharded):
    recipe = Overflowing(overflow_in_one_shard=sharded)
    whole = make_config(tmp_path, recipe, run_name="whole", steps=9, optim__schedule="constant")
    parts = change(whole, run_name="parts", steps=5)
    found = run_world(2, train_fp16, whole, sharded)
    # halved by the overflow of the fourth step; doubled by four good steps: 0 to 3 are not
    assert found[0] == [SCALE] * 3 + [SCALE / 2] * 4 + [SCALE] * 2
    assert found[1] == found[0], "every rank has the same scale"
    skipped = [record["skipped_steps"] for record in records(whole)]
    assert skipped == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    first = run_world(2, train_fp16, parts, sharded)
    state = read_manifest(parts.folder / "checkpoints/step_00000005")["state"]
    assert state["scaler"]["scale"] == SCALE / 2
    assert state["scaler"]["_growth_tracker"] == 1
    rest = run_world(2, train_fp16, change(parts, steps=9), sharded)
    assert [a + b for a, b in zip(first, rest, strict=True)] == found
    assert_same_weights(parts, whole)
    assert all(value.isfinite().all() for value in weights(whole.folder / "export").values())


def test_a_model_with_sync_batch_norm_is_exported_as_the_plain_one(tmp_path, monkeypatch):
    """Its forward pass in training needs a GPU; conversion and keys do not."""
    config = make_config(tmp_path, Ragged(batch_norm=True), distributed__sync_batchnorm=True)
    plain = contract.build_model(config, {"features": 6})
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    monkeypatch.setattr(contract, "build_model", lambda *_: plain)
    converted, _ = parallel.build_model(Accelerator(cpu=True), config, {})
    assert any(isinstance(module, torch.nn.SyncBatchNorm) for module in converted.modules())
    run = Run(config, 0)
    run.folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.SGD(converted.parameters())
    saver = Checkpoints(run, converted, optimizer, None)
    exporting.export(run, {"features": 6}, converted, saver)
    found = weights(config.folder / "export")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_run_of_many_items_goes_on_in_another_precision(tmp_path):
    """From fp16 without it, and back: a checkpoint without a loss scale gives a new one.

    Of 256 samples with up to 8 items each, the sums of the first steps may overflow: the scaler
    then halves the scale, and the run goes on.
    """
    config = make_config(
        tmp_path, Ragged(samples=512), steps=6, batches__global_batch_size=256,
        batches__micro_batch_size=256,
    )  # fmt: skip
    ((*_, scale),) = run_world(1, train_fp16, config, False, None)
    assert 2.0**5 <= scale <= 2.0**10
    assert run_world(1, train, change(config, steps=8)) == [0]
    ((*_, scale),) = run_world(1, train_fp16, change(config, steps=14), False, None)
    assert 2.0**5 <= scale <= 2.0**10
    assert [record["step"] for record in records(config, "skipped_steps")] == [*range(1, 15)]


def test_the_first_loss_scale_is_a_power_of_two_for_a_global_batch(tmp_path):
    scales = [
        accelerators.initial_loss_scale(
            make_config(tmp_path, batches__global_batch_size=n)
        ).init_scale
        for n in (1, 24, 256)
    ]
    assert scales == [2.0**16, 2.0**11, 2.0**8]


def test_weights_are_channels_last_where_the_config_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "build_model", lambda *_: torch.nn.Conv2d(3, 4, 3))
    for wanted in (False, True):
        config = make_config(tmp_path, channels_last=wanted)
        model: Any = parallel.build_model(Accelerator(cpu=True), config, {})[0]
        assert model.weight.is_contiguous(memory_format=torch.channels_last) == wanted


def test_tf32_is_what_the_config_says_also_where_a_model_is_compiled(tmp_path, monkeypatch):
    """On a GPU accelerate's constructor allows it then."""

    def make(**arguments: Any) -> Accelerator:
        torch.set_float32_matmul_precision("high")
        return Accelerator(**arguments)

    monkeypatch.setattr(accelerators, "Accelerator", make)
    with accelerators.start_accelerator(make_config(tmp_path, tf32=False)):
        assert torch.get_float32_matmul_precision() == "highest"
