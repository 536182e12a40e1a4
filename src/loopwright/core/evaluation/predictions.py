"""Storage of predictions: concatenates batches, pads ragged widths, in host memory or a memory-mapped file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import DataError

Array = npt.NDArray[Any]

PADDING = -100
MAP_ABOVE = 2**30
"""Above this many bytes a column is stored in a memory-mapped temporary file."""


class Column:
    """One growing array: rows are appended in order, narrower rows are padded with -100."""

    def __init__(self, expected_rows: int | None = None) -> None:
        self._expected = expected_rows
        self._data: Array | None = None
        self._rows = 0

    def append(self, block: Array) -> None:
        block = block.reshape(1) if block.ndim == 0 else block
        if self._data is None:
            self._data = self._allocate((max(self._expected or 0, len(block)), *block.shape[1:]), block.dtype)
        self._make_room(block)
        data = self._data
        target = data[self._rows : self._rows + len(block)]
        if target.shape == block.shape:
            target[...] = block
        else:
            target[...] = PADDING
            target[tuple(slice(0, size) for size in block.shape)] = block
        self._rows += len(block)

    def array(self) -> Array:
        """Everything appended so far, as one array."""
        if self._data is None:
            return np.empty((0,))
        return self._data[: self._rows]

    def _make_room(self, block: Array) -> None:
        data = self._data
        assert data is not None
        if block.ndim != data.ndim:
            per_sample = data.shape[1:]
            raise ValueError(
                f"cannot concatenate a batch of shape {block.shape} with batches of shape {per_sample} per sample"
            )
        needed = self._rows + len(block)
        rows = len(data) if needed <= len(data) else max(needed, 2 * len(data))
        shape = (rows, *(max(a, b) for a, b in zip(data.shape[1:], block.shape[1:], strict=True)))
        dtype = np.promote_types(data.dtype, block.dtype)
        if data.shape[1:] != block.shape[1:]:
            dtype = np.promote_types(dtype, np.int8)  # bool and unsigned dtypes cannot represent the padding
        if shape == data.shape and dtype == data.dtype:
            return
        wider = self._allocate(shape, dtype)
        if shape[1:] != data.shape[1:]:
            wider[: self._rows] = PADDING
        wider[(slice(0, self._rows), *(slice(0, size) for size in data.shape[1:]))] = data[: self._rows]
        self._data = wider

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = int(np.prod(shape)) * dtype.itemsize
        if size <= MAP_ABOVE:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile() as file:  # unnamed: its space is freed with the array
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


class PredictionStore:
    """Columns in the structure of the model's output: an array, or nested tuples, lists and dicts of arrays."""

    def __init__(self, expected_rows: int | None = None, *, concat: bool = True) -> None:
        self._expected = expected_rows
        self._concat = concat
        self._root: Any = None
        self._batches: list[Any] = []
        self.batches = 0

    def append(self, batch: Any) -> None:
        if batch is None:
            return
        self.batches += 1
        if self._concat:
            self._root = self._grow(self._root, batch)
        else:
            self._batches.append(batch)

    def result(self) -> Any:
        """The concatenated arrays in the structure of the batches; None without batches."""
        if not self.batches:
            return None
        if not self._concat:
            return self._batches
        return map_nested(lambda leaf: leaf.array() if isinstance(leaf, Column) else leaf, self._root)

    def _grow(self, node: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return _like(value, {key: self._grow((node or {}).get(key), each) for key, each in value.items()})
        if isinstance(value, tuple) or (isinstance(value, list) and all(_is_nest(each) for each in value)):
            parts = node if node is not None else [None] * len(value)
            if len(parts) != len(value):
                raise DataError(
                    f"a batch returned {len(value)} outputs or labels, but earlier batches returned {len(parts)}, so "
                    "they cannot be concatenated; set eval_do_concat_batches=False to get a list of batches"
                )
            grown = [self._grow(part, each) for part, each in zip(parts, value, strict=True)]
            return grown if isinstance(value, list) else tuple(grown)
        if isinstance(value, np.ndarray) and value.dtype != object:
            column = Column(self._expected) if node is None else node
            column.append(value)
            return column
        # Strings, objects and other lists are kept unchanged.
        rows = _Rows() if node is None else node
        rows.extend(list(value) if isinstance(value, (list, np.ndarray)) else [value])
        return rows


class _Rows(list[Any]):
    """Rows that are not arrays."""


def _is_nest(value: Any) -> bool:
    return isinstance(value, (tuple, dict)) or (isinstance(value, np.ndarray) and value.dtype.kind != "O")


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """The function applied to every leaf of nested dicts, tuples and lists."""
    if isinstance(value, dict):
        return _like(value, {key: map_nested(function, each) for key, each in value.items()})
    if isinstance(value, tuple):
        return tuple(map_nested(function, each) for each in value)
    if isinstance(value, list) and not isinstance(value, _Rows):
        return [map_nested(function, each) for each in value]
    return function(value)


def _like(value: dict[str, Any], items: dict[str, Any]) -> dict[str, Any]:
    """The items in the type of a dict, such as the outputs of a part of a model."""
    try:
        return items if type(value) is dict else type(value)(items)
    except TypeError:  # a type that is not made from its items
        return items


def first_leaf(value: Any) -> Any:
    """The first leaf of a nested structure, or None when it is empty."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((leaf for leaf in map(first_leaf, value) if leaf is not None), None)
    return value
