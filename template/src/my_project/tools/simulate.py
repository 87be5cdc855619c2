"""Simulate one step of rank 0 on a cluster that need not exist, for planner.py.

One process, fake tensors and torch's fake process group, in which no other rank answers: the
recipe's model takes a real step, sharded by the loop's own function or with its gradients in the
buckets that DDP makes, as the accelerate config says. Counted are the memory of each kind, every
collective and the FLOPs.
Tensors have no values, so neither a loss nor a time comes out.

Not simulated: torch.compile, SyncBatchNorm's collectives, the scaler of fp16, what CUDA and NCCL
allocate, fragmentation.
"""

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from .. import blocks, contract, optim, parallel, sharding
from ..accelerator import check_launch, ddp_options
from ..config import Config, ConfigError
from ..ema import EMA
from ..launching import launch
from ..launching.train import find_where
from ..loading import prepare
from ..loading.layout import (
    batch_layout,
    is_stream,
)
from ..process import no_garbage_collection
from ..settings import parse

# What torch's trackers call the kinds of memory, and what is printed.
# of FSDP2, which takes its own rank's part of the list that it returns
CHUNKS = "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty"
KINDS = {
    "state": ("Parameter", "Sharded Param", "Buffer", "Optstate", "OptState", "Inputs"),
    "gradients": ("Gradient", "Sharded Grad", "Unsharded Grad", "Other"),  # other: DDP's buckets
    "activations": ("Activation", "Temp"),
    "gathered": ("Unsharded Param", "All Gather", "Reduce Scatter"),
}
# Variables that would say something of this machine, not of the node that is simulated.
OF_THIS_MACHINE = re.compile(r"ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|CUDA_VISIBLE_DEVICES$")
# Torch 2.10 counts whole tensors, with which DTensor finds the shapes of the optimizer's results.
SHARDED_SINCE = "2.15"
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter")
READ_SAMPLES = 8  # a larger micro-batch has the shapes of these, grown
# The trackers keep recomputed activations in reference cycles, which a real step does not.
OPERATIONS_PER_COLLECTION = 500
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The collectives of one kind in a group of ranks, of one rank in one step."""

    operation: str
    group_size: int
    group_per_node: int  # ranks of the group on one node
    number: int
    size_bytes: int  # of the whole tensors: gathered, or before they are scattered or reduced

    @property
    def is_in_node(self) -> bool:
        """Return whether all ranks of the group are on one node."""
        return self.group_size == self.group_per_node

    @property
    def sent_bytes(self) -> float:
        """Return what a rank sends in a ring.

        An all-reduce of N ranks sends 2 (N-1)/N of its size, the others half of it (Patarasuk and
        Yuan, Bandwidth optimal all-reduce algorithms, 2009).
        """
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * (self.group_size - 1) / self.group_size * self.size_bytes


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a rank holds, communicates and computes in a step."""

    nodes: int
    gpus_per_node: int
    precision: str
    micro_batch: int
    accumulation: int
    parameters: int
    model_bytes: int  # weights and buffers of the whole model
    flops_per_sample: float  # of forward and backward, those of recomputed activations included
    memory_bytes: dict[str, int]  # by kind, at the peak
    collectives: list[Collective]

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of a rank."""
        return sum(self.memory_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, and what follows from them."""
        return asdict(self) | {"peak_bytes": self.peak_bytes, "sent": self.sent_bytes()}

    def sent_bytes(self) -> dict[str, float]:
        """Sum what a rank sends, in groups that are on one node and in the others."""
        sent = {"in node": 0.0, "network": 0.0}
        for collective in self.collectives:
            sent["in node" if collective.is_in_node else "network"] += collective.sent_bytes
        return sent


def sharding_refusal() -> str:
    """Return why this torch cannot simulate a sharded step; "" if it can."""
    if TorchVersion(torch.__version__) >= SHARDED_SINCE:
        return ""
    return (
        f"a sharded step is simulated by torch {SHARDED_SINCE} or later; this is"
        f" {torch.__version__}, which would count too much memory: pip install -U torch."
    )


