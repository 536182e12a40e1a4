"""Checks before step 1 that the checkpoints fit on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...errors import OutputError


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Free space where the folder is, or would be."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_space(folder: str | os.PathLike[str], *, size: int, keep: int | None, saves: int) -> str | None:
    """Raise if one checkpoint does not fit; returns a warning if all that the run keeps do not fit."""
    if saves <= 0 or size <= 0:
        return None
    free = free_bytes(folder)
    if free < size:
        raise OutputError(
            f"a checkpoint needs about {readable(size)}, but {folder} has only {readable(free)} free. Free some "
            "space, choose another output_dir, or set save_only_model=True or save_strategy='no'"
        )
    # The new one is published before the oldest is removed, so one more than the limit must fit.
    most = min(saves, (keep or saves) + 1)
    if free < most * size:
        return (
            f"checkpoints need about {readable(size)} each and this run keeps up to {most} of them, but {folder} has "
            f"only {readable(free)} free; lower save_total_limit, or free some space"
        )
    return None


def readable(size: float) -> str:
    """Bytes in the largest unit that leaves a number above one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
