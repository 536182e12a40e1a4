"""Collators that pad with a tokenizer: any object with `pad`, `pad_token_id` and `padding_side`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .onepass import pad_in_one_pass, pad_rows_in_one_pass
from .stacking import IGNORED, LABEL_KEYS, DataCollatorMixin, as_list, to_array

_PAD_ADVICE = "Asking-to-pad-a-fast-tokenizer"  # transformers' key of that warning


@contextmanager
def _without_pad_advice(tokenizer: Any) -> Iterator[None]:
    """Suppress the advice of fast tokenizers to use `__call__` instead of `pad`: the samples are already tokenized."""
    advised = getattr(tokenizer, "deprecation_warnings", {})
    before = advised.get(_PAD_ADVICE, False)
    advised[_PAD_ADVICE] = True
    try:
        yield
    finally:
        advised[_PAD_ADVICE] = before


def pad(tokenizer: Any, features: Any, **options: Any) -> Any:
    """The result of the tokenizer's padding, without its advice and, for plain rows, without its lists."""
    padded = pad_in_one_pass(tokenizer, features, **options)
    if padded is not None:
        return padded
    with _without_pad_advice(tokenizer):
        return tokenizer.pad(features, **options)


@dataclass
class _PaddingCollator:
    """The options of a collator that pads with a tokenizer."""

    tokenizer: Any
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None

    def _pad(self, features: Any, kind: str) -> Any:
        options = {"padding": self.padding, "max_length": self.max_length, "return_tensors": kind}
        return pad(self.tokenizer, features, pad_to_multiple_of=self.pad_to_multiple_of, **options)


@dataclass
class DataCollatorWithPadding(_PaddingCollator):
    """Pad the inputs of a batch to one length; `label` and `label_ids` become `labels`."""

    return_tensors: str = "pt"

    def __call__(self, features: list[Any]) -> Any:
        batch = self._pad(features, self.return_tensors)
        for key in LABEL_KEYS:
            if key in batch:
                batch["labels"] = batch.pop(key)
        return batch


def _split_labels(features: list[Any]) -> tuple[str, list[Any] | None, list[dict[str, Any]]]:
    """The name of the label column, its values (None if absent), and the features without it."""
    name = "label" if "label" in features[0] else "labels"
    labels = [feature[name] for feature in features] if name in features[0] else None
    if labels is not None and labels[0] is None:
        labels = None
    return name, labels, [{key: feature[key] for key in feature if key != name} for feature in features]


def _pad_labels(labels: list[Any], length: int, pad_id: int, side: str) -> Any:
    padded = pad_rows_in_one_pass(labels, length, pad_id, side)
    if padded is not None:
        return padded
    rows = [as_list(label) for label in labels]
    if side == "left":
        return [[pad_id] * (length - len(row)) + row for row in rows]
    return [row + [pad_id] * (length - len(row)) for row in rows]


@dataclass
class DataCollatorForTokenClassification(_PaddingCollator, DataCollatorMixin):
    """Pad inputs and their one-label-per-token labels to one length."""

    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def _collate(self, features: list[Any], kind: str) -> Any:
        name, labels, rest = _split_labels(features)
        batch = self._pad(rest, kind)
        if labels is not None:
            length = batch["input_ids"].shape[1]
            padded = _pad_labels(labels, length, self.label_pad_token_id, self.tokenizer.padding_side)
            batch[name] = to_array(padded, kind)
        return batch


@dataclass
class DataCollatorForMultipleChoice(_PaddingCollator, DataCollatorMixin):
    """Pad samples with several choices each; inputs have the shape (samples, choices, length)."""

    return_tensors: str = "pt"

    def _collate(self, features: list[Any], kind: str) -> dict[str, Any]:
        _, labels, rest = _split_labels(features)
        choices = len(rest[0]["input_ids"])
        flat = [{key: value[index] for key, value in each.items()} for each in rest for index in range(choices)]
        batch = self._pad(flat, kind)
        shaped = {key: value.reshape(len(features), choices, -1) for key, value in batch.items()}
        return shaped if labels is None else {**shaped, "labels": to_array(labels, kind)}


@dataclass
class DataCollatorForSeq2Seq:
    """Pad inputs and, separately, labels; adds `decoder_input_ids` if the model derives them from labels."""

    tokenizer: Any
    model: Any = None
    padding: Any = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        kind = return_tensors or self.return_tensors
        _, labels, rest = _split_labels(features)
        inputs = _PaddingCollator(self.tokenizer, self.padding, self.max_length, self.pad_to_multiple_of)
        batch = inputs._pad(rest, kind)
        if labels is None:
            return batch
        batch["labels"] = to_array(self._padded(labels), kind)
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            batch["decoder_input_ids"] = prepare(labels=batch["labels"])
        return batch

    def _padded(self, labels: list[Any]) -> Any:
        if self.padding in (False, "do_not_pad"):
            return [as_list(label) for label in labels]
        return _pad_labels(labels, self._length(labels), self.label_pad_token_id, self.tokenizer.padding_side)

    def _length(self, labels: list[Any]) -> int:
        longest = max(len(label) for label in labels)
        length = self.max_length or longest if self.padding == "max_length" else longest
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple
