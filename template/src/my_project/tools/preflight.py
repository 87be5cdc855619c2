"""Check the nodes, storage and network of a cluster before training.

    accelerate launch --config_file accelerate_configs/multi_node.yaml ... \
        -m my_project.tools.preflight --config configs/image_classification.yaml

It takes the arguments of training, runs on all processes and needs about a minute. It prints a
table of the nodes, then the bandwidths measured between them. Exit codes: 0 if all checks pass; 1
if a problem would stop or slow training (each is printed with a remedy); 2 if a setting is wrong or
the runs folder cannot be written to. With --preflight, the launchers run it before training, after
the rendezvous check (nodes.py), which names missing nodes. The measured bandwidths are saved for
planner.py in <runs_folder>/preflight.json.
"""

from ..config import Config
from ..settings import parse_command_line

# before torch is imported, so that --help and errors in the config appear immediately
CONFIG = parse_command_line(__doc__ or "") if __name__ == "__main__" else None

import hashlib
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.cuda import nccl
from torch.utils.benchmark import Timer

from .. import exits
from ..accelerator import check_launch, start_accelerator
from ..config import to_yaml
from ..files import wait_until, write_atomically, writing
from ..loading import layout
from ..process import note_blamed, process_name, world
from ..provenance import code_digest, installed
from ..ranks import gather_on_main, on_main_then_broadcast
from ..records.recorder import check_outputs
from ..run_folder import not_shared
from .reader import format_number, print_table

MB = 1_000_000
# The time limit of a check is SECONDS, and SECONDS_PER_NODE more for each node. This is longer than
# a node needs to send 256 MB three times to every other node at 100 MB/s.
SECONDS = 60.0
SECONDS_PER_NODE = 8.0
MAX_CLOCK_SKEW_SECONDS = 5.0
SLOW_LINK = 0.5  # of the median; a slower pair of nodes is reported
SLOW_GPU = 0.8  # of the median; GPUs of one kind differ by a few percent


def nodes() -> list[range]:
    """Return the ranks of each node."""
    world_size, _ = world()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return [range(first, first + local) for first in range(0, world_size, local)]


def limit_seconds() -> float:
    """Return the time limit of a check."""
    return SECONDS + SECONDS_PER_NODE * len(nodes())


