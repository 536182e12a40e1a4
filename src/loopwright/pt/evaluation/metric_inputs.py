"""Inputs of metric objects: predictions and labels without ignored targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.evaluation.metric_objects import MetricObjects
from ...errors import DataError
from ..loss.targets import IGNORED


def metrics_function(compute_metrics: Any, device: torch.device) -> Any:
    """The user's function unchanged, or a function that updates a dict of metric objects."""
    if not isinstance(compute_metrics, Mapping):
        return compute_metrics
    for metric in compute_metrics.values():
        if callable(getattr(metric, "to", None)):
            metric.to(device)
        for part in metric.modules() if hasattr(metric, "modules") else [metric]:
            if hasattr(part, "sync_on_compute"):
                part.sync_on_compute = False  # every rank receives the batches of all ranks
    return MetricObjects(compute_metrics, scores=scores, choices=choices)


def scores(predictions: Any, labels: Any, shifted: bool = False) -> tuple[Tensor, Tensor]:
    """Predictions and labels without ignored targets, flattened if labels are per token."""
    if isinstance(labels, tuple) and not labels:
        raise DataError("metric objects need labels, but the data has none; pass a function as compute_metrics")
    predictions, labels = _first(predictions), _first(labels)
    if labels.is_floating_point():
        one_each = predictions.dim() == labels.dim() + 1 and predictions.shape[-1] == 1
        return predictions.squeeze(-1) if one_each else predictions, labels
    if shifted and labels.dim() > 1:
        labels = labels[:, 1:]
        predictions = predictions[:, : labels.shape[1]]
    if predictions.shape[: labels.dim()] != labels.shape:
        raise DataError(
            f"metric objects need one prediction per label, but predictions have shape {tuple(predictions.shape)} "
            f"and labels have shape {tuple(labels.shape)}; pass a function as compute_metrics, or reshape them in "
            "preprocess_logits_for_metrics"
        )
    counted = labels != IGNORED
    return predictions[counted], labels[counted]


def choices(predictions: Any, labels: Any, shifted: bool = False) -> tuple[Any, Any]:
    """The predicted classes and the labels, as numpy arrays."""
    predictions, labels = scores(predictions, labels, shifted)
    if predictions.dim() > labels.dim() and not labels.is_floating_point():
        predictions = predictions.argmax(-1)
    return predictions.cpu().numpy(), labels.cpu().numpy()


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, (tuple, list)) else value
