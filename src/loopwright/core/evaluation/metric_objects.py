"""Metric objects, `compute_metrics={"accuracy": metric, ...}`: torchmetrics and `evaluate`, updated batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ArgumentsError

Shape = Callable[[Any, Any, bool], tuple[Any, Any]]
"""Converts predictions and labels for a metric: removes ignored targets and selects classes.

The third argument is True for next-token predictions: each one is compared with the following label.
"""


class MetricObjects:
    """A metrics function that updates metric objects; it stores only their state."""

    def __init__(self, metrics: Mapping[str, Any], *, scores: Shape, choices: Shape) -> None:
        self._metrics = dict(metrics)
        self._scores, self._choices = scores, choices
        self.shifted = False
        strange = [name for name, metric in self._metrics.items() if not (_streams(metric) or _adds(metric))]
        if strange:
            raise ArgumentsError(
                f"compute_metrics: {', '.join(strange)} has neither update() and compute() (torchmetrics) nor "
                "add_batch() and compute() (evaluate)"
            )

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        for metric in self._metrics.values():
            if _streams(metric):
                metric.update(*self._scores(prediction.predictions, prediction.label_ids, self.shifted))
            else:
                predictions, references = self._choices(prediction.predictions, prediction.label_ids, self.shifted)
                metric.add_batch(predictions=predictions, references=references)
        return self._result() if compute_result else {}

    def restart(self) -> None:
        """Reset the state that an incomplete evaluation left."""
        for metric in self._metrics.values():
            for part in getattr(metric, "evaluation_modules", [metric]):
                _forget(part)

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            if not isinstance(value, Mapping):
                found[name] = value
            elif set(value) == {name}:
                found.update(value)
            else:
                found.update({f"{name}_{key}": each for key, each in value.items()})
            if hasattr(metric, "reset"):
                metric.reset()
        return found


def _forget(metric: Any) -> None:
    if callable(getattr(metric, "reset", None)):
        metric.reset()
    elif getattr(metric, "writer", None) is not None:
        # `evaluate` has no reset: its samples are in a file, and without a writer it starts a new one.
        metric.writer = metric.buf_writer = metric.data = None


def _streams(metric: Any) -> bool:
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def _adds(metric: Any) -> bool:
    return callable(getattr(metric, "add_batch", None)) and callable(getattr(metric, "compute", None))
