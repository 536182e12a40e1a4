"""Splitting training samples of decoder-only models into the prompt to generate from and the answer to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ..loss.targets import IGNORED


def prompts_of(inputs: Mapping[str, Any], *, pad: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The prompts, left-padded to this width or that of the longest one, and their mask.

    In a training sample the prompt is the part before the first label that is not ignored. Without labels, or with
    labels of another length, the inputs are the prompts.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    labels = inputs.get("labels")
    keep = mask.bool()
    if labels is not None and labels.shape == ids.shape:
        keep &= _before_answer(labels)
    lengths = keep.sum(1)
    if not bool(lengths.all()):
        raise DataError(
            "predict_with_generate needs a prompt, but a sample's labels start at its first token; set the labels of "
            f"the prompt to {IGNORED}"
        )
    return _to_the_left(ids, keep, lengths, pad, width or int(lengths.max()))


def answers_of(labels: Tensor) -> Tensor:
    """The labels that are not ignored, moved to the left and padded with -100."""
    keep = labels != IGNORED
    width = int(keep.sum(1).max()) if labels.numel() else 0
    answers = labels.new_full((len(labels), width), IGNORED)
    row, position = keep.nonzero(as_tuple=True)
    answers[row, (keep.cumsum(1) - 1)[row, position]] = labels[row, position]
    return answers


def _before_answer(labels: Tensor) -> Tensor:
    """Positions before the first label that is not ignored; all positions if there is none."""
    return (labels != IGNORED).cumsum(1) == 0


def _to_the_left(ids: Tensor, keep: Tensor, lengths: Tensor, pad: int, width: int) -> tuple[Tensor, Tensor]:
    prompts = ids.new_full((len(ids), width), pad)
    mask = torch.zeros_like(prompts)
    row, position = keep.nonzero(as_tuple=True)
    place = (keep.cumsum(1) - 1)[row, position] + (width - lengths)[row]
    prompts[row, place] = ids[row, position]
    mask[row, place] = 1
    return prompts, mask
