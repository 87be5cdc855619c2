"""Check the machines before an hour of them is spent: in a minute, with the arguments of training.

    accelerate launch --config_file accelerate_configs/multi_node.yaml ... \
        -m my_project.cluster.preflight --config configs/image_classification.yaml

Every process takes part. A table shows what each node is; then comes what was measured between
them. Ends with 0, or with 1 and a sentence for each thing that would go wrong in training, and what
to do. The launchers run it first when they are given --preflight; before it they hold the roll call
(rendezvous.py), which names a node that never comes. What was measured is kept for planner.py, in
<runs_folder>/preflight.json.
"""

from ..config import Config, parse_command_line

# Before torch is imported, so that --help and a wrong config answer at once.
CONFIG = parse_command_line(__doc__ or "") if __name__ == "__main__" else None

import hashlib
import inspect
import json
import logging
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.cuda import nccl

from .. import cli, devices, launcher
from ..config import to_yaml
from ..files import write_atomically
from ..loading import layout, workers
from ..run_folder import installed

logger = logging.getLogger(__name__)
MB = 1_000_000
# Until a check that does not return counts as failed: at least, and for each node. Each node writes
# WRITTEN_BYTES, which one storage takes at 64 MB/s; it sends 256 MB to each other, two times at
# 100 MB/s.
SECONDS = {
    "the processes meet": (60.0, 1.0),
    "what each node is": (30.0, 0.1),
    "the run folder": (60.0, 1.0),
    "all-reduce": (60.0, 1.0),
    "pairs of nodes": (60.0, 5.0),
}
MUST_AGREE = ("python", "packages", "nccl", "driver", "code", "config", "gpu", "gpus")
LARGEST_SKEW_SECONDS = 5.0
SLOW = 0.5  # of the median
WRITTEN_BYTES = 64 * MB


# ---- no check hangs ------------------------------------------------------------------------------
def seconds_for(what: str) -> float:
    """Say how long a check may take: at least + for each node x nodes."""
    at_least, per_node = SECONDS[what]
    processes, _ = launcher.world()
    nodes = processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return at_least + per_node * nodes


