"""Recognising that memory has run out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device (or the host) has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error) for phrase in ("out of memory", "can't allocate memory")
    )
