"""Sources of batches: indexable datasets and streams of samples.

A source returns the batches of an epoch from any position on. If loopwright determines the order, the position is a
number. A stream is restored from its own state, or by reading the earlier batches again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...core.order import Order
from ...errors import DataError
from .host_batch import HostBatch, as_array, leaves, mapped, rows_of

Finish = Callable[[Any], HostBatch]
"""Converts the output of a collator or a pipeline to a batch of host arrays."""

Skipping = Callable[[], None] | None

INFINITE = -1
"""The cardinality of a tf.data pipeline that never ends."""

BATCHES = ("keras.PyDataset", "tf_keras.Sequence")
"""Classes whose items are batches, not samples."""


class Source:
    """The batches of a dataset."""

    ordered = False
    """Whether loopwright determines the order, so that the position is a number of samples."""
    examples: int | None = None
    batches: int | None = None

    def __init__(self) -> None:
        self.position = 0
        """Batches returned in the current epoch."""

    def open(
        self, epoch: int, *, samples: int = 0, batches: int = 0, state: Any = None, skipping: Skipping = None
    ) -> Iterator[HostBatch]:
        """The batches of an epoch after this many samples and batches; `state` is the result of `files` or `state`.

        `skipping` is called before earlier batches are read again.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Features and labels of the first epoch's batches, to inspect the data."""
        return ((batch.features, batch.labels) for batch in self.open(0))

    def first(self) -> HostBatch | None:
        """A batch to build a model with; the position does not move."""
        return next(self.open(0), None)

    def state(self) -> Any:
        """The position of the source as JSON values, if it has a state."""
        return None

    def files(self) -> Path | None:
        """Write the source's state to a new folder; the caller moves the files."""
        return None


class MapSource(Source):
    """An indexable dataset, in an order that is a function of seed and epoch."""

    ordered = True

    def __init__(
        self, pick: Callable[[Any], Any], n: int, order: Order, *, size: int, drop_last: bool, finish: Finish
    ) -> None:
        super().__init__()
        self._pick, self.order, self._size, self._drop, self._finish = pick, order, size, drop_last, finish
        self.examples = n
        self.batches = n // size if drop_last else -(-n // size)

    def open(
        self, epoch: int, *, samples: int = 0, batches: int = 0, state: Any = None, skipping: Skipping = None
    ) -> Iterator[HostBatch]:
        indices = self.order.epoch(epoch)
        self.position = batches
        for start in range(samples, len(indices), self._size):
            chosen = indices[start : start + self._size]
            if self._drop and len(chosen) < self._size:
                return
            self.position += 1
            yield self._finish(self._pick(chosen))


class StreamSource(Source):
    """A stream of samples: an iterable, or a function that creates one."""

    def __init__(
        self, samples: Any, collate: Callable[[list[Any]], Any], *, size: int, drop_last: bool, finish: Finish
    ) -> None:
        super().__init__()
        self._samples, self._collate, self._size, self._drop, self._finish = samples, collate, size, drop_last, finish

    def open(
        self, epoch: int, *, samples: int = 0, batches: int = 0, state: Any = None, skipping: Skipping = None
    ) -> Iterator[HostBatch]:
        data = self._samples
        if callable(getattr(data, "set_epoch", None)):
            data.set_epoch(epoch)
        if state is not None:
            data.load_state_dict(state)
        elif samples and skipping is not None:
            skipping()
        found = iter(data() if callable(data) and not hasattr(data, "__iter__") else data)
        if state is None and samples:
            next(islice(found, samples - 1, samples), None)
        self.position = batches
        while chunk := list(islice(found, self._size)):
            if self._drop and len(chunk) < self._size:
                return
            self.position += 1
            yield self._finish(self._collate(chunk))

    def state(self) -> Any:
        has_both = all(callable(getattr(self._samples, name, None)) for name in ("state_dict", "load_state_dict"))
        return self._samples.state_dict() if has_both else None


# ---- from a dataset to a source --------------------------------------------------------------------------------------


