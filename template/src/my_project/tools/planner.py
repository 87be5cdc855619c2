"""Predict memory, traffic and step time for a cluster, and its config.

    python -m my_project planner --config configs/image_classification.yaml \
        --nodes 4 --gpus-per-node 8 --gpu-memory-gb 80

It prints each config for the cluster, the same global batch on fewer GPUs, and which to use; also
where more GPUs would not help. The cluster need not exist. Simulated steps (simulate.py) give the
memory, the traffic and the FLOPs: one step of rank 0 with the accelerate config, real sharding or
DDP, on fake tensors in one process. The time of a step is arithmetic on them. The speed of a GPU
comes from --samples-per-second, measured on one GPU, or else from --gpu-tflops and --mfu; the
bandwidths come from preflight.py (--measured runs/preflight.json) or from options.

With --simulate it prints one of these steps: the memory of a GPU by kind, and every collective.

    python -m my_project planner --simulate --config configs/image_classification.yaml \
        --nodes 64 --gpus-per-node 8 --where multi_node_hsdp

Tests compare the simulated memory with what torch allocates and with real processes, and the
traffic with the interface counters of two hosts. Step times are estimates.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..cli import make_parser, run
from ..command_line import parse
from ..config import BatchesConfig, Config, ConfigError
from ..loading.layout import BatchLayout, batch_layout


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; unknown ones are settings of the run."""
    options = make_parser(__doc__)

    def add(name: str, **more: Any) -> None:
        options.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **more)

    add("config", required=True, help="the config of the run; dotted settings may follow")
    add("nodes", type=int, default=1)
    add("gpus-per-node", type=int, default=8)
    add("gpu-memory-gb", type=float, default=80.0)
    add("reserved-gb", type=float, default=2.0, help="assumed for context, NCCL, fragmentation")
    add("samples-per-second", type=float, help="speed of one GPU, as a run on one reports it")
    add("gpu-tflops", type=float, default=989.0, help="peak by the data sheet; an H100's in bf16")
    add("mfu", type=float, default=0.4, help="MFU, if no speed is given")
    add("measured", default="", help="file with measured bandwidths: runs/preflight.json")
    add("in-node-gb-per-second", type=float, default=300.0, help="all-reduce bus bandwidth")
    add("over-nodes-gb-per-second", type=float, default=40.0, help="the same over all nodes")
    add("latency-us", type=float, default=20.0, help="latency of one message over the network")
    add("simulate", action="store_true", help="print one simulated step in place of a plan")
    add("where", default="multi_node", help="simulate: accelerate_configs/NAME.yaml, or a path")
    add("json", action="store_true")
    return options


ARGUMENTS = parser().parse_known_args() if __name__ == "__main__" else None  # before torch

from rich.console import Console
from rich.table import Column, Table

from .simulate import Collective, Simulation, Simulator, sharding_refusal

