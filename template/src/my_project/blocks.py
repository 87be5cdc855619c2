"""Find the blocks of a model, recompute their activations, and compile them.

FSDP2 gathers one block at a time (sharding.py). If the config says so, the activations of blocks
are recomputed in the backward pass, and each block is compiled. All this changes how modules are
called, but replaces no module: the names of the parameters and the keys of exports and checkpoints
stay those of the plain model.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from .config import Config, ConfigError
from .recipe import Recipe, optional


# ---- which modules are blocks --------------------------------------------------------------------
def blocks(recipe: Recipe, model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: what the recipe's model_blocks returns, or outermost modules.

    By default, the outermost modules of certain classes are the blocks: the classes that
    transformers never splits over devices or, if there are none, the classes that occur several
    times in a ModuleList or Sequential, except leaves such as Linear. A module that shares a weight
    with another part of the model is not a block, since FSDP2 could not gather it alone.
    """
    if model_blocks := optional(recipe, "model_blocks"):
        return list(model_blocks(model))
    lists = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
    names = set().union(*lists) or _repeated(model)
    holders = Counter(_parameters(model))
    outermost: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer ones first
        if type(module).__name__ in names and module not in inside:
            is_shared = any(n < holders[p] for p, n in Counter(_parameters(module)).items())
            outermost += [] if is_shared else [module]
            inside |= {*(() if is_shared else module.modules())}
    return outermost


def _repeated(model: nn.Module) -> set[str]:
    """Return the names of classes that occur several times in a list and have submodules."""
    lists = (nn.ModuleList, nn.Sequential)
    return {
        kind.__name__
        for module in model.modules()
        if isinstance(module, lists)
        for kind, number in Counter(type(part) for part in module if any(part.children())).items()
        if number > 1 and kind not in (*lists, nn.ModuleDict)
    }


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of every module in turn; a tied weight is yielded several times."""
    return (p for module in model.modules() for p in module.parameters(recurse=False))


# ---- activation checkpointing --------------------------------------------------------------------
def recompute_activations(block: nn.Module) -> None:
    """Keep only a block's inputs, and compute its forward again in the backward pass.

    The random state is restored first, so dropout draws the same masks.
    """
    vars(block)["own_forward"] = vars(block).get("forward")  # None: that of its class is used
    # a bound method, so that a deep copy of the block calls its own forward
    block.forward = MethodType(_recomputed_forward, block)


def checkpoint_activations_of_blocks(
    config: Config, model: nn.Module, accelerator: Accelerator
) -> None:
    """Recompute the activations of blocks, if the config or accelerate's FSDP plugin says so."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    by_plugin = getattr(plugin, "activation_checkpointing", False)
    if not (config.distributed.activation_checkpointing or by_plugin):
        return
    if not (block_list := blocks(config.recipe, model)):
        raise ConfigError(
            f"distributed.activation_checkpointing: {type(model).__name__} has no blocks; return"
            " them from the recipe's model_blocks."
        )
    for block in block_list:
        recompute_activations(block)


def _recomputed_forward(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    forward = getattr(block, "own_forward", None) or partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    if not torch.compiler.is_compiling():  # compiled code updates the statistics only once
        named["context_fn"] = lambda: (nullcontext(), _kept_statistics(block))
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


@contextmanager
def _kept_statistics(block: nn.Module) -> Iterator[None]:
    """Undo the second update of BatchNorm's running statistics when the recomputation ends."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def blocks_are_recomputed(model: nn.Module) -> bool:
    """Return whether the activations of any block are recomputed."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return any(getattr(forward, "__func__", None) is _recomputed_forward for forward in forwards)


# ---- torch.compile -------------------------------------------------------------------------------
def compile_blocks_in_place(accelerator: Accelerator, wrapper: Any, config: Config) -> None:
    """Compile as accelerate's dynamo_config says, but here instead of in accelerate.

    accelerate would put each block into another module, compile DDP's own code with the model, and
    pass dynamic=False, because `accelerate launch` cannot leave dynamo_use_dynamic unset. With
    dynamic=False, a batch of another length compiles everything again.

    If dynamo_use_regional_compilation is set, each block is compiled alone. This is also done under
    FSDP, which gathers a block's weights between the compiled parts. In all other cases, and if the
    model has no blocks, the wrapper is compiled as a whole.

    Args:
        accelerator: this process's Accelerator, which compiles nothing afterwards.
        wrapper: a contract.RecipeModule, which calls the model and the recipe's loss.
        config: the run's config.
    """
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is None or plugin.backend == DynamoBackend.NO:
        return
    options = plugin.to_kwargs()
    options["dynamic"] = options.get("dynamic") or None  # None: sizes that change become dynamic
    plugin.backend = DynamoBackend.NO
    is_sharded = getattr(accelerator.state, "fsdp_plugin", None) is not None
    parts = blocks(config.recipe, wrapper.model)
    is_by_block = parts and (plugin.use_regional_compilation or is_sharded)
    for module in parts if is_by_block else [wrapper]:
        module.compile(**options)
