"""Possible denominators of a mean (label tokens, tokens of a mask, samples), and candidates for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.static_shapes import IGNORED
from .targets import count_samples, find_targets

ITEMS, MASK, SAMPLES, NOTHING = "items", "mask", "samples", "nothing"
OF_PIXELS = 255
"""The usual ignore_index of segmentation, which may occur first in a late batch."""
FREQUENT = 0.1
"""Fraction of all labels from which a value may be padding."""
MOST = 24
"""Most denominators considered."""
LARGE = 1 << 22
"""Most labels that are inspected; larger tensors are assumed to use only the usual ignored values."""


@dataclass(frozen=True)
class Denominator:
    """One way to count the denominator of a loss."""

    what: str = ITEMS
    column: str | None = None
    """The counted entry of the batch; None: the first that holds labels."""
    ignored: int = IGNORED
    shifted: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether this is num_items_in_batch."""
        return self.what == ITEMS and self.column is None and self.ignored == IGNORED

    def count(self, batch: Any, label_names: list[str]) -> Any:
        """The count of a batch: an integer or a device scalar; None if the batch lacks the column."""
        if self.what == SAMPLES:
            return count_samples(batch)
        if self.what == NOTHING:
            return 1
        values = find_targets(batch, label_names) if self.column is None else _column(batch, self.column)
        if values is None:
            return None
        if self.shifted and values.dim() > 1 and not (self.column is None and batch.get("shift_labels") is not None):
            values = values[..., 1:]
        return _masked(values) if self.what == MASK else count_values(values, self.ignored)

    def described(self) -> str:
        """A description for messages."""
        if self.what == SAMPLES:
            return "samples"
        if self.what == NOTHING:
            return "nothing: it is a sum"
        if self.what == MASK:
            return f"the tokens of {self.column!r}"
        name = "labels" if self.column is None else repr(self.column)
        return f"{name} that are not {self.ignored}" + (", without the first of each row" if self.shifted else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_values(values: Tensor, ignored: int) -> Any:
    """Number of values that are not ignored; a device scalar for values outside host memory."""
    if values.is_floating_point() or values.dtype is torch.bool or (values.dtype is torch.uint8 and ignored < 0):
        return values.numel()
    counted = values != ignored
    if ignored != IGNORED and values.dtype is not torch.uint8:
        counted &= values != IGNORED  # -100 may be a placeholder that the loss replaces by its own ignored value
    count = counted.sum()
    return int(count) if values.device.type == "cpu" else count


def candidates(
    batch: Any, label_names: list[str], *, shifts: tuple[bool, ...], padding: int | None
) -> list[Denominator]:
    """All candidates for the denominator of such a batch's loss, the most likely first."""
    found = [Denominator(shifted=shift) for shift in shifts] if find_targets(batch, label_names) is not None else []
    found += [Denominator(SAMPLES), Denominator(NOTHING)]
    if not isinstance(batch, Mapping):
        return found
    first = find_targets(batch, label_names)
    for name, value in _label_columns(batch, label_names).items():
        for ignored in _ignorable(value, padding):
            if value is first and ignored == IGNORED:
                continue
            column = None if value is first else name
            found += [Denominator(ITEMS, column, ignored, shift) for shift in (shifts if value.dim() > 1 else (False,))]
    for name, value in batch.items():
        if isinstance(name, str) and "mask" in name and isinstance(value, Tensor) and value.dim() == 2:
            found += [Denominator(MASK, name, shifted=shift) for shift in (False, True)]
    return list(dict.fromkeys(found))[:MOST]


def _label_columns(batch: Mapping[str, Any], label_names: list[str]) -> dict[str, Tensor]:
    wanted = {name for name in batch if isinstance(name, str) and ("label" in name or "target" in name)}
    columns = {name: batch[name] for name in batch if name in wanted or name in label_names}
    return {
        name: value
        for name, value in columns.items()
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point() and not value.is_complex()
    }


def _ignorable(values: Tensor, padding: int | None) -> list[int]:
    """Values of a label column that a loss may ignore: the usual ones, negative ones, and padding values."""
    if values.dtype is torch.bool:
        return [IGNORED]
    found = [IGNORED, *([OF_PIXELS] if values.dim() > 2 else [])]
    if padding is not None and values.dim() > 1:
        found.append(padding)
    if values.numel() and values.numel() <= LARGE:
        present, times = values.unique(return_counts=True)
        share = dict(zip(present.tolist(), (times / values.numel()).tolist(), strict=True))
        found += [value for value in share if value < 0 or value == OF_PIXELS]
        if values.dim() > 1:
            last = values.reshape(-1, values.shape[-1])[:, -1].unique().tolist()
            padded = [value for value in share if value in last and share[value] >= FREQUENT]
            found += sorted(padded, key=lambda value: -share[value])[:2]
            found += [max(share, key=lambda value: share[value])]
    return list(dict.fromkeys(found))


def _column(batch: Any, name: str) -> Tensor | None:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    return value if isinstance(value, Tensor) else None


def _masked(values: Tensor) -> Any:
    count = (values != 0).sum()
    return int(count) if values.device.type == "cpu" else count
