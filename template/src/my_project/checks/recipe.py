"""Whether the recipe's loss returns sums, as the loop needs them, and what has no effect in it."""

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from inspect import getmembers_static, isroutine, signature
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import default_collate

from .. import contract
from ..config import ConfigError
from ..ema import ema_problem
from ..evaluate import evaluation_mode, restored_state
from ..loading.layout import is_stream
from ..loading.loader import Fetch, make_loader
from ..loading.seeding import permutation, seed_forward, seed_rng
from ..process import DRY_RUN
from ..ranks import on_main_then_broadcast
from ..recipe import PARAMETERS, Recipe, optional, source_location
from .findings import Findings

FEWEST, MOST = 4, 8  # samples: a half of one sample may be a special case to a recipe
TOLERANCE = 0.02  # relative: padding moves the outputs of a sound model a little
SAME = 1e-4  # relative: what the same forward gives twice
A_MEAN = 0.4, 0.6  # of a whole and the sum of its halves


# ---- loss and num_items --------------------------------------------------------------------------
def check_sums(
    findings: Findings, model: Any, train_set: Any, validation_sets: dict[str, Any]
) -> None:
    """Compare what `loss` returns for a few samples and for their halves. Called by every rank.

    Once in the precision of training, where the sum must be float32. Then in evaluation mode,
    without gradients, uncompiled and in full precision. The samples are the same on every rank, and
    weights and buffers are restored. Of a stream they are those of the first validation set, since
    a lane may take long to open.

    Args:
        findings: of this run.
        model: prepared, without DDP (contract.RecipeModule).
        train_set: whose first samples are read, in a loader worker if there are any.
        validation_sets: by name.

    Raises:
        ConfigError: loss returns something else, or a sum in a lower precision.
    """
    config, accelerator = findings.run.config, findings.accelerator
    recipe, batches = config.recipe, config.batches
    data = train_set
    if is_stream(train_set):
        data = next(iter(validation_sets.values()), [])  # a lane of a stream may take long to open
    count = max(FEWEST, min(batches.micro_batch_size or MOST, MOST))
    count = min(count, batches.global_batch_size, len(data))
    if count < FEWEST or not findings.is_on("recipe"):
        return
    problem, device = "", accelerator.device

    def check_returned(plain: nn.Module, batch: Any) -> None:
        # in the forward: accelerate makes float32 of all that it returns
        contract.check_loss(recipe, recipe.loss(plain, batch, 0))

    def in_full_precision(plain: nn.Module, batch: Any) -> np.ndarray:
        # FSDP gathers weights of lower precision, which need autocast
        full = torch.autocast(device.type, enabled=False)
        with nullcontext() if model.autocast else full:
            return np.array([float(value) for value in recipe.loss(plain, batch, 0)[:2]])

    def call(function: Callable, batch: Any) -> Any:
        """Raise an error outside the forward, which FSDP leaves unfinished otherwise."""
        failed: list[Exception] = []

        def caught(plain: nn.Module, batch: Any) -> Any:
            try:
                return function(plain, batch)
            except Exception as error:
                failed.append(error)

        result = model(caught, send_to_device(batch, device))
        if failed:
            raise failed[0]
        return result

    def returned(seed: int, part: int) -> np.ndarray:
        seed_forward(config.seed, "check", seed, device)
        return call(in_full_precision, read[seed][part])

    with restored_state(model), evaluation_mode(accelerator, model):
        try:
            order = permutation(len(data), config.seed, 0)(np.arange(count))
            collate = partial(whole_and_halves, optional(recipe, "collate") or default_collate)
            fetch = Fetch(data, collate, config.seed, batches.seed_samples)
            brief = {"max_workers": 1, "persistent_workers": False, "pin_memory": False}
            keys = [[(0, index) for index in order.tolist()]]
            (read,) = make_loader(batches, fetch, device, batch_sampler=keys, **brief)
            call(check_returned, read[0][0])
            if not getattr(recipe, "compares_samples", False):
                problem = problem_of_sums(returned, count)
        except ConfigError:
            raise
        except Exception as error:  # it need not take a batch of another size
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            findings.passed("recipe", f"loss could not be compared with its halves: {reason}")
    if problem := on_main_then_broadcast(accelerator, lambda: problem):
        place = source_location(recipe.loss)
        findings.run.is_loss_a_sum = False
        findings.add("recipe", f"{type(recipe).__name__}.loss ({place}) {problem}")
    else:
        findings.passed("recipe", "loss and num_items add up")


