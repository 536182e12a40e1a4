"""Samples changed where the loss must not depend on them: in the other samples, and in the padding."""

from __future__ import annotations

from typing import Any

import torch

from ..layouts.samples import IGNORED, SOURCE, Samples

MOVED = {
    "leak": "samples of a row affect each other: the loss of one changes by {:.0e}",
    "poison": "the values in the padding change the loss by {:.0e}",
}


def other_neighbours(samples: Samples) -> tuple[Samples | None, Samples | None]:
    """Samples with the targets of one sample only, before and after the tokens of all others are changed."""
    labels, ids = samples.tensors.get("labels"), samples.tensors.get("input_ids")
    if labels is None or ids is None or labels.is_floating_point() or len(samples) < 2 or set(samples.axes) != {SOURCE}:
        return None, None
    counted = (labels != IGNORED).flatten(1).sum(1) if labels.dim() > 1 else (labels != IGNORED).long()
    one = int(counted.argmax())
    if not counted[one] or labels.dim() < 2:
        return None, None
    others = torch.arange(len(labels)) != one
    alone, changed = labels.clone(), ids.clone()
    alone[others] = IGNORED
    changed[others] = torch.flip(ids, (0, 1))[others]
    before = Samples({**samples.tensors, "labels": alone}, samples.axes, samples.constants)
    after = Samples({**samples.tensors, "labels": alone, "input_ids": changed}, samples.axes, samples.constants)
    return before, after


def other_padding(samples: Samples) -> tuple[Samples | None, Samples | None]:
    """All samples, before and after the padding token is replaced by another token."""
    poisoned = poisoned_tensors(samples.tensors)
    if poisoned is samples.tensors:
        return None, None
    return samples, Samples(poisoned, samples.axes, samples.constants)


def poisoned_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors with another token in the padding; unchanged if there is no padding."""
    mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
    if mask is None or ids is None or ids.is_floating_point() or bool(mask.all()):
        return tensors
    return {**tensors, "input_ids": torch.where(mask == 0, ids.max(), ids)}
