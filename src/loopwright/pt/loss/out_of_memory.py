"""Going on after running out of memory: the same update again, in smaller micro-batches."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from .splitter import split_all

__all__ = ["is_out_of_memory", "run_or_halve", "split_all"]


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
