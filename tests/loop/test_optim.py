"""The step: a loop by hand, schedules, groups, skipped steps, communication."""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from my_project.config import Config, ConfigError, OptimConfig
from my_project.loading.seeding import permutation
from my_project.manifest import read_manifest
from my_project.optim import (
    UNSCHEDULED,
    build_optimizer,
    fused_devices,
    learning_rate,
    set_learning_rate,
    step_if_finite,
)
from my_project.parallel import build_on_device
from my_project.watchdog import waits_for_others
from ragged import Ragged
from runs import change, make_config, quick, records, status, train, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate
from world import run_world


@pytest.mark.parametrize(
    ("name", "options"), quick(1, [("SGD", {"momentum": 0.9, "nesterov": True}), ("AdamW", {})])
)
def test_a_run_has_the_curve_of_a_loop_by_hand(tmp_path, name, options):
    """Two ranks accumulate two micro-batches each; by hand a global batch is one forward."""
    config = make_config(
        tmp_path, Ragged(dtype="float64"), optim__class_path=f"torch.optim.{name}",
        optim__init_args=options, optim__weight_decay=0.1,
    )  # fmt: skip
    run_world(2, train, config)

    recipe = config.recipe
    torch.manual_seed(config.seed)
    model = recipe.build_model({"features": 6})
    samples = recipe.build_datasets({"features": 6})[0]
    matrices, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, name)(groups, **options)
    norms = []
    for step, record in enumerate(records(config)):
        epoch, batch = divmod(step, 70 // 16)
        order = permutation(70, config.seed, epoch)(np.arange(70)).tolist()[16 * batch :][:16]
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 3) / 7))
        rate = 0.05 * ((step + 1) / 3 if step < 3 else cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum, num_items = recipe.loss(model, default_collate([samples[i] for i in order]), step)
        loss = loss_sum / num_items
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.8).item())
        optimizer.step()
        theirs = [record[key] for key in ("loss", "gradient_norm", "learning_rate")]
        assert theirs == pytest.approx([loss.item(), norms[-1], rate], rel=1e-9)
    assert len(norms) == 10
    assert min(norms) < 1.8 < max(norms), "clipping must bind in some steps and not in others"
    torch.testing.assert_close(
        weights(config.folder / "export"), dict(model.state_dict()), rtol=1e-9, atol=1e-9
    )


def rates(steps: int = 20, **settings) -> list[float]:
    config = OptimConfig(lr=1.0, **settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


def test_schedules_are_those_of_torch():
    parameter = nn.Parameter(torch.zeros(1))
    for name, kind, arguments in [
        ("cosine", torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 20, "eta_min": 0.1}),
        ("linear", torch.optim.lr_scheduler.LinearLR,
         {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 20}),
    ]:  # fmt: skip
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = kind(optimizer, **arguments)
        expected = []
        for _ in range(20):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates(schedule=name, final_lr_fraction=0.1) == pytest.approx(expected)


def test_warmup_and_wsd():
    assert rates(schedule="constant", warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1, 1, 1]
    wsd = rates(schedule="wsd", warmup_steps=2, decay_steps=5)
    assert wsd[2:16] == [1.0] * 14
    assert wsd[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("name", get_args(get_type_hints(OptimConfig)["schedule"]))
def test_a_schedule_that_depends_on_the_number_of_steps_is_known_to(name):
    config = OptimConfig(lr=1.0, schedule=name, decay_steps=5 if name == "wsd" else 0)
    rates = [[learning_rate(step, steps, config) for step in range(20)] for steps in (20, 40)]
    assert (rates[0] == rates[1]) == (name in UNSCHEDULED)


@dataclass(frozen=True, kw_only=True)
class Grouped(Ragged):
    groups: Any

    def parameter_groups(self, model: nn.Module) -> Any:
        return self.groups(model)


def test_weight_decay_spares_biases_and_norms_groups_keep_their_scale():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1), Ragged(), model)
    decayed, spared = optimizer.param_groups
    assert [p.ndim for p in decayed["params"]] == [2]
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert optimizer.defaults["fused"] is True

    scaled = Grouped(groups=lambda m: [{"params": list(m.parameters()), "lr_scale": 0.1}])
    optimizer = build_optimizer(OptimConfig(), scaled, model)
    set_learning_rate(optimizer, 0, 10, OptimConfig(lr=2.0))
    assert optimizer.param_groups[0]["lr"] == 0.2


