"""Measure memory and FLOPs of one step of a recipe, on fake tensors and without a GPU."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

from .config import Config

logger = logging.getLogger(__name__)
MICRO_BATCHES = (4, 8)  # of the two steps whose difference is the share of a sample


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The most that forward and backward hold besides weights and their gradients."""

    fixed_bytes: int = 0  # independent of the micro-batch, such as the weights cast by autocast
    bytes_per_sample: int = 0

    def bytes_of(self, micro_batch: int) -> int:
        """Return the bytes for a micro-batch."""
        return self.fixed_bytes + self.bytes_per_sample * micro_batch


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a recipe's model, for the planner's formulas."""

    parameters: int
    trained: int  # parameters with gradients
    block: int  # parameters of the largest block that sharding gathers at once
    blocks: int
    two_blocks: int  # the most in a block and the next one, which is gathered in advance
    root: int  # parameters outside of all blocks, which stay gathered
    buffer_bytes: int
    optimizer_bytes: float  # per trained parameter; includes the EMA
    activations: Activations  # with autocast
    sharded_activations: Activations  # with FSDP2, which casts weights and inputs itself
    in_second_block: Activations  # the same, in the second block of the backward pass
    in_last_block: Activations  # and in its last
    weight_bytes: int  # of a gathered weight: 2 or 4
    flops_per_sample: int  # forward and backward
    finds_unused: bool = False  # DDP's find_unused_parameters


# ---- the device ----------------------------------------------------------------------------------
# Peak TFLOP/s of a device without sparsity, from the makers' data sheets: 16 bit (bf16; fp16 where
# there is no bf16), TF32, float32. The first that stands in the device's name as a word decides.
PEAK_TFLOPS = {
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "H100": (989, 494, 67),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "GH200": (989, 494, 67),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "A40": (149.7, 74.8, 37.4),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "V100-SXM2": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
    "MI300X": (1307, 653, 163),
}


def peak_tflops(device: Any, precision: str, *, tf32: bool) -> float | None:
    """Return the peak TFLOP/s of a GPU by its name; None for one that is not known.

    Args:
        device: a torch.device.
        precision: no, bf16 or fp16.
        tf32: whether float32 matrix products may use TF32.
    """
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(MIG|Laptop|Max-Q|D|Ti)\b", name):  # parts and other editions of a GPU
        return None
    for part, peaks in PEAK_TFLOPS.items():
        if re.search(rf"(?<![\w-]){part}(?!\w)", name):
            return peaks[0 if precision != "no" else 1 if tf32 else 2]
    return None


# ---- the model -----------------------------------------------------------------------------------
def inspect_recipe(config: Config, precision: str, device: str = "cpu") -> Model:
    """Build the recipe's model, take a step with it, and return its sizes.

    The step uses fake tensors, so the model may be larger than this machine's memory; a recipe
    whose forward reads values (`.item()`) takes a real step.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .contract import build_datasets, prepare_data

    data_info, reader = prepare_data(replace(config, stage_to=None))
    train_set, _ = build_datasets(reader, data_info)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, uninitialized_weights():
            return _inspect(config, data_info, train_set, precision, device, mode.from_tensor)
    except Exception:  # fake tensors do not support everything; a real step works or says why not
        return _inspect(config, data_info, train_set, precision, device, lambda tensor: tensor)


@contextmanager
def uninitialized_weights() -> Iterator[None]:
    """Turn torch.nn.init's functions off: some of them read values, which fake tensors lack."""
    from torch.nn import init

    originals = {name: f for name, f in vars(init).items() if name[-1] == "_" and callable(f)}
    try:
        for name in originals:
            setattr(init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, function in originals.items():
            setattr(init, name, function)


def _inspect(
    config: Config,
    data_info: dict[str, Any],
    train_set: Any,
    precision: str,
    device: str,
    make: Callable[[Any], Any],
) -> Model:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from .sharding import MIN_BLOCK_PARAMETERS, sharded_blocks

    model = config.recipe.build_model(data_info)
    for module in model.modules():  # weights that were read from a file are not fake yet
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, make(parameter))
    classes, blocks, root = sharded_blocks(model, MIN_BLOCK_PARAMETERS)
    if device != "cpu":
        model = model.to(device)
    parameters = list(model.parameters())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = torch.autocast(device, dtype) if dtype else nullcontext()
    small, large = MICRO_BATCHES
    batches = {size: sample_batch(config, train_set, size, make, device) for size in MICRO_BATCHES}
    held: dict[int, int] = {}
    flops: dict[int, int] = {}
    for micro_batch, batch in batches.items():
        counter = FlopCounterMode(display=False)
        with counter, autocast:
            _held_bytes(config, model, batch)
        flops[micro_batch] = counter.get_total_flops()  # without those of recomputation
    with _recomputed(config, model, is_sharded=False):
        for micro_batch, batch in batches.items():
            with autocast:
                held[micro_batch], _ = _held_bytes(config, model, batch)
    activations = sharded_activations = _activations(held)
    inside = [Activations(), Activations()]
    units = [module for module in model.modules() if type(module).__name__ in classes]
    at = [units[-2:][0], units[0]] if units else []
    try:
        with _recomputed(config, model, is_sharded=True), autocast:
            if dtype:
                _cast_as_fsdp2(model, classes, dtype)
            found = {size: _held_bytes(config, model, batch, at) for size, batch in batches.items()}
    except Exception as error:  # an operation that wants one type fails with FSDP2, too
        reason = str(error).split("\n")[0]
        logger.warning("with FSDP the step failed, so DDP's activations are taken: %s", reason)
    else:
        sharded_activations = _activations({size: held for size, (held, _) in found.items()})
        for index in range(len(at)):
            inside[index] = _activations({size: part[index] for size, (_, part) in found.items()})
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return Model(
        parameters=sum(p.numel() for p in parameters),
        trained=trained,
        block=max(blocks, default=0),
        blocks=len(blocks),
        two_blocks=max(map(sum, pairwise([*blocks, 0])), default=0),
        root=root,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer_bytes=optimizer_bytes(config),
        activations=activations,
        sharded_activations=sharded_activations,
        in_second_block=inside[0],
        in_last_block=inside[1],
        weight_bytes=2 if dtype else 4,
        flops_per_sample=max(0, flops[large] - flops[small]) // (large - small),
        finds_unused=bool(config.distributed.ddp.get("find_unused_parameters")),
    )


