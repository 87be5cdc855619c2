"""Check the nodes, storage and network of a cluster before training.

    accelerate launch --config_file accelerate_configs/multi_node.yaml ... \
        -m my_project.tools.preflight --config configs/image_classification.yaml

It takes about a minute, the arguments of training, and all processes. It prints a table of the
nodes, then the bandwidths measured between them. It exits with 0, or with 1 and, for each problem
that would stop or slow training, a message with the remedy. The launchers run it before training if
--preflight is given, after the rendezvous check (rendezvous.py), which names missing nodes. The
measurements are saved for planner.py in <runs_folder>/preflight.json.
"""

from ..command_line import parse_command_line
from ..config import Config

# read before torch is imported, so that --help and errors in the config appear at once
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.cuda import nccl

from .. import cli, devices
from ..collectives import gather_on_main, on_main_then_broadcast
from ..config import to_yaml
from ..files import wait_until, write_atomically
from ..loading import layout, workers
from ..process import world
from ..run_folder import installed, not_shared

logger = logging.getLogger(__name__)
MB = 1_000_000
# The time limit of each check: a constant, and an addition per node. The additions assume that
# shared storage takes WRITTEN_BYTES of each node at 64 MB/s, and that each node sends 256 MB to
# each other node twice at 100 MB/s.
SECONDS = {
    "starting the process group": (60.0, 1.0),
    "node properties": (30.0, 0.1),
    "the run folder": (60.0, 1.0),
    "all-reduce": (60.0, 1.0),
    "pairs of nodes": (60.0, 5.0),
}
MUST_AGREE = ("python", "packages", "nccl", "driver", "code", "config", "gpu", "gpus")
MAX_CLOCK_SKEW_SECONDS = 5.0
SLOW_FRACTION = 0.5  # of the median bandwidth; a slower pair of nodes is reported
WRITTEN_BYTES = 64 * MB


# ---- time limits ---------------------------------------------------------------------------------
def seconds_for(check_name: str) -> float:
    """Return the time limit of a check for this number of nodes."""
    constant, per_node = SECONDS[check_name]
    world_size, _ = world()
    nodes = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return constant + per_node * nodes