GROUPS = {
    "an iterator": lambda m: [{"params": m.parameters()}],
    "named": lambda m: [{"params": m.named_parameters()}],
    "no groups": lambda m: m.parameters(),
    "a group that is empty": lambda m: [{"params": []}, {"params": m.parameters()}],
}


@pytest.mark.parametrize("form", GROUPS)
def test_every_form_of_groups_that_torch_takes_trains(form):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = build_optimizer(OptimConfig(weight_decay=0.2), Grouped(groups=GROUPS[form]), model)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == 4
    assert optimizer.defaults["fused"] is True
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2}
    before = [p.detach().clone() for p in held]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(held, before, strict=True))


WRONG_GROUPS = {
    "trained parameters (1.weight, 1.bias)": lambda m: [{"params": m[0].parameters()}],
    "holds 1 that are not in the model": lambda m: [
        {"params": [*m.parameters(), torch.nn.Parameter(torch.ones(1))]}
    ],
    "trained parameters (0.bias)": lambda m: [{"params": [*m.parameters(), m[0].bias]}],
    "lr_scal": lambda m: [{"params": m.parameters(), "lr_scal": 0.1}],
    "returned nothing, not a list of groups": lambda m: None,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("sentence", WRONG_GROUPS)
def test_groups_that_would_train_something_else_are_refused(sentence):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with pytest.raises(ConfigError) as refusal:
        build_optimizer(OptimConfig(), Grouped(groups=WRONG_GROUPS[sentence]), model)
    assert sentence in str(refusal.value)


def test_frozen_parameters_may_be_in_a_group_or_not():
    for form in (lambda m: m.parameters(), lambda m: m[1].parameters()):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        build_optimizer(OptimConfig(), Grouped(groups=form), model)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model has requires_grad=True"):
        build_optimizer(OptimConfig(), Ragged(), model)
    with pytest.raises(ConfigError, match="no parameter of the model has requires_grad=True"):
        build_optimizer(OptimConfig(), Grouped(groups=lambda m: m.parameters()), model)


@pytest.mark.parametrize("betas", [0.9, (0.9, 2.0), "ab"])
def test_a_wrong_value_in_init_args_is_refused_by_the_setting(betas):
    config = OptimConfig(init_args={"betas": betas})
    with pytest.raises(ConfigError, match=r"init_args .*betas"):
        build_optimizer(config, Ragged(), nn.Linear(3, 3))


class OnGPU(Tensor):
    """A norm on a GPU, where a fused kernel decides whether it steps; those for CPUs can too."""

    is_cuda = True  # type: ignore[assignment]


def test_the_host_waits_for_a_norm_where_the_watchdog_knows_that_it_waits_for_ranks(monkeypatch):
    """Otherwise the ranks that wait for a rank that hangs would be blamed for it."""
    readers = []
    model = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(OptimConfig(class_path="torch.optim.Rprop"), Ragged(), model)
    for name in ("tolist", "item", "__float__"):
        read = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, read: Any = read) -> Any:
            readers.append(sys._getframe(1).f_code.co_filename)
            return read(tensor)

        monkeypatch.setattr(torch.Tensor, name, noted)
    step_if_finite(optimizer, torch.tensor(1.0))
    assert readers
    assert all(map(waits_for_others, readers)), readers


def test_a_class_is_fused_on_a_gpu_only_where_each_version_of_torch_allows_it():
    kinds = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    assert ["cuda" in fused_devices(kind) for kind in kinds] == [True, True, False]


def test_momentum_begins_with_the_first_step_that_is_not_skipped():
    """SGD's fused kernel would keep the uninitialized memory of a first step that it skips."""
    finals = []
    for norms in ([1.0, 1.0], [float("inf"), 1.0, float("inf"), 1.0]):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        config = OptimConfig(class_path="torch.optim.SGD", init_args={"momentum": 0.9})
        optimizer = build_optimizer(config, Ragged(), model)
        assert optimizer.defaults["fused"]
        for norm in norms:
            model.weight.grad = torch.ones_like(model.weight)
            step_if_finite(optimizer, torch.tensor(norm).as_subclass(OnGPU))
        finals.append(model.weight.detach())
    assert torch.equal(*finals)


