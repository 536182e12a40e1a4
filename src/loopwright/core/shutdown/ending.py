"""The end of a run: after a signal it saves and exits, and its output folder records how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ...errors import LostRankError
from ...notices import logger
from ..checkpoint.folder import folder_name
from ..checkpoint.ownership.run_id import FAILED, FINISHED, INTERRUPTED, RUNNING
from ..logs.console import report_saves
from ..resuming.run_record import note_stop
from ..run import Run
from .interruption import interrupt
from .signals import STOPPED_AFTER_SAVING

if TYPE_CHECKING:
    from ..actions import LoopActions

WISHES = ("should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
"""Requests that a run fulfils after it was resumed."""


def leave(internals: LoopActions) -> NoReturn:
    """After a signal before the first update: exit, without anything to save."""
    run, name = internals.run, internals.run.signals.received
    run.status = INTERRUPTED
    if name == "SIGINT":
        interrupt()
    logger.warning(f"stopped by {name} before the first step; {_how_to_resume(internals)}")
    _exit_after_saving(run)


def save_and_exit(internals: LoopActions) -> NoReturn:
    """After a signal: save the last finished update and the pending requests, and exit with code 75.

    After Ctrl-C a checkpoint is saved only if one was already requested, or with `save_on_interrupt`, and
    KeyboardInterrupt is raised.
    """
    internals.write_late_logs()
    run, control = internals.run, internals.control
    name, step = run.signals.received, internals.state.global_step
    is_ctrl_c = name == "SIGINT"
    saves = not is_ctrl_c or internals.args.save_on_interrupt
    run.progress.pending = [wish for wish in WISHES if getattr(control, wish) and not internals.trials.stops(wish)]
    if saves or control.should_save:
        internals.save_now()
    run.checkpoints.wait()
    run.status = INTERRUPTED
    if is_ctrl_c:
        logger.warning(f"interrupted after step {step}; {_how_to_resume(internals)}")
        interrupt()
    run.checkpoints.raise_if_failed()
    report_saves(internals)
    internals.callback_handler.fire("on_train_end")
    logger.warning(f"stopped by {name} after saving step {step}; {_how_to_resume(internals)}")
    _exit_after_saving(run)


def _exit_after_saving(run: Run) -> NoReturn:
    note_stop()
    run.signals.chained()
    raise SystemExit(STOPPED_AFTER_SAVING)


def status_after(error: BaseException, run: Run) -> str:
    """The status of a run that ends with an exception."""
    if run.status == FINISHED:  # everything is done and saved; only a push has failed
        return FINISHED
    if run.status == INTERRUPTED or isinstance(error, (KeyboardInterrupt, LostRankError)):
        return INTERRUPTED
    return FAILED


def record_end(run: Run) -> None:
    """Record how the run has ended; if it has changed nothing, the output folder is left as it was found.

    Otherwise a command that is refused would take the checkpoints from the run that they belong to.
    """
    before = run.before
    if run.has_begun or before is None:
        run.checkpoints.end(run.status)
    else:
        run.checkpoints.end(INTERRUPTED if before.status == RUNNING else before.status, of=before)


def _how_to_resume(internals: LoopActions) -> str:
    """How the run that ends now can be resumed."""
    checkpoints = internals.run.checkpoints
    saved = None if checkpoints.current is None else max(checkpoints.complete(), default=None)
    if saved is None:
        return "no checkpoint was saved, so the same command starts over"
    name = folder_name(saved)
    if internals.args.save_only_model:
        return f"{name} holds the weights only (save_only_model=True), so it cannot be resumed"
    if internals.run.resumes_by_command:
        return f"the same command resumes from {name}"
    return f'train(resume_from_checkpoint="auto") resumes from {name}, train() starts over'
