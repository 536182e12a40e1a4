"""The training loop.

    for every epoch, for every update:
        forward and backward of its micro-batches                                      run_micro_batches
        clip, optimizer step, schedule                                                 apply_update
        callbacks set flags                                                            control
        log, evaluate, save if requested, always in this order                         act

Elsewhere: the arithmetic of steps and epochs (plan.py), one update and the position of a resumed run (updating.py),
when to log, evaluate and save (callbacks/flow.py), parallelism and precision (the strategy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .internals import Internals


def run_training(internals: Internals) -> None:
    """Train from the run's current position to the end of its plan."""
    run, control, events = internals.run, internals.control, internals.callback_handler
    progress = run.progress

    events.fire("on_train_begin")
    internals.report_beginning()
    internals.check_callback_states()
    if internals.args.eval_on_start and internals.state.global_step == 0:
        internals.evaluate_now()
    internals.resume_pending()
    act(internals)

    control.should_training_stop |= internals.state.global_step >= run.plan.max_steps  # resumed after its last update
    if (control.should_epoch_stop or control.should_training_stop) and progress.is_open:
        events.fire("on_epoch_begin")
        end_epoch(internals)
    while progress.epoch < run.plan.epochs and not control.should_training_stop:
        events.fire("on_epoch_begin")
        for update in internals.updates(progress.epoch):
            events.fire("on_step_begin")
            loss = internals.run_micro_batches(update)
            internals.apply_update(loss)
            internals.finish_update(update)
            events.fire("on_step_end")
            act(internals)
            if control.should_epoch_stop or control.should_training_stop:
                break
        end_epoch(internals)


def end_epoch(internals: Internals) -> None:
    """Call the callbacks of an epoch's end, and do what they request."""
    internals.callback_handler.fire("on_epoch_end")
    internals.finish_epoch()
    act(internals)


def act(internals: Internals) -> None:
    """Log, evaluate and save, in this order, if control requests it; a user's override may do it instead."""
    # A subclass may define the method; a callback may just have assigned it to the instance.
    is_overridden = internals.overrides_actions or "_maybe_log_save_evaluate" in internals.trainer.__dict__
    if not (is_overridden and internals.act_by_override()):
        follow_control(internals)


def follow_control(internals: Internals) -> None:
    """What `act` does without an override."""
    control = internals.control
    if control.should_log:
        internals.log_now()
    if internals.run.signals.received:
        internals.save_and_exit()
    if control.should_evaluate:
        internals.evaluate_now()
    if control.should_save:
        internals.save_now()
