"""Reading files of a checkpoint, with retries: an I/O error does not mean that a file is damaged."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TypeVar

from ...errors import CheckpointError

Value = TypeVar("Value")

MISSING = (errno.ENOENT, errno.ENOTDIR)
NOT_A_FILE = (errno.ENXIO, errno.ELOOP)
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
            if error.errno in (*MISSING, *NOT_A_FILE):
                raise
            if pause is None or error.errno == errno.ENAMETOOLONG:
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
    try:
        return document_content(path, most)
    except CheckpointError as error:
        if error.errno is not None:
            raise
        return None


def document_content(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes; raises `CheckpointError` for anything else."""

    def read() -> bytes:
        problem = link_problem(path.parent, path.name)
        if problem is not None:
            raise Refused(problem)
        # Opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            os.close(descriptor)
            raise Refused(_why_not(status, most))
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    try:
        return persistent(read, path)
    except Refused as error:
        raise CheckpointError(f"{path} {error}") from None
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        found = "a socket or a link to itself, not a file" if error.errno in NOT_A_FILE else "missing"
        raise CheckpointError(f"{path} is {found}") from None


def paths_below(folder: Path) -> list[Path]:
    """Every file and folder below a folder, in order; one that cannot be listed is an error, unlike in `rglob`."""

    def walk() -> list[Path]:
        found = []
        for place, folders, files in os.walk(folder, onerror=_raise):
            found += [Path(place, name) for name in (*folders, *files)]
        return sorted(found)

    return persistent(walk, folder)


def _raise(error: OSError) -> None:
    raise error


class Refused(Exception):
    """Something in the place of a file that is not read."""


def link_problem(folder: Path, name: str) -> str | None:
    """The problem of a file that is a link to another place than its checkpoint, or None."""
    path = folder / name
    if not path.is_symlink() and not any((folder / each).is_symlink() for each in PurePath(name).parents):
        return None
    target, base = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if target.is_relative_to(base) or _is_hub_blob(target, base):
        return None
    return f"is a link that leads out of its checkpoint, to {target}; copy the file instead"


def _is_hub_blob(target: Path, folder: Path) -> bool:
    """Whether a link is one of the cache of the Hugging Face hub: from snapshots/REVISION to blobs/ next to it."""
    for parent in folder.parents:
        if parent.name == "snapshots":
            return target.parent == parent.parent / "blobs"
    return False


def _why_not(status: os.stat_result, most: int) -> str:
    if stat.S_ISREG(status.st_mode):
        return f"is {status.st_size:,} bytes, and at most {most:,} are read; it was damaged"
    return f"is {kind_of_file(status.st_mode)}, not a file"


def kind_of_file(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
             stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something else")
