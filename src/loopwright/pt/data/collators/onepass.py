"""Padding a batch in one numpy pass: the result of transformers' `tokenizer.pad`, without lists per sample.

Only cases with a certainly equal result are handled here. All others (a tokenizer with its own `pad`, nested or ragged
columns, text, rows of mixed types, rows longer than the maximum) are left to the tokenizer, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import countOf
from struct import error as StructError, pack
from typing import Any

import numpy as np
import torch

_HOME = "transformers.tokenization_utils_base"
# Strings in the supported `_pad`; one with other columns or sides is a different version.
_WORDS = {"attention_mask", "token_type_ids", "special_tokens_mask", "left", "right"}
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class _Unusual(Exception):
    """Raised for input that is left to the tokenizer."""


def pad_in_one_pass(
    tokenizer: Any,
    features: Any,
    padding: Any = True,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    return_tensors: str | None = None,
) -> Any:
    """The result of `tokenizer.pad` for samples with integer rows and scalars; None if it has to be called."""
    if return_tensors not in ("pt", "np") or not _pads_as_known(tokenizer):
        return None
    try:
        columns = _columns(tokenizer, features)
        fills = _fills(tokenizer)
        others = {key: values for key, values in columns.items() if key not in fills}
        flat, lengths = _flat_columns({key: values for key, values in columns.items() if key in fills})
        scalars = _scalars(others, in_lists=type(columns["input_ids"][0]) is list)
        length = _length(tokenizer, max(lengths), padding, max_length, pad_to_multiple_of)
        kept = _kept(lengths, length, tokenizer.padding_side)
    except _Unusual:
        return None
    batch = {key: _laid(flat[key], kept, fills[key]) if key in flat else scalars[key] for key in columns}
    if "attention_mask" not in batch and "attention_mask" in tokenizer.model_input_names:
        batch["attention_mask"] = kept.astype(np.int64)
    return _encoding(batch, return_tensors)


def pad_rows_in_one_pass(rows: list[Any], length: int, fill: int, side: str) -> np.ndarray | None:
    """Integer rows as one array of this length; None if they are not plain rows or do not fit."""
    if type(fill) is not int:
        return None
    try:
        flat, lengths = _flat(rows)
        return _laid(flat, _kept(lengths, length, side), fill)
    except _Unusual:
        return None


def _pads_as_known(tokenizer: Any) -> bool:
    """Whether padding is transformers' own, overridden neither by a class nor on this object."""
    codes = [_code(tokenizer, name) for name in ("pad", "_pad")]
    if None in codes:
        return False
    return {word for word in codes[1].co_consts if type(word) is str and word.isidentifier()} == _WORDS


def _code(tokenizer: Any, name: str) -> Any:
    """The code of transformers' method of that name; None if the tokenizer has a different one.

    Compares the code, not the function's name, which a wrapper may copy.
    """
    method = getattr(type(tokenizer), name, None)
    if name in getattr(tokenizer, "__dict__", {}) or getattr(method, "__globals__", {}).get("__name__") != _HOME:
        return None
    code = getattr(method, "__code__", None)
    return code if getattr(code, "co_qualname", "") == f"PreTrainedTokenizerBase.{name}" else None


def _columns(tokenizer: Any, features: Any) -> dict[str, list[Any]]:
    """The columns of the first sample."""
    if not isinstance(features, (list, tuple)) or not features or not isinstance(features[0], Mapping):
        raise _Unusual
    try:
        columns = {key: [feature[key] for feature in features] for key in features[0]}
    except (LookupError, TypeError) as error:
        raise _Unusual from error
    names = tokenizer.model_input_names
    if names[0] != "input_ids" or "input_ids" not in columns:
        raise _Unusual
    if "attention_mask" in columns and "attention_mask" not in names:  # the tokenizer would not pad it
        raise _Unusual
    return columns


def _fills(tokenizer: Any) -> dict[str, int]:
    """The padding value of each padded column."""
    fills = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0}
    fills |= {"token_type_ids": tokenizer.pad_token_type_id, "special_tokens_mask": 1}
    if any(type(fill) is not int for fill in fills.values()):
        raise _Unusual
    return fills


