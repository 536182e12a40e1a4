"""Reading a loader without workers without torch's record of every batch, which takes longer than a small batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter


class Unrecorded:
    """The batches of a loader without workers; torch would record each for a profiler, even if there is none."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batches = self._batches
        if torch.autograd._profiler_enabled():
            return next(batches)
        batch = batches._next_data()
        batches._num_yielded += 1
        return batch


def batches_of(loader: Any) -> Iterator[Any]:
    """The batches of a loader whose order is loopwright's."""
    batches = iter(loader)
    if type(batches) is not _SingleProcessDataLoaderIter or batches._dataset_kind != _DatasetKind.Map:
        return batches
    is_replaced = getattr(type(batches).__next__, "__globals__", None) is not vars(torch.utils.data.dataloader)
    return batches if is_replaced else Unrecorded(batches)
