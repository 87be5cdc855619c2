"""Five of the mistakes in silence.py, and five of the correct runs; make faults tries all."""

import json
import os
import subprocess
import sys

import faults
import pytest
import silence
from shell import succeed

FIVE = (
    "files listed in a different order on each rank",
    "`nn.Embedding(max_norm=...)`",
    "`loss` returns the mean and the number of items",
    "`mse_loss` of (N, 1) and (N,)",
    "a metric in torchmetrics' `ClasswiseWrapper`",
)
SOUND = [faults.SOUND.index(name) for name in (*faults.OWN[:4], "gan")]
TEXT = (faults.ROOT / "docs/silence.md").read_text(encoding="utf-8")
RUN_SOUND = """
import json, pathlib, sys, tempfile, faults
faults.import_all(*faults.SOUND_MODULES)
for number in map(int, sys.argv[1:]):
    with tempfile.TemporaryDirectory() as folder:
        print("said", json.dumps(faults.sound_run(number, pathlib.Path(folder))), flush=True)
"""


def test_the_document_has_the_table_of_every_case():
    assert len(silence.CASES) >= 40
    for is_silent in (False, True):
        cases = [case for case in silence.CASES if (case.sees == "silent") == is_silent]
        assert silence.table(cases) in TEXT


@pytest.mark.slow
def test_five_mistakes_are_seen_as_the_table_says():
    names = [case.name for case in silence.CASES if case.name in FIVE]
    assert len(names) == len(FIVE)
    command = [sys.executable, faults.ROOT / "tests/silence.py", *FIVE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_is_said_of_five_sound_runs():
    # in a process without threads, since it forks
    command = [sys.executable, "-c", RUN_SOUND, *map(str, SOUND)]
    printed = succeed(*command, env=os.environ | faults.environment()).splitlines()
    answers = [json.loads(line[5:]) for line in printed if line.startswith("said ")]
    assert len(answers) == len(SOUND)
    for name, said in zip(SOUND, answers, strict=True):
        assert all(map(faults.is_sound, said)), (faults.SOUND[name], said)
