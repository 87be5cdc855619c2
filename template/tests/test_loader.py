"""The order of the samples, and the random draws for each, depend only on the seed."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import change, make_config
from torch.utils.data import default_collate

from my_project.config import ConfigError
from my_project.loading.layout import batch_layout
from my_project.loading.loader import Fetch, cpus_per_process, make_loader, read_batches
from my_project.loading.seeding import derive_seed, sample_keys


class Drawing(torch.utils.data.Dataset):
    """Samples are drawn when they are read, from all three generators."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def on_cpu(rank: int) -> Any:
    return SimpleNamespace(process_index=rank, device=torch.device("cpu"))


def batches(
    workers: int = 0,
    processes: int = 1,
    steps: range = range(10),
    data: Any = None,
    seed_samples: Any = "auto",
    **recipe: Any,
):
    config = make_config(None, batches__workers=workers, steps=10)  # type: ignore[arg-type]
    config = change(config, batches__seed_samples=seed_samples)
    if recipe:
        object.__setattr__(config.recipe, "collate", recipe["collate"])
    layout = batch_layout(config.batches, processes)
    parts = [
        list(read_batches(config, data or Drawing(), layout, steps, on_cpu(rank)))
        for rank in range(processes)
    ]
    # micro-batch m of a global batch is the m // processes-th of process m % processes
    rounds, number = layout.accumulation, layout.micro_batches
    places = [
        (m % processes, k * rounds + m // processes)
        for k in range(len(steps))
        for m in range(number)
    ]
    return torch.stack([parts[rank][j] for rank, j in places])


def batches_of(processes: int) -> torch.Tensor:
    return batches(processes=processes)


def test_every_sample_once_per_epoch_in_another_order_each_time():
    order = batches()[..., 0].reshape(10, 16)
    epochs = [order[:4].flatten(), order[4:8].flatten()]  # 70 // 16 = 4 steps, 6 samples dropped
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 64
    assert epochs[0].tolist() != epochs[1].tolist()


def test_same_samples_and_draws_for_any_number_of_processes_and_workers():
    reference = batches()
    for variant in (*map(batches_of, (2, 3, 4)), batches(workers=2)):
        assert torch.equal(variant, reference)


def test_a_sample_is_drawn_anew_in_each_epoch():
    seen = {}
    for sample in batches().reshape(-1, 4).tolist():
        seen.setdefault(sample[0], []).append(tuple(sample[1:]))
    twice = [draws for draws in seen.values() if len(draws) > 1]
    assert twice
    assert all(len(set(draws)) == len(draws) for draws in twice)


def test_a_start_at_any_step_yields_what_the_whole_run_yields_there():
    whole = batches()
    for first in (1, 4, 7):
        assert torch.equal(batches(steps=range(first, 10)), whole[4 * first :])


class DrawsLate(Drawing):
    """Draws from the given generators, but only for two samples, which are not read first."""

    def __init__(self, *generators: Any) -> None:
        self.generators = generators
        self.reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        drawn = [draw() if index % 35 == 0 else 0.0 for draw in self.generators]
        return torch.tensor([index, *drawn])


@pytest.mark.parametrize(
    "generators", [[random.random], [np.random.rand], [random.random, np.random.rand]]
)
def test_what_is_first_drawn_late_is_what_seeding_each_sample_gives(generators):
    wanted = batches(data=DrawsLate(*generators), seed_samples=True)
    assert len(set(wanted[..., 1].flatten().tolist())) > 4, "draws of several epochs"
    assert not wanted[:4, :, 1].any(), "nothing is drawn in the first step"
    for split in (
        {}, {"workers": 2}, {"processes": 2}, {"processes": 4}, {"processes": 2, "workers": 1}
    ):  # fmt: skip
        assert torch.equal(batches(data=DrawsLate(*generators), **split), wanted), split
    resumed = batches(data=DrawsLate(*generators), steps=range(5, 10))
    assert torch.equal(resumed, wanted[20:])


class WithSeeds(Drawing):
    """Makes its own generator from the seed of the sample, and draws from no global one."""

    def __getitem__(self, index: int) -> torch.Tensor:
        seed = torch.initial_seed()
        return torch.tensor([index, seed - 2**64 if seed >= 2**63 else seed])


def test_the_initial_seed_is_that_of_the_sample():
    seen = batches(data=WithSeeds(), workers=1)
    assert torch.equal(seen, batches(data=torch.utils.data.Subset(WithSeeds(), range(70))))
    for epoch, rows in enumerate(seen.reshape(10, 16, 2)[[0, 4, 8]]):
        for index, seed in rows.tolist():
            assert seed % 2**64 == derive_seed(0, "sample", epoch, index)


def test_random_draws_in_collate_are_the_same_for_any_split():
    def draw(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + random.random() + np.random.rand() + torch.rand(())

    wanted = batches(collate=draw, data=DrawsLate(), seed_samples=True)
    for processes in (1, 4):
        assert torch.equal(batches(collate=draw, data=DrawsLate(), processes=processes), wanted)


def test_the_seed_changes_order_and_draws():
    layout = batch_layout(make_config(None).batches, 1)  # type: ignore[arg-type]
    one, two = (list(sample_keys(70, layout, 0, seed, range(4))) for seed in (0, 1))
    assert one != two
    assert len(one) == 16


class BatchReader(DrawsLate):
    """Reads several samples with one call, as Hugging Face datasets do."""

    batch_reads = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.batch_reads += 1
        return [self[index] for index in indices]


def test_a_whole_micro_batch_is_fetched_by_one_call_if_nothing_is_drawn():
    plain = batches(data=DrawsLate(), seed_samples=False)
    for seeded, in_a_subset in (("auto", False), (False, False), ("auto", True), (True, False)):
        data = BatchReader()
        subset = torch.utils.data.Subset(data, range(70))
        seen = batches(data=subset if in_a_subset else data, seed_samples=seeded)
        assert torch.equal(seen, plain)
        assert data.batch_reads == (0 if seeded is True else 40), seeded
        assert data.reads == 160
    for draw in (random.random, np.random.rand, lambda: torch.rand(()).item()):
        data = BatchReader(draw)
        wanted = batches(data=DrawsLate(draw), seed_samples=True)
        assert torch.equal(batches(data=data), wanted)
        assert 0 < data.batch_reads < 40
        assert data.reads == 160 + 4, "the micro-batch of the first draw is read again"


class OwnTensors(torch.utils.data.TensorDataset):
    """A user's subclass, which may draw: it is read sample by sample."""


def test_datasets_of_tensors_are_read_by_one_indexing_per_tensor(monkeypatch):
    tensors = torch.randn(70, 3), torch.arange(70), torch.randn(70, 2, 2, dtype=torch.float64)
    subset = torch.utils.data.Subset
    by_sample, by_rows = (
        [kind(*tensors), subset(kind(*tensors), range(69, -1, -1))]
        for kind in (OwnTensors, torch.utils.data.TensorDataset)
    )
    by_sample.append(subset(by_sample[1], range(3, 50)))
    by_rows.append(subset(by_rows[1], range(3, 50)))
    keys = [(0, 5), (0, 46), (1, 5), (2, 0)]
    wanted = [Fetch(data, None, 0, "auto").__getitems__(keys) for data in by_sample]
    monkeypatch.delattr("torch.utils.data.TensorDataset.__getitem__")
    for data, batch in zip(by_rows, wanted, strict=True):
        for seeded in ("auto", True, False):
            read = Fetch(data, None, 0, seeded).__getitems__(keys)
            assert type(read) is type(batch)
            for a, b in zip(read, batch, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
    with pytest.raises(NotImplementedError):  # a recipe's own collate takes samples
        Fetch(by_rows[0], default_collate, 0, "auto").__getitems__(keys)


def test_loader_options_are_torchs_own():
    config = make_config(None).batches  # type: ignore[arg-type]
    config = change(config, workers=1, loader={"prefetch_factor": 5, "persistent_workers": False})
    loader = make_loader(config, Fetch(Drawing(), None, 0, True), torch.device("cpu"))
    assert (loader.prefetch_factor, loader.persistent_workers) == (5, False)


@pytest.mark.parametrize(
    "option", [{"in_order": False}, {"generator": 1}, {"collate_fn": "list"}, {"num_workers": 2}]
)
def test_loader_options_that_would_change_a_batch_are_refused(option):
    (name,) = option
    config = change(make_config(None).batches, workers=1, loader=option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"batches.loader .*multiple values .*'{name}'"):
        make_loader(config, Fetch(Drawing(), None, 0, True), torch.device("cpu"))


def test_default_workers_leave_a_cpu_for_training(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpus_per_process() <= 4
    config = change(make_config(None).batches, workers=None)  # type: ignore[arg-type]
    loader = make_loader(config, Fetch(Drawing(), None, 0, True), torch.device("cpu"))
    assert loader.num_workers <= 3
