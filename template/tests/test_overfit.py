"""overfit_batches repeats the first global batches, and evaluates on them."""

import pytest
from ragged import Ragged
from runs import make_config, quick, status, train, values
from world import run_world

from my_project import contract
from my_project.config import Config, ConfigError
from my_project.loading.layout import batch_layout
from my_project.loading.seeding import sample_keys


def overfitting(folder, batches: int = 1, **settings) -> Config:
    defaults = {"batches__micro_batch_size": 8, "optim__warmup_steps": 0, "optim__clip_norm": None}
    return make_config(folder, overfit_batches=batches, **defaults | settings)


@pytest.mark.parametrize("max_processes", quick(1, [1, 2]))
def test_a_model_memorizes_one_batch_on_any_number_of_processes(tmp_path, max_processes):
    small = {"batches__global_batch_size": 4, "batches__micro_batch_size": 2, "optim__lr": 0.1}
    curves = []
    for processes in range(1, max_processes + 1):
        config = overfitting(tmp_path / str(processes), steps=300, **small)
        run_world(processes, train, config)
        curves.append(values(config))
        assert curves[-1][0] > 1
        assert curves[-1][-1] < 0.005, "with all 70 samples it is 0.2, on these 1e-10"
    assert curves[-1][:20] == pytest.approx(curves[0][:20], rel=1e-4)
    result = status(config)["result"]
    assert (result["validation/accuracy"], result["validation/auroc"]) == (1, 1), "the same samples"


def test_the_batches_are_those_of_the_first_steps(tmp_path):
    config = overfitting(tmp_path, 2, seed=3)
    recipe = Ragged()
    everything, _ = contract.build_datasets(recipe, {"features": 6})
    layout = batch_layout(config.batches, 1)
    micro_batches = sample_keys(len(everything), layout, 0, config.seed, range(2))
    wanted = [index for keys in micro_batches for _, index in keys]
    data, sets = contract.build_datasets(recipe, {"features": 6}, config)
    assert [int(data[i]["index"]) for i in range(len(data))] == wanted
    assert len(wanted) == 32
    assert sets == {"validation": data}


def test_what_cannot_be_overfitted_is_refused(tmp_path):
    def build(recipe, batches, **settings):
        config = overfitting(tmp_path, batches, **settings)
        return contract.build_datasets(recipe, {"features": 6}, config)

    assert len(build(Ragged(), 4)[0]) == 64
    assert len(build(Ragged(), 5)[0]) == 70
    with pytest.raises(ConfigError, match="fewer than one global batch of 128"):
        train(overfitting(tmp_path, batches__global_batch_size=128))
    with pytest.raises(ConfigError, match="overfit_batches is 0, but must be at least 1"):
        overfitting(tmp_path, 0)
