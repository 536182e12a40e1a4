"""Counting compiled graphs, and finding which input caused an unexpected one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

EXPECTED = 3
"""Graphs of a normal run: a training step, an evaluation step, and one more while the loss kind is inferred."""

Signature = dict[str, tuple[Any, ...]]


class ShapeGuard:
    """Counts graphs and records input shapes, to report which change caused a new graph."""

    def __init__(self, count: Callable[[], int], *, allowed: int | None) -> None:
        self._count, self._allowed = count, allowed
        self._first = count()
        self._known: list[Signature] = []
        self._changed = ""
        self._told = False
        self.tell: Callable[[str], None] | None = None

    @property
    def graphs(self) -> int:
        """Graphs compiled since this run began."""
        return self._count() - self._first

    def count(self) -> int:
        """`graphs` as a function."""
        return self.graphs

    def saw(self, batch: Any) -> None:
        """Record the shapes of a batch that is copied to the device, and what changed."""
        if not isinstance(batch, Mapping):
            return
        now = {name: (*value.shape, str(value.dtype)) for name, value in batch.items() if isinstance(value, Tensor)}
        if now not in self._known:
            self._changed = difference(self._known[-1], now) if self._known else ""
            self._known.append(now)

    def check(self) -> None:
        """Warn once if more graphs were compiled than allowed, with the input that changed; an error in strict mode."""
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
    """The difference between the inputs of two batches, as text."""
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
