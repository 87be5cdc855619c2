"""Time a restart in place: from SIGKILL of a rank to the end of the first new step.

    python benchmarks/restart.py             5 kills per launcher, about 4 minutes on 2 cores; Linux
    python benchmarks/restart.py --kills 3 --config configs/causal_lm.yaml
    python benchmarks/restart.py --hosts 2   as root: two hosts, in network namespaces
    python benchmarks/restart.py --base ../other_clone/template/src   also the launcher of a copy
    python benchmarks/restart.py --where accelerate_configs/gpu.yaml   one process on a GPU

Two CPU processes train a recipe of the project, with a checkpoint at every tenth step; the rank
that is killed is drawn with a fixed seed. They are started by the project's launcher, which forks
the processes, and by accelerate launch with torchrun's restarts, which starts Python again. The
time includes the steps since the last checkpoint, which are done again. The CPU time of a worker
from its restart to its first record is measured too.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from launches import CONFIGS, ROOT, kill_with_descendants, workers

sys.path.insert(0, str(ROOT / "tests"))
from hosts import ADDRESSES, Hosts

SETTINGS = (
    "--steps 100000 --telemetry.every_steps 1 --checkpoints.every_steps 10 --telemetry.trackers []"
    " --evaluation.every_steps null --evaluation.sanity_check false --run_name restarting"
)
WHERE = str(CONFIGS / "cpu_2_processes.yaml")
TORCHRUN = "--rdzv_backend c10d --max_restarts 100 --monitor_interval 0.1"


def newest_step(folder: Path) -> int:
    """Return the step of the newest record of an interval; 0 if there is none."""
    path = folder / "runs/restarting/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = (json.loads(line) for line in reversed(lines) if line.endswith("}"))
    return next((record["step"] for record in records if record.get("kind") == "interval"), 0)


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen) -> None:
    """Wait until a step has been recorded."""
    deadline = time.monotonic() + 300
    while newest_step(folder) < step:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "output").read_text()[-3000:])
        time.sleep(0.01)


def restarts(command: list[str], kills: int, source: Path, hosts: int) -> dict[str, list[float]]:
    """Kill a rank repeatedly; return the seconds to the next new step, and a worker's CPU time.

    Args:
        command: the command, without the options that differ between nodes.
        kills: the number of kills.
        source: the folder of the package.
        hosts: 1 or 2.
    """
    draw, times = random.Random(0), {"seconds": [], "CPU s of a worker": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        environment = os.environ | {
            "PYTHONPATH": str(source), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }  # fmt: skip
        launchers = []
        network = stack.enter_context(Hosts(folder)) if hosts > 1 else None
        for host in range(hosts):
            words = [*command]
            if network:
                position = command.index("-m", 2)  # of the second -m; the first follows python
                options = f"--num_machines 2 --num_processes 2 --machine_rank {host}"
                options += f" --main_process_ip {ADDRESSES[0]} --main_process_port 29500"
                words[position:position] = options.split()
                words = network.entering(host, *words)
            with (folder / "output").open("a") as output:
                launchers += [
                    subprocess.Popen(
                        words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                ]
        launcher = launchers[0]
        try:
            for _ in range(kills):
                wait_for_step(folder, newest_step(folder) + draw.randrange(12, 30), launcher)
                running = [worker for started in launchers for worker in workers(started.pid)]
                killed = time.monotonic()
                draw.choice(running).kill()
                psutil.wait_procs(running, 60)  # the others may finish their current step
                before = newest_step(folder)
                wait_for_step(folder, before + 1, launcher)
                times["seconds"].append(time.monotonic() - killed)
                cpu = workers(launcher.pid)[0].cpu_times()
                times["CPU s of a worker"].append(cpu.user + cpu.system)
        finally:
            for started in launchers:
                kill_with_descendants(started)
    return times


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--config", default="template/configs/image_classification.yaml")
    parser.add_argument("--base", type=Path, help="template/src of another clone")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    parser.add_argument(
        "--where", default=WHERE, help="with another config, accelerate launch is left out"
    )
    options = parser.parse_args()
    where = str(Path(options.where).resolve())
    config = ["--config", str(Path(options.config).resolve()), *SETTINGS.split()]
    python, train = [sys.executable, "-m"], ["-m", "my_project.train", *config]
    ours = [*python, "my_project.launch", "--config_file", where]
    accelerate = [*python, "accelerate.commands.launch", "--config_file", where, *TORCHRUN.split()]
    source = ROOT / "template/src"
    cases = {"ours": ([*ours, *train], source)}
    if options.where == WHERE:
        cases["accelerate launch"] = ([*accelerate, *train], source)
    if options.base:
        cases["the launcher of --base"] = ([*ours, *TORCHRUN.split(), *train], options.base)
    print(f"| {options.kills} kills | seconds | least | most | CPU s of a worker |")
    print("|---|---|---|---|---|")
    for name, (command, package) in cases.items():
        times = restarts(command, options.kills, package, options.hosts)
        seconds = times["seconds"]
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        cells = [f"{number:.2f}" for number in numbers]
        cells.append(f"{statistics.median(times['CPU s of a worker']):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
