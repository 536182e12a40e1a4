"""Going on after running out of memory: the same update again, in smaller micro-batches."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .loss import count_samples


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device (or the host) has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error) for phrase in ("out of memory", "can't allocate memory")
    )


def run_or_halve(run: Callable[[], Any], halve: Callable[[], bool], strategy: Any) -> Any:
    """Run; out of memory, put random states and buffers back, halve and run again, until it fits.

    `halve` returns False when nothing is left to halve.
    """
    held = strategy.hold()
    while True:
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the failed run's tensors
            if not halve():
                raise
        strategy.undo(held)


def split_all(batches: list[Any], parts: int) -> list[Any]:
    """Every batch cut into up to `parts` pieces along its first dimension."""
    return [piece for batch in batches for piece in _split(batch, count_samples(batch), parts)]


def _split(batch: Any, size: int, parts: int) -> list[Any]:
    step = -(-size // parts)
    return [_cut_batch(batch, size, start, min(start + step, size)) for start in range(0, size, step)]


def _cut_batch(batch: Any, size: int, start: int, stop: int) -> Any:
    if type(batch) in (list, tuple):  # of tensors, however many: its length has nothing to do with the batch's size
        return type(batch)(_cut(each, size, start, stop) for each in batch)
    return _cut(batch, size, start, stop)


def _cut(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {name: _cut(each, size, start, stop) for name, each in value.items()}
    if isinstance(value, (list, tuple)) and len(value) == size:
        return value[start:stop]
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(each, size, start, stop) for each in value)
    return value
