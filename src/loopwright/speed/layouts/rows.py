"""Layouts of the samples of one update in micro-batches that reduce the computation spent on padding.

Every layout keeps the samples of the update and therefore its gradient; only the grouping into tensors changes.

    flat      rows without padding, one document after the other, attention within documents
    flat pairs   rows of sources and rows of targets without padding, attention within and between pairs
    unpadded  padded outside the model's encoder, without padding inside it
    grouped   samples of similar length together, padded to the longest of their group
    collated  the batches of the collator
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.document_mask import PAD_BORDERS_TO, borders_of
from ..attention.varlen import MOST_DOCUMENTS
from .cutting import cut_by_length, cut_into_shapes, split_evenly, split_into_rows
from .samples import DECODED, IGNORED, SOURCE, TARGET, Axis, Samples

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"
BORDERS, LONGEST, PLACES = "_borders", "_longest", "_places"
SOURCE_SIDE = (BORDERS, LONGEST, PLACES)
TARGET_SIDE = ("_target_borders", "_target_longest", "_target_places")
"""Entries of a micro-batch for our attention, which are removed before the model is called."""


@dataclass(frozen=True)
class Limits:
    """Size limit of micro-batches and cost of one more, in tokens."""

    budget: int
    overhead: int
    round_to: int = 1
    floor: int = 0
    """Tokens below which a smaller micro-batch does not take less time."""
    few_shapes: bool = False
    """Whether rows are padded to one of a few lengths, so that each length can be a CUDA graph."""
    width: int = 0
    """Minimum width of padded batches if `few_shapes` is set."""
    spare_rows: int = 0
    """Rows added to every group of a few shapes, so that a proof has some."""


@dataclass
class Laid:
    """The micro-batches of an update and the number of tokens computed for them."""

    batches: list[dict[str, Any]]
    computed_tokens: int
    members: list[np.ndarray] = field(default_factory=list)
    """The indices of the samples in each micro-batch, in the order of its rows or documents."""


def lay_grouped(samples: Samples, limits: Limits, *, drop_mask: bool = False) -> Laid:
    """Group samples of similar length; `drop_mask` omits the mask of right-padded groups, for causal models."""
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
    return Laid(batches, computed, groups)


GRAPH_TOKENS = 4096
"""Source tokens of a group that is replayed as a graph: more gain little, and would leave more rows empty."""
LEAST_WIDTHS = {SOURCE: 128, TARGET: 64}


def lay_in_shapes(samples: Samples, limits: Limits, *, most_width: int | None) -> Laid:
    """Groups of pairs, padded to a few widths and numbers of rows; rows that are added have no targets.

    Beyond `most_width`, None if there is no limit, groups are as wide as their longest sample.
    """
    keys = list(samples.axes)
    widths = np.stack([_few_widths(samples.axes[key], LEAST_WIDTHS[key], most_width) for key in keys], axis=1)
    batches, computed, members = [], 0, []
    for group, rows in cut_into_shapes(widths, tokens=min(GRAPH_TOKENS, limits.budget)):
        wanted = dict(zip(keys, widths[group].max(axis=0).tolist(), strict=True))
        batch = samples.select(group).trimmed(wanted)
        for key, width in wanted.items():
            _widen(batch, samples.axes[key], samples, width)
        rows += limits.spare_rows
        _add_rows(batch, rows - len(group))
        batches.append(batch)
        members.append(group)
        computed += rows * sum(wanted.values())
    return Laid(batches, computed, members)


def _few_widths(axis: Axis, least: int, most: int | None) -> np.ndarray:
    """The lengths, rounded up to powers of two, but not beyond `most`."""
    rounded: np.ndarray = 1 << np.ceil(np.log2(np.maximum(axis.lengths, least))).astype(np.int64)
    return rounded if most is None else np.maximum(np.minimum(rounded, most), axis.lengths)


def _add_rows(batch: dict[str, Any], missing: int) -> None:
    """Repeat the first sample, without its targets."""
    for name, values in batch.items():
        if missing and isinstance(values, Tensor):
            row = torch.full_like(values[:1], IGNORED) if name == "labels" else values[:1]
            batch[name] = torch.cat([values, row.expand(missing, *values.shape[1:])])


def can_add_rows(samples: Samples) -> bool:
    """Whether rows without targets may be added: labels are tokens, some of which are ignored already."""
    labels = samples.tensors.get("labels")
    is_text = TARGET in samples.axes and labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    # Elsewhere a label that the model does not ignore would abort the process on a GPU.
    return is_text and labels is not None and bool((labels == IGNORED).any())


def lay_flat(samples: Samples, limits: Limits, *, shifts: bool, fill: bool) -> Laid:
    """Rows without padding: tokens, restarted positions, and document boundaries instead of a mask.

    `shifts` is set for models that predict the next token: the first token of a document then has no target. `fill`
    rounds the length of rows up with a last document without targets, so that few shapes occur.
    """
    lengths = samples.axes[SOURCE].lengths
    rows = split_into_rows(lengths, budget=limits.budget)
    part = _part_to_fill(fill, limits)
    batches = [_row(samples.between(int(row[0]), int(row[-1]) + 1), shifts, part) for row in rows]
    return Laid(batches, sum(batch["input_ids"].numel() for batch in batches), rows)


MOST_PAIRS = MOST_DOCUMENTS - PAD_BORDERS_TO - 1
"""Pairs of a row for which there are kernels: a filler and empty documents are added to them."""


def lay_pairs(samples: Samples, limits: Limits, *, shift: Callable[[Tensor], Tensor], fill: bool) -> Laid:
    """Rows of sources and rows of targets without padding; `shift` makes the inputs of the decoder of labels.

    Shifted in a row, the inputs of a target would begin with the last token of the one before it.
    """
    sources, targets = samples.axes[SOURCE], samples.axes[TARGET]
    tensors = dict(samples.tensors)
    if DECODED not in tensors:
        tensors[DECODED] = shift(tensors["labels"].clone())  # a function of the user may write to its argument
        targets = replace(targets, names=[*targets.names, DECODED])
    part = _part_to_fill(fill, limits)
    longer = split_into_rows(sources.lengths + targets.lengths, budget=limits.budget)
    rows = [row for each in longer for row in np.array_split(each, -(-len(each) // MOST_PAIRS))]
    batches = []
    for row in rows:
        within = slice(int(row[0]), int(row[-1]) + 1)
        batch = _flattened(tensors, sources, within, part, SOURCE_SIDE)
        batch |= _flattened(tensors, targets, within, part, TARGET_SIDE, unlike=batch["input_ids"].shape[1])
        batches.append({**samples.constants, **batch})
    computed = sum(batch[name].numel() for batch in batches for name in ("input_ids", DECODED))
    return Laid(batches, computed, rows)


class Side(NamedTuple):
    """One of the two rows of a micro-batch of pairs."""

    borders: Tensor
    longest: int
    """An upper bound for the length of a document."""
    places: Tensor
    """The position of every token within its document; 0 in the filler, which may be longer than any document."""


def _flattened(
    tensors: dict[str, Tensor], axis: Axis, within: slice, part: int, side: tuple[str, ...], *, unlike: int = 0
) -> dict[str, Any]:
    """The tensors along an axis as one row with its documents; the row has another length than `unlike`."""
    starts, ends = axis.starts[within], axis.ends[within]
    real, total = _real_tokens(starts, ends, axis.width), int((ends - starts).sum())
    missing = -total % filling(total, part) if part else 0
    if total + missing == unlike:  # attention to the other row is recognized by its length
        missing += filling(total, part) if part else 1
    batch: dict[str, Any] = {}
    for name in axis.names:
        if name not in (MASK, DECODER_MASK):
            tokens = tensors[name][within][real]
            batch[name] = _filled(tokens, missing, IGNORED if "label" in name else 0).unsqueeze(0)
    places = torch.from_numpy(np.concatenate([np.arange(length) for length in ends - starts]))
    documents = np.append(ends - starts, missing)
    longest = max(128, 1 << (int(documents.max()) - 1).bit_length())  # few values: code is compiled for each
    values = Side(borders_of(documents, fill=part > 0), longest, _filled(places, missing, 0))
    return {**batch, **dict(zip(side, values, strict=True))}


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
    if "position_ids" not in batch:  # otherwise the collator's positions are kept
        places = torch.from_numpy(np.concatenate([np.arange(length) for length in documents]))
        # Position 0: the filler may be longer than any sample and than the model's position table.
        batch["position_ids"] = _filled(places, missing, 0).unsqueeze(0)
    documents = np.append(documents, missing) if missing else documents
    batch.pop(MASK, None)
    batch[BORDERS] = borders_of(documents, fill=part > 0)
    batch[LONGEST] = _longest(documents, part, within=total + missing)
    return {**batch, **samples.constants}


def _documents(lengths: np.ndarray, positions: Tensor | None, *, is_masked: bool) -> np.ndarray:
    """Document lengths of a row: those of its samples, split where positions jump if there is no mask."""
    if positions is None or positions.dim() != 2 or is_masked:
        return lengths
    jumps = 1 + np.flatnonzero(np.diff(positions[0, : lengths.sum()].numpy()) != 1)
    return np.diff(np.union1d(jumps, np.concatenate([[0], np.cumsum(lengths)])))


def lay_unpadded(samples: Samples, limits: Limits, *, fill: bool) -> Laid:
    """Padded batches with the indices of their real tokens for the encoder."""
    samples = samples if MASK in samples.tensors else _masked(samples)
    split = split_evenly if limits.few_shapes else split_into_rows  # the number of samples is part of the shape
    rows = split(samples.axes[SOURCE].lengths, budget=limits.budget)
    part = _part_to_fill(fill, limits)
    batches, computed = [], 0
    for row in rows:
        chosen = samples if len(row) == len(samples) else samples.select(row)
        lengths = chosen.axes[SOURCE].lengths
        width = limits.width if limits.few_shapes else _rounded_up(int(lengths.max()), 64) if fill else 0
        batch = chosen.trimmed({SOURCE: width})
        if limits.few_shapes:
            _widen(batch, samples.axes[SOURCE], samples, width)
        places, documents, within = np.flatnonzero((batch[MASK] != 0).numpy()), lengths, batch[MASK].shape[1]
        if limits.few_shapes:
            missing = -len(places) % filling(len(places), part)
            # Filler tokens get an index one past the end of the batch, which belongs to no sample.
            places = np.append(places, np.full(missing, batch[MASK].numel()))
            documents, within = np.append(lengths, missing), max(within, filling(len(places), part))
        batch[PLACES] = torch.from_numpy(places)
        batch[BORDERS] = borders_of(documents, fill=part > 0)
        batch[LONGEST] = _longest(lengths, part, within=within)
        batches.append(batch)
        computed += len(places)
    return Laid(batches, computed, rows)


def _widen(batch: dict[str, Any], axis: Axis, samples: Samples, width: int) -> None:
    """Add padding on the right, with the values the collator uses for these samples."""
    missing, padded = width - batch[axis.names[0]].shape[1], np.flatnonzero(axis.ends < axis.width)
    if missing <= 0 or not axis.is_right_padded or not padded.size:
        return  # the model may detect padding by its token, which is unknown without padding
    row, place = int(padded[0]), axis.width - 1
    for name in axis.names:
        values, used = batch[name], samples.tensors[name][row, place]
        batch[name] = torch.cat([values, used.expand(len(values), missing, *values.shape[2:])], dim=1)


def _real_tokens(starts: np.ndarray, ends: np.ndarray, width: int) -> Tensor:
    along = np.arange(width)
    return torch.from_numpy((along >= starts[:, None]) & (along < ends[:, None]))


def _masked(samples: Samples) -> Samples:
    """Samples that come without a mask, with one."""
    axis = samples.axes[SOURCE]
    mask = _real_tokens(axis.starts, axis.ends, axis.width).long()
    axes = {**samples.axes, SOURCE: replace(axis, names=[*axis.names, MASK])}
    return replace(samples, tensors={**samples.tensors, MASK: mask}, axes=axes)


def _filled(tokens: Tensor, missing: int, value: int) -> Tensor:
    if not missing:
        return tokens
    return torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), value)])


def _rounded_up(number: int, to: int) -> int:
    return -(-number // to) * to


FILLED, COARSELY_FILLED = 32, 8
"""A row is extended by at most about 1/32, or with few shapes 1/8, of its length."""


def _part_to_fill(fill: bool, limits: Limits) -> int:
    return COARSELY_FILLED if limits.few_shapes else FILLED * fill


def filling(tokens: int, part: int = FILLED) -> int:
    """The multiple to which the length of a row is rounded up: a power of two, at most about 1/`part` of the row."""
    return max(64, 1 << max(0, (tokens // part).bit_length() - 1))


def _longest(lengths: np.ndarray, part: int, *, within: int) -> int:
    """The length of the longest document, or an upper bound for it if few shapes are required."""
    longest = int(lengths.max())
    if part == COARSELY_FILLED:
        return within
    return _rounded_up(longest, 128) if part else longest


def longest_row(batches: Sequence[Any]) -> int:
    """Tokens of the longest row, together with the row of its targets if samples are pairs."""
    return max(sum(int(batch[name].shape[-1]) for name in ("input_ids", DECODED) if name in batch) for batch in batches)


def padded_tokens(batches: Sequence[Any], samples: Samples) -> int:
    """Tokens that the model computes for the collator's batches."""
    names = [axis.names[0] for axis in samples.axes.values()]
    return sum(batch[name].numel() for batch in batches for name in names)
