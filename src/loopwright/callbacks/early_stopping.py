"""Early stopping: ends training when a metric stops improving."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.checkpoint.schema import Shape, any_number, maybe
from ..core.evaluation.metrics import full_name
from ..core.events import TrainerCallback
from ..core.state import ExportableState
from ..errors import ArgumentsError, MetricError
from ..notices import logger

if TYPE_CHECKING:
    from ..args.base import BaseArguments


DEFAULTS = {"early_stopping_patience": 1, "early_stopping_threshold": 0.0}
"""The constructor's arguments."""


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops after `early_stopping_patience` evaluations without improvement of `metric_for_best_model`.

    An improvement must exceed `early_stopping_threshold`. The callback keeps its own best value, so it needs neither
    `load_best_model_at_end` nor a checkpoint at each evaluation. Counter and best value are saved in checkpoints, so a
    resumed run stops at the same step as an uninterrupted one. Patience and threshold are saved too, and used by a
    resumed run whose callback has the default ones. Evaluations outside training do not count.
    """

    saved_shapes: ClassVar[dict[str, Shape]] = {"best_value": maybe(any_number)}

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ArgumentsError(f"early_stopping_patience={early_stopping_patience} must be 1 or more.")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.given = {name for name, default in DEFAULTS.items() if getattr(self, name) != default}
        """Arguments that are not restored from a checkpoint, because they were given."""
        self.early_stopping_patience_counter = 0
        self.best_value: float | None = None
        self.stop_reason: str | None = None
        """Why the run was stopped, for the user; None if it was not."""
        self._is_training = False
        self._missed_at: int | None = None
        self._names_seen: set[str] = set()

    def on_train_begin(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        _check_arguments(args)
        self._is_training, self._missed_at, self._names_seen = True, None, set()
        self.stop_reason = None
        if state.global_step == 0:
            self.early_stopping_patience_counter, self.best_value = 0, None
        elif self.best_value is None:
            # A checkpoint without this callback's best value, such as one written by another trainer.
            self.best_value = state.best_metric
        if self._is_exhausted():
            logger.warning(f"Early stopping already ended this run at step {state.global_step}; it is not resumed.")
            control.should_training_stop = True

    def on_evaluate(
        self, args: BaseArguments, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not self._is_training:
            return
        assert args.metric_for_best_model is not None  # checked when training began
        name = full_name(args.metric_for_best_model)
        metrics = metrics or {}
        if name not in metrics:
            self._miss(name, metrics, state.global_step)
            return
        self._missed_at = None
        self.check_metric_value(args, state, control, metrics[name])
        if self._is_exhausted():
            control.should_training_stop = True
            count = self.early_stopping_patience_counter
            self.stop_reason = (
                f"early stopping at step {state.global_step:,} (no improvement of {args.metric_for_best_model} for "
                f"{count} {'evaluation' if count == 1 else 'evaluations'})"
            )

    def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: Any) -> None:
        """Count one more evaluation; called after each one, and may be overridden."""
        if self.best_value is None:
            self.best_value = state.best_metric
        self.count(float(metric_value), greater_is_better=_greater_is_better(args))

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_training = False

    def left(self) -> None:
        """Called when training has ended, even if on_train_end was not called."""
        self._is_training = False

    def count(self, value: float, *, greater_is_better: bool) -> None:
        """Compare one more evaluation with the best value. NaN is never an improvement."""
        gain = _gain(value, self.best_value, greater_is_better)
        if gain > 0:
            self.best_value = value
        improved = gain > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if improved else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        return {
            "args": {name: getattr(self, name) for name in DEFAULTS},
            "attributes": {
                "early_stopping_patience_counter": self.early_stopping_patience_counter,
                "best_value": self.best_value,
            },
        }

    def _is_exhausted(self) -> bool:
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def _miss(self, name: str, metrics: dict[str, Any], step: int) -> None:
        """Raise if the metric is missing.

        Each of several evaluation datasets has its own metrics, so the metric may be in a later one of this step.
        """
        self._names_seen.update(metrics)
        is_whole_evaluation = "eval_runtime" in metrics
        if is_whole_evaluation or (self._missed_at is not None and step > self._missed_at):
            raise _missing(name, self._names_seen)
        self._missed_at = step


def _check_arguments(args: BaseArguments) -> None:
    problems = []
    if args.metric_for_best_model is None:
        problems.append("EarlyStoppingCallback needs metric_for_best_model, for example metric_for_best_model='loss'.")
    if args.eval_strategy == "no":
        problems.append("EarlyStoppingCallback needs evaluations: set eval_strategy to 'steps' or 'epoch'.")
    if problems:
        raise ArgumentsError(problems)


def _greater_is_better(args: Any) -> bool:
    chosen = getattr(args, "greater_is_better", None)
    return not str(args.metric_for_best_model).endswith("loss") if chosen is None else bool(chosen)


def _gain(value: float, best: float | None, greater_is_better: bool) -> float:
    """The improvement over the best value: negative if worse, infinite for the first value."""
    if math.isnan(value):
        return -math.inf
    if best is None:
        return math.inf
    return value - best if greater_is_better else best - value


def _missing(name: str, available: set[str]) -> MetricError:
    names = ", ".join(sorted(available)) or "none"
    return MetricError(
        f"Early stopping monitors {name}, which evaluation does not return (available: {names}). Set "
        "metric_for_best_model to one of them, or return the metric from compute_metrics."
    )