def test_a_run_in_which_every_step_was_skipped_is_not_finished(tmp_path):
    recipe = Ragged(empty_at=tuple(range(4)))
    config = make_config(tmp_path, recipe, steps=4)
    for _ in range(2):  # the same command cannot finish it either
        with pytest.raises(RuntimeError, match="all 4 steps were skipped"):
            train(config)
        assert status(config)["outcome"] == "failed"
        assert not (config.folder / "export").exists()
    assert train(change(config, steps=6)) == 0


@pytest.mark.parametrize("reason", quick(1, ["explode_at", "empty_at"]))
def test_a_step_that_cannot_be_taken_changes_nothing_and_is_counted(tmp_path, reason):
    recipe = Ragged(**{reason: (3,)})
    config = make_config(tmp_path, recipe, steps=5, checkpoints__every_steps=1, checkpoints__keep=9)
    run_world(2, train, config)
    folders = [config.folder / "checkpoints" / f"step_{n:08d}" for n in (3, 4, 5)]
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, skipped, after = (load_file(folder / file) for folder in folders)
        assert all(torch.equal(before[name], skipped[name]) for name in before)
        assert not all(torch.equal(after[name], skipped[name]) for name in before)
    assert [r["skipped_steps"] for r in records(config)] == [0, 0, 0, 1, 1]
    state = read_manifest(folders[1])["state"]
    assert state["consecutive_skipped_steps"] == 1


SKIPPED = [
    ("explode_at", r"gradient was not finite in 3 steps in a row.* loss on this rank is (nan|inf)"),
    ("empty_at", "num_items 0 in 3 steps in a row"),
]


@pytest.mark.parametrize(("reason", "sentence"), quick(1, SKIPPED))
def test_too_many_steps_that_teach_nothing_end_the_run(tmp_path, reason, sentence):
    recipe = Ragged(**{reason: tuple(range(2, 10))})
    config = make_config(tmp_path, recipe, optim__max_skipped_steps=3, telemetry__every_steps=4)
    with pytest.raises(RuntimeError, match=sentence):
        run_world(2, train, config)
    assert status(config)["outcome"] == "failed"
    seen = [(r["step"], r["skipped"], r["loss"] is None) for r in records(config)]
    assert seen == [(4, 2, False), (5, 1, True)], "also of the interval that it ended in"


def test_an_unused_parameter_ends_the_run_with_the_key_that_allows_it(tmp_path):
    config = make_config(tmp_path, Ragged(unused_parameter=True), steps=2)
    with pytest.raises(RuntimeError, match="`find_unused_parameters=True`"):
        run_world(2, train, config)
    sentence = "Use forgotten in the loss, freeze it, or set --distributed.ddp.find_unused_param"
    assert sentence in status(config)["reason"]


@dataclass(frozen=True, kw_only=True)
class Sometimes(Ragged):
    """A second head with weight decay, which some steps do not use."""

    unused_at: tuple[int, ...] = (1, 2, 5)

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model = super().build_model(data_info)
        second = torch.ones(data_info["features"], 1, dtype=getattr(torch, self.dtype))
        model.register_parameter("second", nn.Parameter(second))
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        total, weight = super().loss(model, batch, step)
        if step not in self.unused_at:
            total = total + ((batch["x"] @ model.second)[..., 0] * batch["counts"]).square().sum()
        return total, weight


def final_weights_on(
    numbers: tuple[int, ...], folder: Path, recipe: Ragged, **settings: Any
) -> list[dict[str, Tensor]]:
    """Train on each of these numbers of processes; return the exported weights of each."""
    configs = [make_config(folder, recipe, run_name=str(n), **settings) for n in numbers]
    for processes, config in zip(numbers, configs, strict=True):
        run_world(processes, train, config)
    return [weights(config.folder / "export") for config in configs]


