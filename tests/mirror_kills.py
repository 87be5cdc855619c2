"""Kill mirrored runs at random instants, delete their disk each time, and start them again.

    python tests/mirror_kills.py              60 kills
    python tests/mirror_kills.py --kills 8

All processes of a run are killed together, as if the machine were gone, and its runs folder is
deleted. The run continues from its mirror, a bucket of a server that speaks S3 (s3_server.py).
Instants and numbers of processes are drawn with a fixed seed. At the end the weights, the best
weights and the records of steps must equal those of a run that was never killed: bit for bit, or
within 1e-9 if the number of processes has changed.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [
    str(TESTS.parent / folder)
    for folder in ("template/src", "template/tests", "tests", "tests/loop")
]

from ragged import Deep
from runs import assert_same_weights, change, make_config, records, train
from s3_server import s3_server
from test_fsdp_on_cpu import train_sharded
from world import World, run_world

STEPS, SEED = 12, 52
SECONDS = 240 * float(os.environ.get("TEST_PATIENCE", "1"))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The numbers of processes on which the starts of a run take place, in turn."""

    name: str
    processes: tuple[int, ...]
    is_sharded: bool = False


KINDS = (
    Kind(name="one process", processes=(1,)),
    Kind(name="DDP on two", processes=(2,)),
    Kind(name="FSDP2 on two", processes=(2,), is_sharded=True),
    Kind(name="two, one, two with FSDP2", processes=(2, 1, 2), is_sharded=True),
)


def start(environment: dict[str, str], is_sharded: bool, config: Any) -> int:
    os.environ |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"} | environment
    return train_sharded(config) if is_sharded else train(config)


def run_config(folder: Path, **settings: Any) -> Any:
    """Return the config of a run that takes about four seconds and saves at every second step."""
    return make_config(
        folder / "runs",
        Deep(dtype="float64", seconds=0.05),
        **{
            "steps": STEPS,
            "checkpoints__every_steps": 2,
            "evaluation__every_steps": 4,
            "evaluation__best_metric": "validation/accuracy",
            "optim__ema_decay": 0.7,
            "run_name": "run",
        }
        | settings,
    )


def kill_once(world: World, config: Any, step: int, seconds: float) -> bool:
    """Kill all processes some time after a step; return whether that was before their end."""
    deadline, path = time.monotonic() + SECONDS, config.folder / "metrics.jsonl"
    while time.monotonic() < deadline and any(worker.is_alive() for worker in world.workers):
        lines = path.read_bytes().splitlines() if path.exists() else []
        complete = [line for line in lines if line.endswith(b"}")]
        if complete and json.loads(complete[-1])["step"] >= step:
            time.sleep(seconds)
            break
        time.sleep(0.01)
    else:
        assert time.monotonic() < deadline, f"{config.folder} hangs"
    was_alive = all(worker.is_alive() for worker in world.workers)
    world.close()
    return was_alive


def run_of(kind: Kind, kills: int, draw: random.Random, url: str, environment: dict) -> str:
    """Kill a run `kills` times; return a short summary.

    Raises:
        AssertionError: the run did not end with the same weights.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = run_config(folder, checkpoints__mirror=url)
        whole = replace(run_config(folder / "whole", checkpoints__mirror=None), run_name="whole")
        count = kind.processes[0]
        assert run_world(count, start, {}, kind.is_sharded, whole) == [0] * count
        resumed, done = [], 0
        for number in range(200):
            count = kind.processes[number % len(kind.processes)]
            arguments = (environment, kind.is_sharded and count > 1, config)
            if done == kills:
                assert run_world(count, start, *arguments) == [0] * count
                break
            world = World(count, start, *arguments)
            is_killed = kill_once(world, config, draw.randrange(STEPS + 1), draw.random() * 0.4)
            done += is_killed
            known = config.folder / "status.json"
            status = json.loads(known.read_text()) if known.exists() else {}
            resumed.append(status.get("from_step"))
            shutil.rmtree(config.runs_folder, ignore_errors=True)
            if not is_killed:  # it had finished, so the next start begins a new run
                config = change(config, checkpoints__mirror=f"{url}/{number}")
        for part in ("export", "best"):
            same = len(kind.processes) == 1
            assert_same_weights(config, whole, 0.0 if same else 1e-9, part)
        steps = [record["step"] for record in records(config)]
        assert steps == [*range(1, STEPS + 1)], steps
        return f"{kind.name}: {done} kills, went on from {resumed}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(words)
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name)) as server:
        for i, kind in enumerate(KINDS):
            kills = given.kills // len(KINDS)
            url = f"{server.url}/{i}"
            print(run_of(kind, kills, draw, url, server.environment), flush=True)


if __name__ == "__main__":
    main()
