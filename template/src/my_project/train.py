"""Train a recipe. The whole step is read here, top to bottom.

accelerate launch --config_file accelerate_configs/cpu_2_processes.yaml \
    -m my_project.train --config configs/image_classification.yaml --optim.lr 3e-3
"""

from .config import Config, parse_command_line

# Before torch is imported, so that --help and a wrong config answer at once.
CONFIG = parse_command_line(__doc__ or "") if __name__ == "__main__" else None

from contextlib import nullcontext

import torch

from . import cli, contract, devices, export, launcher, optim, sharding, step_sums, stopping
from .checkpoint import resuming, saving
from .evaluate import evaluate, sanity_check
from .loading import layout, seeding
from .loading.feed import train_batches
from .records import display, metrics
from .run_folder import Run
from .state import (
    check_best_metric,
    check_trained,
    end_of,
    evaluation_is_due,
    is_due,
    note_best,
)


def main(config: Config) -> int:
    """Train to the end, or until asked to stop.

    Returns:
        The exit code: 0 finished; 75 stopped by a signal or by stop_after, to be continued by the
        same command.

    Raises:
        ConfigError: what the user can mend, before any process group starts.
    """
    # ---- before any process group: what can be refused is refused here ---------------------------
    recipe = config.recipe
    processes, rank = launcher.world()
    split = layout.split(config.batches, processes)
    devices.check_launch(config, split.accumulation)
    contract.check_recipe(config)
    run = Run(config, rank)
    data_info, reader = contract.prepare_data(config)
    with stopping.Watch(run):
        train_set, validation_sets = contract.build_datasets(reader, data_info)
    check_best_metric(config, validation_sets)
    total_steps = run.total_steps = layout.total_steps(config, train_set, split)
    if run.finished:
        if rank == 0:
            display.print_result(run)
        return 0
    resuming.check_path(config)

    with (
        stopping.StopRequest(config) as stop,
        stopping.failures_recorded(run),
        stopping.Watch(run) as watch,
        devices.start(config) as accelerator,
    ):
        # ---- model, optimizer and state, new or resumed ------------------------------------------
        is_main, device = accelerator.is_main_process, accelerator.device
        lengths = layout.lengths(train_set, validation_sets)
        devices.begin(accelerator, run, {"config": config, "data_info": data_info}, lengths)
        resume_from = devices.from_main(accelerator, lambda: resuming.choose(run))
        model = sharding.place(accelerator, config, contract.build_model(config, data_info))
        optimizer = optim.build_optimizer(config.optim, recipe, model)
        call, evaluation_call = sharding.prepare(accelerator, model, optimizer, split.accumulation)
        average = optim.Average(model, config.optim.ema_decay) if config.optim.ema_decay else None
        average_applied = average.applied if average else nullcontext
        state = {
            "step": 0,  # optimizer steps done; data, schedule and draws follow from it
            "epoch": 0,  # of a stream, and the step it began with
            "epoch_start": 0,
            "weight_per_micro_batch": split.micro_batch_size,  # until the first step tells
            "results": {},  # of the last evaluation
            "evaluated_step": -1,
            "best": None,  # best value of evaluation.best_metric
            "evaluations_since_best": 0,
            "interval_loss": 0.0,  # since the last record
            "interval_weight": 0.0,
            "skipped_steps": 0,
            "nonfinite_in_a_row": 0,
        }
        checkpoints = saving.Checkpoints(
            run, is_main, model, optimizer, accelerator.scaler, average
        )
        if resume_from:
            state |= checkpoints.load(resume_from)
        run.step = state["step"]
        display.log_start(accelerator, run, split, model, resume_from)
        if is_main:
            run.write_status("running")

        # ---- the loop: step k is global batch k --------------------------------------------------
        steps = range(run.step, total_steps)
        feed = train_batches(
            config, train_set, split, rank, steps, device, state, devices.smallest(accelerator)
        )
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        find_unused = sharding.finder_of_unused(call)
        in_buckets = sharding.has_gradients_in_buckets(call)
        call.train()
        stop.loop_begins()
        with (
            checkpoints,
            metrics.Telemetry(accelerator, config, run, split, state, watch, model, feed) as log,
        ):

            def evaluate_and_note() -> None:
                with log.paused(), average_applied():
                    results = evaluate(accelerator, config, evaluation_call, validation_sets)
                    if note_best(config, state, results):
                        export.export_best(run, data_info, model, is_main)
                log.write({"step": run.step} | results)
                checkpoints.add_evaluation(state)

            if evaluation_is_due(config, state, total_steps):  # killed while it evaluated
                evaluate_and_note()
            elif config.evaluation.sanity_check and run.step == 0:
                with log.paused():
                    sanity_check(accelerator, config, evaluation_call, validation_sets)
            ended = end_of(config, state, total_steps)
            samples = log.timed(feed)
            for step in steps if not ended else ():
                optim.set_learning_rate(
                    optimizer, optim.learning_rate(step, total_steps, config.optim)
                )
                backward_scale = 1 / optim.power_of_two(state["weight_per_micro_batch"])
                # over all processes: loss, weight, whether to stop, whether a stream is short; then
                # norm, and this process's own loss
                sums = torch.zeros(6, dtype=step_sums.sum_dtype(device), device=device)
                reduction = step_sums.Reduction(accelerator)
                for j in range(split.accumulation):
                    batch = next(samples)
                    seeding.seed_draws(config.seed, step, j * processes + rank, device)
                    is_last = j == split.accumulation - 1
                    with nullcontext() if is_last else accelerator.no_sync(call):
                        returned = call(recipe.loss, batch, step)
                        if step == steps.start and j == 0:
                            contract.check_loss(recipe, returned)
                        total, weight = returned
                        sums[0].add_(total.detach())
                        sums[1].add_(weight)
                        if is_last:  # one small sum over processes, under way beside the backward
                            if stop.requested or feed.is_short:
                                sums[2].fill_(stop.requested)
                                sums[3].fill_(feed.is_short)
                            sums[5].copy_(sums[0])
                            reduction.start(sums[:4])
                        # accelerator.backward also divides by its own accumulation, which is 1:
                        # two operations that a small model feels.
                        scaled = accelerator.scaler.scale(total) if accelerator.scaler else total
                        scaled.backward(torch.full_like(scaled, backward_scale))
                reduction.wait()
                accelerator.unscale_gradients()

                # Wrappers average over processes; the gradient wanted is that of the sum of all
                # losses over the sum of all weights.
                scale = (processes / backward_scale) / sums[1]
                norm = optim.normalise_and_clip_(  # no name keeps the gradients through a step
                    optim.gradients(trained, find_unused), scale, config.optim.clip_norm
                )
                sums[4].copy_(norm)
                optim.step_if_finite(optimizer, norm)
                if accelerator.scaler:
                    accelerator.scaler.update()
                optim.clear_gradients(optimizer, in_buckets, is_first=step == steps.start)
                if average:
                    average.update()
                state["step"] = run.step = step + 1
                log.push(step, sums)  # the host reads the numbers of the step before

                # ---- every so often: save, then evaluate: a failure there loses no step ---------
                evaluation_due = evaluation_is_due(config, state, total_steps)
                save_due = is_due(config.checkpoints.every_steps, run.step)
                save_due |= run.step == total_steps
                if save_due or evaluation_due or log.stop_requested:
                    log.flush()
                    if save_due or log.stop_requested:
                        with log.paused():
                            checkpoints.save(state)
                            if run.step == total_steps:  # on the disk before anything can fail
                                checkpoints.wait()
                                accelerator.wait_for_everyone()
                    if evaluation_due and not log.stop_requested:  # if so, the next start does it
                        evaluate_and_note()
                    ended = end_of(config, state, total_steps)
                    if ended and not save_due:
                        with log.paused():
                            checkpoints.save(state)
                    if ended or log.stop_requested:
                        break

        # ---- finish, or leave to be continued ----------------------------------------------------
        watch.pause()
        if not ended:
            accelerator.wait_for_everyone()  # where one leaves, torchrun soon ends those that save
            if is_main:
                reason = stop.reason or "asked to stop on another process"
                run.write_status("preempted", reason + checkpoints.note)
            return 75
        check_trained(state, is_fp16=bool(accelerator.scaler))
        with average_applied():
            export.export(run.folder / "export", config, data_info, model, is_main)
        accelerator.wait_for_everyone()  # a rank that had left would be blamed if an export hangs
        if is_main:
            result, is_early = state["results"] | log.throughput, run.step < total_steps
            patience = config.evaluation.patience if is_early else 0
            reason = ended + checkpoints.note
            run.write_status("finished", reason, result=result, patience=patience)
            display.print_result(run)
    return 0


if CONFIG:
    cli.run_on_all_ranks(main, CONFIG)
