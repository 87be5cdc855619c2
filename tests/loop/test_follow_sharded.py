"""`evaluate --follow` of a sharded run: on sharded processes, and on one."""

import json
from pathlib import Path

import pytest
from my_project.config import Config
from ragged import Deep
from runs import make_config, records
from test_follow import follow_folder
from test_fsdp_on_cpu import ask_for_fsdp, train_sharded
from world import run_world


def follow_sharded(folder: Path) -> int:
    ask_for_fsdp()
    return follow_folder(folder)


@pytest.mark.slow
def test_a_sharded_run_is_followed_sharded_or_whole(tmp_path):
    settings = {"checkpoints__every_steps": 2, "checkpoints__keep": 9, "optim__ema_decay": 0.5}
    config: Config = make_config(
        tmp_path, Deep(dtype="float64"), steps=6, evaluation__every_steps=2, **settings
    )
    assert run_world(2, train_sharded, config) == [0, 0]
    name = "validation/accuracy"
    wanted = [record[name] for record in records(config, name)]
    path = config.folder / "evaluations.jsonl"
    for processes, function in ((2, follow_sharded), (1, follow_folder)):
        assert run_world(processes, function, config.folder) == [0] * processes
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line[name] for line in lines] == pytest.approx(wanted, rel=1e-6)
        path.unlink()
