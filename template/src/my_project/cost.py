"""What one step of a recipe takes: memory and work, measured on fake tensors, without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from .config import Config

LEAST_BLOCK = 1_000_000  # fsdp_min_num_params of the accelerate configs


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the arithmetic needs to know of a recipe."""

    parameters: int
    trained: int  # those with gradients
    block: int  # parameters of the largest block that sharding gathers at once
    blocks: int
    root: int  # parameters in no block, which stay gathered
    buffer_bytes: int
    optimizer_bytes: float  # per trained parameter; an average of the weights included
    kept_bytes: int  # for the backward, whatever the micro-batch: weights in lower precision
    kept_bytes_per_sample: int
    operations_per_sample: int  # floating-point, forward and backward
    finds_unused: bool = False  # DDP looks for parameters that a step does not use


# ---- the model -----------------------------------------------------------------------------------
def inspect_recipe(config: Config, precision: str, device: str = "cpu") -> Model:
    """Build the recipe's model and take a step, to see its size and what it keeps.

    With fake tensors, so that a model larger than this machine can be planned; recipes whose
    forward looks at values (`.item()`) take a real step.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .contract import build_datasets, prepare_data

    data_info, reader = prepare_data(replace(config, stage_to=None))
    train_set, _ = build_datasets(reader, data_info)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _no_initial_values():
            return _inspect(config, data_info, train_set, precision, device, mode.from_tensor)
    except Exception:  # whatever fake tensors cannot do, real ones can, or say why not
        return _inspect(config, data_info, train_set, precision, device, lambda tensor: tensor)


@contextmanager
def _no_initial_values() -> Iterator[None]:
    """Leave new parameters as they are; to draw some distributions, torch looks at values."""
    from torch.nn import init

    real = {name: f for name, f in vars(init).items() if name[-1] == "_" and callable(f)}
    try:
        for name in real:
            setattr(init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, function in real.items():
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
    _, blocks, root = sharded_blocks(model, LEAST_BLOCK)
    if device != "cpu":
        model = model.to(device)
    parameters = list(model.parameters())
    kept, operations = {}, {}
    for micro in (1, 2, 4):
        batch = _batch(config, train_set, micro, make, device)
        counter = FlopCounterMode(display=False)
        with counter:
            kept[micro] = _kept_bytes(config, model, batch, precision, device)
        operations[micro] = counter.get_total_flops()
        for parameter in parameters:
            parameter.grad = None
    # By the difference, since some of what is kept does not grow with the micro-batch.
    per_sample = max(0, (kept[4] - kept[2]) // 2)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return Model(
        parameters=sum(p.numel() for p in parameters),
        trained=trained,
        block=max(blocks, default=0),
        blocks=len(blocks),
        root=root,
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer_bytes=optimizer_bytes(config),
        kept_bytes=max(0, kept[2] - 2 * per_sample),
        kept_bytes_per_sample=per_sample,
        operations_per_sample=max(0, operations[4] - operations[2]) // 2,
        finds_unused=bool(config.distributed.ddp.get("find_unused_parameters")),
    )


def _batch(config: Config, train_set: Any, micro: int, make: Callable, device: str) -> Any:
    """Fetch a micro-batch as training does, of real samples."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._pytree import tree_map_only

    from .loading.layout import is_stream
    from .loading.loader import Fetch

    with unset_fake_temporarily():
        collate = getattr(config.recipe, "collate", None)
        if is_stream(train_set):
            train_set = list(islice(train_set.lane(0, 0, 0, config.seed), micro))
        keys = [(0, index % len(train_set)) for index in range(micro)]
        fetch = Fetch(train_set, collate, config.seed, config.batches.seed_samples)
        batch = fetch.__getitems__(keys)
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    return tree_map_only(torch.Tensor, make, batch)


def _kept_bytes(config: Config, model: Any, batch: Any, precision: str, device: str) -> int:
    """Count the bytes that autograd keeps for the backward, each storage once."""
    import torch

    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage
        return tensor

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = torch.autocast(device, half) if half else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        total, _ = config.recipe.loss(model, batch, 0)
    bytes_kept = sum(storage.nbytes() for storage in seen.values())
    total.backward()
    return bytes_kept


def optimizer_bytes(config: Config) -> float:
    """Count the bytes per parameter that the optimizer keeps, by asking one with a small tensor."""
    import torch

    from .optim import optimizer_class

    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=torch.float32))
    optimizer = optimizer_class(config.optim)([parameter], lr=1e-3, **config.optim.init_args)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    held = sum(s.numel() * s.element_size() for s in state if torch.is_tensor(s))
    return held / parameter.numel() + (4 if config.optim.ema_decay else 0)
