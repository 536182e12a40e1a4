"""One pool of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    members = Pool()
    yield members
    members.close()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """All cases share one pool, and cases of the whole grids run with `-m grid` only."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.xdist_group("distributed"))
    if "grid" in (config.getoption("-m") or ""):
        return
    whole = [item for item in here if item.get_closest_marker("grid")]
    if whole:
        items[:] = [item for item in items if item not in whole]
        config.hook.pytest_deselected(items=whole)
