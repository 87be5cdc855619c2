"""Predict memory, traffic and step time for a cluster, and its config.

    python -m my_project planner --config configs/image_classification.yaml \
        --nodes 4 --gpus-per-node 8 --gpu-memory-gb 80

It prints each config for the cluster, the same global batch on fewer GPUs, and which to use; also
where more GPUs would not help. The cluster need not exist. One step of the recipe's model on fake
tensors, which take no memory, gives its parameters, activations and FLOPs (cost.py). The rest
is arithmetic; each formula has its source in its function. The speed of a GPU comes from
--samples-per-second, measured on one GPU, or else from --gpu-tflops and --mfu; the bandwidths come
from preflight.py (--measured runs/preflight.json) or from options.

With --simulate it takes one step of rank 0 on the whole cluster instead, with an accelerate config:
real sharding or DDP, on fake tensors in one process; it prints the memory of a GPU and every
collective (simulate.py).

    python -m my_project planner --simulate --config configs/image_classification.yaml \
        --nodes 64 --gpus-per-node 8 --where multi_node_hsdp

Tests compare the predicted memory with torch and with the simulated step, and the predicted traffic
with the interface counters of two hosts. Step times are estimates.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..cli import make_parser, run
from ..command_line import parse
from ..config import ConfigError


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
    add("precision", choices=("no", "bf16", "fp16"), default="bf16")
    add("samples-per-second", type=float, help="speed of one GPU, as a run on one reports it")
    add("gpu-tflops", type=float, default=989.0, help="peak by the data sheet; an H100's in bf16")
    add("mfu", type=float, default=0.4, help="MFU, if no speed is given")
    add("measured", default="", help="file with measured bandwidths: runs/preflight.json")
    add("in-node-gb-per-second", type=float, default=300.0, help="all-reduce bus bandwidth")
    add("over-nodes-gb-per-second", type=float, default=40.0, help="the same over all nodes")
    add("latency-us", type=float, default=20.0, help="latency of one message over the network")
    add("simulate", action="store_true", help="simulate one step in place of predicting")
    add("where", default="multi_node", help="simulate: accelerate_configs/NAME.yaml, or a path")
    add("json", action="store_true")
    return options


ARGUMENTS = parser().parse_known_args() if __name__ == "__main__" else None  # before torch

from ..cost import Model, inspect_recipe
from .simulate import Simulation, simulate

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


# ---- memory --------------------------------------------------------------------------------------
def shards(kind: str, cluster: Cluster) -> int:
    """Return the number of GPUs that the state is divided over."""
    return {"DDP": 1, "HSDP": cluster.gpus_per_node, "FSDP2": cluster.world_size}[kind]


def memory_bytes(
    kind: str, model: Model, cluster: Cluster, micro_batch: int, accumulation: int = 1
) -> float:
    """Predict the peak memory of a GPU.

    - Weights, gradients and optimizer state are float32 and divided by the shards (ZeRO, section 3,
      arxiv.org/abs/1910.02054). Accumulated gradients are not sharded. The root, the current block
      and the prefetched next block are gathered, in the precision of the forward.
    - DDP's gradients are in its buckets, which it keeps: once, or twice when they are accumulated
      with find_unused_parameters.
    - Otherwise gradients are allocated while activations are freed, so the larger of the two
      counts; with DDP or accumulation, both count.
    - Sharded gradients are copied in float32 to be reduced, a block at a time and the root at the
      end: the peak can be in the second block of the backward pass, in its last, or in the root.
    """
    s = shards(kind, cluster)
    held = model.activations if s == 1 else model.sharded_activations
    activations = held.bytes_of(micro_batch)
    gradients = 4 * model.trained / s
    if accumulation > 1:
        gradients = 4 * model.trained
    state = 4 * model.parameters / s + model.optimizer_bytes * model.trained / s
    gathered = 0 if s == 1 else model.weight_bytes * (model.root + model.two_blocks)
    in_buckets = kind == "DDP" and cluster.world_size > 1
    if in_buckets and accumulation > 1 and model.finds_unused:
        gradients *= 2
    if accumulation > 1 or in_buckets:
        peak = activations + gradients
    else:
        peak = max(activations, gradients)
    if s > 1 and accumulation == 1:
        copied = 4 * model.block
        in_second = model.in_second_block.bytes_of(micro_batch) + copied * (1 + 1 / s)
        # its own gradients come after its activations, and no other block after it
        in_last = max(0, model.in_last_block.bytes_of(micro_batch) - copied / s)
        in_last += copied + gradients - model.weight_bytes * (model.two_blocks - model.block)
        peak = max(peak, in_second, in_last, 4 * model.root + gradients)
    return state + model.buffer_bytes + gathered + peak


def start_bytes(kind: str, model: Model, cluster: Cluster) -> dict[str, float]:
    """Predict the memory that the start takes at its peak, on a GPU and on the first node.

    - DDP: each process builds the model in host memory, then moves it.
    - With sharding, rank 0 builds it in host memory and scatters it weight by weight; a weight is
      at most the largest block or the root. Other nodes hold none of it (sharded_start.py).
    """
    s = shards(kind, cluster)
    if kind == "DDP":
        whole = 4.0 * model.parameters + model.buffer_bytes
        return {"gpu": whole, "host": whole * cluster.gpus_per_node}
    one_weight = 4 * max(model.root, model.block)
    return {
        "gpu": 4 * model.parameters / s + model.buffer_bytes + one_weight,
        "host": 4.0 * model.parameters + model.buffer_bytes,
    }


def largest_micro_batch(
    kind: str, model: Model, cluster: Cluster, global_batch: int
) -> tuple[int, int]:
    """Find the largest micro-batch that fits into the memory of a GPU.

    Returns:
        The micro-batch size and the accumulation: global batch = micro-batch x world size x
        accumulation; (0, 0) if none fits.

    Raises:
        ConfigError: the global batch is not a multiple of the world size.
    """
    if global_batch % cluster.world_size:
        raise ConfigError(
            f"the global batch of {global_batch} is not a multiple of {cluster.nodes} nodes x"
            f" {cluster.gpus_per_node} GPUs = {cluster.world_size}; change"
            " batches.global_batch_size or the nodes."
        )
    per_gpu = global_batch // cluster.world_size
    available = cluster.gpu_bytes - cluster.reserved_bytes
    divisors = [size for size in range(1, per_gpu + 1) if per_gpu % size == 0]
    for micro_batch in reversed(divisors):
        accumulation = per_gpu // micro_batch
        if memory_bytes(kind, model, cluster, micro_batch, accumulation) <= available:
            return micro_batch, accumulation
    return 0, 0


# ---- traffic -------------------------------------------------------------------------------------
def sent_bytes(
    kind: str, model: Model, cluster: Cluster, accumulation: int = 1
) -> dict[str, float]:
    """Predict the bytes that a GPU sends per step, in its node and over the network.

    - DDP: once per step, a ring all-reduce of float32 gradients sends 2 (N-1)/N of their size
      (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
    - Sharded over S GPUs: each micro-batch gathers the weights of the blocks for forward and
      backward and the root once, (S-1)/S of 2 bytes per parameter each (4 in float32); once per
      step the gradients are reduce-scattered, 4 bytes.
    - HSDP shards in each node, then all-reduces the shards over the nodes.

    In a ring over all nodes, a node sends as much over the network as one of its GPUs.
    """
    n = cluster.world_size
    s = shards(kind, cluster)
    r = cluster.nodes
    if kind == "DDP":
        ring = 2 * (n - 1) / n * 4 * model.trained
        return {"in node": ring, "network": ring if r > 1 else 0.0}
    gathered = model.weight_bytes * (2 * model.parameters - model.root) * accumulation
    sharded = (s - 1) / s * (gathered + 4 * model.trained)
    over_nodes = 2 * (r - 1) / r * 4 * model.trained / s if kind == "HSDP" else 0.0
    if kind == "HSDP" or r == 1:
        return {"in node": sharded, "network": over_nodes}
    return {"in node": sharded, "network": sharded}


# ---- time ----------------------------------------------------------------------------------------
def step_seconds(
    kind: str, model: Model, cluster: Cluster, micro_batch: int, accumulation: int
) -> dict[str, float]:
    """Estimate the seconds of a step: computation, communication, and both with their overlap.

    DDP's communication overlaps the backward of the last micro-batch, except for the last bucket;
    that of sharding overlaps all computation, except for one block. Each message has a latency
    proportional to log2 of the number of GPUs; a message is a bucket of 25 MB in DDP, a block in
    sharding.
    """
    compute = micro_batch * accumulation / cluster.samples_per_second
    if cluster.world_size == 1:
        return {"compute": compute, "communicate": 0.0, "step": compute}
    bandwidth = cluster.over_nodes if cluster.nodes > 1 else cluster.in_node
    sent = sent_bytes(kind, model, cluster, accumulation)

    def latency(messages: int, gpus: int) -> float:
        return cluster.latency_seconds * messages * math.ceil(math.log2(max(2, gpus)))

    if kind == "DDP":
        buckets = max(1, math.ceil(4 * model.trained / 25e6))
        communicate = sent["in node"] / bandwidth + latency(buckets, cluster.world_size)
        overlappable = communicate * (1 - 1 / buckets)
        hidden = min(overlappable, BACKWARD_SHARE * compute / accumulation)
    else:
        blocks = model.blocks + 1  # with the root
        shard_bandwidth = bandwidth if kind == "FSDP2" else cluster.in_node
        communicate = sent["in node"] / shard_bandwidth
        communicate += latency(blocks * (2 * accumulation + 1), shards(kind, cluster))
        if kind == "HSDP":  # the GPUs of a node share its network link
            communicate += sent["network"] * cluster.gpus_per_node / cluster.over_nodes
            communicate += latency(blocks, cluster.nodes)
        hidden = min(communicate * (1 - 1 / blocks), compute)
    return {
        "compute": compute,
        "communicate": communicate,
        "step": compute + communicate - hidden,
    }


# ---- the choice ----------------------------------------------------------------------------------
def choose(model: Model, cluster: Cluster, global_batch: int) -> dict[str, Any]:
    """Predict each kind, and choose the simplest that fits and is within 10 % of the fastest."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        if (kind != "DDP" and cluster.world_size == 1) or (kind == "HSDP" and cluster.nodes == 1):
            continue
        micro_batch, accumulation = largest_micro_batch(kind, model, cluster, global_batch)
        peak = memory_bytes(kind, model, cluster, max(1, micro_batch), max(1, accumulation))
        row: dict[str, Any] = {
            "kind": kind,
            "config": config_name(kind, cluster),
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "memory_bytes": peak,
            "start_bytes": start_bytes(kind, model, cluster),
        }
        if micro_batch:
            times = step_seconds(kind, model, cluster, micro_batch, accumulation)
            ideal = global_batch / cluster.samples_per_second / cluster.world_size
            row |= times | {
                "sent": sent_bytes(kind, model, cluster, accumulation),
                "efficiency": ideal / times["step"],
            }
        rows.append(row)
    fitting = [row for row in rows if row["micro_batch"]]
    shortest = min((row["step"] for row in fitting), default=0.0)
    best = next((row for row in fitting if row["step"] <= SIMILAR * shortest), None)
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "kinds": rows,
        "best": best,
    }


