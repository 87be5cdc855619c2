"""A slightly wrong recipe is refused with one sentence that has method, file and line."""

import dataclasses
import enum
import io
import json
import logging
import os
import pickle
import re
import sqlite3
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import numpy as np
import pytest
import torch
from my_project import contract
from my_project.config import Config, ConfigError, to_yaml
from my_project.loading.prepare import prepare_data
from my_project.recipe import problems
from my_project.settings import parse
from my_project.weights import load_model
from ragged import Noting, Ragged
from runs import change, make_config, quick, train, weights
from streamed import Streamed
from torch.utils.data import ConcatDataset, IterableDataset, Subset, default_collate
from world import run_world

Recipe = dataclasses.dataclass(frozen=True, kw_only=True)


class NoIndex(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(10)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class Counting(torch.nn.Identity):
    def get_extra_state(self) -> Any:
        return torch.tensor(3)

    def set_extra_state(self, state: Any) -> None:
        pass


# ---- what the methods return ---------------------------------------------------------------------
@Recipe
class Wrong(Ragged):
    """One of its methods returns something else than recipe.py says."""

    wrong: str = ""

    def prepare_data(self) -> Any:
        wrong: dict[str, Any] = {"no data_info": None, "numpy": {"classes": np.int64(3)}}
        wrong["number as key"] = {"names": {0: "cat"}}
        return wrong.get(self.wrong, super().prepare_data())

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        train, validation_sets = super().build_datasets(data_info)
        held_out = validation_sets["validation"]
        wrong: dict[str, Any] = {
            "one set": train,
            "two sets": (train, held_out),
            "three sets": (train, held_out, held_out),
            "no sets": None,
            "class of sets": (type(train), validation_sets),
        }
        if self.wrong in wrong:
            return wrong[self.wrong]
        if self.wrong == "train":
            return train, {"train": held_out}
        wrong = {"empty": [], "no index": NoIndex(), "no length": NoLength()}
        return train, {"held_out": wrong[self.wrong]} if self.wrong in wrong else validation_sets

    def build_model(self, data_info: dict[str, Any]) -> Any:
        model = super().build_model(data_info)
        wrong: dict[str, Any] = {"no model": None, "class": type(model), "weights": {}}
        if self.wrong in wrong:
            return wrong[self.wrong]
        if self.wrong == "sparse":
            model.register_buffer("adjacency", torch.eye(3).to_sparse())
        if self.wrong == "extra":
            model = torch.nn.Sequential(Counting(), model)
        if self.wrong == "mask":
            model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        return model

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return {"one value": total, "negative": (total, -1)}.get(self.wrong, (total, weight))

    def build_metrics(self) -> Any:
        if self.wrong == "metrics":
            return [*super().build_metrics().values()]
        if self.wrong != "vector":
            return super().build_metrics()
        from torchmetrics.classification import MulticlassAccuracy

        return {"per_class": MulticlassAccuracy(2, average="none")}

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        if self.wrong == "vector":
            metrics["per_class"].update(batch["label"], batch["label"])
        else:
            super().update_metrics(model, batch, metrics)


@pytest.mark.parametrize(
    ("method", "wrong", "sentence"),
    [
        ("prepare_data", "no data_info", "returned nothing, not a dict"),
        ("prepare_data", "numpy", "did not return plain JSON (Object of type int64"),
        ("prepare_data", "number as key", "did not return plain JSON (a key is not text)"),
        ("build_datasets", "one set", "; it must return the training set, and a dict"),
        ("build_datasets", "two sets", "; it must return the training set, and a dict"),
        ("build_datasets", "three sets", "; it must return the training set, and a dict"),
        (
            "build_datasets",
            "no sets",
            "returned nothing; it must return the training set, and a dict",
        ),
        ("build_datasets", "class of sets", " as 'the training set'"),
        ("build_datasets", "no length", "returned a NoLength as held_out, which has no length"),
        ("build_model", "no model", "returned nothing; it must return a torch.nn.Module"),
        ("build_model", "class", "returned the class "),
        ("build_model", "weights", "returned a dict; it must return a torch.nn.Module"),
        ("build_datasets", "train", 'returned a validation set named "train"'),
        ("build_metrics", "metrics", "); it must return a dict of metrics by name"),
        ("build_datasets", "empty", "returned an empty validation set held_out"),
        ("build_datasets", "no index", "as held_out, which has no index"),
        ("build_model", "sparse", "has the sparse buffer adjacency, which neither a checkpoint"),
        ("build_model", "extra", "has the extra state 0._extra_state, which a checkpoint does not"),
        ("build_model", "mask", "has the buffer mask, whose values are not finite"),
        ("loss", "one value", "it must return (loss_sum, num_items)"),
        ("loss", "negative", ", -1); it must return (loss_sum, num_items)"),
        ("build_metrics", "vector", "a metric per_class whose result is not a number"),
    ],
)
def test_a_wrong_return_value_is_refused_before_the_first_step(tmp_path, method, wrong, sentence):
    config = make_config(tmp_path, Wrong(wrong=wrong))
    with pytest.raises(ConfigError) as refusal:
        train(config)
    line = getattr(Wrong, method).__code__.co_firstlineno
    assert f"Wrong.{method} ({__file__}, line {line}) " in str(refusal.value)
    assert sentence in str(refusal.value)
    assert not list(config.folder.glob("checkpoints/*"))
    path = config.folder / "metrics.jsonl"
    assert not path.exists() or '"interval"' not in path.read_text()


def test_a_result_that_no_metric_has_is_refused_before_the_first_step(tmp_path):
    wanted = {"evaluation__best_metric": "validation/auroc/x", "evaluation__best_mode": "max"}
    config = make_config(tmp_path, **wanted)
    with pytest.raises(ConfigError, match=r"is validation/auroc/x, but the evaluation computes "):
        train(config)
    assert not list(config.folder.glob("checkpoints/*"))
    assert contract.scalars(Ragged(), "by_class", {0: 1.0, 1: 0.5}) == {
        "by_class/0": 1.0,
        "by_class/1": 0.5,
    }


def test_a_stream_has_no_batches_to_overfit(tmp_path):
    with pytest.raises(ConfigError, match="overfit_batches needs a training set with a length"):
        train(make_config(tmp_path, Streamed(), overfit_batches=1))


class Normalized(Ragged):
    def prepare_data(self) -> Any:
        return super().prepare_data() | {"mean": (0.5, 0.25)}


def test_tuples_in_data_info_become_lists(tmp_path):
    assert prepare_data(make_config(tmp_path, Normalized()))["mean"] == [0.5, 0.25]


class Loaded(Ragged):
    def load(self, data_info: Any, folder: Any) -> Any:
        return torch.load


def test_what_load_returns_is_checked(tmp_path):
    config = make_config(tmp_path, Loaded(), steps=1)
    with pytest.raises(ConfigError, match=r"Loaded\.load \(.*, line \d+\) returned a function"):
        load_model(tmp_path, config, {})


PLAIN = """
class Plain:
    def __init__(self, width=3): ...
    def prepare_data(self): ...
    def build_datasets(self, data_info): ...
    def build_model(self, data_info): ...
    def loss(self, model, batch, step): ...
"""


def test_a_recipe_that_is_not_a_dataclass_is_refused(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--recipe", "plain.Plain", "--batches.global_batch_size", "4", "--steps", "1"]
    place = re.escape(f"({tmp_path}/plain.py, line 2)")
    with pytest.raises(ConfigError, match=f"recipe Plain {place} is not a dataclass"):
        parse(words)


@Recipe
class Graph(Ragged):
    def build_model(self, data_info: Any) -> Any:
        model = super().build_model(data_info)
        model.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=False)
        return model


def test_a_sparse_buffer_is_refused_by_name_on_several_processes(tmp_path, monkeypatch):
    config = make_config(tmp_path, Graph(), steps=1)
    assert train(config) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="sparse buffer adjacency"):
        contract.build_model(config, Graph().prepare_data())


