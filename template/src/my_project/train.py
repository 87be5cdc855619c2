"""Train a recipe: the order of everything in a step, top to bottom.

accelerate launch --config_file accelerate_configs/cpu_2_processes.yaml \
    -m my_project.train --config configs/image_classification.yaml --optim.lr 3e-3
"""

from .config import Config
from .settings import parse_command_line

# Before torch is imported, so that --help and a wrong config answer at once.
CONFIG = parse_command_line(__doc__ or "") if __name__ == "__main__" else None

from . import contract, exits, optim, parallel, run_folder, stopping
from .accelerator import check_launch, start_accelerator
from .checkpoint import exporting, resuming
from .checkpoint.saving import Checkpoints
from .checks.agreement import Agreement
from .checks.findings import Findings
from .checks.ranks import EqualRanks
from .checks.recipe import check_settings, check_sums
from .contract import check_best_metric
from .ema import EMA
from .evaluate import evaluate, sanity_check
from .loading import prepare
from .loading.layout import batch_layout, is_stream, lengths, total_steps
from .loading.loader import IndexedBatches
from .loading.seeding import seed_forward
from .loading.streams import StreamBatches
from .process import PREEMPTED, garbage_collected_at_records, world
from .ranks import open_run
from .records import samples
from .records.log import log_finished, log_start
from .records.recorder import Recorder, check_outputs
from .run_folder import Run
from .state import StepReport, TrainState, is_due
from .statistics import exact_statistics
from .step_sums import DelayedReader
from .watchdog import Watchdog