def config_name(kind: str, cluster: Cluster) -> str:
    """Return the file name of the accelerate config."""
    if cluster.nodes == 1:
        name = "gpu" if cluster.gpus_per_node == 1 else "multi_gpu"
        return f"{name}.yaml" if kind == "DDP" else "fsdp2.yaml"
    names = {"DDP": "multi_node", "HSDP": "multi_node_hsdp", "FSDP2": "multi_node_fsdp2"}
    return f"{names[kind]}.yaml"


def scaling(model: Model, cluster: Cluster, global_batch: int) -> list[dict[str, Any]]:
    """Predict 1, 2, 4, ... GPUs of a node, then nodes, up to the cluster, with one global batch."""
    sizes = [(1, gpus) for gpus in _doubled(cluster.gpus_per_node)]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in _doubled(cluster.nodes)[1:]]
    plans = []
    for nodes, gpus in sizes:
        part = replace(cluster, nodes=nodes, gpus_per_node=gpus)
        try:
            plans.append(choose(model, part, global_batch))
        except ConfigError:
            if part == cluster:
                raise
    return plans


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
    sentences = [f"Choose accelerate_configs/{best['config']}{option}."]
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
            f"{_beyond(plan, more)} would {helps} help: per step, {_gpus(more)} GPUs in place of"
            f" {_gpus(plan)} save {_duration(saved)} of computation and add {_duration(added)} of"
            " communication."
        )
    start = best["start_bytes"]
    sentences.append(
        f"The start takes {start['host'] / GB:.3g} GB of host memory on"
        f" {'each' if best['kind'] == 'DDP' else 'the first'} node, and"
        f" {start['gpu'] / GB:.3g} GB per GPU."
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


def _beyond(plan: dict[str, Any], more: dict[str, Any]) -> str:
    """Name what the larger plan has more than the other."""
    if _gpus(plan) == 1:
        return "A second GPU"
    if plan["nodes"] == 1:
        return "A second node" if more["nodes"] > 1 else f"More than {_gpus(plan)} GPUs"
    return f"More than {plan['nodes']} nodes"


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
    if arguments.simulate:
        simulated = simulate(
            config, typed, arguments.where, arguments.nodes, arguments.gpus_per_node
        )
        if arguments.json:
            print(json.dumps(simulated.as_json()))
        else:
            show_simulation(simulated, arguments.gpu_memory_gb * GB, arguments.reserved_gb * GB)
        return
    model = inspect_recipe(config, arguments.precision)
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
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        gpu_bytes=arguments.gpu_memory_gb * GB,
        reserved_bytes=arguments.reserved_gb * GB,
        in_node=measured.get("in_node_bytes_per_second") or arguments.in_node_gb_per_second * GB,
        over_nodes=measured.get("over_nodes_bytes_per_second")
        or arguments.over_nodes_gb_per_second * GB,
        latency_seconds=arguments.latency_us * 1e-6,
        samples_per_second=speed,
    )
    plans = scaling(model, cluster, config.batches.global_batch_size)
    sentences = advice(plans, config.batches.micro_batch_size)
    if arguments.json:
        known = {"model": asdict(model), "cluster": asdict(cluster)}
        print(json.dumps(known | {"plans": plans, "advice": sentences}))
        return
    show(model, cluster, plans, config.batches.global_batch_size, origin, sentences)


