"""Micro-batches of an evaluation with the indices of their samples, and the outputs of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ..layouts.candidates import Layout
from ..layouts.cutting import split_into_rows
from ..layouts.rows import Limits
from ..layouts.samples import SOURCE, TARGET, Axis, Samples
from ..planner.decision import FLAT, UNPADDED, SpeedPlan
from ..proof.prober import ProofRefused


class Unserved(ProofRefused):
    """The outputs of a model cannot be divided among samples; the message gives the reason."""


class Piece(dict[str, Any]):
    """A micro-batch, and the indices of its samples in the order of its rows or documents."""

    def __init__(self, batch: Any, members: np.ndarray, *, is_row: bool = False) -> None:
        super().__init__(batch)
        self.members, self.is_row = members, is_row


def pieces_of(
    layout: Layout | None, plan: SpeedPlan, samples: Samples, limits: Limits, *, shifts: bool
) -> list[Piece]:
    """The micro-batches of samples in a layout; padded batches are made of samples of similar length."""
    if layout is None:
        return [Piece(samples.padded(), np.arange(len(samples)))]
    limits = replace(limits, round_to=plan.round_to, few_shapes=False)
    if layout.name == UNPADDED:
        return [_unpadded(layout, plan, samples, members) for members in _of_similar_length(samples, limits.budget)]
    laid = layout.lay(samples, limits, shifts=shifts, fill=plan.fill)
    return [
        Piece(batch, members, is_row=layout.name == FLAT)
        for batch, members in zip(laid.batches, laid.members, strict=True)
    ]


def _of_similar_length(samples: Samples, budget: int) -> list[np.ndarray]:
    lengths = samples.axes[SOURCE].lengths
    order = np.argsort(-lengths, kind="stable")
    return [order[row] for row in split_into_rows(lengths[order], budget=budget)]


def _unpadded(layout: Layout, plan: SpeedPlan, samples: Samples, members: np.ndarray) -> Piece:
    everything = Limits(budget=1 << 40, overhead=0, round_to=plan.round_to)
    return Piece(layout.lay(samples.narrowed(members), everything, shifts=False, fill=plan.fill).batches[0], members)


def collated(batches: Sequence[Any]) -> list[Piece]:
    """The collator's batches with the indices of their samples, which are numbered in order."""
    made, first = [], 0
    for batch in batches:
        rows = _rows_in(batch)
        made.append(Piece(batch, np.arange(first, first + rows)))
        first += rows
    return made


def _rows_in(batch: Any) -> int:
    rows: int = next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))
    return rows


def of_each_sample(
    outputs: Sequence[Tensor], piece: Piece, samples: Samples, classes: int | None
) -> list[list[Tensor]]:
    """The outputs of each sample of a piece, at its real tokens; `samples` are those of the piece."""
    return [
        [_of_sample(output, piece, samples, place, classes) for output in outputs] for place in range(len(samples))
    ]


def _of_sample(output: Tensor, piece: Piece, samples: Samples, place: int, classes: int | None) -> Tensor:
    if piece.is_row:
        lengths = samples.axes[SOURCE].lengths
        if output.dim() < 2 or output.shape[0] != 1 or output.shape[1] != piece["input_ids"].shape[1]:
            raise Unserved(f"an output of shape {tuple(output.shape)} does not belong to the tokens of a row")
        start = int(lengths[:place].sum())
        return output[0, start : start + int(lengths[place])]
    if output.dim() == 0 or output.shape[0] != len(samples):
        raise Unserved(f"an output of shape {tuple(output.shape)} does not have one row per sample")
    axis = axis_of(output, piece, samples, classes)
    if axis is None:
        return output[place]
    length, width = int(axis.lengths[place]), output.shape[1]
    return output[place, :length] if axis.is_right_padded else output[place, width - length :]


def axis_of(output: Tensor, piece: Piece, samples: Samples, classes: int | None) -> Axis | None:
    """The token dimension of an output, if it has one; scores of as many classes as tokens have none."""
    if output.dim() == 2 and output.shape[1] == classes:
        return None
    for key in (TARGET, SOURCE):
        axis = samples.axes.get(key)
        name = None if axis is None else next((name for name in axis.names if name in piece), None)
        if name is not None and output.dim() > 1 and output.shape[1] == piece[name].shape[1]:
            return axis
    return None
