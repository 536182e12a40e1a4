"""The order of samples: a pure function of seed, epoch and position, the same for any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Permute = Callable[[int, int], Indices]

LARGEST_32_BIT_DRAW = (2**32 - 1) // 20


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

    def epoch(self, epoch: int) -> Indices:
        """The indices of one epoch."""
        if self.strategy == "sequential":
            return np.arange(self.n, dtype=np.int64)
        shuffled = self.permute(self.n, self.seed + epoch)
        if self.strategy == "group_by_length":
            assert self.lengths is not None, "group_by_length needs lengths, but none were given"
            return grouped_by_length(self.lengths, self.group_size, shuffled)
        return shuffled
