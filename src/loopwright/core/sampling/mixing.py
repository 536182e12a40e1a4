"""The order of samples of several sources, mixed by weights that may change with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..order import EpochOrder, Indices, Order, grouped_by_length


def weights_at(weights: Sequence[Any], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The share of each source at each step.

    A weight is a number, or a list of [step, weight], interpolated between them and constant before and after.
    """
    rows = []
    for weight in weights:
        points = [(0, weight)] if isinstance(weight, (int, float)) else weight
        at, values = zip(*points, strict=True)
        rows.append(np.interp(steps, at, values))
    found = np.stack(rows)
    shares: npt.NDArray[np.float64] = found / found.sum(axis=0)
    return shares


def exact_counts(shares: npt.NDArray[np.float64], n: int) -> list[int]:
    """Numbers with these shares and the sum n; the largest remainders are rounded up."""
    wanted = shares * n
    counts = np.floor(wanted).astype(np.int64)
    rest = n - int(counts.sum())
    for index in np.argsort(counts - wanted, kind="stable")[:rest]:
        counts[index] += 1
    return [int(each) for each in counts]


@dataclass(frozen=True, kw_only=True)
class MixedOrder(Order):
    """Indices of the sources' samples one after another; an epoch has as many samples as all sources together.

    With constant weights each source has its exact share of an epoch, and with those of the sizes each sample occurs
    once. With a schedule, sources are drawn. A source that is exhausted begins again, in another order. Within an
    update, samples of one source follow each other.
    """

    sizes: tuple[int, ...]
    weights: tuple[Any, ...]
    """Those of `train_dataset_weights`, in the order of the sources."""
    dropped: int = 0
    """Samples at the end of an epoch that are in no update (dataloader_drop_last)."""

    def epoch(self, epoch: int) -> EpochOrder:
        """The indices of one epoch."""
        sources = self._sources(epoch)
        indices = np.empty(self.n, dtype=np.int64)
        first = 0
        for number, size in enumerate(self.sizes):
            own = sources == number
            indices[own] = first + self._from_source(number, int(own.sum()), epoch)
            first += size
        if self.strategy == "group_by_length":
            assert self.lengths is not None, "group_by_length needs lengths, but none were given"
            return grouped_by_length(self.lengths, self.group_size, indices)
        return indices

    def source_of(self, indices: Indices) -> npt.NDArray[np.int64]:
        """The number of the source of each index."""
        found: npt.NDArray[np.int64] = np.searchsorted(np.cumsum(self.sizes), indices, side="right")
        return found

    def _sources(self, epoch: int) -> npt.NDArray[np.int64]:
        """The number of the source at each position of an epoch."""
        updates = -(-(self.n - self.dropped) // self.group_size)
        if all(isinstance(each, (int, float)) for each in self.weights):
            shares = weights_at(self.weights, np.zeros(1, dtype=np.int64))[:, 0]
            in_turn = np.repeat(np.arange(len(self.sizes)), exact_counts(shares, self.n))
            sources = in_turn[self.permute(self.n, self.seed + epoch)]
        else:
            steps = epoch * updates + np.arange(self.n) // self.group_size
            draws = np.random.default_rng((self.seed & (2**64 - 1), epoch, 0)).random(self.n)
            sources = (draws >= np.cumsum(weights_at(self.weights, steps), axis=0)[:-1]).sum(axis=0)
        blocks = [np.sort(sources[at : at + self.group_size]) for at in range(0, self.n, self.group_size)]
        return np.concatenate(blocks)

    def _from_source(self, number: int, count: int, epoch: int) -> Indices:
        """The first `count` samples of a source in an epoch, in as many orders as that takes."""
        size = self.sizes[number]
        passes = []
        for turn in range(-(-count // size)):
            if self.strategy == "sequential":
                passes.append(np.arange(size, dtype=np.int64))
            else:
                seeds = np.random.SeedSequence((self.seed & (2**64 - 1), epoch, number + 1, turn))
                passes.append(self.permute(size, int(seeds.generate_state(1)[0])))
        return np.concatenate(passes)[:count] if passes else np.empty(0, dtype=np.int64)
