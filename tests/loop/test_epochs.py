"""A dataset with set_epoch gets the epoch, as DistributedSampler and datasets do."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from my_project.loading.loader import Fetch
from ragged import Ragged
from runs import assert_same_weights, change, make_config, quick, records, train
from test_loader import batches
from torch.utils.data import ConcatDataset, Subset
from world import run_world

STEPS_PER_EPOCH = 4  # 70 samples in global batches of 16


class Told(torch.utils.data.Dataset):
    """Says the epoch, and what was drawn when it was told."""

    def __init__(self, length: int = 70) -> None:
        self.length = length
        self.calls: list[int] = []
        self.drawn = torch.tensor(-1.0)

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)
        self.drawn = torch.rand(())

    def __getitem__(self, index: int) -> torch.Tensor:
        epoch = self.calls[-1] if self.calls else -1
        return torch.tensor([index, epoch, self.drawn, torch.rand(())])


class AtOnce(Told):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@dataclass(frozen=True)
class Frozen:
    """No attribute of it can be set."""

    told: Told

    def __len__(self) -> int:
        return len(self.told)

    def set_epoch(self, epoch: int) -> None:
        self.told.set_epoch(epoch)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.told[index]


WAYS: dict[str, Any] = {
    "itself": Told,
    "at once": AtOnce,
    "frozen": lambda: Frozen(Told()),
    "a subset": lambda: Subset(Subset(Told(140), range(100)), range(70)),
    "joined": lambda: ConcatDataset([Told(30), Subset(Told(80), range(40))]),
}


@pytest.mark.parametrize("way", quick(2, WAYS))
def test_each_sample_is_read_in_the_epoch_of_its_step(way):
    reference = batches(data=WAYS[way]())  # (micro-batches, samples, numbers)
    epochs = reference[..., 1].reshape(10, 16)
    for step in range(10):
        assert epochs[step].unique().tolist() == [step // STEPS_PER_EPOCH]
    assert len(reference[..., 2].unique()) == 3, "one draw per epoch, whoever reads"
    for how in ({"workers": 2}, {"processes": 2}, {"processes": 4, "workers": 1}):
        assert torch.equal(batches(data=WAYS[way](), **how), reference), how
    resumed = batches(data=WAYS[way](), steps=range(5, 10))
    assert torch.equal(resumed, reference[4 * 5 :])


def test_a_dataset_is_told_once_per_epoch():
    data = Told()
    batches(data=data)
    assert data.calls == [0, 1, 2]


def test_evaluations_read_epoch_0_of_a_dataset_that_training_shares():
    data = Told()
    training, validation = (Fetch(Subset(data, range(70)), None, 0, "auto") for _ in range(2))
    for fetch, epoch, wanted in ((training, 3, 3), (validation, "evaluation", 0), (training, 3, 3)):
        batch: Any = fetch.__getitems__([(epoch, 1), (epoch, 2)])
        assert batch[:, 1].tolist() == [wanted, wanted]
    assert data.calls == [3, 0, 3]


@dataclass(frozen=True, kw_only=True)
class Halves(Ragged):
    """Another half of the samples in each epoch; the validation set is a part of the same data."""

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        data = Half(super().build_datasets(data_info)[0])
        return Subset(data, range(32)), {"validation": Subset(data, range(16))}


class Half(torch.utils.data.Dataset):
    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.first = 1

    def __len__(self) -> int:
        return len(self.samples) // 2

    def set_epoch(self, epoch: int) -> None:
        self.first = epoch % 2

    def __getitem__(self, index: int) -> Any:
        return self.samples[2 * index + self.first]


@pytest.mark.slow
def test_a_run_is_the_same_for_any_workers_processes_and_resume(tmp_path):
    config = make_config(
        tmp_path, Halves(), evaluation__every_steps=3, checkpoints__every_steps=3,
        checkpoints__keep=9, steps=7,
    )  # fmt: skip
    assert run_world(1, train, config) == [0]
    name = "validation/auroc"
    results = [record[name] for record in records(config, name)]
    for workers, processes in ((1, 1), (0, 2)):
        other = change(config, run_name=f"{workers}_{processes}", batches__workers=workers)
        assert run_world(processes, train, other) == [0] * processes
        assert_same_weights(other, config, 1e-5)
        assert [record[name] for record in records(other, name)] == pytest.approx(results)
    path = str(config.folder / "checkpoints/step_00000003")
    resumed = change(config, run_name="resumed", resume=path)
    assert run_world(1, train, resumed) == [0]
    assert_same_weights(resumed, config)
    assert [record[name] for record in records(resumed, name)] == results[1:]
