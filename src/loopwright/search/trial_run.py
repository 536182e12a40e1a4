"""One trial: a trainer with the values of the trial trains, and what it reached is returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.shutdown.parent import TIME_TO_SAVE
from ..core.trial import CONTINUE, Coordinator, takes_trial, with_values
from ..errors import OwnerError
from .changed_values import ChangedValues
from .recipe import Recipe

PAUSE_BETWEEN = 0.5


@dataclass(frozen=True)
class Job:
    """What one process of a trial needs besides the recipe."""

    number: int
    values: dict[str, Any]
    """The arguments of the trial, and values for `model_init`."""
    params: dict[str, Any]
    """The values that were chosen, as `trial.params` shows them."""
    folder: str
    name: str | None = None
    """The name by `hp_name`."""
    resume: str | bool = False
    """False to begin, "auto" to continue in its folder, or the path of a checkpoint."""
    has_dict: bool = False
    """Whether `model_init` receives the values as a dict, as with Ray and W&B."""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Values that differ from those of the checkpoint's run, each with the earlier one."""


@dataclass(frozen=True)
class Outcome:
    """What a trial has reached."""

    objective: float | list[float]
    step: int
    decision: str = CONTINUE
    """`CONTINUE` if the trial was not stopped: it is complete."""
    checkpoint: str | None = None
    """The best checkpoint if the trial determined one, else the newest; None if it saved none."""
    newest: str | None = None


def run_trial(
    recipe: Recipe, job: Job, trial: Any, coordinator: Coordinator | None, callbacks: Sequence[Any] = ()
) -> Outcome:
    """Train with the values of a job; `coordinator` receives the reports on rank 0."""
    model_init = recipe.given.get("model_init")
    args = with_values(recipe.args, job.values, job.folder, takes_trial=takes_trial(model_init))
    trainer = recipe.build(args)
    internals = trainer._loopwright
    trials = internals.trials
    trials.is_prepared, trials.coordinator, trials.name = True, coordinator, job.name
    for each in callbacks:
        each.trainer = trainer
        trainer.callback_handler.add_callback(each)
    if job.changed:
        callback = ChangedValues(job.changed)
        trials.changed = frozenset(callback.changed)
        trainer.callback_handler.add_callback(callback)
    _train(trainer, job, trial)
    if trainer.objective is None:  # there was no evaluation
        trials.report(trial, trainer.state.global_step, trainer.evaluate())
    saved = internals.run.checkpoints.complete()
    newest = str(saved[max(saved)]) if saved else None
    best = trainer.state.best_model_checkpoint or newest
    return Outcome(trainer.objective, trainer.state.global_step, trials.decision, best, newest)


def _train(trainer: Any, job: Job, trial: Any) -> None:
    """Train; a trial that is resumed waits until the process that trained it before has saved and ended."""
    deadline = time.monotonic() + TIME_TO_SAVE
    while True:
        try:
            trainer.train(resume_from_checkpoint=job.resume, trial=trial)
            return
        except OwnerError:
            if job.resume != "auto" or time.monotonic() > deadline or trainer.state.global_step:
                raise
            time.sleep(PAUSE_BETWEEN)
