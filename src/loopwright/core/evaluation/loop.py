"""The evaluation loop: exact loss, metrics, and predictions only if they are needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..outputs import EvalLoopOutput, EvalPrediction
from ..user_code.error_notes import add_note, describe
from .metrics import checked_metrics, plain_numbers, with_prefix
from .predictions import PredictionStore


@dataclass
class EvalStep:
    """The results of one evaluation batch, on the device."""

    loss: Any
    logits: Any
    labels: Any
    inputs: Any
    items: Any
    """Number of targets in the batch: the weight of its loss; an `UndecidedWeight` while there are several."""
    samples: int


@dataclass
class EvalPlan:
    """What to keep and what to compute."""

    compute_metrics: Callable[..., dict[str, Any]] | None
    loss_only: bool
    per_batch_metrics: bool = False
    """Whether the metrics function is called for each batch, so that predictions need not be kept."""
    concat: bool = True
    include: list[str] = field(default_factory=list)
    weight_by_items: bool = True
    weight_by_samples: bool = True
    """If losses are not weighted by items: weight a batch by its samples, or all batches equally."""
    host_every: int = 1
    """Batches whose outputs are kept on the device before they are copied to the host."""
    expected_rows: int | None = None
    read_every: int = 512
    """Batches whose losses are read together; reading waits for the device."""
    moment: str = ""
    """The position of the run, for notes about errors."""
    keep_always: bool = False
    """Whether predictions are returned, and therefore always kept."""

    def computed(self, prediction: EvalPrediction, **options: Any) -> dict[str, Any]:
        """The result of the metrics function."""
        assert self.compute_metrics is not None
        try:
            found = self.compute_metrics(prediction, **options)
        except Exception as error:  # a function of the user's; re-raised with a note
            given = f"predictions {describe(prediction.predictions)}, label_ids {describe(prediction.label_ids)}"
            add_note(error, "compute_metrics", when=self.moment, given=given)
            raise
        return checked_metrics(found) if options.get("compute_result", True) else {}

    def weight_of(self, step: EvalStep) -> Any:
        """The weight of a batch's mean loss."""
        if self.weight_by_items:
            return step.items
        return step.samples if self.weight_by_samples else 1

    @property
    def keeps_predictions(self) -> bool:
        return not self.loss_only and (self.keep_always or not self.per_batch_metrics)


def run_evaluation(
    steps: Iterable[EvalStep],
    plan: EvalPlan,
    *,
    to_host: Callable[[Any], Any],
    read: Callable[[list[Any]], list[float]],
    prefix: str,
) -> EvalLoopOutput:
    """Evaluate all batches; returns predictions and labels (if kept), metrics and the number of samples."""
    losses, kept, collected = WeightedLoss(read, plan.read_every), KeptPredictions(plan, to_host), BatchMetrics(plan)
    samples = 0
    for step in steps:
        samples += step.samples
        losses.add(step.loss, plan.weight_of(step))
        kept.add(step)
        collected.add(step)
    kept.to_host()
    metrics = plain_numbers(collected.result() if plan.per_batch_metrics else kept.metrics())
    loss = losses.mean()
    if loss is not None:
        metrics[f"{prefix}_loss"] = loss
    return EvalLoopOutput(
        predictions=kept.result("logits"),
        label_ids=kept.result("labels"),
        metrics=with_prefix(metrics, prefix),
        num_samples=samples,
    )


class KeptPredictions:
    """Predictions, labels and other inputs of metrics, copied to the host every few batches."""

    def __init__(self, plan: EvalPlan, to_host: Callable[[Any], Any]) -> None:
        self._plan, self._move = plan, to_host
        self._waiting: list[EvalStep] = []
        extra = [] if plan.per_batch_metrics else [name for name in ("inputs", "loss") if name in plan.include]
        self._stores = {
            name: PredictionStore(plan.expected_rows, concat=plan.concat) for name in ("logits", "labels", *extra)
        }

    def add(self, step: EvalStep) -> None:
        if not self._plan.keeps_predictions:
            return
        self._waiting.append(step)
        if len(self._waiting) >= self._plan.host_every:
            self.to_host()

    def to_host(self) -> None:
        for step in self._waiting:
            for name, store in self._stores.items():
                value = _loss_per_sample(step) if name == "loss" else getattr(step, name)
                store.append(self._move(value))
        self._waiting = []

    def result(self, name: str) -> Any:
        return self._stores[name].result() if name in self._stores else None

    def metrics(self) -> dict[str, Any]:
        """The metrics of all kept batches; empty without predictions and labels."""
        predictions, labels = self.result("logits"), self.result("labels")
        if self._plan.compute_metrics is None or predictions is None or labels is None:
            return {}
        extra = {"inputs": self.result("inputs"), "losses": self.result("loss")}
        given = {name: value for name, value in extra.items() if value is not None}
        return self._plan.computed(EvalPrediction(predictions=predictions, label_ids=labels, **given))


