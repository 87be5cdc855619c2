"""Weights and buffers that differ between ranks, and a forward that changes a weight, are named."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checked import EACH_LAYOUT, LAYOUTS, check
from my_project.checks.ranks import CHUNK, ROUNDING, fixed_numbers, sketch
from ragged import Deep, Ragged
from runs import quick
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Part(nn.Module):
    """Layers before the others, which do something of this kind to their state."""

    state: Tensor
    number: Tensor

    def __init__(self, kind: str, width: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(width), requires_grad=kind != "late")
        is_saved = kind not in ("fleeting", "emptied")
        self.register_buffer("state", torch.zeros(width), persistent=is_saved)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.table = nn.Embedding(9, width, max_norm=0.5 if kind == "max_norm" else None)

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().flatten(0, -2)
        if self.training and self.kind == "first_batch" and not self.number:
            self.scale.data.copy_(1 / own.std(0))
        if self.training and self.kind == "within_limits":
            self.scale.data.clamp_(max=0.9)
        self.number.fill_(1)
        x = x * self.scale + 0.1 * self.table((3 * own[:, 0]).long().clamp(0, 8)).view_as(x)
        if self.training and self.kind in ("carried", "fleeting"):
            x = x + self.state
            self.state.copy_(0.5 * self.state + own.mean(0))
        if self.training and self.kind == "emptied":
            self.state = None  # type: ignore[assignment]
        if self.training and self.kind == "counted":
            self.number.add_((own > 0).sum())
        return x


@dataclass(frozen=True, kw_only=True)
class Parted(Ragged):
    """The same samples; a part of each kind comes before the layers."""

    kinds: tuple[str, ...] = ()

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return nn.Sequential(*map(Part, self.kinds), super().build_model(data_info))

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        for part in model if step >= 2 else ():
            if getattr(part, "kind", "") in ("late", "frozen"):
                part.scale.requires_grad_(part.kind == "late")
        if "left_off" in self.kinds:
            model.eval()
        return super().loss(model, batch, step)


class Drifting(torch.optim.SGD):
    """On the last rank, adds to each weight a part of itself."""

    def __init__(self, *arguments: Any, drift: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        is_last = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])
        self.factor = 1 + drift * is_last

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                (weight.to_local() if isinstance(weight, DTensor) else weight).mul_(self.factor)


UNUSED = {"distributed__ddp": {"find_unused_parameters": True}, "checkpoints__every_steps": 1}
CARRIED = {"carried": "0.state", "fleeting": "1.state", "counted": "2.number"}


@EACH_LAYOUT
def test_a_weight_that_a_forward_changes_is_named_on_any_layout(tmp_path, layout):
    processes, replicas = LAYOUTS[layout]
    kinds = ("first_batch", "max_norm")
    code, findings = check(Parted(kinds=kinds), tmp_path, processes, replicas=replicas, **UNUSED)
    ((level, problem),) = findings
    assert "0.scale, 1.table.weight" in problem
    assert (code, level) == ((2, "") if layout == "ddp" else (0, "warn"))


@EACH_LAYOUT
def test_buffers_that_differ_by_rank_are_named_and_the_run_goes_on(tmp_path, layout):
    processes, replicas = LAYOUTS[layout]
    code, findings = check(
        Parted(kinds=(*CARRIED,)), tmp_path, processes, replicas=replicas, **UNUSED
    )
    assert code == 0
    if layout == "alone":
        assert not findings
    else:
        ((level, problem),) = findings
        assert level == "warn"
        assert ", ".join(CARRIED.values()) in problem


def test_a_buffer_that_becomes_none_is_no_difference(tmp_path):
    assert check(Parted(kinds=("emptied",)), tmp_path, 2, **UNUSED) == (0, [])


@pytest.mark.parametrize("processes", quick(1, [1, 2]))
def test_a_layer_unfrozen_in_a_run_and_a_model_left_in_eval_are_named(tmp_path, processes):
    _, findings = check(Parted(kinds=("late", "left_off")), tmp_path, processes, **UNUSED)
    problems = dict(zip(("model.training", "0.scale"), findings, strict=True))
    assert all(name in problem for name, (_, problem) in problems.items())


@EACH_LAYOUT
def test_a_layer_frozen_in_a_run_and_weights_within_limits_are_sound(tmp_path, layout):
    processes, replicas = LAYOUTS[layout]
    kinds = ("frozen", *["within_limits"] * (layout != "fsdp"))  # which discards it
    recipe = Parted(kinds=kinds, batch_norm=True)
    result = check(recipe, tmp_path, processes, replicas=replicas, **UNUSED)
    assert result == (0, [])


DRIFTS = {1e-2: (2, [""]), 1e-4: (0, ["warn"]), 1e-7: (0, [])}
DRIFTING = [(layout, drift) for layout in ((2, 0), (4, 2)) for drift in DRIFTS]  # DDP, HSDP


@pytest.mark.parametrize(("layout", "drift"), quick(1, DRIFTING))
def test_ranks_may_differ_by_rounding_a_little_is_named_more_ends_the_run(tmp_path, layout, drift):
    processes, replicas = layout
    code, findings = check(
        Deep(), tmp_path, processes, replicas=replicas, steps=2, optim__lr=1e-3,
        optim__class_path="test_equal_ranks.Drifting", optim__init_args={"drift": drift},
    )  # fmt: skip
    assert (code, [level for level, _ in findings]) == DRIFTS[drift]
    assert all("blocks.0.inner.weight" in problem for _, problem in findings)


@pytest.mark.parametrize(
    ("setting", "outcome"), quick(1, [("warn", (0, 1)), ("off", (0, 0)), (False, (0, 0))])
)
def test_the_setting_lets_unequal_ranks_go_on(tmp_path, setting, outcome):
    recipe = Parted(kinds=("first_batch",))
    code, findings = check(recipe, tmp_path, 2, checks__ranks=setting, **UNUSED)
    assert (code, len(findings)) == outcome


@pytest.mark.parametrize("size", [3, 5_000, 3_000_000])
def test_the_number_of_a_tensor_shows_values_and_chunks_that_change_places(size):
    whole = torch.randn(size, generator=torch.Generator().manual_seed(0))
    norm, product = sketch(whole).tolist()
    assert norm == pytest.approx(float(whole.norm()), rel=0.5)
    for dtype in (torch.float64, torch.bfloat16):
        assert sketch(whole.to(dtype))[1] == pytest.approx(product, abs=0.01 * norm)
    swapped = whole.clone()
    swapped[[0, 1]] = whole[[1, 0]]
    changed = [swapped]
    if size > 2 * CHUNK:
        one, two, *rest = whole.split(CHUNK)
        changed.append(torch.cat([two, one, *rest]))
    for other in changed:
        assert abs(float(sketch(other)[1]) - product) > 1e-6 * norm
    rounded = whole * (1 + 1e-7 * torch.randn(size, generator=torch.Generator().manual_seed(1)))
    assert abs(float(sketch(rounded)[1]) - product) < ROUNDING / 10 * norm


def test_integers_are_compared_exactly_and_masks_of_infinity_are_bearable():
    many = torch.arange(10_000) + 10**9
    other = many.clone()
    other[7] += 1
    one, two = sketch(many), sketch(other)
    assert abs(one[1] - two[1]) > ROUNDING * one[0]
    assert sketch(torch.full((3, 3), -torch.inf).triu(1)).isfinite().all()
    assert len({*fixed_numbers(torch.device("cpu"), torch.float64).tolist()}) > 0.99 * CHUNK