def whole_and_halves(collate: Callable, samples: list[Any]) -> list[list[Any]]:
    """Collate samples as a whole, the first half and the second half, under three seeds."""
    half = len(samples) // 2
    batches: list[list[Any]] = [[], [], []]
    for seed, of_seed in enumerate(batches):
        for part in (samples, samples[:half], samples[half:]):
            seed_rng(seed)
            of_seed.append(collate(part))
    return batches


def problem_of_sums(returned: Callable[[int, int], np.ndarray], count: int) -> str:
    """Return what is wrong with what a loss returns, or an empty string.

    Args:
        returned: gives (loss_sum, num_items) by the seed, 0 to 2, and the part of the samples: 0
            for the whole, 1 and 2 for its halves.
        count: of the samples.
    """
    sums = np.array([[returned(seed, part) for part in range(3)] for seed in range(3)])
    again = returned(0, 0)
    whole, one, other = sums[0]
    size = np.maximum(abs(whole), abs(one) + abs(other))
    loss_adds_up, items_add_up = abs(whole - one - other) <= TOLERANCE * size
    if abs(sums[1, 0] - whole)[0] > SAME * size[0]:
        # a VAE, diffusion, masked tokens: halves draw other numbers, so only a mean can be told
        ratios = sums[:, 0, 0] / sums[:, 1:, 0].sum(1)
        loss_adds_up = not ((ratios > A_MEAN[0]) & (ratios < A_MEAN[1])).all()
        items_add_up |= (sums[..., 1] != sums[0, :, 1]).any()  # drawn too
    if abs(again - whole)[0] > SAME * size[0]:
        return (
            f"returned {whole[0]:.5g} and later {again[0]:.5g} for the same {count} samples and"
            " seed: it counts its calls, or draws from a generator of its own. Use its argument"
            " step, and the global generators."
        )
    if not np.isfinite(sums[0]).all() or (loss_adds_up and items_add_up):
        return ""
    names = ("loss_sum", loss_adds_up), ("num_items", items_add_up)
    wrong = " and ".join(name for name, adds_up in names if not adds_up)
    return (
        f"must return sums, but its {wrong} is not one: of {count} samples it returned"
        f" {whole[0]:.5g} and {whole[1]:.5g} items, of their halves {one[0]:.5g} and {one[1]:.5g}"
        f" items, {other[0]:.5g} and {other[1]:.5g} items. The weights would depend on the number"
        ' of processes. Return the sum of the per-item losses (such as reduction="sum") and the'
        " number of items in it, both without padding. A recipe whose loss compares samples with"
        " each other says so: compares_samples = True."
    )


# ---- what has no effect --------------------------------------------------------------------------
def check_settings(findings: Findings) -> None:
    """Warn of an average that stays near the initial weights, and of misspelled methods."""
    if not findings.is_on("recipe"):
        return
    config = findings.run.config
    problem = ema_problem(config.optim.ema_decay, findings.run.total_steps)
    if problem and DRY_RUN not in os.environ:  # of the EMA; a dry run has few steps
        findings.add("recipe", problem)  # of the EMA
    for name, meant in misspelled(config.recipe).items():
        place = source_location(getattr(config.recipe, name))
        method = f"{type(config.recipe).__name__}.{name} ({place})"
        findings.add("recipe", f"{method} is not a method that the loop calls: is {meant} meant?")


def misspelled(recipe: Recipe) -> dict[str, str]:
    """Return methods with nearly the name of an optional one that a recipe lacks, and its name.

    They take the same arguments: a method of the recipe's own, such as `exported`, hardly does.
    """
    lacking = [name for name in PARAMETERS if optional(recipe, name) is None]
    methods = {name for name, value in getmembers_static(type(recipe)) if isroutine(value)}
    found: dict[str, str] = {}
    for name in sorted(name for name in methods - {*PARAMETERS} if not name.startswith("_")):
        for meant in get_close_matches(name, lacking, 1, 0.8):
            with suppress(TypeError, ValueError):
                signature(getattr(recipe, name)).bind(*PARAMETERS[meant])
                found[name] = meant
    return found
