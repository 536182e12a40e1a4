"""Splitting the samples of an update into groups of similar length, or into rows of similar size."""

from __future__ import annotations

import numpy as np

from ...core.sampling.packing import next_fit


def cut_by_length(
    lengths: np.ndarray, *, overhead: int, budget: int, round_to: int = 1, floor: int = 0
) -> list[np.ndarray]:
    """Groups of samples with the least padding plus cost per micro-batch; indices, ascending in each group.

    `lengths` is (samples, axes): a pair has a source and a target. The cost of a group is its number of samples times
    the sum of its longest lengths, but at least `floor`, plus `overhead`, all in tokens. `floor` is for devices that
    wait for the next launch and gain nothing from a smaller group. A group has at most `budget` tokens, unless it is a
    single sample.
    """
    lengths = -(-lengths // round_to) * round_to
    order = np.argsort(lengths.sum(axis=1), kind="stable")
    sorted_lengths = lengths[order]
    count = len(order)
    best = np.zeros(count + 1)
    last_cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        # Widths and costs of the groups (start, end) for every start.
        widths = np.maximum.accumulate(sorted_lengths[:end][::-1], axis=0)[::-1].sum(axis=1)
        sizes = np.arange(end, 0, -1) * widths
        costs = best[:end] + np.maximum(sizes, floor) + overhead
        costs[:-1][sizes[:-1] > budget] = np.inf
        # Of equally good splits, the earliest start gives the fewest groups.
        last_cut[end] = start = int(np.argmin(costs))
        best[end] = costs[start]
    groups = []
    end = count
    while end:
        groups.append(np.sort(order[last_cut[end] : end]))
        end = int(last_cut[end])
    # Largest group first, so that memory is allocated once.
    return sorted(groups, key=lambda group: (-padded_size(lengths, group), int(group[0])))


def cut_into_shapes(widths: np.ndarray, *, tokens: int) -> list[tuple[np.ndarray, int]]:
    """Groups of samples, each with its number of rows, which is one of two for a width: few shapes occur.

    `widths` is (samples, axes), rounded up to few values. A group has `tokens` of the first axis or half of that; rows
    that are missing count as computed, and so does an eighth of `tokens` for each group.
    """
    order = np.argsort(widths.sum(axis=1), kind="stable")
    sorted_widths, count = widths[order], len(order)
    best = np.zeros(count + 1)
    last_cut, rows_of = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        widest = np.maximum.accumulate(sorted_widths[:end][::-1], axis=0)[::-1]
        needed = np.arange(end, 0, -1)
        whole, half = (np.maximum(tokens // (part * widest[:, 0]), 1) for part in (1, 2))
        rows = np.where(half >= needed, half, whole)
        costs = best[:end] + np.where(rows >= needed, rows * widest.sum(axis=1), np.inf) + tokens // 8
        last_cut[end] = start = int(np.argmin(costs))
        best[end], rows_of[end] = costs[start], rows[start]
    groups, end = [], count
    while end:
        groups.append((np.sort(order[last_cut[end] : end]), int(rows_of[end])))
        end = int(last_cut[end])
    return groups


def padded_size(lengths: np.ndarray, group: np.ndarray) -> int:
    """Tokens of a group of samples padded to its longest."""
    return len(group) * int(lengths[group].max(axis=0).sum())


def split_into_rows(lengths: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """The fewest rows of consecutive samples within `budget` (a longer sample is its own row), of similar size."""
    ends = next_fit(lengths, budget)
    even = _even_cuts(lengths, int(lengths.sum()) / len(ends))
    if max(int(lengths[row].sum()) for row in even) <= budget:
        return even
    return np.split(np.arange(len(lengths)), ends[:-1])


def split_evenly(lengths: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """Rows with equal numbers of samples, or one less, if at most twice the fewest rows suffice; else unequal rows."""
    so_far = np.concatenate([[0], np.cumsum(lengths)])
    least = -(-int(so_far[-1]) // budget)
    for count in range(least, min(2 * least, len(lengths)) + 1):
        ends = np.arange(count + 1) * len(lengths) // count
        if np.diff(so_far[ends]).max() <= budget:
            return np.split(np.arange(len(lengths)), ends[1:-1])
    return split_into_rows(lengths, budget=budget)


def _even_cuts(lengths: np.ndarray, target: float) -> list[np.ndarray]:
    """Consecutive samples per row: a sample belongs to the row in which its middle lies."""
    middles = np.cumsum(lengths) - lengths / 2
    rows = np.minimum(middles / target, np.iinfo(np.int32).max).astype(np.int64)
    return [np.flatnonzero(rows == row) for row in np.unique(rows)]
