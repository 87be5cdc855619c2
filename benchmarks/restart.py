"""Time a restart in place: from SIGKILL of a rank to the end of the first step not done before.

    python benchmarks/restart.py             5 kills per launcher, about 4 minutes on 2 cores; Linux
    python benchmarks/restart.py --kills 3 --config configs/causal_lm.yaml

Two CPU processes train a recipe of the project, with a checkpoint at every tenth step; the rank
that is killed is drawn with a fixed seed. By the project's own launcher, which forks the processes,
and by accelerate launch with torchrun's restarts, which starts Python again. The steps since the
last checkpoint are done again, so they are part of the time. Also the CPU time of a worker from its
start to its first record, after a restart.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
WHERE = str(ROOT / "accelerate_configs/cpu_2_processes.yaml")
SETTINGS = (
    "--steps 100000 --telemetry.every_steps 1 --checkpoints.every_steps 10 --telemetry.trackers []"
    " --evaluation.every_steps null --evaluation.sanity_check false --run_name restarting"
)
TORCHRUN = "--rdzv_backend c10d --max_restarts 100 --monitor_interval 0.1"


def newest_step(folder: Path) -> int:
    """Return the step of the newest record of an interval; 0 without one."""
    path = folder / "runs/restarting/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = (json.loads(line) for line in reversed(lines) if line.endswith("}"))
    return next((one["step"] for one in found if one.get("kind") == "interval"), 0)


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen) -> None:
    """Wait until a step has been recorded."""
    deadline = time.monotonic() + 300
    while newest_step(folder) < step:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "output").read_text()[-3000:])
        time.sleep(0.01)


def workers(launcher: int) -> list[psutil.Process]:
    """Return the training processes: the children of the launcher, the oldest first."""
    found = psutil.Process(launcher).children()
    return sorted(found, key=lambda process: process.create_time())


def restarts(command: list[str], kills: int, source: Path) -> dict[str, list[float]]:
    """Kill a rank again and again; return seconds to the next new step, and CPU seconds."""
    draw, found = random.Random(0), {"seconds": [], "CPU s of a worker": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "PYTHONPATH": str(source), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }  # fmt: skip
        with (folder / "output").open("w") as output:
            launcher = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            for _ in range(kills):
                wait_for_step(folder, newest_step(folder) + draw.randrange(12, 30), launcher)
                victim = draw.choice(workers(launcher.pid))
                killed = time.monotonic()
                victim.send_signal(signal.SIGKILL)
                time.sleep(0.1)  # the others may end the step that they are in
                before = newest_step(folder)
                wait_for_step(folder, before + 1, launcher)
                found["seconds"].append(time.monotonic() - killed)
                times = workers(launcher.pid)[0].cpu_times()
                found["CPU s of a worker"].append(times.user + times.system)
        finally:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
            launcher.kill()
            launcher.wait()
    return found


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--config", default="template/configs/image_classification.yaml")
    parser.add_argument("--source", type=Path, default=ROOT / "template/src", help="another copy")
    options = parser.parse_args()
    config = ["--config", str(Path(options.config).resolve()), *SETTINGS.split()]
    python, train = [sys.executable, "-m"], ["-m", "my_project.train", *config]
    ours = [*python, "my_project.launch", "--config_file", WHERE, *train]
    theirs = [*python, "accelerate.commands.launch", "--config_file", WHERE, *TORCHRUN.split()]
    print(f"| {options.kills} kills | seconds | least | most | CPU s of a worker |")
    print("|---|---|---|---|---|")
    for name, command in {"ours": ours, "accelerate launch": [*theirs, *train]}.items():
        found = restarts(command, options.kills, options.source)
        seconds = found["seconds"]
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        shown = [f"{number:.2f}" for number in numbers]
        shown.append(f"{statistics.median(found['CPU s of a worker']):.2f}")
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
