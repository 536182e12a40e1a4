"""Deferred logging for asynchronous devices.

With lazy XLA, the device still computes a step when its log point is reached. The log is then written at the end of the
next step, when the device has work again; the run's state is still that of the logged step. Logs are not deferred if a
user's callback could notice it, or if a policy acts on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..measure.meter import Reading
from ..user_code.overrides import is_overridden

OURS = "loopwright."
BETWEEN = ("on_log", "on_epoch_end", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step",
           "on_optimizer_step")  # fmt: skip
"""The log event, and the events between a log point and the end of the next step."""


@dataclass(frozen=True)
class LogPoint:
    """The state of a log point, kept until the deferred log is written."""

    step: int
    updates: int
    learning_rate: float
    read: Callable[[], Reading]


def can_defer_logs(trainer: Any) -> bool:
    """True if logging may be deferred: no user callback or `log`, no policy that acts on the loss, no other rank."""
    args = trainer.args
    if not trainer.is_alone or args.on_spike is not None or args.on_nonfinite != "continue":
        return False
    if is_overridden(trainer.trainer, "log"):
        return False
    handler = trainer.callback_handler
    listening = [each for event in BETWEEN for each, _ in handler.listening_to(event)]
    return all(type(callback).__module__.startswith(OURS) for callback in listening)
