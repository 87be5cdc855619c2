"""A recipe that is slightly wrong: one sentence with method, file and line, before it trains."""

import dataclasses
import enum
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project import contract
from my_project.command_line import parse
from my_project.config import Config, ConfigError, to_yaml
from my_project.recipe import problems
from ragged import Ragged, Samples, Streamed
from runs import change, make_config, records, status, train, weights
from torch.utils.data import IterableDataset, default_collate
from world import run_world

Recipe = dataclasses.dataclass(frozen=True, kw_only=True)


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


class Sized(Unsized):
    def __len__(self) -> int:
        return 10


# ---- what the methods return ---------------------------------------------------------------------
DATA = Samples(40, 6, "float32", 1, 0.0)
DATA_SETS: dict[str, Any] = {
    "only the training set": DATA,
    "empty": (DATA, {"held_out": []}),
    "no index": (DATA, {"held_out": Sized()}),
    "iterator": (iter([]), {}),
}


@Recipe
class WrongData(Ragged):
    returned: str = ""

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        return DATA_SETS[self.returned]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("only the training set", "it must return (train, {name"),
        ("empty", "returned an empty validation set held_out"),
        ("no index", "as validation set held_out, which has no index"),
        ("iterator", "as the training set, which has no length"),
    ],
)
def test_datasets_that_are_none_are_refused_before_any_process_group(tmp_path, returned, sentence):
    recipe = WrongData(returned=returned)
    with pytest.raises(ConfigError) as refusal:
        train(make_config(tmp_path, recipe))
    line = WrongData.build_datasets.__code__.co_firstlineno
    assert f"WrongData.build_datasets ({__file__}, line {line}) " in str(refusal.value)
    assert sentence in str(refusal.value)
    assert not (tmp_path / "run").exists()


@Recipe
class WrongInfo(Ragged):
    returned: Any = None

    def prepare_data(self) -> Any:
        return {"list": [1], "set": {"features": {1, 2}}}[self.returned]

    def build_model(self, data_info: dict[str, Any]) -> Any:
        return lambda x: x


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("list", "returned a list of 1 (int); it must return a dict"),
        ("set", "must return plain JSON: Object of type set is not JSON serializable"),
    ],
)
def test_data_info_that_is_no_plain_dict_is_refused(tmp_path, returned, sentence):
    with pytest.raises(ConfigError) as refusal:
        train(make_config(tmp_path, WrongInfo(returned=returned)))
    assert "WrongInfo.prepare_data (" in str(refusal.value)
    assert sentence in str(refusal.value)


def test_a_model_that_is_no_module_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"WrongInfo\.build_model \(.* must return a torch\.nn\."):
        contract.build_model(make_config(tmp_path, WrongInfo()), {})


@Recipe
class WrongLoss(Ragged):
    returned: str = ""

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return {
            "one value": total,
            "per sample": (model(batch["x"]).sum((1, 2)), weight),
            "detached": (total.detach(), weight),
            "negative": (total, -1),
            "text": (total, "4"),
        }[self.returned]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("one value", "it must return (loss_sum, num_items)"),
        ("per sample", "tensor of shape (4,) as loss_sum"),
        ("detached", "a loss_sum that does not require a gradient"),
        ("negative", "num_items -1.0, which must be finite and not negative"),
        ("text", "a value of type str as num_items"),
    ],
)
def test_a_loss_that_is_not_loss_sum_and_num_items_is_refused_at_the_first_micro_batch(
    tmp_path, returned, sentence
):
    config = make_config(tmp_path, WrongLoss(returned=returned))
    with pytest.raises(ConfigError) as refusal:
        train(config)
    assert "WrongLoss.loss (" in str(refusal.value)
    assert sentence in str(refusal.value)
    assert status(config)["outcome"] == "failed"
    assert not list(config.folder.glob("checkpoints/*"))


@Recipe
class WrongMetrics(Ragged):
    returned: str = ""

    def build_metrics(self) -> Any:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        return {
            "list": [MeanMetric()],
            "vector": {"per_class": MulticlassAccuracy(2, average="none")},
        }[self.returned]

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        metrics["per_class"].update(batch["label"], batch["label"])


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("list", "it must return a dict of torchmetrics.Metric"),
        ("vector", "a metric per_class whose result is a float32 tensor of shape (2,)"),
    ],
)
def test_metrics_that_are_none_are_refused_before_the_first_step(tmp_path, returned, sentence):
    config = make_config(tmp_path, WrongMetrics(returned=returned))
    with pytest.raises(ConfigError) as refusal:
        train(config)
    assert "WrongMetrics.build_metrics (" in str(refusal.value)
    assert sentence in str(refusal.value)
    path = config.folder / "metrics.jsonl"
    assert not path.exists() or '"interval"' not in path.read_text()