# ---- the launch ----------------------------------------------------------------------------------
class Simulator:
    """Takes steps of one run on clusters of any size; its data is prepared once."""

    def __init__(self, arguments: list[str]) -> None:
        """Read the command line of the run: --config and settings."""
        self.arguments = arguments
        self.config = parse(arguments)

    @cached_property
    def data(self) -> tuple[dict[str, Any], Any]:
        """Return what the recipe knows of its data, and the training set."""
        contract.check_recipe(self.config)
        data_info = prepare.prepare_data(self.config)
        return data_info, contract.build_datasets(self.config.recipe, data_info)[0]

    def step(
        self,
        where: str,
        nodes: int,
        gpus_per_node: int,
        micro_batch: int = 0,
        accumulation: int = 0,
    ) -> Simulation:
        """Simulate the step that a launch would take.

        Args:
            where: the name or the path of an accelerate config.
            nodes: of the cluster.
            gpus_per_node: one process each.
            micro_batch: samples; 0 for the config's.
            accumulation: micro-batches of a step, where micro_batch is given.

        Raises:
            ConfigError: the launch would be refused.
            RuntimeError: the recipe reads the value of a tensor.
        """
        config = self.config
        world_size = nodes * gpus_per_node
        words = ["--config_file", str(find_where(where)), "--num_machines", str(nodes)]
        words += ["--num_processes", str(world_size), "--main_process_port", "0"]
        launched = launch.parse([*words, "-m", launch.TRAIN, *self.arguments])
        if not micro_batch:
            layout = batch_layout(config.batches, world_size)
            micro_batch, accumulation = layout.micro_batch_size, layout.accumulation
        precision = config.precision or launched.precision
        gpus = {"is_available": lambda: launched.gpus > 0, "device_count": lambda: launched.gpus}
        data_info, train_set = self.data
        with _as_rank_0(launched):
            with patch.multiple(torch.accelerator, **gpus):
                check_launch(config)
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, patch(CHUNKS, _first_chunk):
                step = _Step(config, world_size, precision, data_info)
                batch = _batch(config, train_set, micro_batch, fake)
                counted = _count(step, batch, accumulation, gpus_per_node)
        return Simulation(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            precision=precision,
            micro_batch=micro_batch,
            accumulation=accumulation,
            parameters=step.parameters,
            model_bytes=step.model_bytes,
            flops_per_sample=counted.pop("flops_per_micro_batch") / micro_batch,
            **counted,
        )


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Return rank 0's part alone: thousands of fake tensors for each parameter take minutes."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


