"""Kill a run at random instants, start it again, and compare its weights bit by bit; Linux.

    python benchmarks/kills.py              200 kills, about 30 minutes on 2 cores
    python benchmarks/kills.py --kills 20

Two CPU processes train the recipe of the tests with a checkpoint at every second step. The victim
is a rank or, one time in three, the launcher; the instant (importing, starting, stepping, saving,
restarting) and the victim are drawn with a fixed seed. A run that has ended is started again by the
same command. After five kills a run may end; its weights must be those of a run that nobody killed.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from restart import WHERE, workers

ROOT = Path(__file__).resolve().parent.parent
KILLS_PER_RUN = 5
LONGEST_WAIT_SECONDS = 7.0
CONFIG = """\
recipe: {class_path: ragged.Ragged, init_args: {dropout: 0.2, seconds: 0.02}}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
optim: {lr: 0.01, ema_decay: 0.9}
steps: 60
checkpoints: {every_steps: 2}
telemetry: {every_steps: 1, trackers: []}
"""


class Launches:
    """The launches of one run in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        paths = (ROOT / "template/src", ROOT / "template/tests")
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        self.folder, self.name = folder, name
        self.process: subprocess.Popen | None = None

    def start(self) -> subprocess.Popen:
        """Start the launcher, or leave the one that runs."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "my_project.launch", "--config_file", WHERE]
            command += ["-m", "my_project.train", "--config", "tiny.yaml", "--run_name", self.name]
            with (self.folder / f"{self.name}.txt").open("a") as output:
                self.process = subprocess.Popen(
                    command, cwd=self.folder, env=self.environment, stdout=output, stderr=output
                )
        return self.process

    @property
    def status(self) -> dict:
        """Return the content of status.json; {} without one."""
        path = self.folder / "runs" / self.name / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def weights(self) -> bytes:
        """Start until the run has finished; return the exported file."""
        for _ in range(10):
            if self.status.get("outcome") == "finished":
                break
            self.start().wait(300)
        else:
            raise RuntimeError((self.folder / f"{self.name}.txt").read_text()[-3000:])
        return (self.folder / "runs" / self.name / "export/model.safetensors").read_bytes()


def kill(launcher: subprocess.Popen, draw: random.Random) -> str:
    """Kill a process of a launch; return what it was, or "" if there was none."""
    with suppress(psutil.NoSuchProcess):
        ranks = workers(launcher.pid)
        if draw.random() < 1 / 3 or not ranks:
            family = psutil.Process(launcher.pid).children(recursive=True)
            launcher.kill()
            launcher.wait()
            left = psutil.wait_procs(family, 60)[1]
            if left:
                raise RuntimeError(f"outlived their launcher by 60 s: {left}")
            return "launcher" if ranks else "launcher before it had processes"
        victim = draw.choice(ranks)
        victim.kill()
        return "rank"
    return ""


def main() -> None:
    """Kill, and print what was killed and when."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, killed, runs = random.Random(options.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.yaml").write_text(CONFIG)
        wanted = Launches(folder, "nobody_kills").weights()
        while killed.total() < options.kills:
            runs += 1
            run = Launches(folder, f"run_{runs}")
            for _ in range(min(KILLS_PER_RUN, options.kills - killed.total())):
                launcher = run.start()
                time.sleep(draw.uniform(0, LONGEST_WAIT_SECONDS))
                saved = any((folder / "runs" / run.name).glob("checkpoints/step_*"))
                if what := kill(launcher, draw) if launcher.poll() is None else "":
                    killed[f"{what}, {'after' if saved else 'before'} the first checkpoint"] += 1
                if run.status.get("outcome") == "finished":
                    break
            if run.weights() != wanted:
                raise SystemExit(f"run {runs} has other weights (seed {options.seed})")
            print(f"{killed.total()} kills, {runs} runs, the same bits", flush=True)
    for what, number in killed.most_common():
        print(f"{number:4d} {what}")


if __name__ == "__main__":
    main()