class BatchMetrics:
    """Metrics computed batch by batch: the call for the last batch has compute_result=True and returns the result."""

    def __init__(self, plan: EvalPlan) -> None:
        self._plan = plan
        self._last: EvalStep | None = None

    def add(self, step: EvalStep) -> None:
        plan = self._plan
        if not plan.per_batch_metrics or plan.compute_metrics is None or plan.loss_only:
            return
        if step.logits is None or step.labels is None:
            return
        if self._last is not None:
            self._compute(self._last, final=False)
        self._last = step

    def result(self) -> dict[str, Any]:
        return {} if self._last is None else self._compute(self._last, final=True)

    def _compute(self, step: EvalStep, *, final: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if "inputs" in self._plan.include:
            extra["inputs"] = step.inputs
        if "loss" in self._plan.include:
            extra["losses"] = _loss_per_sample(step)
        prediction = EvalPrediction(predictions=step.logits, label_ids=step.labels, **extra)
        return self._plan.computed(prediction, compute_result=final)


OTHERWISE = object()
"""The key of all denominators that have no count of their own."""


class UndecidedWeight(NamedTuple):
    """The weight of a batch's loss by each denominator that is possible; later batches may show which is right."""

    counts: Mapping[Any, float]
    otherwise: float
    """The weight by any other denominator."""
    choose: Callable[[], Any]
    """Returns the denominator; called after the last batch."""


class WeightedLoss:
    """The mean of batch losses, each weighted by the targets it is a mean of."""

    READ_AT = 512
    READ_UNDECIDED_AT = 64
    """The same for weights that take more memory than a number."""

    def __init__(self, read: Callable[[list[Any]], list[float]], read_every: int = READ_AT) -> None:
        self._read, self._read_every = read, read_every
        self._losses: list[Any] = []
        self._weights: list[Any] = []
        self._sum = self._weight = 0.0
        self._undecided: dict[Any, list[float]] = {OTHERWISE: [0.0, 0.0]}
        """Sum and weight of the batches whose denominator is not known yet, by denominator."""
        self._choose: Callable[[], Any] = lambda: OTHERWISE

    def add(self, loss: Any, weight: Any) -> None:
        # The mean loss of a batch without targets is NaN.
        if loss is None or (isinstance(weight, int) and weight == 0):
            return
        self._losses.append(loss)
        self._weights.append(weight)
        most = self.READ_UNDECIDED_AT if isinstance(weight, UndecidedWeight) else self._read_every
        if len(self._losses) >= min(most, self._read_every):
            self._settle()

    def mean(self) -> float | None:
        self._settle()
        total, weight = self._undecided.get(self._choose(), self._undecided[OTHERWISE])
        weight += self._weight
        return (self._sum + total) / weight if weight else None

    def _settle(self) -> None:
        if not self._losses:
            return
        away = [weight for weight in self._weights if not isinstance(weight, (int, float, UndecidedWeight))]
        losses, read = self._read(self._losses), iter(self._read(away) if away else [])
        for loss, weight in zip(losses, self._weights, strict=True):
            if isinstance(weight, UndecidedWeight):
                self._add_undecided(loss, weight)
            elif weight := weight if isinstance(weight, (int, float)) else next(read):
                self._sum += loss * weight
                self._weight += weight
        self._losses, self._weights = [], []

    def _add_undecided(self, loss: float, weight: UndecidedWeight) -> None:
        self._choose = weight.choose
        for denominator in weight.counts:
            self._undecided.setdefault(denominator, [*self._undecided[OTHERWISE]])
        for denominator, sums in self._undecided.items():
            if count := weight.counts.get(denominator, weight.otherwise):
                sums[0] += loss * count
                sums[1] += count


def _loss_per_sample(step: EvalStep) -> Any:
    """The batch's loss, once for each of its samples; None without a loss."""
    loss = step.loss
    if loss is None:
        return None
    return loss.reshape(1).repeat(step.samples) if hasattr(loss, "reshape") else [loss] * step.samples


def needs_compute_result(compute_metrics: Callable[..., Any]) -> bool:
    """Whether a metrics function accepts compute_result, so that it can be called for each batch."""
    try:
        return "compute_result" in inspect.signature(compute_metrics).parameters
    except (TypeError, ValueError):
        return False
