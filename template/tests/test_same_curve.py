"""Promise 1: the same curve for any split of the global batch into processes and micro-batches."""

import pytest
import torch
from ragged import Noting, Ragged
from runs import assert_same_weights, averaged, change, make_config, quick, records, train, weights
from world import run_world

# A wrong gradient scale changes SGD, but not AdamW; clipping has an effect on both.
OPTIMIZERS = {
    "sgd": {"optim__class_path": "torch.optim.SGD", "optim__init_args": {"momentum": 0.9}},
    "adamw": {"optim__weight_decay": 0.1},
}
CASES = [("sgd", "float64"), ("adamw", "float32"), ("sgd", "float32"), ("adamw", "float64")]


@pytest.mark.parametrize(("optimizer", "dtype"), quick(2, CASES))
def test_any_split_gives_the_same_curve(tmp_path, optimizer, dtype):
    """70 samples are not a multiple of 16, lengths differ, 10 steps cross two epochs."""
    tolerance = {"float64": 1e-9, "float32": 2e-5}[dtype]
    curves, finals = [], []
    recipe = Noting(dtype=dtype, dropout=0.2, noise=0.1)
    for processes in (1, 2, 3, 4):  # with 4, 2, 2 or 1, and 1 micro-batches each
        config = make_config(tmp_path / str(processes), recipe, **OPTIMIZERS[optimizer])
        run_world(processes, train, config)
        curves.append(records(config))
        finals.append(weights(config.folder / "export"))

    reference = curves[0]
    assert len(reference) == 10
    norms = [record["gradient_norm"] for record in reference]
    assert min(norms) < 1.8 < max(norms), "clipping must take effect in some steps only"
    assert [record["train/twice"] for record in reference] == [2.0] * 10
    for curve, final in zip(curves[1:], finals[1:], strict=True):
        for name in ("loss", "gradient_norm", "train/root", "train/twice"):
            theirs = [record[name] for record in reference]
            ours = [record[name] for record in curve]
            assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
        assert [r["learning_rate"] for r in curve] == [r["learning_rate"] for r in reference]
        torch.testing.assert_close(final, finals[0], rtol=tolerance, atol=tolerance)


def test_any_split_gives_the_same_batch_norm(tmp_path):
    """The same weights, running statistics and evaluations; one step is skipped."""
    pytest.importorskip("my_project.statistics")
    recipe = Ragged(dtype="float64", batch_norm=True, explode_at=(4,))
    settings, runs = OPTIMIZERS["sgd"] | {"evaluation__every_steps": 3}, []
    for processes in (1, 3, 4):
        config = make_config(tmp_path / str(processes), recipe, **settings)
        run_world(processes, train, config)
        runs.append(config)
        assert_same_weights(config, runs[0], 1e-12)  # buffers too
        for name in ("validation/accuracy", "validation/auroc"):
            ours, theirs = ([r[name] for r in records(c, name)] for c in (config, runs[0]))
            assert len(ours) == 4
            assert ours == pytest.approx(theirs, abs=1e-6)
    calls = weights(config.folder / "export")["1.num_batches_tracked"]
    assert calls == 9 * 4, "over all processes, without the skipped step"


@pytest.mark.parametrize("processes", quick(1, [(3,), (5,), (7,)]))
@pytest.mark.parametrize("size", [0, 2, 3])
def test_a_number_of_processes_that_does_not_divide_the_batch(tmp_path, size, processes):
    """Micro-batches have unequal sizes, or some ranks repeat one with weight 0."""
    if size == 3 and processes == 7:
        pytest.skip("16 samples are 6 micro-batches of 3")
    recipe = Noting(dtype="float64", dropout=0.2 * bool(size), explode_at=(4,))
    settings = OPTIMIZERS["sgd"] | averaged(0.8) | {"batches__micro_batch_size": size}
    one = make_config(tmp_path, recipe, run_name="one", **settings)
    several = change(one, run_name="several")
    run_world(1, train, one)
    run_world(processes, train, several)
    assert_same_weights(several, one, 1e-9)
    for name in ("loss", "gradient_norm", "train/root", "train/twice"):
        ours, theirs = ([r.get(name) for r in records(c)] for c in (several, one))
        assert len(ours) == 10
        compared = zip(ours, theirs, strict=True)
        # a sum of roots depends on the micro-batches
        for value, wanted in compared if size or name != "train/root" else ():
            assert value == (wanted and pytest.approx(wanted, rel=1e-9, abs=1e-9))
