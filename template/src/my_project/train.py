"""Train a recipe: a whole run from start to end, with every operation of a step in order.

accelerate launch --config_file accelerate_configs/cpu_2_processes.yaml \
    -m my_project.train --config configs/image_classification.yaml --optim.lr 3e-3
"""

from .config import Config
from .settings import parse_command_line

# Parsed before torch is imported, so that --help and a wrong path are answered immediately.
CONFIG = parse_command_line(__doc__ or "") if __name__ == "__main__" else None

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from . import contract, exits, optim, parallel
from .accelerator import check_launch, check_precision, numerics, start_accelerator
from .checkpoint import exporting, resuming
from .checkpoint.saving import Checkpoints
from .checks.start import Checks
from .contract import check_best_metric
from .ema import EMA, build_ema
from .evaluate import evaluate, sanity_check
from .files import Json
from .loading.layout import (
    BatchLayout,
    batch_layout,
    is_stream,
    lengths,
    total_steps,
)
from .loading.loader import read_batches
from .loading.prepare import prepare_data
from .loading.seeding import seed_forward
from .loading.streams import StreamBatches
from .memory import memory_explained
from .mirror.download import fetch_from_mirror
from .mirror.upload import finish_mirror, start_mirror
from .process import PREEMPTED, garbage_collected_at_records, world
from .ranks import gather_on_main, open_run
from .recipe import DataInfo, Dataset, Datasets
from .records import samples
from .records.log import log_finished, log_start
from .records.recorder import Recorder, check_outputs
from .run_folder import Run, failures_recorded
from .state import StepReport, TrainState, is_due
from .statistics import RunningStatistics, exact_statistics
from .step_sums import DelayedReader
from .stopping import StopRequest, first_reason
from .watchdog import Watchdog