# ---- the methods themselves ----------------------------------------------------------------------
@Recipe
class OtherArguments(Ragged):
    def loss(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
        return super().loss(model, batch, 0)

    @staticmethod
    def collate(samples: Any) -> Any:
        return default_collate(samples)

    def sample(self) -> str:
        return ""

    update_metrics = None  # type: ignore[assignment]


def test_each_method_with_other_parameters_is_named_with_its_place(tmp_path):
    line = OtherArguments.loss.__code__.co_firstlineno
    found = problems(OtherArguments)
    assert [problem.split("(")[0] for problem in found[:2]] == ["loss", "sample"]
    assert "it has build_metrics but lacks update_metrics" in found[2]
    assert f"({__file__}, line {line}) must accept (self, model, batch, step)" in found[0]
    with pytest.raises(ConfigError, match=r"recipe OtherArguments: loss.* must accept .*; sample"):
        train(make_config(tmp_path, OtherArguments()))
    config = tmp_path / "other.yaml"
    config.write_text(
        "recipe: {class_path: test_contract.OtherArguments}\n"
        "steps: 1\nbatches: {global_batch_size: 4}\n"
    )
    with pytest.raises(ConfigError, match=r"OtherArguments: loss.* must accept .*model, batch, st"):
        parse(["--config", str(config)])
    assert problems(Ragged) == []


class Collator:
    def __call__(self, samples: Any) -> Any:
        return default_collate(samples)


@Recipe
class Unusual(Ragged):
    """All that is unusual here is right."""

    collate = Collator()

    def loss(self, model: Any, *given: Any) -> Any:
        total, weight = super().loss(model, *given)
        return [total, np.float32(weight)]

    @torch.no_grad()
    def sample(self, model: Any, more: int = 1) -> str:
        return "text"

    def build_metrics(self) -> Any:
        return torch.nn.ModuleDict(super().build_metrics())

    def build_datasets(self, data_info: Any) -> Any:
        train, validation_sets = super().build_datasets(data_info)
        return [
            list(train),
            {n: torch.utils.data.Subset(d, range(9)) for n, d in validation_sets.items()},
        ]


def test_what_is_unusual_and_right_is_not_refused(tmp_path):
    assert problems(Unusual) == []
    assert train(make_config(tmp_path, Unusual(), steps=2)) == 0


# ---- settings, generators ------------------------------------------------------------------------
class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


@Recipe
class Palette:
    shades: tuple[int, ...] = (1, 2)
    first: Color = Color.RED


@Recipe
class Settings(Ragged):
    color: Color = Color.RED
    colors: tuple[Color, ...] = (Color.BLUE,)
    by_name: dict[str, Color] = dataclasses.field(default_factory=lambda: {"a": Color.BLUE})
    names: frozenset[str] = frozenset({"b", "a"})
    path: Path = Path("a/b")
    palette: Palette = dataclasses.field(default_factory=Palette)
    derived: int = dataclasses.field(init=False, default=3)


def test_settings_of_many_types_are_recorded_and_read_back(tmp_path):
    config = make_config(tmp_path, Settings(color=Color.BLUE), steps=2)
    assert run_world(2, train, config) == [0, 0]
    saved = parse(["--config", str(config.folder / "config.yaml")])
    assert saved.recipe == config.recipe
    assert "color: BLUE" in to_yaml(config)
    assert train(change(config, steps=3)) == 0
    with pytest.raises(ConfigError, match=r"recipe.color \('BLUE' there, 'RED' here\)"):
        train(change(config, steps=4, recipe__color=Color.RED))


def test_a_setting_that_yaml_cannot_hold_is_refused_before_any_process_group(tmp_path):
    recipe = Settings(by_name={"a": torch.float16})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"cannot be written to config\.yaml: torch\.float16 is"):
        train(make_config(tmp_path, recipe))


@Recipe
class Wide(Palette):
    more: int = 5


@Recipe
class Nested(Ragged):
    one: Palette | None = None
    other: Wide | Palette = dataclasses.field(default_factory=Wide)
    many: dict[str, list[Palette]] = dataclasses.field(default_factory=lambda: {"a": [Palette()]})
    anything: Any = None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"one": Wide()}, r"Nested\.one is a Wide, which config\.yaml cannot restore"),
        ({"many": {"a": [Palette(), Wide()]}}, r"Nested\.many\['a'\] is a Wide"),
    ],
)
def test_a_nested_setting_that_cannot_be_read_back_is_refused(tmp_path, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        train(make_config(tmp_path, Nested(**settings)))
    config = make_config(tmp_path, Nested(one=Palette(shades=(3,))))
    contract.check_recipe(config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "config.yaml")]).recipe == config.recipe


@Recipe
class OwnGenerators(Ragged):
    """Draws from generators of its own, made from the seed that the contract offers."""

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        data, validation_sets = super().build_datasets(data_info)
        return Noisy(data), validation_sets

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        draw = np.random.default_rng(torch.initial_seed()).random()
        total, weight = super().loss(model, batch, step)
        return total * (1 + draw), weight


class Noisy(torch.utils.data.Dataset):
    def __init__(self, data: Samples) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(torch.initial_seed())
        sample = self.data[index]
        return sample | {"x": sample["x"] + torch.randn(sample["x"].shape, generator=draw)}


