"""Simulate one step of rank 0 on a cluster that need not exist, for planner.py.

The recipe's model takes a step in one process, with fake tensors, which have a shape but no values,
and torch's fake process group, which communicates with no other process. Depending on the
accelerate config, the loop's own function shards the model, or the gradients are in buckets as with
DDP. The memory of each kind, every collective and the FLOPs are counted. The loss has no value, and
no time is measured.

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
    BatchLayout,
    batch_layout,
    is_stream,
)
from ..process import no_garbage_collection
from ..recipe import DataInfo, Dataset
from ..settings import parse

# The function with which FSDP2 splits a tensor for all ranks; FSDP2 then takes its own rank's part.
CHUNKS = "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty"
KINDS = {  # the kinds of memory that are printed, and what torch's trackers call them
    "state": ("Parameter", "Sharded Param", "Buffer", "Optstate", "OptState", "Inputs"),
    "gradients": ("Gradient", "Sharded Grad", "Unsharded Grad", "Other"),  # Other: DDP's buckets
    "activations": ("Activation", "Temp"),
    "gathered": ("Unsharded Param", "All Gather", "Reduce Scatter"),
}
# Environment variables that describe this machine, not the node that is simulated.
OF_THIS_MACHINE = re.compile(r"ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|CUDA_VISIBLE_DEVICES$")
# To infer the shapes of the optimizer's results, DTensor makes whole tensors, and the trackers of
# older versions of torch count the memory of these.
SHARDED_SINCE = "2.15"
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter")
READ_SAMPLES = 8  # a larger micro-batch repeats them
# The trackers keep recomputed activations in reference cycles, unlike a real step, so garbage is
# collected after this many operations.
OPERATIONS_PER_COLLECTION = 500
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind that a rank calls in one step, in one group of ranks."""

    operation: str
    group_size: int
    group_per_node: int  # ranks of the group on one node
    number: int
    # bytes of the gathered tensors, or of the tensors before the reduction, summed over the
    # collectives
    size_bytes: int

    @property
    def is_in_node(self) -> bool:
        """Return whether all ranks of the group are on one node."""
        return self.group_size == self.group_per_node

    @property
    def sent_bytes(self) -> float:
        """Return the number of bytes that a rank sends in a ring.

        An all-reduce of N ranks sends 2 (N-1)/N of its size, the other operations half of that
        (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
        """
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * (self.group_size - 1) / self.group_size * self.size_bytes


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The memory, communication and computation of a rank in a step."""

    nodes: int
    gpus_per_node: int
    precision: str
    micro_batch: int
    accumulation: int
    parameters: int
    model_bytes: int  # weights and buffers of the whole model
    flops_per_sample: float  # of forward and backward, including recomputed activations
    memory_bytes: dict[str, int]  # by kind, at the peak
    collectives: list[Collective]

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of a rank."""
        return sum(self.memory_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, the peak memory, and the bytes that are sent."""
        return asdict(self) | {"peak_bytes": self.peak_bytes, "sent": self.sent_bytes()}

    def sent_bytes(self) -> dict[str, float]:
        """Return the bytes that a rank sends within its node, and over the network."""
        sent = {"in node": 0.0, "network": 0.0}
        for collective in self.collectives:
            sent["in node" if collective.is_in_node else "network"] += collective.sent_bytes
        return sent


def sharding_refusal() -> str:
    """Return why this torch cannot simulate a sharded step; "" if it can."""
    if TorchVersion(torch.__version__) >= SHARDED_SINCE:
        return ""
    return (
        f"simulating a sharded step needs torch {SHARDED_SINCE} or later; torch"
        f" {torch.__version__} would count too much memory: pip install -U torch."
    )


# ---- the launch ----------------------------------------------------------------------------------
class Simulator:
    """Simulates steps of one run on clusters of any size; prepares the run's data once."""

    def __init__(self, arguments: list[str]) -> None:
        """Read the command line of the run: --config and settings."""
        self.arguments = arguments
        self.config = parse(arguments)

    @cached_property
    def data(self) -> tuple[dict[str, Any], Any]:
        """Return the recipe's data_info, and the training set."""
        contract.check_recipe(self.config)
        data_info = prepare.prepare_data(self.config)
        return data_info, contract.build_datasets(self.config.recipe, data_info)[0]

    def accepts(self, kind: str, layout: BatchLayout) -> bool:
        """Return whether training with a kind (planner.KINDS) accepts a layout."""
        static_graph = self.config.distributed.ddp.get("static_graph")
        is_ddp = kind == "DDP" and layout.world_size > 1
        if is_ddp and static_graph and layout.accumulation > 1:
            return False
        lanes = 0
        if is_stream(data := self.data[1]):
            lanes = data.lanes  # of a stream
        size, parts = layout.global_batch_size, layout.micro_batches
        return not lanes or size % lanes == lanes % parts == 0

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
            nodes: the number of nodes.
            gpus_per_node: the number of GPUs, and of processes, on each node.
            micro_batch: samples of a micro-batch; 0: that of the config.
            accumulation: micro-batches of a step, if micro_batch is given.

        Raises:
            ConfigError: the launch would be refused, or this torch cannot simulate it.
            RuntimeError: the recipe reads the value of a tensor.
        """
        config = self.config
        world_size = nodes * gpus_per_node
        words = ["--config_file", str(find_where(where)), "--num_machines", str(nodes)]
        words += ["--num_processes", str(world_size), "--main_process_port", "0"]
        launched = launch.parse([*words, "-m", launch.TRAIN, *self.arguments])
        if not micro_batch:
            layout = batch_layout(config.batches, world_size)
            if not self.accepts("", layout):
                raise ConfigError(
                    f"the stream's lanes do not fit {layout}: choose another"
                    " batches.micro_batch_size."
                )
            micro_batch, accumulation = layout.micro_batch_size, layout.accumulation
        precision = launched.precision
        gpus = {"is_available": lambda: launched.gpus > 0, "device_count": lambda: launched.gpus}
        data_info, train_set = self.data
        with _as_rank_0(launched):
            with patch.multiple(torch.accelerator, **gpus):
                check_launch(config)
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, patch(CHUNKS, _first_chunk):
                step = _Step(config, world_size, precision, data_info, accumulation)
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
    """Return only rank 0's part: making the parts of thousands of ranks would take minutes."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


@contextmanager
def _as_rank_0(launched: launch.Launch) -> Iterator[None]:
    """Set the environment of rank 0 in this launch, in a fake process group."""
    kept = {name: value for name, value in os.environ.items() if not OF_THIS_MACHINE.match(name)}
    with patch.dict(os.environ, kept, clear=True):
        os.environ |= launched.environments(0)[0]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(launched.world_size)}
        dist.init_process_group("fake", rank=0, world_size=launched.world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


# ---- the batch -----------------------------------------------------------------------------------
def _batch(config: Config, train_set: Dataset, micro_batch: int, fake: FakeTensorMode) -> Any:
    """Return a micro-batch of fake tensors: a few samples, repeated.

    The samples are made fake before they are collated, so that no large batch is in memory, unless
    collate reads values.
    """
    with unset_fake_temporarily():
        data, count = train_set, READ_SAMPLES
        if is_stream(train_set):
            data = list(islice(train_set.lane(0, 0, config.seed), count))  # of a stream
        samples = [data[index] for index in range(min(count, len(data)))]
    if not samples:
        raise ConfigError("the training set has no samples, so no step can be simulated.")
    samples = [samples[index % len(samples)] for index in range(micro_batch)]
    collate = getattr(config.recipe, "collate", None) or default_collate
    try:
        return collate(tree_map_only(torch.Tensor, fake.from_tensor, samples))
    except RuntimeError:  # collate reads values
        with unset_fake_temporarily():
            batch = collate(samples)
        return tree_map_only(torch.Tensor, fake.from_tensor, batch)


# ---- the step ------------------------------------------------------------------------------------
class _Step:
    """The model, the optimizer and the step of rank 0."""

    def __init__(
        self,
        config: Config,
        world_size: int,
        precision: str,
        data_info: DataInfo,
        accumulation: int,
    ) -> None:
        """Build and prepare the model and its optimizer as train.py does."""
        self.recipe = config.recipe
        self.world_size = world_size
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.is_sharded = sharding.is_wanted()
        # some functions of torch.nn.init read values, which fake tensors do not have
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
        self.are_views = False  # whether gradients are in the buckets
        if self.is_sharded:
            self.model: Any = sharding.wrap_for_sharding(
                accelerator, config, self.raw_model, self.optimizer, None
            )
        else:
            self.model = contract.RecipeModule(self.raw_model)
            if self.world_size > 1:
                self._make_buckets(ddp_options(config), accumulation)
        self.ema: Any = None
        if config.optim.ema_decay:
            self.ema = EMA(self.raw_model, config.optim.ema_decay)
            for index, average in enumerate(self.ema.averages):  # the trackers count buffers
                self.model.register_buffer(f"ema_{index}", average)

    def _make_buckets(self, options: Any, accumulation: int) -> None:
        """Make DDP's buckets, and gradients that are views of them.

        DDP itself cannot be used: it reads the values of tensors, which fake tensors do not have.
        As in parallel.keep_gradients_in_buckets, gradients may also accumulate outside the buckets.
        """
        may_be_none = options.find_unused_parameters or optim.has_sparse_gradients(self.raw_model)
        is_outside = accumulation > 1 and may_be_none
        self.are_views = options.gradient_as_bucket_view and not is_outside
        is_bf16 = options.comm_hook.value == "bf16"
        self.sent_dtype = torch.bfloat16 if is_bf16 else None  # None: that of the bucket
        self.synced_buffers = [*self.raw_model.buffers()] if options.broadcast_buffers else []
        trained = [p for p in self.raw_model.parameters() if p.requires_grad][::-1]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, options.bucket_cap_mb << 20]  # type: ignore
        for bucket in dist._compute_bucket_assignment_by_size(trained, limits)[0]:  # type: ignore
            sizes = [trained[index].numel() for index in bucket]
            self.buckets.append(trained[bucket[0]].new_zeros(sum(sizes)))
            parts = self.buckets[-1].split(sizes)
            for index, part in zip(bucket, parts, strict=True) if self.are_views else ():
                trained[index].grad = part.view_as(trained[index])

    def micro_batch(self, batch: Any, *, is_last: bool) -> None:
        """Run forward and backward on a micro-batch.

        DDP reduces the gradients after the last one, FSDP2 in every backward pass. HSDP adds up the
        gradients of all nodes in the last micro-batch.
        """
        is_cast = bool(self.dtype) and not self.is_sharded
        with parallel.gradient_sync(self.model, is_last=is_last):
            with torch.autocast("cpu", self.dtype, enabled=is_cast):
                loss_sum, *_ = self.model(self.recipe.loss, batch, 0)
            if is_last and self.world_size > 1:  # the sums of losses and items, and two votes
                dist.all_reduce(torch.zeros(4, dtype=torch.float64))
            loss_sum.backward()
        if is_last and self.buckets:
            for dtype in {buffer.dtype for buffer in self.synced_buffers}:
                flat = [b.flatten() for b in self.synced_buffers if b.dtype == dtype]
                dist.broadcast(torch.cat(flat), 0)
            for bucket in self.buckets:
                dist.all_reduce(bucket.to(self.sent_dtype or bucket.dtype))

    def update(self) -> None:
        """Update the weights as train.py does, without reading the gradient norm."""
        gradients = [p.grad for p in self.raw_model.parameters() if p.grad is not None]
        norm: Any = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch._foreach_mul_(gradients, norm.float())  # type: ignore[attr-defined]
        del gradients
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.are_views)
        if self.ema:
            self.ema.update()


