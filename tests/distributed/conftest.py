"""One pool of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    members = Pool()
    yield members
    members.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases share one pool."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("distributed"))
