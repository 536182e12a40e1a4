"""Named values of a loss: the mean of each over the micro-batches and ranks of an update, and over a log interval."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

from ...errors import ModelError

TAKEN = ("loss", "grad_norm", "learning_rate", "epoch", "step", "nonfinite_steps", "num_input_tokens_seen")
"""Names of the log that a loss cannot use."""
OF_EVALUATIONS = "eval_"
"""How the names of evaluations begin: a row of the log with one of them is an evaluation."""

Gather = Callable[[list[float]], list[list[float]]]
"""The numbers of every rank, in lists of one length."""


def check_name(name: Any) -> None:
    """Raise unless a value may be logged by this name."""
    if not isinstance(name, str) or not name or name in TAKEN or name.startswith(OF_EVALUATIONS):
        raise ModelError(
            f"the loss has a value named {name!r}, which cannot be logged beside the loss; use another name (not "
            f"{', '.join(TAKEN)}, and not {OF_EVALUATIONS}...)"
        )


class NamedMeans:
    """Each value of an update is a numerator and a denominator, kept on the device until a log point."""

    def __init__(self, read: Callable[[list[Any]], list[float]], *, gather: Gather | None, filters: bool) -> None:
        self._read, self._gather, self._filters = read, gather, filters
        self._pending: list[dict[str, tuple[Any, Any]]] = []
        self.sums: dict[str, list[float]] = {}
        """Per name: the sum of the values of the interval, their number, and those of the finite ones."""

    def add(self, values: dict[str, tuple[Any, Any]]) -> None:
        """Add the values of one update."""
        self._pending.append(values)

    def stamp(self) -> list[float]:
        """Two numbers from which the mean over all ranks shows whether they have the same names, and any at all."""
        names = self._names()
        code = zlib.crc32("\n".join(names).encode()) % 65_521 + 1 if names else 0
        return [float(code), float(code) ** 2]

    def settle(self, stamps: list[float] | None = None) -> None:
        """Copy pending values to the host; with several ranks, `stamps` is the mean of their `stamp()`."""
        pending, names = self._pending, self._names()
        self._pending = []
        if stamps is not None:
            code, square = stamps
            if not square:
                return
            if abs(square - code * code) > 0.25:
                names = self._names_of_all(names)
        if not names:
            return
        pairs = self._on_host([each.get(name, (0.0, 0.0)) for each in pending for name in names])
        if stamps is not None and self._gather is not None:
            columns = zip(*self._gather([number for pair in pairs for number in pair]), strict=True)
            flat = [sum(column) for column in columns]
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
        for index, (total, weight) in enumerate(pairs):
            if weight:
                self._take(names[index % len(names)], total / weight)

    def read(self) -> dict[str, float]:
        """The mean of each value since the last reading; starts a new interval."""
        found = {}
        for name, (total, count, finite, finite_count) in self.sums.items():
            uses_finite = self._filters and finite_count
            found[name] = finite / finite_count if uses_finite else total / count
        self.sums = {}
        return found

    def _names(self) -> list[str]:
        return sorted({name for each in self._pending for name in each})

    def _names_of_all(self, names: list[str]) -> list[str]:
        """The names of all ranks."""
        assert self._gather is not None
        own = list("\n".join(names).encode())
        longest = int(max(row[0] for row in self._gather([float(len(own))])))
        rows = self._gather([float(each) for each in own] + [-1.0] * (longest - len(own)))
        texts = [bytes(int(each) for each in row if each >= 0).decode() for row in rows]
        return sorted({name for text in texts for name in text.split("\n") if name})

    def _on_host(self, pairs: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        flat = [number for pair in pairs for number in pair]
        on_device = iter(self._read([each for each in flat if not isinstance(each, (int, float))]))
        numbers = [float(each) if isinstance(each, (int, float)) else next(on_device) for each in flat]
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _take(self, name: str, value: float) -> None:
        sums = self.sums.setdefault(name, [0.0, 0, 0.0, 0])
        sums[0] += value
        sums[1] += 1
        if math.isfinite(value):
            sums[2] += value
            sums[3] += 1
