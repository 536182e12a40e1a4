"""A chart for terminals: two by four dots in every character."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .series import Points

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""
EMPTY = 0x2800
LABEL = 9
"""Columns of the numbers beside a chart."""


def chart(points: Points, *, title: str, width: int, height: int) -> list[str]:
    """The lines of a chart with its title, the numbers of its ends and the first and last step."""
    xs, values = points
    known = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
    inner = max(width - LABEL - 2, 4)
    if not known:
        return [title[:width], *[" " * width] * height, " " * width]
    low, high = min(y for _, y in known), max(y for _, y in known)
    rows = _drawn(known, (low, high), inner, height)
    labels = {0: _label(high), height - 1: _label(low)}
    body = [f"{labels.get(index, ''):>{LABEL}} │{row}" for index, row in enumerate(rows)]
    first, last = f"{known[0][0]:,.0f}", f"{known[-1][0]:,.0f}"
    foot = " " * (LABEL + 2) + (f"{first}{last:>{inner - len(first)}}" if len(first) + len(last) < inner else last)
    return [f"{title[:width]:<{width}}", *body, f"{foot:<{width}}"]


def _drawn(known: Sequence[tuple[float, float]], ends: tuple[float, float], width: int, height: int) -> list[str]:
    """The dots as rows of characters; neighbouring points are joined by a line."""
    cells = [[EMPTY] * width for _ in range(height)]
    across, down = 2 * width - 1, 4 * height - 1
    first, span = known[0][0], (known[-1][0] - known[0][0]) or 1.0
    low, extent = ends[0], (ends[1] - ends[0]) or 1.0
    places = [(round((x - first) / span * across), round((1 - (y - low) / extent) * down)) for x, y in known]
    for before, after in zip([places[0], *places], places, strict=False):
        for column, row in _line(before, after):
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return ["".join(map(chr, row)) for row in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _label(value: float) -> str:
    return f"{value:.4g}" if not math.isinf(value) else "inf"


def beside(charts: Sequence[list[str]], gap: int = 2) -> list[str]:
    """Charts of the same height, side by side."""
    return [(" " * gap).join(lines) for lines in zip(*charts, strict=True)]
