"""Ranks must agree on data, code and the model, and so must a start and the one before it."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from my_project import optim
from my_project import train as loop
from my_project.checks import agreement, data
from my_project.checks.agreement import Agreement
from my_project.checks.data import is_same, parts
from my_project.checks.findings import Findings
from my_project.checks.ranks import EqualRanks
from my_project.config import Config, ConfigError
from my_project.run_folder import Run
from PIL import Image
from ragged import QUIET, Ragged
from runs import assert_same_weights, change, make_config, quick, records, train
from streamed import Streamed
from torch.utils.data import Dataset, Subset, TensorDataset
from world import run_world


class Other(Dataset):
    """Samples of which some are others."""

    seed: int | None = None

    def __init__(self, samples: Any, how: str) -> None:
        self.samples, self.how = samples, how
        self.generator = np.random.default_rng(self.seed)

    def __len__(self) -> int:
        return len(self.samples) + 10 * (self.how == "grown")

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.how == "slow":
            time.sleep(2)
        sample = self.samples[index % len(self.samples)]
        change = {"edited": 1.01, "rounded": 1 + 1e-6}.get(self.how, 1.0)
        if self.how == "drawn" or (self.how == "drawn later" and index):
            change += self.generator.random()
        return sample | {"x": sample["x"] * change}


@dataclass(frozen=True, kw_only=True)
class Differing(Ragged):
    """Something is another on rank 1, or in a start that says so."""

    how: str = field(default="", metadata=QUIET)
    on_rank: str = field(default="1", metadata=QUIET)
    beside: bool = field(default=False, metadata=QUIET)  # needs a module beside the recipe

    @property
    def differs(self) -> bool:
        return os.environ.get("RANK", "0") == self.on_rank or self.how.startswith("drawn")

    def prepare_data(self) -> dict[str, Any]:
        factor = {"rounded": 1 + 1e-7, "shifted": 1.001}.get(self.how, 1.0)
        words = "b a" if self.how == "vocabulary" else "a b"
        return super().prepare_data() | {"words": words, "mean": [0.1307 * factor, 3e-5 * factor]}

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        train, validation_sets = super().build_datasets(data_info)
        if self.how == "order" and self.differs:
            validation_sets = {
                "validation": Subset(validation_sets["validation"], range(22, -1, -1))
            }
        elif self.how == "divided":
            rank = int(os.environ.get("RANK", "0"))
            train = Subset(train, range(rank, 70, 2))
        elif self.differs:
            train = Other(train, self.how)
        return train, validation_sets

    def build_model(self, data_info: dict[str, Any]) -> Any:
        if self.beside:
            import beside  # pyright: ignore[reportMissingImports]

            assert beside.FACTOR
        model = super().build_model(data_info)
        if self.how == "dropout" and self.differs:
            model[2].p = 0.25
        if self.how == "address":
            model[1].extra_repr = lambda: f"{object()} on cuda:{os.environ['RANK']}"
        return model


def told(config: Config) -> dict[str, str]:
    """Return what the checks have recorded."""
    return {record["check"]: record["problem"] for record in records(config, "check")}


def train_beside(config: Config, sources: list[str]) -> int:
    """Train where a module beside the recipe has another source on each rank."""
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(config.runs_folder, f"beside_{rank}")
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text(sources[rank])
    sys.path.insert(0, str(folder))
    return train(change(config, recipe__beside=True))


# ---- ranks ---------------------------------------------------------------------------------------
RANKS = [
    ("order", "validation set validation .*samples 0, "),
    ("edited", "the training set .*samples 0, 17, 35, 52 on rank"),
    ("divided", "the training set .*samples 0, 8, 17, 26 "),
    ("dropout", "p=0.25"),
]


@pytest.mark.parametrize(("how", "named"), quick(1, RANKS))
def test_ranks_with_other_data_or_another_model_are_refused(tmp_path, how, named):
    config = make_config(tmp_path, Differing(how=how), steps=2)
    with pytest.raises(RuntimeError, match=rf"(?s){named}.*checks.ranks"):
        run_world(2, train, config)
    if how != "edited":
        return
    assert run_world(2, train, change(config, checks__ranks="warn", run_name="warned")) == [0, 0]
    assert list(told(change(config, run_name="warned"))) == ["ranks"]
    assert run_world(2, train, change(config, checks__ranks="off", run_name="off")) == [0, 0]
    assert told(change(config, run_name="off")) == {}


@pytest.mark.slow
def test_a_module_of_the_repository_that_differs_between_ranks_is_named(tmp_path):
    config = make_config(tmp_path, Differing(), steps=2)
    with pytest.raises(RuntimeError, match=r"beside\.py on rank"):
        run_world(2, train_beside, config, ["FACTOR = 1", "FACTOR = 2"])
    assert run_world(2, train_beside, change(config, run_name="same"), ["FACTOR = 1"] * 2) == [0, 0]
    assert told(change(config, run_name="same")) == {}


@pytest.mark.parametrize("how", quick(1, ["rounded", "address", "slow"]))
def test_what_rounds_differently_or_takes_too_long_is_not_refused(tmp_path, how):
    config = make_config(tmp_path, Differing(how=how), steps=1)
    config = change(config, batches__global_batch_size=2, batches__micro_batch_size=1)
    assert run_world(2, train_in_haste, config) == [0, 0]
    assert told(config) == {}


def train_in_haste(config: Config) -> int:
    data.SECONDS = 0.5
    return train(config)


@pytest.mark.parametrize(
    ("how", "processes"), quick(1, [("drawn", 2), ("drawn", 1), ("drawn later", 2)])
)
def test_a_dataset_with_a_generator_of_its_own_is_named(tmp_path, how, processes):
    """It differs between the ranks, but no node has other files."""
    config = make_config(tmp_path, Differing(how=how), steps=2)
    assert run_world(processes, train, config) == [0] * processes
    assert "torch.initial_seed" in told(config)["data"]
    assert "ranks" not in told(config)
    if how == "drawn" and processes == 2:
        off = change(config, checks__data="off", run_name="off")
        assert run_world(processes, train, off) == [0] * processes
        assert told(off) == {}


class Roads(TensorDataset):
    lanes = (1, 2, 2)


def test_a_dataset_with_an_attribute_lanes_is_read_by_its_index(tmp_path):
    roads = Roads(torch.arange(5))
    facts = data.Reading(make_config(tmp_path), {"roads": roads}).facts()
    assert facts["roads"].length == 5


class InOrder(Dataset):
    """Reads one sample after the other from an open file, as it must not."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> Any:
        return self.file.read(1)


