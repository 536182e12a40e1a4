"""train_sampling_strategy="batch_rebalance": a sampler whose micro-batches of an update cost about the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...args.base import BaseArguments
from ...core.sampling.balancing import Balancing
from .loaders import OrderedSampler, sample_lengths


class BalancedSampler(OrderedSampler):
    """Micro-batches of indices; each update has the samples of core/order.py at its position."""

    makes_batches = True

    def __init__(self, balancing: Balancing) -> None:
        super().__init__(balancing.order)
        self.balancing = balancing
        self.batch_size = balancing.batch_size

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        rank, world, _ = self.part or (0, 1, 1)
        return max(0, -(-(self.balancing.batches(self.order.n) - rank) // world))

    def __iter__(self) -> Iterator[Any]:
        epoch, start, whole = self.epoch, self.start, self.balancing.group_size
        rank, world, _ = self.part or (0, 1, 1)
        order = self.order.epoch(epoch)
        for first in range(start, self.order.n, whole):
            indices = order[first : first + whole]
            for part in self.balancing.divided(indices)[rank::world]:
                chosen = indices[part].tolist()
                if self.with_position:
                    yield [(index, epoch, first + at) for index, at in zip(chosen, part.tolist(), strict=True)]
                else:
                    yield chosen

    def regrouped(self, indices: list[int]) -> list[list[int]]:
        """The samples of one update as micro-batches of all ranks."""
        own = np.asarray(indices, dtype=np.int64)
        return [own[part].tolist() for part in self.balancing.divided(own)]


def balanced_sampler(
    sampler: OrderedSampler, dataset: Any, args: BaseArguments, *, group_size: int, input_name: str
) -> BalancedSampler:
    """The sampler's order, with the samples of each update divided by their lengths, which are measured once."""
    lengths = sample_lengths(dataset, args.length_column_name, [input_name], what="batch_rebalance")
    return BalancedSampler(
        Balancing(
            order=sampler.order,
            lengths=np.asarray(lengths, dtype=np.int64),
            batch_size=args.train_batch_size,
            group_size=group_size,
            drop_last=args.dataloader_drop_last,
        )
    )