@contextmanager
def checking(check_name: str) -> Iterator[None]:
    """Exit this process with a message if a check exceeds its time limit."""
    world_size, rank = world()
    seconds = seconds_for(check_name)

    def give_up() -> None:
        print(
            f"error: preflight stalled for {seconds:.0f} s at '{check_name}', on rank {rank} of"
            f" {world_size} on {socket.gethostname()} (interface {chosen_interface()}): a rank"
            " exited, or the ranks do not reach each other through that interface. Read the output"
            " of the other ranks, or set GLOO_SOCKET_IFNAME (launch/network.sh).",
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
    """Return the names of the interfaces that NCCL and gloo are set to use."""
    names = {
        os.environ[name]
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        if name in os.environ
    }
    return ", ".join(sorted(names)) or "chosen by gloo and NCCL"


# ---- node properties -----------------------------------------------------------------------------
def node_properties(config: Config, device: torch.device) -> dict[str, Any]:
    """Return hardware, limits and versions of this node, as this process sees them."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    properties: dict[str, Any] = {
        "host": socket.gethostname(),
        "rank": world()[1],
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version}" for name, version in installed().items()),
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
        "open_files": soft_limit,
        "cpus": round(workers.cpus_per_process() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        properties |= {
            "nccl": ".".join(map(str, nccl.version())),
            "driver": driver(),
            "gpu": torch.cuda.get_device_name(device),
            "gpus": torch.cuda.device_count(),
            "gpu_free_bytes": free,
            "gpu_bytes": total,
        }
    return properties


def code_digest(config: Config) -> str:
    """Return a hash of the project's modules and the recipe's."""
    folder = Path(__file__).parent.parent  # the package
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
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split()[0]


def memory_bytes() -> int:
    """Return the memory that is available to this process: of the machine, within its cgroup."""
    free = psutil.virtual_memory().available
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(free, limit - used)
    except (OSError, ValueError):
        return free


def disagreements(all_properties: list[dict[str, Any]]) -> list[str]:
    """Return a message for each property that must be the same on all nodes and is not."""
    remedies = {
        "code": "use one copy on shared storage, or the same commit",
        "config": "start every node with the same arguments",
        "gpus": "give each node the same number (--gres, resources)",
        "gpu": "choose nodes of one kind",
        "driver": "update the driver",
    }
    messages = []
    for name in MUST_AGREE:
        values: dict[Any, list[str]] = {}
        for properties in all_properties:
            hosts = values.setdefault(properties[name], [])
            if properties["host"] not in hosts:
                hosts.append(properties["host"])
        if len(values) > 1:
            differing = "; ".join(
                f"{_differing_part(value, values)} on {', '.join(hosts)}"
                for value, hosts in values.items()
            )
            remedy = remedies.get(name, "use one environment on all nodes")
            messages.append(f"{name} differs: {differing}: {remedy}.")
    return messages


def _differing_part(value: Any, values: dict[Any, Any]) -> str:
    """Return a comma-separated list without the items that all the values have."""
    common = set.intersection(*(set(str(v).split(", ")) for v in values))
    return ", ".join(part for part in str(value).split(", ") if part not in common) or "none"


def shortages(properties: dict[str, Any], processes: int) -> tuple[list[str], list[str]]:
    """Return messages about scarce resources of a node: those that fail a run, and that slow it."""
    errors: list[str] = []
    warnings: list[str] = []
    host = properties["host"]
    if properties["gpu"] and properties["shm_bytes"] < 1_000 * MB:
        errors.append(
            f"{host} has {properties['shm_bytes'] / MB:.0f} MB of /dev/shm, but NCCL and data"
            " loaders need more than 1 GB: use docker --ipc=host, or a memory-backed volume in"
            " Kubernetes."
        )
    if properties["open_files"] < 1024:
        errors.append(
            f"{host} allows {properties['open_files']} open files, but at least 1024 are needed for"
            " connections and workers: raise the limit with ulimit -n 65536."
        )
    if properties["gpu"] and properties["gpu_free_bytes"] < 0.9 * properties["gpu_bytes"]:
        warnings.append(
            f"a GPU of {host} has {properties['gpu_free_bytes'] / 1e9:.1f} GB free of"
            f" {properties['gpu_bytes'] / 1e9:.1f}: find the process that uses it with nvidia-smi."
        )
    if properties["cpus"] < processes:
        warnings.append(
            f"{host} has {properties['cpus']:g} CPUs for {processes} processes: request one per"
            " process and one per loader worker (--cpus-per-task, resources)."
        )
    return errors, warnings


# ---- the run folder ------------------------------------------------------------------------------
def check_folder(accelerator: Accelerator, config: Config, host: str) -> tuple[list[str], float]:
    """Check that every node sees the file that rank 0 writes, and measure each node's write speed.

    Returns:
        The problems of all ranks, on rank 0; the write speed in bytes per second, 0 for ranks
        other than the first of each node.
    """
    folder = Path(config.runs_folder)
    message: list[Any] = [None, None, host]  # name of the file, error, host of rank 0
    if accelerator.is_main_process:
        message[0] = f".preflight-{os.getpid()}-{time.time_ns()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / message[0]).write_text(host)
        except OSError as error:
            message[1] = (
                f"{folder.absolute()} cannot be written on {host}: {error.strerror}; fix its"
                " permissions, or give --runs_folder."
            )
    if accelerator.num_processes > 1:
        broadcast_object_list(message)
    name, error_on_main, main_host = message
    if error_on_main:
        return [error_on_main], 0.0
    path = folder / name

    def is_visible() -> bool:
        if not path.exists():
            with suppress(OSError):  # refreshes the directory cache of a network file system
                os.listdir(folder.parent)
        return path.exists()

    speed = 0.0
    problem = ""
    if not wait_until(is_visible, 20):
        problem = not_shared(folder, host, main_host)
    elif accelerator.is_local_main_process:
        try:
            speed = write_speed(path.with_name(f"{name}-{accelerator.process_index}"))
        except OSError as error:
            problem = (
                f"{folder.absolute()} cannot be written on {host}: {error.strerror}; fix its"
                " permissions, or give --runs_folder."
            )
    problems = {problem for problem in gather_on_main(accelerator, problem) if problem}
    if accelerator.is_main_process:
        path.unlink()
    return sorted(problems), speed


def write_speed(path: Path) -> float:
    """Write and flush a file; return its speed in bytes per second."""
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
    """Return the time of a collective call, on the slowest rank."""

    def mean_seconds(repeats: int) -> float:
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor((time.perf_counter() - started) / repeats, dtype=torch.float64)
        seconds = seconds.to(accelerator.device)
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
        return float(seconds)

    mean_seconds(1)  # warmup: the first call opens connections
    return mean_seconds(min(20, max(1, int(0.3 / mean_seconds(1)))))


def bus_bandwidth(size_bytes: int, world_size: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in bytes per second.

    2 (n-1)/n x size / time, as nccl-tests defines it: comparable to the bandwidth of the slowest
    link (github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    return 2 * (world_size - 1) / world_size * size_bytes / seconds


def all_reduce_bandwidth(
    accelerator: Accelerator, sizes: list[int], groups: list[list[int]]
) -> tuple[dict[int, float], str]:
    """Measure all-reduces that run in all groups at once, and check their sums.

    Args:
        accelerator: of this process.
        sizes: in bytes.
        groups: the ranks of each group; every rank is in one.

    Returns:
        Bus bandwidth by size, of the slowest group; on rank 0, a message about a wrong sum, or an
        empty one.
    """
    rank = accelerator.process_index
    measured: dict[int, float] = {}
    problem = ""
    group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    assert isinstance(group, torch.distributed.ProcessGroup)
    ranks = next(ranks for ranks in groups if rank in ranks)
    for size in sizes:
        values = torch.full((size // 4,), float(rank + 1), device=accelerator.device)
        torch.distributed.all_reduce(values, group=group)
        expected = float(sum(r + 1 for r in ranks))
        wrong_values = int((values != expected).sum())
        if wrong_values and not problem:
            problem = (
                f"an all-reduce of {size / MB:g} MB over ranks {ranks} gave {wrong_values} wrong"
                f" values on rank {rank} ({socket.gethostname()}), so its memory, network link or"
                " driver is faulty: remove that node."
            )
        values.zero_()

        def call(values: torch.Tensor = values) -> None:
            torch.distributed.all_reduce(values, group=group)

        seconds = seconds_per_call(accelerator, call)
        measured[size] = bus_bandwidth(size, len(ranks), seconds)
    torch.distributed.destroy_process_group(group)
    problems = [text for text in gather_on_main(accelerator, problem) if text]
    return measured, problems[0] if problems else ""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that contain each pair once (round robin, circle method)."""
    circle: list[int | None] = [*range(count)] + ([None] if count % 2 else [])
    schedule = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def pair_bandwidth(
    accelerator: Accelerator, firsts: list[int], size: int
) -> dict[tuple[int, int], float]:
    """Measure each pair of nodes exchanging a tensor, in bytes per second and direction.

    Called by every rank; {} on other ranks than 0.

    Args:
        accelerator: of this process.
        firsts: the first rank of each node, which sends and receives.
        size: of the tensor, in bytes.
    """
    rank = accelerator.process_index
    device = accelerator.device
    own: list[float] = []  # seconds, by round
    sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))
    for pairs in rounds(len(firsts)):
        partner = None
        for a, b in pairs:
            if rank in (firsts[a], firsts[b]):
                partner = firsts[b] if rank == firsts[a] else firsts[a]
        seconds = 0.0
        for _ in range(2):  # the first is a warmup that opens the connection
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            if partner is not None:
                exchange = [
                    torch.distributed.P2POp(torch.distributed.isend, sent, partner),
                    torch.distributed.P2POp(torch.distributed.irecv, received, partner),
                ]
                for work in torch.distributed.batch_isend_irecv(exchange):
                    work.wait()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        own.append(seconds)
    # once, not in each round: their number grows with that of the nodes
    everywhere = gather_on_main(accelerator, own)
    if not everywhere:
        return {}
    return {
        (a, b): size / max(everywhere[firsts[a]][i], everywhere[firsts[b]][i])
        for i, pairs in enumerate(rounds(len(firsts)))
        for a, b in pairs
    }