def test_the_position_of_an_open_file_is_not_moved(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(70)))
    config, opened = make_config(tmp_path), InOrder(tmp_path / "file")
    run = Run(config, 0)
    run.hosts = ["here"]
    Agreement(Findings(Accelerator(cpu=True), run), {}, opened, {}).compare(
        torch.nn.Identity(), is_resumed=False
    )
    first = opened[0]
    opened.file.close()
    assert first == b"\0"


def test_the_samples_of_a_stream_are_compared_too(tmp_path):
    config = make_config(
        tmp_path, Streamed(book=str(tmp_path)), steps=1, batches__micro_batch_size=2
    )
    assert run_world(2, train, config) == [0, 0]
    assert '"the training set": {"length": 8' in (config.folder / agreement.FILE).read_text()


# ---- starts --------------------------------------------------------------------------------------
STARTS = [
    ("edited", "data", "samples 0, 17, 35, 52"),
    ("code", "code", "beside.py"),
    ("grown", "data", "has length 80, not 70"),
    ("vocabulary", "data", "another words"),
    ("shifted", "data", "another mean"),
    ("", "", ""),
    ("rounded", "", ""),
]


@pytest.mark.parametrize(("how", "check", "named"), quick(2, STARTS))
def test_a_start_with_other_data_or_code_says_so_and_goes_on(tmp_path, how, check, named):
    config = make_config(tmp_path, Differing(on_rank="0"), steps=2)
    assert run_world(1, train_beside, config, ["FACTOR = 1"]) == [0]
    assert told(config) == {}
    later = change(config, steps=4, recipe__how=how)
    source = [f"FACTOR = {1 + (how == 'code')}"]
    ended = change(later, checks__data="end", checks__code="end")
    if check:
        with pytest.raises(RuntimeError, match=rf"{named}.*checks.{check} warn"):
            run_world(1, train_beside, ended, source)
    assert run_world(1, train_beside, later, source) == [0]
    assert list(told(config)) == [check] * bool(check)
    assert named in told(config).get(check, "")
    # the next start compares with this one
    assert run_world(1, train_beside, change(ended, steps=6), source) == [0]


