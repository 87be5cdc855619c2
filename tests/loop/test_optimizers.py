"""No optimizer of torch gives another curve, for any kind of weight: see optimizers.py."""

import pytest
from optimizers import OPTIMIZERS, WEIGHTS, Cell, external, table, train_external
from world import run_world

# besides those that have their turn
MORE = [(name, "sparse", "DDP") for name in ("Adagrad", "SparseAdam")]
MORE += [("NAdam", "expanded", "FSDP2")]


def is_known_to_train(cell: Cell) -> bool:
    """Return whether torch 2.15 knows how to; the others raise an error of its own."""
    optimizer, weight, layout = cell
    if optimizer == "LBFGS":  # needs a function that computes the loss again
        return False
    if optimizer == "SparseAdam" or weight == "sparse":
        takes_sparse = optimizer in ("Adagrad", "SGD", "SparseAdam")
        return takes_sparse and weight == "sparse" and layout != "FSDP2"
    if layout == "FSDP2" and optimizer in ("Adafactor", "Adagrad"):
        return False
    takes_few = optimizer == "Muon" or layout == "FSDP2"
    return not (takes_few and weight in ("channels_last", "0-dim"))


def check(folder, cells: list[Cell]) -> None:
    found = table(folder, cells)
    wrong = {cell: outcome for cell, outcome in found.items() if outcome[0] == "another curve"}
    wrong |= {c: o for c, o in found.items() if is_known_to_train(c) and o[0] != "ok"}
    assert len(found) == len(cells)
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_optimizer_resumes_to_the_bit_or_ends_in_an_error(tmp_path):
    """On two processes with matrices and one other kind of weight, in turn."""
    cells = [(optimizer, weight, "one") for optimizer in OPTIMIZERS for weight in WEIGHTS]
    for number, optimizer in enumerate(OPTIMIZERS):
        other = WEIGHTS[1 + number % (len(WEIGHTS) - 1)]
        cells += [(optimizer, w, how) for w in (WEIGHTS[0], other) for how in ("DDP", "FSDP2")]
    check(tmp_path, [*dict.fromkeys(cells + MORE)])


TRAINS = {
    "pytorch_optimizer": ["SOAP", "Shampoo", "Kron", "SPlus", "Prodigy", "Lion", "StableAdamW"],
    "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"],
    "lion_pytorch": ["Lion"],
    "prodigyopt": ["Prodigy"],
    "bitsandbytes.optim": ["AdamW"],  # accelerate imports it where it is installed, with warnings
}
REFUSED = {"pytorch_optimizer": ["ScalableShampoo", "StableSPAM", "EmoNavi"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", TRAINS)
def test_other_optimizers_resume_to_the_bit_or_are_refused_in_time(tmp_path, package):
    pytest.importorskip(package)
    named = [f"{package}.{name}" for name in TRAINS[package] + REFUSED.get(package, [])]
    paths = [*dict.fromkeys(named + external(package)[::3])]
    (found,) = run_world(1, train_external, tmp_path, paths, seconds=850)
    wrong = {path: o for path, o in found.items() if o != "ok" and not o.startswith("refused")}
    assert not wrong
    assert {found[f"{package}.{name}"] for name in TRAINS[package]} <= {"ok"}
    for name in REFUSED.get(package, []):
        assert "cannot be resumed" in found[f"{package}.{name}"]