def slow_pairs(measured: dict[tuple[int, int], float], hosts: list[str]) -> list[str]:
    """Return a message for each pair of nodes that is far slower than the median."""
    if len(measured) < 3:
        return []
    median = statistics.median(measured.values())
    return [
        f"{hosts[a]} and {hosts[b]} exchange {speed / 1e9:.2f} GB/s, the median is"
        f" {median / 1e9:.2f}: check cable, adapter and switch of a node that is in several such"
        " pairs, or remove it."
        for (a, b), speed in sorted(measured.items(), key=lambda item: item[1])
        if speed < SLOW_FRACTION * median
    ]


# ---- the command ---------------------------------------------------------------------------------
def main(config: Config) -> int:
    """Run all checks, print the results, and return the exit code."""
    started = time.monotonic()
    layout.batch_layout(config.batches, world()[0])
    devices.check_launch(config)
    longest = round(max(map(seconds_for, SECONDS)))  # `checking` acts before the process group does
    distributed = replace(
        config.distributed, timeout_seconds=longest, startup_timeout_seconds=longest, ddp={}
    )
    process_group = ExitStack()
    with checking("starting the process group"):
        accelerator = process_group.enter_context(
            devices.start(replace(config, distributed=distributed))
        )
    with process_group:
        return check(accelerator, config, started)


