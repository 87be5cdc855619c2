"""The optimizer: parameter groups, learning rate, exact normalization and clipping."""

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .config import ConfigError, OptimConfig
from .contract import described, refuse
from .recipe import Recipe, optional, source_location

UNSCHEDULED = ("constant", "plateau")  # the schedules that do not depend on the number of steps


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Give weight decay to parameters with at least two dimensions: not to biases and norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer_class(config: OptimConfig) -> Any:
    """Import the optimizer's class; refuse arguments that it does not accept."""
    module, _, name = config.class_path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        inspect.signature(kind).bind([], lr=config.lr, **config.init_args)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"optim.class_path {config.class_path} with init_args {config.init_args}: {error}."
        ) from error
    return kind


def has_two_views(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has different weights for training and for evaluation.

    Schedule-free optimizers do: their train() and eval() switch between the two sets of weights.
    """
    return all(callable(getattr(optimizer, method, None)) for method in ("train", "eval"))


def build_optimizer(config: OptimConfig, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer from its class path, fused where the device supports it.

    Raises:
        ConfigError: the optimizer cannot be built; no parameter is trained; or the groups omit or
            repeat a trained parameter, or have the key lr or a key that looks misspelled.
    """
    kind = optimizer_class(config)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("no parameter of the model has requires_grad=True, so nothing can train.")
    own_groups = optional(recipe, "parameter_groups")
    returned = own_groups(model) if own_groups else parameter_groups(model, config.weight_decay)
    if not isinstance(returned, Iterable):
        refuse(recipe, "parameter_groups", f"returned {described(returned)}, not a list of groups.")
    groups = list(returned)
    given_keys = {key for group in groups if isinstance(group, dict) for key in group}
    accepted = inspect.signature(kind).parameters
    arguments = {"lr": config.lr} | config.init_args
    if "weight_decay" in accepted:  # for groups without a weight_decay
        arguments.setdefault("weight_decay", config.weight_decay)
    if "fused" in accepted and not {"fused", "foreach", "capturable"} & set(arguments):
        arguments["fused"] = not has_sparse_gradients(model) and all(
            p.is_floating_point() and p.device.type in fused_devices(kind)
            for p in model.parameters()
            if p.requires_grad
        )
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"optim.class_path {config.class_path} with init_args {config.init_args}:"
            f" {type(error).__name__}: {error}."
        ) from error
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    if has_two_views(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
        for parameter in [p for p, slots in optimizer.state.items() if not slots]:
            del optimizer.state[parameter]  # an empty entry, which a lookup created
    check_parameters(optimizer, model)
    known = {"params", "lr_scale", *optimizer.defaults} - {"lr"}
    for key in given_keys - known if own_groups else ():  # torch ignores unknown keys
        if meant := ["lr_scale"] if key == "lr" else get_close_matches(key, known, 1, 0.75):
            raise ConfigError(
                f"parameter_groups ({source_location(own_groups)}) has the key {key}; did you mean"
                f" {meant[0]}?" + " A group's rate is optim.lr times lr_scale." * (key == "lr")
            )
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", 1.0)
    return optimizer


def fused_devices(kind: type[torch.optim.Optimizer]) -> list[str]:
    """Return the types of devices on which a class with the argument `fused` may be fused."""
    if issubclass(kind, torch.optim.Adagrad):
        return ["cpu"]  # torch 2.10 refuses GPUs
    # parameters on the meta device will be DTensors, which only Adam's fused kernels support
    is_adam = issubclass(kind, (torch.optim.Adam, torch.optim.AdamW))
    return ["cpu", "cuda", *["meta"] * is_adam]


def has_sparse_gradients(model: nn.Module) -> bool:
    """Return whether a module, such as nn.Embedding, is set to have sparse gradients."""
    return any(getattr(module, "sparse", False) for module in model.modules())


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse groups that omit or repeat a trained parameter, or hold tensors not in the model.

    Raises:
        ConfigError: the groups are wrong; the message names the parameters.
    """
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    trained = {name: held[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    others = len(held.keys() - {id(p) for p in model.parameters()})
    wrong = [name for name, times in trained.items() if times != 1]
    if wrong or others:
        raise ConfigError(
            f"parameter_groups omits or repeats {len(wrong)} of the model's {len(trained)} trained"
            f" parameters ({', '.join(wrong[:5]) or 'none'}) and holds {others} that are not in the"
            " model. Put each trained parameter into exactly one group, and set requires_grad to"
            " False for parameters that are not to be trained."
        )


def learning_rate(step: int, total_steps: int, config: OptimConfig, reductions: int = 0) -> float:
    """Return the learning rate of a step, which does not depend on the steps before it.

    Step k of the warmup uses lr x (k + 1) / warmup_steps. As in torch's schedulers, the decay would
    reach the final rate at step total_steps, which is not taken: the last step's rate is higher.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, total_steps - config.decay_steps)
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    remaining = {
        "constant": 1.0,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "linear": 1.0 - progress,
        "wsd": 1.0 - progress,
        "plateau": config.plateau_factor**reductions,
    }[config.schedule]
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * remaining)


