"""The denominator of an update: how many targets it has, and what each micro-batch's loss is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.batches import Update
from .loss import LossKind, LossProbe, check_loss, count_samples, count_targets, find_targets
from .oom import is_out_of_memory, split_all
from .shapes import IGNORED

ENOUGH_TOKENS = 16_384
"""Tokens that tell what a loss is; the logits of a very long row would take more memory than training it."""


class LossAccounting:
    """Knows, or finds out, how a loss is scaled, and weighs micro-batches by their targets."""

    def __init__(
        self,
        label_names: list[str],
        *,
        guessed_shift: bool,
        shift: bool | None = None,
        kind: LossKind | None = None,
        wants_items: bool = False,
    ) -> None:
        self.label_names = label_names
        self.kind = kind
        self.wants_items = wants_items
        """Whether somebody is told the number of items even when an update is one micro-batch."""
        self.is_open = kind is None
        """Whether a batch may still tell something about the loss."""
        self._guessed_shift = guessed_shift
        self._shift = shift
        self._share: Any = None
        self._idle = False
        self.summed: Any = None
        """The counts of (sum, count) losses, which the update's gradients are to be divided by."""

    # ---- finding out ------------------------------------------------------------------------------------------------

    @property
    def shifts(self) -> bool:
        """Whether the loss leaves out the first target of each row."""
        return self._guessed_shift if self._shift is None else self._shift

    @property
    def undecided_shift(self) -> bool:
        """Whether it is still a guess which targets the loss counts."""
        return self._shift is None

    def learn(self, inputs: Any, probe: LossProbe) -> None:
        """Compute the loss of one batch a few times to see which targets it counts and how it is scaled.

        A batch may be unable to tell; then the next one is asked. Of a very long one a part is.
        """
        part = _part_of(inputs, self.label_names)
        if part is not inputs:
            try:
                return self._learn_or_halve(part, probe)
            except Exception:  # a model may want its samples whole
                pass
        self._learn_or_halve(inputs, probe)

    def _learn_or_halve(self, inputs: Any, probe: LossProbe) -> None:
        while True:
            try:
                return self._learn(inputs, probe)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or count_samples(inputs) == 1:
                    raise
            inputs = split_all([inputs], 2)[0]  # half a batch tells as much

    def _learn(self, inputs: Any, probe: LossProbe) -> None:
        self.learn_shift(inputs, probe)
        knows_targets = self._shift is not None or not isinstance(inputs, Mapping)
        # Where the first targets are ignored anyway the kind can be told; a later batch may tell the rest.
        self.is_open = not knows_targets
        knows_targets = knows_targets or self._shift_is_no_matter(inputs)
        if self.kind is None and knows_targets:
            items = self.items_in(inputs)
            self.kind = probe.kind(inputs, int(items if items is not None else count_samples(inputs)) or 1)
        self.is_open |= self.kind is None

    def _shift_is_no_matter(self, inputs: Any) -> bool:
        """Whether the first targets of this batch are ignored anyway, as those of prompts are."""
        counts = [count_targets(inputs, self.label_names, shifted=shifted) for shifted in (False, True)]
        return counts[0] is not None and bool(counts[0] == counts[1])

    def learn_shift(self, inputs: Any, probe: LossProbe) -> None:
        """See which targets the loss counts, unless that is known."""
        if self._shift is None and isinstance(inputs, Mapping):
            self._shift = probe.shifted(dict(inputs), self.label_names)

    # ---- counting ---------------------------------------------------------------------------------------------------

    def items_in(self, batch: Any) -> Any:
        """The targets of a batch, or None if it has no labels."""
        return count_targets(batch, self.label_names, shifted=self.shifts)

    def total(self, batches: list[Any]) -> Any:
        """The targets of several micro-batches, or None if any of them has no labels."""
        counts = [self.items_in(batch) for batch in batches]
        return None if not counts or any(count is None for count in counts) else sum(counts[1:], counts[0])

    def count(self, update: Update) -> None:
        """Count the targets of an update; where there are no labels, samples are counted instead."""
        counts = [self.items_in(batch) for batch in update.batches]
        update.counted = all(count is not None for count in counts)
        update.items = counts if update.counted else [count_samples(batch) for batch in update.batches]
        if self.kind in (LossKind.MEAN, LossKind.MIXED, None):
            _drop_empty(update)
        update.total_items = _one_if_none(sum(update.items[1:], update.items[0]))

    # ---- weighing ---------------------------------------------------------------------------------------------------

    def begin(self, update: Update, index: int) -> Any:
        """Note the share of a micro-batch; returns the num_items_in_batch its loss is told."""
        if index == 0:
            self.summed = self._share = None
        self._idle = update.real is not None and index >= update.real
        if not update.items:
            return None
        self._share = update.share(index) if self.kind in (LossKind.MEAN, LossKind.MIXED, None) else None
        if not update.counted:
            return None
        # Told its own items and then weighed, a loss is right whatever its kind: so also while that is unknown.
        return _one_if_none(update.items[index]) if self.kind in (LossKind.MIXED, None) else update.total_items

    def weigh(self, loss: Any) -> Tensor:
        """The loss times the micro-batch's share of the update's targets; a (sum, count) pair is noted."""
        if type(loss) in (tuple, list):
            loss, count = loss
            count = 0 * count if self._idle else count
            self.kind, self._share = LossKind.SUM, None
            self.summed = count if self.summed is None else self.summed + count
        if type(loss) is not Tensor or loss.ndim:
            loss = check_loss(loss)
        return loss if self._share is None else loss * self._share

    def settle(self, loss: Any, strategy: Any) -> Any:
        """The update's loss; gradients of summed losses are divided by all their counts, once."""
        if self.summed is None:
            return loss
        self.summed = strategy.total(self.summed)
        strategy.scale_gradients(1 / self._all_counts(loss))
        return self.divided(loss)

    def divided(self, loss: Any) -> Any:
        """The update's loss from the weighed losses of its micro-batches."""
        return loss if self.summed is None else loss / self._all_counts(loss)

    def _all_counts(self, loss: Any) -> Any:
        count = _one_if_none(self.summed)
        if isinstance(count, Tensor):  # a whole number would be divided in single precision
            count = count.to(torch.promote_types(loss.dtype, torch.float32))
        return count