@contextmanager
def _as_rank_0(launched: launch.Launch) -> Iterator[None]:
    """Set the environment of rank 0 in this launch, in a fake process group."""
    kept = {name: text for name, text in os.environ.items() if not OF_THIS_MACHINE.match(name)}
    with patch.dict(os.environ, kept, clear=True):
        os.environ |= launched.environments(0)[0]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(launched.world_size)}
        dist.init_process_group("fake", rank=0, world_size=launched.world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


# ---- the batch -----------------------------------------------------------------------------------
def _batch(config: Config, train_set: Any, micro_batch: int, fake: FakeTensorMode) -> Any:
    """Return a micro-batch of fake tensors: a few samples, collated again and again.

    They are fake before they are collated, so that no large batch is ever in memory.
    """
    with unset_fake_temporarily():
        data, count = train_set, READ_SAMPLES
        if is_stream(train_set):
            data = list(islice(train_set.lane(0, 0, config.seed), count))  # of a stream
        samples = [data[index] for index in range(min(count, len(data)))]
    samples = [samples[index % len(samples)] for index in range(micro_batch)]
    collate = getattr(config.recipe, "collate", None) or default_collate
    try:
        return collate(tree_map_only(torch.Tensor, fake.from_tensor, samples))
    except RuntimeError:  # it reads values
        with unset_fake_temporarily():
            batch = collate(samples)
        return tree_map_only(torch.Tensor, fake.from_tensor, batch)


# ---- the step ------------------------------------------------------------------------------------
class _Step:
    """Model and optimizer of rank 0, prepared as by train.py, and its step."""

    def __init__(
        self, config: Config, world_size: int, precision: str, data_info: dict[str, Any]
    ) -> None:
        """Build and prepare the model and its optimizer as train.py does."""
        self.recipe = config.recipe
        self.world_size = world_size
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.is_sharded = sharding.is_wanted()
        # some of these functions read values, which fake tensors lack
        names = [name for name in vars(init) if name[0] != "_" and name[-1] == "_"]
        untouched: dict[str, Any] = {name: lambda tensor, *_, **__: tensor for name in names}
        contract.seed_model(config.seed)
        with patch.multiple(init, **untouched):
            self.raw_model: Any = config.recipe.build_model(data_info)
        self.raw_model.train()
        weights = [*self.raw_model.parameters()]
        self.parameters = sum(p.numel() for p in weights)
        self.model_bytes = sum(tensor.nbytes for tensor in (*weights, *self.raw_model.buffers()))
        accelerator = _accelerator(precision, self.world_size, is_sharded=self.is_sharded)
        blocks.checkpoint_activations_of_blocks(config, self.raw_model, accelerator)
        self.optimizer = optim.build_optimizer(config.optim, config.recipe, self.raw_model)
        self.buckets: list[torch.Tensor] = []
        if self.is_sharded:
            of_run = accelerator, config
            self.model: Any = sharding.wrap_for_sharding(
                *of_run, self.raw_model, self.optimizer, None
            )
        else:
            self.model = contract.RecipeModule(self.raw_model)
            if self.world_size > 1:
                self._make_buckets(ddp_options(config))
        self.ema: Any = None
        if config.optim.ema_decay:
            self.ema = EMA(self.raw_model, config.optim.ema_decay)
            named = {f"ema_{index}": average for index, average in enumerate(self.ema.averages)}
            register_buffers(self.model, named)  # of the EMA, so that the trackers know them

    def _make_buckets(self, options: Any) -> None:
        """Make the gradients views of buckets, as DDP does; it reads values, so is not here."""
        is_bf16 = options.comm_hook.value == "bf16"
        self.sent_dtype = torch.bfloat16 if is_bf16 else torch.float32
        self.synced_buffers = [*self.raw_model.buffers()] if options.broadcast_buffers else []
        trained = [p for p in self.raw_model.parameters() if p.requires_grad][::-1]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, options.bucket_cap_mb << 20]  # type: ignore
        for bucket in dist._compute_bucket_assignment_by_size(trained, limits)[0]:  # type: ignore
            sizes = [trained[index].numel() for index in bucket]
            self.buckets.append(trained[bucket[0]].new_zeros(sum(sizes)))
            for index, part in zip(bucket, self.buckets[-1].split(sizes), strict=True):
                trained[index].grad = part.view_as(trained[index])

    def micro_batch(self, batch: Any, *, is_last: bool) -> None:
        """Run forward and backward of a micro-batch, and with the last send the gradients."""
        is_cast = bool(self.dtype) and not self.is_sharded
        with parallel.gradient_sync(self.model, is_last=is_last):
            with torch.autocast("cpu", self.dtype, enabled=is_cast):
                loss_sum, *_ = self.model(self.recipe.loss, batch, 0)
            if is_last and self.world_size > 1:  # of the loss, the items, and two votes
                dist.all_reduce(torch.zeros(4, dtype=torch.float64))
            loss_sum.backward()
        if is_last and self.buckets:
            for dtype in {buffer.dtype for buffer in self.synced_buffers}:
                of_type = [b.flatten() for b in self.synced_buffers if b.dtype == dtype]
                dist.broadcast(torch.cat(of_type), 0)
            for bucket in self.buckets:
                dist.all_reduce(bucket.to(self.sent_dtype))

    def update(self) -> None:
        """Update the weights as train.py does, without reading the norm."""
        gradients = [p.grad for p in self.raw_model.parameters() if p.grad is not None]
        norm: Any = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch._foreach_mul_(gradients, norm.float())  # type: ignore[attr-defined]
        del gradients
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.buckets)
        if self.ema:
            self.ema.update()


