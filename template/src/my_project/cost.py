"""Measure memory and FLOPs of one step of a recipe, on fake tensors and without a GPU."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from .config import Config

MIN_BLOCK_PARAMETERS = 1_000_000  # fsdp_min_num_params of the accelerate configs


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a recipe's model, for the planner's formulas."""

    parameters: int
    trained: int  # parameters with gradients
    block: int  # parameters of the largest block that sharding gathers at once
    blocks: int
    root: int  # parameters outside of all blocks, which stay gathered
    buffer_bytes: int
    optimizer_bytes: float  # per trained parameter; includes the EMA
    saved_bytes: int  # for the backward, independent of the micro-batch: weights cast by autocast
    saved_bytes_per_sample: int  # activations
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
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _uninitialized_weights():
            return _inspect(config, data_info, train_set, precision, device, mode.from_tensor)
    except Exception:  # fake tensors do not support everything; a real step works or says why not
        return _inspect(config, data_info, train_set, precision, device, lambda tensor: tensor)


@contextmanager
def _uninitialized_weights() -> Iterator[None]:
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
    from torch.utils.flop_counter import FlopCounterMode

    from .sharding import sharded_blocks

    model = config.recipe.build_model(data_info)
    _, blocks, root = sharded_blocks(model, MIN_BLOCK_PARAMETERS)
    if device != "cpu":
        model = model.to(device)
    parameters = list(model.parameters())
    saved: dict[int, int] = {}
    flops: dict[int, int] = {}
    for micro_batch in (1, 2, 4):
        batch = _batch(config, train_set, micro_batch, make, device)
        counter = FlopCounterMode(display=False)
        with counter:
            saved[micro_batch] = _saved_bytes(config, model, batch, precision, device)
        flops[micro_batch] = counter.get_total_flops()
        for parameter in parameters:
            parameter.grad = None
    # from the difference, since some saved tensors do not grow with the micro-batch
    saved_per_sample = max(0, (saved[4] - saved[2]) // 2)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return Model(
        parameters=sum(p.numel() for p in parameters),
        trained=trained,
        block=max(blocks, default=0),
        blocks=len(blocks),
        root=root,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer_bytes=optimizer_bytes(config),
        saved_bytes=max(0, saved[2] - 2 * saved_per_sample),
        saved_bytes_per_sample=saved_per_sample,
        flops_per_sample=max(0, flops[4] - flops[2]) // 2,
        finds_unused=bool(config.distributed.ddp.get("find_unused_parameters")),
    )


def _batch(config: Config, train_set: Any, micro_batch: int, make: Callable, device: str) -> Any:
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


def _saved_bytes(config: Config, model: Any, batch: Any, precision: str, device: str) -> int:
    """Take a step; return the bytes that autograd saves for the backward, each storage once."""
    import torch

    of_model = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in of_model:
            saved[storage._cdata] = storage
        return tensor

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = torch.autocast(device, dtype) if dtype else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        loss_sum, _ = config.recipe.loss(model, batch, 0)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    loss_sum.backward()
    return saved_bytes


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
