"""Micro-batches of about equal cost: the samples of an update, divided by their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..order import Indices, Order

TOKEN = 1000
"""Cost of a token, in pairs of tokens of attention: that of transformers' batch_rebalance."""


def padded_cost(size: int, longest: int) -> int:
    """The cost of a padded micro-batch: its tokens, and pairs of tokens in attention. Integers: the result is exact."""
    return size * (TOKEN + longest) * longest


def balanced_sizes(lengths: Sequence[int] | Indices, groups: int) -> list[int]:
    """Sizes of consecutive groups of samples, sorted by decreasing length; the costliest group is as cheap as possible.

    There are `groups` groups, none of them empty, for at least that many samples.
    """
    costs = [padded_cost(1, int(length)) for length in lengths]
    low, high = -1, len(costs) * costs[0]
    while high - low > 1:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_within(costs, limit)) <= groups else (limit, high)
    sizes = _within(costs, high)
    while len(sizes) < groups:  # split the costliest group that has several samples
        starts = np.cumsum([0, *sizes[:-1]])
        splittable = [i for i, size in enumerate(sizes) if size > 1]
        which = max(splittable, key=lambda i: (sizes[i] * costs[starts[i]], -i))
        sizes[which : which + 1] = [sizes[which] // 2, sizes[which] - sizes[which] // 2]
    return sizes


def _within(costs: list[int], limit: int) -> list[int]:
    """Sizes of the largest groups whose cost is within the limit; a sample above it is alone."""
    sizes, first = [], 0
    while first < len(costs):
        fit = limit // costs[first] if costs[first] > 0 else len(costs)
        sizes.append(min(max(fit, 1), len(costs) - first))
        first += sizes[-1]
    return sizes


@dataclass(frozen=True)
class Balancing:
    """The division of each update into micro-batches: a pure function of order, lengths and position.

    An update has the samples, and the number of micro-batches, that it has without balancing.
    """

    order: Order
    lengths: Indices
    batch_size: int
    """Mean number of samples of a micro-batch."""
    group_size: int
    """Samples of an update over all ranks."""
    drop_last: bool = False

    def batches(self, samples: int) -> int:
        """Micro-batches of all ranks for this many samples."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def divided(self, indices: Indices) -> list[Indices]:
        """Positions, in the given samples of one update, of those of each micro-batch; the costliest ones first."""
        groups = self.batches(len(indices))
        if not groups:
            return []
        used = min(groups * self.batch_size, len(indices))
        lengths = self.lengths[indices[:used]]
        by_length = np.argsort(-lengths, kind="stable")
        sizes = balanced_sizes(lengths[by_length], groups)
        parts = np.split(by_length, np.cumsum(sizes)[:-1])
        parts.sort(key=lambda part: -padded_cost(len(part), int(lengths[part[0]])))
        return parts
