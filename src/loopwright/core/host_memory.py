"""How much memory this process uses, and how much the host has left."""

from __future__ import annotations

import os
import sys
from typing import Any


def host_memory() -> int:
    """Bytes of physical memory this process uses now (the most it ever used where that is not known)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return host_peak()


def free_memory() -> int | None:
    """Bytes of memory the host can still give, or None where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def host_peak() -> int:
    """Bytes of physical memory this process used at most; 0 where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
