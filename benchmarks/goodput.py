"""Measure the goodput of a run whose workers are killed, and what the planner predicts; Linux.

    python benchmarks/goodput.py                          a kill every 5 minutes, for 25 minutes
    python benchmarks/goodput.py --every 60 --minutes 10

Two CPU processes train the recipe of the tests, whose steps sleep 0.2 s. In every interval of
`--every` seconds one worker is killed (SIGKILL), at an instant drawn with a fixed seed, and the
launcher starts both again. Before this run, a warm-up measures how long a start, a save and a
restart take. From these times, the planner's formulas give the interval between saves and the
goodput of a run after its first start; the time of that start is then subtracted. The measured
goodput is the share of the launcher's time that status.json reports as kept: the first start, saves
and repeated steps are lost. The final weights must equal those of a run that was never killed, bit
for bit. Ctrl-C ends all processes.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from launches import ROOT, Run

sys.path.insert(0, str(ROOT / "template/src"))
from my_project.run_files import each_start
from my_project.tools.planner import best_interval_seconds, predicted_goodput

CONFIG = """\
recipe: {{class_path: ragged.Ragged, init_args: {{validation_samples: 0, seconds: {sleep}}}}}
batches: {{global_batch_size: 2, micro_batch_size: 1, workers: 0}}
optim: {{lr: 0.01}}
steps: {steps}
checkpoints: {{every_minutes: {minutes}}}
telemetry: {{trackers: []}}
"""
SLEEP_SECONDS = 0.2
WARM_UP_KILLS = 4
WARM_UP_SECONDS = 6.0  # before each of these kills
WARM_UP_INTERVAL_SECONDS = 1.0  # between saves


def warm_up(folder: Path, draw: random.Random) -> tuple[float, float, float, float]:
    """Return the seconds of the first start, and the mean seconds of a save, a restart and a step.

    The start and each restart end with their first step.

    Args:
        folder: the folder for the run.
        draw: draws the rank to kill.
    """
    config = CONFIG.format(
        sleep=SLEEP_SECONDS, steps=100_000, minutes=WARM_UP_INTERVAL_SECONDS / 60
    )
    restarts = []
    with Run(folder, "warm_up", config) as run:
        run.start()
        start = run.wait_for_first_step()
        for _ in range(WARM_UP_KILLS):
            time.sleep(WARM_UP_SECONDS)
            run.kill(draw.choice(run.workers))
            restarts.append(run.wait_for_first_step())
        time.sleep(WARM_UP_SECONDS)
        text = (run.folder / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    saves = [record["seconds"] for record in records if record["kind"] == "checkpoint"]
    steps = [record["step_seconds"] for record in records if record["kind"] == "interval"]
    return start, statistics.mean(saves), statistics.mean(restarts), statistics.mean(steps)


def kill_until_the_end(run: Run, every: float, draw: random.Random) -> int:
    """Kill a rank at a random instant of each interval; return the number of kills."""
    run.start()
    run.wait_for_first_step()
    first, kills = time.time(), 0
    while True:
        instant = first + every * (kills + draw.random())
        rank = draw.randrange(2)
        while time.time() < instant or len(workers := run.workers) < 2:
            time.sleep(0.05)
            if not run.is_running:
                return kills
        run.kill(workers[rank])
        kills += 1


def main() -> None:
    """Predict, train while workers are killed, and print the table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=float, default=300.0, help="seconds")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start, save, restart, step = warm_up(folder, draw)
        interval = best_interval_seconds(save, options.every)
        started = predicted_goodput(interval, save, restart, options.every)
        predicted = started * (1 - start / (60 * options.minutes))
        print(
            f"warm-up: the start takes {start:.2f} s, a restart {restart:.2f} s, a save {save:.4f}"
            f" s, a step {step:.4f} s\nplanner: a save every {interval:.2f} s, a goodput of"
            f" {started:.2%} after the first start, {predicted:.2%} including it",
            flush=True,
        )
        steps = round(60 * options.minutes * predicted / step)
        config = {"steps": steps, "minutes": interval / 60}
        with Run(folder, "killed", CONFIG.format(sleep=SLEEP_SECONDS, **config)) as run:
            kills = kill_until_the_end(run, options.every, draw)
            if run.status.get("outcome") != "finished":
                raise SystemExit(f"the launcher gave up after {kills} kills:\n{run.output()}")
            weights, shares = run.weights(), run.status["goodput"]["launcher"]
            starts = each_start(run.folder)
        with Run(folder, "never_killed", CONFIG.format(sleep=0.0, **config)) as run:
            is_same = run.weights() == weights
    seconds, measured = shares.pop("seconds"), shares["kept"]
    points = 100 * (measured - predicted)
    begin, end = starts[0]
    first = ((end and end.first_step_time) or 0) - begin.time
    print(f"{steps} steps, {seconds:.0f} s: {steps * step / seconds:.2%} at the warm-up's speed")
    print(f"first start {first:.1f} s: {measured * seconds / (seconds - first):.2%} without it")
    print(", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
    print("| a kill every | kills | restarts | goodput | predicted | points | weights |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {options.every:.0f} s | {kills} | {len(starts) - 1} | {measured:.2%} | {predicted:.2%}"
        f" | {points:+.2f} | {'the same bits' if is_same else 'DIFFERENT'} |"
    )
    if not is_same:
        raise SystemExit("the weights differ from those of a run that was never killed")


if __name__ == "__main__":
    main()
