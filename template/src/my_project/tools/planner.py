"""Predict memory, traffic and step time on a cluster, and choose its accelerate config.

    python -m my_project planner --config configs/image_classification.yaml \
        --nodes 4 --gpus-per-node 8 --gpu-memory-gb 80

It prints a row for DDP, HSDP and FSDP2, on the whole cluster and on fewer GPUs with the same global
batch. It says which config to use, and whether more GPUs would help. The cluster need not exist.
Memory, traffic and FLOPs are those of simulated steps (simulate.py): one process takes a step of
rank 0 on fake tensors, with the sharding or DDP of the accelerate config. The step time is computed
from them. The speed of a GPU comes from --samples-per-second, measured on one GPU, or else from
--gpu-tflops and --mfu; the bandwidths come from preflight.py (--measured runs/preflight.json) or
from options.

With --simulate it prints one simulated step: the memory of a GPU by kind, and every collective.

    python -m my_project planner --simulate --config configs/image_classification.yaml \
        --nodes 64 --gpus-per-node 8 --where multi_node_hsdp

Tests compare the simulated memory with what torch allocates, and memory and collectives with those
of real processes. Step times are estimates.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..exits import run
from ..files import ConfigError, is_number, read_json
from ..words import make_parser


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a function that converts an option's text with `kind`: to a number greater than 0."""

    def converted(text: str) -> float:
        if not 0 < (number := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be a finite number greater than 0")
        return number

    converted.__name__ = kind.__name__  # as argparse names it in errors
    return converted


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; unknown options are settings of the run."""
    options = make_parser(__doc__)
    add = options.add_argument
    configs = "a config of the run, as in training; dotted settings may follow"
    add("--config", required=True, action="append", help=configs)
    count, size = positive(int), positive(float)
    add("--nodes", type=count, default=1)
    add("--gpus-per-node", type=count, default=8)
    add("--gpu-memory-gb", type=size, default=80.0)
    add("--reserved-gb", type=float, default=2.0, help="for CUDA context, NCCL, fragmentation")
    add("--samples-per-second", type=size, help="speed of one GPU, as a run on one GPU reports it")
    add("--gpu-tflops", type=size, default=989.0, help="peak of the data sheet; H100 in bf16: 989")
    add("--mfu", type=size, default=0.4, help="MFU, used if --samples-per-second is not given")
    add("--measured", type=Path, help="file with measured bandwidths: runs/preflight.json")
    add("--in-node-gb-per-second", type=size, default=300.0, help="all-reduce bus bandwidth")
    add("--over-nodes-gb-per-second", type=size, default=40.0, help="bus bandwidth over all nodes")
    add("--latency-us", type=float, default=20.0, help="latency of a message, also in a node")
    add("--save-seconds", type=size, help="duration of a save, to recommend an interval")
    add("--restart-seconds", type=float, default=60.0, help="from a failure to the next step")
    add("--hours-between-failures", type=size, help="default: 7.9 for 1,024 GPUs (published)")
    add("--simulate", action="store_true", help="print one simulated step instead of a plan")
    add("--where", default="multi_node", help="with --simulate: accelerate config, name or path")
    add("--json", action="store_true")
    return options


# before torch is imported, so that --help and wrong options appear immediately
ARGUMENTS = parser().parse_known_args() if __name__ == "__main__" else None

from ..config import BatchesConfig
from ..loading.layout import BatchLayout, batch_layout, max_processes
from .reader import format_number, print_table
from .simulate import Collective, Simulation, Simulator, sharding_refusal

GB = 1e9
KINDS = ("DDP", "HSDP", "FSDP2")  # the simplest first
# Fewer GPUs or a simpler kind are chosen if their step takes at most this many times the time of
# the shortest step.
SIMILAR = 1.1
# Steps shorter than this are treated as equally long: Python (about 1 ms) and data loading are not
# predicted.
SHORT_STEP_SECONDS = 5e-3
# Share of the backward pass in the time of a micro-batch: it computes two matrix products for each
# matrix product of the forward pass.
BACKWARD_SHARE = 2 / 3
FAILURE_GPU_HOURS = 7.9 * 1024  # between failures on Meta's research clusters (arXiv 2410.21680)
# Simulates a step: the accelerate config, nodes, GPUs per node, micro-batch size, accumulation.
TakeStep = Callable[[str, int, int, int, int], Simulation]
Accepts = Callable[[str, BatchLayout], bool]  # whether training accepts a layout, by kind


# ---- time ----------------------------------------------------------------------------------------
def step_seconds(kind: str, step: Simulation, cluster: argparse.Namespace) -> tuple[float, float]:
    """Estimate the seconds of computation in a step, and of the whole step.

    A collective sends its bytes through a ring, and each message has a latency proportional to log2
    of the number of GPUs. With DDP, the communication of all buckets but the last overlaps with the
    backward pass of the last micro-batch. With sharding, the communication of all blocks but one
    overlaps with all computation.

    Args:
        kind: one of KINDS.
        step: the simulated step.
        cluster: the options that describe the cluster.
    """
    flops = cluster.gpu_tflops * 1e12 * cluster.mfu  # per second
    if not (cluster.samples_per_second or step.flops_per_sample):
        raise ConfigError("the FLOPs of this model cannot be counted: add --samples-per-second.")
    speed = cluster.samples_per_second or flops / step.flops_per_sample
    micro_batch_seconds = step.micro_batch / speed
    compute = micro_batch_seconds * step.accumulation
    communicate = sum(collective_seconds(called, step, cluster) for called in step.collectives)
    reduction = "all-reduce" if kind == "DDP" else "reduce-scatter"  # one for each bucket or block
    numbers = (called.number for called in step.collectives if called.operation == reduction)
    messages = max(numbers, default=1)
    overlapping = compute
    if kind == "DDP":
        messages = max(1, messages - 1)  # without the all-reduce of the step's sums
        overlapping = BACKWARD_SHARE * micro_batch_seconds
    return compute, compute + communicate - min(communicate * (1 - 1 / messages), overlapping)


def collective_seconds(
    collective: Collective, step: Simulation, cluster: argparse.Namespace
) -> float:
    """Estimate the seconds of the collectives of one kind in a step.

    In a ring over nodes, a node sends as much over the network as one of its GPUs sends. If a group
    has only some of the GPUs of a node, several rings share the node's link.
    """
    bandwidth = cluster.in_node_gb_per_second * GB
    if not collective.is_in_node:
        links = collective.group_per_node / step.gpus_per_node
        bandwidth = cluster.over_nodes_gb_per_second * GB * links
    hops = math.ceil(math.log2(max(2, collective.group_size)))
    latency = cluster.latency_us * 1e-6 * collective.number * hops
    return collective.sent_bytes / bandwidth + latency


# ---- the choice ----------------------------------------------------------------------------------
def config_name(kind: str, nodes: int, gpus_per_node: int) -> str:
    """Return the name of the accelerate config."""
    if nodes == 1:
        name = "gpu" if gpus_per_node == 1 else "multi_gpu"
        return name if kind == "DDP" else "fsdp2"
    return {"DDP": "multi_node", "HSDP": "multi_node_hsdp", "FSDP2": "multi_node_fsdp2"}[kind]


def fastest_layout(
    total: int, world_size: int, limit: float, accepts: Callable[[BatchLayout], bool]
) -> BatchLayout | None:
    """Return the layout of a global batch with the fewest samples per rank; None if there is none.

    Args:
        total: samples of the global batch.
        world_size: the number of ranks.
        limit: the maximum number of samples in a micro-batch.
        accepts: whether training accepts a layout.
    """
    layouts = []
    for size in range(1, min(-(-total // world_size), max(1, int(min(limit, total)))) + 1):
        batches = BatchesConfig(global_batch_size=total, micro_batch_size=size)
        if max_processes(batches) >= world_size:
            layouts.append(batch_layout(batches, world_size))

    def cost(layout: BatchLayout) -> tuple[int, int]:
        return layout.micro_batch_size * layout.accumulation, -layout.micro_batch_size

    return min(filter(accepts, layouts), key=cost, default=None)


def fastest_that_fits(
    take: TakeStep,
    where: tuple[str, int, int],
    total: int,
    limit: float,
    free_bytes: float,
    accepts: Callable[[BatchLayout], bool] = lambda layout: True,
) -> tuple[Simulation | None, float]:
    """Simulate a step with the fastest layout that fits into a GPU.

    With a smaller micro-batch, activations shrink at most in proportion, and the rest of the memory
    does not shrink, so some sizes need not be tried.

    Args:
        take: simulates a step.
        where: the accelerate config, the number of nodes, and the GPUs per node.
        total: samples of a global batch.
        limit: the maximum number of samples in a micro-batch.
        free_bytes: free memory of a GPU.
        accepts: whether training accepts a layout.

    Returns:
        The simulated step, and the new limit. If no layout fits, it is the last step that was
        tried; None if training accepts no layout.
    """
    step = None
    while layout := fastest_layout(total, where[1] * where[2], limit, accepts):
        micro_batch = layout.micro_batch_size
        step = take(*where, micro_batch, layout.accumulation)
        if step.peak_bytes <= free_bytes or micro_batch == 1:
            break
        activations = step.memory_bytes["activations"]
        free_for_activations = free_bytes - (step.peak_bytes - activations)
        limit = min(micro_batch - 1, micro_batch * free_for_activations / max(1, activations))
    return step, limit


def plan(
    take: TakeStep,
    cluster: argparse.Namespace,
    global_batch: int,
    kinds: tuple[str, ...] = KINDS,
    accepts: Accepts = lambda kind, layout: True,
) -> list[dict[str, Any]]:
    """Predict each kind on 1, 2, 4, ... GPUs of a node, then on 1, 2, 4, ... nodes.

    KINDS begins with the simplest. For a part of the cluster, no kind is predicted after the first
    one that fits into memory.
    """
    whole = (cluster.nodes, cluster.gpus_per_node)
    sizes = [(1, gpus) for gpus in _doubled(cluster.gpus_per_node)]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in _doubled(cluster.nodes)[1:]]
    free_bytes = (cluster.gpu_memory_gb - cluster.reserved_gb) * GB
    rows = []
    limits: dict[Any, float] = {}  # of the micro-batch; 0 where not even 1 sample fits
    # a micro-batch that is too large on many GPUs is also too large on fewer
    for nodes, gpus in reversed(sizes):
        for kind in kinds if global_batch >= nodes * gpus else ():
            if (kind == "HSDP" and 1 in (nodes, gpus)) or (kind == "FSDP2" and nodes * gpus == 1):
                continue
            key = (kind, nodes * gpus == 1)
            if (limit := limits.get(key, math.inf)) == 0:
                continue
            where = config_name(kind, nodes, gpus)
            place, may_use = (where, nodes, gpus), partial(accepts, kind)
            step, limit = fastest_that_fits(take, place, global_batch, limit, free_bytes, may_use)
            if not step:
                continue
            fits = step.peak_bytes <= free_bytes
            limits[key] = limit if fits else 0
            compute, seconds = step_seconds(kind, step, cluster)
            computed = step.micro_batch * step.accumulation * nodes * gpus  # samples
            idle = 1 - global_batch / computed
            row = {"kind": kind, "config": where, "fits": fits, "seconds": seconds, "idle": idle}
            # DDP builds the model in each process; with sharding, rank 0 builds and scatters it
            row |= {"host_bytes": step.model_bytes * (gpus if kind == "DDP" else 1)}
            efficiency = compute * (1 - idle) / seconds
            rows.append(row | {"efficiency": efficiency} | step.as_dict())
            if fits and (nodes, gpus) != whole:
                break
    return sorted(rows, key=lambda row: row["nodes"] * row["gpus_per_node"])


def _doubled(last: int) -> list[int]:
    """Return the powers of two below `last`, and `last`."""
    return [2**k for k in range(last.bit_length()) if 2**k < last] + [last]


def choice(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row with the fewest GPUs, then the simplest kind, that has a short step."""
    fitting = [row for row in rows if row["fits"]]
    limit = SIMILAR * max([SHORT_STEP_SECONDS, min((row["seconds"] for row in fitting), default=0)])
    return next((row for row in fitting if row["seconds"] <= limit), None)


def advice(rows: list[dict[str, Any]]) -> list[str]:
    """Return sentences that advise the row of `choice`."""
    if not (best := choice(rows)):
        return ["None of these fits: use more or larger GPUs, or a smaller model."]
    sentences = [
        f"Choose accelerate_configs/{best['config']}.yaml with --batches.micro_batch_size"
        f" {best['micro_batch']}.",
        f"The start needs {best['host_bytes'] / GB:.3g} GB of host memory on"
        f" {'each' if best['kind'] == 'DDP' else 'the first'} node.",
        "Step time and efficiency are estimates, without data loading and about 1 ms of Python.",
    ]
    gpus, max_gpus = (row["nodes"] * row["gpus_per_node"] for row in (best, rows[-1]))
    if gpus < max_gpus:
        text = f"More GPUs would not help: a step on {max_gpus} is not much faster than on {gpus}."
        sentences.insert(1, text)
    return sentences


# ---- failures ------------------------------------------------------------------------------------
def best_interval_seconds(save: float, between_failures: float) -> float:
    """Return the time between saves that loses the least, by Young (1974); all in seconds."""
    return math.sqrt(2 * save * between_failures)


def predicted_goodput(
    interval: float, save: float, restart: float, between_failures: float
) -> float:
    """Return the share of wall-clock time spent in steps that are kept.

    The formula is that of Daly (2006, doi.org/10.1016/j.future.2004.11.016): failures have a
    constant rate, also during saves and restarts. All arguments are in seconds.
    """
    rate = 1 / between_failures
    return interval * rate / (math.exp(restart * rate) * math.expm1((interval + save) * rate))


def failure_advice(gpus: int, cluster: argparse.Namespace) -> str:
    """Return a sentence with the best interval between saves, and the goodput to expect."""
    hours = cluster.hours_between_failures or FAILURE_GPU_HOURS / gpus
    interval = best_interval_seconds(cluster.save_seconds, 3600 * hours)
    minutes = float(f"{interval / 60:.2g}")
    times = (interval, cluster.save_seconds, cluster.restart_seconds, 3600 * hours)
    return (
        f"With {hours:.3g} h between failures, --checkpoints.every_minutes {minutes:g}"
        f" loses the least time: the goodput is {predicted_goodput(*times):.1%}."
    )


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: argparse.Namespace, settings: list[str]) -> None:
    """Print a plan, or one simulated step."""
    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if not arguments.simulate:  # a plan chooses the micro-batch
        settings = [*settings, "--batches.micro_batch_size=0"]
    simulator = Simulator([*(f"--config={path}" for path in arguments.config), *settings])
    layout = batch_layout(simulator.config.batches, nodes * gpus)  # refuses too many GPUs
    if arguments.simulate:
        step = simulator.step(arguments.where, nodes, gpus)
        print(json.dumps(step.as_dict())) if arguments.json else show_step(step, layout, arguments)
        return
    if arguments.measured:
        measured = read_json(arguments.measured, follow=True)
        speeds = {n: measured.get(f"{n}_bytes_per_second") for n in ("in_node", "over_nodes")}
        if not all(is_number(speed) for speed in speeds.values()):
            raise ConfigError(f"{arguments.measured} is not a preflight.json; run the preflight.")
        for name, speed in speeds.items():
            if speed:  # 0: there was one GPU per node, or one node
                setattr(arguments, f"{name}_gb_per_second", speed / GB)
    refusal = sharding_refusal()
    kinds = ("DDP",) if refusal else KINDS
    total = layout.global_batch_size
    if not (rows := plan(simulator.step, arguments, total, kinds, simulator.accepts)):
        raise ConfigError(
            f"batches.global_batch_size {total} cannot be divided over {nodes} x {gpus} GPUs, nor"
            " over fewer: distributed.ddp.static_graph or the stream's lanes do not allow it."
            " Change the global batch size."
        )
    sentences = advice(rows)
    if refusal:
        sentences.append(f"FSDP2 and HSDP are not predicted: {refusal}")
    if arguments.save_seconds and (best := choice(rows)):
        sentences.append(failure_advice(best["nodes"] * best["gpus_per_node"], arguments))
    if arguments.json:
        print(json.dumps({"rows": rows, "advice": sentences}))
    else:
        show_plan(rows, arguments)
        print("", *sentences, sep="\n")