@contextmanager
def _recomputed(config: Config, model: Any, *, is_sharded: bool) -> Iterator[None]:
    """Recompute the activations of the blocks, if the config wants it."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    from .sharding import MIN_BLOCK_PARAMETERS, blocks, checkpoint_activations

    plugin = SimpleNamespace(  # as the accelerate configs set it
        auto_wrap_policy=size_based_auto_wrap_policy,
        min_num_params=MIN_BLOCK_PARAMETERS,
        transformer_cls_names_to_wrap=None,
        activation_checkpointing=False,
    )
    state = SimpleNamespace(fsdp_plugin=plugin if is_sharded else None)
    accelerator: Any = SimpleNamespace(state=state)
    checkpoint_activations(accelerator, config, model)
    try:
        yield
    finally:
        if config.distributed.activation_checkpointing:
            for block in blocks(accelerator, model):
                del block.forward


def _cast_as_fsdp2(model: Any, classes: list[str], dtype: Any) -> None:
    """Cast weights, and what comes into a block, as sharding.precision_policy lets FSDP2 do."""
    import torch
    from torch.utils._pytree import tree_map_only

    def cast(tensor: Any) -> Any:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast_inputs(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return tree_map_only(torch.Tensor, cast, (arguments, named))

    for parameter in model.parameters():
        parameter.data = cast(parameter.data)
    for module in model.modules():
        if type(module).__name__ in classes:
            module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def sample_batch(
    config: Config, train_set: Any, micro_batch: int, make: Callable, device: str
) -> Any:
    """Return a micro-batch of real samples, fetched as in training, with its tensors converted."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._pytree import tree_map_only

    from .loading.layout import is_stream
    from .loading.loader import Fetch

    with unset_fake_temporarily():
        collate = getattr(config.recipe, "collate", None)
        if is_stream(train_set):
            train_set = list(islice(train_set.lane(0, 0, 0, config.seed), micro_batch))
        keys = [(0, index % len(train_set)) for index in range(micro_batch)]
        fetch = Fetch(train_set, collate, config.seed, config.batches.seed_samples)
        batch = fetch.__getitems__(keys)
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    return tree_map_only(torch.Tensor, make, batch)


def _activations(held: dict[int, int]) -> Activations:
    """Divide the bytes held with the two micro-batches: some do not grow with the size."""
    small, large = MICRO_BATCHES
    per_sample = max(0, (held[large] - held[small]) // (large - small))
    fixed = max(0, held[small] - small * per_sample)
    return Activations(fixed_bytes=fixed, bytes_per_sample=per_sample)


def _held_bytes(
    config: Config, model: Any, batch: Any, inside: Iterable[Any] = ()
) -> tuple[int, list[int]]:
    """Take a forward and backward pass; return the most it held, less weights and gradients.

    Args:
        config: of the run.
        model: the recipe's.
        batch: a micro-batch.
        inside: modules; the most that is held while each runs is returned, too.
    """
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    tracker = MemTracker()
    tracker.track_external(model)
    before = _total(tracker.get_tracker_snapshot())
    with tracker:
        loss_sum, _ = config.recipe.loss(model, batch, 0)
        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
        loss_sum.backward()
    for hook in hooks:
        hook.remove()
    peaks = [sum(tracker.memory_tracking[module].local_peak.values()) for module in inside]
    return _total(tracker.get_tracker_snapshot("peak")) - before, [peak - before for peak in peaks]


def _total(snapshot: dict[Any, dict[Any, int]]) -> int:
    """Sum the bytes that torch's MemTracker counts on all devices."""
    return sum(kinds["Total"] for kinds in snapshot.values())


def optimizer_bytes(config: Config) -> float:
    """Return the optimizer state in bytes per parameter, measured on a small tensor."""
    import torch

    from .optim import optimizer_class

    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=torch.float32))
    optimizer = optimizer_class(config.optim)([parameter], lr=1e-3, **config.optim.init_args)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    state_bytes = sum(s.numel() * s.element_size() for s in state if torch.is_tensor(s))
    return state_bytes / parameter.numel() + (4 if config.optim.ema_decay else 0)
