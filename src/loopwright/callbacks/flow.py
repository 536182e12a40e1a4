"""When to log, evaluate, save and stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.events import TrainerCallback
from .triggers import Trigger, watches_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class DefaultFlowCallback(TrainerCallback):
    """Sets the flags of `control` according to the intervals and limits of the arguments.

    The step and epoch rules are those of transformers. `save_minutes`, `save_samples`, `save_trigger_file` and
    `max_runtime` are triggers (triggers.py), created only if set.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watches: tuple[Trigger, ...] = ()

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._watches = watches_for(args, state, self._clock)

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        # Runs at every update: plain comparisons, no calls unless there are triggers.
        step = state.global_step
        is_last = step >= state.max_steps
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step and (is_last or step % state.eval_steps == 0):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or (state.save_steps > 0 and step % state.save_steps == 0)):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        for watch in self._watches:
            watch.step_ended(state, control)

    def on_epoch_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True

    def on_evaluate(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        for watch in self._watches:
            watch.evaluated()

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        for watch in self._watches:
            watch.saved(state)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._watches = ()