GB = 1e9
KINDS = ("DDP", "HSDP", "FSDP2")
# With twice the GPUs, a step has to be shorter by this factor to be worth them; also the factor by
# which a simpler kind may be slower.
SIMILAR = 1.1
# About 1 ms of a step is Python, and data loading comes on top: neither is predicted.
SHORT_STEP_SECONDS = 5e-3
# The backward's share of a micro-batch's time: it has two matrix products where forward has one.
BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes, their GPUs and the links between them."""

    nodes: int
    gpus_per_node: int
    gpu_bytes: float
    reserved_bytes: float  # CUDA context, NCCL buffers, fragmentation
    in_node: float  # bus bandwidth of an all-reduce in a node, bytes per second
    over_nodes: float  # the same over all nodes
    latency_seconds: float  # of one message
    samples_per_second: float  # of one GPU without communication

    @property
    def world_size(self) -> int:
        """Return the number of processes, one per GPU."""
        return self.nodes * self.gpus_per_node


# ---- the simulated steps -------------------------------------------------------------------------
# Simulates a step of DDP, HSDP or FSDP2. Arguments: the kind, the nodes, the GPUs of each, the
# micro-batch size and the accumulation.
TakeStep = Callable[[str, int, int, int, int], Simulation]


def simulated_steps(config: Config, arguments: list[str]) -> TakeStep:
    """Return a function that simulates a step of this run, each once.

    Args:
        config: of the run.
        arguments: the command line that config was read from.
    """
    simulator = Simulator(config, arguments)

    @cache
    def take(kind: str, nodes: int, gpus: int, micro_batch: int, accumulation: int) -> Simulation:
        layout = BatchLayout(
            global_batch_size=nodes * gpus * micro_batch * accumulation,
            micro_batch_size=micro_batch,
            world_size=nodes * gpus,
            accumulation=accumulation,
        )
        return simulator.step(config_name(kind, nodes, gpus), nodes, gpus, layout)

    return take


def share_of(global_batch: int, world_size: int) -> int:
    """Return the samples of a GPU in a step; refuse parts that are not equal, or empty."""
    batches = BatchesConfig(global_batch_size=global_batch)
    return batch_layout(batches, world_size).micro_batch_size


def largest_that_fits(
    take: TakeStep, kind: str, cluster: Cluster, global_batch: int, limits: dict[Any, float]
) -> Simulation | None:
    """Return the step with the largest micro-batch that fits into a GPU, or else one of 1 sample.

    None if it is known that none fits.

    Of a step that does not fit, the activations shrink at most in proportion to the micro-batch and
    the rest does not, which excludes more sizes.

    Args:
        take: simulates a step.
        kind: of KINDS.
        cluster: that it is taken on.
        global_batch: on all GPUs.
        limits: of the micro-batch, to which those found here are added; a limit on a larger cluster
            is one on this, too, since a GPU holds the same there or smaller shards.
    """
    nodes, gpus = cluster.nodes, cluster.gpus_per_node
    share = share_of(global_batch, cluster.world_size)
    key = (kind, nodes * gpus > 1)
    if limits.get(key, share) < 1:
        return None
    while True:
        limit = limits.get(key, share)
        sizes = [size for size in range(1, share + 1) if share % size == 0 and size <= limit]
        micro_batch = max(sizes, default=1)
        step = take(kind, nodes, gpus, micro_batch, share // micro_batch)
        if fits(step, cluster):
            return step
        activations = step.memory_bytes["activations"]
        left = cluster.gpu_bytes - cluster.reserved_bytes - (step.peak_bytes - activations)
        limits[key] = min(micro_batch - 1, micro_batch * left / max(1, activations))
        if micro_batch == 1:
            return step


def fits(step: Simulation, cluster: Cluster) -> bool:
    """Return whether a GPU has the memory for a step."""
    return step.peak_bytes + cluster.reserved_bytes <= cluster.gpu_bytes


def host_bytes(kind: str, step: Simulation) -> int:
    """Return the host memory that the start takes on the first node.

    With DDP each process builds the model there and moves it. With sharding only rank 0 does, and
    scatters it weight by weight; other nodes hold none of it (sharded_start.py).
    """
    return step.model_bytes * (step.gpus_per_node if kind == "DDP" else 1)


# ---- time ----------------------------------------------------------------------------------------
def step_seconds(kind: str, step: Simulation, cluster: Cluster) -> dict[str, float]:
    """Estimate the seconds of a step: computation, communication, and both with their overlap.

    A collective takes its bytes through a ring, and for each message a latency proportional to log2
    of the number of GPUs. DDP's communication overlaps the backward of the last micro-batch, except
    for the last bucket; that of sharding overlaps all computation, except for one block.
    """
    micro_batch_seconds = step.micro_batch / cluster.samples_per_second
    compute = micro_batch_seconds * step.accumulation
    communicate = sum(collective_seconds(one, cluster) for one in step.collectives)
    reduces = "all-reduce" if kind == "DDP" else "reduce-scatter"  # by bucket or block
    messages = max((one.number for one in step.collectives if one.operation == reduces), default=1)
    if kind == "DDP":
        messages = max(1, messages - 1)  # one is of the step's sums
        overlapped = BACKWARD_SHARE * micro_batch_seconds
    else:
        overlapped = compute
    hidden = min(communicate * (1 - 1 / messages), overlapped)
    seconds = compute + communicate - hidden
    return {
        "compute": compute,
        "communicate": communicate,
        "step": seconds,
        "efficiency": compute / seconds,
    }


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Estimate the seconds of the collectives of one kind in a step.

    In a ring over nodes, a node sends as much over the network as one of its GPUs; if the groups
    have not all GPUs of a node, several rings share its link.
    """
    bandwidth = cluster.in_node
    if not collective.is_in_node:
        bandwidth = cluster.over_nodes * collective.group_per_node / cluster.gpus_per_node
    hops = math.ceil(math.log2(max(2, collective.group_size)))
    latency = cluster.latency_seconds * collective.number * hops
    return collective.sent_bytes / bandwidth + latency


