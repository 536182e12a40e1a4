"""Which sample comes when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from loopwright.core.order import LARGEST_32_BIT_DRAW, Order, grouped_by_length, permutation

KNOWN = {
    (5, 0): [4, 0, 1, 3, 2],
    (7, 42): [1, 6, 3, 5, 4, 0, 2],
    (10, -1): [1, 4, 6, 2, 0, 5, 8, 7, 9, 3],
}
"""Orders that torch.randperm gives; tests/side_by_side/test_core.py compares many more with torch itself."""


@pytest.mark.parametrize(("n", "seed"), KNOWN)
def test_a_permutation_is_torchs(n: int, seed: int) -> None:
    assert permutation(n, seed).tolist() == KNOWN[n, seed]


def test_a_permutation_that_would_differ_is_refused() -> None:
    with pytest.raises(ValueError, match="64-bit draws"):
        permutation(LARGEST_32_BIT_DRAW, 0)


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 16), st.integers(0, 1000))
def test_length_groups_are_a_permutation(lengths: list[int], size: int, seed: int) -> None:
    shuffled = permutation(len(lengths), seed)
    before = shuffled.copy()
    order = grouped_by_length(lengths, size, shuffled)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.array_equal(shuffled, before), "the shuffled order is the caller's"
    if lengths:
        assert lengths[order[0]] == max(lengths), "the longest comes first"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 8))
def test_lengths_fall_inside_a_block(lengths: list[int], size: int) -> None:
    block = max(1, min(len(lengths) // (size * 4), 50)) * size
    order = grouped_by_length(lengths, size, permutation(len(lengths), 1))
    # The longest of all changed places with the head of the first block, so heads are left out.
    for start in range(0, len(lengths), block):
        tail = [lengths[i] for i in order[start + 1 : start + block]]
        assert tail == sorted(tail, reverse=True)


@given(st.integers(1, 60), st.integers(0, 99))
def test_an_epoch_is_a_pure_function(n: int, seed: int) -> None:
    one, two = Order(n, seed), Order(n, seed)
    two.epoch(5)
    for epoch in (3, 0, 1):
        assert np.array_equal(one.epoch(epoch), two.epoch(epoch))
        assert np.array_equal(one.epoch(epoch), permutation(n, seed + epoch))


def test_epochs_differ_and_sequential_ones_do_not() -> None:
    order = Order(40, 0)
    assert len({tuple(order.epoch(e)) for e in range(6)}) == 6
    assert Order(4, 9, "sequential").epoch(3).tolist() == [0, 1, 2, 3]


def test_length_grouping_uses_a_given_permutation() -> None:
    lengths = [3, 1, 2, 5, 4]
    order = Order(5, 0, "group_by_length", lengths, 5, permute=lambda n, seed: np.arange(n))
    assert [lengths[i] for i in order.epoch(0)] == [5, 4, 3, 2, 1]
