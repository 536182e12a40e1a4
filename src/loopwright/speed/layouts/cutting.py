"""Splitting the samples of an update: into groups of similar length, or into rows of similar size."""

from __future__ import annotations

import numpy as np

from ...core.packing import next_fit


def cut_by_length(
    lengths: np.ndarray, *, overhead: int, budget: int, round_to: int = 1, floor: int = 0
) -> list[np.ndarray]:
    """Groups of samples for which padding plus the cost of a micro-batch is least; indices, ascending in each group.

    `lengths` is (samples, axes): a pair has a source and a target. A group costs its samples times the sum of its
    longest lengths, plus `overhead`, all counted in tokens, and at least `floor`: a device that is waiting for the
    next launch gains nothing by a smaller group. No group takes more than `budget` tokens, except a single sample that
    does.
    """
    lengths = -(-lengths // round_to) * round_to
    order = np.argsort(lengths.sum(axis=1), kind="stable")
    sorted_lengths = lengths[order]
    count = len(order)
    best = np.zeros(count + 1)
    last_cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        # The group (start, end) for every start: how wide it is, what it costs.
        widths = np.maximum.accumulate(sorted_lengths[:end][::-1], axis=0)[::-1].sum(axis=1)
        sizes = np.arange(end, 0, -1) * widths
        costs = best[:end] + np.maximum(sizes, floor) + overhead
        costs[:-1][sizes[:-1] > budget] = np.inf
        # Of equally good cuts the earliest makes the fewest groups.
        last_cut[end] = start = int(np.argmin(costs))
        best[end] = costs[start]
    groups = []
    end = count
    while end:
        groups.append(np.sort(order[last_cut[end] : end]))
        end = int(last_cut[end])
    # The largest first: memory is asked for once.
    return sorted(groups, key=lambda group: (-padded_size(lengths, group), int(group[0])))


def padded_size(lengths: np.ndarray, group: np.ndarray) -> int:
    """Tokens a group of samples takes when it is padded to its longest."""
    return len(group) * int(lengths[group].max(axis=0).sum())


def split_into_rows(lengths: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """As few rows of neighbouring samples as keep to `budget` (unless one sample does not), about equally long."""
    ends = next_fit(lengths, budget)
    even = _even_cuts(lengths, int(lengths.sum()) / len(ends))
    if max(int(lengths[row].sum()) for row in even) <= budget:
        return even
    return np.split(np.arange(len(lengths)), ends[:-1])


def split_evenly(lengths: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """The same with equally many samples in every row, or one less, where twice as many rows are enough for that."""
    so_far = np.concatenate([[0], np.cumsum(lengths)])
    least = -(-int(so_far[-1]) // budget)
    for count in range(least, min(2 * least, len(lengths)) + 1):
        ends = np.arange(count + 1) * len(lengths) // count
        if np.diff(so_far[ends]).max() <= budget:
            return np.split(np.arange(len(lengths)), ends[1:-1])
    return split_into_rows(lengths, budget=budget)


def _even_cuts(lengths: np.ndarray, target: float) -> list[np.ndarray]:
    """Neighbours together: a sample belongs to the row its middle falls into."""
    middles = np.cumsum(lengths) - lengths / 2
    rows = np.minimum(middles / target, np.iinfo(np.int32).max).astype(np.int64)
    return [np.flatnonzero(rows == row) for row in np.unique(rows)]
