"""Reading files of a checkpoint, with retries: an I/O error does not mean that a file is damaged."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointError

Value = TypeVar("Value")

MISSING = (errno.ENOENT, errno.ENOTDIR)
PAUSES = (0.1, 0.5, 2.0)
"""Seconds between two tries to read a file."""


class Unreadable(str):
    """The problem of a file whose bytes the disk does not return, although nothing shows that they are wrong."""


def persistent(read: Callable[[], Value], path: Path) -> Value:
    """The result of `read`, tried again after errors; those of a missing file are raised at once."""
    for pause in (*PAUSES, None):
        try:
            return read()
        except OSError as error:
            if error.errno in MISSING:
                raise
            if pause is None:
                problem = CheckpointError(
                    f"{path} cannot be read ({error.strerror or error}), so it is not known whether the checkpoint is "
                    "intact. Nothing was changed; make it readable and run again"
                )
                problem.errno = error.errno
                raise problem from error
            time.sleep(pause)
    raise AssertionError


def bounded_content(path: Path, most: int) -> bytes | None:
    """The content of a regular file of at most so many bytes; None for a missing file or anything else."""

    def read() -> bytes | None:
        # Opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            os.close(descriptor)
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    try:
        return persistent(read, path)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        return None