@dataclass
class Votes:
    """What the ranks have agreed to do, by their votes in the all-reduce of each step."""

    stop: bool = False
    save: bool = False  # a time-based save: see Checkpoints.is_due_by_time


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model that a run trains, and everything that its loop reads, calls and writes."""

    run: Run
    config: Config
    accelerator: Accelerator
    layout: BatchLayout  # how a global batch is divided
    # this rank's forward passes in each step: (number of the micro-batch, whether it is a repeat)
    passes: list[tuple[int, bool]]
    data_info: DataInfo  # from the recipe's prepare_data
    validation_sets: Datasets  # by name
    batches: Iterable[Any]  # the micro-batches of this rank
    model: nn.Module  # from the recipe's build_model
    wrapped_model: nn.Module  # the model in DDP or FSDP2, autocast and torch.compile
    # not wrapped in DDP, because the ranks evaluate batches of different sizes
    eval_model: contract.RecipeModule
    forward: Callable[..., Any]  # called in training: wrapped_model, or a method that calls it
    parameters: list[nn.Parameter]  # the trained ones, with requires_grad
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None  # scales the loss in fp16
    ema: EMA | None
    statistics: RunningStatistics | None  # keeps BatchNorm's running statistics exact
    state: TrainState
    first_step: int  # the first step that this process takes
    sums: DelayedReader  # all-reduces the sums of each step
    checkpoints: Checkpoints
    recorder: Recorder
    checks: Checks
    stop: StopRequest
    votes: Votes = field(default_factory=Votes)


@exits.one_at_a_time()
def main(config: Config) -> int:
    """Train to the end, or until asked to stop.

    Returns:
        The exit code: 0 if finished; 75 if asked to stop (stopping.py), so that the same command
        resumes the run.

    Raises:
        ConfigError: an error that the user can fix.
    """
    # check everything that can be checked before there is a process group
    world_size, rank = world()
    layout = batch_layout(config.batches, world_size)
    check_launch(config)
    check_precision(config)
    check_outputs(config)
    contract.check_recipe(config)
    fetch_from_mirror(config)  # continue the run of a machine that was lost
    with closing(Run(config, rank)) as run:
        data_info = prepare_data(config)
        with Watchdog(run):
            train_set, validation_sets = contract.build_datasets(config.recipe, data_info, config)
        config = run.config = check_best_metric(config, validation_sets)
        run.total_steps = total_steps(config, train_set, layout)
        if run.finished:
            if rank == 0:
                log_finished(run, before=True)
            return 0

        with (
            StopRequest(config) as stop,
            failures_recorded(run),
            Watchdog(run),
            start_accelerator(config) as accelerator,
        ):
            t = build(run, layout, accelerator, stop, data_info, train_set, validation_sets)
            with t.checkpoints, t.recorder, garbage_collected_at_records():
                with memory_explained(accelerator, run, layout, t.model, train_set):
                    end_reason = train(t)
            run.exit_code = finish(t, end_reason)
        return run.exit_code


def build(
    run: Run,
    layout: BatchLayout,
    accelerator: Accelerator,
    stop: StopRequest,
    data_info: DataInfo,
    train_set: Dataset,
    validation_sets: Datasets,
) -> Training:
    """Build model, optimizer and state, new or resumed. Called by every rank.

    Args:
        run: the run and its folder.
        layout: how a global batch is divided.
        accelerator: this process's Accelerator.
        stop: the request to stop this run.
        data_info: from the recipe's prepare_data.
        train_set: a dataset or a stream.
        validation_sets: datasets by name.
    """
    config = run.config
    run.numerics = numerics(accelerator, run)
    must_agree = {"config": config, "data_info": data_info}
    open_run(accelerator, run, must_agree, lengths(train_set, validation_sets))
    resume_from = resuming.choose(accelerator, run)
    checks = Checks(accelerator, run, data_info, train_set, validation_sets)
    model, weights = parallel.build_model(accelerator, config, data_info, resume_from)
    checks.compare(model, is_resumed=bool(resume_from))
    optimizer = optim.build_optimizer(config.optim, config.recipe, model)
    wrapped, eval_model = parallel.prepare(accelerator, config, model, optimizer, weights)
    scaler = accelerator.scaler  # None unless fp16
    checkpoints = Checkpoints(run, model, optimizer, scaler)
    ema = checkpoints.ema = build_ema(config, model, optimizer)
    state = TrainState()
    if resume_from:
        is_own = resume_from.resolve().parent == checkpoints.folder.resolve()
        state.restore(checkpoints.resume(resume_from), config, is_own=is_own)
    run.step = state.step
    start_mirror(accelerator, checkpoints)
    log_start(accelerator, run, layout, model, resume_from)
    if run.rank == 0:
        run.write_status("running")

    steps = range(state.step, run.total_steps)
    make_batches: Any = read_batches
    if is_stream(train_set):
        make_batches = partial(StreamBatches, states=state.stream_states)
    batches = make_batches(config, train_set, layout, steps, accelerator)
    wrapped.train()
    sums = DelayedReader(accelerator)
    forward: Callable[..., Any] = wrapped
    statistics = exact_statistics(accelerator, wrapped, layout, sums)
    if statistics:
        forward = statistics.forward
    stop.loop_begins()
    return Training(
        run=run,
        config=config,
        accelerator=accelerator,
        layout=layout,
        passes=layout.passes(run.rank),
        data_info=data_info,
        validation_sets=validation_sets,
        batches=batches,
        model=model,
        wrapped_model=wrapped,
        eval_model=eval_model,
        forward=forward,
        parameters=[p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        scaler=scaler,
        ema=ema,
        statistics=statistics,
        state=state,
        first_step=state.step,
        sums=sums,
        checkpoints=checkpoints,
        recorder=Recorder(accelerator, run, layout, state, wrapped),
        checks=checks,
        stop=stop,
    )


def train(t: Training) -> str:
    """Train until the run ends or is asked to stop. Step k trains on global batch k.

    Returns:
        Why the run ended; "" if it was asked to stop.
    """
    run, state, votes = t.run, t.state, t.votes
    # due at the start if, for example, the previous start ended before it recorded this evaluation
    if state.evaluation_is_due(run):
        evaluate_and_record(t)
    elif state.step == 0:
        check_before_first_step(t)
    t.checks.watch(t.eval_model)
    end_reason = state.end_reason(run)
    micro_batches = t.recorder.timed(t.batches)
    while not (end_reason or votes.stop):
        train_step(t, micro_batches)

        # if both are due, save first, so that a failed evaluation loses no step
        evaluation_due = state.evaluation_is_due(run)
        save_due = is_due(t.config.checkpoints.every_steps, state.step)
        save_due |= state.step == run.total_steps
        if save_due or evaluation_due or votes.stop or votes.save:
            observe(t, t.sums.flush())  # so that the checkpoint counts this step
            # no time-based save while steps are skipped: the weights may be useless
            save_due |= votes.stop or (votes.save and not state.consecutive_skipped_steps)
            if save_due:
                save(t)
            if evaluation_due and not votes.stop:  # after a stop, the next start evaluates
                evaluate_and_record(t)
            end_reason = state.end_reason(run)
            if end_reason and not save_due:  # early stopping, at a step without a save
                save(t)
    return end_reason


def train_step(t: Training, micro_batches: Iterator[Any]) -> None:
    """Take one optimizer step, over global batch `t.state.step`."""
    config, state = t.config, t.state
    step, recipe = state.step, config.recipe
    optim.set_learning_rate(t.optimizer, step, t.run.total_steps, config.optim, state.lr_reductions)
    sums = t.sums.begin()
    for j, (micro_batch, is_repeated) in enumerate(t.passes):
        batch = next(micro_batches)
        # dropout depends on (seed, step, micro-batch) only
        seed_forward(config.seed, step, micro_batch, t.accelerator.device)
        is_last = j == len(t.passes) - 1
        with parallel.gradient_sync(t.wrapped_model, is_last=is_last):
            # calls recipe.loss(t.model, batch, step) inside the forward that DDP, FSDP2, autocast
            # and torch.compile wrap
            returned = t.forward(recipe.loss, batch, step)
            if step == t.first_step and j == 0:
                t.sums.set_names(contract.check_loss(recipe, returned))
            t.checks.after_forward(step)
            if is_repeated:  # a rank with fewer micro-batches repeats one, with weight 0
                returned = contract.with_zero_weight(returned)
            loss_sum, num_items, *scalars = returned
            sums.add(loss_sum, num_items, *scalars)
            if is_last:  # the all-reduce of the sums overlaps with the last backward
                sums.start_all_reduce(t.stop.requested, t.checkpoints.is_due_by_time)
            # not accelerator.backward, which divides by its own gradient_accumulation_steps
            (t.scaler.scale(loss_sum) if t.scaler else loss_sum).backward()
    sums.wait()
    if t.scaler:
        t.scaler.unscale_(t.optimizer)
    parallel.refuse_unused(t.wrapped_model)
    # undo the averaging by DDP or FSDP2, and divide by the items of the whole global batch: this
    # gives the gradient of the mean loss per item
    normalizer = t.layout.world_size / sums.num_items
    norm = optim.normalize_and_clip_(  # no variable for the gradients: it would keep them in memory
        optim.gradients(t.parameters), normalizer, config.optim.clip_norm
    )
    optim.step_if_finite(t.optimizer, norm)  # scaler.step would wait for the device
    if t.statistics:
        t.statistics.finish(sums, norm)
    if t.scaler:
        t.scaler.update()
    t.optimizer.zero_grad()  # DDP may keep them as zeros: see parallel.keep_gradients_in_buckets
    if t.ema:
        t.ema.update()  # even after a skipped step
    state.step = t.run.step = step + 1  # skipped steps count too
    t.recorder.step_ended(step)
    observe(t, t.sums.push(step, sums, norm))  # reports step - 1
    t.run.note_progress(is_step=True)
    t.checks.after_step(step)
    if step < t.first_step + 2:
        t.checkpoints.check_optimizer()


def observe(t: Training, report: StepReport | None) -> None:
    """Count the step that a report describes; None means that there is no report yet."""
    if report:
        t.votes.stop |= report.stop_votes > 0
        t.votes.save |= report.save_votes > 0
        t.state.observe(report)
        t.recorder.observe(report)
        t.state.check_skipped(report, t.config.optim.max_skipped_steps)


def save(t: Training) -> None:
    """Save a checkpoint. Called by every rank."""
    if isinstance(t.batches, StreamBatches):
        t.state.stream_states = t.batches.stream_states()
    t.run.note_progress()
    with t.recorder.paused("saving"):
        t.checks.at_save()
        t.checkpoints.save(t.state)
        if t.state.step == t.run.total_steps:  # it must be on disk before the last evaluation
            t.checkpoints.wait()
            t.accelerator.wait_for_everyone()
    t.votes.save = False  # every save restarts the clock of time-based saves


def check_before_first_step(t: Training) -> None:
    """Try an evaluation and check the recipe, so that a mistake ends the run before it trains."""
    t.run.note_progress()
    with t.recorder.paused("evaluation"):
        if t.config.evaluation.sanity_check:
            sanity_check(t.run, t.accelerator, t.eval_model, t.validation_sets)
        t.checks.before_first_step(t.eval_model)


@contextmanager
def evaluated_weights(t: Training) -> Iterator[None]:
    """Inside the block, replace the trained weights with the weights to evaluate and export."""
    with ExitStack() as stack:
        stack.enter_context(optim.evaluated_view(t.optimizer))
        if t.ema:
            stack.enter_context(t.ema.swapped_in())
        yield


def evaluate_and_record(t: Training) -> None:
    """Evaluate, export the weights if they are the best so far, and record the results."""
    run, accelerator, model, state = t.run, t.accelerator, t.eval_model, t.state
    run.note_progress()
    with t.recorder.paused("evaluation"), evaluated_weights(t):
        results = evaluate(
            accelerator, t.config, model, t.validation_sets, state.step, run.note_progress
        )
        shown: dict[str, Json] = {}
        shown |= samples.show(accelerator, run, model, t.data_info, t.validation_sets)
        if state.record_evaluation(t.config, results):  # the best so far
            exporting.export(run, t.data_info, t.model, t.checkpoints, "best")
    t.recorder.write_evaluation(results, shown)
    t.checkpoints.add_evaluation(state)


def finish(t: Training, end_reason: str) -> int:
    """Export the weights, or leave the run to be continued; return the exit code."""
    run, checkpoints, state = t.run, t.checkpoints, t.state
    run.note_progress()
    if not end_reason:
        t.accelerator.wait_for_everyone()  # once a rank exits, torchrun kills those still saving
        checkpoints.check("checkpoint")
        reasons = gather_on_main(t.accelerator, t.stop.reason)
        if run.rank == 0:
            reason = first_reason(reasons, run.hosts)
            t.recorder.write("stop", {"reason": reason})
            run.write_status("preempted", reason, note=checkpoints.note)
        finish_mirror(t.accelerator, checkpoints, is_stop=True)
        return PREEMPTED
    state.check_trained()
    with evaluated_weights(t):
        exporting.export(run, t.data_info, t.model, checkpoints)
    # no rank may exit before the export ends: if the export hangs, the exited rank would be blamed
    t.accelerator.wait_for_everyone()
    checkpoints.check("checkpoint", "best", "export")
    if run.rank == 0:
        result = state.results | t.recorder.fields("of_run")
        patience = t.config.evaluation.patience if state.step < run.total_steps else 0
        note = checkpoints.note
        run.write_status("finished", end_reason, note=note, result=result, patience=patience)
        log_finished(run)
    finish_mirror(t.accelerator, checkpoints, is_stop=False)
    return 0


if CONFIG:
    exits.run_on_all_ranks(main, CONFIG)
