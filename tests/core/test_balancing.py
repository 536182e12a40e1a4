"""Micro-batches of about equal cost: nothing lost, and no division of neighbours with a cheaper costliest group."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from loopwright.core.order import Order
from loopwright.core.sampling.balancing import Balancing, balanced_sizes, padded_cost

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=9)


def costliest(lengths: list[int], sizes: list[int]) -> float:
    starts = np.cumsum([0, *sizes[:-1]])
    return max(padded_cost(size, lengths[start]) for size, start in zip(sizes, starts, strict=True))


@given(LENGTHS, st.integers(1, 9))
def test_the_costliest_group_is_as_cheap_as_any_division_makes_it(lengths, groups):
    lengths, groups = sorted(lengths, reverse=True), min(groups, len(lengths))
    sizes = balanced_sizes(lengths, groups)
    assert len(sizes) == groups and sum(sizes) == len(lengths) and min(sizes) >= 1
    every = (np.diff([0, *ends, len(lengths)]).tolist() for ends in combinations(range(1, len(lengths)), groups - 1))
    assert costliest(lengths, sizes) <= min(costliest(lengths, each) for each in every) * (1 + 1e-9)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [1, 7, 12, 29])
def test_an_update_keeps_its_samples_and_number_of_micro_batches(n, drop_last):
    order = Order(n, seed=3)
    lengths = np.random.default_rng(0).integers(1, 50, n)
    balancing = Balancing(order, lengths, batch_size=3, group_size=12, drop_last=drop_last)
    indices = order.epoch(0)
    found = 0
    for first in range(0, n, 12):
        part = indices[first : first + 12]
        groups = balancing.divided(part)
        assert len(groups) == balancing.batches(len(part))
        whole = 3 * len(groups) if drop_last else len(part)
        assert sorted(np.concatenate(groups).tolist() if groups else []) == list(range(whole))
        found += len(groups)
    assert found == balancing.batches(n)
