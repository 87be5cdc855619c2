"""Plan a run on a cluster that is not here: memory, traffic, step time, and which config to choose.

    python -m my_project planner --config configs/image_classification.yaml \
        --nodes 64 --gpus-per-node 8 --gpu-memory-gb 80

The recipe's model is built and takes one step without data or memory of its size (torch's fake
tensors), which gives its parameters, what it keeps for the backward and its floating-point
operations. The rest is arithmetic, each formula in its function with its source. How fast a GPU
computes is given (--samples-per-second, measured on one GPU; else --gpu-tflops and --utilisation),
how fast the links are is measured by preflight.py (--measured runs/preflight.json) or given.

What it predicts of memory and traffic is compared with torch and with the interface counters of two
hosts in the tests; step times are estimates, and are said to be.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cli import make_parser, run
from ..config import ConfigError, parse
from ..cost import Model, inspect_recipe

GB = 1e9
KINDS = ("DDP", "HSDP", "FSDP2")
BACKWARD_SHARE = (
    2 / 3
)  # of the time of a micro-batch: two products of matrices where forward has one


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines."""

    nodes: int
    gpus_per_node: int
    gpu_bytes: float
    reserved_bytes: float  # CUDA's context, NCCL's buffers, fragments
    in_node: float  # bus bandwidth of an all-reduce, bytes per second
    over_nodes: float  # the same over all nodes
    latency_seconds: float  # of one message
    samples_per_second: float  # of one GPU that computes alone

    @property
    def processes(self) -> int:
        """One per GPU."""
        return self.nodes * self.gpus_per_node


# ---- memory --------------------------------------------------------------------------------------
def shards(kind: str, cluster: Cluster) -> int:
    """Tell over how many GPUs the state is divided."""
    return {"DDP": 1, "HSDP": cluster.gpus_per_node, "FSDP2": cluster.processes}[kind]


def memory_bytes(
    kind: str, model: Model, cluster: Cluster, micro_batch: int, accumulation: int = 1
) -> float:
    """Predict the most that a GPU holds at once.

    Weights, gradients and the optimizer's state in float32, divided by the shards (ZeRO, section 3,
    arxiv.org/abs/1910.02054); sharded also the root and one block whole, in the precision of the
    forward, and the next block, which is fetched meanwhile. DDP's gradients lie in its own buckets,
    which stay; accumulated, they lie there once, but twice with find_unused_parameters. Without DDP
    they appear while what was kept for the backward goes, so the larger of both counts, but both
    when gradients are accumulated; accumulated gradients are whole also where shards are.
    """
    s = shards(kind, cluster)
    kept = model.kept_bytes + model.kept_bytes_per_sample * micro_batch
    gradients = 4 * model.trained / (1 if accumulation > 1 else s)
    state = 4 * model.parameters / s + model.optimizer_bytes * model.trained / s
    gathered = 0 if s == 1 else 2 * (model.root + 2 * model.block)
    in_buckets = kind == "DDP" and cluster.processes > 1
    both = accumulation > 1 or in_buckets
    if in_buckets and accumulation > 1 and model.finds_unused:
        gradients *= 2
    passing = kept + gradients if both else max(kept, gradients)
    return state + model.buffer_bytes + gathered + passing


