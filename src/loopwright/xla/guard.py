"""Which graphs were compiled, and what changed when an unexpected one was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

EXPECTED = 3
"""Graphs a run cannot do without: a step of training, one of evaluation, and one more while the loss is found out."""

Signature = dict[str, tuple[Any, ...]]


class ShapeGuard:
    """Counts graphs and remembers the shapes of inputs, so that a new graph can be put down to what changed."""

    def __init__(self, count: Callable[[], int], *, allowed: int | None) -> None:
        self._count, self._allowed = count, allowed
        self._first = count()
        self._known: list[Signature] = []
        self._last: Signature | None = None
        self._changed = ""
        self._told = False
        self.tell: Callable[[str], None] | None = None

    @property
    def graphs(self) -> int:
        """Graphs compiled since this run began."""
        return self._count() - self._first

    def count(self) -> int:
        """The same, for logs."""
        return self.graphs

    def saw(self, batch: Any) -> None:
        """A batch goes to the device: note its shapes, and what is new about them."""
        if not isinstance(batch, Mapping):
            return
        now = {name: (*value.shape, str(value.dtype)) for name, value in batch.items() if isinstance(value, Tensor)}
        if now not in self._known:
            self._changed = difference(self._known[-1], now) if self._known else ""
            self._known.append(now)
        self._last = now

    def check(self) -> None:
        """Say, once, that more graphs were compiled than allowed, and which input changed; an error in strict mode."""
        if self._allowed is None or self._told or self.tell is None:
            return
        again = self.graphs - EXPECTED
        if again > self._allowed:
            self._told = True
            reason = self._changed or (
                "no input changed its shape; reading a value in the middle of a step also causes this"
            )
            self.tell(
                f"{self.graphs} graphs were compiled, {again} more than a run with one shape needs and more than "
                f"max_recompiles={self._allowed}; the last new shape: {reason}"
            )


def difference(before: Signature, now: Signature) -> str:
    """What is different between the inputs of two batches, in words."""
    parts = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if old is None or new is None:
            parts.append(f"{name} {'appeared' if old is None else 'is gone'}")
        else:
            parts.append(f"{name} went from {_shape(old)} to {_shape(new)}")
    return ", ".join(parts)


def _shape(signature: tuple[Any, ...]) -> str:
    return f"{tuple(signature[:-1])} {signature[-1].removeprefix('torch.')}"
