"""What the tests of the PyTorch trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of the whole grids run with `-m grid`; without it, the spread that is not marked."""
    if "grid" in (config.getoption("-m") or ""):
        return
    here = str(Path(__file__).parent)
    whole = {item for item in items if str(item.path).startswith(here) and item.get_closest_marker("grid")}
    if whole:
        config.hook.pytest_deselected(items=list(whole))
        items[:] = [item for item in items if item not in whole]
