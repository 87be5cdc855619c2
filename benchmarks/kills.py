"""Kill a run at random instants, start it again, and compare its weights bit by bit; Linux.

    python benchmarks/kills.py              200 kills
    python benchmarks/kills.py --kills 16
    python benchmarks/kills.py --kills 100 --where cpu_fsdp2
    python benchmarks/kills.py --kills 100 --where cpu cpu_2_processes cpu_fsdp2 cpu_hsdp
    python benchmarks/kills.py --kills 100 --processes 2 1 4 3 2

Two CPU processes, or those of the named accelerate configs, train the recipe of the tests with a
checkpoint at every second step. Of 8 kills in a run, 2 are meant for a start (including imports), 4
for any instant of the first seconds after the first step, 1 for the first 0.5 s of a save and 1 for
the first 0.5 s after a restart in place. The victim is the launcher if the next kill is meant for a
start, a rank if the next kill is meant for a restart in place, and otherwise a rank two times in
three. During most of a start, only the launcher exists. Order, instants and victims are drawn with
a fixed seed. The same command starts the run again; if several accelerate configs are named, each
start draws one of them. The float64 weights must equal those of a run that was never killed: bit
for bit, or within 1e-6 with several configs.

With --processes there is a single run. Its starts use these numbers of processes in turn, and each
start draws a micro-batch size. Each step that was kept must have read the same samples as in a run
that was never killed, and no sample may be read twice in an epoch. The output shows in which phase
each kill fell. Ctrl-C ends all processes, and prints the table of the runs so far.
"""

import argparse
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, repeat
from pathlib import Path

import psutil
from launches import CONFIGS, Run
from safetensors.torch import load

# The kills of a run, in parts whose order is drawn: a moment, and a victim ("" for any victim).
PARTS = (
    (("stepping", "launcher"), ("starting", "")),
    (("stepping", "rank"), ("restarting", "")),
    (("stepping", ""),),
    (("stepping", ""),),
    (("saving", ""),),
)
STEPPING_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 0.5  # maximum, after the beginning of a save or a restart
CONFIG = """\
recipe: {class_path: ragged.Ragged, init_args: {dropout: 0.2, seconds: 0.02, dtype: float64}}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
optim: {lr: 0.01, ema_decay: 0.9}
steps: 200
checkpoints: {every_steps: 2}
telemetry: {every_steps: 1, trackers: []}
"""

RECORDED = """\
recipe:
  class_path: recorded.Recorded
  init_args: {{samples: 4000, noise: 0.1, dtype: float64, file: {file}}}
batches: {{global_batch_size: 12, micro_batch_size: {micro}, workers: 0}}
optim: {{lr: 0.01, ema_decay: 0.9}}
epochs: {epochs}
checkpoints: {{every_steps: 5}}
telemetry: {{every_steps: 1, trackers: []}}
"""
STEPS_IN_EPOCH, GLOBAL_BATCH = 333, 12
Layouts = Iterator[tuple[Path, str]]  # accelerate config, and config of the run


class Changing(Run):
    """A run in which each start uses the next layout; a restart in place keeps the layout."""

    def __init__(self, parent: Path, name: str, layouts: Layouts) -> None:
        super().__init__(parent, name, "")
        self.layouts = layouts

    def start(self) -> subprocess.Popen:
        """Start a launcher with the next layout, unless one is running."""
        if not self.is_running:
            self.where, self.config = next(self.layouts)
        return super().start()


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
        start_seconds: how long the last complete start took.
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
    """Kill a process of a launch; return the moment and the victim, or "" if nothing runs."""
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
        if survivors := psutil.wait_procs(family, 60)[1]:
            raise RuntimeError(f"these processes outlived their launcher by 60 s: {survivors}")
        return f"{moment}, launcher{'' if ranks else ' without processes'}"
    return ""


def draw_kills(draw: random.Random) -> list[tuple[str, str]]:
    """Return the moments and victims of eight kills."""
    return [("starting", ""), *sum(draw.sample(PARTS, len(PARTS)), ())]


def kill_again_and_again(
    run: Run, plan: list[tuple[str, str]], start_seconds: float, draw: random.Random
) -> tuple[Counter[str], float]:
    """Kill a run until it ends; return kills by phase and victim, and the last start's seconds.

    Args:
        run: the run, not started yet.
        plan: moments and victims.
        start_seconds: how long a start takes.
        draw: draws instants and victims.
    """
    kills: Counter[str] = Counter()
    for moment, victim in plan:
        run.start()
        wait_for(moment, run, start_seconds, draw)
        # measured again in each start, since other load on the machine varies
        if run.has_stepped and not run.before:
            start_seconds = run.wait_for_first_step()
        if not (where := kill(run, victim, draw)):
            break  # the run has ended
        kills[where] += 1
    return kills, start_seconds


