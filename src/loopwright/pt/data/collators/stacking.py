"""The default collator: samples of equal shape stacked into tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....args.problems import short
from ....errors import ArgumentsError, DataError

IGNORED = -100
LABEL_KEYS = ("label", "label_ids")


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack samples of equal shapes.

    `label` and `label_ids` become `labels`; strings and None are left out.
    """
    first = features[0]
    if return_tensors == "pt" and type(first) is dict and all_tensors(first):
        return _stack_columns(features)
    stack, label_stackers = stackers(return_tensors)
    samples = _as_mappings(features)
    batch: dict[str, Any] = {}
    key = ""
    try:
        for key in LABEL_KEYS:
            if samples[0].get(key) is not None:
                batch["labels"] = label_stackers[key]([sample[key] for sample in samples])
                break
        for key, first in samples[0].items():
            if first is not None and key not in LABEL_KEYS and not isinstance(first, str):
                batch[key] = stack([sample[key] for sample in samples])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DataError(_why_not_stackable(samples, key, error)) from error
    if isinstance(samples[0].get("labels"), str):
        raise DataError(text_as_label("labels", samples[0]["labels"]))
    return batch


def text_as_label(key: str, value: str) -> str:
    """The message about a label that is a text."""
    return (
        f"The column {key!r} holds text, such as {short(value)}, but labels are numbers. Map each text to an integer "
        "from 0 in the dataset, or remove the column."
    )


def all_tensors(sample: dict[str, Any]) -> bool:
    """Whether all values of a sample are tensors, under names that are not changed."""
    for key in sample:
        if type(sample[key]) is not torch.Tensor or key in LABEL_KEYS:
            return False
    return True


def _stack_columns(samples: list[Any]) -> dict[str, torch.Tensor]:
    key = ""
    batch = {}
    try:
        for key in samples[0]:
            batch[key] = torch.stack([sample[key] for sample in samples])
    except (KeyError, TypeError, RuntimeError) as error:
        raise DataError(_why_not_stackable(samples, key, error)) from error
    return batch


def _as_mappings(features: list[Any]) -> list[Any]:
    if isinstance(features[0], Mapping):
        return features
    if not hasattr(features[0], "__dict__"):
        raise DataError(
            f"A sample is a {type(features[0]).__name__}, but the default collator takes dicts (name -> value) or "
            "objects with attributes. Return a dict from the dataset, or pass your own data_collator."
        )
    return [vars(feature) for feature in features]


def _why_not_stackable(samples: list[Any], key: str, error: Exception) -> str:
    """The problem with column `key`; determined only after stacking failed."""
    lacking = [index for index, sample in enumerate(samples) if sample.get(key) is None]
    if lacking:
        return f"Sample {lacking[0]} of the batch has no value for {key!r}, but the first sample has one."
    if isinstance(samples[0][key], str):
        return text_as_label(key, samples[0][key])
    shapes = [_size(sample[key]) for sample in samples]
    if len(set(shapes)) > 1:
        return (
            f"The samples of a batch differ in the length of {key!r}: {sorted(set(shapes), key=str)[:5]}. Pad them "
            "in the dataset, or pass a data_collator that pads (such as DataCollatorWithPadding)."
        )
    return f"The column {key!r} cannot be converted to a tensor: {error}"


def _size(value: Any) -> Any:
    return tuple(value.shape) if hasattr(value, "shape") else len(value) if hasattr(value, "__len__") else None


def _stack_torch(values: list[Any]) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def _stack_torch_label(values: list[Any]) -> torch.Tensor:
    """One label per sample; lists of labels are multi-label targets, which become floats."""
    labels = _stack_torch(values)
    if isinstance(values[0], torch.Tensor) and labels.dim() > 1:
        return labels.reshape(-1) if values[0].numel() == 1 else labels
    whole = labels.dim() == 1 and not labels.is_floating_point()
    return labels.to(torch.int64 if whole else torch.float32)


def _stack_torch_label_ids(values: list[Any]) -> torch.Tensor:
    labels = _stack_torch(values)
    if isinstance(values[0], torch.Tensor):
        return labels
    return labels.to(torch.float32 if labels.is_floating_point() else torch.int64)


def _stack_numpy(values: list[Any]) -> np.ndarray:
    return np.stack(values) if isinstance(values[0], np.ndarray) else np.array(_on_host(values))


def _stack_numpy_label(values: list[Any]) -> np.ndarray:
    labels = _stack_numpy(values)
    whole = labels.ndim == 1 and labels.dtype.kind != "f"
    return labels.astype(np.int64 if whole else np.float32, copy=False)


def _stack_numpy_label_ids(values: list[Any]) -> np.ndarray:
    labels = _stack_numpy(values)
    if isinstance(values[0], np.ndarray):
        return labels
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64, copy=False)


def _on_host(values: list[Any]) -> list[Any]:
    return [value.numpy() if isinstance(value, torch.Tensor) else value for value in values]


# Per tensor type: the function that stacks a column, and those of the label columns.
_STACKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pt": (_stack_torch, {"label": _stack_torch_label, "label_ids": _stack_torch_label_ids}),
    "np": (_stack_numpy, {"label": _stack_numpy_label, "label_ids": _stack_numpy_label_ids}),
}


def stackers(return_tensors: str) -> tuple[Any, dict[str, Any]]:
    """The functions that convert columns to torch tensors or numpy arrays."""
    if return_tensors not in _STACKERS:
        raise ArgumentsError(f"return_tensors={return_tensors!r} must be 'pt' (torch) or 'np' (numpy).")
    return _STACKERS[return_tensors]


def to_array(values: Any, return_tensors: str, dtype: str = "int64") -> Any:
    """Nested lists of integers as one tensor or array."""
    stackers(return_tensors)  # raises for an unknown type
    array = np.array(values, dtype=dtype)
    return torch.from_numpy(array) if return_tensors == "pt" else array


def as_list(values: Any) -> list[Any]:
    """The values of a list, tensor or array as plain Python numbers."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


class DataCollatorMixin:
    """A collator with separate override points for torch and numpy: `torch_call` and `numpy_call`."""

    return_tensors: str

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        kind = return_tensors or self.return_tensors
        stackers(kind)  # raises for an unknown type
        return self.torch_call(features) if kind == "pt" else self.numpy_call(features)

    def torch_call(self, features: list[Any]) -> Any:
        """The batch as torch tensors."""
        return self._collate(features, "pt")

    def numpy_call(self, features: list[Any]) -> Any:
        """The batch as numpy arrays."""
        return self._collate(features, "np")

    def _collate(self, features: list[Any], kind: str) -> Any:
        raise NotImplementedError


@dataclass
class DefaultDataCollator(DataCollatorMixin):
    """`default_data_collator` as an object."""

    return_tensors: str = "pt"

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> dict[str, Any]:
        return default_data_collator(features, return_tensors or self.return_tensors)