def _part_of(inputs: Any, label_names: list[str]) -> Any:
    """Not many more tokens of a batch than are enough: a few of its rows, or of its only row the end of its targets."""
    targets = find_targets(inputs, label_names)
    if targets is None or targets.dim() != 2 or targets.numel() <= ENOUGH_TOKENS:
        return inputs
    if len(targets) > 1:
        half = split_all([inputs], 2)[0]
        fewer = find_targets(half, label_names)
        is_less = fewer is not None and len(fewer) < len(targets)
        return _part_of(half, label_names) if is_less else inputs
    width, counted = targets.shape[1], (targets[0] != IGNORED).nonzero()
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if any(width in value.shape[2:] or len(value) != 1 for value in tensors):
        return inputs  # a mask of every token with every other, say, or where the documents of a row begin
    end = max(int(counted.max()) + 1, ENOUGH_TOKENS) if len(counted) else width

    def cut(value: Any) -> Any:
        is_along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width
        return value[:, end - ENOUGH_TOKENS : end] if is_along else value

    return {name: cut(value) for name, value in inputs.items()}


def _one_if_none(count: Any) -> Any:
    """The count, or 1 in place of 0: an update without targets has nothing to divide, and teaches nothing."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _drop_empty(update: Update) -> None:
    """Leave out micro-batches without any target: their mean does not exist."""
    full = [i for i, count in enumerate(update.items) if not (isinstance(count, int) and count == 0)]
    if full and len(full) < len(update.items):
        update.batches = [update.batches[i] for i in full]
        update.items = [update.items[i] for i in full]