# ---- the methods themselves ----------------------------------------------------------------------
@Recipe
class OtherArguments(Ragged):
    def loss(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
        return super().loss(model, batch, 0)

    update_metrics = None  # type: ignore[assignment]


def test_each_method_with_other_parameters_is_named_with_its_place(tmp_path):
    line = OtherArguments.loss.__code__.co_firstlineno
    of_loss, of_metrics = problems(OtherArguments)
    assert f"({__file__}, line {line}) must accept (model, batch, step)" in of_loss
    assert "it has build_metrics but lacks update_metrics" in of_metrics
    with pytest.raises(ConfigError, match=r"recipe OtherArguments: loss.* must accept "):
        train(make_config(tmp_path, OtherArguments()))


class Undecorated(Ragged):
    rank: int = 4


class UndecoratedDefault(Ragged):
    dropout = 0.5


@Recipe
class WithoutType(Ragged):
    dropout = 0.5


class OfOne(Undecorated):
    pass


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Undecorated, "rank"),
        (UndecoratedDefault, "dropout"),
        (WithoutType, "dropout"),
        (OfOne, "rank"),
    ],
)
def test_a_field_that_a_subclass_sets_without_effect_is_refused_by_name(kind, field):
    (problem,) = problems(kind)
    assert f" {field} " in problem


