"""Lines about a run for its user: what it begins with, each checkpoint, why it stopped, which weights it ends with.

The progress display shows them. Without one (`disable_tqdm`), or with `log_level` info or below, they are logged at the
level info instead. Only rank 0 has them, and a `log_level` above info turns them off.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ...args.groups.logging import LEVELS
from ...notices import logger

if TYPE_CHECKING:
    from ..actions import LoopActions
    from ..internals import Internals


def report(trainer: LoopActions, text: str) -> None:
    """Show one line about the run; the report keeps it in any case."""
    for keep in filter(callable, [getattr(each, "note_line", None) for each in trainer.callback_handler.callbacks]):
        keep(text)
    level = LEVELS[trainer.args.log_level]
    if not trainer.state.is_world_process_zero or level > logging.INFO:
        return
    shows = [getattr(callback, "show_line", None) for callback in trainer.callback_handler.callbacks]
    is_logged = (level > logging.NOTSET and logger.hasHandlers()) or not any(map(callable, shows))
    if is_logged:
        logger.info(text)
    for show in filter(callable, () if is_logged else shows):
        show(text)


def report_beginning(trainer: Internals) -> None:
    """Show the sizes of the run, its model and device, and the checkpoint it resumes from."""
    for line in (_data(trainer), _model(trainer), _resumed(trainer)):
        if line:
            report(trainer, line)


def report_saves(trainer: LoopActions) -> None:
    """Show the checkpoints that have been published since the last call."""
    published = trainer.run.checkpoints.published
    while published:  # a background save may append to it meanwhile
        report(trainer, f"saved {published.popleft()}")


def report_stop(trainer: LoopActions) -> None:
    """Show why a callback has stopped the run."""
    for callback in trainer.callback_handler.callbacks:
        reason = getattr(callback, "stop_reason", None)
        if isinstance(reason, str):
            report(trainer, reason)


def report_best(trainer: LoopActions, checkpoint: str) -> None:
    """Show which weights a run ends with."""
    value, name = trainer.state.best_metric, trainer.args.best_model_metric or "loss"
    metric = "" if value is None else f" ({name} {decimal(value)})"
    report(trainer, f"loaded best {os.path.basename(checkpoint)}{metric}")


def decimal(value: float) -> str:
    """A number with four significant digits, and at least one after the point."""
    text = f"{float(value):.4g}"
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def _data(trainer: Internals) -> str:
    plan, args = trainer.run.plan, trainer.args
    samples = "a stream of samples" if plan.examples is None else counted(plan.examples, "sample")
    epochs = "" if plan.examples is None else f"{_epochs(trainer)}, "
    size = counted(plan.batch_size, "sample")
    sizes = f"{size} x {plan.accumulation} accumulated x {counted(plan.world_size, 'rank')}"
    about = "about " if getattr(args, "batch_packing", None) else ""
    return (
        f"Running training on {samples}: {epochs}{counted(plan.max_steps, 'step')}, effective batch size {about}"
        f"{plan.total_batch_size:,} ({sizes})"
    )


def _epochs(trainer: Internals) -> str:
    asked: Any = trainer.args.num_train_epochs if trainer.args.max_steps <= 0 else None
    whole = trainer.run.plan.max_steps / trainer.run.plan.updates_per_epoch if asked is None else float(asked)
    return f"{whole:.4g} {'epoch' if whole == 1 else 'epochs'}"


def _model(trainer: Internals) -> str:
    sizes = trainer.model_sizes()
    parameters = "" if sizes is None else f"{sizes[1]:,} parameters, {sizes[0]:,} trainable; "
    place = trainer.place()
    return f"{type(trainer.model).__name__}: {parameters}{place}".rstrip("; :") if parameters or place else ""


def _resumed(trainer: Internals) -> str:
    if trainer.run.resumed_from is None:
        return ""
    step, steps = trainer.state.global_step, trainer.run.plan.max_steps
    epoch = "" if trainer.state.epoch is None else f" (epoch {trainer.state.epoch:.4g})"
    return f"resuming from {trainer.run.resumed_from}: step {step:,} of {steps:,}{epoch}"


def counted(number: int, word: str) -> str:
    """A number with its word, in the plural if it is not 1."""
    return f"{number:,} {word if number == 1 else f'{word}s'}"
