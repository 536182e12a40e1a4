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
    first, factor = xs[0], columns / ((xs[-1] - xs[0]) or 1.0)
    lowest: dict[int, int] = {}
    highest: dict[int, int] = {}
    gaps: dict[int, int] = {}
    for place, (x, y) in enumerate(zip(xs, ys, strict=True)):
        column = min(int((x - first) * factor), columns - 1)
        if y is None:
            gaps.setdefault(column, place)
        elif column not in lowest:
            lowest[column] = highest[column] = place
        elif y < (ys[lowest[column]] or 0.0):
            lowest[column] = place
        elif y > (ys[highest[column]] or 0.0):
            highest[column] = place
    alone = [place for column, place in gaps.items() if column not in lowest]
    kept = sorted({0, len(xs) - 1, *lowest.values(), *highest.values(), *alone})
    return [xs[i] for i in kept], [ys[i] for i in kept]
