"""The order of samples: a pure function of seed, epoch and position, the same for any number of processes.

Up to `LARGEST_LISTED` samples the order of an epoch is a list, shuffled by the framework's permutation. Larger datasets
have an order that is computed where it is read, without a list: its time and memory do not depend on the number of
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Permute = Callable[[int, int], Indices]

LARGEST_32_BIT_DRAW = (2**32 - 1) // 20

LARGEST_LISTED = 2**24
"""Samples whose order is a list; 128 MiB."""

READ_AT_ONCE = 2**14
"""Positions of an order that are read together."""


def permutation(n: int, seed: int) -> Indices:
    """A random order of range(n), equal to torch.randperm from a CPU generator with this seed."""
    if n >= LARGEST_32_BIT_DRAW:
        raise ValueError(f"permutation of {n:,} samples needs 64-bit draws; pass a framework's own permutation")
    bits = np.random.MT19937()
    bits._legacy_seeding(seed & 0xFFFFFFFF)  # torch's seeding and number of bits
    draws = bits.random_raw(max(n - 1, 0))
    order = list(range(n))
    for i, draw in enumerate(draws.tolist()):
        j = i + draw % (n - i)
        order[i], order[j] = order[j], order[i]
    return np.asarray(order, dtype=np.int64)


def grouped_by_length(lengths: Sequence[int], batch_size: int, shuffled: Indices) -> Indices:
    """The shuffled order, sorted by decreasing length inside blocks of up to fifty batches.

    The longest sample of all comes first, so that running out of memory shows in the first update.
    """
    n = len(shuffled)
    block = max(1, min(n // (batch_size * 4), 50)) * batch_size
    sizes = np.asarray(lengths)
    blocks = [shuffled[i : i + block] for i in range(0, n, block)]
    ordered = [each[np.argsort(-sizes[each], kind="stable")] for each in blocks]
    if ordered:
        longest = int(np.argmax([sizes[each[0]] for each in ordered]))
        ordered[0][0], ordered[longest][0] = ordered[longest][0], ordered[0][0]
    return np.concatenate(ordered) if ordered else shuffled


class ComputedOrder:
    """A random order of range(n), of which any part can be computed alone.

    A Feistel network permutes the numbers below a power of four; a number that is not below n is permuted again until
    it is.
    """

    ROUNDS = 6

    def __init__(self, n: int, seed: int) -> None:
        self._n = n
        self._half = np.uint64(max((n - 1).bit_length() + 1, 2) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.SeedSequence(seed & (2**64 - 1)).generate_state(self.ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, places: slice) -> Indices:
        """The indices at these positions."""
        values = np.arange(*places.indices(self._n), dtype=np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._permuted(values[outside])
            outside = outside[values[outside] >= self._n]
        return values.astype(np.int64)

    def _permuted(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers whose bits each depend on all bits of the given ones: the finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class CountedOrder:
    """The order of range(n) itself, without a list of it."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, places: slice) -> Indices:
        """The indices at these positions."""
        return np.arange(*places.indices(self._n), dtype=np.int64)


EpochOrder = Indices | ComputedOrder | CountedOrder
"""The order of one epoch: `len()`, and slices that are arrays of indices."""


@dataclass(frozen=True)
class Order:
    """The order of all samples in any epoch."""

    n: int
    seed: int
    strategy: str = "random"
    lengths: Sequence[int] | None = None
    group_size: int = 1
    """Samples per update; blocks of length grouping are multiples of it."""
    permute: Permute = permutation

    def epoch(self, epoch: int) -> EpochOrder:
        """The indices of one epoch; a slice of them is an array."""
        is_large = self.n > LARGEST_LISTED
        if self.strategy == "sequential":
            return CountedOrder(self.n) if is_large else np.arange(self.n, dtype=np.int64)
        seed = self.seed + epoch
        shuffled = ComputedOrder(self.n, seed) if is_large else self.permute(self.n, seed)
        if self.strategy == "group_by_length":
            assert self.lengths is not None, "group_by_length needs lengths, but none were given"
            return grouped_by_length(self.lengths, self.group_size, shuffled[:])
        return shuffled

    def places(self, epoch: int, start: int = 0) -> Iterator[tuple[Indices, Indices]]:
        """Indices and their positions, some at a time, from a position of an epoch to its end."""
        indices = self.epoch(epoch)
        for first in range(start, self.n, READ_AT_ONCE):
            last = min(first + READ_AT_ONCE, self.n)
            yield indices[first:last], np.arange(first, last)