class OwnInit(Ragged):
    extra: int

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.extra = 1


@Recipe
class Decorated(Ragged):
    shared: ClassVar[dict[str, int]] = {}
    constant = 3
    dropout: float = 0.5


class OfClass(Decorated):
    shared = {"a": 1}


@pytest.mark.parametrize("kind", [OwnInit, Decorated, OfClass])
def test_a_field_that_has_its_effect_is_not_refused(kind):
    assert problems(kind) == []
    assert kind().dropout == 0.5


@Recipe
class Unusual(Ragged):
    """All that is unusual here is right."""

    collate = partial(default_collate)  # no function

    def loss(self, model: Any, *given: Any) -> Any:
        total, weight = super().loss(model, *given)
        return [total, np.float32(weight)]

    def build_metrics(self) -> Any:
        return torch.nn.ModuleDict(super().build_metrics())


def test_what_is_unusual_and_right_is_not_refused(tmp_path):
    assert problems(Unusual) == []
    assert train(make_config(tmp_path, Unusual(), steps=2)) == 0


# ---- settings ------------------------------------------------------------------------------------
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
    revision: str = "12345e6"
    palette: Palette = dataclasses.field(default_factory=Palette)
    derived: int = dataclasses.field(init=False, default=3)


@Recipe
class Calling(Ragged):
    activation: Any = torch.relu


def test_a_setting_that_yaml_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.yaml cannot hold <built-in method relu"):
        train(make_config(tmp_path, Calling()))


def test_settings_of_many_types_are_read_back(tmp_path):
    config = make_config(tmp_path, Settings(color=Color.BLUE), steps=2)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.slow
def test_settings_of_many_types_are_recorded_and_continue_a_run(tmp_path):
    config = make_config(tmp_path, Settings(color=Color.BLUE), steps=2)
    assert run_world(2, train, config) == [0, 0]
    saved = parse(["--config", str(config.folder / "config.yaml")])
    assert saved.recipe == config.recipe
    assert "color: BLUE" in to_yaml(config)
    assert train(change(config, steps=3)) == 0
    with pytest.raises(ConfigError, match=r"recipe.color \('BLUE' there, 'RED' here\)"):
        train(change(config, steps=4, recipe__color=Color.RED))


# ---- ranks and loader workers --------------------------------------------------------------------
MISNAMES = [
    ("ranks", r"what loss returns on rank\(s\) \[1\] .* differs from that on rank 0"),
    ("steps", r"the scalars \['at 1', 'twice'\], but \['at 0', 'twice'\] in the"),
    ("loss", "under names other than epoch, gradient_norm"),
]


