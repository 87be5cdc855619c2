"""Activation checkpointing and torch.compile of a model's blocks: the same curve, plain keys."""

import copy
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from my_project import blocks
from my_project.config import Config, ConfigError
from ragged import Norm, Ragged
from runs import change, make_config, records, train, weights
from test_fsdp_on_cpu import ask_for_fsdp
from torch import Tensor, nn
from world import run_world

headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
can_build = shutil.which(os.environ.get("CXX", "g++")) and headers.is_file()
needs_compiler = pytest.mark.skipif(not can_build, reason="inductor needs g++ and Python.h")


class Block(nn.Module):
    def __init__(self, dropout: float, has_norm: bool) -> None:
        super().__init__()
        self.norm = Norm(8) if has_norm else nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """(B, T, 8) -> (B, T, 8)."""
        return x + scale * self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, features: int, dropout: float = 0.0, has_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(features, 8)
        self.blocks = nn.ModuleList(Block(dropout, has_norm) for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, features) -> (B, T, 1)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


@dataclass(frozen=True, kw_only=True)
class Stacked(Ragged):
    """Micro-batches of many lengths, and a loss that uses the step."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return Stack(data_info["features"], self.dropout, self.batch_norm)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Cut to the longest sample, as padding does."""
        batch = torch.utils.data.default_collate(samples)
        longest = int(batch["counts"].sum(-1).max())
        return {k: v[:, :longest].contiguous() if v.ndim > 1 else v for k, v in batch.items()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        error = (model(batch["x"])[..., 0] - batch["y"]) ** 2 * batch["counts"]
        return error.sum() * (1 + 1 / (1 + step)), batch["counts"].sum()


# ---- activation checkpointing --------------------------------------------------------------------
def test_a_recomputed_block_keeps_a_forward_that_is_not_its_classes():
    block = nn.Linear(2, 2)
    block.forward = lambda x: 3 * x
    blocks.recompute_activations(block)
    x = torch.ones(2, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_a_copy_of_a_recomputed_block_calls_its_own_weights():
    model = Stack(6)
    for block in model.blocks:
        blocks.recompute_activations(block)
    copied = copy.deepcopy(model)
    torch.nn.init.zeros_(copied.blocks[0].down.weight)
    x = torch.randn(2, 3, 6)
    assert not torch.equal(copied(x), model(x))


class Named(Ragged):
    """Names its blocks."""

    def model_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model[1]]


class Nested(nn.Module):
    """Blocks in lists that are not of one class, and in stages; an output tied to one of them."""

    def __init__(self, is_tied: bool = False, no_split: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ModuleList(Block(0.0, False) for _ in range(2)), nn.Linear(4, 4))
            for _ in range(2)
        )
        self.outer = nn.ModuleList(Stack(4) for _ in range(2))
        self.head = nn.Linear(8, 32)
        if is_tied:
            self.head.weight = self.outer[1].blocks[0].up.weight
        self._no_split_modules = no_split


def test_blocks_are_outer_layers_of_one_class_in_a_list_or_what_is_named(tmp_path):
    def found(model: nn.Module) -> list[nn.Module]:
        return blocks.blocks(Ragged(), model)

    model = Stack(6)
    assert found(model) == [*model.blocks]
    nested = Nested()
    inner = [block for layer in nested.layers for block in layer[0]]
    assert found(nested) == [*inner, *nested.outer], "of layers within layers the outer ones"
    tied = Nested(is_tied=True)
    of_tied = [block for layer in tied.layers for block in layer[0]]
    assert found(tied) == [*of_tied, tied.outer[0], tied.outer[1].blocks[1]], "shares a weight"
    named = Nested(no_split=("Linear",))
    assert set(map(type, found(named))) == {nn.Linear}, "as transformers names them"
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert blocks.blocks(Named(), plain) == [plain[1]]
    assert found(plain) == []
    config = make_config(tmp_path, distributed__activation_checkpointing=True)
    with pytest.raises(ConfigError, match="activation_checkpointing: Sequential has no blocks"):
        blocks.checkpoint_activations_of_blocks(config, plain, Accelerator(cpu=True))


