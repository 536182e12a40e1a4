"""What a task is: its fields, its metrics, and the function that makes model and data of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .fields import DataFields

if TYPE_CHECKING:
    from .request import Request

CLASS_METRICS = {
    "accuracy": "fraction of correct classes",
    "f1": "mean F1 of the classes",
    "precision": "mean precision of the classes",
    "recall": "mean recall of the classes",
}
"""Metrics of tasks that predict one class for each sample."""


@dataclass
class Materials:
    """Everything that a trainer is made of, except its arguments."""

    model: Any
    train_dataset: Any
    eval_dataset: Any = None
    processing_class: Any = None
    data_collator: Any = None
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    notes: list[str] = field(default_factory=list)
    """What was dropped or changed on the way, for the user."""
    sample: Callable[[], Any] | None = None
    """Returns one training sample for `check` as a list of (text, is trained)."""


@dataclass(frozen=True)
class Task:
    """A task of the command line."""

    name: str
    help: str
    data: type[DataFields]
    """The fields of the block `data`."""
    metrics: Mapping[str, str]
    """Names and meanings of the metrics."""
    default_metrics: tuple[str, ...]
    build: Callable[[Request], Materials]
    example: Mapping[str, Any]
    """The blocks that `loopwright init` writes, besides `task`."""
    generates: bool = False
    """Whether evaluation may generate text, so that the arguments of generation exist."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of training arguments that differ for this task."""