def _accelerator(precision: str, world_size: int, *, is_sharded: bool) -> Any:
    """Return an object with the attributes of an Accelerator that sharding and blocks read."""
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=None),
        mixed_precision=precision,
        num_processes=world_size,
        device=CPU,
    )
    if is_sharded:
        if refusal := sharding_refusal():
            raise ConfigError(refusal)
        # making the mesh reads values of a tensor
        with patch.dict(PartialState._shared_state), unset_fake_temporarily():
            sharding.shard_on_cpu(accelerator, is_hsdp=sharding.uses_mesh())
        accelerator.parallelism_config = accelerator.state.parallelism_config
        accelerator.torch_device_mesh = accelerator.state.device_mesh
    return accelerator


# ---- counting ------------------------------------------------------------------------------------
def _count(step: _Step, batch: Any, accumulation: int, gpus_per_node: int) -> dict[str, Any]:
    """Take two steps, and count in the second one: the first allocates the optimizer state.

    The micro-batches before the last one are alike, so only one of them is computed.
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
    micro_batches = min(accumulation, 2)
    gc.collect()
    gc.freeze()  # so that gc.collect() in the recorder examines only newer objects
    try:
        # the counter decomposes some operations, so it has to see each of them last
        with no_garbage_collection(), counter, tracker, collectives:
            if micro_batches == 2:
                collectives.weight = accumulation - 1
                step.micro_batch(batch, is_last=False)
                collectives.weight = 1
                tracker.reset_mod_stats()
            step.micro_batch(batch, is_last=True)
            flops = counter.get_total_flops()
            tracker.reset_mod_stats()
            step.update()
    finally:
        gc.unfreeze()  # otherwise the models of all steps would stay in memory
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    sizes = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    memory = {kind: sum(sizes.get(name, 0) for name in names) for kind, names in KINDS.items()}
    return {
        "flops_per_micro_batch": flops / micro_batches,
        "memory_bytes": memory,
        "collectives": collectives.recorded(gpus_per_node),
    }


class _NoPeaks(WeakIdKeyDictionary):
    """A tracker's table of modules that hides their peaks: finding these takes most of the time."""

    def values(self) -> Any:
        return ()


class _Recorder(TorchDispatchMode):
    """Counts each collective `weight` times, and collects garbage from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1
        self.operations = 0
        self.numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it then calls this function for the operations on local tensors
            return NotImplemented
        self.operations += 1
        if self.operations % OPERATIONS_PER_COLLECTION == 0:
            gc.collect()
        result = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops:
            name = CollectiveOp.get_process_group(func, args).group_name
            ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(name)))
            name = func.overloadpacket.__name__.replace("_", "")  # allgatherbase
            matches = (operation for operation in OPERATIONS if operation.replace("-", "") in name)
            key = (next(matches, name), ranks)
            # the size is that of the input or the output, whichever is larger
            tensors = [leaf for leaf in tree_leaves((args, result)) if hasattr(leaf, "nbytes")]
            self.numbers[key] += self.weight
            self.sizes[key] += self.weight * max(tensor.nbytes for tensor in tensors)
        return result

    def recorded(self, gpus_per_node: int) -> list[Collective]:
        """Return the recorded collectives, for nodes with this many GPUs."""
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
