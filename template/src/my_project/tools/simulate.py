"""Simulate one step of rank 0 on a cluster that need not exist, for planner.py.

One process, fake tensors and torch's fake process group, in which no other rank answers: the
recipe's model is wrapped by DDP or sharded by accelerate's own function, as the accelerate config
says, and takes a real step. Counted are the memory of each kind, every collective and the FLOPs.
Tensors have no values, so neither a loss nor a time comes out.

Not simulated: torch.compile, SyncBatchNorm's collectives, the scaler of fp16, what CUDA and NCCL
allocate, fragmentation.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, clear_environment
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from .. import contract, devices, launch, optim, sharding
from ..config import Config, ConfigError
from ..loading.layout import BatchLayout, batch_layout, is_stream
from ..loading.loader import Fetch
from ..step_sums import StepSums
from ..train_command import find_where

# What torch's trackers call the kinds of memory, and what is printed.
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
NO_VALUES = (
    "The step is simulated on fake tensors, whose values a recipe cannot read, as by .item()."
)
READ_SAMPLES = 8  # a larger micro-batch has the shapes of these, grown


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The collectives of one kind in a group of ranks, of one rank in one step."""

    operation: str
    group: str
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

    where: str
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

    def as_json(self) -> dict[str, Any]:
        """Return all of it, with the sums."""
        return asdict(self) | {"peak_bytes": self.peak_bytes, "sent_bytes": self.sent_bytes()}

    def sent_bytes(self) -> dict[str, float]:
        """Sum what a rank sends, in groups that are on one node and in the others."""
        sent = {"in node": 0.0, "network": 0.0}
        for collective in self.collectives:
            sent["in node" if collective.is_in_node else "network"] += collective.sent_bytes
        return sent


# ---- the launch ----------------------------------------------------------------------------------
class Simulator:
    """Takes steps of one run on clusters of any size; its data is prepared once."""

    def __init__(self, config: Config, arguments: list[str]) -> None:
        """Simulate this run.

        Args:
            config: of the run.
            arguments: the command line that config was read from.
        """
        self.config = config
        self.arguments = arguments

    @cached_property
    def data(self) -> tuple[dict[str, Any], Any]:
        """Return what the recipe knows of its data, and the training set."""
        contract.check_recipe(self.config)
        data_info = contract.prepare_data(self.config)
        return data_info, contract.build_datasets(self.config.recipe, data_info)[0]

    def step(
        self, where: str, nodes: int, gpus_per_node: int, layout: BatchLayout | None = None
    ) -> Simulation:
        """Simulate the step that a launch would take.

        Args:
            where: the name or the path of an accelerate config.
            nodes: of the cluster.
            gpus_per_node: one process each.
            layout: of the global batch; None for the config's.

        Raises:
            ConfigError: the launch would be refused.
            RuntimeError: the recipe reads the value of a tensor.
        """
        path = find_where(where)
        world_size = nodes * gpus_per_node
        words = ["--config_file", str(path), "--num_machines", str(nodes)]
        words += ["--num_processes", str(world_size), "--main_process_port", "0"]
        _, launched = launch.parse([*words, "-m", launch.TRAIN, *self.arguments])
        layout = layout or batch_layout(self.config.batches, world_size)
        precision = self.config.precision or launched.precision
        gpus = {"is_available": lambda: True, "device_count": lambda: launched.gpus}
        with _as_rank_0(launched):
            with _replaced(torch.accelerator, gpus if launched.gpus else {}):
                devices.check_launch(self.config, layout.accumulation)
            data_info, train_set = self.data
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                with fake, _fake_process_group(world_size):
                    batch = _batch(self.config, train_set, layout.micro_batch_size, fake)
                    step = _Step(self.config, layout, precision, data_info)
                    return _count(step, batch, path.name, nodes, gpus_per_node)
            except RuntimeError as error:
                error.add_note(NO_VALUES)
                raise


@contextmanager
def _as_rank_0(launched: launch.Launch) -> Iterator[None]:
    """Set the environment that accelerate launch gives to rank 0."""
    typed = [*launched.flags, "-m", launched.module]
    kept = {name: os.environ[name] for name in os.environ if not OF_THIS_MACHINE.match(name)}
    with clear_environment():  # restores it at the end
        os.environ.update(kept)
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(typed))
        if arguments.use_fsdp or arguments.multi_gpu:
            environment = prepare_multi_gpu_env(arguments)
        else:
            _, environment = prepare_simple_launcher_cmd_env(arguments)
        os.environ.update(environment)
        world_size = str(launched.world_size)
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world_size})
        yield