def is_tf_data(dataset: Any) -> bool:
    """Whether a dataset is a tf.data pipeline: only a process that has imported TensorFlow can have one."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def has_length(dataset: Any) -> bool:
    """Whether a dataset has a known number of samples or batches."""
    if is_tf_data(dataset):
        return int(dataset.cardinality()) >= 0
    return is_columns(dataset) or is_map_style(dataset)


def is_columns(dataset: Any) -> bool:
    """A dict or tuple of arrays of one length: columns, one row per sample."""
    parts = list(leaves(dataset)) if isinstance(dataset, (Mapping, tuple)) else []
    arrays = [part for part in parts if _is_array(part)]
    return bool(arrays) and len(arrays) == len(parts) and len({len(array) for array in arrays}) == 1


def _is_array(value: Any) -> bool:
    """Whether a value is an array with rows, of any library."""
    return isinstance(value, np.ndarray) or (hasattr(value, "__array__") and len(getattr(value, "shape", ())) > 0)


class Columns:
    """A dict or tuple of arrays as one dataset; a dict of datasets would be several named datasets."""

    def __init__(self, columns: Any) -> None:
        self.columns = mapped(as_array, columns)

    def __len__(self) -> int:
        return rows_of(self.columns)

    def __getitem__(self, index: Any) -> Any:
        return mapped(lambda column: column[index], self.columns)


def is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def picker(dataset: Any, collate: Callable[[list[Any]], Any], *, own_collator: bool) -> tuple[Any, int]:
    """A function from indices to a batch, and the number of samples."""
    if isinstance(dataset, (np.ndarray, Columns)) or is_columns(dataset):
        rows = dataset if isinstance(dataset, Columns) else Columns(dataset)
        if not own_collator:
            return rows.__getitem__, len(rows)
        return (lambda chosen: collate([rows[i] for i in chosen])), len(rows)
    if callable(getattr(dataset, "__getitems__", None)):
        return (lambda chosen: collate(dataset.__getitems__(chosen.tolist()))), len(dataset)
    return (lambda chosen: collate([dataset[int(i)] for i in chosen])), len(dataset)


def check_data(dataset: Any, what: str) -> None:
    """Raise if the value is not a dataset, or is empty."""
    if isinstance(dataset, Iterator) and not is_tf_data(dataset):
        raise DataError(
            f"the {what} dataset is a {type(dataset).__name__}, which can be read only once; pass the function that "
            "creates it, or an object whose iter() starts at the beginning"
        )
    if any(f"{each.__module__.split('.')[0]}.{each.__name__}" in BATCHES for each in type(dataset).__mro__):
        raise DataError(
            f"the {what} dataset is a {type(dataset).__name__}, whose items are batches; pass a dataset of samples, or "
            "convert it with tf.data.Dataset.from_generator and rebatch"
        )
    lengths = {len(part) for part in leaves(dataset) if _is_array(part)} if isinstance(dataset, tuple) else ()
    if len(lengths) > 1:
        raise DataError(f"the {what} dataset has arrays of {' and '.join(map(str, sorted(lengths)))} rows")
    known = is_tf_data(dataset) or is_map_style(dataset) or hasattr(dataset, "__iter__") or callable(dataset)
    if not known:
        raise DataError(f"the {what} dataset is a {type(dataset).__name__}; pass tf.data, arrays, samples or a stream")
    empty = int(dataset.cardinality()) == 0 if is_tf_data(dataset) else is_map_style(dataset) and len(dataset) == 0
    if empty:
        raise DataError(f"the {what} dataset is empty")


def is_batched(dataset: Any) -> bool:
    """Whether a pipeline is already batched: its last operation that changes elements is a `batch`."""
    passing = ("Prefetch", "Options", "Take", "Skip", "Cache", "Map", "Repeat", "Shuffle", "Assert", "Filter",
               "Zip", "Concatenate", "Shard", "Enumerate", "Snapshot")  # fmt: skip
    name = type(dataset).__name__
    if "Batch" in name and "Unbatch" not in name:
        return True
    if "FlatMap" in name or not any(part in name for part in passing):
        return False
    inputs = _inputs(dataset)
    return bool(inputs) and all(is_batched(each) for each in inputs)


def _inputs(dataset: Any) -> list[Any]:
    """The pipelines that a pipeline reads, except the numbers of `enumerate`."""
    found: list[Any] = getattr(dataset, "_inputs", list)()
    return [each for each in found if getattr(getattr(each.element_spec, "shape", None), "rank", 1) != 0]