def are_equal(a: bytes, b: bytes, tolerance: float) -> bool:
    """Return whether two files of weights are equal, within a tolerance."""
    first, second = load(a), load(b)
    names = first.keys() & second.keys()
    is_close = all((first[name] - second[name]).abs().max() <= tolerance for name in names)
    return first.keys() == second.keys() and is_close


# ---- one run across layouts ----------------------------------------------------------------------
def each_layout(folder: Path, numbers: list[int], epochs: int, draw: random.Random) -> Layouts:
    """Yield layouts of a run that records its samples: these numbers of processes, in turn."""
    for number in cycle(numbers):
        where = folder / f"cpu_{number}.yaml"
        text = (CONFIGS / f"cpu{'_2_processes' * (number > 1)}.yaml").read_text()
        text = text.replace("num_processes: 2", f"num_processes: {number}")
        where.write_text(text.replace('"-1,-1"', f'"{",".join(["-1"] * number)}"'))
        sizes = [size for size in range(1, 13) if GLOBAL_BATCH % (size * number) == 0]
        file = folder / "samples.jsonl"
        yield where, RECORDED.format(file=file, epochs=epochs, micro=draw.choice(sizes))


def samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples that each step has seen, in the last start that took the step."""
    by_step: dict[int, dict[str, list[int]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        start, step, indices = json.loads(line)
        by_step.setdefault(step, {}).setdefault(start, []).extend(indices)
    return {step: sorted(list(by_start.values())[-1]) for step, by_start in by_step.items()}


def kill_across_layouts(folder: Path, numbers: list[int], kills: int, draw: random.Random) -> None:
    """Kill one run `kills` times, while its number of processes changes.

    Raises:
        SystemExit: its samples or weights differ from those of a run that was never killed.
    """
    runs, counts, start_seconds = [], Counter(), 0.0
    epochs = 1 + kills // 25
    for name in ("never_killed", "killed"):
        (own := folder / name).mkdir()
        with Changing(own, name, each_layout(own, numbers, epochs, draw)) as run:
            if name == "killed":
                plan = [planned for _ in range(kills) for planned in draw_kills(draw)][:kills]
                counts, _ = kill_again_and_again(run, plan, start_seconds, draw)
            else:
                run.start()
                start_seconds = run.wait_for_first_step()
            runs.append((run.weights(), samples(own)))
    (expected_weights, expected_samples), (weights, seen) = runs
    by_epoch = [
        [index for step in range(first, first + STEPS_IN_EPOCH) for index in seen[step]]
        for first in range(0, epochs * STEPS_IN_EPOCH, STEPS_IN_EPOCH)
    ]
    is_right = seen == expected_samples
    is_right &= all(len({*indices}) == len(indices) == 3996 for indices in by_epoch)
    if not is_right or not are_equal(weights, expected_weights, 1e-6) or counts.total() < kills:
        kept = shutil.copytree(folder, tempfile.mkdtemp(), dirs_exist_ok=True)
        raise SystemExit(f"samples, weights or the number of kills are wrong, {counts}: {kept}")
    print(f"{counts.total()} kills, {len(seen)} steps, the same samples and weights")
    show(counts)


def kill_runs(folder: Path, configs: list[str], kills: int, draw: random.Random) -> None:
    """Kill one run after another, until there have been `kills` kills.

    Raises:
        SystemExit: the weights of a run differ from those of a run that was never killed.
    """
    counts, runs = Counter(), 0
    first = (CONFIGS / f"{configs[0]}.yaml", CONFIG)
    with Changing(folder, "never_killed", repeat(first)) as run:
        run.start()
        start_seconds = run.wait_for_first_step()
        expected = run.weights()
    drawn = iter(lambda: (CONFIGS / f"{draw.choice(configs)}.yaml", CONFIG), None)
    with suppress(KeyboardInterrupt):
        while counts.total() < kills:
            with Changing(folder, f"run_{runs}", drawn) as run:
                plan = draw_kills(draw)[: kills - counts.total()]
                new, start_seconds = kill_again_and_again(run, plan, start_seconds, draw)
                if not are_equal(run.weights(), expected, 1e-6 if len(configs) > 1 else 0.0):
                    kept = shutil.copytree(folder, tempfile.mkdtemp(), dirs_exist_ok=True)
                    raise SystemExit(f"the weights of {run.name} differ: {kept}")
            counts, runs = counts + new, runs + 1
            print(f"{counts.total()} kills, {runs} runs, the same weights", flush=True)
    show(counts)


def show(counts: Counter[str]) -> None:
    """Print the number of kills by phase and victim."""
    for where, count in sorted(counts.items()):
        print(f"{count:4d} {where}")


def main() -> None:
    """Kill runs, and print the number of kills by phase and victim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", nargs="+", default=["cpu_2_processes"], metavar="CONFIG")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[], help="of the starts, in turn"
    )
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        if options.processes:
            kill_across_layouts(Path(name), options.processes, options.kills, draw)
        else:
            kill_runs(Path(name), options.where, options.kills, draw)


if __name__ == "__main__":
    main()