@contextmanager
def _replaced(module: Any, functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module of torch for a while."""
    before = {name: getattr(module, name) for name in functions}
    try:
        vars(module).update(functions)
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _uninitialized_weights() -> Iterator[None]:
    """Turn torch.nn.init's functions off: some of them read values, which fake tensors lack."""
    names = [name for name, f in vars(init).items() if name[-1] == "_" and callable(f)]
    with _replaced(init, {name: lambda tensor, *_, **__: tensor for name in names}):
        yield


def sharding_refusal() -> str | None:
    """Return why this torch cannot simulate a sharded step, if it cannot."""
    if TorchVersion(torch.__version__) >= SHARDED_SINCE:
        return None
    return (
        f"a sharded step is simulated by torch {SHARDED_SINCE} or later; this is"
        f" {torch.__version__}, which would count too much memory: pip install -U torch."
    )


# ---- the batch -----------------------------------------------------------------------------------
def _batch(config: Config, train_set: Any, micro_batch: int, fake: FakeTensorMode) -> Any:
    """Return a micro-batch of fake tensors, from a few real samples fetched as in training.

    In a larger one each dimension that differs between these samples once and twice grows on, so
    that no large batch is ever in memory; one of other things than tensors is read in full.
    """

    def read(size: int) -> Any:
        keys = [(0, index % min(READ_SAMPLES, len(samples))) for index in range(size)]
        with unset_fake_temporarily():
            batch = fetch.__getitems__(keys)
        return tree_map_only(torch.Tensor, fake.from_tensor, batch)

    def grown(once: Any, twice: Any) -> Any:
        if not isinstance(once, torch.Tensor):
            return once
        more = micro_batch - READ_SAMPLES
        shapes = zip(once.shape, twice.shape, strict=True)
        return once.new_empty([x + (y - x) * more // READ_SAMPLES for x, y in shapes])

    samples = train_set
    if is_stream(train_set):
        with unset_fake_temporarily():
            samples = list(islice(train_set.lane(0, 0, 0, config.seed), READ_SAMPLES))
    collate = getattr(config.recipe, "collate", None)
    fetch = Fetch(samples, collate, config.seed, config.batches.seed_samples)
    if micro_batch <= READ_SAMPLES:
        return read(micro_batch)
    once, structure = tree_flatten(read(READ_SAMPLES))
    twice, structure_of_twice = tree_flatten(read(2 * READ_SAMPLES))
    is_known = all(isinstance(leaf, (torch.Tensor, int, float)) for leaf in once)
    if structure != structure_of_twice or not is_known:
        return read(micro_batch)
    return tree_unflatten(map(grown, once, twice), structure)


# ---- the step ------------------------------------------------------------------------------------
class _Step:
    """Model and optimizer of rank 0, wrapped as accelerate would, and the step of train.py."""

    def __init__(
        self, config: Config, layout: BatchLayout, precision: str, data_info: dict[str, Any]
    ) -> None:
        """Build and wrap the model and its optimizer as train.py does, and the EMA."""
        self.config = config
        self.layout = layout
        self.precision = precision
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.autocast: Any = nullcontext()
        self.buckets: dict[int, Any] = {}  # DDP's
        with _uninitialized_weights():
            self.raw_model: Any = config.recipe.build_model(data_info)
        self.raw_model.train()
        weights = [*self.raw_model.parameters()]
        self.parameters = sum(p.numel() for p in weights)
        self.model_bytes = sum(tensor.nbytes for tensor in (*weights, *self.raw_model.buffers()))
        accelerator = self._accelerator(is_sharded=devices.wants_sharding())
        sharding.checkpoint_activations(accelerator, config, self.raw_model)
        self.optimizer = optim.build_optimizer(config.optim, config.recipe, self.raw_model)
        if devices.wants_sharding():
            self.model: Any = sharding.shard(accelerator, self.raw_model, self.optimizer, None)
        else:
            if self.dtype:
                self.autocast = torch.autocast("cpu", self.dtype)
            if layout.accumulation > 1:
                optim.set_zero_gradients(self.optimizer)
            self.model = sharding.RecipeModule(self.raw_model)
            if layout.world_size > 1:
                self.model = self._replicated(self.model)
        self.in_buckets = sharding.has_gradients_in_buckets(self.model)
        if not self.in_buckets:
            self.optimizer.zero_grad()
        self.ema: Any = None
        self.averages: Any = torch.nn.Module()  # the EMA's, as what the trackers know
        if config.optim.ema_decay:
            self.ema = optim.EMA(self.raw_model, config.optim.ema_decay)
            for index, average in enumerate(self.ema.averages):
                self.averages.register_buffer(str(index), average)

    def _accelerator(self, *, is_sharded: bool) -> Any:
        """Return what sharding.py reads of an Accelerator, with a mesh of the fake process group.

        Accelerate's `prepare` finds parameters by addresses, which fake tensors lack: this one is
        the part of it that shards.
        """
        accelerator: Any = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=None),
            mixed_precision=self.precision,
            is_main_process=True,
            device=torch.device("cpu"),
        )
        if not is_sharded:
            return accelerator
        if refusal := sharding_refusal():
            raise ConfigError(refusal)
        plugin = FullyShardedDataParallelPlugin()  # reads the environment
        if self.dtype:
            plugin.set_mixed_precision(self.precision)
        sizes = {"dp_replicate": 1, "dp_shard": self.layout.world_size}
        if devices.uses_mesh():
            for name in sizes:
                sizes[name] = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        with unset_fake_temporarily():  # it reads the ranks from a tensor
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        accelerator.state.fsdp_plugin = plugin
        accelerator.torch_device_mesh = mesh
        accelerator.parallelism_config = SimpleNamespace(fsdp_dim_names=[*sizes])

        def prepare(model: Any, optimizer: Any) -> tuple[Any, Any]:
            return fsdp2_prepare_model(accelerator, model), optimizer

        accelerator.prepare = prepare
        return accelerator

    def _replicated(self, model: Any) -> Any:
        """Wrap in DDP, less the three places where it reads values."""
        options = devices.ddp_options(self.config)
        dtypes = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
        if options.comm_hook.value not in dtypes:
            raise ConfigError(
                f"distributed.ddp.comm_hook {options.comm_hook.value} cannot be simulated; choose"
                f" one of {', '.join(dtypes)}."
            )
        if options.find_unused_parameters:
            raise ConfigError(
                "distributed.ddp.find_unused_parameters cannot be simulated, since DDP then reads"
                " which parameters were used; set it to false."
            )
        compressed = dtypes[options.comm_hook.value]
        dist: Any = torch.distributed
        compute = dist._compute_bucket_assignment_by_size
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, options.bucket_cap_mb << 20]

        def in_order_of_backward(parameters: list[Any], _: Any, sparse: list[bool]) -> Any:
            last = len(parameters) - 1
            buckets, sizes = compute(parameters[::-1], limits, sparse[::-1])
            return [[last - index for index in bucket] for bucket in buckets[::-1]], sizes[::-1]

        with (
            # it compares shapes over the ranks
            _replaced(
                distributed,
                {"_verify_param_shape_across_processes": lambda *_: None},
            ),
            # the buckets of the second step and all later ones
            _replaced(dist, {compute.__name__: in_order_of_backward}),
        ):
            ddp = DistributedDataParallel(model, **{**options.to_kwargs(), "init_sync": False})

        def all_reduce(_, bucket):  # the default waits for a result; DDP reads annotations
            buffer = bucket.buffer()
            self.buckets[bucket.index()] = buffer
            reduced = buffer.to(compressed) if compressed else buffer
            dist.all_reduce(reduced.div_(self.layout.world_size))
            future: Any = torch.futures.Future()
            future.set_result(buffer.copy_(reduced) if compressed else buffer)
            return future

        ddp.register_comm_hook(None, all_reduce)
        ddp.reducer = _Reducer(ddp.reducer)  # type: ignore[assignment]
        return ddp

    def no_sync(self, is_last: bool) -> Any:
        """Return the context of a micro-batch, as accelerator.no_sync does."""
        if hasattr(self.model, "set_requires_gradient_sync"):  # FSDP2
            self.model.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last or self.layout.world_size == 1 else self.model.no_sync()

    def take(self, batches: list[Any], between: Callable[[], None] = lambda: None) -> None:
        """Take the step of train.py.

        Args:
            batches: one per micro-batch.
            between: called after each backward pass.
        """
        here: Any = SimpleNamespace(
            device=torch.device("cpu"), num_processes=self.layout.world_size
        )
        sums = StepSums(here)
        for j, batch in enumerate(batches):
            is_last = j == len(batches) - 1
            with self.no_sync(is_last):
                with self.autocast:
                    returned = self.model(self.config.recipe.loss, batch, 0)
                loss_sum, num_items = returned
                sums.add(loss_sum, num_items)
                if is_last:
                    sums.start_all_reduce(False, False)
                loss_sum.backward()
                del returned, loss_sum  # and the graph
            between()
        sums.wait()
        trained = {n: p for n, p in self.raw_model.named_parameters() if p.requires_grad}
        gradients = optim.gradients(trained, sharding.unused_parameter_finder(self.model))
        # optim.normalize_and_clip_ without reading the norm
        norm: Any = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch._foreach_mul_(gradients, norm.float())  # type: ignore[attr-defined]
        del gradients, trained
        self.optimizer.step()
        optim.clear_gradients(self.optimizer, self.in_buckets)
        if self.ema:
            self.ema.update()


