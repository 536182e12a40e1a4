"""What a case of the adversary is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from loopwright import Trainer

from .models import collate, ragged
from .reference import Act, Collate, UpdateLoss


@dataclass(frozen=True)
class Case:
    """A model, data, a loss and what the user does meanwhile, with the loss of an update by its definition."""

    name: str
    cause: str
    make: Callable[[], nn.Module]
    loss: UpdateLoss | None
    """None where it is only defined for a micro-batch."""
    written: UpdateLoss | None = None
    """The loss micro-batch by micro-batch, which is right as well if the user is told."""
    says: str = "loss"
    """Words of what the user is told then."""
    rows: Callable[[], list[Any]] = ragged
    collator: Callable[[], Collate] = lambda: collate
    trainer: Any = Trainer
    options: dict[str, Any] = field(default_factory=dict)
    given: Callable[[], dict[str, Any]] = dict
    """What else the constructor of the trainer is given."""
    optimizer: Callable[[nn.Module], Any] | None = None
    """The user's own."""
    rate: float = 0.05
    begin: Callable[[Any], None] | None = None
    act: Act | None = None
    """Before each update."""
    after: Act | None = None
    clip: float = 0.0
    updates: int = 4
    judge: Callable[[Any, Any], str | None] | None = None
    """What is wrong with a run, where its gradients cannot be compared."""
    also: Callable[[Any, Any], None] | None = None
    """What else has to be so after a run."""


CASES: dict[str, Case] = {}


def add(case: Case) -> Case:
    assert case.name not in CASES, case.name
    CASES[case.name] = case
    return case


def case(name: str, cause: str, make: Callable[[], nn.Module], loss: UpdateLoss | None, **more: Any) -> Case:
    """Add a case to the list."""
    return add(Case(name, cause, make, loss, **more))