# ---- the choice ----------------------------------------------------------------------------------
def choose(
    take: TakeStep,
    cluster: Cluster,
    global_batch: int,
    kinds: tuple[str, ...],
    limits: dict[Any, float],
    *,
    tries_all: bool,
) -> dict[str, Any]:
    """Predict each kind, and choose the simplest that fits and is within 10 % of the fastest.

    Args:
        take: simulates a step.
        cluster: for the run.
        global_batch: on all GPUs.
        kinds: of KINDS, those that this torch can simulate.
        limits: of the micro-batch; see largest_that_fits.
        tries_all: go on after a kind than which no other can be faster by 10 %.
    """
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        if kind == "FSDP2" and cluster.world_size == 1:
            continue
        if kind == "HSDP" and 1 in (cluster.nodes, cluster.gpus_per_node):
            continue
        step = largest_that_fits(take, kind, cluster, global_batch, limits)
        if step is None:
            continue
        row = {
            "kind": kind,
            "config": config_name(kind, cluster.nodes, cluster.gpus_per_node),
            "fits": fits(step, cluster),
            "micro_batch": step.micro_batch,
            "accumulation": step.accumulation,
            "memory_bytes": step.peak_bytes,
            "host_bytes": host_bytes(kind, step),
            "sent": step.sent_bytes(),
            **step_seconds(kind, step, cluster),
        }
        rows.append(row)
        if not tries_all and row["fits"] and row["step"] <= similar(row["compute"]):
            break
    fitting = [row for row in rows if row["fits"]]
    shortest = min((row["step"] for row in fitting), default=0.0)
    best = next((row for row in fitting if row["step"] <= similar(shortest)), None)
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "kinds": rows,
        "best": best,
    }


def similar(seconds: float) -> float:
    """Return the longest step that is as good as one of these seconds, if it is simpler."""
    return SIMILAR * max(seconds, SHORT_STEP_SECONDS)


def config_name(kind: str, nodes: int, gpus_per_node: int) -> str:
    """Return the name of the accelerate config."""
    if nodes == 1:
        name = "gpu" if gpus_per_node == 1 else "multi_gpu"
        return name if kind == "DDP" else "fsdp2"
    return {"DDP": "multi_node", "HSDP": "multi_node_hsdp", "FSDP2": "multi_node_fsdp2"}[kind]


def scaling(
    take: TakeStep, cluster: Cluster, global_batch: int, kinds: tuple[str, ...] = KINDS
) -> list[dict[str, Any]]:
    """Predict 1, 2, 4, ... GPUs of a node, then nodes, up to the cluster, with one global batch."""
    sizes = [(1, gpus) for gpus in _doubled(cluster.gpus_per_node)]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in _doubled(cluster.nodes)[1:]]
    limits: dict[Any, float] = {}
    plans = []
    for nodes, gpus in reversed(sizes):  # a micro-batch too large for many GPUs is so for fewer
        part = replace(cluster, nodes=nodes, gpus_per_node=gpus)
        if part == cluster or global_batch % part.world_size == 0:
            tries_all = part == cluster
            plans.append(choose(take, part, global_batch, kinds, limits, tries_all=tries_all))
    return plans[::-1]


def _doubled(last: int) -> list[int]:
    """Return 1, 2, 4, ... and the last."""
    return [2**k for k in range(last.bit_length()) if 2**k < last] + [last]


def fewest(plans: list[dict[str, Any]]) -> int | None:
    """Return the index of the fewest GPUs that are about as fast as any; None if nothing fits."""
    steps = {at: plan["best"]["step"] for at, plan in enumerate(plans) if plan["best"]}
    shortest = min(steps.values(), default=0.0)
    return next((at for at, step in steps.items() if step <= SIMILAR * shortest), None)