class _Reducer:
    """DDP's reducer, which does not order its buckets again, since it would read their indices."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


# ---- counting ------------------------------------------------------------------------------------
def _count(step: _Step, batch: Any, where: str, nodes: int, gpus_per_node: int) -> Simulation:
    """Take two steps, and count in the second: the first allocates the optimizer state.

    Of the micro-batches before the last, which are alike, one is taken. Those of DDP send nothing.
    """
    layout = step.layout
    step.take([batch])
    is_sharded = isinstance(step.model, FSDPModule)
    if is_sharded:
        tracker: Any = FSDPMemTracker(step.model, step.optimizer)  # type: ignore[arg-type]
        tracker.track_inputs(tuple(step.averages.buffers()))
    else:
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer, step.averages, *step.buckets.values())
    tracker.memory_tracking = _NoPeaks()
    counter = FlopCounterMode(display=False)
    collectives = _Recorder()
    batches = [batch] * min(layout.accumulation, 2)
    if len(batches) == 2 and is_sharded:
        collectives.weight = layout.accumulation - 1
    flops = 0

    def after_backward() -> None:
        nonlocal flops
        flops = counter.get_total_flops()
        collectives.weight = 1
        tracker.reset_mod_stats()

    # the counter sees an operation last, since it takes some of them apart
    with counter, tracker, collectives:
        step.take(batches, between=after_backward)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    sizes = {getattr(kind, "value", kind): size for kind, size in peak.items() if kind != "Total"}
    assert sizes.keys() <= {name for names in KINDS.values() for name in names}, sizes
    return Simulation(
        where=where,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        precision=step.precision,
        micro_batch=layout.micro_batch_size,
        accumulation=layout.accumulation,
        parameters=step.parameters,
        model_bytes=step.model_bytes,
        flops_per_sample=flops / (layout.micro_batch_size * len(batches)),
        memory_bytes={
            kind: sum(sizes.get(name, 0) for name in names) for kind, names in KINDS.items()
        },
        collectives=collectives.recorded(nodes, gpus_per_node),
    )


class _NoPeaks(WeakIdKeyDictionary):
    """What a tracker notes of each module, less the peaks, which take most of its time."""

    def values(self) -> Any:
        return ()


class _Recorder(TorchDispatchMode):
    """Records each collective, `weight` times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1
        self.numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # then this mode sees what DTensor does for it
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops:
            name = CollectiveOp.get_process_group(func, args).group_name
            ranks = torch.distributed.get_process_group_ranks(_resolve_process_group(name))
            key = (func.overloadpacket.__name__, tuple(ranks))
            if key[0] in ("allreduce_", "broadcast_"):  # of a view torch counts the storage
                size = sum(tensor.nbytes for tensor in args[0])
            else:
                size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
            self.numbers[key] += self.weight
            self.sizes[key] += self.weight * size
        return result

    def recorded(self, nodes: int, gpus_per_node: int) -> list[Collective]:
        """Return what was recorded, on a cluster of this size."""
        collectives = []
        for (name, ranks), number in self.numbers.items():
            per_node = sum(rank < gpus_per_node for rank in ranks)
            one = Collective(
                operation=_operation(name),
                group=_group(len(ranks), per_node, nodes * gpus_per_node),
                group_size=len(ranks),
                group_per_node=per_node,
                number=number,
                size_bytes=self.sizes[name, ranks],
            )
            collectives.append(one)
        return collectives


def _operation(name: str) -> str:
    """Return the common name of an operation of torch.ops.c10d: _allgather_base_ is all-gather."""
    name = name.replace("_", "")
    common = ("all-gather", "all-reduce", "reduce-scatter")
    return next((known for known in common if known.replace("-", "") in name), name)


def _group(size: int, per_node: int, world_size: int) -> str:
    """Name a group of ranks by where they are."""
    if size == per_node:
        return f"{size} of a node"
    if size == world_size:
        return f"all {size}"
    return f"{size}, one per node" if per_node == 1 else f"{size} of all"