def test_a_restart_in_place_compares_nothing_again_but_at_saves(tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCH_START", "launch.0")
    config = make_config(tmp_path, Differing(), steps=2)
    train(config)
    monkeypatch.setenv("LAUNCH_START", "launch.1")
    monkeypatch.setattr(agreement, "Reading", None)
    looks: list[str] = []
    monkeypatch.setattr(EqualRanks, "at_save", lambda self: looks.append("save"))
    monkeypatch.setattr(EqualRanks, "_note_before", lambda *_: looks.append("forward"))
    train(change(config, steps=4))
    assert looks == ["save"]
    with monkeypatch.context() as joined:
        joined.setattr("socket.gethostname", lambda: "joined")  # with --min_machines
        with pytest.raises(TypeError):
            train(change(config, steps=6))
    monkeypatch.setenv("LAUNCH_START", "other.0")
    with pytest.raises(TypeError):
        train(change(config, steps=6))


def test_reading_samples_changes_neither_the_dataset_nor_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(Other, "seed", 0)
    configs = [
        make_config(tmp_path, Differing(how="drawn"), steps=2, run_name=name, checks__recipe=False)
        for name in "ab"
    ]  # without the check of the loss, which draws from the dataset's generator in this process
    off = {f"checks__{name}": False for name in ("data", "code", "ranks")}
    train(configs[0])
    train(change(configs[1], **off))
    assert not (configs[1].folder / agreement.FILE).exists() or told(configs[1]) == {}
    assert_same_weights(*configs)


def test_data_info_is_compared_exactly_but_for_the_rounding_of_floats():
    facts, is_same = agreement.data_info_facts, agreement.is_same_info
    noise = np.random.RandomState(0).rand(2000)
    rounded = [*(noise[:1000] * (1 + 2e-7)), *noise[1000:]]
    assert is_same(facts([*noise]), facts(rounded))
    assert is_same(facts({"a": float("nan")}), facts({"a": float("nan")}))
    for one, other in [
        ("v1.10", "v1.1"),
        (123456.0, 123467.0),
        (0.1307, 0.1308),
        (1, 2),
        ([1.0, "a"], [1.0, "b"]),
        ([1.0], [1.0, 1.0]),
        ([*noise], [*noise[:-1], 0.5]),
    ]:
        assert not is_same(facts(one), facts(other)), (one, other)


# ---- what a sample holds -------------------------------------------------------------------------
@dataclass
class Pair:
    image: Any
    boxes: list[Any]


NOISE = np.random.RandomState(0).randn(8, 8)
ROUNDED = NOISE * (1 + 1e-6)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]).int()),
        (torch.tensor(NOISE), torch.tensor(ROUNDED), torch.tensor(NOISE.T.copy())),
        (torch.tensor(NOISE).bfloat16(), torch.tensor(NOISE).bfloat16(), torch.tensor(NOISE)),
        (NOISE, ROUNDED, NOISE[::-1]),
        (0.1 + 0.2, 0.3, 0.31),
        (float("nan"), float("nan"), 1.0),
        (7, 7, 8),
        (int("7" * 20), int("7" * 20), int("8" * 20)),
        (np.array([int("7" * 20), "a"]), np.array([int("7" * 20), "a"]), np.array([8, "a"])),
        (np.array([{7: 8}, object()]), np.array([{7: 8}, object()]), np.array([{7: 9}, object()])),
        (True, True, False),
        (None, None, 0),
        ("a text\nof lines", "a text\nof lines", "a text\nof  lines"),
        ("/node 1/data/a.png", "/node 2/data/a.png", "/node 1/data/b.png"),
        ("s3://one/a.png", "s3://two/a.png", "s3://one/b.png"),
        ("rec/autos", "rec/autos", "sci/autos"),
        (PurePosixPath("/1/a.png"), PurePosixPath("/2/a.png"), PurePosixPath("/1/b.png")),
        (b"bytes", b"bytes", b"other"),
        ({"b": 1, "a": [2, "x"]}, {"a": [2, "x"], "b": 1}, {"a": [2, "y"], "b": 1}),
        ([[1, 2], [3]], [[1, 2], [3]], [[1, 2], [3, 4]]),
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], [2.0, 1.0]),
        (Pair(NOISE, [1]), Pair(ROUNDED, [1]), Pair(NOISE, [2])),
        (Image.new("RGB", (9, 9), 200), Image.new("RGB", (9, 9), 200), Image.new("RGB", (9, 9), 9)),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()),
        (object(), object(), 3),
    ],
)
def test_every_kind_of_sample_is_told_from_another_one(one, same, other):
    facts = dict(parts(one))
    assert is_same(facts, dict(parts(same)))
    assert not is_same(facts, dict(parts(other)))


def test_what_is_installed_is_no_code_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("")
    (tmp_path / "deps/their-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "deps/their-1.0.dist-info/RECORD").write_text("")
    (tmp_path / "deps/their-1.0.dist-info/METADATA").write_text("Name: their\nVersion: 1.0\n")
    (tmp_path / "deps/their_module.py").write_text("")
    for folder in (tmp_path, tmp_path / "deps"):
        monkeypatch.syspath_prepend(folder)
    import own_module  # pyright: ignore[reportMissingImports]
    import their_module  # pyright: ignore[reportMissingImports]

    found = agreement.sources()
    assert own_module.__name__ in found
    assert their_module.__name__ not in found
    assert {loop.__name__, optim.__name__, "ragged"} <= found.keys()
    assert not {"torch", "json", "numpy"} & found.keys()
    assert not [name for name in found if name.startswith("my_project.tools")]


@pytest.mark.slow
def test_a_damaged_file_of_an_earlier_start_is_passed_over(tmp_path):
    config = make_config(tmp_path, Differing(), steps=2)
    train(config)
    bad = '{"data": {}, "code": {}, "data_info": {"words": %s}}'
    texts = (
        "{",
        '{"data": {"a": 3}, "code": 5, "data_info": []}',
        "[]",
        bad % "[]",
        bad % '["", "x"]',
    )
    for text in texts:
        (config.folder / agreement.FILE).write_text(text)
        config = change(config, steps=config.steps + 1, checks__data="end", checks__code="end")
        assert train(config) == 0
    with pytest.raises(ConfigError):
        train(change(config, steps=9, recipe__samples=80))
