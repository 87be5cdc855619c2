"""Four of the faults, six kills across layouts, seven of launches; make faults runs all."""

import random
import sys

import faults
import pytest
from hosts import NEEDS_HOSTS
from shell import succeed

FOUR = sorted(random.Random(faults.SEED).sample(range(len(faults.FAULTS)), 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=NEEDS_HOSTS * faults.FAULTS[n].needs_root) for n in FOUR]
)
def test_doctor_names_the_rank_and_the_cause_of_a_fault(number, tmp_path):
    result = faults.run(faults.FAULTS[number], tmp_path)
    assert result["is_right"], result["answer"]
    assert result["exits_right"], result["exit_codes"]


@pytest.mark.slow
def test_a_run_killed_six_times_across_layouts_sees_the_same_samples():
    kills = [faults.ROOT / "benchmarks/kills.py", "--kills", "6", "--processes", *"21432"]
    assert succeed(sys.executable, *kills).startswith(
        "6 kills, 333 steps, the same samples and weights"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launch_of_which_one_or_two_processes_are_killed_goes_on():
    said = succeed(sys.executable, faults.__file__, "--kills-of-launch", "7", "--seed", "1")
    assert len(said.splitlines()) == 7
