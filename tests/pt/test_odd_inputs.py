"""Odd datasets, collators, models, metrics, callbacks, optimizers and schedules end clearly, and in bounded time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pt.odd_inputs import CASES, train
from tests.pt.outcomes import CLEAR, ending

SPREAD = list(CASES)[::12]
"""Cases of every run: each kind of part has some."""


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what a training needs once, not in the process of every case."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("warm"))
    train(evaluate=True, compute_metrics=lambda prediction: {})
    os.chdir(here)


def test_there_are_many() -> None:
    assert len(CASES) >= 300 and len(SPREAD) >= 25


@pytest.mark.parametrize("name", SPREAD)
def test_some_odd_inputs(name: str) -> None:
    kind, text = ending(CASES[name], seconds=60)
    assert kind in CLEAR, text


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in CASES if name not in SPREAD])
def test_all_odd_inputs(name: str) -> None:
    kind, text = ending(CASES[name], seconds=60)
    assert kind in CLEAR, text
