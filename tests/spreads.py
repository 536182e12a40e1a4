"""Cases of large grids: a spread that always runs, and the rest with `-m grid`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def spread(*choices: Iterable[Any]) -> list[Any]:
    """Every combination of the choices; all but a few in which each choice comes at least once are marked `grid`."""
    lists = [list(each) for each in choices]
    longest = max(map(len, lists))
    always = {tuple(number % len(each) for each in lists) for number in range(longest)}
    return [
        pytest.param(*(each[i] for each, i in zip(lists, places, strict=True)), marks=_marks(places in always))
        for places in product(*(range(len(each)) for each in lists))
    ]


def some(cases: Iterable[Any], step: int) -> list[Any]:
    """Every case; all but each `step`-th, beginning with the first, are marked `grid`."""
    rows = [each if isinstance(each, tuple) else (each,) for each in cases]
    return [pytest.param(*row, marks=_marks(number % step == 0)) for number, row in enumerate(rows)]


def _marks(is_always: bool) -> Any:
    return () if is_always else pytest.mark.grid
