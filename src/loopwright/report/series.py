"""The points of a curve, reduced to a few thousand without losing an extreme value."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

MOST_POINTS = 2000
Points = tuple[list[float], list[float | None]]


@dataclass
class Series:
    """A curve that is extended point by point; its memory is bounded.

    When it has twice as many points as are shown, it is divided into columns of equal width, and each column keeps its
    lowest and its highest value.
    """

    xs: list[float] = field(default_factory=list)
    ys: list[float | None] = field(default_factory=list)
    """Values; None for NaN and infinities, which no chart can show."""
    last: float | None = None
    """The latest value that is a number."""

    def add(self, x: float, y: float) -> None:
        """Add a point; it replaces the one at the same place."""
        value = y if math.isfinite(y) else None
        place = len(self.xs) if not self.xs or x > self.xs[-1] else bisect_left(self.xs, x)
        if place < len(self.xs) and self.xs[place] == x:
            self.ys[place] = value
        else:
            self.xs.insert(place, x)
            self.ys.insert(place, value)
        self.last = self.last if value is None else value
        if len(self.xs) >= 2 * MOST_POINTS:
            self.xs, self.ys = reduced(self.xs, self.ys)

    def points(self, most: int = MOST_POINTS) -> Points:
        """At most so many points."""
        return reduced(self.xs, self.ys, most) if len(self.xs) > most else (list(self.xs), list(self.ys))


def reduced(xs: list[float], ys: list[float | None], most: int = MOST_POINTS) -> Points:
    """The lowest and the highest point of each of `most / 2` columns, and the first and the last point."""
    columns = max(most // 2 - 1, 1)
    first, span = xs[0], (xs[-1] - xs[0]) or 1.0
    kept = {0, len(xs) - 1}
    start = 0
    while start < len(xs):
        column = min(int((xs[start] - first) / span * columns), columns - 1)
        end = start
        while end < len(xs) and min(int((xs[end] - first) / span * columns), columns - 1) == column:
            end += 1
        kept.update(_extremes(ys, start, end))
        start = end
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def _extremes(ys: list[float | None], start: int, end: int) -> tuple[int, ...]:
    """The places of the lowest and the highest value; that of a gap if there is no value."""
    values = [(value, place) for place in range(start, end) if (value := ys[place]) is not None]
    return (min(values)[1], max(values)[1]) if values else (start,)