@pytest.mark.parametrize(("misnames", "sentence"), quick(1, MISNAMES))
def test_scalars_whose_names_differ_are_refused(tmp_path, misnames, sentence):
    config = make_config(tmp_path, Noting(misnames=misnames))
    with pytest.raises(RuntimeError, match=sentence):
        run_world(2, train, config)


def train_with_own(config: Config, what: str) -> int:
    """Train; on rank 1 something is another than on rank 0."""
    if os.environ["RANK"] == "1":
        if what == "torch":
            torch.__version__ = "2.10.0"  # type: ignore[assignment]
        elif what == "accelerate":
            accelerate.__version__ = "1.10.0"
        elif what == "precision":  # of its accelerate config
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        elif what == "files":
            train_set, validation_sets = config.recipe.build_datasets({"features": 6})
            fewer = {"validation": torch.utils.data.Subset(validation_sets["validation"], [0])}
            type(config.recipe).build_datasets = lambda *_: (train_set, fewer)  # type: ignore
        elif what == "config":
            config = change(config, optim__lr=0.06)
        else:
            config = change(config, recipe__noise=0.1)
    return train(config)


OWN = [
    ("torch", "the version of torch"),
    ("config", "config"),
    ("accelerate", "accelerate"),
    ("precision", "precision"),
    ("files", "the length of validation set validation"),
    ("recipe", "config"),
]


@pytest.mark.parametrize(("what", "named"), quick(2, OWN))
def test_hosts_with_other_versions_lengths_or_settings_are_named(tmp_path, what, named):
    """Each would train with the gradients of both, without a word."""
    sentence = rf"{named}.* on rank\(s\) \[1\] \(.*\) differs from that on rank 0"
    with pytest.raises(RuntimeError, match=sentence):
        run_world(2, train_with_own, make_config(tmp_path), what)


@Recipe
class WithSet(Ragged):
    numbers: frozenset[int] = frozenset([0, 8])
    derived: object = dataclasses.field(init=False, default_factory=object)


def train_with_same_set(config: Config) -> int:
    """Train; the ranks hold equal sets in different orders, as spawned processes hold texts."""
    numbers = [0, 8] if os.environ["RANK"] == "0" else [8, 0]
    return train(change(config, recipe__numbers=frozenset(numbers)))


def test_an_equal_set_and_a_derived_object_do_not_differ_between_ranks(tmp_path):
    assert repr(frozenset([0, 8])) != repr(frozenset([8, 0]))
    config = make_config(tmp_path, WithSet(), steps=1)
    assert run_world(2, train_with_same_set, config) == [0, 0]


class Unsendable:
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("it holds a connection")


@Recipe
class NotSendable(Ragged):
    graph: bool = False

    def collate(self, samples: Any) -> Any:
        batch = default_collate(samples)
        if self.graph:
            return batch | {"x": batch["x"].requires_grad_() * 2}
        return batch | {"name": Unsendable()}


@Recipe
class NotSendableStream(Streamed):
    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        stream, validation_sets = super().build_datasets(data_info)
        lane = stream.lane
        stream.lane = lambda *where: ({**s, "more": Unsendable()} for s in lane(*where))
        return stream, validation_sets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (NotSendable(), "it holds a connection"),
        (NotSendable(graph=True), r"a tensor that is part of a graph; detach\(\)"),
        (NotSendableStream(), "it holds a connection"),
    ],
    ids=["collate", "a graph", "a stream"],
)
def test_what_a_loader_worker_cannot_send_is_a_sentence_and_no_stall(tmp_path, recipe, sentence):
    if isinstance(recipe, NotSendableStream):
        recipe = dataclasses.replace(recipe, book=str(tmp_path))
    config = make_config(
        tmp_path, recipe, batches__workers=1, distributed__timeout_seconds=30,
        distributed__startup_timeout_seconds=30,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"a loader worker cannot send .*: {sentence}"):
        train(config)


