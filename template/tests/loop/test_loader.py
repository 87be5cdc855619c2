"""The order of the samples, and what is drawn for each, depend on nothing but the seed."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from runs import change, make_config

from my_project.loading.feed import IndexedBatches
from my_project.loading.layout import batch_layout
from my_project.loading.loader import Fetch, make_loader
from my_project.loading.sampler import SliceSampler
from my_project.loading.workers import cpus_per_process


class Drawing(torch.utils.data.Dataset):
    """Samples that are drawn when they are read, from all three generators."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(()) * 0 + torch.rand(())


def on_cpu(rank: int) -> Any:
    return SimpleNamespace(process_index=rank, device=torch.device("cpu"))


def batches(workers: int = 0, processes: int = 1, steps: range = range(10), **recipe: Any):
    config = make_config(None, batches__workers=workers, steps=10)  # type: ignore[arg-type]
    if recipe:
        object.__setattr__(config.recipe, "collate", recipe["collate"])
    layout = batch_layout(config.batches, processes)
    parts = [
        list(IndexedBatches(config, Drawing(), layout, steps, on_cpu(rank)))
        for rank in range(processes)
    ]
    # micro-batch j of process r is slice j * processes + r of a global batch
    return torch.stack([parts[i % processes][i // processes] for i in range(4 * len(steps))])


def test_every_sample_once_per_epoch_in_another_order_each_time():
    order = batches()[..., 0].reshape(10, 16)
    epochs = [order[:4].flatten(), order[4:8].flatten()]  # 70 // 16 = 4 steps, 6 samples dropped
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 64
    assert epochs[0].tolist() != epochs[1].tolist()


def test_same_samples_and_draws_for_any_number_of_processes_and_workers():
    reference = batches()
    for variant in (batches(processes=2), batches(processes=4), batches(workers=2)):
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


def test_random_draws_in_collate_are_the_same_for_any_split():
    assert torch.equal(batches(collate=collate), batches(processes=4, collate=collate))


def test_the_seed_changes_order_and_draws():
    one, two = (
        SliceSampler(70, batch_layout(make_config(None).batches, 1), 0, seed, range(4))  # type: ignore[arg-type]
        for seed in (0, 1)
    )
    assert list(one) != list(two)
    assert len(one) == len(list(one)) == 16


def test_fetching_leaves_the_generators_of_the_process_alone():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    Fetch(Drawing(), None, 0, seed_samples=True).__getitems__([(0, 1), (0, 2)])
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == before


def test_a_whole_micro_batch_is_fetched_at_once_where_nothing_is_seeded():
    class Batched(Drawing):
        def __getitems__(self, indices):
            return [torch.tensor(indices)]

    fetched = Fetch(Batched(), None, 0, seed_samples=False).__getitems__([(0, 5), (0, 6)])
    assert fetched.tolist() == [[5, 6]]


def test_loader_options_are_torchs_own():
    config = make_config(None).batches  # type: ignore[arg-type]
    config = change(config, workers=1, loader={"prefetch_factor": 5, "persistent_workers": False})
    loader = make_loader(config, Fetch(Drawing(), None, 0, True), torch.device("cpu"))
    assert (loader.prefetch_factor, loader.persistent_workers) == (5, False)


def test_default_workers_leave_a_cpu_for_training(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpus_per_process() <= 4
    config = change(make_config(None).batches, workers=None)  # type: ignore[arg-type]
    loader = make_loader(config, Fetch(Drawing(), None, 0, True), torch.device("cpu"))
    assert loader.num_workers <= 3
