"""Loss, gradient norm and non-finite counts between two log points, kept on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..checkpoint.schema import any_number, count, either, list_of, maybe, named, number, record
from .named_values import Gather, NamedMeans

_STATE = record(
    {
        "losses": list_of(any_number),
        "bad": either(list_of(count()), count()),
        "last_norm": maybe(any_number),
        "total_loss": any_number,
        "total_updates": count(),
        "nonfinite": count(),
    },
    {
        "named": named(list_of(any_number)),
        "sums": record({"updates": count(), "total": any_number, "finite_updates": count(), "finite": any_number}),
        "first_bad": maybe(count()),
    },
)


def saved_meter(value: Any, name: str) -> str | None:
    """The saved numbers; all of them are finite unless an update was not."""
    problem = _STATE(value, name)
    if problem is None and not value["nonfinite"]:
        return record({"losses": list_of(number()), "last_norm": maybe(number()), "total_loss": number()},
                      {"sums": named(number())})(value, name)  # fmt: skip
    return problem


Read = Callable[[list[Any]], list[float]]
"""Copies device scalars to the host in one synchronization."""

READ_AT = 4096
"""Updates after which values are read in any case, so that a run without log points does not collect them forever."""


@dataclass(frozen=True)
class Reading:
    """Numbers since the last log point."""

    loss: float
    grad_norm: float | None
    nonfinite: int
    first_nonfinite: int | None
    """Index, within the interval, of the first update with a NaN or infinite loss or gradient."""
    named: dict[str, float] = field(default_factory=dict)
    """Means of the named values of the loss."""


@dataclass(frozen=True)
class Sums:
    """Sums of the losses of an interval, so that one without log points does not collect them."""

    updates: int = 0
    total: float = 0.0
    finite_updates: int = 0
    finite: float = 0.0

    def with_block(self, losses: list[float]) -> Sums:
        """These sums and those of a block of losses."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        updates, known = self.updates + len(losses), self.finite_updates + len(finite)
        return Sums(updates, self.total + sum(losses), known, self.finite + sum(finite))


