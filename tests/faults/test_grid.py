"""Killed in every step, resumed twice: each kind of data, with and without workers, with and without accumulation."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from .checks import differences, newest_intact, said, trace

pytestmark = pytest.mark.xdist_group("faults-grid")

STEPS = 8
DATA = ("map", "iterable", "stateful", "datasets", "datasets shuffled")
WORKERS = (0, 2)
ACCUMULATION = (1, 3)


def options_of(data: str, workers: int, accumulation: int) -> dict[str, Any]:
    """Noise from three streams in the data, dropout in the model, an evaluation now and then, seldom logs."""
    return {
        "data": data, "workers": workers, "accumulation": accumulation, "max_steps": STEPS, "save_steps": 2,
        "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4,
    }  # fmt: skip


def micro_batches(data: str, workers: int, accumulation: int) -> list[int]:
    """Of each update: an epoch of 14 samples has four batches of four, or seven of two, or eight in two shares."""
    if accumulation == 1:
        return [1] * STEPS
    return [3, 3, 2 if workers and data != "map" else 1] * 3


def place_in(step: int, sizes: list[int], start: int) -> int:
    """The number of a micro-batch in this update, counted from the update after `start`: its second, if it has two."""
    return sum(sizes[start : step - 1]) + min(sizes[step - 1], 2)


def interrupted_twice(forks: Any, folder: Path, reference: Any, step: int, options: dict[str, Any]) -> list[str]:
    """Killed in a step, started again and killed in a later one, started again; returns what went wrong."""
    sizes = micro_batches(*(options[name] for name in ("data", "workers", "accumulation")))
    for at in (step, min(step + 3, STEPS)):
        begun = newest_intact(folder) if folder.exists() else 0
        status = forks.run("killed", folder, forward=place_in(at, sizes, begun), **options)
        if status != -9:
            return [f"was to be killed in step {at}, ended with {status}: {said(folder)[-1500:]}"]
    status = forks.run("train", folder, **options)
    if status != 0:
        return [f"ended with {status}: {said(folder)[-1500:]}"]
    wrong = differences(folder, reference(**options))
    if len(trace(folder, "begin")) != 3:
        wrong.append(f"began at {trace(folder, 'begin')}")
    return wrong


def all_equal(forks: Any, tmp_path: Path, reference: Any, cases: list[tuple[str, int, int, int]]) -> None:
    wrong = {}
    for data, workers, accumulation, step in cases:
        folder = tmp_path / f"{data}-{workers}-{accumulation}-{step}".replace(" ", "-")
        found = interrupted_twice(forks, folder, reference, step, options_of(data, workers, accumulation))
        if found:
            wrong[folder.name] = found
        shutil.rmtree(folder, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong}"


COMBINATIONS = list(itertools.product(DATA, WORKERS, ACCUMULATION))
PAIRS = [  # every two values of different columns come together
    each
    if (DATA.index(each[0]) + WORKERS.index(each[1]) + ACCUMULATION.index(each[2])) % 2 == 0
    else pytest.param(*each, marks=pytest.mark.grid)
    for each in COMBINATIONS
]


@pytest.mark.parametrize(("data", "workers", "accumulation"), PAIRS)
def test_killed_in_some_step(
    data: str, workers: int, accumulation: int, forks: Any, reference: Any, tmp_path: Path
) -> None:
    if data.startswith("datasets"):
        pytest.importorskip("datasets")
    number = COMBINATIONS.index((data, workers, accumulation))
    all_equal(forks, tmp_path, reference, [(data, workers, accumulation, 2 + (3 * number) % (STEPS - 2))])


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("data", "workers", "accumulation"), COMBINATIONS)
def test_killed_in_every_step(
    data: str, workers: int, accumulation: int, forks: Any, reference: Any, tmp_path: Path
) -> None:
    if data.startswith("datasets"):
        pytest.importorskip("datasets")
    all_equal(forks, tmp_path, reference, [(data, workers, accumulation, step) for step in range(1, STEPS + 1)])
