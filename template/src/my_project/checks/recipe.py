"""Check that the recipe's loss returns sums, as the loop needs, and find what has no effect."""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from inspect import getmembers_static, isroutine, signature
from types import CodeType
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import default_collate

from .. import contract
from ..config import ConfigError
from ..contract import RecipeModule
from ..ema import ema_problem
from ..evaluate import evaluation_mode, restored_state
from ..files import T
from ..loading.layout import is_stream
from ..loading.loader import Fetch, make_loader
from ..loading.seeding import permutation, seed_forward, seed_rng
from ..process import DRY_RUN
from ..ranks import on_main_then_broadcast
from ..recipe import PARAMETERS, Batch, Dataset, Datasets, Recipe, optional, source_location
from .findings import Findings

MIN_SAMPLES, MAX_SAMPLES = 4, 8  # half of 2 would be one sample, often a special case
TOLERANCE = 0.02  # relative: padding moves the outputs of a correct model a little
SAME = 1e-4  # relative: how much two equal forwards may differ
MEAN_RATIOS = 0.4, 0.6  # (loss of the whole) / (sum of the halves' losses), if loss returns a mean


# ---- loss and num_items --------------------------------------------------------------------------
def check_sums(
    findings: Findings, model: RecipeModule, train_set: Dataset, validation_sets: Datasets
) -> None:
    """Compare what `loss` returns for a few samples and for their halves. Called by every rank.

    All forwards are in evaluation mode, without gradients and uncompiled. The first one has the
    precision of training; its loss must not be a sum in half precision. The others have full
    precision, except with FSDP, where they too have the precision of training. The samples are the
    same on every rank, and weights and buffers are restored. For a stream, the first validation set
    is read, since a lane may take long to open.

    Args:
        findings: the findings of this run.
        model: the prepared model, without DDP (contract.RecipeModule).
        train_set: the training set; the first samples of its first epoch are read, by a loader
            worker if there is one.
        validation_sets: the validation sets, by name.

    Raises:
        ConfigError: loss returns values of another form, or a sum in a lower precision; or it
            returns no sums or draws its own random numbers, and checks.recipe is end.
    """
    config, accelerator = findings.run.config, findings.accelerator
    recipe, batches = config.recipe, config.batches
    data = train_set
    if is_stream(train_set):
        data = next(iter(validation_sets.values()), [])  # a lane of a stream may take long to open
    count = max(MIN_SAMPLES, min(batches.micro_batch_size or MAX_SAMPLES, MAX_SAMPLES))
    count = min(count, batches.global_batch_size, len(data))
    if count < MIN_SAMPLES or not findings.is_on("recipe"):
        return
    problem: str | None = None  # None: not compared
    device = accelerator.device

    def check_returned(plain: nn.Module, batch: Any) -> None:
        # inside the forward, since accelerate converts all that the forward returns to float32
        contract.check_loss(recipe, recipe.loss(plain, batch, 0))

    def in_full_precision(plain: nn.Module, batch: Any) -> np.ndarray:
        # with FSDP, the gathered weights have a lower precision, and need autocast
        full = torch.autocast(device.type, enabled=False)
        with nullcontext() if model.autocast else full:
            return np.array([float(value) for value in recipe.loss(plain, batch, 0)[:2]])

    def call(function: Callable[[nn.Module, Batch], T], batch: Batch) -> T:
        """Call a function in the model's forward; raise its error once the forward has ended."""
        errors: list[Exception] = []

        def catching(plain: nn.Module, batch: Batch) -> T | None:
            try:
                return function(plain, batch)
            except Exception as error:
                errors.append(error)

        result = model(catching, send_to_device(batch, device))
        if errors:
            raise errors[0]
        return result

    def returned(seed: int, part: int) -> np.ndarray:
        seed_forward(config.seed, "check", seed, device)
        return call(in_full_precision, read[seed][part])

    with restored_state(model), evaluation_mode(accelerator, model):
        try:
            order = permutation(len(data), config.seed, 0)(np.arange(count))
            collate = partial(whole_and_halves, optional(recipe, "collate") or default_collate)
            # not auto: seeding in whole_and_halves would count as a draw, and the samples would be
            # read again
            fetch = Fetch(data, collate, config.seed, batches.seed_samples is not False)
            options = {"max_workers": 1, "persistent_workers": False, "pin_memory": False}
            keys = [[(0, index) for index in order.tolist()]]
            (read,) = make_loader(batches, fetch, device, batch_sampler=keys, **options)
            call(check_returned, read[0][0])
            if not getattr(recipe, "compares_samples", False):
                problem = sums_problem(returned, count)
        except ConfigError:
            raise
        except Exception as error:  # for example, loss need not accept batches of another size
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            findings.passed("recipe", f"loss and num_items cannot be compared: {reason}")
    if problem := on_main_then_broadcast(accelerator, lambda: problem):
        place = source_location(recipe.loss)
        findings.run.is_loss_a_sum = False
        findings.run.when_loss_is_no_sum()
        findings.add("recipe", f"{type(recipe).__name__}.loss ({place}) {problem}")
    elif problem is not None:
        findings.passed("recipe", "loss and num_items add up")


