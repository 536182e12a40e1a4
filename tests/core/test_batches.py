"""The micro-batches of one update."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from loopwright.core.update import Update


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_shares_add_up_to_one(items: list[int]) -> None:
    update = Update(list(items), items=items, total_items=sum(items))
    assert sum(update.share(i) for i in range(len(items))) == pytest.approx(1.0, abs=1e-12)
    assert len(update) == len(items)


def test_one_micro_batch_is_the_whole_update() -> None:
    assert Update([object()]).share(0) == 1
