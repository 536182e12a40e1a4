"""The evaluation loop: exact loss, metrics, and predictions only when something needs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .metrics import plain_numbers, with_prefix
from .outputs import EvalLoopOutput, EvalPrediction
from .predictions import PredictionStore


@dataclass
class EvalStep:
    """What one evaluation batch gave, still on the device."""

    loss: Any
    logits: Any
    labels: Any
    inputs: Any
    items: Any
    """Targets in the batch: the weight of its loss."""
    samples: int


@dataclass
class EvalPlan:
    """What to keep and what to compute."""

    compute_metrics: Callable[..., dict[str, Any]] | None
    loss_only: bool
    per_batch_metrics: bool = False
    concat: bool = True
    include: list[str] = field(default_factory=list)
    weight_by_items: bool = True
    host_every: int = 1
    """Batches kept on the device before their outputs move to the host."""
    expected_rows: int | None = None

    @property
    def keeps_predictions(self) -> bool:
        return not self.loss_only and not self.per_batch_metrics


def run_evaluation(
    steps: Iterable[EvalStep],
    plan: EvalPlan,
    *,
    to_host: Callable[[Any], Any],
    read: Callable[[list[Any]], list[float]],
    prefix: str,
) -> EvalLoopOutput:
    """Go through the batches; returns predictions and labels (if kept), metrics and the number of samples."""
    losses = WeightedLoss(read)
    stores = {name: PredictionStore(plan.expected_rows, concat=plan.concat) for name in ("logits", "labels", "inputs")}
    sample_losses = PredictionStore(plan.expected_rows)
    waiting: list[EvalStep] = []
    samples, metrics = 0, {}

    def to_stores() -> None:
        for step in waiting:
            for name in ("logits", "labels") + (("inputs",) if "inputs" in plan.include else ()):
                stores[name].append(to_host(getattr(step, name)))
            if "loss" in plan.include and step.loss is not None:
                sample_losses.append(to_host(_loss_per_sample(step)))
        waiting.clear()

    last: EvalStep | None = None
    for step in steps:
        samples += step.samples
        losses.add(step.loss, step.items if plan.weight_by_items else step.samples)
        if plan.keeps_predictions:
            waiting.append(step)
            if len(waiting) >= plan.host_every:
                to_stores()
        elif plan.per_batch_metrics and plan.compute_metrics is not None:
            if last is not None:
                _batch_metrics(plan, last, to_host, final=False)
            last = step
    to_stores()

    if last is not None:
        metrics = _batch_metrics(plan, last, to_host, final=True)
    predictions, labels = stores["logits"].result(), stores["labels"].result()
    if plan.compute_metrics is not None and plan.keeps_predictions and predictions is not None and labels is not None:
        extra = {"inputs": stores["inputs"].result(), "losses": sample_losses.result()}
        metrics = plan.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **_given(extra)))
    metrics = {name: value for name, value in plain_numbers(metrics or {}).items()}
    loss = losses.mean()
    if loss is not None:
        metrics[f"{prefix}_loss"] = loss
    return EvalLoopOutput(
        predictions=predictions, label_ids=labels, metrics=with_prefix(metrics, prefix), num_samples=samples
    )


class WeightedLoss:
    """The mean of batch losses, each weighted by the targets it is a mean of."""

    READ_AT = 512

    def __init__(self, read: Callable[[list[Any]], list[float]]) -> None:
        self._read = read
        self._losses: list[Any] = []
        self._weights: list[Any] = []
        self._sum = self._weight = 0.0

    def add(self, loss: Any, weight: Any) -> None:
        # A batch without targets has no mean; its loss would be NaN.
        if loss is None or (isinstance(weight, int) and weight == 0):
            return
        self._losses.append(loss)
        self._weights.append(weight)
        if len(self._losses) >= self.READ_AT:
            self._settle()

    def mean(self) -> float | None:
        self._settle()
        return self._sum / self._weight if self._weight else None

    def _settle(self) -> None:
        if not self._losses:
            return
        on_host = all(isinstance(weight, (int, float)) for weight in self._weights)
        losses = self._read(self._losses)
        weights = self._weights if on_host else self._read(self._weights)
        for loss, weight in zip(losses, weights, strict=True):
            if weight:
                self._sum += loss * weight
                self._weight += weight
        self._losses, self._weights = [], []


def _batch_metrics(plan: EvalPlan, step: EvalStep, to_host: Callable[[Any], Any], *, final: bool) -> dict[str, Any]:
    """Metrics that are collected batch by batch; only the last call returns the result."""
    assert plan.compute_metrics is not None
    extra: dict[str, Any] = {}
    if "inputs" in plan.include:
        extra["inputs"] = step.inputs
    if "loss" in plan.include:
        extra["losses"] = _loss_per_sample(step)
    prediction = EvalPrediction(predictions=step.logits, label_ids=step.labels, **extra)
    return plan.compute_metrics(prediction, compute_result=final) or {}


def _loss_per_sample(step: EvalStep) -> Any:
    """The batch's loss, once for each of its samples."""
    loss = step.loss
    return loss.reshape(1).repeat(step.samples) if hasattr(loss, "reshape") else [loss] * step.samples


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def needs_compute_result(compute_metrics: Callable[..., Any]) -> bool:
    """Whether a metrics function can collect batch by batch."""
    try:
        return "compute_result" in inspect.signature(compute_metrics).parameters
    except (TypeError, ValueError):
        return False
