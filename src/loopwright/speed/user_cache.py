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
from pathlib import Path

SIGNATURE = 32


class NotOurs(Exception):
    """A file that must not be read; the message gives the reason."""


def home() -> Path:
    """The folder of this library in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright"


def key_file() -> Path:
    """The user's key."""
    return home() / "compile_cache.key"


def write_signed(path: Path, name: str, content: bytes, *, most: int) -> None:
    """Write a file at once, and remove the oldest of its folder if there are more than `most` of its kind."""
    _make_private(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(_signature(name, content) + content)
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
    for path in files[:-most]:
        path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run has removed it
        return 0.0


def _signature(name: str, content: bytes) -> bytes:
    """Of the name as well: a file under the name of another is not valid."""
    return hmac.new(_key(), name.encode() + content, hashlib.sha256).digest()


def _key() -> bytes:
    path = key_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SIGNATURE))
    except FileExistsError:
        pass
    if not _is_private(path):
        raise PermissionError(f"{path} belongs to, or can be changed by, another user; remove it")
    key = path.read_bytes()
    if len(key) != SIGNATURE:
        raise ValueError(f"{path} is not a key: {len(key)} bytes instead of {SIGNATURE}; remove it")
    return key
