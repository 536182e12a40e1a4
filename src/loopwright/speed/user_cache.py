"""Signed files in the user's cache folder.

A file is read only if folder and file belong to this user and no other user can write to them, and if the content was
signed with a key that only this user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIGNATURE = 32
PARTIAL = ".partial"
ABANDONED = 3600.0
"""Seconds after which a partial file is that of a process that was killed."""


class NotOurs(Exception):
    """A file that must not be read; the message gives the reason."""


def home() -> Path:
    """The folder of this library in the user's cache folder."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "loopwright"


def key_file() -> Path:
    """The user's key."""
    return home() / "compile_cache.key"


def write_signed(path: Path, name: str, content: bytes, *, most: int) -> None:
    """Write a file at once, and remove the oldest of its folder if there are more than `most` of its kind."""
    _make_private(path.parent)
    with _partial(path, _signature(name, content) + content) as partial:
        os.replace(partial, path)
    _remove_old(path.parent, path.suffix, most)


def read_signed(path: Path, name: str) -> bytes:
    """The content of a file; raises `NotOurs` if another user may have written it, or if it is damaged."""
    foreign = next((each for each in (path.parent, path) if not _is_private(each)), None)
    if foreign is not None:
        raise NotOurs(f"is ignored: {foreign} belongs to, or can be changed by, another user; remove it")
    found = path.read_bytes()
    signature, content = found[:SIGNATURE], found[SIGNATURE:]
    if not hmac.compare_digest(signature, _signature(name, content)):
        raise NotOurs("was not written by this user (or is damaged) and is ignored; remove it")
    return content


@contextmanager
def _partial(path: Path, content: bytes) -> Iterator[Path]:
    """A complete file beside a path, to be moved there; what is left of it is removed."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} belongs to, or can be changed by, another user; remove it")


def _is_private(path: Path) -> bool:
    """Whether a path belongs to this user and no other user can write to it."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove_old(folder: Path, suffix: str, most: int) -> None:
    files = sorted(folder.glob(f"*{suffix}"), key=_written)
    left = [path for path in folder.glob(f".*{PARTIAL}") if _written(path) < time.time() - ABANDONED]
    for path in (*files[:-most], *left):
        path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run has removed it
        return 0.0


def _move_new(partial: Path, path: Path) -> None:
    """Give a file its name; raises `FileExistsError` if it exists and the file system has hard links."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        os.replace(partial, path)


def _signature(name: str, content: bytes) -> bytes:
    """Of the name as well: a file under the name of another is not valid."""
    return hmac.new(_key(), name.encode() + content, hashlib.sha256).digest()


def _key() -> bytes:
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with _partial(path, secrets.token_bytes(SIGNATURE)) as partial, suppress(FileExistsError):
            _move_new(partial, path)
    if not _is_private(path):
        raise PermissionError(f"{path} belongs to, or can be changed by, another user; remove it")
    key = path.read_bytes()
    if len(key) != SIGNATURE:
        raise ValueError(f"{path} is not a key: {len(key)} bytes instead of {SIGNATURE}; remove it")
    return key