def advice(plans: list[dict[str, Any]], micro_batch_size: int) -> list[str]:
    """Return what to do, in sentences.

    Args:
        plans: for a growing number of GPUs; the last is for the whole cluster.
        micro_batch_size: of the config; 0 for a rank's whole part of the global batch.
    """
    at = fewest(plans)
    if at is None:
        return ["No config fits: use more or larger GPUs, or a smaller model."]
    plan, best = plans[at], plans[at]["best"]
    share = best["micro_batch"] * best["accumulation"]
    option = ""
    if min(micro_batch_size or share, share) != best["micro_batch"]:
        option = f" with --batches.micro_batch_size {best['micro_batch']}"
    sentences = [f"Choose accelerate_configs/{best['config']}.yaml{option}."]
    if at and (alone := plans[0]["best"]):
        ratio = alone["step"] / best["step"]
        sentences.append(f"{_gpus(plan)} GPUs are {ratio:.3g} times as fast as one.")
    more = next((plan for plan in plans[at + 1 :] if plan["best"]), None)
    if more:
        larger = more["best"]
        saved = best["compute"] - larger["compute"]
        added = larger["step"] - best["step"] + saved
        helps = "not" if added > saved else "hardly"
        sentences.append(
            f"More GPUs would {helps} help: per step, {_gpus(more)} in place of {_gpus(plan)} save"
            f" {_duration(saved)} of computation and add {_duration(added)} of communication."
        )
    sentences.append(
        f"The start takes {best['host_bytes'] / GB:.3g} GB of host memory on"
        f" {'each' if best['kind'] == 'DDP' else 'the first'} node."
    )
    if best["step"] < SHORT_STEP_SECONDS:
        sentences.append(
            "A step this short mostly waits for Python and for data, which are not predicted: give"
            " --samples-per-second, as a run on one GPU reports it."
        )
    sentences.append("Steps and efficiency are estimates.")
    return sentences


def _gpus(plan: dict[str, Any]) -> int:
    return plan["nodes"] * plan["gpus_per_node"]


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: argparse.Namespace, settings: list[str]) -> None:
    """Predict and print."""
    typed = ["--config", arguments.config, *settings]
    config = parse(typed)
    measured: dict[str, float] = {}
    if arguments.measured:
        if not Path(arguments.measured).is_file():
            raise ConfigError(f"{arguments.measured} is not a file; preflight.py writes it.")
        measured = json.loads(Path(arguments.measured).read_text(encoding="utf-8"))
    for name in ("nodes", "gpus_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, but must be at least 1.")
    nodes, gpus = arguments.nodes, arguments.gpus_per_node
    if arguments.simulate:
        simulated = Simulator(config, typed).step(arguments.where, nodes, gpus)
        if arguments.json:
            print(json.dumps(simulated.as_json()))
        else:
            show_simulation(simulated, arguments.gpu_memory_gb * GB, arguments.reserved_gb * GB)
        return
    global_batch = config.batches.global_batch_size
    take = simulated_steps(config, typed)
    model = take("DDP", nodes, gpus, share_of(global_batch, nodes * gpus), 1)
    speed = arguments.samples_per_second
    origin = "given"
    if speed is None:
        if model.flops_per_sample == 0:
            raise ConfigError(
                "torch counts 0 FLOPs in this model; give --samples-per-second, as a run on one GPU"
                " reports it."
            )
        speed = arguments.gpu_tflops * 1e12 * arguments.mfu / model.flops_per_sample
        origin = f"{arguments.mfu:.0%} of {arguments.gpu_tflops:g} TFLOPS, assumed"
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus,
        gpu_bytes=arguments.gpu_memory_gb * GB,
        reserved_bytes=arguments.reserved_gb * GB,
        in_node=measured.get("in_node_bytes_per_second") or arguments.in_node_gb_per_second * GB,
        over_nodes=measured.get("over_nodes_bytes_per_second")
        or arguments.over_nodes_gb_per_second * GB,
        latency_seconds=arguments.latency_us * 1e-6,
        samples_per_second=speed,
    )
    refusal = sharding_refusal()
    plans = scaling(take, cluster, global_batch, ("DDP",) if refusal else KINDS)
    sentences = advice(plans, config.batches.micro_batch_size)
    if refusal:
        sentences.append(f"FSDP2 and HSDP are not predicted: {refusal}")
    if arguments.json:
        names = ("parameters", "model_bytes", "flops_per_sample")
        known = {"model": {name: getattr(model, name) for name in names}}
        known |= {"cluster": asdict(cluster), "plans": plans, "advice": sentences}
        print(json.dumps(known))
        return
    show(model, cluster, plans, global_batch, origin, sentences)