def whole_and_halves(collate: Callable[[list], Batch], samples: list) -> list[list[Batch]]:
    """Collate samples as a whole, the first half and the second half, under three seeds."""
    half = len(samples) // 2
    batches: list[list[Batch]] = [[], [], []]
    for seed, collated in enumerate(batches):
        for part in (samples, samples[:half], samples[half:]):
            seed_rng(seed)
            collated.append(collate(deepcopy(part)))  # since collate may change its samples
    return batches


def sums_problem(returned: Callable[[int, int], np.ndarray], count: int) -> str:
    """Return what is wrong with the values that a loss returns; "" if they are sums.

    Args:
        returned: gives (loss_sum, num_items) for a seed, 0 to 2, and a part of the samples: 0 for
            the whole, 1 and 2 for its halves.
        count: the number of samples.
    """
    sums = np.array([[returned(seed, part) for part in range(3)] for seed in range(3)])
    again = returned(0, 0)
    whole, first, second = sums[0]
    size = np.maximum(abs(whole), abs(first) + abs(second))
    loss_adds_up, items_add_up = abs(whole - first - second) <= TOLERANCE * size
    if abs(sums[1, 0] - whole)[0] > SAME * size[0]:
        # loss draws random numbers (a VAE, diffusion, masking), other ones for the halves, so only
        # a mean can be recognized
        ratios = sums[:, 0, 0] / sums[:, 1:, 0].sum(1)
        loss_adds_up = not ((ratios > MEAN_RATIOS[0]) & (ratios < MEAN_RATIOS[1])).all()
        items_add_up |= (sums[..., 1] != sums[0, :, 1]).any()  # num_items is drawn too
    if abs(again - whole)[0] > SAME * size[0]:
        return (
            f"returned {whole[0]:.5g} and later {again[0]:.5g} for the same {count} samples and"
            " seed: it counts its calls, or draws from a generator of its own. Use the"
            " argument step instead of a count, and the global generators."
        )
    if not np.isfinite(sums[0]).all() or (loss_adds_up and items_add_up):
        return ""
    names = ("loss_sum", loss_adds_up), ("num_items", items_add_up)
    wrong = " and ".join(name for name, adds_up in names if not adds_up)
    return (
        f"must return sums, but its {wrong} did not add up: for {count} samples it returned"
        f" {whole[0]:.5g} and {whole[1]:.5g} items, for their halves {first[0]:.5g} and"
        f" {first[1]:.5g} items, {second[0]:.5g} and {second[1]:.5g} items. The weights would"
        " depend on the number of processes. Return the sum of the per-item losses (such as"
        ' reduction="sum") and the number of items in it, both without padding, and check that no'
        " shapes broadcast by mistake, such as (8, 1) and (8,). If the loss compares samples with"
        " each other, set compares_samples = True in the recipe."
    )


# ---- what has no effect --------------------------------------------------------------------------
def check_settings(findings: Findings) -> None:
    """Find averaged weights that stay near the initial ones, and misspelled methods.

    Raises:
        ConfigError: there is one, and checks.recipe is end.
    """
    if not findings.is_on("recipe"):
        return
    config = findings.run.config
    problem = ema_problem(config.optim.ema_decay, findings.run.total_steps)
    if problem and DRY_RUN not in os.environ:  # which has too few steps for any EMA
        findings.add("recipe", problem)  # the problem of the EMA
    for name, meant in misspelled(config.recipe).items():
        place = source_location(getattr(config.recipe, name))
        method = f"{type(config.recipe).__name__}.{name} ({place})"
        findings.add("recipe", f"{method} is not a method that the loop calls: is {meant} meant?")


def is_lone(recipe: Recipe, name: str, other: str) -> bool:
    """Return whether the recipe lacks another method, or only inherits it beside this one.

    In the second case, this method may be a misspelled override of the other one. It is not if a
    class defines both, or if the recipe's own code uses its name.
    """
    kinds = [vars(kind) for kind in type(recipe).__mro__]
    defined = [{name, other} & {*kind, *kind.get("__annotations__", ())} for kind in kinds]
    functions = (value for kind in kinds for value in kind.values())
    codes = [code for function in functions if (code := getattr(function, "__code__", None))]
    for code in codes:  # with the functions inside functions
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    is_used = any(name in code.co_names for code in codes)
    return next(filter(None, defined)) == {name} and {name, other} not in defined and not is_used


def misspelled(recipe: Recipe) -> dict[str, str]:
    """Map the recipe's methods to methods of almost the same name that the loop or a command calls.

    A method is included only if it also accepts the arguments of the other one; most methods with a
    similar name, such as `exported`, do not.
    """
    methods = {name for name, value in getmembers_static(type(recipe)) if isroutine(value)}
    meanings: dict[str, str] = {}
    for name in sorted(name for name in methods - {*PARAMETERS} if not name.startswith("_")):
        candidates = [other for other in PARAMETERS if is_lone(recipe, name, other)]
        for meant in get_close_matches(name, candidates, 1, 0.8):
            with suppress(TypeError, ValueError):
                signature(getattr(recipe, name)).bind(*PARAMETERS[meant])
                meanings[name] = meant
    return meanings
