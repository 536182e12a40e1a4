"""Every example is trained to the gradients of a loop by hand, or said to be as written and is that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import Split, check
from .zoo import CASES

pytest.importorskip("transformers")

SPLITS = (Split(1, 8), Split(2, 4))
SPEEDS = ("off", "auto", "max", "tight")
"""`tight` is `max` with few tokens in a micro-batch."""
WHOLE = [(speed, split) for speed in SPEEDS for split in SPLITS]


def combinations() -> list[Any]:
    """Every case in every way; a spread in which each is tried once, two of three in the hardest way, runs always."""
    hardest = ("max", Split(2, 4))
    others = [each for each in WHOLE if each != hardest]
    found = []
    for number, name in enumerate(CASES):
        always = hardest if number % 3 else others[number // 3 % len(others)]
        for way in WHOLE:
            marks = () if way == always else pytest.mark.grid
            found.append(pytest.param(name, *way, marks=marks, id=f"{name}-{way[0]}-{way[1]}"))
    return found


@pytest.mark.parametrize(("name", "speed", "split"), combinations())
def test_an_update_is_what_it_is_by_hand(name: str, speed: str, split: Split, tmp_path: Path) -> None:
    if "adapter" in name:
        pytest.importorskip("peft")
    check(CASES[name], tmp_path, speed=speed, split=split)
