"""A chart as SVG, for notebooks: shown without scripts, and kept in the saved notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping

from .series import Series

WIDTH, HEIGHT = 560, 180
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 22
MOST = 300
"""Points of a curve."""
LINES = (("#0b7bd1", ""), ("#d1660b", "6 4"), ("#0a8f62", "2 3"), ("#b0418a", "9 3 2 3"))
"""Colour and dashes of each curve; the colours can be read on white and on black."""


def svg_chart(curves: Mapping[str, Series]) -> str:
    """The curves in one chart with a legend; empty without two points."""
    found = {}
    for name, curve in list(curves.items())[: len(LINES)]:
        xs, ys = curve.points(MOST)
        found[name] = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    everything = [point for points in found.values() for point in points]
    if len(everything) < 2:
        return ""
    ends = _ends([x for x, _ in everything]), _ends([y for _, y in everything])
    lines = "".join(_line(points, ends, *LINES[index]) for index, points in enumerate(found.values()))
    legend = "".join(_entry(name, index) for index, name in enumerate(found))
    (first, last), (low, high) = ends
    label = html.escape(f"chart of {', '.join(found)} from step {first:,.0f} to {last:,.0f}", quote=True)
    texts = (
        f'<text x="{LEFT - 6}" y="{TOP + 9}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{first:,.0f}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{last:,.0f}</text>'
    )
    frame = f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="currentColor"/>'
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-size="11" fill="currentColor">{frame}{texts}{lines}{legend}</svg>'
    )


def _ends(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _line(
    points: list[tuple[float, float]], ends: tuple[tuple[float, float], tuple[float, float]], color: str, dashes: str
) -> str:
    (first, last), (low, high) = ends
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    places = " ".join(
        f"{LEFT + (x - first) / (last - first) * width:.1f},{TOP + (high - y) / (high - low) * height:.1f}"
        for x, y in points
    )
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'


def _entry(name: str, index: int) -> str:
    color, dashes = LINES[index]
    x, y = WIDTH - 150, TOP + 10 + 14 * index
    sample = f'<path d="M{x} {y - 4}h24" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'
    return f'{sample}<text x="{x + 30}" y="{y}">{html.escape(name)}</text>'
