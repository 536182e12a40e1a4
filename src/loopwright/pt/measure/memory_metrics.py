"""Memory metrics of a phase, for skip_memory_metrics=False."""

from __future__ import annotations

from functools import partial

import torch

from ...core.measure.host_memory import MemoryMeter, free_memory as free_memory, host_peak as host_peak
from ..devices import memory_figures, reset_peak_memory


def meter_of(device: torch.device) -> MemoryMeter:
    """The meter of the memory of this process and its device."""
    return MemoryMeter(partial(reset_peak_memory, device), partial(memory_figures, device))