@contextmanager
def checking(name: str) -> Iterator[None]:
    """Exit this process with a message if a check exceeds its time limit."""
    seconds = limit_seconds()

    def give_up() -> None:
        print(
            f"error: the preflight check '{name}' on {process_name()} took longer than"
            f" {seconds:.0f} s: a GPU or the storage hangs, another rank exited, or the ranks"
            " cannot reach each other. Open all ports between the nodes, or see launch/network.sh.",
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


# ---- what each process measures ------------------------------------------------------------------
def must_agree(config: Config, device: torch.device) -> dict[str, str]:
    """Return the properties that must be the same on all nodes, such as versions, by name."""
    properties = {
        "python": sys.version.split()[0],
        **installed(),
        "code": code_digest(config.recipe),
        "config": hashlib.sha256(to_yaml(config).encode()).hexdigest()[:8],
    }
    if device.type == "cuda":
        properties["nccl"] = ".".join(map(str, nccl.version()))
        properties["gpu"] = torch.cuda.get_device_name(device)
    return properties


def multiply_matrices(device: torch.device) -> dict[str, float]:
    """Measure the FLOP/s of a matrix product in bf16, and count the values that are wrong."""
    size = 8192 if device.type == "cuda" else 512
    rows, columns = (torch.arange(size, device=device) % k for k in (7, 5))
    left = rows[:, None].expand(size, size).to(torch.bfloat16).contiguous()
    right = columns[None].expand(size, size).to(torch.bfloat16).contiguous()
    expected = size * (rows[:, None] * columns[None]).to(torch.bfloat16)  # exact: few bits are set
    product = torch.empty_like(left)
    seconds = seconds_per_call(lambda: torch.matmul(left, right, out=product))
    return {"flops": 2 * size**3 / seconds, "wrong_values": int((product != expected).sum())}


def seconds_per_call(call: Callable[[], Any], repeats: int = 5) -> float:
    """Return the mean time of calls, after two calls that open connections or choose kernels."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.timeit(repeats).mean  # Timer waits for the GPU


def folder_problem(accelerator: Accelerator, config: Config) -> str:
    """Return a message if this node does not see a file that rank 0 writes; "" if it does.

    With a mirror, the nodes need no shared storage.
    """
    folder, host = Path(config.runs_folder), socket.gethostname()

    def write_on_main() -> tuple[str, str]:
        name = f".preflight-{os.getpid()}-{time.time_ns()}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(host)
        return name, host

    name, main_host = on_main_then_broadcast(accelerator, write_on_main)

    def is_visible() -> bool:
        with suppress(OSError):  # refreshes the directory cache of a network file system
            os.listdir(folder.parent)
        return os.path.exists(folder / name)  # False also without permission to enter the folder

    is_right = config.checkpoints.mirror or wait_until(is_visible, 20)
    problem = "" if is_right else not_shared(folder, host, main_host)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / name).unlink()
    return problem


# ---- the network ---------------------------------------------------------------------------------
def all_reduce(device: torch.device, size: int, groups: list[list[int]]) -> tuple[float, int]:
    """Measure all-reduces that run in all groups at the same time, and count the wrong sums.

    The bus bandwidth is 2 (n-1)/n x size / time, as nccl-tests defines it: comparable to the
    bandwidth of the slowest link (github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Returns:
        The bus bandwidth in bytes per second, and the number of wrong sums.
    """
    group: Any = dist.new_subgroups_by_enumeration(groups)[0]
    ranks = next(ranks for ranks in groups if world()[1] in ranks)
    # small numbers, so that float32 represents their sum over many thousands of ranks exactly
    values = torch.full((size // 4,), float(world()[1] % 7 + 1), device=device)
    dist.all_reduce(values, group=group)
    wrong = int((values != sum(rank % 7 + 1 for rank in ranks)).sum())
    values.zero_()
    seconds = seconds_per_call(lambda: dist.all_reduce(values, group=group))
    dist.destroy_process_group(group)
    return 2 * (1 - 1 / len(ranks)) * size / seconds, wrong


def exchange_seconds(accelerator: Accelerator, size: int) -> list[float]:
    """Send a tensor to every other node, first rank to first rank; return the seconds by distance.

    At distance d, node i sends to node i + d and receives from node i - d; all nodes do so at the
    same time.
    """
    firsts = [ranks[0] for ranks in nodes()]
    sent, received = (torch.zeros(size // 4, device=accelerator.device) for _ in range(2))
    seconds = []
    for distance in range(1, len(firsts)):
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            index = firsts.index(accelerator.process_index)
            target, source = firsts[(index + distance) % len(firsts)], firsts[index - distance]

            def exchange(target: int = target, source: int = source) -> None:
                operations = [dist.P2POp(dist.isend, sent, target)]
                operations.append(dist.P2POp(dist.irecv, received, source))
                for work in dist.batch_isend_irecv(operations):
                    work.wait()

            seconds.append(seconds_per_call(exchange, repeats=1))
    return seconds


def link_speeds(seconds: list[list[float]], size: int) -> dict[tuple[int, int], float]:
    """Return the bytes per second of each pair of nodes, in the slower direction.

    A slow link delays both of its nodes, so the shorter of their times gives its speed: the longer
    time may be due to another link.

    Args:
        seconds: duration of each exchange, by node and distance.
        size: size of the tensor that was sent, in bytes.
    """
    speeds: dict[tuple[int, int], float] = {}
    for a in range(len(seconds)):
        for distance in range(1, len(seconds)):
            b = (a + distance) % len(seconds)
            speed = size / min(seconds[a][distance - 1], seconds[b][distance - 1])
            pair = (min(a, b), max(a, b))
            speeds[pair] = min(speed, speeds.get(pair, speed))
    return speeds


# ---- the verdict ---------------------------------------------------------------------------------
def slow(speeds: dict[str, float], fraction: float, unit: str) -> dict[str, str]:
    """Return {message: name} for each speed below a fraction of the median; {} for fewer than 3."""
    median = statistics.median(speeds.values()) if len(speeds) > 2 else 0.0
    return {
        f"{name}: {format_number(speed)}{unit}, but the median is {format_number(median)}{unit}."
        " Check the cooling, cable, adapter and switch of a node that is named several times, or"
        " remove it.": name
        for name, speed in speeds.items()
        if speed < fraction * median
    }


def differences(by_rank: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return a message for each property that must be the same on all nodes but is not.

    The result maps each message to the hosts whose value is not the most frequent one.
    """
    messages = {}
    for name in dict.fromkeys(name for own in by_rank for name in own["agree"]):
        hosts: dict[str, dict[str, None]] = {}  # by value
        for own in by_rank:
            hosts.setdefault(own["agree"].get(name, "none"), {})[own["host"]] = None
        if len(hosts) > 1:
            values = "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
            remedy = "Use the same environment, code, command and kind of node everywhere."
            most = max(map(len, hosts.values()))
            rare = [names for names in hosts.values() if len(names) < most] or hosts.values()
            messages[f"{name} differs: {values}. {remedy}"] = {*chain(*rare)}
    return messages


def judge(by_rank: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return a message for each problem that would stop or slow training, except slow links.

    The result maps each message to the hosts that have the problem.
    """
    problems = differences(by_rank)
    for rank, own in enumerate(by_rank):
        if wrong := own["wrong_values"]:
            text = (
                f"rank {rank} ({own['host']}) got {wrong} wrong value{'s' * (wrong > 1)} in a"
                " product or an all-reduce, so its memory, network link or driver is faulty: remove"
                " that node."
            )
            problems[text] = {own["host"]}
    # a wrong value of one node reaches every rank, so it does not show which node is faulty
    wrong = max(own["wrong_over_nodes"] for own in by_rank)
    if wrong and not any(own["wrong_values"] for own in by_rank):
        text = (
            f"an all-reduce over all nodes gave {wrong} wrong value{'s' * (wrong > 1)}, and those"
            " within each node gave none, so the network adapter or driver of some node is faulty:"
            " run the preflight on fewer nodes to find it."
        )
        problems[text] = set()
    for own in by_rank:
        if text := own["folder_problem"]:
            problems.setdefault(text, set()).add(own["host"])
    clocks = [own["clock"] for own in by_rank]
    if max(clocks) - min(clocks) > MAX_CLOCK_SKEW_SECONDS:
        median = statistics.median_high(clocks)
        skew, host = max(
            ((own["clock"] - median, own["host"]) for own in by_rank),
            key=lambda pair: abs(pair[0]),
        )
        text = (
            f"the clock of {host} is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}; clocks"
            f" may differ by {MAX_CLOCK_SKEW_SECONDS:g} s. Start a time service (chrony) on every"
            " node."
        )
        problems[text] = {host}
    for host in [own["host"] for own in by_rank if own.get("pinned_bytes", -1) >= 0]:
        text = f"{host} limits pinned memory, which InfiniBand needs: see ulimit in the Dockerfile."
        problems[text] = {host}
    if "gpu" in by_rank[0]["agree"]:  # CPUs may be shared with other programs: not compared
        hosts = {f"rank {rank} ({own['host']})": own["host"] for rank, own in enumerate(by_rank)}
        speeds = dict(zip(hosts, (own["flops"] for own in by_rank), strict=True))
        slow_ranks = slow(speeds, SLOW_GPU, "FLOP/s")
        problems |= {text: {hosts[name]} for text, name in slow_ranks.items()}
    return problems


def blamed(by_rank: list[dict[str, Any]], links: dict[tuple[str, str], float]) -> set[str]:
    """Return the hosts at fault: those with a wrong value, a slow GPU, or several slow links.

    Args:
        by_rank: what each rank has measured.
        links: bytes per second of each pair of hosts.
    """
    hosts = {own["host"] for own in by_rank if own["wrong_values"]}
    if "gpu" in by_rank[0]["agree"]:
        speeds = [own["flops"] for own in by_rank]
        limit = SLOW_GPU * statistics.median(speeds) if len(speeds) > 2 else 0.0
        hosts |= {own["host"] for own in by_rank if own["flops"] < limit}
    limit = SLOW_LINK * statistics.median(links.values()) if len(links) > 2 else 0.0
    slow_ends = Counter(host for pair, speed in links.items() if speed < limit for host in pair)
    return hosts | {host for host, count in slow_ends.items() if count > 1}


# ---- the command ---------------------------------------------------------------------------------
def main(config: Config) -> int:
    """Run all checks, print the results, and return the exit code."""
    layout.batch_layout(config.batches, world()[0])
    check_launch(config)
    check_outputs(config)
    limit = round(limit_seconds())  # `checking` times out before the process group does
    distributed = replace(
        config.distributed, timeout_seconds=limit, startup_timeout_seconds=limit, ddp={}
    )
    with start_accelerator(replace(config, distributed=distributed)) as accelerator:
        return check(accelerator, config)


def check(accelerator: Accelerator, config: Config) -> int:
    """Run the checks that need a process group; return the exit code."""
    device = accelerator.device
    size = 256 * MB if device.type == "cuda" else 16 * MB
    own: dict[str, Any] = {"host": socket.gethostname(), "in_node": 0.0, "over_nodes": 0.0}
    own["wrong_over_nodes"] = 0
    own["cpus"] = len(os.sched_getaffinity(0))
    if Path("/dev/infiniband").exists():
        own["pinned_bytes"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]  # -1: no limit
    with checking("versions and products"):
        own["agree"] = must_agree(config, device)
        own |= multiply_matrices(device)
    with checking("the run folder"):
        own["folder_problem"] = folder_problem(accelerator, config)
    with checking("all-reduce"):
        if len(nodes()[0]) > 1:
            own["in_node"], wrong = all_reduce(device, size, [[*ranks] for ranks in nodes()])
            own["wrong_values"] += wrong
        if len(nodes()) > 1:
            everyone = [*range(accelerator.num_processes)]
            own["over_nodes"], own["wrong_over_nodes"] = all_reduce(device, size, [everyone])
    with checking("pairs of nodes"):
        own["seconds"] = exchange_seconds(accelerator, size)
        accelerator.wait_for_everyone()
        own["clock"] = time.time()
        by_rank = gather_on_main(accelerator, own)
        return on_main_then_broadcast(accelerator, lambda: report(by_rank, size, config))


def report(by_rank: list[dict[str, Any]], size: int, config: Config) -> int:
    """Print the results, save the bandwidths for planner.py, and return the exit code."""
    problems = judge(by_rank)
    firsts = [by_rank[ranks[0]] for ranks in nodes()]
    hosts = [first["host"] for first in firsts]
    speeds = link_speeds([first["seconds"] for first in firsts], size)
    links = {(hosts[a], hosts[b]): speed for (a, b), speed in speeds.items()}
    note_blamed(sorted(blamed(by_rank, links)))
    pairs = {" and ".join(pair): pair for pair in links}
    slow_links = slow(dict(zip(pairs, links.values(), strict=True)), SLOW_LINK, "B/s")
    problems |= {text: {*pairs[name]} for text, name in slow_links.items()}
    bad_hosts = set().union(*problems.values())
    table = [["node", "ranks", "GPU", "CPUs", "clock", "product", "verdict"]]
    for first, ranks in zip(firsts, nodes(), strict=True):
        flops = min(by_rank[rank]["flops"] for rank in ranks)
        row = [first["host"], f"{ranks[0]} to {ranks[-1]}", first["agree"].get("gpu", "none")]
        row += [str(first["cpus"]), f"{first['clock'] - firsts[0]['clock']:+.2f} s"]
        verdict = "failed" if first["host"] in bad_hosts else "passed"
        row += [f"{flops / 1e12:.3g} TFLOP/s", verdict]
        table.append(row)
    print_table("Nodes (CPUs of the first process; bf16 product of the slowest process)", table)
    bandwidths = {key: min(own[key] for own in by_rank) for key in ("in_node", "over_nodes")}
    for name, key in {"in each node": "in_node", "over all nodes": "over_nodes"}.items():
        if bandwidths[key]:
            print(f"all-reduce of {size / MB:g} MB {name}: {bandwidths[key] / 1e9:.3g} GB/s")
    if links:
        print(f"pairs of nodes: {len(links)}, the slowest: {min(links.values()) / 1e9:.3g} GB/s")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"preflight {'failed' if problems else 'passed'}", flush=True)
    if not problems:
        record = {f"{key}_bytes_per_second": speed for key, speed in bandwidths.items()}
        path = Path(config.runs_folder) / "preflight.json"
        with writing(path.parent):
            write_atomically(path, json.dumps(record) + "\n")
    return 1 if problems else 0


if CONFIG:
    exits.run_on_all_ranks(main, CONFIG)
