"""The order of a mixture: a pure function of seed, epoch and position, with the shares that were given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from loopwright.core.sampling.mixing import MixedOrder, exact_counts, weights_at


def order(sizes=(50, 30, 20), weights=None, group=10, **more):
    n = sum(sizes)
    return MixedOrder(n=n, seed=7, group_size=group, sizes=sizes, weights=tuple(weights or sizes), **more)


def counts(each, epoch=0):
    return np.bincount(each.source_of(each.epoch(epoch)), minlength=len(each.sizes)).tolist()


def test_with_the_weights_of_the_sizes_each_sample_occurs_once():
    for epoch in (0, 1):
        assert sorted(order().epoch(epoch)) == list(range(100))
    assert order().epoch(0).tolist() != order().epoch(1).tolist()


def test_constant_weights_are_exact_shares_and_small_sources_repeat_in_another_order():
    mixed = order(weights=(0.2, 0.2, 0.6))
    assert counts(mixed) == [20, 20, 60]
    own = [each - 80 for each in mixed.epoch(0) if each >= 80]
    passes = [own[:20], own[20:40], own[40:]]
    assert all(sorted(each) == list(range(20)) for each in passes) and passes[0] != passes[1]


def test_a_source_of_weight_zero_is_left_out():
    assert counts(order(weights=(1, 0, 1))) == [50, 0, 50]


def test_a_schedule_moves_the_shares_by_the_step():
    mixed = order(sizes=(4000, 4000), weights=(1.0, [[0, 0.0], [400, 1.0]]), group=10)
    early, late = (mixed.source_of(mixed.epoch(epoch)).mean() for epoch in (0, 3))
    assert late == pytest.approx(0.5, abs=0.03)
    shares = weights_at((1.0, [[0, 0.0], [400, 1.0]]), np.arange(800))[1]
    assert early == pytest.approx(shares.mean(), abs=0.03) and shares[0] == 0 and shares[-1] == 0.5


def test_samples_of_one_source_follow_each_other_in_an_update():
    mixed = order(weights=(1, 1, 1))
    sources = mixed.source_of(mixed.epoch(2))
    assert all((np.diff(sources[at : at + 10]) >= 0).all() for at in range(0, 100, 10))


def test_sequential_sources_are_read_in_their_own_order():
    mixed = order(weights=(1, 1, 1), strategy="sequential")
    indices = mixed.epoch(0)
    for number, first in enumerate((0, 50, 80)):
        own = indices[mixed.source_of(indices) == number] - first
        assert own.tolist() == [each % mixed.sizes[number] for each in range(len(own))]


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=6), st.integers(0, 500))
def test_counts_have_the_sum_and_are_within_one(weights, n):
    shares = np.asarray(weights) / sum(weights)
    found = exact_counts(shares, n)
    assert sum(found) == n and all(abs(a - b * n) <= 1 for a, b in zip(found, shares, strict=True))
