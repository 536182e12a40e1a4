"""RunControl: a run does what `loopwright ctl` requests, after the update that is being computed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.paths import fixed_folder
from ..callbacks.metrics_file import MetricsFileCallback
from ..core.checkpoint.schema import check_part, count, number, record
from ..core.events import TrainerCallback
from ..notices import logger
from .control_files import SETTINGS, Inbox, Request

if TYPE_CHECKING:
    from ..args.base import BaseArguments
    from ..pt.trainer import Trainer

_SHAPES = {name: number(0) if name == "learning_rate" else count(1) for name in SETTINGS}
SAVED = record({"settings": record({}, _SHAPES, others=False)})
"""The state of the callback in a checkpoint."""


class RunControl(TrainerCallback):
    """Carries out requests, records them, and repeats settings when a run is resumed from an earlier step.

    Rank 0 reads the requests; all ranks do the same in the same update.
    """

    def __init__(self) -> None:
        self._broadcast: Callable[[Any], Any] = lambda value: value
        self._is_shared = False
        self._rows: list[MetricsFileCallback] = []
        self._has_validation = False
        self._inbox: Inbox | None = None
        self._ahead: list[tuple[int, Request]] = []
        self.settings: dict[str, float] = {}
        """The settings that were changed, with their current values; saved in checkpoints."""

    def follow(self, trainer: Trainer) -> None:
        """Use the ranks, the validation data and metrics.jsonl of this trainer."""
        self._broadcast = trainer._loopwright.strategy.broadcast
        self._is_shared = trainer.args.world_size > 1
        self._rows = [each for each in trainer.callback_handler.callbacks if isinstance(each, MetricsFileCallback)]
        self._has_validation = trainer.eval_dataset is not None

    def state_dict(self) -> dict[str, Any]:
        return {"settings": dict(self.settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settings = dict(check_part(state, SAVED)["settings"])

    # ---- events ------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            self.settings = {}
        ahead: list[tuple[int, Request]] = []
        if state.is_world_process_zero:
            self._inbox = Inbox(Path(fixed_folder(args.output_dir)))
            try:
                self._inbox.open(is_fresh=not state.global_step)
            except OSError as error:
                logger.warning(f"the run accepts no requests of `loopwright ctl` ({error})")
            ahead = [(step, request) for step, request in self._inbox.recorded() if step > state.global_step]
        self._ahead = self._broadcast(ahead) if self._is_shared else ahead
        for key, value in self.settings.items():
            if key != "learning_rate":  # the schedule has saved that one
                setattr(state, key, int(value))

    def on_step_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        again = [request for step, request in self._ahead if step == state.global_step]
        for request in again:
            if self._apply(request, args, state, control, kwargs) and self._inbox is not None:
                self._note(request, args, state, control)
        waiting = [] if self._inbox is None else self._inbox.waiting()
        if self._is_shared:
            waiting = self._broadcast(waiting)
        for name, request in waiting:
            done = self._apply(request, args, state, control, kwargs)
            if self._inbox is not None:
                if done:
                    self._inbox.record(state.global_step, request)
                    self._note(request, args, state, control)
                self._inbox.done(name)

    def left(self) -> None:
        """Called when training has ended, however it ended."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _apply(self, request: Request, args: BaseArguments, state: Any, control: Any, context: Any) -> bool:
        """Carry out a request; returns whether it was possible."""
        if request.action == "save":
            control.should_save = True
        elif request.action == "evaluate":
            if not self._has_validation:
                logger.warning("ctl: 'evaluate' is ignored, because there is no validation data")
                return False
            control.should_evaluate = True
        elif request.action == "stop":
            self._stop(args, state, control)
        elif request.key == "learning_rate":
            return self._set_learning_rate(request.value, args, context)
        else:
            setattr(state, request.key, int(request.value))
            self.settings[request.key] = int(request.value)
        return True

    def _stop(self, args: BaseArguments, state: Any, control: Any) -> None:
        """Save and stop like a run that receives SIGTERM: the same command resumes it."""
        if not args.enable_jit_checkpoint:
            control.should_save = control.should_training_stop = True
        elif state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def _set_learning_rate(self, value: float, args: BaseArguments, context: Any) -> bool:
        """Replace the learning rate before the schedule; groups with other rates keep their ratio to it."""
        from ..pt.optim.learning_rates import initial_lr, set_lr

        before = self.settings.get("learning_rate", args.learning_rate)
        if not before:
            logger.warning("ctl: learning_rate is 0, so groups have no ratio to it and it cannot be changed")
            return False
        for group in context["optimizer"].param_groups:
            group["initial_lr"] = initial_lr(group) * (value / before)
            set_lr(group, float(group["lr"]) * (value / before))
        schedule = context.get("lr_scheduler")
        if isinstance(vars(schedule).get("base_lrs"), list):  # torch's own schedules keep a copy
            schedule.base_lrs = [rate * (value / before) for rate in schedule.base_lrs]
        self.settings["learning_rate"] = value
        return True

    def _note(self, request: Request, args: BaseArguments, state: Any, control: Any) -> None:
        """Write a row into metrics.jsonl, and a line for the user."""
        logger.warning(f"ctl: {request}, after step {state.global_step}")
        for rows in self._rows:
            rows.on_log(args, state, control, logs={"control": str(request)})
