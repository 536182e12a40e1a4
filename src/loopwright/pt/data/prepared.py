"""Loaders that code written for accelerate prepares: a shuffled one has an order by seed and epoch, as accelerate's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler


class EpochSampler(RandomSampler):
    """torch's random order of a sampler, started from the sum of seed and epoch; continues with the next epoch."""

    def __init__(self, given: RandomSampler, seed: int) -> None:
        count = None if given._num_samples is None else given.num_samples
        super().__init__(given.data_source, given.replacement, count, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = self.generator
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def order_by_epoch(loader: Any, seed: int) -> None:
    """Replace torch's random sampler in a loader, also one inside a batch sampler of the user."""
    batches = getattr(loader, "batch_sampler", None)
    for holder in (loader, batches):
        given = getattr(holder, "sampler", None)
        if isinstance(given, RandomSampler) and not isinstance(given, EpochSampler):
            made = EpochSampler(given, seed)
            for each in (loader, batches):
                if getattr(each, "sampler", None) is given:
                    object.__setattr__(each, "sampler", made)  # a DataLoader refuses an assignment
