"""Rows of several batches in batches of similar length, and their results in the order of the batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Inputs = dict[str, Any]
TOKENS, MASK = "input_ids", "attention_mask"


class CannotJoin(Exception):
    """Why the rows of these batches cannot be in one batch."""


class JoinedRows:
    """The rows of several batches of inputs of `generate`, which can be put together in any order.

    Rows are padded on the side of the batches, and on the left or right by `left` if these have no padding.
    """

    def __init__(self, batches: list[Inputs], pad: int, *, left: bool = False, wider: int = 0) -> None:
        self.sizes = [_rows_in(batch) for batch in batches]
        self._left, self._wider = _side(batches, left), wider
        width = max(_width(batch) for batch in batches) + wider
        names = list(batches[0])
        if any(list(batch) != names for batch in batches):
            raise CannotJoin("the batches have different entries")
        joined = {}
        for name in names:
            fill = pad if name == TOKENS else 0
            joined[name] = _joined(name, [self._widened(b, name, width, fill) for b in batches], self.sizes)
        self._inputs, self._is_token = joined, {name: _is_per_token(batches[0], name) for name in names}
        self.lengths: list[int] = joined[MASK].sum(1).tolist() if self._has_mask else [width] * sum(self.sizes)

    @property
    def _has_mask(self) -> bool:
        return TOKENS in self._inputs and MASK in self._inputs

    @property
    def could_be_wider(self) -> bool:
        """Whether all rows have one length, so that joining them shows nothing about padding."""
        return self._has_mask and len(set(self.lengths)) == 1

    def pick(self, rows: list[int]) -> Inputs:
        """A batch of these rows, as wide as the longest of them, or by `wider` columns of padding more."""
        first = next(value for value in self._inputs.values())
        index = torch.tensor(rows, device=first.device)
        width = max(self.lengths[row] for row in rows) + self._wider
        picked = {}
        for name, value in self._inputs.items():
            found = value.index_select(0, index)
            if self._is_token[name] and self._has_mask:
                found = found[:, -width:] if self._left else found[:, :width]
            picked[name] = found
        return picked

    def grouped(self, *, extra: int, copies: int, budget: int) -> list[list[int]]:
        """Rows sorted by length, in groups of at most `budget` tokens: (longest + extra) x rows x copies."""
        order = sorted(range(len(self.lengths)), key=lambda row: self.lengths[row])
        groups: list[list[int]] = []
        for row in order:
            cost = (self.lengths[row] + extra) * copies
            if groups and (len(groups[-1]) + 1) * cost <= budget:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def in_order(
        self, rows: list[int], results: list[Tensor], ends: Callable[[Tensor], Tensor], fill: int
    ) -> list[Tensor]:
        """The results of each batch: its rows in its order, as wide as its longest result."""
        widest = max(result.shape[1] for result in results)
        lengths = torch.cat([ends(result) for result in results])
        whole = torch.cat([functional.pad(result, (0, widest - result.shape[1]), value=fill) for result in results])
        place = torch.empty(len(rows), dtype=torch.long)
        place[torch.tensor(rows)] = torch.arange(len(rows))
        place = place.to(whole.device)
        whole, lengths = whole.index_select(0, place), lengths.index_select(0, place)
        widths = [int(part.max()) for part in lengths.split(self.sizes)]
        return [part[:, :width].contiguous() for part, width in zip(whole.split(self.sizes), widths, strict=True)]

    def _widened(self, batch: Inputs, name: str, width: int, fill: int) -> Any:
        value = batch[name]
        missing = width - _width(batch)
        if not missing or not _is_per_token(batch, name):
            return value
        ends = (missing, 0) if self._left else (0, missing)
        return functional.pad(value, (*(0, 0) * (value.dim() - 2), *ends), value=fill)


def lengths_of_results(ends: list[int], start: int) -> Callable[[Tensor], Tensor]:
    """The length of each generated row: up to and including its first end from column `start` on."""

    def lengths(generated: Tensor) -> Tensor:
        width = generated.shape[1]
        is_end = torch.isin(generated, torch.tensor(ends, device=generated.device, dtype=generated.dtype))
        is_end[:, :start] = False
        first = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, torch.full_like(is_end[:, 0].int(), width))
        return first.long()

    return lengths


def tokens_in(batch: Inputs, extra: int) -> int:
    """The tokens of a batch when each of its rows has `extra` more."""
    return _rows_in(batch) * (_width(batch) + extra)


def _rows_in(batch: Inputs) -> int:
    return int(next(iter(batch.values())).shape[0])


def _width(batch: Inputs) -> int:
    """The tokens of a row; of inputs without tokens, such as sound or images, their longest dimension."""
    tokens = batch.get(TOKENS)
    return int(tokens.shape[1]) if tokens is not None else max(max(value.shape[1:]) for value in batch.values())


def _is_per_token(batch: Inputs, name: str) -> bool:
    tokens = batch.get(TOKENS)
    return tokens is not None and batch[name].shape[:2] == tokens.shape


def _side(batches: list[Inputs], default: bool) -> bool:
    """Whether rows are padded on the left; `default` if they have no padding."""
    if any("decoder_input_ids" in batch for batch in batches):
        raise CannotJoin("answers begin with decoder_input_ids")
    if any(not isinstance(value, Tensor) or not value.dim() for batch in batches for value in batch.values()):
        raise CannotJoin("an input is not a tensor with one row per sample")
    if any(batch.get(TOKENS) is None or batch.get(MASK) is None for batch in batches):
        if len({_width(batch) for batch in batches}) > 1:
            raise CannotJoin("batches of different widths have no attention_mask")
        return False
    masks = [batch[MASK] for batch in batches]
    if any(batch[MASK].shape != batch[TOKENS].shape for batch in batches):
        raise CannotJoin("attention_mask does not have the shape of input_ids")
    for left in (default, not default):
        if all(bool((_mask_of(mask, left) == mask).all()) for mask in masks):
            return left
    raise CannotJoin("attention_mask has holes, or batches are padded on different sides")


def _mask_of(mask: Tensor, left: bool) -> Tensor:
    """The mask of rows of these lengths that are padded on this side."""
    width = mask.shape[1]
    places = torch.arange(width, device=mask.device)
    lengths = mask.sum(1, keepdim=True)
    return (places >= width - lengths if left else places < lengths).to(mask.dtype)


def _joined(name: str, parts: list[Tensor], sizes: list[int]) -> Tensor:
    if [len(part) for part in parts] != sizes:
        raise CannotJoin(f"{name!r} does not have one row per sample")
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise CannotJoin(f"the shapes of {name!r} differ between batches")
    return torch.cat(parts)
