"""Packing as arithmetic: groups of neighbours, and plans of epochs that differ, against what counting gives."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

import loopwright.core.sampling.packing as packing_module
from loopwright.core.order import Order
from loopwright.core.sampling.packing import Packing, make_packed_plan, next_fit

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=25)
BUDGET = st.integers(1, 60)


def groups(lengths: list[int], ends: list[int]) -> list[list[int]]:
    return [lengths[first:end] for first, end in pairwise([0, *ends])]


@given(LENGTHS, BUDGET)
def test_each_group_holds_what_fits_and_not_one_less(lengths: list[int], budget: int) -> None:
    ends = next_fit(lengths, budget)
    assert ends[-1] == len(lengths) and all(a < b for a, b in pairwise([0, *ends]))
    for group, end in zip(groups(lengths, ends), ends, strict=True):
        assert sum(group) <= budget or len(group) == 1
        assert end == len(lengths) or sum(group) + lengths[end] > budget


@given(LENGTHS, BUDGET)
def test_begun_again_at_an_end_the_rest_is_the_same(lengths: list[int], budget: int) -> None:
    ends = next_fit(lengths, budget)
    for k, end in enumerate(ends[:-1]):
        assert [end + each for each in next_fit(lengths[end:], budget)] == ends[k + 1 :]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(9, 25))
def test_neighbours_cannot_be_in_fewer_groups(lengths: list[int], budget: int) -> None:
    fewer = len(next_fit(lengths, budget)) - 1
    for cuts in combinations(range(1, len(lengths)), max(fewer - 1, 0)):
        assert not fewer or any(sum(group) > budget for group in groups(lengths, [*cuts, len(lengths)]))


def test_nothing_makes_no_group() -> None:
    assert next_fit([], 5) == []


def make(lengths: list[int], budget: int, strategy: str = "random", *, drop_last: bool = False) -> Packing:
    order = Order(n=len(lengths), seed=3, strategy=strategy, lengths=lengths, group_size=4)
    return Packing(order, lengths, budget, drop_last=drop_last)


@given(LENGTHS, BUDGET, st.sampled_from(["random", "sequential", "group_by_length"]), st.integers(0, 3), st.booleans())
def test_an_epoch_is_its_order_cut_up(lengths: list[int], budget: int, strategy: str, epoch: int, drop: bool) -> None:
    packing = make(lengths, budget, strategy, drop_last=drop)
    order, ends = packing.order.epoch(epoch).tolist(), packing.ends(epoch)
    whole = next_fit([lengths[i] for i in order], budget)
    last = [lengths[i] for i in order[whole[-2] if len(whole) > 1 else 0 :]]
    assert ends == (whole[:-1] if drop and sum(last) < budget else whole)
    assert packing.count(epoch) == len(ends) >= packing.fewest
    assert packing.cut(order) == groups(order, whole)
    for k in range(len(ends)):
        position = ends[k - 1] if k else 0
        assert packing.samples_ahead(epoch, 0, position=position, batches=1) == ends[k] - position
        assert packing.samples_ahead(epoch, 0, position=position, batches=99) == ends[-1] - position
        assert packing.ends(epoch, position) == ends[k:]


@given(
    LENGTHS, BUDGET, st.integers(1, 4), st.sampled_from([0.25, 0.5, 1, 1.3, 2, 3]), st.integers(-1, 40), st.booleans()
)
def test_a_plan_is_what_counting_gives(
    lengths: list[int], budget: int, accumulation: int, epochs: float, max_steps: int, drop: bool
) -> None:
    packing = make(lengths, budget, drop_last=drop)
    if not packing.count(0):
        return  # nothing to train on is said when the data gives no batch
    plan = make_packed_plan(packing, accumulation=accumulation, max_steps=max_steps, num_train_epochs=epochs)
    whole, part = int(epochs), epochs % 1
    updates_of = [math.ceil(len(packing.ends(epoch)) / accumulation) for epoch in range(50)]
    if max_steps <= 0:
        max_steps = sum(updates_of[:whole]) + math.ceil(round(part * updates_of[whole], 6))
    assert plan.max_steps == max_steps

    updates = epoch = seen = 0
    position = 0.0
    while updates < max_steps:
        batches = len(packing.ends(epoch))
        assert plan.updates_before(epoch) == updates and plan.batches_in(epoch) == batches
        done = min(batches, (max_steps - updates) * accumulation)
        updates += math.ceil(done / accumulation)
        seen += packing.ends(epoch)[done - 1]
        position = plan.epoch_after(epoch, done)
        assert position == epoch + done / batches
        epoch += 1
    assert plan.epochs == epoch
    assert drop or plan.train_samples == seen
    if part == 0 and plan.max_steps == sum(updates_of[:epoch]):
        assert position == epoch


def test_epochs_far_ahead_are_bounded_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 9, 2, 7, 7, 3, 8, 1, 6, 4]
    exact = make_packed_plan(make(lengths, 12), accumulation=2, max_steps=100, num_train_epochs=1)
    monkeypatch.setattr(packing_module, "COUNTED_EPOCHS", 3)
    packing = make(lengths, 12)
    plan = make_packed_plan(packing, accumulation=2, max_steps=100, num_train_epochs=1)
    assert len(packing._counts) == 3 and exact.epochs <= plan.epochs <= 2 * exact.epochs
    assert make_packed_plan(make(lengths, 12), accumulation=2, max_steps=10**12, num_train_epochs=1).max_steps == 10**12
