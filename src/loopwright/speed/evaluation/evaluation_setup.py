"""What the plan of an evaluation is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..training_setup import TrainingSetup


class Forward(NamedTuple):
    """The result of one forward in evaluation."""

    loss: Any
    """The mean loss, or None."""
    weight: Any
    outputs: tuple[Any, ...]


@dataclass
class EvaluationSetup(TrainingSetup):
    """The setup of training, and what an evaluation computes."""

    forward_of: Callable[[Any, int], Forward] = lambda inputs, samples: Forward(None, 0, ())
    """Forward of inputs that hold this many samples, without gradients and without autocast."""
    keeps_outputs: bool = False
    """Whether outputs are kept, for predictions or metrics, instead of the loss alone."""

    @classmethod
    def of(cls, training: TrainingSetup, **changes: Any) -> EvaluationSetup:
        """The setup of training with changes."""
        return cls(**{**{each.name: getattr(training, each.name) for each in fields(training)}, **changes})
