"""One update: its micro-batches, and what the loss of each counts for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Which samples of an epoch's order an update took."""

    epoch: int
    first: int
    samples: int


@dataclass
class Update:
    """The micro-batches that end in one optimizer step."""

    batches: list[Any]
    items: list[Any] = field(default_factory=list)
    """Targets per micro-batch: whole numbers, or device scalars when the labels already live there."""
    total_items: Any = None
    weights: list[Any] | None = None
    """What each micro-batch's mean loss counts for, where that is not its items."""
    total_weight: Any = None
    factor: float = 1.0
    """What every loss is multiplied with besides: undoes what the user's code divides by."""
    samples: int = 0
    micro_batches: int = 0
    """Batches taken from the loader, however they were cut up afterwards."""
    flos: float = 0.0
    tokens: int = 0
    real_tokens: Any = math.nan
    """Tokens that are no padding: a number, or a host tensor not read yet; NaN if not counted."""
    computed_tokens: Any = math.nan
    """Tokens the model computes, padding included."""
    squared_lengths: Any = math.nan
    """The sum of the samples' squared lengths, which attention's work goes by."""
    counted: bool = False
    """Whether the items are targets found in the labels; otherwise they are samples."""
    shared: bool = False
    """Whether other processes hold a part of this update: `total_items` is then the mean over all of them."""
    real: int | None = None
    """How many of the micro-batches are this process's data; those after them are dummies. None: all."""
    summed: Any = None
    """The counts of (sum, count) losses so far, which the update's gradients are to be divided by."""

    def __len__(self) -> int:
        return len(self.batches)

    def share(self, index: int) -> Any:
        """The part of the update's targets that this micro-batch holds."""
        if len(self.batches) == 1 and not self.shared:
            share: Any = 1
        elif self.weights is None:
            share = self.items[index] / self.total_items
        else:
            share = self.weights[index] / self.total_weight
        return share if self.factor == 1 else share * self.factor


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch of an update: the inputs of its forward, and what its loss counts for."""

    update: Update
    index: int
    inputs: Any = None
    items: Any = None
    """The `num_items_in_batch` its loss is given; None if it gets none."""
    weight: Any = None
    """What its loss is multiplied with; None is 1."""

    @property
    def is_last(self) -> bool:
        return self.index + 1 == len(self.update.batches)

    @property
    def is_dummy(self) -> bool:
        """Whether it only keeps this rank in step with the others, and counts for nothing."""
        return self.update.real is not None and self.index >= self.update.real

    @property
    def targets(self) -> int | None:
        """Its own number of targets; None where they were not counted on the host."""
        items = self.update.items[self.index] if self.update.items else None
        return items if isinstance(items, int) else None

    @property
    def share(self) -> float | None:
        """Its part of the update's targets; None where it has none, or they were not counted on the host."""
        return float(self.update.share(self.index)) if self.targets else None


def whole_batch() -> MicroBatch:
    """A micro-batch that is a whole update: what a step that is called outside of the loop computes."""
    return MicroBatch(Update([None]), 0)