def is_recomputed_at_all(config: Config) -> int:
    """Train; return how often a block's forward has run."""
    calls, forward = [], Block.forward
    Block.forward = lambda *a, **k: calls.append(1) or forward(*a, **k)  # type: ignore
    try:
        assert train(config) == 0
    finally:
        Block.forward = forward
    return len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_recomputes_gives_the_same_curve(tmp_path, processes):
    """Also with dropout, and with BatchNorm, whose statistics must move only once."""
    settings = {"validation_samples": 0, "dropout": 0.3, "batch_norm": True}
    calls, curves, exports = [], [], []
    for recompute in (False, True):
        config = make_config(
            tmp_path, Stacked(**settings), run_name=str(recompute), steps=4,
            distributed__activation_checkpointing=recompute, checks__recipe=False,
        )  # fmt: skip
        calls += run_world(processes, is_recomputed_at_all, config)
        curves.append([r["loss"] for r in records(config)])
        exports.append(weights(config.folder / "export"))
    assert curves[0] == curves[1]
    assert exports[0].keys() == Stack(6, has_norm=True).state_dict().keys()
    torch.testing.assert_close(*exports, rtol=0, atol=0)
    assert calls[processes:] == [2 * count for count in calls[:processes]]


# ---- torch.compile -------------------------------------------------------------------------------
def ask_for_compile(regional: bool, backend: str = "INDUCTOR") -> None:
    """Set what `accelerate launch` sets for an accelerate config with dynamo_config."""
    os.environ |= {
        "ACCELERATE_DYNAMO_BACKEND": backend,
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(regional),
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",  # which it says for a key that is not set
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # starts no processes
    }


def compiled(config: Config, regional: bool, backend: str = "INDUCTOR") -> dict[str, Any]:
    """Train through torch.compile, and go on from the end."""
    from torch._dynamo.utils import counters

    if backend != "no":
        ask_for_compile(regional, backend)
    assert train(change(config, steps=config.steps // 2)) == 0
    first = counters["frames"]["total"]
    assert train(config) == 0
    return {"first": first, "all": counters["frames"]["total"]}


def assert_same_curve_and_plain_keys(ours: Config, theirs: Config, tolerance: float) -> None:
    """Compare losses and results of evaluations."""
    for name in ("loss", "validation/auroc", "validation/accuracy"):
        curves = [[record[name] for record in records(c, name)] for c in (ours, theirs)]
        assert curves[0] == pytest.approx(curves[1], rel=tolerance)
    for config in (ours, theirs):
        assert weights(config.folder / "export").keys() == Stack(6).state_dict().keys()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    """Return a folder in which inductor keeps what the C++ compiler has made."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "processes", "regional", "precision", "recompute"),
    [
        ("AOT_EAGER", 2, False, "no", False),
        pytest.param("INDUCTOR", 1, True, "bf16", True, marks=needs_compiler),
    ],
)
def test_compiled_runs_give_the_same_curve_and_compile_only_at_first(
    tmp_path, monkeypatch, cache, backend, processes, regional, precision, recompute
):
    """With accumulation, evaluation and resume; lengths and `step` change from step to step.

    Inductor compiles blocks only: for the whole model the C++ compiler takes a minute or two.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    config = make_config(
        tmp_path, Stacked(samples=96), steps=8, precision=precision, evaluation__every_steps=2,
        optim__schedule="constant", distributed__activation_checkpointing=recompute,
    )  # fmt: skip
    plain = change(config, run_name="plain", distributed__activation_checkpointing=False)
    run_world(processes, compiled, plain, False, "no")
    results = run_world(processes, compiled, config, regional, backend)
    # once for the first length, once for any; with the loss for step 0, 1, and any
    times = 2 if regional else 3
    for found in results:
        assert found == {"first": times, "all": times}
    assert_same_curve_and_plain_keys(config, plain, 1e-4 if precision == "no" else 0.03)
    assert sum(r["compilations"] for r in records(config)) == results[0]["all"]


def compiled_and_sharded(config: Config) -> int:
    """Train through torch.compile and FSDP2; return the number of compilations."""
    from torch._dynamo.utils import counters

    ask_for_fsdp()
    ask_for_compile(regional=True)
    assert train(config) == 0
    return counters["frames"]["total"]


@pytest.mark.slow
@needs_compiler
def test_compiled_fsdp_follows_the_curve_of_ddp_and_compiles_only_at_first(tmp_path):
    """With accumulation, evaluation, and a resume in new processes; lengths change as above."""
    config = make_config(
        tmp_path, Stacked(samples=96), steps=10, evaluation__every_steps=2,
        optim__schedule="constant",
    )  # fmt: skip
    plain = change(config, run_name="plain")
    run_world(2, train, plain)
    found = run_world(2, compiled_and_sharded, change(config, steps=4))[0]
    found += run_world(2, compiled_and_sharded, config)[0]
    assert_same_curve_and_plain_keys(config, plain, 1e-4)
    by_step = [r["compilations"] for r in records(config)]
    assert by_step[0] > 0 < by_step[4], "new processes compile in their first step"
    assert sum(by_step) == sum(by_step[:2] + by_step[4:6]) == found
