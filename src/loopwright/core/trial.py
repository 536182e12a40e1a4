"""The trial of a hyper-parameter search that a run belongs to: its values, its reports, and what they decide."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from ..args.base import BaseArguments, accepted_names
from ..args.field import nearest
from ..errors import ArgumentsError
from .part import Part

CONTINUE, PRUNE, PAUSE = "continue", "prune", "pause"
"""What a report decides: train on, stop for good, or save and stop so that the trial can be resumed."""


class Reply(NamedTuple):
    """The answer to the report of an evaluation."""

    objective: float | list[float]
    decision: str = CONTINUE


class Coordinator(Protocol):
    """The side of a search that receives the reports of one trial."""

    def report(self, step: int, metrics: dict[str, float]) -> Reply: ...


class Trials(Part):
    """The trial of the current run; empty for a run outside of a search."""

    coordinator: Coordinator | None = None
    """Receives the reports on rank 0; None if the search is not loopwright's, or on another rank."""
    is_prepared: bool = False
    """Whether the trainer was created for its trial, so that its arguments are those of the trial."""
    name: str | None = None
    decision: str = CONTINUE
    changed: frozenset[str] = frozenset()
    """Arguments whose values differ from the checkpoint's, and that a callback applies to the optimizer."""

    @contextmanager
    def active(self, trial: Any) -> Iterator[None]:
        """A context in which the trainer has the arguments of its trial; without a trial, nothing changes."""
        if trial is None:
            yield
            return
        args, self.decision = self.trainer.args, CONTINUE
        try:
            self.trainer._hp_search_setup(trial)
            yield
            if self.decision == PRUNE and not self.is_prepared:
                raise_pruned(trial)
        finally:
            self._use(args)
            if not self.is_prepared:
                self.name = None

    def set_up(self, trial: Any) -> None:
        """Apply the values of a trial to the arguments, if the trainer names a backend, as transformers does."""
        if self.is_prepared:
            return
        trainer: Any = self.trainer
        if trainer.hp_search_backend is None:
            return
        hp_space = getattr(trainer, "hp_space", None)
        values = hp_space(trial) if hp_space is not None and not isinstance(trial, Mapping) else params_of(trial)
        self.name = trainer.hp_name(trial) if trainer.hp_name is not None else None
        folder = trainer._get_output_dir(trial)
        self._use(with_values(self.args, values or {}, folder, takes_trial=takes_trial(trainer.model_init)))

    def _use(self, args: BaseArguments) -> None:
        if self.trainer.args is not args:
            self.trainer.args = args
            self.callback_handler.args = args

    def folder_of(self, trial: Any) -> str:
        """The output folder of a trial: that of the arguments if they are the trial's already."""
        trainer: Any = self.trainer
        own = str(self.args.output_dir)
        backend = getattr(trainer, "hp_search_backend", None)
        if trial is None or self.is_prepared or backend is None or self.internals.is_training:
            return own
        if trainer.hp_name is not None:
            return os.path.join(own, folder_name(trainer.hp_name(trial)))
        return os.path.join(own, f"run-{getattr(trial, 'number', 0)}")

    def name_trial(self) -> None:
        """Record the trial in the state of the run."""
        self.state.is_hyper_param_search = self.run.trial is not None
        self.state.trial_name, self.state.trial_params = self.name, params_of(self.run.trial)

    def report(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation, and stop the run if that is the answer: all ranks after the same update."""
        trainer: Any = self.trainer
        is_direct = not self.is_prepared and trainer.hp_search_backend is not None and hasattr(trial, "report")
        if trial is None or not (self.is_prepared or is_direct):
            return
        reply = None
        if self.strategy.rank == 0:
            reply = self._report_directly(trial, step, metrics) if is_direct else self._report(step, metrics)
        reply = self.strategy.broadcast(reply)
        trainer.objective, decision = reply
        if decision == PAUSE and step >= (self.run.planned_updates or 0):  # there is nothing left to continue
            decision = CONTINUE
        if decision != CONTINUE:
            self.decision = decision
            self.control.should_training_stop = True
            self.control.should_save |= decision == PAUSE

    def stops(self, wish: str) -> bool:
        """Whether a request is that of the search to stop here; the trial is reported again after it was resumed."""
        return wish == "should_training_stop" and self.decision != CONTINUE

    def _report(self, step: int, metrics: dict[str, float]) -> Reply:
        assert self.coordinator is not None
        return self.coordinator.report(step, dict(metrics))

    def _report_directly(self, trial: Any, step: int, metrics: dict[str, float]) -> Reply:
        objective = (getattr(self.trainer, "compute_objective", None) or default_objective)(dict(metrics))
        if not isinstance(objective, (int, float)):  # several objectives cannot be pruned
            return Reply(objective)
        trial.report(objective, step)
        return Reply(objective, PRUNE if trial.should_prune() else CONTINUE)


def raise_pruned(trial: Any) -> None:
    """Raise the exception by which the package of a trial recognizes a pruned one."""
    package = sys.modules.get(type(trial).__module__.partition(".")[0])
    error = getattr(package, "TrialPruned", None)
    if error is not None:
        raise error


def folder_name(name: Any) -> str:
    """The name of a trial, which must be usable as the name of a folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or os.sep in name or "\0" in name:
        raise ArgumentsError(
            f"hp_name returned {name!r}; return a short text without {os.sep!r}, because it names the folder of the "
            "trial"
        )
    return name


def params_of(trial: Any) -> dict[str, Any] | None:
    """The values that were chosen for a trial; None if it does not show them."""
    if isinstance(trial, Mapping):
        return dict(trial)
    params = getattr(trial, "params", None)
    return dict(params) if isinstance(params, Mapping) else None


def takes_trial(model_init: Callable[..., Any] | None) -> bool:
    """Whether `model_init` receives the trial, so that a value may be meant for the model."""
    return model_init is not None and bool(inspect.signature(model_init).parameters)


def with_values(args: BaseArguments, values: Mapping[str, Any], output_dir: str, *, takes_trial: bool) -> BaseArguments:
    """The arguments of a trial, read and checked as those of a constructor; `args` is not changed.

    A value that is not an argument is for the model, which needs a `model_init` with a parameter.
    """
    if not isinstance(values, Mapping):
        raise ArgumentsError(f"hp_space returned {type(values).__name__}; return a dict of arguments and their values")
    known = accepted_names(type(args)) or frozenset()
    unknown = [name for name in values if name not in known]
    if unknown and not takes_trial:
        raise ArgumentsError(
            [
                f"hp_space returned {name!r}, which is not an argument{nearest(name, known)}; for a value of the "
                "model, let model_init take the trial"
                for name in unknown
            ]
        )
    if "output_dir" in values:
        raise ArgumentsError("hp_space returned 'output_dir'; name the folders of trials by hp_name")
    chosen = {name: value for name, value in values.items() if name in known}
    return dataclasses.replace(args, **chosen, output_dir=output_dir)


def default_objective(metrics: dict[str, float]) -> float:
    """The sum of the user's metrics; the loss of the evaluation if there are none."""
    rest = {
        name: value
        for name, value in metrics.items()
        if name not in ("eval_loss", "epoch") and not name.endswith(("_runtime", "_per_second", "_preparation_time"))
    }
    if rest:
        return sum(rest.values())
    if "eval_loss" not in metrics:
        raise ArgumentsError(
            f"the evaluation returned no eval_loss and no metric ({', '.join(metrics) or 'nothing'}); pass "
            "compute_objective"
        )
    return metrics["eval_loss"]