def largest_micro_batch(
    kind: str, model: Model, cluster: Cluster, global_batch: int
) -> tuple[int, int]:
    """Find the largest micro-batch that fits.

    Returns:
        It and the accumulation, with which micro-batch x processes x accumulation makes the global
        batch; (0, 0) if none fits.

    Raises:
        ConfigError: the processes do not divide the global batch.
    """
    if global_batch % cluster.processes:
        raise ConfigError(
            f"the global batch of {global_batch} is no multiple of {cluster.nodes} nodes x"
            f" {cluster.gpus_per_node} GPUs = {cluster.processes}; change"
            " batches.global_batch_size or the nodes."
        )
    each = global_batch // cluster.processes
    room = cluster.gpu_bytes - cluster.reserved_bytes
    for micro in sorted((m for m in range(1, each + 1) if each % m == 0), reverse=True):
        if memory_bytes(kind, model, cluster, micro, each // micro) <= room:
            return micro, each // micro
    return 0, 0


# ---- traffic -------------------------------------------------------------------------------------
def sent_bytes(
    kind: str, model: Model, cluster: Cluster, accumulation: int = 1
) -> dict[str, float]:
    """Predict what a GPU sends in a step, in its node and over the network.

    DDP: a ring all-reduce of float32 gradients sends 2 (N-1)/N of their size (Patarasuk and Yuan,
    Bandwidth optimal all-reduce algorithms, 2009), once a step. Sharded over S: each micro-batch
    gathers the weights for forward and backward, (S-1)/S of 2 bytes each time; once a step the
    gradients are scattered, 2 bytes. HSDP: shards in a node, and then all-reduces the shard over
    the nodes. A node sends over the network what one GPU of a ring does, whatever it holds.
    """
    n, s, r = cluster.processes, shards(kind, cluster), cluster.nodes
    if kind == "DDP":
        ring = 2 * (n - 1) / n * 4 * model.trained
        return {"in node": ring, "network": ring if r > 1 else 0.0}
    part = (s - 1) / s
    sharded = part * (4 * model.parameters * accumulation + 2 * model.trained)
    across = 2 * (r - 1) / r * 2 * model.trained / s if kind == "HSDP" else 0.0
    if kind == "HSDP" or r == 1:
        return {"in node": sharded, "network": across}
    return {"in node": sharded, "network": sharded}


# ---- time ----------------------------------------------------------------------------------------
def step_seconds(
    kind: str, model: Model, cluster: Cluster, micro_batch: int, accumulation: int
) -> dict[str, float]:
    """Estimate a step.

    Communication beside the computation costs nothing until it takes longer: DDP has the last
    micro-batch's backward to hide in, and waits at least for its last bucket; sharding has all of
    the time. Each message takes a latency for each doubling of those that take part: DDP sends its
    buckets of 25 MB, sharding its blocks.
    """
    computed = micro_batch * accumulation / cluster.samples_per_second
    if cluster.processes == 1:
        return {"compute": computed, "communicate": 0.0, "step": computed}
    whole = cluster.over_nodes if cluster.nodes > 1 else cluster.in_node
    sent = sent_bytes(kind, model, cluster, accumulation)

    def latency(messages: int, among: int) -> float:
        return cluster.latency_seconds * messages * math.ceil(math.log2(max(2, among)))

    if kind == "DDP":
        buckets = max(1, math.ceil(4 * model.trained / 25e6))
        communicated = sent["in node"] / whole + latency(buckets, cluster.processes)
        beside = communicated * (1 - 1 / buckets)
        hidden = min(beside, BACKWARD_SHARE * computed / accumulation)
    else:
        blocks = model.blocks + 1  # and the root
        inside = whole if kind == "FSDP2" else cluster.in_node
        communicated = sent["in node"] / inside
        communicated += latency(blocks * (2 * accumulation + 1), shards(kind, cluster))
        if kind == "HSDP":  # the GPUs of a node share its way out
            communicated += sent["network"] * cluster.gpus_per_node / cluster.over_nodes
            communicated += latency(blocks, cluster.nodes)
        hidden = min(communicated * (1 - 1 / blocks), computed)
    return {
        "compute": computed,
        "communicate": communicated,
        "step": computed + communicated - hidden,
    }


# ---- the choice ----------------------------------------------------------------------------------
def choose(model: Model, cluster: Cluster, global_batch: int) -> dict[str, Any]:
    """Choose of those that fit the simplest whose step is within a tenth of the shortest."""
    found: list[dict[str, Any]] = []
    for kind in KINDS:
        if (kind != "DDP" and cluster.processes == 1) or (kind == "HSDP" and cluster.nodes == 1):
            continue
        micro, accumulation = largest_micro_batch(kind, model, cluster, global_batch)
        row: dict[str, Any] = {
            "kind": kind,
            "config": config_name(kind, cluster),
            "micro_batch": micro,
            "accumulation": accumulation,
            "memory_bytes": memory_bytes(kind, model, cluster, max(1, micro), max(1, accumulation)),
        }
        if micro:
            times = step_seconds(kind, model, cluster, micro, accumulation)
            alone = global_batch / cluster.samples_per_second / cluster.processes
            row |= times | {
                "sent": sent_bytes(kind, model, cluster, accumulation),
                "efficiency": alone / times["step"],
            }
        found.append(row)
    fits = [row for row in found if row["micro_batch"]]
    shortest = min((row["step"] for row in fits), default=0.0)
    best = next((row for row in fits if row["step"] <= 1.1 * shortest), None)
    return {"nodes": cluster.nodes, "kinds": found, "best": best}


def config_name(kind: str, cluster: Cluster) -> str:
    """Name the accelerate config."""
    if cluster.nodes == 1:
        one = "gpu" if cluster.gpus_per_node == 1 else "multi_gpu"
        return f"{one}.yaml" if kind == "DDP" else "fsdp2.yaml"
    return {"DDP": "multi_node", "HSDP": "multi_node_hsdp", "FSDP2": "multi_node_fsdp2"}[
        kind
    ] + ".yaml"


def scaling(model: Model, cluster: Cluster, global_batch: int) -> list[dict[str, Any]]:
    """Choose for 1, 2, 4, ... nodes and for as many as were asked for; the batch stays."""
    counts = [2**k for k in range(cluster.nodes.bit_length()) if 2**k < cluster.nodes]
    plans = []
    for nodes in [*counts, cluster.nodes]:
        try:
            plans.append(choose(model, replace(cluster, nodes=nodes), global_batch))
        except ConfigError:
            if nodes == cluster.nodes:
                raise
    return plans


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: argparse.Namespace, settings: list[str]) -> None:
    """Plan and print."""
    config = parse(["--config", arguments.config, *settings])
    measured: dict[str, float] = {}
    if arguments.measured:
        if not Path(arguments.measured).is_file():
            raise ConfigError(f"{arguments.measured} is no file; preflight.py writes it.")
        measured = json.loads(Path(arguments.measured).read_text(encoding="utf-8"))
    for name in ("nodes", "gpus_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, but must be at least 1.")
    model = inspect_recipe(config, arguments.precision)
    speed, told = arguments.samples_per_second, "given"
    if speed is None:
        if model.operations_per_sample == 0:
            raise ConfigError(
                "torch counts no operations in this model; give --samples-per-second, as a run on"
                " one GPU reports it."
            )
        speed = arguments.gpu_tflops * 1e12 * arguments.utilisation / model.operations_per_sample
        told = f"{arguments.utilisation:.0%} of {arguments.gpu_tflops:g} TFLOPS, assumed"
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
    if arguments.json:
        print(json.dumps({"model": vars(model), "cluster": vars(cluster), "plans": plans}))
        return
    show(model, cluster, plans, config.batches.global_batch_size, told)


