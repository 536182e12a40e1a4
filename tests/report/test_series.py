"""Curves of any length keep their extremes; metrics.jsonl is read piece by piece while it grows."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

from hypothesis import given, strategies as st

from loopwright.report.metrics import MetricsReader
from loopwright.report.series import MOST_POINTS, Series, reduced

from .folders import rows, write_rows

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf))


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(4, 60))
def test_a_reduced_curve_has_the_extremes_and_the_ends(values: list[float], most: int) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    xs, ys = series.points(most)
    finite = [value for value in values if math.isfinite(value)]
    assert len(xs) <= max(most, len(values) if len(values) <= most else 0)
    assert xs == sorted(set(xs)) and xs[0] == 0 and xs[-1] == len(values) - 1
    if finite:
        kept = [value for value in ys if value is not None]
        assert min(kept) == min(finite) and max(kept) == max(finite)
    else:
        assert not [value for value in ys if value is not None]


def test_a_long_run_takes_bounded_memory_and_keeps_a_single_spike() -> None:
    series, chance = Series(), random.Random(0)
    for step in range(30_000):
        series.add(step, 1e9 if step == 12_345 else chance.random())
        assert len(series.xs) < 2 * MOST_POINTS
    xs, ys = series.points()
    assert len(xs) <= MOST_POINTS and ys[xs.index(12_345)] == 1e9 and xs[-1] == 29_999


def test_points_that_come_out_of_order_are_sorted_and_replaced() -> None:
    series = Series()
    for x, y in ((1, 1.0), (3, 3.0), (2, 2.0), (3, 4.0)):
        series.add(x, y)
    assert series.points() == ([1, 2, 3], [1.0, 2.0, 4.0])


def test_every_column_shows_its_lowest_and_highest_value() -> None:
    xs = [float(x) for x in range(1000)]
    ys: list[float | None] = [float(x % 100) for x in range(1000)]
    _, kept = reduced(xs, ys, 22)
    assert kept.count(99.0) == 10 and kept.count(0.0) == 10


def test_rows_are_read_as_they_are_appended(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert reader.read().rows == 0
    write_rows(tmp_path, rows(100))
    assert reader.read().step == 100
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 110, "loss": 0.5}) + "\n" + '{"step": 120, "lo')
    found = reader.read()
    assert found.step == 110 and found.curves["loss"].last == 0.5
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('ss": 0.25}\nnot json\n{"step": 130, "loss": "NaN"}\n')
        file.write('{"step": 140, "eval_loss": 1e400, "eval_x": NaN, "eval_runtime": 1.0, "epoch": NaN}\n')
    found = reader.read()
    assert found.step == 140 and found.curves["loss"].last == 0.25
    assert [mark["text"] for mark in found.marks] == ["loss is nan", "eval_loss is inf", "eval_x is nan"]
    assert json.dumps(list(found.evaluations), allow_nan=False)


def test_a_resumed_run_drops_its_later_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, rows(100))
    reader = MetricsReader(tmp_path)
    assert reader.read().step == 100
    write_rows(tmp_path / "new", rows(100)[:3])
    os.replace(tmp_path / "new" / "metrics.jsonl", tmp_path / "metrics.jsonl")
    found = reader.read()
    assert found.step == 30 and found.curves["loss"].xs == [10, 20, 30]


def test_a_replaced_file_that_has_grown_is_read_from_its_beginning(tmp_path: Path) -> None:
    write_rows(tmp_path, rows(100))
    reader = MetricsReader(tmp_path)
    reader.read()
    write_rows(tmp_path / "new", rows(200, shift=5.0))
    os.replace(tmp_path / "new" / "metrics.jsonl", tmp_path / "metrics.jsonl")
    found = reader.read()
    assert found.step == 200 and min(value for value in found.curves["loss"].ys if value is not None) > 5.0
