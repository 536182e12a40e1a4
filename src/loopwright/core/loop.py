"""The training loop.

    for every epoch, for every update:
        forward and backward of its micro-batches                                      run_micro_batches
        clip, optimizer step, schedule                                                 apply_update
        callbacks set flags                                                            control
        log, evaluate, save if requested, always in this order                         act

Kept elsewhere on purpose: the arithmetic of steps and epochs (plan.py), the position of a resumed run (order.py and the
trainer's `updates`), when to log, evaluate and save (callbacks/flow.py), parallelism and precision (the strategy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .internals import Internals


def run_training(trainer: Internals) -> None:
    """Train from the run's current position to the end of its plan."""
    run, control, events = trainer.run, trainer.control, trainer.callback_handler
    progress = run.progress

    events.fire("on_train_begin")
    trainer.report_beginning()
    trainer.check_callback_states()
    if trainer.args.eval_on_start and trainer.state.global_step == 0:
        trainer.evaluate_now()
    trainer.resume_pending()
    act(trainer)

    control.should_training_stop |= trainer.state.global_step >= run.plan.max_steps  # resumed after its last update
    if (control.should_epoch_stop or control.should_training_stop) and progress.is_open:
        events.fire("on_epoch_begin")
        end_epoch(trainer)
    while progress.epoch < run.plan.epochs and not control.should_training_stop:
        events.fire("on_epoch_begin")
        for update in trainer.updates(progress.epoch):
            events.fire("on_step_begin")
            loss = trainer.run_micro_batches(update)
            trainer.apply_update(loss)
            trainer.finish_update(update)
            events.fire("on_step_end")
            act(trainer)
            if control.should_epoch_stop or control.should_training_stop:
                break
        end_epoch(trainer)


def end_epoch(trainer: Internals) -> None:
    """Call the callbacks of an epoch's end, and do what they request."""
    trainer.callback_handler.fire("on_epoch_end")
    trainer.finish_epoch()
    act(trainer)


def act(trainer: Internals) -> None:
    """Log, evaluate and save, in this order, if control requests it; a user's override may do it instead."""
    # The second form was assigned to the instance, perhaps just now by a callback.
    is_overridden = trainer.overrides_actions or "_maybe_log_save_evaluate" in trainer.trainer.__dict__
    if not (is_overridden and trainer.act_by_override()):
        follow_control(trainer)


def follow_control(trainer: Internals) -> None:
    """What `act` does without an override."""
    control = trainer.control
    if control.should_log:
        trainer.log_now()
    if trainer.run.signals.received:
        trainer.save_and_exit()
    if control.should_evaluate:
        trainer.evaluate_now()
    if control.should_save:
        trainer.save_now()
