"""What an evaluation keeps, against a plain numpy reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from loopwright.core.evaluation import predictions as module
from loopwright.core.evaluation.predictions import Column, PredictionStore, first_leaf, map_nested


def joined(blocks: list[np.ndarray]) -> np.ndarray:
    """Blocks one below the other, padded with -100 to the widest."""
    blocks = [block.reshape(1) if block.ndim == 0 else block for block in blocks]
    shape = tuple(max(sizes) for sizes in zip(*(block.shape[1:] for block in blocks), strict=True))
    dtype = np.result_type(*blocks)
    rows = []
    for block in blocks:
        wide = np.full((len(block), *shape), -100, dtype)
        wide[tuple(slice(0, size) for size in block.shape)] = block
        rows.append(wide)
    return np.concatenate(rows)


@st.composite
def ragged(draw: Any) -> list[np.ndarray]:
    dims = draw(st.integers(1, 4))
    dtypes = st.sampled_from([np.dtype("float32"), np.dtype("int64"), np.dtype("float64")])
    shapes = st.tuples(*[st.integers(1, 4)] * dims)
    return [
        draw(hnp.arrays(draw(dtypes), draw(shapes), elements={"min_value": -99, "max_value": 99}))
        for _ in range(draw(st.integers(1, 6)))
    ]


@pytest.fixture(params=[2**30, 16], ids=["memory", "file"])
def _room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "MAP_ABOVE", request.param)
    yield


@pytest.mark.usefixtures("_room")
@given(blocks=ragged(), expected=st.sampled_from([None, 0, 3, 100]))
def test_a_column_is_what_numpy_joins(blocks: list[np.ndarray], expected: int | None) -> None:
    column = Column(expected)
    for block in blocks:
        column.append(block)
    result = column.array()
    assert result.dtype == np.result_type(*blocks)
    np.testing.assert_array_equal(result, joined(blocks))


def test_large_columns_live_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAP_ABOVE", 64)
    column = Column(expected_rows=100)
    column.append(np.arange(12.0).reshape(3, 4))
    assert isinstance(column.array(), np.memmap)
    np.testing.assert_array_equal(column.array(), np.arange(12.0).reshape(3, 4))


def test_scalars_become_rows() -> None:
    column = Column()
    for value in (1.0, 2.0):
        column.append(np.asarray(value))
    assert column.array().tolist() == [1.0, 2.0]


def test_an_empty_column_is_an_empty_array() -> None:
    assert Column(5).array().shape == (0,)


def test_another_number_of_dimensions_says_so() -> None:
    column = Column()
    column.append(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"cannot concatenate a batch of shape \(2,\)"):
        column.append(np.zeros(2))


@given(ragged(), ragged())
def test_a_store_keeps_the_shape_of_the_output(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    pairs = list(zip(first, second, strict=False))
    store = PredictionStore()
    for a, b in pairs:
        store.append({"a": a, "nest": (b, [a, b])})
    result = store.result()
    np.testing.assert_array_equal(result["a"], joined([a for a, _ in pairs]))
    np.testing.assert_array_equal(result["nest"][0], joined([b for _, b in pairs]))
    np.testing.assert_array_equal(result["nest"][1][1], joined([b for _, b in pairs]))


def test_what_is_no_array_is_kept_as_it_is() -> None:
    store = PredictionStore()
    store.append((np.zeros(1), ["a", "b"]))
    store.append((np.ones(1), ["c"]))
    numbers, words = store.result()
    assert numbers.tolist() == [0.0, 1.0] and words == ["a", "b", "c"]


def test_batches_can_stay_apart() -> None:
    store = PredictionStore(concat=False)
    store.append(np.zeros(2))
    store.append(np.zeros((3, 1)))
    assert [batch.shape for batch in store.result()] == [(2,), (3, 1)]


@pytest.mark.parametrize("concat", [True, False])
def test_nothing_gives_none(concat: bool) -> None:
    store = PredictionStore(concat=concat)
    store.append(None)
    assert store.result() is None


def test_nests_are_walked() -> None:
    nest = {"a": (1, [2, 3]), "b": 4}
    assert map_nested(lambda x: x * 10, nest) == {"a": (10, [20, 30]), "b": 40}
    assert first_leaf(nest) == 1
    assert first_leaf({"a": (None, [None, 5])}) == 5
    assert first_leaf(()) is None
