"""Metric objects given as `compute_metrics={"accuracy": metric, ...}`: torchmetrics and `evaluate`, fed batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ArgumentsError

Shape = Callable[[Any, Any], tuple[Any, Any]]
"""Turns predictions and labels into what a metric takes: ignored targets left out, classes chosen."""


class MetricObjects:
    """A metrics function made of objects that collect; it keeps nothing but their state."""

    def __init__(self, metrics: Mapping[str, Any], *, scores: Shape, choices: Shape) -> None:
        self._metrics = dict(metrics)
        self._scores, self._choices = scores, choices
        strange = [name for name, metric in self._metrics.items() if not (_streams(metric) or _adds(metric))]
        if strange:
            raise ArgumentsError(
                f"compute_metrics: {', '.join(strange)} has neither update() and compute() as torchmetrics do, "
                "nor add_batch() and compute() as `evaluate` does"
            )

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        for metric in self._metrics.values():
            if _streams(metric):
                metric.update(*self._scores(prediction.predictions, prediction.label_ids))
            else:
                predictions, references = self._choices(prediction.predictions, prediction.label_ids)
                metric.add_batch(predictions=predictions, references=references)
        return self._result() if compute_result else {}

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


def _streams(metric: Any) -> bool:
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def _adds(metric: Any) -> bool:
    return callable(getattr(metric, "add_batch", None)) and callable(getattr(metric, "compute", None))
