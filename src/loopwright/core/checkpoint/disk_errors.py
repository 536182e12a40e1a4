"""Errors of the disk inside the exceptions of libraries that write files."""

from __future__ import annotations

import errno
import os
import re

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk or the quota is full: a checkpoint is skipped, and the run continues."""
DISK = (*FULL, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ENODEV, errno.ENXIO)

_NUMBER = re.compile(r"\(os error (\d+)\)|errno ?= ?(\d+)|\[Errno (\d+)\]", re.IGNORECASE)


def disk_error(error: BaseException | None) -> OSError | None:
    """The error of the disk that an exception is, was raised for, or reports in its text; None if there is none.

    safetensors, torch and HDF5 raise exceptions of their own when a write fails, sometimes while handling the OSError.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in DISK:
            return error
        number = None if isinstance(error, OSError) and error.errno is not None else _number_in(str(error))
        if number is not None:
            return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def _number_in(text: str) -> int | None:
    """The number of a disk error in a message."""
    for found in _NUMBER.finditer(text):
        number = int(next(filter(None, found.groups())))
        if number in DISK:
            return number
    return next((number for number in DISK if os.strerror(number) in text), None)