def nodes_of(by_rank: list[dict[str, Any]]) -> tuple[list[int], list[list[int]], list[str]]:
    """Return the first rank of each node, all of its ranks, and its host."""
    firsts = [one["rank"] for one in by_rank if one["local_rank"] == 0]
    nodes = [
        [one["rank"] for one in by_rank[first:after]]
        for first, after in zip(firsts, [*firsts[1:], len(by_rank)], strict=True)
    ]
    return firsts, nodes, [by_rank[first]["host"] for first in firsts]


def compare_nodes(by_rank: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return what is wrong with the nodes, or differs between them; problems and warnings."""
    problems = disagreements(by_rank)
    warnings: list[str] = []
    firsts, nodes, hosts = nodes_of(by_rank)
    for first, ranks in zip(firsts, nodes, strict=True):
        node_errors, node_warnings = shortages(by_rank[first], len(ranks))
        problems += node_errors
        warnings += node_warnings
        if len(ranks) != len(nodes[0]):
            problems.append(
                f"{by_rank[first]['host']} runs {len(ranks)} processes, {hosts[0]}"
                f" {len(nodes[0])}: give every node the same number."
            )
    clocks = [by_rank[first]["clock"] for first in firsts]
    skew = max(clocks) - min(clocks)
    if skew > MAX_CLOCK_SKEW_SECONDS:
        late = hosts[clocks.index(min(clocks))]
        problems.append(
            f"the clocks differ by {skew:.1f} s, that of {late} is behind; the limit is"
            f" {MAX_CLOCK_SKEW_SECONDS:g} s. Start a time service (chrony) on every node."
        )
    return problems, warnings


def check(accelerator: Accelerator, config: Config, started: float) -> int:
    """Run the checks that need a process group; return the exit code."""
    rank = accelerator.process_index
    device = accelerator.device
    problems: list[str] = []
    warnings: list[str] = []
    with checking("node properties"):
        own = node_properties(config, device)
        accelerator.wait_for_everyone()
        own["clock"] = time.time()
        by_rank = gather_on_main(accelerator, own)
        if rank == 0:
            problems, warnings = compare_nodes(by_rank)
        firsts, nodes, hosts = on_main_then_broadcast(accelerator, lambda: nodes_of(by_rank))
    with checking("the run folder"):
        folder_problems, speed = check_folder(accelerator, config, own["host"])
        problems += folder_problems
        speeds = gather_on_main(accelerator, speed)
    in_node: dict[int, float] = {}
    over_nodes: dict[int, float] = {}
    pairs: dict[tuple[int, int], float] = {}
    sizes = [MB, 16 * MB] + ([256 * MB] if device.type == "cuda" else [])
    if accelerator.num_processes > 1:
        with checking("all-reduce"):
            if len(nodes[0]) > 1:
                in_node, wrong_sum = all_reduce_bandwidth(accelerator, sizes, nodes)
                problems += [wrong_sum] if wrong_sum else []
            if len(nodes) > 1:
                all_ranks = [rank for ranks in nodes for rank in ranks]
                over_nodes, wrong_sum = all_reduce_bandwidth(accelerator, sizes, [all_ranks])
                problems += [wrong_sum] if wrong_sum else []
        if len(nodes) > 1:
            with checking("pairs of nodes"):
                pairs = pair_bandwidth(accelerator, firsts, sizes[-1])
                problems += slow_pairs(pairs, hosts)
    if rank == 0:
        show([by_rank[first] for first in firsts], nodes, [speeds[first] for first in firsts])
        for name, measured in {"in each node": in_node, "over all nodes": over_nodes}.items():
            for size, bandwidth in measured.items():
                print(f"all-reduce of {size / MB:g} MB {name}: {bandwidth / 1e9:.3g} GB/s")
        if pairs:
            (a, b), slowest = min(pairs.items(), key=lambda item: item[1])
            print(
                f"{len(pairs)} pair(s) of nodes: median"
                f" {statistics.median(pairs.values()) / 1e9:.3g} GB/s each way; the slowest,"
                f" {hosts[a]} and {hosts[b]}, {slowest / 1e9:.3g}"
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
            save_bandwidths(config, in_node, over_nodes, len(nodes), accelerator.num_processes)
    failed = torch.tensor(float(bool(problems)), device=device)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(failed)
    return 1 if failed else 0


def show(properties: list[dict[str, Any]], nodes: list[list[int]], speeds: list[float]) -> None:
    """Print a table with a row per node.

    Args:
        properties: of each node.
        nodes: the ranks of each.
        speeds: bytes per second that each writes.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "node",
        "ranks",
        "GPUs",
        "CPUs",
        "memory",
        "/dev/shm",
        "open files",
        "clock",
        "writes",
        title="Nodes",
        title_justify="left",
    )
    for one, ranks, speed in zip(properties, nodes, speeds, strict=True):
        table.add_row(
            one["host"],
            f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
            f"{one['gpus']} x {one['gpu']}" if one["gpu"] else "none",
            f"{one['cpus']:g}",
            f"{one['memory_bytes'] / 1e9:.0f} GB",
            f"{one['shm_bytes'] / 1e9:.1f} GB",
            str(one["open_files"]),
            f"{one['clock'] - properties[0]['clock']:+.2f} s",
            f"{speed / MB:.0f} MB/s",
        )
    first = properties[0]
    table.caption = (
        f"Python {first['python']}, {first['packages']}"
        + (f", NCCL {first['nccl']}, driver {first['driver']}" if first["gpu"] else "")
        + f"; code {first['code']}, config {first['config']}"
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def save_bandwidths(
    config: Config,
    in_node: dict[int, float],
    over_nodes: dict[int, float],
    nodes: int,
    world_size: int,
) -> None:
    """Write the bandwidths to preflight.json, for planner.py."""
    record = {
        "nodes": nodes,
        "world_size": world_size,
        "in_node_bytes_per_second": max(in_node.values(), default=None),
        "over_nodes_bytes_per_second": max(over_nodes.values(), default=None),
    }
    write_atomically(Path(config.runs_folder) / "preflight.json", json.dumps(record) + "\n")


if CONFIG:
    cli.run_on_all_ranks(main, CONFIG)