def _flat_columns(columns: dict[str, list[Any]]) -> tuple[dict[str, np.ndarray], list[int]]:
    """Every padded column, concatenated, and the row lengths, which are the same in all columns."""
    kind = type(columns["input_ids"][0])
    flat: dict[str, np.ndarray] = {}
    lengths: list[int] | None = None
    for key, rows in columns.items():
        flat[key], own = _flat(rows)
        if type(rows[0]) is not kind or own != (lengths or own):
            raise _Unusual
        lengths = own
    return flat, lengths or []


def _flat(rows: list[Any]) -> tuple[np.ndarray, list[int]]:
    kinds = {type(row) for row in rows}
    flatten = _FLATTEN.get(kinds.pop()) if len(kinds) == 1 else None
    if flatten is None:
        raise _Unusual
    return flatten(rows), [len(row) for row in rows]


def _flat_lists(rows: list[list[Any]]) -> np.ndarray:
    # True is not an integer here: a column of booleans becomes a boolean tensor.
    if any(countOf(map(type, row), int) != len(row) for row in rows):
        raise _Unusual
    try:  # five times as fast as numpy.array, which inspects the type of every element
        packed = b"".join([pack(f"{len(row)}q", *row) for row in rows])
    except StructError as error:  # beyond 64 bits
        raise _Unusual from error
    return np.frombuffer(packed, np.int64)


def _flat_arrays(rows: list[np.ndarray]) -> np.ndarray:
    kinds = {(row.ndim, row.dtype) for row in rows}
    if any(ndim != 1 or dtype.kind not in "iu" or not np.can_cast(dtype, np.int64) for ndim, dtype in kinds):
        raise _Unusual
    return np.concatenate(rows, dtype=np.int64)


def _flat_tensors(rows: list[torch.Tensor]) -> np.ndarray:
    if any(row.ndim != 1 or row.dtype not in _WHOLE or row.device.type != "cpu" for row in rows):
        raise _Unusual
    return np.concatenate([row.numpy() for row in rows], dtype=np.int64)


_FLATTEN: dict[type, Callable[[list[Any]], np.ndarray]] = {
    list: _flat_lists,
    np.ndarray: _flat_arrays,
    torch.Tensor: _flat_tensors,
}


def _scalars(columns: dict[str, list[Any]], in_lists: bool) -> dict[str, list[Any]]:
    """The unpadded columns, in the form that the tokenizer converts to tensors."""
    return {key: _scalar_column(values, in_lists) for key, values in columns.items()}


def _scalar_column(values: list[Any], in_lists: bool) -> list[Any]:
    if all(isinstance(value, (int, float, np.number)) for value in values):
        return values
    arrays = all(type(value) in (np.ndarray, torch.Tensor) and value.ndim == 0 for value in values)
    if in_lists or not arrays:  # with rows in lists, the tokenizer keeps the precision of such values
        raise _Unusual
    return [value.tolist() for value in values]


def _length(tokenizer: Any, longest: int, padding: Any, max_length: Any, multiple: Any) -> int:
    """The length to pad to; the tokenizer raises its own error for invalid options."""
    strategy, _, max_length, _ = tokenizer._get_padding_truncation_strategies(padding=padding, max_length=max_length)
    length = {"longest": longest, "max_length": max_length}.get(strategy.value)
    multiple = 1 if multiple is None else multiple
    if type(length) is not int or type(multiple) is not int or multiple < 1:
        raise _Unusual
    return -(-length // multiple) * multiple


def _kept(lengths: list[int], length: int, side: str) -> np.ndarray:
    """A mask of the positions in the padded array that hold row elements."""
    if side not in ("left", "right") or max(lengths) > length:
        raise _Unusual
    places, sizes = np.arange(length), np.array(lengths)[:, None]
    return places < sizes if side == "right" else places >= length - sizes


def _laid(flat: np.ndarray, kept: np.ndarray, fill: int) -> np.ndarray:
    laid = np.full(kept.shape, fill, np.int64)
    laid[kept] = flat
    return laid


def _encoding(batch: dict[str, Any], kind: str) -> Any:
    """The batch as a transformers BatchEncoding, which also converts scalars to tensors."""
    from transformers.tokenization_utils_base import BatchEncoding

    if kind == "pt":  # `as_tensor`, not `from_numpy`: it respects the default device, like transformers
        arrays = {key: torch.as_tensor(value) for key, value in batch.items() if isinstance(value, np.ndarray)}
        batch = {**batch, **arrays}
    return BatchEncoding(batch, tensor_type=kind)