class Meter:
    """Collects one loss (and gradient norm) per update without waiting for the device."""

    def __init__(
        self,
        read: Read,
        *,
        filter_nonfinite: bool,
        mean: Callable[[list[float]], list[float]] | None = None,
        gather: Gather | None = None,
    ) -> None:
        self._read, self._gather = read, gather
        self._mean = mean
        """The mean of each number over all ranks; None for a single process."""
        self._filter = filter_nonfinite
        self._named = self._new_names()
        self._losses: list[Any] = []
        self._norms: list[Any] = []
        self._waiting = 0
        self._last_norm: float | None = None
        self._norm_then: float | None = None
        """The gradient norm at the last reading."""
        self.losses: list[float] = []
        """Losses already on the host that belong to the open log interval, except those in `_sums`."""
        self.bad = 0
        """Number of updates of the open interval that were not finite."""
        self._first_bad: int | None = None
        self._sums = Sums()
        self.total_loss = 0.0
        self.total_updates = 0
        self.nonfinite = 0

    def _new_names(self) -> NamedMeans:
        return NamedMeans(self._read, gather=self._gather, filters=self._filter)

    def add(self, loss: Any, norm: Any, named: dict[str, tuple[Any, Any]] | None = None) -> None:
        # `+=` instead of append: it runs in every update, and avoids a call.
        self._losses += (loss,)
        self._norms += (norm,)
        self._waiting += 1
        if named is not None:
            self._named.add(named)
        if self._waiting >= READ_AT:
            self.settle()

    def settle(self) -> None:
        """Copy all pending values to the host in one synchronization."""
        if not self._losses:
            return
        losses, norms = self._losses, self._norms
        self._losses, self._norms, self._waiting = [], [], 0
        values = self._read([*losses, *[norm for norm in norms if norm is not None]])  # a list: avoids calls
        if self._mean is not None:  # the loss is this rank's share; the norm is the same on all ranks
            *values[: len(losses)], code, square = self._mean([*values[: len(losses)], *self._named.stamp()])
            self._named.settle([code, square])
        else:
            self._named.settle()
        if len(values) == 2 * len(losses) and math.isfinite(sum(values)):
            self._take_finite(values, len(losses))
            return
        rest = iter(values[len(losses) :])
        for loss, norm in zip(values[: len(losses)], [None if n is None else next(rest) for n in norms], strict=True):
            self._take(loss, norm)

    def read(self) -> Reading:
        """The mean loss since the last reading, and the last gradient norm; starts a new interval."""
        self.settle()
        sums = self._sums.with_block(self.losses)
        total, number = (sums.finite, sums.finite_updates) if self._filter else (sums.total, sums.updates)
        if not number:
            total, number = sums.total, sums.updates
        loss = total / number if number else float("nan")
        reading = Reading(loss, self._last_norm, self.bad, self._first_bad, self._named.read())
        self._norm_then = self._last_norm
        self._open(([], [], 0, [], Sums(), 0, None, None, self._new_names()))
        return reading

    def open_losses(self) -> list[Any]:
        """Numbers, some of them on the device, whose sum is that of the losses since the last reading."""
        return [self._sums.total, *self.losses, *self._losses]

    @property
    def newest_norm(self) -> Any:
        """The gradient norm of the last update, which may be on the device; None if there is none."""
        if self._norms:
            return self._norms[-1]
        return self._norm_then if self._last_norm is None else self._last_norm

    @property
    def logged_loss(self) -> float:
        """The sum of the losses of all updates up to the last reading."""
        self.settle()
        return (
            self.total_loss
            - (self._sums.finite if self._filter else self._sums.total)
            - sum(loss for loss in self.losses if math.isfinite(loss) or not self._filter)
        )

    def hand_over(self) -> Callable[[], Reading]:
        """Close the interval without reading it; the returned function reads it later."""
        closed = self._interval()
        self._open(([], [], 0, [], Sums(), 0, None, None, self._new_names()))

        def read() -> Reading:
            now = self._interval()
            self._open(closed)
            reading = self.read()
            self._open(now)
            return reading

        return read

    def _interval(self) -> tuple[Any, ...]:
        values = (self._losses, self._norms, self._waiting, self.losses, self._sums, self.bad, self._first_bad)
        return *values, self._last_norm, self._named

    def _open(self, interval: tuple[Any, ...]) -> None:
        self._losses, self._norms, self._waiting, self.losses, self._sums, self.bad = interval[:6]
        self._first_bad, self._last_norm, self._named = interval[6:]

    def mean_loss(self) -> float:
        """The mean over every update of the run."""
        self.settle()
        if self.nonfinite and not self.total_updates:
            return float("nan")  # 0 would look like a perfect loss
        return self.total_loss / max(self.total_updates, 1)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        named = {"named": self._named.sums} if self._named.sums else {}
        return {
            **named,
            "losses": list(self.losses),
            "sums": asdict(self._sums),
            "bad": self.bad,
            "first_bad": self._first_bad,
            "last_norm": self._last_norm,
            "total_loss": self.total_loss,
            "total_updates": self.total_updates,
            "nonfinite": self.nonfinite,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._norms, self._waiting = [], [], 0
        self.losses, self._sums = list(state["losses"]), Sums(**state.get("sums", {}))
        self._named.sums = {name: list(sums) for name, sums in state.get("named", {}).items()}
        bad = state["bad"]
        if isinstance(bad, list):  # all indices, in checkpoints of earlier versions
            self.bad, self._first_bad = len(bad), next(iter(bad), None)
        else:
            self.bad, self._first_bad = bad, state.get("first_bad")
        self._last_norm = state["last_norm"]
        self.total_loss, self.total_updates = state["total_loss"], state["total_updates"]
        self.nonfinite = state["nonfinite"]

    def _take_finite(self, values: list[float], updates: int) -> None:
        """Add losses and norms that are all finite."""
        self.losses += values[:updates]
        self._last_norm = values[-1]
        for loss in values[:updates]:  # one at a time: a partial sum would depend on when it is read
            self.total_loss += loss
        self.total_updates += updates
        self._fold()

    def _take(self, loss: float, norm: float | None) -> None:
        finite = math.isfinite(loss)
        if not finite or not math.isfinite(norm or 0.0):
            self._first_bad = self._sums.updates + len(self.losses) if self._first_bad is None else self._first_bad
            self.bad += 1
            self.nonfinite += 1
        self.losses.append(loss)
        self._last_norm = norm
        if finite or not self._filter:
            self.total_loss += loss
            self.total_updates += 1
        self._fold()

    def _fold(self) -> None:
        """Replace losses by sums, in blocks of one size: the result does not depend on when they were read."""
        while len(self.losses) >= READ_AT:
            self._sums = self._sums.with_block(self.losses[:READ_AT])
            self.losses = self.losses[READ_AT:]
