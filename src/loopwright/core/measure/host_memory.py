"""Memory used by this process, memory available on the host, and how busy it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def host_memory() -> int:
    """Bytes of physical memory this process uses now (its peak where the current use cannot be read)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return host_peak()


def free_memory() -> int | None:
    """Bytes of memory available on the host; None where this cannot be read."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def host_load() -> float | None:
    """Programs that want a processor, for each processor; None where this is not known."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):
        return None


def host_peak() -> int:
    """Peak bytes of physical memory of this process; 0 on Windows, which does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


class MemoryMeter:
    """Measures the host and device memory that a phase added, and its peak beyond that.

    `figures_of_device` returns the bytes `allocated` now and at the `peak`, or an empty dict without a device.
    """

    def __init__(self, reset_peak: Callable[[], None], figures_of_device: Callable[[], dict[str, int]]) -> None:
        self._reset_peak, self._figures_of_device = reset_peak, figures_of_device
        self._host = self._host_peak = self._allocated = 0
        self._kept: dict[str, int] = {}

    def start(self) -> None:
        self._reset_peak()
        self._host, self._host_peak = host_memory(), host_peak()
        self._allocated = self._figures_of_device().get("allocated", 0)

    def keep(self, phase: str) -> None:
        """Keep the figures of a phase, and the use before it, until the next one reports them, once."""
        self._kept = {**self.figures(phase), f"before_{phase}_mem_cpu": self._host}
        if f"{phase}_mem_gpu_alloc_delta" in self._kept:
            self._kept[f"before_{phase}_mem_gpu"] = self._allocated

    def figures(self, phase: str) -> dict[str, int]:
        """Bytes added since `start`, and the peak beyond current use; also those of a phase that was kept."""
        now, peak, device = host_memory(), host_peak(), self._figures_of_device()
        kept, self._kept = self._kept, {}
        result = {
            **kept,
            f"{phase}_mem_cpu_alloc_delta": now - self._host,
            f"{phase}_mem_cpu_peaked_delta": max(0, peak - now if peak > self._host_peak else 0),
        }
        if "allocated" in device:
            result[f"{phase}_mem_gpu_alloc_delta"] = device["allocated"] - self._allocated
            result[f"{phase}_mem_gpu_peaked_delta"] = max(0, device.get("peak", 0) - device["allocated"])
        return result
