"""Time how long a run pauses when it loses a node, and when a node joins.

    python benchmarks/nodes.py               as root, about 12 minutes on 2 cores; Linux
    python benchmarks/nodes.py --times 1

Three hosts (network namespaces) train a tiny model with one process each and a checkpoint at every
tenth step. Host 2 is lost, as in a power failure, and is started again a while later. A pause ends
with the next new step. The launchers that are compared are the project's with --min_machines 2, and
torchrun --nnodes 2:3 with its c10d rendezvous.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from launches import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from hosts import ADDRESSES, PLAIN, PROJECT, Hosts

CONFIG = """
run_name: tiny
recipe: {class_path: ragged.Ragged, init_args: {dtype: float64, dropout: 0.2, seconds: 0.05}}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
steps: 100000
checkpoints: {every_steps: 10}
evaluation: {sanity_check: false}
telemetry: {every_steps: 1, trackers: []}
"""
LIMIT = 300.0  # seconds to wait for a step
OURS = (sys.executable, "-m", "my_project.launch", "--config_file")
OURS += ("accelerate_configs/cpu_2_processes.yaml", "--num_machines", "3", "--num_processes", "3")
OURS += ("--main_process_ip", ADDRESSES[0], "--main_process_port", "29500", "--min_machines", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc_per_node")
TORCHRUN += ("1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:29500")
TORCHRUN += ("--rdzv_id", "run", "--max_restarts", "20", "--monitor_interval", "0.1")
ENVIRONMENT = PLAIN | {"ACCELERATE_USE_CPU": "1", "GLOO_SOCKET_IFNAME": "veth0"}
ENVIRONMENT |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TRAIN = ("-m", "my_project.train", "--config", "tiny.yaml")


def newest_step(folder: Path) -> int:
    """Return the step of the newest record of an interval; 0 if there is none."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = (json.loads(line) for line in reversed(lines) if line.endswith("}"))
    return next((record["step"] for record in records if record.get("kind") == "interval"), 0)


def seconds_to(hosts: Hosts, step: int) -> float:
    """Wait for a step; return the seconds, or infinity after LIMIT or if all launchers ended."""
    began = time.monotonic()
    while newest_step(hosts.run_folder) < step:
        have_ended = all(command.poll() is not None for command in hosts.commands)
        if have_ended or time.monotonic() > began + LIMIT:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - began


def start(hosts: Hosts, host: int, launcher: tuple[str, ...]) -> None:
    """Start a launcher on a host."""
    rank = ("--machine_rank", str(host)) if launcher == OURS else ()
    local = ("--local_addr", ADDRESSES[host]) if launcher == TORCHRUN else ()
    hosts.start(host, *launcher, *rank, *local, *TRAIN, disk=None, **ENVIRONMENT)


def measure(launcher: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds from a loss to the next new step, and the pause when the node is back.

    The pause is the longest time between two new steps after the node's launcher was started again.
    """
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name), 3) as hosts:
        for link in ("src", "accelerate_configs"):
            (hosts.folder / link).symlink_to(PROJECT / link)
        (hosts.folder / "tiny.yaml").write_text(CONFIG)
        for host in range(3):
            start(hosts, host, launcher)
        hosts.wait_for(lambda: newest_step(hosts.run_folder) >= 25)
        hosts.lose(2)
        lost = seconds_to(hosts, newest_step(hosts.run_folder) + 3)  # a record is two steps late
        seconds_to(hosts, newest_step(hosts.run_folder) + 5)
        hosts.cable(2, "up")
        start(hosts, 2, launcher)
        pause, last, stepped = 0.0, newest_step(hosts.run_folder), time.monotonic()
        while True:
            now, step = time.monotonic(), newest_step(hosts.run_folder)
            if step > last:
                pause, last, stepped = max(pause, now - stepped), step, now
            lines = (hosts.run_folder / "metrics.jsonl").read_text().splitlines()
            starts = [json.loads(line) for line in lines if '"kind": "start"' in line]
            if len(starts) > 1 and starts[-1]["world_size"] == 3 and step > starts[-1]["step"] + 5:
                return lost, pause
            if now > stepped + LIMIT:
                return lost, float("inf")
            time.sleep(0.02)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    print(f"| {options.times} times, median | loss to next step, s | pause when it is back, s |")
    print("|---|---|---|")
    for name, launcher in {"ours": OURS, "torchrun --nnodes 2:3": TORCHRUN}.items():
        rows = [measure(launcher) for _ in range(options.times)]
        medians = (statistics.median(column) for column in zip(*rows, strict=True))
        cells = (
            f"{seconds:.1f}" if seconds < LIMIT else f"none in {LIMIT:.0f}" for seconds in medians
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