def show(
    model: Model,
    cluster: Cluster,
    plans: list[dict[str, Any]],
    global_batch: int,
    origin: str,
    sentences: list[str],
) -> None:
    """Print the model, each kind on the whole cluster, the scaling with the GPUs, and the advice.

    Args:
        model: of the recipe.
        cluster: the whole one.
        plans: for a growing number of GPUs; the last is for the whole cluster.
        global_batch: the same for all.
        origin: of samples_per_second.
        sentences: the advice.
    """
    console, facts = _console_and_grid()
    facts.add_row(
        "model",
        f"{_rounded(model.parameters)} parameters, {_rounded(model.trained)} trained; the largest"
        f" block {_rounded(model.block)}",
    )
    facts.add_row(
        "one sample",
        f"{_rounded(model.activations.bytes_per_sample)}B of activations,"
        f" {_rounded(model.flops_per_sample)}FLOPs",
    )
    speed = _rounded(cluster.samples_per_second)
    facts.add_row("one GPU", f"{speed} samples per second ({origin})")
    facts.add_row(
        "all-reduce",
        f"{cluster.in_node / GB:.3g} GB/s in a node, {cluster.over_nodes / GB:.3g} GB/s over nodes",
    )
    facts.add_row("global batch", f"{global_batch}")
    console.print(facts)

    whole = _table(
        f"Each config on {cluster.nodes} x {cluster.gpus_per_node} GPUs, with the largest"
        " micro-batch that fits",
        "config",
        "GB per\nGPU",
        "micro-\nbatch",
        "accumu-\nlation",
        "GB sent\nby a GPU",
        "over the\nnetwork",
        "step",
        "effi-\nciency",
    )
    for row in plans[-1]["kinds"]:
        config = row["config"].removesuffix(".yaml")
        memory_gb = f"{(row['memory_bytes'] + cluster.reserved_bytes) / GB:.1f}"
        if not row["micro_batch"]:
            whole.add_row(config, memory_gb, "does not", "fit")
            continue
        whole.add_row(
            config,
            memory_gb,
            f"{row['micro_batch']}",
            f"{row['accumulation']}",
            f"{row['sent']['in node'] / GB:.2f}",
            f"{row['sent']['network'] / GB:.2f}",
            _duration(row["step"]),
            f"{row['efficiency']:.0%}",
        )
    console.print(whole)
    parts = _table(
        "The same global batch on one GPU and more",
        "GPUs",
        "config",
        "micro-\nbatch",
        "accumu-\nlation",
        "step",
        "samples per\nsecond",
        "effi-\nciency",
    )
    for plan in plans:
        best = plan["best"]
        gpus = f"{plan['nodes']} x {plan['gpus_per_node']}"
        if best is None:
            parts.add_row(gpus, "does not fit")
            continue
        parts.add_row(
            gpus,
            best["config"].removesuffix(".yaml"),
            f"{best['micro_batch']}",
            f"{best['accumulation']}",
            _duration(best["step"]),
            _rounded(global_batch / best["step"]),
            f"{best['efficiency']:.0%}",
        )
    console.print(parts)
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
    memory = _table("Memory of a GPU at the peak of a step, in GB", *s.memory_bytes, "sum")
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
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    return console, Table.grid(padding=(0, 2))


def _table(title: str, *columns: str) -> Any:
    """Return a table of rich with a title, whose first column is text."""
    from rich.table import Column, Table

    first, *others = columns
    return Table(
        Column(first, no_wrap=True),
        *(Column(name, justify="right") for name in others),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
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
