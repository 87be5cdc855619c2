"""Simulate one step of rank 0 on a cluster that need not exist: `planner --simulate`.

One process, fake tensors and torch's fake process group, in which no other rank answers: the
recipe's model is wrapped by DDP or sharded by accelerate's own function, as the accelerate config
says, and takes a real step. Counted are the memory of each kind and every collective. Tensors have
no values, so neither a loss nor a time comes out.

Not simulated: torch.compile, SyncBatchNorm's collectives, the scaler of fp16, what CUDA and NCCL
allocate, fragmentation.
"""

import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

from .. import launch
from ..config import Config, ConfigError
from ..loading.layout import batch_layout
from ..stack_traces import library_of
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
# What fake tensors raise where a value is read.
NO_VALUE = re.compile(r"data is not allocated|data pointer|non-Fake|numpy\(\)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The collectives of one kind in a group of ranks, of one rank in one step."""

    operation: str
    group: str
    group_size: int
    number: int
    size_bytes: int  # of the whole tensors: gathered, or before they are scattered or reduced

    @property
    def sent_bytes(self) -> float:
        """Return what a rank sends in a ring."""
        passes = 2 if self.operation == "all-reduce" else 1
        return passes * (self.group_size - 1) / self.group_size * self.size_bytes


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a rank holds and communicates in a step."""

    where: str
    nodes: int
    gpus_per_node: int
    precision: str
    micro_batch: int
    accumulation: int
    parameters: int
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
        """Sum what a rank sends, in groups that lie in one node and in the others."""
        sent = {"in node": 0.0, "network": 0.0}
        for collective in self.collectives:
            link = "in node" if collective.group.endswith("of a node") else "network"
            sent[link] += collective.sent_bytes
        return sent


# ---- the launch ----------------------------------------------------------------------------------
def simulate(
    config: Config, arguments: list[str], where: str, nodes: int, gpus_per_node: int
) -> Simulation:
    """Simulate the step that this launch would take.

    Args:
        config: of the run.
        arguments: the command line that config was read from.
        where: the name or the path of an accelerate config.
        nodes: of the cluster.
        gpus_per_node: one process each.

    Raises:
        ConfigError: the launch would be refused, or the recipe reads the value of a tensor.
    """
    path = find_where(where)
    world_size = nodes * gpus_per_node
    words = ["--config_file", str(path), "--num_machines", str(nodes)]
    words += ["--num_processes", str(world_size), "--main_process_port", "0"]
    _, launched = launch.parse([*words, "-m", launch.TRAIN, *arguments])
    layout = batch_layout(config.batches, world_size)
    with _as_rank_0(launched):
        from .. import devices
        from ..contract import build_datasets, check_recipe, prepare_data

        with _gpus_found(launched.gpus):
            devices.check_launch(config, layout.accumulation)
        check_recipe(config)
        data_info, reader = prepare_data(replace(config, stage_to=None))
        train_set, _ = build_datasets(reader, data_info)
        precision = config.precision or launched.precision
        step = _Step(config, layout.accumulation, precision, world_size)
        with _fake_tensors() as make, _fake_process_group(world_size):
            try:
                return _count(step, launched, path.name, data_info, train_set, make)
            except RuntimeError as error:
                if refusal := _refusal(error, config):
                    raise refusal from error
                raise


@contextmanager
def _as_rank_0(launched: launch.Launch) -> Iterator[None]:
    """Set the environment that accelerate launch gives to rank 0."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import clear_environment
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

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
def _gpus_found(count: int) -> Iterator[None]:
    """Let torch find the GPUs of a node that has this many, unless there are none."""
    import torch

    if not count:
        yield
        return
    found = {"is_available": lambda: True, "device_count": lambda: count}
    with _replaced(torch.accelerator, found):
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
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world_size == 1:
        yield
        return
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _fake_tensors() -> Iterator[Callable[[Any], Any]]:
    """Let new tensors be fake, and return what makes a fake one of a real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode.from_tensor


def _refusal(error: RuntimeError, config: Config) -> ConfigError | None:
    """Return a sentence if the error says that the value of a fake tensor was read."""
    is_fake = type(error).__module__ == "torch._subclasses.fake_tensor"
    if not is_fake and not NO_VALUE.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if library_of(frame.filename) is None]
    at = f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}: {own[-1].line}"
    reason = str(error).split("\n")[0].rstrip(".")
    return ConfigError(
        f"the step cannot be simulated: it needs the value of a tensor, and a fake tensor has none"
        f" ({at}; {reason}). Compute with tensors there, or run planner without --simulate, which"
        f" then takes a real step with {type(config.recipe).__name__}."
    )


# ---- the step ------------------------------------------------------------------------------------
class _Step:
    """Model and optimizer of rank 0, wrapped as accelerate would, and the step of train.py."""

    def __init__(self, config: Config, accumulation: int, precision: str, world_size: int) -> None:
        import torch

        self.config = config
        self.accumulation = accumulation
        self.precision = precision
        self.world_size = world_size
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.model: Any = None
        self.autocast: Any = nullcontext()
        self.averages: Any = torch.nn.Module()  # the EMA's, as what the trackers know
        self.buckets: dict[int, Any] = {}  # DDP's
        self.ema: Any = None

    def build(self, data_info: dict[str, Any]) -> None:
        """Build and wrap the model and its optimizer as train.py does, and the EMA."""
        import torch

        from .. import optim
        from ..cost import uninitialized_weights
        from ..devices import wants_sharding
        from ..sharding import RecipeModule, checkpoint_activations, has_gradients_in_buckets, shard

        with uninitialized_weights():
            self.raw_model = self.config.recipe.build_model(data_info)
        self.raw_model.train()
        self.parameters = sum(p.numel() for p in self.raw_model.parameters())
        accelerator = self._accelerator(is_sharded=wants_sharding())
        checkpoint_activations(accelerator, self.config, self.raw_model)
        self.optimizer = optim.build_optimizer(
            self.config.optim, self.config.recipe, self.raw_model
        )
        if wants_sharding():
            self.model = shard(accelerator, self.raw_model, self.optimizer, None)
        else:
            if self.dtype:
                self.autocast = torch.autocast("cpu", self.dtype)
            if self.accumulation > 1:
                optim.set_zero_gradients(self.optimizer)
            self.model = RecipeModule(self.raw_model)
            if self.world_size > 1:
                self.model = self._replicated(self.model)
        self.in_buckets = has_gradients_in_buckets(self.model)
        if not self.in_buckets:
            self.optimizer.zero_grad()
        if self.config.optim.ema_decay:
            self.ema = optim.EMA(self.raw_model, self.config.optim.ema_decay)
            for index, average in enumerate(self.ema.averages):
                self.averages.register_buffer(str(index), average)

    def _accelerator(self, *, is_sharded: bool) -> Any:
        """Return what sharding.py reads of an Accelerator, with a mesh of the fake process group.

        Accelerate's `prepare` finds parameters by addresses, which fake tensors lack: this one is
        the part of it that shards.
        """
        import torch
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.distributed.device_mesh import init_device_mesh
        from torch.torch_version import TorchVersion

        from ..devices import uses_mesh

        accelerator: Any = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=None),
            mixed_precision=self.precision,
            is_main_process=True,
            device=torch.device("cpu"),
        )
        if not is_sharded:
            return accelerator
        if TorchVersion(torch.__version__) < SHARDED_SINCE:
            raise ConfigError(
                f"a sharded step is simulated by torch {SHARDED_SINCE} or later; this is"
                f" {torch.__version__}, which would count too much memory: pip install -U torch."
            )
        plugin = FullyShardedDataParallelPlugin()  # reads the environment
        if self.dtype:
            plugin.set_mixed_precision(self.precision)
        sizes = {"dp_replicate": 1, "dp_shard": self.world_size}
        if uses_mesh():
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
        import torch
        from torch.nn.parallel import DistributedDataParallel, distributed

        from ..devices import ddp_options

        options = ddp_options(self.config)
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
            _replaced(distributed, {"_verify_param_shape_across_processes": lambda *_: None}),
            # the buckets of the second step and all later ones
            _replaced(dist, {compute.__name__: in_order_of_backward}),
        ):
            ddp = DistributedDataParallel(model, **{**options.to_kwargs(), "init_sync": False})

        def all_reduce(_, bucket):  # the default waits for a result; DDP reads annotations
            buffer = bucket.buffer()
            self.buckets[bucket.index()] = buffer
            reduced = buffer.to(compressed) if compressed else buffer
            dist.all_reduce(reduced.div_(self.world_size))
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
        return nullcontext() if is_last or self.world_size == 1 else self.model.no_sync()

    def take(self, batches: list[Any], between: Callable[[], None] = lambda: None) -> None:
        """Take the step of train.py.

        Args:
            batches: one per micro-batch.
            between: called after each backward pass.
        """
        import torch
        from torch.distributed.tensor import DTensor

        from .. import optim
        from ..sharding import unused_parameter_finder
        from ..step_sums import StepSums

        here: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=self.world_size)
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
        gradients = optim.gradients(trained, unused_parameter_finder(self.model))
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
def _count(
    step: _Step,
    launched: launch.Launch,
    where: str,
    data_info: dict[str, Any],
    train_set: Any,
    make: Callable[[Any], Any],
) -> Simulation:
    """Take two steps, and count in the second: the first allocates the optimizer state."""
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    from ..cost import sample_batch

    micro_batch = step.config.batches.global_batch_size // launched.world_size // step.accumulation
    step.build(data_info)
    batches = [
        sample_batch(step.config, train_set, micro_batch, make, "cpu")
        for _ in range(step.accumulation)
    ]
    step.take(batches)
    if isinstance(step.model, FSDPModule):
        tracker: Any = FSDPMemTracker(step.model, step.optimizer)  # type: ignore[arg-type]
        tracker.track_inputs(tuple(step.averages.buffers()))
    else:
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer, step.averages, *step.buckets.values())
    collectives = _collectives_recorder()
    with tracker, collectives:
        step.take(batches, between=tracker.reset_mod_stats)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    found = {getattr(kind, "value", kind): size for kind, size in peak.items() if kind != "Total"}
    assert found.keys() <= {name for names in KINDS.values() for name in names}, found
    return Simulation(
        where=where,
        nodes=launched.nodes,
        gpus_per_node=launched.processes_per_node,
        precision=step.precision,
        micro_batch=micro_batch,
        accumulation=step.accumulation,
        parameters=step.parameters,
        memory_bytes={
            kind: sum(found.get(name, 0) for name in names) for kind, names in KINDS.items()
        },
        collectives=collectives.found(launched.nodes, launched.processes_per_node),
    )


def _collectives_recorder() -> Any:
    """Return a mode that records each collective."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import get_process_group_ranks
    from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
            self.sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if DTensor in types:  # then this mode sees what DTensor does for it
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            if func in collective_ops and func not in sync_ops:
                name = CollectiveOp.get_process_group(func, args).group_name
                ranks = tuple(get_process_group_ranks(_resolve_process_group(name)))
                key = (func.overloadpacket.__name__, ranks)
                self.numbers[key] += 1
                if key[0] in ("allreduce_", "broadcast_"):  # of a view torch counts the storage
                    self.sizes[key] += sum(tensor.nbytes for tensor in args[0])
                else:
                    size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
                    self.sizes[key] += size
            return result

        def found(self, nodes: int, gpus_per_node: int) -> list[Collective]:
            return [
                Collective(
                    operation=_operation(name),
                    group=_group(ranks, nodes, gpus_per_node),
                    group_size=len(ranks),
                    number=number,
                    size_bytes=self.sizes[name, ranks],
                )
                for (name, ranks), number in self.numbers.items()
            ]

    return Recorder()


def _operation(name: str) -> str:
    """Return the common name of an operation of torch.ops.c10d: _allgather_base_ is all-gather."""
    known = {"allgather": "all-gather", "all_gather": "all-gather", "allreduce": "all-reduce",
             "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter"}  # fmt: skip
    return next((said for part, said in known.items() if part in name), name.strip("_"))


def _group(ranks: tuple[int, ...], nodes: int, gpus_per_node: int) -> str:
    """Name a group of ranks by where they lie."""
    on = {rank // gpus_per_node for rank in ranks}
    if len(on) == 1:
        return f"{len(ranks)} of a node"
    if len(ranks) == nodes * gpus_per_node:
        return f"all {len(ranks)}"
    return f"{len(ranks)}, one per node" if len(on) == len(ranks) else f"{len(ranks)} of all"