def show(
    model: Simulation,
    cluster: Cluster,
    plans: list[dict[str, Any]],
    global_batch: int,
    origin: str,
    sentences: list[str],
) -> None:
    """Print the model, the steps that were predicted for a growing number of GPUs, and the advice.

    Args:
        model: any step of it.
        cluster: the whole one.
        plans: for a growing number of GPUs; the last is for the whole cluster.
        global_batch: the same for all.
        origin: of samples_per_second.
        sentences: the advice.
    """
    console, facts = _console_and_grid()
    facts.add_row("model", f"{_rounded(model.parameters)} parameters")
    facts.add_row("one sample", f"{_rounded(model.flops_per_sample)}FLOPs")
    speed = _rounded(cluster.samples_per_second)
    facts.add_row("one GPU", f"{speed} samples per second ({origin})")
    facts.add_row(
        "all-reduce",
        f"{cluster.in_node / GB:.3g} GB/s in a node, {cluster.over_nodes / GB:.3g} GB/s over nodes",
    )
    facts.add_row("global batch", f"{global_batch}")
    console.print(facts)

    table = _table(
        "With the largest micro-batch that fits",
        "GPUs",
        "config",
        "GB per\nGPU",
        "micro-\nbatch",
        "accumu-\nlation",
        "GB sent\nby a GPU",
        "over the\nnetwork",
        "step",
        "effi-\nciency",
    )
    for plan in plans:
        gpus = f"{plan['nodes']} x {plan['gpus_per_node']}"
        if not plan["kinds"]:
            table.add_row(gpus, "none fits")
        for row in plan["kinds"]:
            cells = [
                gpus,
                row["config"],
                f"{(row['memory_bytes'] + cluster.reserved_bytes) / GB:.1f}",
            ]
            if row["fits"]:
                cells += [
                    f"{row['micro_batch']}",
                    f"{row['accumulation']}",
                    f"{sum(row['sent'].values()) / GB:.2f}",
                    f"{row['sent']['network'] / GB:.2f}",
                    _duration(row["step"]),
                    f"{row['efficiency']:.0%}",
                ]
            else:
                cells += ["does not", "fit"]
            table.add_row(*cells)
    console.print(table)
    console.print()
    for sentence in sentences:
        console.print(sentence)


def show_simulation(simulation: Simulation, gpu_bytes: float, reserved_bytes: float) -> None:
    """Print the memory of a GPU at the peak, and the collectives of a step."""
    s = simulation
    console, facts = _console_and_grid()
    world_size = s.nodes * s.gpus_per_node
    facts.add_row(
        "simulated",
        f"one step of rank 0 of {world_size}, on {s.nodes} x {s.gpus_per_node} GPUs",
    )
    facts.add_row("where", f"{s.where}, precision {s.precision}")
    facts.add_row("model", f"{_rounded(s.parameters)} parameters")
    facts.add_row(
        "batch",
        f"global {s.micro_batch * world_size * s.accumulation} = micro-batch {s.micro_batch} x"
        f" processes {world_size} x accumulation {s.accumulation}",
    )
    console.print(facts)
    memory = _table("Memory of a GPU at the peak, in GB", *s.memory_bytes, "sum")
    sizes = [*s.memory_bytes.values(), s.peak_bytes]
    memory.add_row(*(f"{size / GB:.3g}" for size in sizes))
    console.print(memory)
    if s.collectives:
        collectives = _table(
            "Collectives of a GPU in a step",
            "operation",
            "over GPUs",
            "number",
            "size",
            "sent by\na GPU",
        )
        for found in s.collectives:
            collectives.add_row(
                found.operation,
                found.group,
                f"{found.number}",
                f"{_rounded(found.size_bytes)}B",
                f"{_rounded(found.sent_bytes)}B",
            )
        console.print(collectives)
    console.print()
    needed = s.peak_bytes + reserved_bytes
    fits = "fits" if needed <= gpu_bytes else "does not fit"
    console.print(
        f"With {reserved_bytes / GB:.3g} GB reserved this {fits} into {gpu_bytes / GB:.3g} GB:"
        f" {needed / GB:.1f} GB."
    )


def _console_and_grid() -> tuple[Any, Any]:
    """Return rich's console, 80 columns wide in a file, and a grid for facts."""
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    return console, Table.grid(padding=(0, 2))


def _table(title: str, *columns: str) -> Any:
    """Return a table of rich with a title, whose first column is text."""
    first, *others = columns
    return Table(
        Column(first, no_wrap=True),
        *(Column(name, justify="right") for name in others),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )


def _rounded(number: float) -> str:
    """Return three digits and the prefix of a unit: 1.01 G, 836."""
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
    unit, size = next((pair for pair in units if number >= pair[1]), units[-1])
    return f"{number / size:.3g} {unit}".rstrip()


def _duration(seconds: float) -> str:
    """Return three digits and a unit: 19.2 s, 613 ms, 21.4 us."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"


if ARGUMENTS:
    run(main, *ARGUMENTS)
