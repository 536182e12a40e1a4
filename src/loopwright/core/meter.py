"""Loss, gradient norm and non-finite counts between two log points, left on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Read = Callable[[list[Any]], list[float]]
"""Device scalars to host numbers, in one wait."""

READ_AT = 4096
"""Scalars kept before they are read in any case, so that a run without log points does not collect them forever."""


@dataclass(frozen=True)
class Reading:
    """What happened since the last log point."""

    loss: float
    grad_norm: float | None
    updates: int
    nonfinite: int


class Meter:
    """Collects one loss (and gradient norm) per update without waiting for the device."""

    def __init__(self, read: Read, *, filter_nonfinite: bool) -> None:
        self._read = read
        self._filter = filter_nonfinite
        self._pending: list[Any] = []
        self._norm: Any = None
        self.losses: list[float] = []
        """Losses already on the host that belong to the open log interval."""
        self.total_loss = 0.0
        self.total_updates = 0
        self.nonfinite = 0

    def add(self, loss: Any, norm: Any) -> None:
        self._pending.append(loss)
        self._norm = norm
        if len(self._pending) >= READ_AT:
            self.settle()

    def settle(self) -> None:
        """Bring every pending loss to the host."""
        if self._pending:
            self._take(self._read(self._pending))

    def read(self) -> Reading:
        """The mean loss since the last reading, and the last gradient norm; starts a new interval."""
        norm = None
        if self._norm is None:
            self.settle()
        else:
            *losses, norm = self._read([*self._pending, self._norm])
            self._take(losses)
            self._norm = None
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        counted = finite if self._filter and finite else self.losses
        loss = sum(counted) / len(counted) if counted else float("nan")
        reading = Reading(loss, norm, len(self.losses), len(self.losses) - len(finite))
        self.losses = []
        return reading

    def mean_loss(self) -> float:
        """The mean over every update of the run."""
        self.settle()
        return self.total_loss / max(self.total_updates, 1)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "losses": list(self.losses),
            "total_loss": self.total_loss,
            "total_updates": self.total_updates,
            "nonfinite": self.nonfinite,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending, self._norm = [], None
        self.losses = [float(loss) for loss in state["losses"]]
        self.total_loss = float(state["total_loss"])
        self.total_updates = state["total_updates"]
        self.nonfinite = state["nonfinite"]

    def _take(self, losses: list[float]) -> None:
        self.losses.extend(losses)
        self._pending = []
        for loss in losses:
            finite = math.isfinite(loss)
            self.nonfinite += not finite
            if finite or not self._filter:
                self.total_loss += loss
                self.total_updates += 1
