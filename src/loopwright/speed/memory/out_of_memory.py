"""Detecting out-of-memory errors."""

from __future__ import annotations

import torch

PHRASES = ("out of memory", "can't allocate memory")
"""In the errors of devices that raise a plain RuntimeError, and of torch's allocator on CPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that a device (or the host) is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in PHRASES)