@exits.one_at_a_time()
def main(config: Config) -> int:
    """Train to the end, or until asked to stop.

    Returns:
        The exit code: 0 if finished; 75 if stopped by a signal or stop_after, to be resumed by the
        same command.

    Raises:
        ConfigError: an error that the user can fix.
    """
    # ---- before any process group: what can be refused is refused here ---------------------------
    recipe = config.recipe
    world_size, rank = world()
    layout = batch_layout(config.batches, world_size)
    check_launch(config)
    check_outputs(config)
    contract.check_recipe(config)
    run = Run(config, rank)
    data_info = prepare.prepare_data(config)
    with Watchdog(run):
        train_set, validation_sets = contract.build_datasets(recipe, data_info, config)
    config = run.config = check_best_metric(config, validation_sets)
    run.total_steps = total_steps(config, train_set, layout)
    if run.finished:
        if rank == 0:
            log_finished(run, before=True)
        return 0

    with (
        stopping.StopRequest(config) as stop,
        run_folder.failures_recorded(run),
        Watchdog(run) as watchdog,
        start_accelerator(config) as accelerator,
    ):
        # ---- model, optimizer and state, new or resumed ------------------------------------------
        must_agree = {"config": config, "data_info": data_info}
        open_run(accelerator, run, must_agree, lengths(train_set, validation_sets))
        resume_from = resuming.choose(accelerator, run)
        findings = Findings(accelerator, run)
        agreement = Agreement(findings, data_info, train_set, validation_sets)
        raw_model, weights = parallel.build_model(accelerator, config, data_info, resume_from)
        agreement.compare(raw_model, is_resumed=bool(resume_from))
        optimizer = optim.build_optimizer(config.optim, recipe, raw_model)
        model, eval_model = parallel.prepare(accelerator, config, raw_model, optimizer, weights)
        ema = EMA(raw_model, config.optim.ema_decay) if config.optim.ema_decay else None
        scaler = accelerator.scaler  # None unless fp16
        state = TrainState()
        checkpoints = Checkpoints(run, raw_model, optimizer, scaler, ema)
        if resume_from:
            state.restore(checkpoints.resume(resume_from), config)
        run.step = state.step
        log_start(accelerator, run, layout, raw_model, resume_from)
        if rank == 0:
            run.write_status("running")

        # ---- what the loop reads, calls and writes -----------------------------------------------
        device = accelerator.device
        steps = range(state.step, run.total_steps)
        batches_of = StreamBatches if is_stream(train_set) else IndexedBatches
        batches = batches_of(config, train_set, layout, steps, accelerator, state.lane_states)
        trainable = [p for p in raw_model.parameters() if p.requires_grad]
        refuse_unused = parallel.refusal_of_unused(model)
        stop_agreed = False
        save_agreed = False  # by time, see checkpoints.is_due_by_time
        model.train()
        statistics = exact_statistics(accelerator, model, layout)  # None without BatchNorm
        forward = statistics.forward if statistics else model
        read_back = DelayedReader(accelerator, statistics and statistics.parts)
        stop.loop_begins()
        metrics = Recorder(accelerator, run, layout, state, model)
        evaluated = accelerator, config, eval_model, validation_sets

        def observe(report: StepReport | None) -> None:
            nonlocal stop_agreed, save_agreed
            if report:  # none at the first step of a start, nor after a flush
                stop_agreed |= report.stop_votes > 0
                save_agreed |= report.save_votes > 0
                state.observe(report)
                metrics.observe(report)
                state.check_skipped(report, config.optim.max_skipped_steps)

        def save() -> None:
            state.lane_states = batches.lane_states()
            watchdog.allow_long_limit()
            with metrics.paused("saving"):
                ranks.at_save()
                checkpoints.save(state)
                if state.step == run.total_steps:  # on the disk before the last evaluation
                    checkpoints.wait()
                    accelerator.wait_for_everyone()

        def evaluate_and_record() -> None:
            watchdog.allow_long_limit()
            with metrics.paused("evaluation"), optim.evaluated_weights(optimizer, ema):
                results = evaluate(*evaluated, state.step, watchdog)
                shown = {}
                shown |= samples.show(accelerator, run, eval_model, data_info, validation_sets)
                if state.record_evaluation(config, results):  # the best so far
                    exporting.export(run, data_info, raw_model, checkpoints, "best")
            metrics.write_evaluation(results, **shown)
            checkpoints.add_evaluation(state)

        # ---- the loop: step k is global batch k --------------------------------------------------
        with checkpoints, metrics, garbage_collected_at_records():
            if state.evaluation_is_due(run):  # saved, but stopped or killed before its results
                evaluate_and_record()
            elif state.step == 0:
                check_settings(findings)
                watchdog.allow_long_limit()
                with metrics.paused("evaluation"):
                    if config.evaluation.sanity_check:
                        sanity_check(*evaluated, watchdog)
                    check_sums(findings, eval_model, train_set, validation_sets)
            ranks = EqualRanks(findings, eval_model, accelerator)
            end_reason = state.end_reason(run)  # empty until the run is at its end
            micro_batches = metrics.timed(batches)
            while not (end_reason or stop_agreed):
                # ---- forward and backward, micro-batch by micro-batch ----------------------------
                step = state.step
                rate = optim.set_learning_rate(
                    optimizer, step, run.total_steps, config.optim, state.lr_reductions
                )
                sums = read_back.begin()
                for j in range(layout.accumulation):
                    batch = next(micro_batches)
                    seed_forward(config.seed, step, j * world_size + rank, device)
                    is_last = j == layout.accumulation - 1
                    with parallel.gradient_sync(model, is_last=is_last):
                        # recipe.loss(raw_model, batch, step), in the forward that DDP, FSDP,
                        # autocast and torch.compile have wrapped
                        returned = forward(recipe.loss, batch, step)
                        if step == steps.start and j == 0:  # the first of this start
                            read_back.set_names(contract.check_loss(recipe, returned))
                        if j == 0 and step < steps.start + 2:
                            ranks.after_forward()
                        loss_sum, num_items, *scalars = returned
                        sums.add(loss_sum, num_items, *scalars)
                        if is_last:  # the sums' all-reduce overlaps with the last backward
                            sums.start_all_reduce(stop.requested, checkpoints.is_due_by_time)
                        # not accelerator.backward, which divides by an accumulation of its own
                        (scaler.scale(loss_sum) if scaler else loss_sum).backward()
                sums.wait()
                if scaler:
                    scaler.unscale_(optimizer)

                # ---- normalize, clip, step -------------------------------------------------------
                if refuse_unused:
                    refuse_unused()
                # undo the average of DDP or FSDP; divide by the items of all micro-batches of all
                # ranks: the gradient of the mean loss per item
                normalizer = world_size / sums.num_items
                norm = optim.normalize_and_clip_(  # a list kept here would keep the gradients
                    optim.gradients(trainable), normalizer, config.optim.clip_norm
                )
                optim.step_if_finite(optimizer, norm)  # scaler.step would wait for the device
                if statistics:
                    statistics.finish(sums, norm)
                if scaler:
                    scaler.update()
                optimizer.zero_grad()
                if ema:  # also after a skipped step
                    ema.update()
                state.step = run.step = step + 1  # steps done; a skipped one counts
                metrics.step_ended(step, rate)
                observe(read_back.push(step, sums, norm))  # the step before: the device has done it
                watchdog.step_done()
                if step == steps.start:
                    ranks.after_step()
                if step < steps.start + 2:
                    checkpoints.check_optimizer()

                # ---- periodically: save, then evaluate, so that a failure there loses no step ----
                evaluation_due = state.evaluation_is_due(run)
                save_due = is_due(config.checkpoints.every_steps, state.step)
                save_due |= state.step == run.total_steps
                if save_due or evaluation_due or stop_agreed or save_agreed:
                    observe(read_back.flush())  # the checkpoint counts this step too
                    # by time, not while steps are skipped: the weights may be of no use
                    save_due |= stop_agreed or (save_agreed and not state.consecutive_skipped_steps)
                    if save_due:
                        save()
                        save_agreed = False  # a save of any kind restarts the clock
                    if evaluation_due and not stop_agreed:  # else the next start evaluates
                        evaluate_and_record()
                    end_reason = state.end_reason(run)
                    if end_reason and not save_due:  # early, where none was due
                        save()

        # ---- finish, or leave to be continued ----------------------------------------------------
        watchdog.allow_long_limit()
        if not end_reason:
            accelerator.wait_for_everyone()  # once a rank exits, torchrun kills those still saving
            checkpoints.check("checkpoint")
            if rank == 0:
                reason = stop.reason or "asked to stop on another process"
                metrics.write({"kind": "stop", "reason": reason})
                run.write_status("preempted", reason, note=checkpoints.note)
            return PREEMPTED
        state.check_trained()
        with optim.evaluated_weights(optimizer, ema):
            exporting.export(run, data_info, raw_model, checkpoints)
        accelerator.wait_for_everyone()  # if an export hangs, reports must not blame exited ranks
        checkpoints.check("checkpoint", "best", "export")
        if rank == 0:
            result = state.results | metrics.of_run()
            patience = config.evaluation.patience if state.step < run.total_steps else 0
            note = checkpoints.note
            run.write_status("finished", end_reason, note=note, result=result, patience=patience)
            log_finished(run)
    return 0


if CONFIG:
    exits.run_on_all_ranks(main, CONFIG)
