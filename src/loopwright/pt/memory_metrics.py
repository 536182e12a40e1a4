"""Memory metrics of a phase, for skip_memory_metrics=False."""

from __future__ import annotations

import torch

from ..core.host_memory import free_memory as free_memory, host_memory, host_peak
from .devices import memory_figures, reset_peak_memory


class TorchMemoryMeter:
    """Host and device memory added by a phase, and its peak beyond that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._host_peak = 0
        self._allocated = 0

    def start(self) -> None:
        reset_peak_memory(self._device)
        self._host, self._host_peak = host_memory(), host_peak()
        self._allocated = memory_figures(self._device).get("allocated", 0)

    def figures(self, phase: str) -> dict[str, int]:
        """Bytes added since `start`, and the peak beyond what is in use now."""
        now = host_memory()
        peak = host_peak()
        risen = peak - now if peak > self._host_peak else 0
        result = {
            f"{phase}_mem_cpu_alloc_delta": now - self._host,
            f"{phase}_mem_cpu_peaked_delta": max(0, risen),
        }
        device = memory_figures(self._device)
        if "allocated" in device:
            result[f"{phase}_mem_gpu_alloc_delta"] = device["allocated"] - self._allocated
            result[f"{phase}_mem_gpu_peaked_delta"] = max(0, device.get("peak", 0) - device["allocated"])
        return result
