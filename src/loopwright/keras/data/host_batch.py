"""Batches in host memory: slicing, padding, stacking and counting of nested arrays of features and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.evaluation.predictions import first_leaf, map_nested
from ...errors import DataError

LABEL_COLUMNS = ("labels", "label", "label_ids", "start_positions", "end_positions")
IGNORED = -100
"""The label that losses ignore."""


@dataclass
class HostBatch:
    """One micro-batch of all replicas."""

    features: Any
    labels: Any
    rows: int
    """Number of samples; further rows are padding."""

    @property
    def padded_rows(self) -> int:
        return rows_of(self.features)


def leaves(value: Any) -> Iterator[Any]:
    """Every array in nested dicts, tuples and lists; None is skipped."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The function applied to every array; None stays None, and any mapping becomes a dict."""
    value = dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value
    return map_nested(lambda leaf: None if leaf is None else function(leaf), value)


def rows_of(value: Any) -> int:
    """The samples of a batch: the length of its first array."""
    first = first_leaf(value)
    shape = getattr(first, "shape", None)
    if shape is None or len(shape) == 0:
        raise DataError(f"a batch must contain arrays with one row per sample, not {type(first).__name__}")
    return int(shape[0])


def as_array(value: Any) -> Any:
    """A host array of a value in a sample or a batch: a number, a list, a torch or TensorFlow tensor."""
    if type(value) is np.ndarray:
        return value
    if hasattr(value, "detach"):  # torch
        value = value.detach().cpu()
    if callable(getattr(value, "numpy", None)):
        value = value.numpy()
    array = np.asarray(value)
    # As torch's and loopwright's collators convert Python numbers: float32 and int64.
    return array.astype(np.float32) if array.dtype == np.float64 and not hasattr(value, "dtype") else array


def stack_samples(samples: list[Any]) -> Any:
    """The default collator: samples of one structure, stacked into a batch of the same structure."""
    first = samples[0]
    if isinstance(first, Mapping):
        names = {("labels" if name in ("label", "label_ids") else name): name for name in first}
        return {new: stack_samples([sample[name] for sample in samples]) for new, name in names.items()}
    if isinstance(first, tuple):
        return tuple(stack_samples([sample[i] for sample in samples]) for i in range(len(first)))
    if first is None:
        return None
    arrays = [as_array(sample) for sample in samples]
    try:
        return np.stack(arrays)
    except ValueError:
        shapes = sorted({str(array.shape) for array in arrays})
        raise DataError(
            f"samples of shapes {', '.join(shapes[:4])} cannot be stacked; pass a data_collator that pads them"
        ) from None


def split_batch(batch: Any, label_names: list[str] | None) -> tuple[Any, Any]:
    """Features and labels of a batch: a pair is used unchanged, a dict is split by the names of its labels."""
    if isinstance(batch, tuple):
        if len(batch) == 1:
            return batch[0], None
        if len(batch) == 2:
            return batch
        raise DataError(
            f"a batch is (features, labels), not a tuple of {len(batch)}; pass several inputs as a dict, and sample "
            "weights as one of them, to be multiplied in an override of compute_loss"
        )
    if not isinstance(batch, Mapping):
        return batch, None
    names = [name for name in (label_names or LABEL_COLUMNS) if name in batch]
    features = {name: value for name, value in batch.items() if name not in names}
    labels = {name: batch[name] for name in names}
    if not names:
        return features, None
    return features, labels[names[0]] if len(names) == 1 else labels


def pad_rows(batch: HostBatch, rows: int) -> HostBatch:
    """The batch padded to this many rows with copies of its first row; integer labels of padding are ignored.

    Floating point labels of padding are masked by the row weights.
    """
    have = rows_of(batch.features)
    if have >= rows:
        return batch

    def grown(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        return np.concatenate([leaf, np.repeat(leaf[:1], rows - have, axis=0)])

    return HostBatch(mapped(grown, batch.features), mapped(grown, batch.labels), batch.rows)


def row_weights(batch: HostBatch) -> Any:
    """1 for samples, 0 for padding."""
    weights = np.zeros(batch.padded_rows, np.float32)
    weights[: batch.rows] = 1.0
    return weights


def with_row_weights(batches: Sequence[HostBatch]) -> list[tuple[Any, Any, Any]]:
    """Features, labels and row weights of each batch; the weights are None if no batch is padded."""
    weighted = any(batch.padded_rows > batch.rows for batch in batches)
    return [(batch.features, batch.labels, row_weights(batch) if weighted else None) for batch in batches]


def even_cuts(rows: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous slices whose sizes differ by at most one."""
    size, more = divmod(rows, parts)
    bounds = [0]
    for index in range(parts):
        bounds.append(bounds[-1] + size + (index < more))
    return list(zip(bounds, bounds[1:], strict=False))


def can_be_stacked(batches: list[HostBatch]) -> bool:
    """Whether micro-batches have equal shapes, so that one compiled loop can process them."""
    shapes = [[tuple(leaf.shape) for leaf in leaves((each.features, each.labels))] for each in batches]
    return all(each == shapes[0] for each in shapes)


def stacked(values: list[Any]) -> Any:
    """The same structure with a leading micro-batch dimension."""
    first = values[0]
    if isinstance(first, Mapping):
        return {name: stacked([value[name] for value in values]) for name in first}
    if isinstance(first, (tuple, list)):
        return type(first)(stacked([value[i] for value in values]) for i in range(len(first)))
    return None if first is None else np.stack([np.asarray(value) for value in values])


def count_targets(labels: Any, rows: int, *, shifted: bool = False) -> int:
    """Number of targets: integer labels that are not -100, or samples for other labels."""
    if labels is None or isinstance(labels, (Mapping, tuple, list)):
        return rows
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iu":
        return rows
    counted = labels[:, 1:] if shifted and labels.ndim > 1 else labels
    return int((counted != IGNORED).sum())