def show_plan(rows: list[dict[str, Any]], cluster: argparse.Namespace) -> None:
    """Print the size of the model, and the predicted steps."""
    parameters, flops = (format_number(rows[0][n]) for n in ("parameters", "flops_per_sample"))
    print(f"{parameters} parameters, {flops} FLOPs per sample")
    table = [["GPUs", "config", "memory", "batch", "sent", "network", "step", "efficiency"]]
    for row in rows:
        memory = f"{row['peak_bytes'] / GB + cluster.reserved_gb:.1f} GB"
        cells = [f"{row['nodes']} x {row['gpus_per_node']}", row["config"], memory]
        if row["fits"]:
            sizes = (sum(row["sent"].values()), row["sent"]["network"])
            idle = f", idle {row['idle']:.0%}" if row["idle"] else ""
            cells += [f"{row['micro_batch']} x {row['accumulation']}{idle}"]
            cells += [f"{format_number(size)}B" for size in sizes]
            cells += [f"{row['seconds']:.3g} s", f"{row['efficiency']:.0%}"]
        else:
            cells += ["does not fit", "", "", "", ""]
        table.append(cells)
    print_table("Memory and traffic are per GPU; batch: micro-batch x accumulation", table)


def show_step(step: Simulation, layout: BatchLayout, cluster: argparse.Namespace) -> None:
    """Print the memory of a GPU at the peak, and the collectives of a step."""
    world_size = step.nodes * step.gpus_per_node
    print(f"one step of rank 0 of {world_size}, on {step.nodes} x {step.gpus_per_node} GPUs")
    print(f"{format_number(step.parameters)} parameters, precision {step.precision}")
    print(layout)
    sizes = [*step.memory_bytes.values(), step.peak_bytes]
    memory = [[*step.memory_bytes, "sum"], [f"{size / GB:.3g}" for size in sizes]]
    print_table("Memory of a GPU at the peak, in GB", memory)
    table = [["operation", "GPUs", "in a node", "number", "size", "sent by a GPU"]]
    for called in step.collectives:
        sizes = [f"{format_number(size)}B" for size in (called.size_bytes, called.sent_bytes)]
        counts = (called.group_size, called.group_per_node, called.number)
        table.append([called.operation, *map(str, counts), *sizes])
    print_table("Collectives of a GPU in a step", table)
    needed = step.peak_bytes / GB + cluster.reserved_gb
    fits = "fits" if needed <= cluster.gpu_memory_gb else "does not fit"
    print(
        f"\nWith {cluster.reserved_gb:g} GB reserved, a step needs {needed:.1f} GB, which {fits}"
        f" into {cluster.gpu_memory_gb:g} GB."
    )


if ARGUMENTS:
    run(main, *ARGUMENTS)
