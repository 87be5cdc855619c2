"""The loops that the benchmark compares do the same work: they end with the same weights."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from shell import succeed

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The cases for GPUs, with a GPT that is small enough for CPU processes.
TINY = """
import dataclasses, sys
sys.path.insert(0, sys.argv.pop(1))
import loop
size = {"vocabulary": 64, "sequence_length": 16, "width": 32, "depth": 2, "heads": 2}
for name, case in loop.GPU_CASES.items():
    loop.GPU_CASES[name] = dataclasses.replace(case, recipe=size, micro_batch_size=2)
loop.main()
"""


def rows(*command: str | Path) -> list[list[str]]:
    """Run a benchmark; return the cells of its table: case, loop, ..., difference of weights."""
    printed = succeed(sys.executable, *command)
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.slow
def test_all_loops_end_with_equal_weights_if_the_order_does_not_matter():
    command = [BENCHMARKS / "loop.py", "--cases", "one_batch", "--rounds", "2", "--peers"]
    found = {loop: (time, weights) for _, loop, time, *_, weights in rows(*command)}
    assert next(iter(found)) == "hand-written"
    for loop in ("this project", "accelerate's examples", "transformers' Trainer"):
        assert float(found[loop][1]) < 1e-3
    for loop in ("Lightning Fabric", "Lightning's Trainer"):
        if find_spec("lightning"):
            assert float(found[loop][1]) < 1e-3
        else:
            assert found[loop][0] == "not installed"


@pytest.mark.slow
def test_a_real_model_with_accumulation_ends_with_the_same_weights():
    _, ours = rows(BENCHMARKS / "loop.py", "--cases", "images_not_augmented", "--rounds", "2")
    assert float(ours[-1]) < 1e-3


@pytest.mark.slow
def test_the_cases_of_a_gpu_run_with_a_tiny_model():
    cases = ["gpt_124m", "gpt_124m_compiled", "gpt_124m_regional"]
    found = rows("-c", TINY, BENCHMARKS, "--cases", *cases, "--rounds", "2")
    assert len(found) == 2 * len(cases)
    for case, *_, difference in found[1::2]:
        assert "bf16" in case
        assert float(difference) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "records.py",
        "saving.py --parameters 1 --saves 2",
        "restart.py --kills 1",
        "start.py --rounds 1 --processes 1 --cases 'train, ours' 'plain script, torchrun'",
        "growth.py --processes 2",
    ],
)
def test_the_smallest_case_of_a_benchmark_runs(command):
    name, *arguments = shlex.split(command)
    assert succeed(sys.executable, BENCHMARKS / name, *arguments)
