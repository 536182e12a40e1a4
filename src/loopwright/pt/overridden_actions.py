"""Calling a user's `_maybe_log_save_evaluate`, with the arguments that transformers' Trainer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.logs.console import report_saves
from ..core.user_code.overrides import adapt, is_overridden

if TYPE_CHECKING:
    from .internals import TorchInternals

NAME = "_maybe_log_save_evaluate"


def act_by_override(internals: TorchInternals) -> bool:
    """Let an override log, evaluate and save; returns whether there is one."""
    trainer, run, control = internals.trainer, internals.run, internals.control
    if not is_overridden(trainer, NAME):
        return False
    is_asked = control.should_log or control.should_evaluate or control.should_save
    if internals.state.global_step == run.first_step and not is_asked:
        return False  # before the first update
    adapt(getattr(trainer, NAME), "start_time", "learning_rate")(
        _open_loss(internals),
        run.meter.newest_norm,
        trainer.model_wrapped,
        None,
        run.progress.epoch,
        run.ignore_keys_for_eval,
        start_time=run.started,
        learning_rate=run.learning_rate,
    )
    _finish(internals)
    return True


def _open_loss(internals: TorchInternals) -> Tensor:
    """The sum of the losses since the last log point, on the device."""
    numbers, losses = 0.0, []
    for each in internals.run.meter.open_losses():
        if isinstance(each, Tensor):
            losses.append(each.detach().float().reshape(()))
        else:
            numbers += each
    total = torch.stack(losses).sum() if losses else torch.zeros((), device=internals.device)
    return total + numbers


def _finish(internals: TorchInternals) -> None:
    """What follows on a save and on a signal; the override may have saved, or changed a checkpoint, by itself."""
    checkpoints, step = internals.run.checkpoints, internals.state.global_step
    report_saves(internals)
    if internals.saving.leads_saving and not checkpoints.is_saving and checkpoints.newest == step:
        checkpoints.adopt_changes(step)
    if internals.run.signals.received:
        internals.save_and_exit()
