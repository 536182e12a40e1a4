"""Losses between log points: exact means, one read, honest counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from loopwright.core.measure import meter as module
from loopwright.core.measure.meter import Meter

number = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))
norm = st.one_of(st.none(), st.floats(0, 1e6), st.just(math.nan))


class Reader:
    """Counts the waits."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: list[float]) -> list[float]:
        self.calls += 1
        return list(values)


def same(a: float | None, b: float | None) -> bool:
    if a is None or b is None or math.isnan(a) or math.isnan(b):
        return a is b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))
    return a == b or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9)


@given(st.lists(st.lists(st.tuples(number, norm), min_size=1, max_size=6), max_size=5), st.booleans())
def test_readings_equal_a_plain_loop(intervals: list[list[tuple[float, float | None]]], filtered: bool) -> None:
    meter = Meter(Reader(), filter_nonfinite=filtered)
    everything: list[float] = []
    for interval in intervals:
        for loss, gradient in interval:
            meter.add(loss, gradient)
        reading = meter.read()
        losses = [loss for loss, _ in interval]
        finite = [loss for loss in losses if math.isfinite(loss)]
        counted = finite if filtered and finite else losses
        bad = [i for i, (loss, g) in enumerate(interval) if not math.isfinite(loss) or not math.isfinite(g or 0.0)]
        assert same(reading.loss, sum(counted) / len(counted))
        assert same(reading.grad_norm, interval[-1][1])
        assert (reading.nonfinite, reading.first_nonfinite) == (len(bad), bad[0] if bad else None)
        everything += [loss for loss in losses if math.isfinite(loss) or not filtered]
    nothing = math.nan if intervals else 0.0  # 0 would be the best loss there is
    assert same(meter.mean_loss(), sum(everything) / len(everything) if everything else nothing)


@given(st.lists(st.tuples(number, norm), min_size=1, max_size=12), st.integers(0, 12), st.booleans())
def test_a_saved_and_loaded_meter_goes_on_as_if_nothing_happened(
    updates: list[tuple[float, float | None]], cut: int, filtered: bool
) -> None:
    straight, first, second = (Meter(Reader(), filter_nonfinite=filtered) for _ in range(3))
    for loss, gradient in updates:
        straight.add(loss, gradient)
    for loss, gradient in updates[:cut]:
        first.add(loss, gradient)
    second.load_state_dict(first.state_dict())
    for loss, gradient in updates[cut:]:
        second.add(loss, gradient)
    one, two = straight.read(), second.read()
    assert same(one.loss, two.loss) and same(one.grad_norm, two.grad_norm)
    assert (one.nonfinite, one.first_nonfinite) == (two.nonfinite, two.first_nonfinite)
    assert repr(straight.mean_loss()) == repr(second.mean_loss()), "to the last bit, whenever a part of it was read"
    assert straight.nonfinite == second.nonfinite


def test_an_interval_is_one_read() -> None:
    read = Reader()
    meter = Meter(read, filter_nonfinite=True)
    for step in range(100):
        meter.add(float(step), 1.0)
    assert read.calls == 0
    meter.read()
    assert read.calls == 1
    meter.mean_loss()
    assert read.calls == 1


def test_losses_do_not_pile_up_without_log_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_AT", 10)
    read = Reader()
    meter = Meter(read, filter_nonfinite=True)
    for step in range(25):
        meter.add(float(step), None)
    assert read.calls == 2
    assert meter.read().loss == 12.0


def test_an_empty_interval_has_no_mean() -> None:
    meter = Meter(Reader(), filter_nonfinite=True)
    assert math.isnan(meter.read().loss) and meter.mean_loss() == 0.0
