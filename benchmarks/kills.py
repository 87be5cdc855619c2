"""Kill a run at random instants, start it again, and compare its weights bit by bit; Linux.

    python benchmarks/kills.py              200 kills
    python benchmarks/kills.py --kills 16
    python benchmarks/kills.py --kills 100 --where cpu_fsdp2
    python benchmarks/kills.py --kills 100 --where cpu cpu_2_processes cpu_fsdp2 cpu_hsdp

Two CPU processes, or those of the accelerate configs that are named, train the recipe of the tests
with a checkpoint at every second step. Of 8 kills in a run, 2 are meant for its start (imports
included), 4 for any instant of the first seconds after the first step, 1 follows the beginning of a
save and 1 a restart in place, with less than 0.5 s between. The victim is a rank or, one time in
three and before another start, the launcher, which alone is there in most of a start. Order,
instants and victims are drawn with a fixed seed. A run that has ended is started again by the same
command, of several accelerate configs with one that is drawn. Its weights, in float64, must be
those of a run that nobody killed: to the bit, or of several configs within 1e-6. Printed is where
each kill fell. Ctrl-C ends all that was started, and prints the table of the runs until then.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from launches import CONFIGS, Run
from safetensors.torch import load

# Each part of a run's kills: an instant, and the victim where it must be one.
PARTS = (
    (("stepping", "launcher"), ("starting", "")),
    (("stepping", "rank"), ("restarting", "")),
    (("stepping", ""),),
    (("stepping", ""),),
    (("saving", ""),),
)
STEPPING_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 0.5  # after the beginning of a save or a restart
CONFIG = """\
recipe: {class_path: ragged.Ragged, init_args: {dropout: 0.2, seconds: 0.02, dtype: float64}}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
optim: {lr: 0.01, ema_decay: 0.9}
steps: 200
checkpoints: {every_steps: 2}
telemetry: {every_steps: 1, trackers: []}
"""


def is_saving(run: Run) -> bool:
    """Return whether the newest start is writing a checkpoint."""
    with suppress(FileNotFoundError):
        partial = run.folder.glob("checkpoints/.step_*.partial")
        return any(path.stat().st_mtime > run.begun for path in partial)
    return False


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or the launcher has ended."""
    while run.is_running and not condition():
        time.sleep(0.005)


def wait_for(moment: str, run: Run, start_seconds: float, draw: random.Random) -> None:
    """Wait for an instant in a moment of a run, or for its end.

    Args:
        moment: starting, stepping, saving or restarting.
        run: the run.
        start_seconds: what the last complete start has taken.
        draw: draws the instant.
    """
    if moment == "starting":
        seconds = draw.uniform(0, start_seconds)
    elif moment == "restarting":
        wait(run, lambda: len(set(run.workers) - set(run.before)) >= len(run.before))
        seconds = draw.uniform(0, LONGEST_WAIT_SECONDS)
    else:
        wait(run, lambda: run.has_stepped)
        seconds = draw.uniform(0, STEPPING_SECONDS)
        if moment == "saving":
            wait(run, lambda: is_saving(run))
            seconds = LONGEST_WAIT_SECONDS * draw.random() ** 4  # most saves are short
    time.sleep(seconds)


def kill(run: Run, victim: str, draw: random.Random) -> str:
    """Kill a process of a launch; return in which moment and which, or "" if there was none."""
    launcher, ranks = run.launcher, run.workers
    if launcher is None or not run.is_running:
        return ""
    moment = "saving" if is_saving(run) else "stepping"
    if run.status.get("outcome") == "finished":
        moment = "ending"
    elif not run.has_stepped:
        moment = "restarting" if run.before else "starting"
    victim = victim or draw.choice(("launcher", "rank", "rank"))
    with suppress(psutil.NoSuchProcess):
        if victim == "rank" and ranks:
            run.kill(draw.choice(ranks))
            return f"{moment}, rank"
        family = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        if left := psutil.wait_procs(family, 60)[1]:
            raise RuntimeError(f"outlived their launcher by 60 s: {left}")
        return f"{moment}, launcher{'' if ranks else ' without processes'}"
    return ""


def kill_again_and_again(
    run: Run, kills: int, start_seconds: float, draw: random.Random, configs: list[str]
) -> tuple[Counter[str], float]:
    """Kill a run at most so many times; return where the kills fell, and what a start took last.

    Args:
        run: not started yet.
        kills: how many.
        start_seconds: what a start takes.
        draw: draws order, instants, victims and accelerate configs.
        configs: the names of accelerate configs.
    """
    found: Counter[str] = Counter()
    plan = [("starting", ""), *sum(draw.sample(PARTS, len(PARTS)), ())]
    for moment, victim in plan[:kills]:
        if not run.is_running and len(configs) > 1:
            run.where = CONFIGS / f"{draw.choice(configs)}.yaml"
        run.start()
        wait_for(moment, run, start_seconds, draw)
        if run.has_stepped and not run.before:  # other load changes it
            start_seconds = run.wait_for_first_step()
        if not (where := kill(run, victim, draw)):
            break  # the run has ended
        found[where] += 1
    return found, start_seconds


def are_equal(ours: bytes, theirs: bytes, tolerance: float) -> bool:
    """Return whether two files of weights are equal, within a tolerance."""
    one, other = load(ours), load(theirs)
    differences = [(one[name] - other[name]).abs().max() for name in one.keys() & other.keys()]
    return one.keys() == other.keys() and all(found <= tolerance for found in differences)


def main() -> None:
    """Kill, and print what was killed and when."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", nargs="+", default=["cpu_2_processes"], metavar="CONFIG")
    options = parser.parse_args()
    draw, killed, runs = random.Random(options.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        folder = Path(name)
        with Run(folder, "nobody_kills", CONFIG) as run:
            run.where = CONFIGS / f"{options.where[0]}.yaml"
            run.start()
            start_seconds = run.wait_for_first_step()
            wanted = run.weights()
        while killed.total() < options.kills:
            with Run(folder, f"run_{runs}", CONFIG) as run:
                run.where = CONFIGS / f"{options.where[0]}.yaml"
                here, start_seconds = kill_again_and_again(
                    run, options.kills - killed.total(), start_seconds, draw, options.where
                )
                if not are_equal(run.weights(), wanted, 1e-6 if len(options.where) > 1 else 0.0):
                    kept = shutil.copytree(folder, tempfile.mkdtemp(), dirs_exist_ok=True)
                    raise SystemExit(f"{run.name} has other weights: {kept}, seed {options.seed}")
            killed, runs = killed + here, runs + 1
            print(f"{killed.total()} kills, {runs} runs, the same weights", flush=True)
    for where, number in sorted(killed.items()):
        print(f"{number:4d} {where}")


if __name__ == "__main__":
    main()
