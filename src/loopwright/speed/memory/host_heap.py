"""The heap of the C library while a model is trained: freed memory is kept for the next micro-batch.

glibc returns the free end of its heap to the system, and every block above 32 MiB, so that every micro-batch touches
new pages, which the system has to clear first. On a CPU that is a tenth of the time of small models; for a GPU, half of
the time in which the main process makes a batch of images.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Names of glibc's malloc.h."""
LARGEST_BLOCK = 32 << 20
"""Larger blocks are mapped one by one; glibc accepts no larger value."""
MOST_MAPS = 65536
"""Default number of blocks that glibc maps one by one."""
KEPT = 1 << 30
"""Free memory at the end of the heap that is kept during training, in bytes."""
KEPT_AFTERWARDS = 2 * LARGEST_BLOCK
"""As much as glibc itself keeps once blocks of the largest size were freed."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


class HostHeap:
    """Keeps freed memory until it is released."""

    def __init__(self, library: Any, *, all_sizes: bool = False) -> None:
        self._library = library
        if all_sizes:
            library.mallopt(MMAP_MAX, 0)
        library.mallopt(MMAP_THRESHOLD, LARGEST_BLOCK)
        library.mallopt(TRIM_THRESHOLD, KEPT)

    def release(self) -> None:
        """Return free memory to the system, and keep little from now on."""
        self._library.mallopt(MMAP_MAX, MOST_MAPS)
        self._library.mallopt(TRIM_THRESHOLD, KEPT_AFTERWARDS)
        self._library.malloc_trim(0)


def keep_heap(environment: Mapping[str, str] = os.environ, *, all_sizes: bool = False) -> HostHeap | None:
    """Keep freed memory; None without glibc, or if the environment configures its heap.

    `all_sizes`: also blocks above 32 MiB. On a CPU these are activations, which would fragment the heap.
    """
    if any(name in environment for name in SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return None
    library = _glibc()
    return None if library is None else HostHeap(library, all_sizes=all_sizes)


def _glibc() -> Any:
    """The C library of this process, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    names = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return library if all(hasattr(library, name) for name in names) else None