@pytest.mark.slow
def test_generators_made_from_the_offered_seed_give_the_same_curve(tmp_path):
    configs = {}
    for processes, workers in ((1, 0), (2, 1)):
        config = make_config(
            tmp_path, OwnGenerators(dtype="float64"), run_name=f"on_{processes}",
            batches__workers=workers,
        )  # fmt: skip
        run_world(processes, train, config)
        configs[processes] = config
    ours, theirs = ([r["loss"] for r in records(config)] for config in configs.values())
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert len(set(ours)) == len(ours)


# ---- ranks and loader workers --------------------------------------------------------------------
@Recipe
class FewerFiles(Ragged):
    validation_too: bool = False

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        fewer = 5 * (os.environ.get("RANK") == "1")
        of_train = 0 if self.validation_too else fewer
        smaller = dataclasses.replace(
            self, samples=self.samples - of_train, validation_samples=23 - fewer
        )
        return Ragged.build_datasets(smaller, data_info)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("validation_too", "sentence"),
    [
        (False, r"the training set has length 65 on rank\(s\) \[1\] \(.*\) and 70 on rank 0 "),
        (True, r"validation set validation has length 18 on rank\(s\) \[1\] .* and 23 on rank 0 "),
    ],
)
def test_ranks_with_other_data_are_named(tmp_path, validation_too, sentence):
    config = make_config(tmp_path, FewerFiles(validation_too=validation_too))
    with pytest.raises(RuntimeError, match=sentence):
        run_world(2, train, config)


@Recipe
class NotSendable(Ragged):
    what: str = ""

    def collate(self, samples: Any) -> Any:
        batch = default_collate(samples)
        if self.what == "function":
            batch["name"] = lambda: 1
        if self.what == "graph":
            batch["x"] = batch["x"].requires_grad_() * 2
        return batch

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        data, validation_sets = super().build_datasets(data_info)
        if self.what == "dataset":
            data.transform = lambda x: x
        return data, validation_sets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("function", "a loader worker cannot send what the dataset or collate returned: .*lambda"),
        ("graph", r"a loader worker cannot send .*: a tensor that is part of a graph; detach\(\)"),
        ("dataset", "the dataset or collate cannot be sent to a loader worker: .*lambda"),
    ],
)
def test_what_a_loader_worker_cannot_send_is_a_sentence_and_no_stall(tmp_path, what, sentence):
    loader = {"multiprocessing_context": "spawn"} if what == "dataset" else {}
    config = make_config(
        tmp_path, NotSendable(what=what), batches__workers=1, batches__loader=loader,
        distributed__timeout_seconds=30, distributed__startup_timeout_seconds=30,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=sentence) as refusal:
        train(config)
    assert "\n" not in str(refusal.value)
    assert train(change(config, batches__workers=0, batches__loader={}, resume="never")) == 0


class Unsendable:
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("it holds a connection")


@Recipe
class NotSendableStream(Streamed):
    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        stream, validation_sets = super().build_datasets(data_info)
        lane = stream.lane
        stream.lane = lambda *where: ({**s, "more": Unsendable()} for s in lane(*where))
        return stream, validation_sets


@pytest.mark.slow
def test_a_stream_whose_samples_cannot_be_sent_is_a_sentence_and_no_stall(tmp_path):
    recipe = NotSendableStream(book=str(tmp_path))
    config = make_config(
        tmp_path, recipe, batches__workers=1, distributed__timeout_seconds=30,
        distributed__startup_timeout_seconds=30,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"cannot send .*: it holds a connection; return"):
        train(config)


# ---- numbers that JSON does not have -------------------------------------------------------------
@Recipe
class Infinite(Ragged):
    """An infinite loss whose gradient is finite, and a metric that is not a number."""

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return (total + float("inf") if step in (1, 2) else total), weight

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        for metric in metrics.values():
            metric.update(torch.full((1,), float("nan")))

    def build_metrics(self) -> Any:
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric(nan_strategy="disable")}


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_a_run_records_is_json_also_where_numbers_are_not_finite(tmp_path, caplog):
    config: Config = make_config(tmp_path, Infinite(), steps=5, telemetry__every_steps=1)
    assert train(config) == 0
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(strict, lines) if "loss" in record]
    assert [loss is None for loss in losses] == [False, True, True, False, False]
    last = strict(lines[-1])
    assert (last["kind"], last["step"], last["validation/loss"]) == ("evaluation", 5, None)
    assert strict((config.folder / "status.json").read_text())["result"]["validation/loss"] is None
    assert "step 2: the loss is inf" in caplog.text
    assert weights(config.folder / "export")["0.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("cause", "exit_code"), [(ConnectionError("no route"), 1), (KeyError("text"), 2)]
)
def test_what_a_network_has_caused_may_be_tried_again(cause, exit_code):
    def download() -> None:
        try:
            raise cause
        except Exception as error:
            raise ValueError("the data cannot be had") from error

    with pytest.raises(ConfigError, match="the data cannot be had") as told:
        with contract.one_line_errors(Ragged()):
            download()
    assert told.value.exit_code == exit_code