def show(
    model: Model, cluster: Cluster, plans: list[dict[str, Any]], global_batch: int, told: str
) -> None:
    """Print the model, the kinds at the full size, and the scaling up to it."""
    import sys

    from rich.console import Console
    from rich.table import Column, Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{model.parameters / 1e6:.2f} M parameters ({model.trained / 1e6:.2f} M trained), largest"
        f" block {model.block / 1e6:.2f} M; per sample {model.kept_bytes_per_sample / 1e6:.2f} MB"
        f" kept for the backward and {model.operations_per_sample / 1e9:.3g} GFLOP;"
        f" {cluster.samples_per_second:.3g} samples per second and GPU ({told}); all-reduce"
        f" {cluster.in_node / GB:.3g} GB/s in a node, {cluster.over_nodes / GB:.3g} over nodes;"
        f" global batch {global_batch}",
        soft_wrap=True,
    )
    full = plans[-1]
    table = Table(Column("config", no_wrap=True), "GB per GPU", "micro-batch",
                  "accumulation", "GB sent per GPU", "over network", "step", "efficiency",
                  title=f"{cluster.nodes} node(s) x {cluster.gpus_per_node} GPUs",
                  title_justify="left")  # fmt: skip
    for row in full["kinds"]:
        known = [row["config"], f"{(row['memory_bytes'] + cluster.reserved_bytes) / GB:.1f}"]
        if not row["micro_batch"]:
            table.add_row(*known, "does not fit")
            continue
        table.add_row(*known, str(row["micro_batch"]), str(row["accumulation"]),
                      f"{row['sent']['in node'] / GB:.2f}", f"{row['sent']['network'] / GB:.2f}",
                      f"{row['step'] * 1e3:.1f} ms", f"{row['efficiency']:.0%}")  # fmt: skip
    console.print(table)
    table = Table("nodes", "config", "micro-batch", "accumulation", "step", "samples per second",
                  "efficiency", title="scaling, the global batch unchanged",
                  title_justify="left")  # fmt: skip
    for plan in plans:
        best = plan["best"]
        if best is None:
            table.add_row(str(plan["nodes"]), "does not fit")
            continue
        table.add_row(str(plan["nodes"]), best["config"], str(best["micro_batch"]),
                      str(best["accumulation"]), f"{best['step'] * 1e3:.1f} ms",
                      f"{global_batch / best['step']:.4g}",
                      f"{best['efficiency']:.0%}")  # fmt: skip
    console.print(table)
    if full["best"]:
        console.print(
            f"choose accelerate_configs/{full['best']['config']} with"
            f" --batches.micro_batch_size {full['best']['micro_batch']}. Steps and efficiency are"
            " estimates.",
            soft_wrap=True,
        )
    else:
        console.print("nothing fits: more or larger GPUs, or a smaller model", soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """Declare the options; others go to the config."""
    options = make_parser(__doc__)

    def add(name: str, **more: Any) -> None:
        options.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **more)

    add("config", required=True, help="of the run; dotted settings may follow")
    add("nodes", type=int, default=1)
    add("gpus-per-node", type=int, default=8)
    add("gpu-memory-gb", type=float, default=80.0)
    add("reserved-gb", type=float, default=2.0, help="context, NCCL, fragments: an assumption")
    add("precision", choices=("no", "bf16", "fp16"), default="bf16")
    add("samples-per-second", type=float, help="of one GPU alone, as a run on one reports it")
    add("gpu-tflops", type=float, default=989.0, help="of the data sheet; an H100's in bf16")
    add("utilisation", type=float, default=0.4, help="of that, where nothing was measured")
    add("measured", default="", help="runs/preflight.json")
    add("in-node-gb-per-second", type=float, default=300.0, help="all-reduce's bus bandwidth")
    add("over-nodes-gb-per-second", type=float, default=40.0, help="the same over all nodes")
    add("latency-us", type=float, default=20.0, help="of one message over the network")
    add("json", action="store_true")
    return options


if __name__ == "__main__":
    run(main, *parser().parse_known_args())
