"""A slightly wrong loss is reported; correct losses, however unusual, are not."""

import importlib
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from checked import EACH_LAYOUT, LAYOUTS, check
from documents import PROJECT
from my_project.checks import recipe as recipe_check
from my_project.checks.recipe import misspelled, sums_problem
from my_project.evaluate import restored_state
from my_project.recipe import PARAMETERS
from ragged import Deep, Ragged
from runs import assert_same_weights, make_config, quick, train
from streamed import Streamed
from torch import Tensor, nn
from torch.nn import functional as F

# B: samples, T: the longest of them, V: tokens
LENGTHS = [3, 9, 5, 2, 8, 7, 1, 6]


class Words(nn.Module):
    """Give scores for the token at each position, from that token and the one before."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 8)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


@dataclass(frozen=True, kw_only=True)
class Sequences(Ragged):
    """Sentences of unequal length, padded by collate; the loss is of this kind."""

    kind: str = ""

    def build_datasets(self, data_info: Any) -> Any:
        draw = torch.Generator().manual_seed(0)
        lengths = (LENGTHS * 9)[: self.samples]
        return [torch.randint(1, 11, (n + 1,), generator=draw) for n in lengths], {}

    def collate(self, samples: list[Tensor]) -> Tensor:
        batch = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        if self.kind == "masked":  # some tokens, drawn here, do not count
            batch = batch * (torch.rand(batch.shape) < 0.7)
        return batch

    def build_model(self, data_info: Any) -> nn.Module:
        return Words()

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> Any:
        target = batch[:, 1:]  # (B, T); 0 is padding
        losses = F.cross_entropy(model(batch[:, :-1]).mT, target, reduction="none")
        real = target > 0
        size, weights = len(target), real * (1.3 - 0.1 * torch.arange(target.shape[1]))
        sums = (losses * real).sum()
        errors = (model(batch[:, :-1]).sum(-1) - target).square()  # which vary more at first
        assert self.kind != "of whole batches" or size == 4
        if self.kind == "a penalty" and torch.is_grad_enabled():
            gradient, *_ = torch.autograd.grad(sums, model.parameters(), create_graph=True)
            sums = sums + gradient.square().sum()
        if self.kind == "a count of its own":
            vars(model)["calls"] = calls = vars(model).get("calls", 0) + 1
            sums = sums * (1 + calls / 1000)
        in_autocast = not model.training and torch.is_autocast_enabled("cpu")
        of_kind = {
            "a mean with its count": (losses[real].mean(), real.sum()),
            "a mean with 1": (losses[real].mean(), 1),
            "a mean times the batch": (errors[real].mean() * size, size),
            "a sum with 1": (sums, 1),
            "padding counted": (sums, real.numel()),
            "padding trained": (losses.sum(), real.sum()),
            "padding trained and counted": (losses.sum(), real.numel()),
            "one in autocast": (sums, 1 if in_autocast else real.sum()),
            "weighed": ((losses * weights).sum(), weights.sum()),  # by numbers that are no integers
            "of a step": (sums * min(1.0, step / 3), real.sum()),
            "signed": (((losses - 2.4) * real).sum(), real.sum()),
        }
        return of_kind.get(self.kind, (sums, real.sum()))


WRONG = {
    "a mean with its count": "loss_sum",
    "a mean with 1": "loss_sum and num_items",
    "a mean times the batch": "loss_sum",
    "a sum with 1": "num_items",
    "padding counted": "num_items",
    "padding trained": "loss_sum",
    "padding trained and counted": "loss_sum and num_items",
}


@pytest.mark.parametrize("kind", quick(2, WRONG))
def test_a_loss_that_returns_no_sums_is_named(tmp_path, kind):
    code, findings = check(Sequences(kind=kind), tmp_path, steps=1)
    ((_, problem),) = findings
    assert code == 0
    assert f"its {WRONG[kind]} did not add up" in problem


class Popping(Sequences):
    """Collate takes its samples apart."""

    def build_datasets(self, data_info: Any) -> Any:
        return [{"tokens": sample} for sample in super().build_datasets(data_info)[0]], {}

    def collate(self, samples: list[Any]) -> Tensor:
        return super().collate([sample.pop("tokens") for sample in samples])


def test_samples_that_collate_changes_are_still_compared(tmp_path, caplog, monkeypatch):
    """The log says that sums add up only if they were compared."""
    ((_, problem),) = check(Popping(kind="a mean with 1"), tmp_path, steps=1)[1]
    assert "its loss_sum and num_items did not add up" in problem
    caplog.set_level("INFO")
    monkeypatch.setenv("LAUNCH_DRY_RUN", "1")
    train(make_config(tmp_path, Sequences(kind="of whole batches"), steps=1, run_name="whole"))
    assert "loss and num_items cannot be compared: AssertionError" in caplog.text
    assert "add up" not in caplog.text


def test_the_samples_are_read_once(tmp_path, monkeypatch):
    reads, read = [], recipe_check.whole_and_halves
    monkeypatch.setattr(
        recipe_check, "whole_and_halves", lambda *given: reads.append(1) or read(*given)
    )
    assert train(make_config(tmp_path, steps=1)) == 0
    assert len(reads) == 1


def test_a_loss_that_counts_its_calls_is_named(tmp_path):
    _, findings = check(Sequences(kind="a count of its own"), tmp_path, steps=1)
    ((_, problem),) = findings
    assert "argument step" in problem


@EACH_LAYOUT
def test_the_loss_is_checked_in_full_precision_but_for_bf16_shards(tmp_path, layout):
    processes, replicas = LAYOUTS[layout]
    settings = {"precision": "bf16", "steps": 2}
    recipe = Deep() if replicas else Sequences(kind="one in autocast")
    assert check(recipe, tmp_path, processes, replicas=replicas, **settings) == (0, [])


SOUND = ["", "masked", "weighed", "a penalty", "of a step", "of whole batches", "signed"]


@pytest.mark.parametrize("kind", quick(2, SOUND))
def test_a_sound_loss_of_sequences_is_not_named(tmp_path, kind):
    assert check(Sequences(kind=kind), tmp_path, steps=1) == (0, [])


@pytest.mark.slow
def test_an_error_in_the_check_leaves_a_sharded_model_whole(tmp_path):
    assert check(Sequences(kind="of whole batches"), tmp_path, 2, replicas=1, steps=1) == (0, [])


@dataclass(frozen=True, kw_only=True)
class Images(Ragged):
    """Losses of other kinds, of numbers in the place of images."""

    kind: str = ""

    def build_model(self, data_info: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(54, 16), nn.BatchNorm1d(16), nn.Linear(16, 54))

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        x = batch["x"].flatten(1)
        if self.kind in ("vae", "a mean of a vae"):
            code = model[:3](x)
            decoded = model[3](code + torch.randn_like(code))
            losses = (decoded - x).square().sum(1) + code.square().sum(1)
        elif self.kind in ("diffusion", "a mean of diffusion", "a count of 1"):
            time = torch.rand(len(x), 1)
            noise = torch.randn_like(x)
            losses = (model((1 - time) * x + time * noise) - noise).square().sum(1)
        elif self.kind == "masked":
            mask = torch.rand_like(x) < 0.3
            return ((model(x * ~mask) - x).square() * mask).sum(), mask.sum()
        else:  # each image against all others
            scores = F.normalize(model(x)) @ F.normalize(x).T
            losses = F.cross_entropy(scores, torch.arange(len(x)), reduction="none")
        if self.kind.startswith("a mean"):
            return losses.mean(), len(x)
        return losses.sum(), 1 if self.kind == "a count of 1" else len(x)

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        pass

    def build_metrics(self) -> Any:
        return {}


@dataclass(frozen=True, kw_only=True)
class Contrastive(Images):
    compares_samples = True


OTHERS = {
    Images(kind="vae"): "",
    Images(kind="a mean of diffusion"): "loss_sum",
    Contrastive(kind="contrastive"): "",
    Images(kind="diffusion"): "",
    Images(kind="masked"): "",
    Images(kind="a mean of a vae"): "loss_sum",
    Images(kind="a count of 1"): "num_items",
    Images(kind="contrastive"): "loss_sum",
}


@pytest.mark.parametrize(
    "recipe", quick(3, OTHERS), ids=lambda recipe: f"{type(recipe).__name__} {recipe.kind}"
)
def test_losses_that_draw_or_compare_samples_are_named_only_if_wrong(tmp_path, recipe):
    code, findings = check(recipe, tmp_path, steps=1)
    assert code == 0
    assert [f"its {OTHERS[recipe]} did not add up" in problem for _, problem in findings] == [
        True
    ] * bool(OTHERS[recipe])


class Box(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(54, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@dataclass(frozen=True, kw_only=True)
class Detection(Ragged):
    """Images in a list, and a dict with any number of boxes for each."""

    counts_boxes: bool = True

    def collate(self, samples: list[Any]) -> Any:
        boxes = [{"boxes": sample["x"][: sample["index"] % 3, :4]} for sample in samples]
        return [sample["x"].flatten() for sample in samples], boxes

    def build_model(self, data_info: Any) -> nn.Module:
        return Box()

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        total, count = torch.zeros(()), 0
        for image, target in zip(*batch, strict=True):
            total = total + (model(image) - target["boxes"]).abs().sum()
            count += len(target["boxes"])
        if self.counts_boxes:
            return total, count
        return total / max(1, count), count

    build_metrics = update_metrics = None  # type: ignore[assignment]


@pytest.mark.slow
def test_detection_with_lists_of_dicts_is_read_as_it_is(tmp_path):
    assert check(Detection(validation_samples=0), tmp_path, steps=1) == (0, [])
    recipe = Detection(counts_boxes=False, validation_samples=0)
    ((_, problem),) = check(recipe, tmp_path, steps=1, run_name="wrong")[1]
    assert "its loss_sum did not add up" in problem


@dataclass(frozen=True, kw_only=True)
class Mean(Deep):
    """A mean with its count; of a stream too. Without training, it changes a buffer."""

    def build_model(self, data_info: Any) -> nn.Module:
        model = super().build_model(data_info)
        model.register_buffer("calls", torch.zeros(()))
        return model

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if not model.training and hasattr(model, "calls"):
            model.calls.add_(1)
        loss_sum, num_items = Ragged.loss(self, model, batch, step)
        return loss_sum / num_items, num_items


@dataclass(frozen=True, kw_only=True)
class StreamedMean(Streamed):
    loss = Mean.loss


@EACH_LAYOUT
def test_the_loss_is_checked_on_any_layout_and_changes_no_bit(tmp_path, layout):
    processes, replicas = LAYOUTS[layout]
    ends = []
    for setting, count in {"warn": 1, "off": 0}.items():
        result = check(
            Mean(dropout=0.2), tmp_path / setting, processes, replicas=replicas, steps=2,
            checks__recipe=setting, batches__micro_batch_size=2, batches__workers=1,
        )  # fmt: skip
        assert (result[0], len(result[1])) == (0, count)
        ends.append(make_config(tmp_path / setting, run_name=f"{processes}_{replicas}"))
    assert_same_weights(*ends)


def test_the_setting_ends_the_run_for_a_loss_that_is_no_sum(tmp_path):
    code, findings = check(Mean(), tmp_path, 2, checks__recipe="end")
    assert (code, len(findings)) == (2, 1)


@pytest.mark.slow
def test_of_a_stream_the_validation_samples_are_taken(tmp_path):
    for recipe, count in ((Streamed(), 0), (StreamedMean(), 1)):
        assert len(check(recipe, tmp_path, run_name=type(recipe).__name__)[1]) == count


def test_too_few_samples_and_a_later_start_are_not_checked(tmp_path):
    few = {"batches__global_batch_size": 2, "batches__micro_batch_size": 2, "run_name": "few"}
    assert check(Mean(), tmp_path, **few) == (0, [])
    constant = {"optim__schedule": "constant"}
    assert len(check(Mean(), tmp_path, steps=2, **constant)[1]) == 1
    assert check(Mean(), tmp_path, steps=4, **constant) == (0, [])


@pytest.mark.parametrize(
    ("sums", "wrong"),
    [
        ([(8, 4), (5, 2), (3, 2)], ""),
        ([(8, 4), (5.1, 2), (3, 2)], ""),  # padding
        ([(8, 4), (5.2, 2), (3, 2)], "loss_sum"),
        ([(-0.1, 4), (5, 2), (-5.1, 2)], ""),  # its terms cancel
        ([(8, 5), (5, 2), (3, 2)], "num_items"),
        ([(0, 0), (0, 0), (0, 0)], ""),
        ([(np.nan, 4), (5, 2), (3, 2)], ""),
    ],
)
def test_the_numbers_of_a_whole_and_its_halves_tell(sums, wrong):
    problem = sums_problem(lambda _, part: np.array(sums[part]), 4)
    assert (f"its {wrong} did not add up" in problem) if wrong else not problem


# ---- what has no effect --------------------------------------------------------------------------
def test_an_average_that_stays_near_the_initial_weights_is_named(tmp_path):
    for decay, count in ((0.9, 1), (0.1, 0)):
        run = {"run_name": str(decay), "optim__ema_decay": decay}
        _, findings = check(Ragged(), tmp_path, steps=20, **run)
        assert len(findings) == count * (decay**20 > 0.05)


@dataclass(frozen=True, kw_only=True)
class Misspelled(Ragged):
    def predict_sample(self, model: Any, data_info: Any, samples: Any, folder: Any) -> None: ...

    def param_groups(self, model: Any) -> Any: ...

    def collate_fn(self, samples: Any) -> Any: ...

    def exported(self, model: Any) -> None: ...  # a method of its own, as the others

    def load_image(self, data_info: Any, folder: Any) -> None: ...

    def _collate(self) -> None: ...


def test_a_misspelled_optional_method_is_named_and_own_methods_are_not(tmp_path):
    _, findings = check(Misspelled(), tmp_path, steps=1)
    meant = {
        "collate_fn": "collate",
        "param_groups": "parameter_groups",
        "predict_sample": "predict_samples",
    }
    for (name, right), (_, problem) in zip(meant.items(), findings, strict=True):
        assert f"Misspelled.{name} " in problem
        assert f"is {right} meant" in problem


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_any_method_with_a_letter_less_is_taken_for_what_it_is(name):
    for wrong in (name[:-1], f"{name}s", name.replace("_", "")):
        if wrong != name:
            assert misspelled(type("Any", (), {wrong: lambda self, *arguments: None})()) == {
                wrong: name
            }
    assert not misspelled(type("Any", (), {n: lambda self, *arguments: None for n in PARAMETERS})())


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_misspelled_override_is_named_and_helpers_of_a_base_class_are_not(name):
    def method(*_: Any) -> None: ...

    wrong = f"{name}s"
    base = type("Base", (), {name: method})
    assert misspelled(type("Sub", (base,), {wrong: method})()) == {wrong: name}
    with_helper = type("WithHelper", (), {name: method, wrong: method})
    assert not misspelled(type("Sub", (with_helper,), {wrong: method})())
    helper = type("Helper", (), {wrong: method})
    assert not misspelled(type("Sub", (helper,), {name: method})())
    field = type("Field", (), {"__annotations__": {name: Any}})
    assert not misspelled(type("Sub", (field,), {"__annotations__": {name: Any}, wrong: method})())


def test_a_hook_that_a_method_of_the_recipe_calls_is_not_a_misspelled_override():
    class Base:
        def build_datasets(self, data_info: Any) -> Any:
            return [self.build_dataset(one) for one in data_info]  # pyright: ignore

    class Sub(Base):
        def build_dataset(self, one: Any) -> Any: ...

    class Other(Base):
        def build_datasetss(self, data_info: Any) -> Any: ...

    assert not misspelled(cast(Any, Sub()))
    assert misspelled(cast(Any, Other())) == {"build_datasetss": "build_datasets"}


def test_the_shipped_recipes_have_no_misspelled_method():
    folder = PROJECT / "src/my_project/recipes"
    for path in folder.glob("[a-z]*.py"):
        module = importlib.import_module(f"my_project.recipes.{path.stem}")
        kinds = [kind for kind in vars(module).values() if hasattr(kind, "prepare_data")]
        assert kinds
        assert not any(misspelled(object.__new__(kind)) for kind in kinds)


def test_large_frozen_weights_are_not_copied_and_what_a_forward_changes_is_restored():
    """A copy of a frozen model may not fit beside it, where training would."""
    model = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 3)
    )
    for layer in model[:3]:
        layer.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), restored_state(model):
        for tensor in model.state_dict().values():
            tensor += 1
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"0.weight"}
