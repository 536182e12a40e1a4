"""Static shapes for devices that compile for each shape: padded lengths, a padded last batch, and undoing both.

Padding does not affect the loss: padded positions have a mask of 0 and the label -100, added rows are copies of a real
row whose labels are all -100. `Static.trimmed` removes padding from the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.evaluation.predictions import map_nested
from ...errors import DataError

IGNORED = -100
SHORTEST = 32
"""The smallest padded length when static_lengths is not set."""

FILLERS = {
    "input_ids": None, "decoder_input_ids": None,  # the padding token
    "attention_mask": 0, "decoder_attention_mask": 0, "token_type_ids": 0, "position_ids": 0,
    "global_attention_mask": 0, "special_tokens_mask": 1, "labels": IGNORED,
    "label_ids": IGNORED,
}  # fmt: skip
"""Inputs with one value per token, and their padding values."""

MASKABLE = ("labels", "label", "label_ids")
"""Labels that losses ignore where they are -100; other label columns may have different rules."""


class Static(dict[str, Any]):
    """A padded batch that records its real size."""

    rows: int
    full: int
    """Rows including added ones."""
    widths: dict[str, tuple[int, int]]
    """Per padded input: its real length and its padded length."""

    def trimmed(self, value: Any, *, vocabulary: int | None = None, classes: int | None = None) -> Any:
        """The model's outputs for this batch without padding, in host memory."""
        return map_nested(lambda leaf: self._cut(leaf, vocabulary, classes), value)

    def trimmed_labels(self, value: Any) -> Any:
        """Labels of this batch, one tensor or several, without padding, in host memory."""
        widths = {padded: real for name, (real, padded) in self.widths.items() if name in MASKABLE}

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != self.full:
                return leaf
            leaf = leaf.detach().cpu()[: self.rows]
            return leaf[:, : widths.get(leaf.shape[1], leaf.shape[1])] if leaf.dim() > 1 else leaf

        return map_nested(cut, value)

    def real(self) -> dict[str, Any]:
        """The batch before padding; an attention mask that was added is kept."""
        return {name: self._cut_input(name, value) for name, value in self.items()}

    def _cut_input(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.full:
            return value
        value = value[: self.rows]
        return value[:, : self.widths[name][0]] if name in self.widths else value

    def _cut(self, leaf: Any, vocabulary: int | None, classes: int | None) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != self.full:
            return leaf
        leaf = leaf.detach().cpu()[: self.rows]  # on the host: slicing on the device would add a shape
        if leaf.dim() == 2 and (not leaf.is_floating_point() or leaf.shape[1] == classes):
            return leaf  # generated ids, or one number per class
        width = self._real_width(leaf, vocabulary) if leaf.dim() >= 2 else None
        return leaf if width is None else leaf[:, :width]

    def _real_width(self, leaf: Tensor, vocabulary: int | None) -> int | None:
        found = {name: real for name, (real, padded) in self.widths.items() if padded == leaf.shape[1]}
        if "labels" in found and vocabulary is not None and leaf.shape[-1] == vocabulary:
            return found["labels"]  # in encoder-decoder models, logits have the length of the labels
        return max(found.values(), default=None)


class StaticShapes:
    """Pads batches to a fixed number of rows and to one of a few lengths."""

    def __init__(
        self,
        lengths: list[int] | None,
        *,
        label_names: list[str],
        pad_token: int = 0,
        takes_mask: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.lengths = sorted(lengths) if lengths else None
        self.label_names, self.pad_token, self.takes_mask = label_names, pad_token, takes_mask
        self.rows_stay: str | None = None
        """Why incomplete batches are not padded with rows; None if they may be."""
        self._tell = tell

    def length_for(self, length: int) -> int:
        """The padded length for a batch of this length; a pure function, so that a resumed run pads identically."""
        if self.lengths is None:
            return max(SHORTEST, 1 << (length - 1).bit_length())
        for allowed in self.lengths:
            if length <= allowed:
                return allowed
        raise DataError(
            f"a batch is {length} tokens long, but static_lengths allows at most {self.lengths[-1]}; truncate the "
            "data, or add a longer length"
        )

    def pad(self, batch: Any, rows: int) -> Any:
        """Pad the batch to `rows` rows and a static length; parts that would affect the loss are not padded."""
        if not isinstance(batch, Mapping):
            self._tell("static shapes: batches that are not dicts of tensors are not padded")
            return batch
        values = dict(batch)
        real = next((v.shape[0] for v in values.values() if isinstance(v, Tensor) and v.dim()), 0)
        if not real:
            return batch
        static = Static(values)
        static.rows, static.full, static.widths = real, real, {}
        self._pad_lengths(static)
        if real < rows and self._may_add_rows(static):
            self._add_rows(static, rows)
        return static

    # ---- lengths ----------------------------------------------------------------------------------------------------

    def _pad_lengths(self, batch: Static) -> None:
        main = batch.get("input_ids")
        if not isinstance(main, Tensor) or main.dim() < 2:
            return
        if not self.takes_mask:
            self._tell(
                "static shapes: the model takes no attention_mask, so sequences are not padded and each length is "
                "compiled"
            )
            return
        if self._has_unmaskable_sequence(batch, main.shape[1]):
            self._tell(
                "static shapes: per-token labels are not integers and cannot be masked, so sequences are not padded"
            )
            return
        if "attention_mask" not in batch:
            batch["attention_mask"] = torch.ones_like(main)
        for name, value in list(batch.items()):
            if isinstance(value, Tensor) and value.dim() > 1 and self._is_sequence(name, value, main):
                batch[name] = self._longer(batch, name, value)

    def _is_sequence(self, name: str, value: Tensor, main: Tensor) -> bool:
        if name in FILLERS or name in self.label_names:
            return not value.is_floating_point()
        return value.shape[:2] == main.shape[:2] and not value.is_floating_point()

    def _has_unmaskable_sequence(self, batch: Static, length: int) -> bool:
        names = [*self.label_names, *MASKABLE]
        found = [batch[name] for name in names if isinstance(batch.get(name), Tensor)]
        return any(value.is_floating_point() and value.dim() > 1 and value.shape[1] == length for value in found)

    def _longer(self, batch: Static, name: str, value: Tensor) -> Tensor:
        real, wanted = value.shape[1], self.length_for(value.shape[1])
        batch.widths[name] = (real, wanted)
        filler = IGNORED if name in self.label_names else FILLERS.get(name, 0)
        padding = [0, 0] * (value.dim() - 2) + [0, wanted - real]
        return F.pad(value, padding, value=self.pad_token if filler is None else filler)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _may_add_rows(self, batch: Static) -> bool:
        reason = self.rows_stay or self._why_rows_stay(batch)
        if reason is not None:
            self._tell(
                f"static shapes: an incomplete batch is not padded with rows, which adds one more shape: {reason}"
            )
        return reason is None

    def _why_rows_stay(self, batch: Static) -> str | None:
        labels = [name for name in {*self.label_names, *MASKABLE} if isinstance(batch.get(name), Tensor)]
        if not labels:
            return "it has no labels that could exclude the padded rows from the loss"
        other = [name for name in labels if name not in MASKABLE]
        if other:
            return f"{other[0]!r} has no value that losses ignore"
        floats = [name for name in labels if batch[name].is_floating_point() or batch[name].dtype is torch.bool]
        return f"{floats[0]!r} are not class labels, so losses ignore no value of them" if floats else None

    def _add_rows(self, batch: Static, rows: int) -> None:
        for name, value in list(batch.items()):
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != batch.rows:
                continue
            added = value[:1].expand(rows - batch.rows, *value.shape[1:])
            if name in MASKABLE:
                added = torch.full_like(added, IGNORED)
            batch[name] = torch.cat([value, added])
        batch.full = rows


class StaticCollator:
    """A collator whose batches have few shapes."""

    def __init__(self, collate: Callable[[Any], Any], shapes: StaticShapes, rows: int) -> None:
        self.collate, self.shapes, self.rows = collate, shapes, rows

    def __call__(self, samples: list[Any]) -> Any:
        return self.shapes.pad(self.collate(samples), self.rows)
