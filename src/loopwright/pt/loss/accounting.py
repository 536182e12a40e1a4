"""The denominator of an update: its number of targets, and the weight of each micro-batch's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.update import Update
from .denominator import ITEMS
from .inference import LossFindings
from .targets import LossKind, check_loss, count_samples

WEIGHED = (LossKind.MEAN, LossKind.SAMPLES, LossKind.TOTAL, LossKind.MIXED, LossKind.OTHER, None)
"""Losses that a micro-batch's share of the update is multiplied with."""


class LossAccounting(LossFindings):
    """Weighs micro-batches by what their loss is the mean of."""

    _share: Any = None
    _idle = False
    summed: Any = None
    """The counts of (sum, count) losses, which the update's gradients are to be divided by."""

    # ---- counting ---------------------------------------------------------------------------------------------------

    def total(self, batches: list[Any]) -> Any:
        """The targets of several micro-batches, or None if any of them has no labels."""
        counts = [self.items_in(batch) for batch in batches]
        return None if not counts or any(count is None for count in counts) else sum(counts[1:], counts[0])

    def empty_in(self, batches: list[Any]) -> list[Any]:
        """Micro-batches without a single item, where items are what the loss is believed to be the mean of."""
        if self.kind not in (LossKind.MEAN, LossKind.OTHER, None) or self.denominator.what != ITEMS:
            return []
        counts = [self.denominator.count(batch, self.label_names) for batch in batches]
        return [batch for batch, count in zip(batches, counts, strict=True) if isinstance(count, int) and count == 0]

    def count(self, update: Update) -> None:
        """Count the targets of an update; where there are no labels, samples are counted instead."""
        counts = [self.items_in(batch) for batch in update.batches]
        update.counted = all(count is not None for count in counts)
        update.items = counts if update.counted else [count_samples(batch) for batch in update.batches]
        update.weights = None
        if self.kind in WEIGHED and self.rivals and not self.denominator.is_usual:
            update.weights = [self.weight_in(batch) for batch in update.batches]
        if self.kind in WEIGHED:
            _drop_empty(update)
        update.total_items = _at_least_one(sum(update.items[1:], update.items[0]))
        if update.weights is not None:
            update.total_weight = _at_least_one(sum(update.weights[1:], update.weights[0]))
        if self.kind is LossKind.TOTAL:
            update.total_weight = 1

    # ---- weighing ---------------------------------------------------------------------------------------------------

    def begin(self, update: Update, index: int) -> Any:
        """Set the weight of a micro-batch; returns the num_items_in_batch passed to its loss."""
        if index == 0:
            self.summed = self._share = None
        self._idle = update.real is not None and index >= update.real
        if not update.items:
            self._share = update.factor if update.factor != 1 else None
            return None
        if self.kind in WEIGHED:
            self._share = update.share(index)
        else:
            self._share = update.factor if update.factor != 1 else None
        if not update.counted:
            return None
        # Told its own items and then weighed, a loss is right whatever its kind: so also while that is unknown.
        if self.kind is LossKind.MIXED and update.weights is not None:
            # The part that divides by this is weighted afterwards, so the number passed is as much smaller.
            return update.total_items * (update.weights[index] / update.total_weight)
        return _at_least_one(update.items[index]) if self.kind in (LossKind.MIXED, None) else update.total_items

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
        self.summed = strategy.mean_count(self.summed)
        strategy.scale_gradients(1 / self._all_counts(loss))
        return self.divided(loss)

    def divided(self, loss: Any) -> Any:
        """The update's loss from the weighed losses of its micro-batches."""
        return loss if self.summed is None else loss / self._all_counts(loss)

    def _all_counts(self, loss: Any) -> Any:
        count = _at_least_one(self.summed)
        if isinstance(count, Tensor):  # a whole number would be divided in single precision
            count = count.to(torch.promote_types(loss.dtype, torch.float32))
        return count


def _at_least_one(count: Any) -> Any:
    """The count, or 1 in place of 0: an update without targets has nothing to divide, and teaches nothing."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _drop_empty(update: Update) -> None:
    """Leave out micro-batches without any target: their mean does not exist."""
    counts = update.items if update.weights is None else update.weights
    full = [i for i, count in enumerate(counts) if not (isinstance(count, int) and count == 0)]
    if full and len(full) < len(counts):
        update.batches = [update.batches[i] for i in full]
        update.items = [update.items[i] for i in full]
        update.weights = None if update.weights is None else [update.weights[i] for i in full]
