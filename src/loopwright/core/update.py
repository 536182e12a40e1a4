"""The micro-batches of one update and how many targets each of them holds."""

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
    """How many of the micro-batches are this process's data; those after them count for nothing. None: all."""

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
