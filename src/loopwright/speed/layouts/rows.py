"""How the samples of one update are laid out in micro-batches, so that little is computed for padding.

Every layout keeps the samples of the update and therefore its gradient; what changes is which of them share a tensor.

    flat      rows without padding, one document after the other, attention within documents
    unpadded  padded at the borders of the model, without padding inside its encoder
    grouped   samples of like length together, padded to the longest of their group
    collated  the batches of the collator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.document_mask import borders_of
from .cutting import cut_by_length, split_evenly, split_into_rows
from .samples import IGNORED, SOURCE, Samples

MASK = "attention_mask"
BORDERS, LONGEST, PLACES = "_borders", "_longest", "_places"
"""Entries of a micro-batch that are for our attention and never reach the model under these names."""


@dataclass(frozen=True)
class Limits:
    """How large micro-batches may be and what one more of them costs, in tokens."""

    budget: int
    overhead: int
    round_to: int = 1
    floor: int = 0
    """Tokens below which a micro-batch takes no less time."""
    few_shapes: bool = False
    """Whether rows are filled up to one of a few lengths, so that each of them can be a graph."""
    width: int = 0
    """How wide padded batches are then, at least."""


@dataclass
class Laid:
    """The micro-batches of an update and how many tokens are computed for them."""

    batches: list[dict[str, Any]]
    computed_tokens: int


def lay_grouped(samples: Samples, limits: Limits, *, drop_mask: bool = False) -> Laid:
    """Samples of like length together; the mask can be left out where later tokens are never seen."""
    lengths = np.stack([axis.lengths for axis in samples.axes.values()], axis=1)
    groups = cut_by_length(
        lengths, overhead=limits.overhead, budget=limits.budget, round_to=limits.round_to, floor=limits.floor
    )
    batches, computed = [], 0
    for group in groups:
        chosen = samples if len(group) == len(samples) else samples.select(group)
        widths = {
            key: -(-int(axis.lengths.max()) // limits.round_to) * limits.round_to for key, axis in chosen.axes.items()
        }
        batch = chosen.trimmed(widths)
        if drop_mask and all(axis.is_right_padded for axis in chosen.axes.values()):
            batch.pop(MASK, None)
        batches.append(batch)
        computed += len(group) * sum(widths.values())
    return Laid(batches, computed)


def lay_flat(samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
    """Rows without padding: tokens, restarted positions, and the borders of documents in place of a mask.

    `shifts` says that the model compares each token with the one before it: the first token of a document then has no
    target. `fill` rounds the length of rows up with a last document without targets, so that few shapes occur.
    """
    lengths = samples.axes[SOURCE].lengths
    rows = split_into_rows(lengths, budget=limits.budget)
    part = _part_to_fill(fill, limits)
    batches = [_row(samples if len(row) == len(samples) else samples.select(row), shifts, part) for row in rows]
    return Laid(batches, sum(batch["input_ids"].numel() for batch in batches))


def _row(samples: Samples, shifts: bool, part: int) -> dict[str, Any]:
    axis = samples.axes[SOURCE]
    lengths = axis.lengths
    real = _real_tokens(axis.starts, axis.ends, axis.width)
    total = int(lengths.sum())
    missing = -total % filling(total, part) if part else 0
    batch = {}
    for name in axis.names:
        tokens = samples.tensors[name][real]
        if name == "labels" and shifts:
            tokens[np.cumsum(lengths) - lengths] = IGNORED
        batch[name] = _filled(tokens, missing, IGNORED if "label" in name else 0).unsqueeze(0)
    documents = _documents(lengths, batch.get("position_ids"), is_masked=MASK in batch)
    if "position_ids" not in batch:  # those of the collator are what the padded batch has
        places = torch.from_numpy(np.concatenate([np.arange(length) for length in documents]))
        # What fills a row up may be longer than any sample, and than a model has positions for.
        batch["position_ids"] = _filled(places, missing, 0).unsqueeze(0)
    documents = np.append(documents, missing) if missing else documents
    batch.pop(MASK, None)
    batch[BORDERS] = borders_of(documents, fill=part > 0)
    batch[LONGEST] = _longest(documents, part, within=total + missing)
    return {**batch, **samples.constants}


def _documents(lengths: np.ndarray, positions: Tensor | None, *, is_masked: bool) -> np.ndarray:
    """How long the documents of a row are: those of its samples, and without a mask what jumping positions divide."""
    if positions is None or positions.dim() != 2 or is_masked:
        return lengths
    jumps = 1 + np.flatnonzero(np.diff(positions[0, : lengths.sum()].numpy()) != 1)
    return np.diff(np.union1d(jumps, np.concatenate([[0], np.cumsum(lengths)])))


def lay_unpadded(samples: Samples, limits: Limits, *, fill: bool) -> Laid:
    """Padded batches whose encoder gets the indices of real tokens."""
    split = split_evenly if limits.few_shapes else split_into_rows  # the number of samples is a part of the shape
    rows = split(samples.axes[SOURCE].lengths, budget=limits.budget)
    part = _part_to_fill(fill, limits)
    batches, computed = [], 0
    for row in rows:
        chosen = samples if len(row) == len(samples) else samples.select(row)
        lengths = chosen.axes[SOURCE].lengths
        width = limits.width if limits.few_shapes else _rounded_up(int(lengths.max()), 64) if fill else 0
        batch = chosen.trimmed({SOURCE: width})
        if limits.few_shapes:
            _widen(batch, samples, width)
        places, documents, within = np.flatnonzero((batch[MASK] != 0).numpy()), lengths, batch[MASK].shape[1]
        if limits.few_shapes:
            missing = -len(places) % filling(len(places), part)
            # Behind the last place of the batch there is one for what belongs to no sample.
            places = np.append(places, np.full(missing, batch[MASK].numel()))
            documents, within = np.append(lengths, missing), max(within, filling(len(places), part))
        batch[PLACES] = torch.from_numpy(places)
        batch[BORDERS] = borders_of(documents, fill=part > 0)
        batch[LONGEST] = _longest(lengths, part, within=within)
        batches.append(batch)
        computed += len(places)
    return Laid(batches, computed)


def _widen(batch: dict[str, Any], samples: Samples, width: int) -> None:
    """Add padding on the right, of the kind the collator has used for these samples."""
    missing, axis, mask = width - batch[MASK].shape[1], samples.axes[SOURCE], (samples.tensors[MASK] != 0).numpy()
    if missing <= 0 or not axis.is_right_padded or mask.all():
        return  # a model may know padding by its token, and which one that is does not show
    row, place = np.unravel_index(mask.argmin(), mask.shape)
    for name in axis.names:
        values, used = batch[name], samples.tensors[name][row, place]
        batch[name] = torch.cat([values, used.expand(len(values), missing, *values.shape[2:])], dim=1)


def _real_tokens(starts: np.ndarray, ends: np.ndarray, width: int) -> Tensor:
    along = np.arange(width)
    return torch.from_numpy((along >= starts[:, None]) & (along < ends[:, None]))


def _filled(tokens: Tensor, missing: int, value: int) -> Tensor:
    if not missing:
        return tokens
    return torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), value)])


def _rounded_up(number: int, to: int) -> int:
    return -(-number // to) * to


FILLED, COARSELY_FILLED = 32, 8
"""A row is filled up by no more than this part of it."""


def _part_to_fill(fill: bool, limits: Limits) -> int:
    return COARSELY_FILLED if limits.few_shapes else FILLED * fill


def filling(tokens: int, part: int = FILLED) -> int:
    """What the length of a row is rounded up to: a power of two, at most about that part of the row."""
    return max(64, 1 << max(0, (tokens // part).bit_length() - 1))


def _longest(lengths: np.ndarray, part: int, *, within: int) -> int:
    """The length of the longest document, or no less than that where few shapes are wanted."""
    longest = int(lengths.max())
    if part == COARSELY_FILLED:
        return within
    return _rounded_up(longest, 128) if part else longest


def longest_row(batches: Sequence[Any]) -> int:
    """Tokens of the longest row."""
    return max(int(batch["input_ids"].shape[-1]) for batch in batches)


def padded_tokens(batches: Sequence[Any], samples: Samples) -> int:
    """Tokens the collator's own batches make a model compute."""
    names = [axis.names[0] for axis in samples.axes.values()]
    return sum(batch[name].numel() for batch in batches for name in names)
