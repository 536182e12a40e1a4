"""The results of training, evaluation and prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = NDArray[Any] | tuple[NDArray[Any], ...]


class EvalPrediction:
    """The input of `compute_metrics`: predictions and labels, and inputs and losses if requested.

    Unpacks like a tuple of the parts that are present: `logits, labels = prediction`.
    """

    def __init__(
        self,
        predictions: Arrays,
        label_ids: Arrays,
        inputs: Arrays | None = None,
        losses: Arrays | None = None,
    ) -> None:
        self.predictions, self.label_ids = predictions, label_ids
        self.inputs, self.losses = inputs, losses

    @property
    def elements(self) -> tuple[Any, ...]:
        """The parts in order, without optional ones that were not requested."""
        optional = (part for part in (self.inputs, self.losses) if part is not None)
        return (self.predictions, self.label_ids, *optional)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)

    def __repr__(self) -> str:
        parts = ("predictions", "label_ids", "inputs", "losses")
        shown = ", ".join(f"{name}={_shape(getattr(self, name))}" for name in parts if getattr(self, name) is not None)
        return f"EvalPrediction({shown})"


def _shape(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_shape(each) for each in value)})"
    return f"array{np.shape(value)}"


class TrainOutput(NamedTuple):
    """The result of `train()`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """The result of `predict()`."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """The result of one pass over an evaluation or test set."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


class BestTrial(NamedTuple):
    """The fields that transformers' BestRun has."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


class BestRun(BestTrial):
    """The best trial of a hyper-parameter search."""

    checkpoint: str | None = None
    """Its best checkpoint if it determined one, else its last; None if it saved none."""


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Duration of `split` since `start_time` (of `time.time()`) and its rates, under transformers' keys."""
    runtime = time.time() - start_time
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime <= 0:  # the clock was set back or is too coarse: report no rate
        return metrics
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for name, count in counts.items():
        if count is not None:
            metrics[f"{split}_{name}_per_second"] = round(count / runtime, 3)
    return metrics
