"""What every test of this folder runs under: doubles stay doubles, and accelerations are believed to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import doubles_stay, everything_pays


@pytest.fixture(autouse=True)
def _doubles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles_stay(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_pays(monkeypatch.setitem)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Cases of the whole grid run with `-m grid` only."""
    if "grid" in (config.getoption("-m") or ""):
        return
    here = Path(__file__).parent
    whole = [item for item in items if here in item.path.parents and item.get_closest_marker("grid")]
    if whole:
        items[:] = [item for item in items if item not in whole]
        config.hook.pytest_deselected(items=whole)
