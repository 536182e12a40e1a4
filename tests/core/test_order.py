"""Which sample comes when."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from loopwright.core.order import (
    LARGEST_32_BIT_DRAW,
    LARGEST_LISTED,
    READ_AT_ONCE,
    ComputedOrder,
    Order,
    grouped_by_length,
    permutation,
)

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


# ---- more samples than a list of them has room for ------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(-5, 2**70))
def test_a_computed_order_is_a_permutation(n: int, seed: int) -> None:
    order = ComputedOrder(n, seed)
    whole = order[:]
    assert sorted(whole.tolist()) == list(range(n)) and len(order) == n
    assert np.array_equal(order[n // 3 : n // 2 + 1], whole[n // 3 : n // 2 + 1])


def test_a_computed_order_is_spread_evenly_and_differs_by_seed() -> None:
    n = 300_000_000
    first, second = ComputedOrder(n, 1)[:20_000], ComputedOrder(n, 2)[:20_000]
    assert len(set(first.tolist())) == 20_000 and not np.array_equal(first, second)
    shares = np.histogram(first, bins=10, range=(0, n))[0] / 2000
    assert shares.min() > 0.9 and shares.max() < 1.1
    assert abs(np.corrcoef(np.arange(20_000), first)[0, 1]) < 0.03


def test_the_order_of_a_huge_dataset_takes_no_memory() -> None:
    tracemalloc.start()
    for strategy in ("random", "sequential"):
        order = Order(300_000_000, 7, strategy)
        indices, positions = next(order.places(3, 200_000_000))
        assert positions[0] == 200_000_000 and len(indices) == len(positions)
        assert np.array_equal(order.epoch(3)[200_000_000:200_000_004], indices[:4])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_orders_up_to_the_limit_are_listed() -> None:
    asked: list[int] = []

    def permute(n: int, seed: int) -> Any:
        asked.append(n)
        return np.arange(3)

    Order(LARGEST_LISTED, 0, permute=permute).epoch(0)
    Order(LARGEST_LISTED + 1, 0, permute=permute).epoch(0)
    assert asked == [LARGEST_LISTED]


@pytest.mark.parametrize("start", [0, 5, READ_AT_ONCE - 1, READ_AT_ONCE, READ_AT_ONCE + 3])
def test_places_are_the_whole_order(start: int) -> None:
    order = Order(READ_AT_ONCE * 2 + 7, 3)
    found = list(order.places(2, start))
    assert np.array_equal(np.concatenate([indices for indices, _ in found]), order.epoch(2)[start:])
    assert np.concatenate([places for _, places in found]).tolist() == list(range(start, order.n))