# ---- numbers that JSON does not have -------------------------------------------------------------
OPENED: list[Any] = []


@pytest.fixture
def closing():
    yield
    while OPENED:
        OPENED.pop().close()


class Inside:
    """Holds one thing, as a wrapper of a dataset does."""

    def __init__(self, what: Any) -> None:
        self.what = what
        if hasattr(held := what["a"][0] if isinstance(what, dict) else what, "close"):
            OPENED.append(held)


def opened(kind: str, path: Path) -> Any:  # noqa: PLR0911
    """Return something open, or what looks like it and has no position in a file."""
    if kind == "zip":
        zipfile.ZipFile(path, "w").close()
        return zipfile.ZipFile(path)
    if kind == "tar":
        tarfile.open(path, "w").close()
        return tarfile.open(path)
    if kind == "sqlite":
        return sqlite3.connect(path)
    path.write_bytes(bytes(640))
    if kind == "map":
        return np.memmap(path)
    if kind == "member":  # of an archive, without the archive itself
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo("member"))
        archive = tarfile.open(path)  # noqa: SIM115
        OPENED.append(archive)
        return archive.extractfile("member")
    if kind == "closed":
        with path.open("rb") as file:
            return file
    if kind == "memory":
        return zipfile.ZipFile(io.BytesIO(), "w")
    if kind == "log":
        return logging.FileHandler(path)
    return {"a": [path.open("rb")]} if kind == "list" else path.open("rb")


@Recipe
class Holding(Ragged):
    """Its datasets hold something that was opened in the constructor."""

    kind: str = ""
    path: str = ""
    in_validation: bool = False

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        train, sets = super().build_datasets(data_info)
        held = ConcatDataset([sets["validation"] if self.in_validation else train])
        held.datasets[0].wrapped = Inside(opened(self.kind, Path(self.path)))
        return Subset(train, range(70)), {"validation": sets["validation"]}


@pytest.mark.parametrize("in_validation", quick(1, [False, True]))
@pytest.mark.parametrize("kind", ["file", "list", "zip", "tar", "member", "sqlite"])
@pytest.mark.usefixtures("closing")
def test_an_open_file_in_a_dataset_is_refused_with_workers(tmp_path, kind, in_validation):
    recipe = Holding(kind=kind, path=str(tmp_path / "samples"), in_validation=in_validation)
    config = make_config(tmp_path, recipe, steps=1, batches__workers=2)
    with pytest.raises(ConfigError, match=r"\.wrapped\.what\b.*\(2\)") as refusal:
        train(config)
    assert refusal.value.exit_code == 2
    assert not (config.folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("kind", "count"),
    quick(3, [("file", 0), ("member", 0), ("map", 2), ("closed", 2), ("memory", 2), ("log", 2)]),
)
@pytest.mark.usefixtures("closing")
def test_what_workers_do_not_share_is_not_refused(tmp_path, kind, count):
    recipe = Holding(kind=kind, path=str(tmp_path / "samples"))
    assert train(make_config(tmp_path, recipe, steps=1, batches__workers=count)) == 0


@Recipe
class HoldingStream(Streamed):
    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        stream, validation_sets = super().build_datasets(data_info)
        stream.shard = Inside(Path(__file__).open("rb"))  # noqa: SIM115
        return stream, validation_sets


@pytest.mark.usefixtures("closing")
def test_an_open_file_in_a_stream_is_refused_with_workers(tmp_path):
    with pytest.raises(ConfigError, match=r"stream\.shard\.what"):
        train(make_config(tmp_path, HoldingStream(), steps=1, batches__workers=1))


@Recipe
class Infinite(Ragged):
    """An infinite loss whose gradient is finite."""

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        total, weight = super().loss(model, batch, step)
        return (total + float("inf") if step in (1, 2) else total), weight


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
    assert strict((config.folder / "status.json").read_text())["outcome"] == "finished"
    assert "step 2: the loss is inf" in caplog.text
    assert weights(config.folder / "export")["0.weight"].isfinite().all()