def register_buffers(model: torch.nn.Module, named: dict[str, torch.Tensor]) -> None:
    """Register tensors as buffers of a model."""
    for name, tensor in named.items():
        model.register_buffer(name, tensor)


def _accelerator(precision: str, world_size: int, *, is_sharded: bool) -> Any:
    """Return what sharding.py reads of an Accelerator."""
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=None),
        mixed_precision=precision,
        num_processes=world_size,
        is_main_process=True,
        device=CPU,
    )
    if is_sharded:
        if refusal := sharding_refusal():
            raise ConfigError(refusal)
        # the mesh reads the ranks from a tensor
        with patch.dict(PartialState._shared_state), unset_fake_temporarily():
            sharding.shard_on_cpu(accelerator, is_hsdp=sharding.uses_mesh())
        accelerator.parallelism_config = accelerator.state.parallelism_config
        accelerator.torch_device_mesh = accelerator.state.device_mesh
    return accelerator


# ---- counting ------------------------------------------------------------------------------------
def _count(step: _Step, batch: Any, accumulation: int, gpus_per_node: int) -> dict[str, Any]:
    """Take two steps, and count in the second: the first allocates the optimizer state.

    Of the micro-batches before the last, which are alike, one is taken.
    """
    step.micro_batch(batch, is_last=True)
    step.update()
    if step.is_sharded:
        tracker: Any = FSDPMemTracker(step.model, step.optimizer)  # type: ignore[arg-type]
    else:
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer, *step.buckets)
    tracker.memory_tracking = _NoPeaks()
    counter = FlopCounterMode(display=False)
    collectives = _Recorder()
    number = min(accumulation, 2)
    gc.collect()
    gc.freeze()  # the recorder collects what is made from here on
    # the counter sees an operation last, since it takes some of them apart
    with no_garbage_collection(), counter, tracker, collectives:
        if number == 2:
            collectives.weight = accumulation - 1
            step.micro_batch(batch, is_last=False)
            collectives.weight = 1
            tracker.reset_mod_stats()
        step.micro_batch(batch, is_last=True)
        flops = counter.get_total_flops()
        tracker.reset_mod_stats()
        step.update()
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    sizes = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    memory = {kind: sum(sizes.get(name, 0) for name in names) for kind, names in KINDS.items()}
    return {
        "flops_per_micro_batch": flops / number,
        "memory_bytes": memory,
        "collectives": collectives.recorded(gpus_per_node),
    }


class _NoPeaks(WeakIdKeyDictionary):
    """What a tracker notes of each module, less the peaks, which take most of its time."""

    def values(self) -> Any:
        return ()


class _Recorder(TorchDispatchMode):
    """Records each collective, `weight` times, and collects garbage after so many operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1
        self.seen = 0
        self.numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # then this mode sees what DTensor does for it
            return NotImplemented
        self.seen += 1
        if self.seen % OPERATIONS_PER_COLLECTION == 0:
            gc.collect()
        result = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops:
            name = CollectiveOp.get_process_group(func, args).group_name
            ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(name)))
            name = func.overloadpacket.__name__.replace("_", "")  # allgatherbase
            known = (one for one in OPERATIONS if one.replace("-", "") in name)
            key = (next(known, name), ranks)
            # the larger one of input and output
            tensors = [leaf for leaf in tree_leaves((args, result)) if hasattr(leaf, "nbytes")]
            self.numbers[key] += self.weight
            self.sizes[key] += self.weight * max(tensor.nbytes for tensor in tensors)
        return result

    def recorded(self, gpus_per_node: int) -> list[Collective]:
        """Return what was recorded, on nodes of this size."""
        return [
            Collective(
                operation=operation,
                group_size=len(ranks),
                group_per_node=sum(rank < gpus_per_node for rank in ranks),
                number=number,
                size_bytes=self.sizes[operation, ranks],
            )
            for (operation, ranks), number in self.numbers.items()
        ]
