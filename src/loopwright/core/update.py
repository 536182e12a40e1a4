"""One update: its micro-batches, and the weight of the loss of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The samples of an update, as a range of an epoch's order."""

    epoch: int
    first: int
    samples: int


@dataclass
class Update:
    """The micro-batches of one optimizer step."""

    batches: list[Any]
    items: list[Any] = field(default_factory=list)
    """Targets per micro-batch: integers, or device scalars if the labels are already on a device."""
    total_items: Any = None
    weights: list[Any] | None = None
    """Weight of each micro-batch's mean loss, where it is not its items."""
    total_weight: Any = None
    factor: float = 1.0
    """Additional factor of every loss, which compensates a division in the user's code."""
    samples: int = 0
    micro_batches: int = 0
    """Batches taken from the loader, before any regrouping."""
    flos: float = 0.0
    tokens: int = 0
    real_tokens: Any = math.nan
    """Tokens without padding: a number, or a host tensor not read yet; NaN if not counted."""
    computed_tokens: Any = math.nan
    """Tokens the model computes, padding included."""
    squared_lengths: Any = math.nan
    """The sum of the samples' squared lengths, which the cost of attention depends on."""
    counted: bool = False
    """Whether the items are targets counted in the labels; otherwise they are samples."""
    sources: dict[int, str] = field(default_factory=dict)
    """The dataset of a micro-batch's samples, by the id of the micro-batch, where all are of one."""
    shared: bool = False
    """Whether other ranks hold a part of this update; `total_items` is then the mean over all of them."""
    real: int | None = None
    """Number of micro-batches with this rank's data; the rest are dummy batches. None: all."""
    summed: Any = None
    """Sum of the counts of (sum, count) losses so far; the update's gradients are divided by it."""

    def __len__(self) -> int:
        return len(self.batches)

    def share(self, index: int) -> Any:
        """The fraction of the update's targets in this micro-batch."""
        if len(self.batches) == 1 and not self.shared:
            share: Any = 1
        elif self.weights is None:
            share = self.items[index] / self.total_items
        else:
            share = self.weights[index] / self.total_weight
        return share if self.factor == 1 else share * self.factor


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch of an update: the inputs of its forward, and the weight of its loss."""

    update: Update
    index: int
    inputs: Any = None
    items: Any = None
    """The `num_items_in_batch` passed to its loss; None if none is passed."""
    weight: Any = None
    """Factor of its loss; None is 1."""

    @property
    def is_last(self) -> bool:
        return self.index + 1 == len(self.update.batches)

    @property
    def is_dummy(self) -> bool:
        """Whether it only keeps this rank in step with the others, with weight zero."""
        return self.update.real is not None and self.index >= self.update.real

    @property
    def targets(self) -> int | None:
        """Its number of targets; None if they were not counted on the host."""
        items = self.update.items[self.index] if self.update.items else None
        return items if isinstance(items, int) else None

    @property
    def share(self) -> float | None:
        """Its fraction of the update's targets; None if it has none, or they were not counted on the host."""
        return float(self.update.share(self.index)) if self.targets else None


def whole_batch() -> MicroBatch:
    """A micro-batch that is a whole update, for steps called outside the loop."""
    return MicroBatch(Update([None]), 0)