def set_learning_rate(
    optimizer: torch.optim.Optimizer,
    step: int,
    total_steps: int,
    config: OptimConfig,
    reductions: int = 0,
) -> None:
    """Set the learning rate of a step in every group, multiplied by the group's lr_scale."""
    rate = learning_rate(step, total_steps, config, reductions)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Collect the gradients of one step."""
    return [p.grad for p in parameters if p.grad is not None]


def normalize_and_clip_(
    gradients: list[Tensor], scale: Tensor | float, clip_norm: float | None
) -> Tensor | float:
    """Multiply the gradients by scale and clip them, with one multiplication.

    Args:
        gradients: all gradients of one step, after its last backward pass.
        scale: the factor that turns them into the gradient of the loss per item.
        clip_norm: the maximum norm over all parameters, after scaling; None: no clipping.

    Returns:
        The norm after scaling and before clipping, a scalar tensor or, on a CPU, a number; not
        finite if the gradient is not.
    """
    # like torch.nn.utils.get_total_norm, but without sorting the gradients by device
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore
    if isinstance(norm, DTensor):  # the gradients are sharded
        norm = norm.full_tensor()
    if norm.is_cpu:  # reading it is immediate, and numbers are faster than tensors
        norm, scale = norm.item(), float(scale)
    norm = norm * scale
    if clip_norm is not None:
        clip = clip_norm / (norm + 1e-6)
        scale = scale * (clip.clamp(max=1.0) if isinstance(clip, Tensor) else min(clip, 1.0))
    # a factor of a different dtype would launch one more kernel per gradient
    is_float32 = gradients[0].dtype == torch.float32
    if isinstance(scale, Tensor):
        factor = scale.float() if is_float32 else scale
    else:
        factor = torch.full((), scale, dtype=torch.float32 if is_float32 else torch.float64)
    torch._foreach_mul_(gradients, factor)  # type: ignore[attr-defined]
    return norm


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor | float) -> None:
    """Take an optimizer step; if the norm is not finite, change neither weights nor state.

    Fused optimizers decide this on the GPU; for other optimizers, the host waits for the norm.
    """
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    # if SGD's kernel skips the first step, it leaves the momentum uninitialized
    lacks_momentum = not optimizer.state and any(g.get("momentum") for g in optimizer.param_groups)
    if is_fused and not lacks_momentum and isinstance(norm, Tensor) and norm.is_cuda:
        optimizer.grad_scale = None  # type: ignore[attr-defined]  # read by the fused kernels
        # 0 * inf is NaN; isfinite would launch more kernels
        optimizer.found_inf = (0 * norm).isnan().float()  # type: ignore[attr-defined]
        optimizer.step()
        return
    from .step_sums import read_on_host  # imports accelerate, which `predict` does without

    if math.isfinite(read_on_host(norm)[0] if isinstance(norm, Tensor) else norm):
        optimizer.step()


@contextmanager
def evaluated_view(optimizer: Any) -> Iterator[None]:
    """Switch to the weights of eval() inside the block, if the optimizer has two views."""
    if not has_two_views(optimizer):
        yield
        return
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in weights]  # train() would bring them back rounded
    optimizer.eval()
    yield  # not in a try: an error in the block ends the run
    optimizer.train()
    with torch.no_grad():
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)