@pytest.mark.parametrize("accumulation", quick(1, [4, 1]))
def test_a_parameter_that_some_steps_do_not_use_trains_as_in_one_process(tmp_path, accumulation):
    """A gradient of zeros in place of none would decay it and move its momentum."""
    one, two = final_weights_on(
        (1, 2), tmp_path, Sometimes(dtype="float64"), optim__weight_decay=0.1,
        batches__micro_batch_size=8 // accumulation,
        distributed__ddp={"find_unused_parameters": True},
    )  # fmt: skip
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("micro_batch_size", quick(1, [2, 8]))
def test_a_parameter_that_the_last_step_does_not_use_is_noticed(tmp_path, micro_batch_size):
    """Else its neighbors in the bucket, which DDP has not averaged, would be exported."""
    config = make_config(
        tmp_path, Sometimes(unused_at=(2,)), steps=3, batches__micro_batch_size=micro_batch_size
    )
    with pytest.raises(RuntimeError, match="did not receive grad for rank"):
        run_world(2, train, config)


def count_all_reduces(configs: list[Config]) -> list[int]:
    counts = []
    for config in configs:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(config)
        events = [e for e in profile.key_averages() if e.key == "c10d::allreduce_"]
        counts.append(sum(event.count for event in events))
    return counts


@pytest.mark.slow
def test_micro_batches_but_the_last_communicate_nothing(tmp_path):
    configs = [
        make_config(
            tmp_path, Ragged(validation_samples=0), run_name=f"micro{micro_batch_size}",
            batches__micro_batch_size=micro_batch_size, steps=6,
        )
        for micro_batch_size in (8, 2)  # accumulation 1 and 4
    ]  # fmt: skip
    counts = run_world(2, count_all_reduces, configs)[0]
    assert counts[0] == counts[1]
    assert counts[0] >= 12, "one for the gradient and one for the loss, per step"


@pytest.mark.slow
def test_hooks_and_bf16_round_gradients_and_activations_but_no_weights(tmp_path):
    exact = make_config(tmp_path, run_name="exact", steps=4)
    hooked = change(exact, run_name="hooked", distributed__ddp={"comm_hook": "bf16"})
    bf16 = change(exact, run_name="bf16", precision="bf16")
    for config in (exact, hooked, bf16):
        run_world(2, train, config)
    theirs = weights(exact.folder / "export")
    for config in (hooked, bf16):
        for name, value in weights(config.folder / "export").items():
            assert value.dtype == torch.float32
            assert not torch.equal(value, theirs[name])
            torch.testing.assert_close(value, theirs[name], rtol=0.05, atol=0.02)


class Counter(nn.Module):
    """Adds a buffer that loss changes; another module has the same one, and a view of it."""

    total: Tensor

    def __init__(self, total: Tensor) -> None:
        super().__init__()
        self.register_buffer("total", total)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.total.sum()


@dataclass(frozen=True, kw_only=True)
class Sharing(Ragged):
    """The first module's buffer changes in each loss; the others read it."""

    validation_samples: int = 0

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        total = torch.zeros(4)
        readers = [Counter(total), Counter(total[:2])]
        return nn.Sequential(Counter(total), *readers, *super().build_model(data_info))

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if model.training:
            model[0].total.fill_(step / 8)
        return super().loss(model, batch, step)


@pytest.mark.slow
def test_recurrent_layers_are_flattened_once_their_weights_have_been_copied(tmp_path, monkeypatch):
    """On a GPU, cuDNN would otherwise copy the weights in each forward, and warn."""
    flattened: list[list[int]] = []

    def note(layer: nn.Module) -> None:
        flattened.append([p.data_ptr() for p in layer.parameters()])

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", note)
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"))
    build = partial(nn.Sequential, nn.LSTM(2, 2))
    model, _ = build_on_device(accelerator, build, make_config(tmp_path))
    assert flattened[-1] == [p.data_ptr() for p in model.parameters()]


def test_buffers_that_share_memory_share_it_on_any_number_of_processes(tmp_path):
    one, two = final_weights_on((1, 2), tmp_path, Sharing(dtype="float64"))
    assert torch.equal(two["1.total"], torch.full((4,), 9 / 8))
    assert torch.equal(two["2.total"], two["1.total"][:2])
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
