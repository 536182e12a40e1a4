"""Micro-batches of as many consecutive samples as fit into a token budget, and the plan of a run made of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..order import Indices, Order
from ..plan import Plan

COUNTED_EPOCHS = 1000
"""Epochs whose updates are counted exactly when max_steps sets the length: a huge max_steps may mean "for ever"."""


def next_fit(lengths: Sequence[int] | Indices, budget: int) -> list[int]:
    """End positions of greedy groups of neighbours within the budget; a sample above the budget is alone.

    Starting again at one of these ends yields the same following ends. No grouping of neighbours has fewer groups.
    """
    sums = np.cumsum(lengths).tolist()
    ends: list[int] = []
    first, before = 0, 0
    while first < len(sums):
        first = max(bisect_right(sums, before + budget, lo=first), first + 1)
        before = sums[first - 1]
        ends.append(first)
    return ends


class Packing:
    """The grouping of an epoch's samples into micro-batches: a pure function of order, lengths and budget."""

    def __init__(self, order: Order, lengths: Sequence[int] | Indices, budget: int, *, drop_last: bool = False) -> None:
        self.order, self.budget, self.drop_last = order, budget, drop_last
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self._counts: dict[int, int] = {}
        self._latest: tuple[tuple[int, int], list[int]] = ((-1, 0), [])

    def ends(self, epoch: int, start: int = 0) -> list[int]:
        """The end positions of micro-batches in the epoch's order, from position `start` on."""
        if self._latest[0] != (epoch, start):
            lengths = self.lengths[self.order.epoch(epoch)[start:]]
            ends = next_fit(lengths, self.budget)
            if self.drop_last and ends and lengths[ends[-2] if len(ends) > 1 else 0 :].sum() < self.budget:
                ends.pop()  # the data ended before the micro-batch was full
            self._latest = ((epoch, start), [start + end for end in ends])
        return self._latest[1]

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        if epoch not in self._counts:
            self._counts[epoch] = len(self.ends(epoch))
        return self._counts[epoch]

    def cut(self, indices: list[int]) -> list[list[int]]:
        """Group samples into micro-batches, beginning with a new one."""
        ends = next_fit(self.lengths[indices], self.budget)
        return [indices[first:end] for first, end in pairwise([0, *ends])]

    def samples_ahead(self, epoch: int, start: int, *, position: int, batches: int) -> int:
        """Samples in the next micro-batches from a position, in an epoch that was started at `start`."""
        ends = self.ends(epoch, start)
        last = min(bisect_right(ends, position) + batches, len(ends)) - 1
        return ends[last] - position if last >= 0 else 0

    @property
    def fewest(self) -> int:
        """A lower bound of the micro-batches of an epoch, for any order."""
        return -(-int(np.minimum(self.lengths, self.budget).sum()) // self.budget) - self.drop_last

    @property
    def too_long(self) -> int:
        """Number of samples longer than the budget."""
        return int((self.lengths > self.budget).sum())


@dataclass(frozen=True, kw_only=True)
class PackedPlan(Plan):
    """Sizes of a run whose epochs differ in their number of micro-batches.

    `batch_size` is the mean; `batches_per_epoch` and `updates_per_epoch` are those of the first epoch.
    """

    packing: Packing

    @property
    def train_samples(self) -> int:
        examples, last = len(self.packing.lengths), self.epochs - 1
        if last >= COUNTED_EPOCHS:
            return self.max_steps * examples // self.updates_per_epoch
        ends = self.packing.ends(last)
        rest = (self.max_steps - self.updates_before(last)) * self.accumulation
        return last * examples + (ends[min(rest, len(ends)) - 1] if ends else 0)

    def batches_in(self, epoch: int) -> int:
        return self.packing.count(epoch)

    def updates_before(self, epoch: int) -> int:
        return sum(_updates(self.packing.count(each), self.accumulation) for each in range(epoch))

    def epochs_to(self, max_steps: int, *, done: int, epoch: int, left: int) -> int:
        """An upper bound; the number of updates of an epoch is only known when it starts."""
        fewest = max(_updates(self.packing.fewest, self.accumulation), 1)
        return epoch + 1 + max(math.ceil((max_steps - done - left) / fewest), 0)

    def epoch_after(self, epoch: int, batches: int) -> float:
        return epoch + batches / self.packing.count(epoch)


def make_packed_plan(packing: Packing, *, accumulation: int, max_steps: int, num_train_epochs: float) -> PackedPlan:
    """The plan for packed data; a positive `max_steps` overrides the number of epochs."""
    first = packing.count(0)
    epochs = math.ceil(num_train_epochs)
    if max_steps > 0:
        epochs = _epochs_of(packing, accumulation, max_steps)
    else:
        max_steps = _steps_of(packing, accumulation, num_train_epochs)
    examples = len(packing.lengths)
    return PackedPlan(
        batch_size=max(1, round(examples / max(first, 1))),
        accumulation=accumulation,
        world_size=1,
        batches_per_epoch=first,
        examples=examples,
        updates_per_epoch=_updates(first, accumulation),
        max_steps=max_steps,
        epochs=epochs,
        packing=packing,
    )


def _updates(batches: int, accumulation: int) -> int:
    """Updates for this many micro-batches; the last accumulation window of an epoch may be short."""
    return max(-(-batches // accumulation), 1)


def _steps_of(packing: Packing, accumulation: int, epochs: float) -> int:
    whole = int(epochs)
    steps = sum(_updates(packing.count(each), accumulation) for each in range(whole))
    if epochs == whole:
        return steps
    # Rounded, because of floating point: 1.3 epochs of ten updates would otherwise have fourteen.
    return steps + math.ceil(round((epochs - whole) * _updates(packing.count(whole), accumulation), 9))


def _epochs_of(packing: Packing, accumulation: int, steps: int) -> int:
    """Epochs needed for this many updates: exact up to COUNTED_EPOCHS, an upper bound beyond."""
    epochs = 0
    while steps > 0 and epochs < COUNTED_EPOCHS:
        steps -= _updates(packing.count(epochs), accumulation)
        epochs += 1
    return epochs + max(0, -(-steps // _updates(packing.fewest, accumulation)))
