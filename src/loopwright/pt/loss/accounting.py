"""The denominator of an update: its number of targets, and the weight of each micro-batch's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.strategy import StepwiseStrategy
from ...core.update import MicroBatch, Update
from .denominator import ITEMS
from .inference import LossInference
from .targets import LossKind, check_loss, count_samples

WEIGHED = (LossKind.MEAN, LossKind.SAMPLES, LossKind.TOTAL, LossKind.MIXED, LossKind.OTHER, None)
"""Kinds of losses that are multiplied by the micro-batch's share of the update."""


class LossAccounting(LossInference):
    """Weights micro-batches according to the denominator of their loss."""

    # ---- counting ---------------------------------------------------------------------------------------------------

    def total(self, batches: list[Any]) -> Any:
        """The targets of several micro-batches, or None if any of them has no labels."""
        counts = [self.items_in(batch) for batch in batches]
        return None if not counts or any(count is None for count in counts) else sum(counts[1:], counts[0])

    def empty_in(self, batches: list[Any]) -> list[Any]:
        """Micro-batches without any item, if items are the assumed denominator of the loss."""
        if self.kind not in (LossKind.MEAN, LossKind.OTHER, None) or self.denominator.what != ITEMS:
            return []
        counts = [self.denominator.count(batch, self.label_names) for batch in batches]
        return [batch for batch, count in zip(batches, counts, strict=True) if isinstance(count, int) and count == 0]

    def count(self, update: Update) -> None:
        """Count the targets of an update; without labels, count samples instead."""
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

    # ---- weighting ---------------------------------------------------------------------------------------------------

    def micro_batch(self, update: Update, index: int) -> MicroBatch:
        """A micro-batch with the weight of its loss and its num_items_in_batch."""
        if index == 0:
            update.summed = None
        if update.items and self.kind in WEIGHED:
            weight = update.share(index)
        else:
            weight = update.factor if update.factor != 1 else None
        return MicroBatch(update, index, update.batches[index], self._items_for(update, index), weight)

    def _items_for(self, update: Update, index: int) -> Any:
        if not update.items or not update.counted:
            return None
        # A loss that gets its own item count and is then weighted is right for any kind, so also while it is unknown.
        if self.kind is LossKind.MIXED and update.weights is not None:
            # The part of the loss that divides by this number is weighted afterwards, so the number is scaled down.
            # The weight of a dummy batch is 0, by which its loss must not be divided.
            return update.total_items * (_at_least_one(update.weights[index]) / update.total_weight)
        return _at_least_one(update.items[index]) if self.kind in (LossKind.MIXED, None) else update.total_items

    def weigh(self, loss: Any, micro: MicroBatch) -> Tensor:
        """The loss times the weight of its micro-batch; for a (sum, count) pair, the count is added to the update's."""
        if type(loss) in (tuple, list):
            loss, count = loss
            count = 0 * count if micro.is_dummy else count
            self.kind, micro.weight = LossKind.SUM, None
            update = micro.update
            update.summed = count if update.summed is None else update.summed + count
        if type(loss) is not Tensor or loss.ndim:
            loss = check_loss(loss)
        return loss if micro.weight is None else loss * micro.weight


def divide_by_count(update: Update, loss: Any, strategy: StepwiseStrategy) -> Any:
    """The update's loss; gradients of summed losses are divided once by the total count."""
    if update.summed is None:
        return loss
    update.summed = strategy.mean_count(update.summed)
    strategy.scale_gradients(1 / _all_counts(update, loss))
    return divided(update, loss)


def divided(update: Update, loss: Any) -> Any:
    """The update's loss from the weighted losses of its micro-batches."""
    return loss if update.summed is None else loss / _all_counts(update, loss)


def _all_counts(update: Update, loss: Any) -> Any:
    count = _at_least_one(update.summed)
    if isinstance(count, Tensor):  # an integer would be divided in single precision
        count = count.to(torch.promote_types(loss.dtype, torch.float32))
    return count


def _at_least_one(count: Any) -> Any:
    """The count, or 1 in place of 0, to avoid a division by zero in an update without targets."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _drop_empty(update: Update) -> None:
    """Remove micro-batches without targets: their mean does not exist."""
    counts = update.items if update.weights is None else update.weights
    full = [i for i, count in enumerate(counts) if not (isinstance(count, int) and count == 0)]
    if full and len(full) < len(counts):
        update.batches = [update.batches[i] for i in full]
        update.items = [update.items[i] for i in full]
        update.weights = None if update.weights is None else [update.weights[i] for i in full]