@contextmanager
def checking(what: str) -> Iterator[None]:
    """End this process with a sentence when a check takes too long."""
    size, rank = launcher.world()
    seconds = seconds_for(what)

    def give_up() -> None:
        print(
            f"error: preflight stood still for {seconds:.0f} s at '{what}', on rank {rank} of"
            f" {size} on {socket.gethostname()} (interface {chosen_interface()}): the processes do"
            " not reach each other by that interface, or one is gone; name the right one in"
            " GLOO_SOCKET_IFNAME (launch/network.sh), or look at what the others printed.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def chosen_interface() -> str:
    """Name the interfaces that NCCL and gloo were told to use."""
    names = {
        os.environ[name]
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if name in os.environ
    }
    return ", ".join(sorted(names)) or "chosen by gloo and NCCL"


# ---- what a node is ------------------------------------------------------------------------------
def facts(config: Config, device: torch.device) -> dict[str, Any]:
    """Describe the machine, as this process sees it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    about: dict[str, Any] = {
        "host": socket.gethostname(),
        "rank": launcher.world()[1],
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name, found in installed().items()),
        "nccl": "",
        "driver": "",
        "code": code_digest(config),
        "config": hashlib.sha256(to_yaml(config).encode()).hexdigest()[:8],
        "gpu": "",
        "gpus": 0,
        "gpu_free_bytes": 0,
        "gpu_bytes": 0,
        "memory_bytes": memory_bytes(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
        "open_files": soft,
        "cpus": round(workers.cpus_per_process() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        about |= {
            "nccl": ".".join(map(str, nccl.version())),
            "driver": driver(),
            "gpu": torch.cuda.get_device_name(device),
            "gpus": torch.cuda.device_count(),
            "gpu_free_bytes": free,
            "gpu_bytes": total,
        }
    return about


def code_digest(config: Config) -> str:
    """Hash the project's own modules, the recipe's too."""
    folder = Path(__file__).parent.parent  # of the package
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    if recipe := inspect.getsourcefile(type(config.recipe)):
        files["the recipe"] = Path(recipe)
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + files[name].read_bytes())
    return digest.hexdigest()[:8]


def driver() -> str:
    """Return the version of the GPU driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout.split()[0]


def memory_bytes() -> int:
    """Return the memory that is free for this process: the machine's, and its cgroup's limit."""
    free = psutil.virtual_memory().available
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(free, limit - used)
    except (OSError, ValueError):
        return free


def disagreements(everywhere: list[dict[str, Any]]) -> list[str]:
    """Say in what nodes differ that must be alike."""
    remedies = {
        "code": "use one copy on shared storage, or the same commit",
        "config": "start every node with the same arguments",
        "gpus": "give each node the same number (--gres, resources)",
        "gpu": "choose nodes of one kind",
        "driver": "update the driver",
    }
    said = []
    for name in MUST_AGREE:
        values: dict[Any, list[str]] = {}
        for one in everywhere:
            hosts = values.setdefault(one[name], [])
            if one["host"] not in hosts:
                hosts.append(one["host"])
        if len(values) > 1:
            differ = "; ".join(f"{_only_what_differs(v, values)} on {', '.join(hosts)}"
                               for v, hosts in values.items())  # fmt: skip
            said.append(
                f"{name} differs: {differ}:"
                f" {remedies.get(name, 'use one environment on all nodes')}."
            )
    return said


def _only_what_differs(value: Any, values: dict[Any, Any]) -> str:
    """Leave out what all have, of a list with commas."""
    common = set.intersection(*(set(str(v).split(", ")) for v in values))
    return ", ".join(part for part in str(value).split(", ") if part not in common) or "none"


def shortages(one: dict[str, Any], processes: int) -> tuple[list[str], list[str]]:
    """Say what a node has too little of: what would fail, and what would be slow."""
    fails, slow = [], []
    host = one["host"]
    if one["gpu"] and one["shm_bytes"] < 1_000 * MB:
        fails.append(
            f"{host} has {one['shm_bytes'] / MB:.0f} MB of /dev/shm: NCCL and data loaders need"
            " more than 1 GB (docker --ipc=host, a memory-backed volume in Kubernetes)."
        )
    if one["open_files"] < 1024:
        fails.append(
            f"{host} allows {one['open_files']} open files: each connection and worker is one;"
            " raise it with ulimit -n 65536."
        )
    if one["gpu"] and one["gpu_free_bytes"] < 0.9 * one["gpu_bytes"]:
        slow.append(
            f"a GPU of {host} has {one['gpu_free_bytes'] / 1e9:.1f} GB free of"
            f" {one['gpu_bytes'] / 1e9:.1f}: another process uses it (nvidia-smi)."
        )
    if one["cpus"] < processes:
        slow.append(
            f"{host} has {one['cpus']:g} CPUs for {processes} processes: give more"
            " (--cpus-per-task, resources), at least one each and one per loader worker."
        )
    return fails, slow


# ---- the run folder ------------------------------------------------------------------------------
def check_folder(accelerator: Accelerator, config: Config, host: str) -> tuple[list[str], float]:
    """See whether every node sees what the main process writes, and how fast each writes.

    Returns:
        What is wrong, on the main process; the speed of this node in bytes per second, 0 for
        processes other than its first.
    """
    folder = Path(config.runs_folder)
    word: list[Any] = [None, None]
    if accelerator.is_main_process:
        name = f".preflight-{os.getpid()}-{time.time_ns()}"
        word = [name, None]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(host)
        except OSError as error:
            word[1] = f"{folder.absolute()} cannot be written on {host}: {error.strerror}."
    if accelerator.num_processes > 1:
        broadcast_object_list(word)
    if word[1]:
        return [word[1]], 0.0
    mark = folder / word[0]
    deadline = time.monotonic() + 20
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        os.listdir(folder.parent)
        time.sleep(0.2)
    speed, problem = 0.0, ""
    if not seen:
        problem = (
            f"{folder.absolute()} on {host} is not the folder that rank 0 wrote to: set"
            " --runs_folder to storage that all nodes share."
        )
    elif accelerator.is_local_main_process:
        try:
            speed = write_speed(mark.with_name(f"{mark.name}-{accelerator.process_index}"))
        except OSError as error:
            problem = f"{folder.absolute()} cannot be written on {host}: {error.strerror}."
    problems = {problem for problem in gather_object([problem]) if problem}
    if accelerator.is_main_process:
        mark.unlink()
    return sorted(problems), speed


def write_speed(path: Path) -> float:
    """Write and flush a file; return bytes per second."""
    block = os.urandom(8 * MB)
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


# ---- the network ---------------------------------------------------------------------------------
def seconds_per_call(accelerator: Accelerator, call: Callable[[], None]) -> float:
    """Time something that all processes do together; the slowest counts."""

    def once(repeat: int) -> float:
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        for _ in range(repeat):
            call()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor((time.perf_counter() - started) / repeat, dtype=torch.float64)
        taken = taken.to(accelerator.device)
        torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
        return float(taken)

    once(1)  # connections are made
    return once(min(20, max(1, int(0.3 / once(1)))))


def bus_bandwidth(size_bytes: int, processes: int, seconds: float) -> float:
    """Turn the time of an all-reduce into the speed of the slowest link that it needs.

    In bytes per second, as nccl-tests defines it, which makes it comparable to what the hardware
    promises: 2 (n-1)/n x size / time
    (github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    return 2 * (processes - 1) / processes * size_bytes / seconds


def all_reduce_bandwidth(
    accelerator: Accelerator, sizes: list[int], groups: list[list[int]]
) -> tuple[dict[int, float], str]:
    """Measure all-reduces that run in all groups at once, and check their sums.

    Returns:
        Bus bandwidth by size in bytes, of the slowest group; what was wrong, if anything.
    """
    rank, measured, wrong = accelerator.process_index, {}, ""
    group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    assert isinstance(group, torch.distributed.ProcessGroup)
    ranks = next(ranks for ranks in groups if rank in ranks)
    for size in sizes:
        values = torch.full((size // 4,), float(rank + 1), device=accelerator.device)
        torch.distributed.all_reduce(values, group=group)
        expected = float(sum(r + 1 for r in ranks))
        off = int((values != expected).sum())
        if off and not wrong:
            wrong = (
                f"an all-reduce of {size / MB:g} MB over ranks {ranks} gave {off} wrong"
                f" values on rank {rank} ({socket.gethostname()}): a fault of memory, link or"
                " driver; take that node out."
            )
        values.zero_()

        def call(values: torch.Tensor = values) -> None:
            torch.distributed.all_reduce(values, group=group)

        seconds = seconds_per_call(accelerator, call)
        measured[size] = bus_bandwidth(size, len(ranks), seconds)
    torch.distributed.destroy_process_group(group)
    said = [text for text in gather_object([wrong]) if text]
    return measured, said[0] if said else ""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Let each meet each, all at once: the circle method of round-robin tournaments."""
    places: list[int | None] = [*range(count)] + ([None] if count % 2 else [])
    plan = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        plan.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return plan


def pair_bandwidth(
    accelerator: Accelerator, firsts: list[int], size: int
) -> dict[tuple[int, int], float]:
    """Let the first processes of each two nodes exchange a tensor; bytes per second each way."""
    measured: dict[tuple[int, int], float] = {}
    rank, device = accelerator.process_index, accelerator.device
    ours, theirs = (torch.zeros(size // 4, device=device) for _ in range(2))
    for pairs in rounds(len(firsts)):
        partner = None
        for a, b in pairs:
            if rank in (firsts[a], firsts[b]):
                partner = firsts[b] if rank == firsts[a] else firsts[a]
        seconds = 0.0
        for _ in range(2):  # the first makes the connection
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            if partner is not None:
                exchange = [
                    torch.distributed.P2POp(torch.distributed.isend, ours, partner),
                    torch.distributed.P2POp(torch.distributed.irecv, theirs, partner),
                ]
                for work in torch.distributed.batch_isend_irecv(exchange):
                    work.wait()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        everyones = gather_object([seconds])
        for a, b in pairs:
            measured[a, b] = size / max(everyones[firsts[a]], everyones[firsts[b]])
    return measured


def slow_pairs(measured: dict[tuple[int, int], float], hosts: list[str]) -> list[str]:
    """Name pairs that are far slower than the others."""
    if len(measured) < 3:
        return []
    usual = statistics.median(measured.values())
    return [
        f"{hosts[a]} and {hosts[b]} exchange {speed / 1e9:.2f} GB/s, others {usual / 1e9:.2f}: look"
        " at the cable, adapter and switch of whichever is in several such pairs, or take it out."
        for (a, b), speed in sorted(measured.items(), key=lambda item: item[1])
        if speed < SLOW * usual
    ]


# ---- all of it -----------------------------------------------------------------------------------
def main(config: Config) -> int:
    """Check, show, and return the exit code."""
    started = time.monotonic()
    layout.batch_layout(config.batches, launcher.world()[0])
    devices.check_launch(config)
    longest = round(max(map(seconds_for, SECONDS)))  # checking strikes before the process group
    patient = replace(
        config.distributed, timeout_seconds=longest, startup_timeout_seconds=longest, ddp={}
    )
    with checking("the processes meet"):
        started_processes = ExitStack()
        accelerator = started_processes.enter_context(
            devices.start(replace(config, distributed=patient))
        )
    with started_processes:
        return check(accelerator, config, started)


def check(accelerator: Accelerator, config: Config, started: float) -> int:
    """Make all checks that need the processes to be connected."""
    rank, device = accelerator.process_index, accelerator.device
    problems: list[str] = []
    warnings: list[str] = []
    with checking("what each node is"):
        mine = facts(config, device)
        accelerator.wait_for_everyone()
        mine["clock"] = time.time()
        everywhere: list[dict[str, Any]] = gather_object([mine])
        problems += disagreements(everywhere)
        firsts = [one["rank"] for one in everywhere if one["local_rank"] == 0]
        nodes = [
            [one["rank"] for one in everywhere[first:after]]
            for first, after in zip(firsts, [*firsts[1:], len(everywhere)], strict=True)
        ]
        hosts = [everywhere[first]["host"] for first in firsts]
        for first, ranks in zip(firsts, nodes, strict=True):
            fails, slow = shortages(everywhere[first], len(ranks))
            problems += fails
            warnings += slow
            if len(ranks) != len(nodes[0]):
                problems.append(
                    f"{everywhere[first]['host']} runs {len(ranks)} processes, {hosts[0]}"
                    f" {len(nodes[0])}: give every node the same number."
                )
        clocks = [everywhere[first]["clock"] for first in firsts]
        if max(clocks) - min(clocks) > LARGEST_SKEW_SECONDS:
            late = hosts[clocks.index(min(clocks))]
            problems.append(
                f"the clocks differ by {max(clocks) - min(clocks):.1f} s, that of {late} is behind:"
                " logs would mislead; start a time service (chrony) on every node."
            )
    with checking("the run folder"):
        wrong, speed = check_folder(accelerator, config, mine["host"])
        problems += wrong
        speeds = gather_object([speed])
    inside: dict[int, float] = {}
    over_all: dict[int, float] = {}
    pairs: dict[tuple[int, int], float] = {}
    sizes = [MB, 16 * MB] + ([256 * MB] if device.type == "cuda" else [])
    if accelerator.num_processes > 1:
        with checking("all-reduce"):
            if len(nodes[0]) > 1:
                inside, wrong_sum = all_reduce_bandwidth(accelerator, sizes, nodes)
                problems += [wrong_sum] if wrong_sum else []
            if len(nodes) > 1:
                everyone = [rank for ranks in nodes for rank in ranks]
                over_all, wrong_sum = all_reduce_bandwidth(accelerator, sizes, [everyone])
                problems += [wrong_sum] if wrong_sum else []
        if len(nodes) > 1:
            with checking("pairs of nodes"):
                pairs = pair_bandwidth(accelerator, firsts, sizes[-1])
                problems += slow_pairs(pairs, hosts)
    if rank == 0:
        show([everywhere[first] for first in firsts], nodes, [speeds[first] for first in firsts])
        for name, measured in {"in each node": inside, "over all nodes": over_all}.items():
            for size, bandwidth in measured.items():
                print(f"all-reduce of {size / MB:g} MB {name}: {bandwidth / 1e9:.3g} GB/s")
        if pairs:
            (a, b), slowest = min(pairs.items(), key=lambda item: item[1])
            print(
                f"{len(pairs)} pair(s) of nodes: {statistics.median(pairs.values()) / 1e9:.3g} GB/s"
                f" each way; the slowest {slowest / 1e9:.3g}, {hosts[a]} and {hosts[b]}"
            )
        for warning in warnings:
            print(f"warning: {warning}")
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        print(
            f"preflight {'failed' if problems else 'passed'} in {time.monotonic() - started:.0f} s",
            flush=True,
        )
        if not problems:
            keep(config, inside, over_all, len(nodes), accelerator.num_processes)
    failed = torch.tensor(float(bool(problems)), device=device)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(failed)
    return 1 if failed else 0


def show(heads: list[dict[str, Any]], nodes: list[list[int]], speeds: list[float]) -> None:
    """Print a row for each node."""
    from rich.console import Console
    from rich.table import Table

    table = Table("node", "ranks", "GPUs", "CPUs", "memory", "/dev/shm", "open files", "clock",
                  "writes", title="Nodes", title_justify="left")  # fmt: skip
    for one, ranks, speed in zip(heads, nodes, speeds, strict=True):
        table.add_row(
            one["host"],
            f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
            f"{one['gpus']} x {one['gpu']}" if one["gpu"] else "none",
            f"{one['cpus']:g}",
            f"{one['memory_bytes'] / 1e9:.0f} GB",
            f"{one['shm_bytes'] / 1e9:.1f} GB",
            str(one["open_files"]),
            f"{one['clock'] - heads[0]['clock']:+.2f} s",
            f"{speed / MB:.0f} MB/s",
        )
    first = heads[0]
    table.caption = (
        f"Python {first['python']}, {first['packages']}"
        + (f", NCCL {first['nccl']}, driver {first['driver']}" if first["gpu"] else "")
        + f"; code {first['code']}, config {first['config']}"
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def keep(
    config: Config,
    inside: dict[int, float],
    over_all: dict[int, float],
    nodes: int,
    processes: int,
) -> None:
    """Write what was measured where planner.py reads it."""
    record = {
        "nodes": nodes,
        "processes": processes,
        "in_node_bytes_per_second": max(inside.values(), default=None),
        "over_nodes_bytes_per_second": max(over_all.values(), default=None),
    }
    write_atomically(Path(config.runs_folder) / "preflight.json", json.dumps(record) + "\n")


if CONFIG:
    cli.run_on_all_ranks(main, CONFIG)
