"""No optimizer of torch gives another curve, for any kind of weight: see optimizers.py."""

import pytest
from optimizers import OPTIMIZERS, PROCESSES, WEIGHTS, Cell, external, table, train_external
from world import run_world

FEW = [
    ("AdamW", "channels_last", "one"),
    ("SGD with momentum", "matrices", "DDP"),
    ("ASGD", "0-dim", "one"),
    ("NAdam", "matrices", "DDP"),
    ("Adagrad", "sparse", "DDP"),
    ("NAdam", "expanded", "FSDP2"),
    ("Muon", "matrices", "FSDP2"),
]


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
def test_optimizers_resume_to_the_bit_and_train_alike_in_ddp_and_fsdp(tmp_path):
    alone = [(optimizer, weight, "one") for optimizer, weight, layout in FEW]
    check(tmp_path, [*dict.fromkeys(alone + FEW)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_optimizer_resumes_to_the_bit_or_ends_in_an_error(tmp_path):
    check(tmp_path, [(o, w, layout) for o in OPTIMIZERS for w in WEIGHTS for layout in PROCESSES])


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
    (found,) = run_world(1, train_external, tmp_path, external(package), seconds=850)
    wrong = {path: o for path, o in found.items() if o != "ok" and not o.startswith("refused")}
    assert not wrong
    assert {found[f"{package}.{name}"] for name in TRAINS[package]} <= {"ok"}
    for name in REFUSED.get(package, []):
        assert "cannot be resumed" in found[f"{package}.{name}"]
