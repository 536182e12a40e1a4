"""The lock of a URL: an object that names the owner, and one with its heartbeats.

Object stores have neither flock nor a rename, so two runs that start within the same second may both create the lock;
the later one keeps it, and the other one stops at its next heartbeat.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from .claim import Claim, decoded
from .lock_file import LOCK, UNKNOWN

BEAT = 15.0
"""Seconds between two heartbeats, each of which is a request to the store."""


class FoundObject:
    """The lock of a URL, as another run has left or holds it."""

    hold = UNKNOWN

    def __init__(self, lock: LockObject, claim: Claim | None) -> None:
        self._lock, self.claim = lock, claim
        self.sign: object = lock.last_beat()

    def age(self) -> float | None:
        return self._lock.seconds_since_beat()

    def is_released(self) -> bool | None:
        return None if self.claim is None else self.claim.has_ended()

    def close(self) -> None:
        """Nothing is held."""


class LockObject:
    """The lock of a URL; see `Lock` for the methods."""

    beat = BEAT
    is_local = False

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs = fs
        self._path = f"{folder.rstrip('/')}/{LOCK}"
        self._beats = f"{self._path}.beat"
        self._count = 0

    def find(self) -> FoundObject | None:
        content = self._content(self._path)
        return None if content is None else FoundObject(self, decoded(content))

    def create(self, claim: Claim) -> bool:
        if self._content(self._path) is not None:
            return False
        self.replace(claim)
        return True

    def replace(self, claim: Claim) -> None:
        self._fs.pipe_file(self._path, claim.encoded())
        self.touch()

    def read(self) -> Claim | None:
        content = self._content(self._path)
        claim = None if content is None else decoded(content)
        if content is not None and claim is None:
            raise OSError(f"{self._path} is incomplete")
        return claim

    def touch(self) -> None:
        # Not in the lock itself: between reading and writing it another run may have taken it.
        self._count += 1
        self._fs.pipe_file(self._beats, f"{self._count} {secrets.token_hex(4)}\n".encode())

    def remove(self) -> None:
        for path in (self._path, self._beats):
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def let_go(self) -> None:
        """Nothing is held."""

    def last_beat(self) -> bytes | None:
        """The content of the last heartbeat: different for each."""
        return self._content(self._beats)

    def seconds_since_beat(self) -> float | None:
        """Seconds since the last heartbeat by the clock of the store."""
        probe = f"{self._path}.{secrets.token_hex(6)}"
        try:
            self._fs.pipe_file(probe, b"loopwright")
            try:
                now, then = self._fs.modified(probe), self._fs.modified(self._beats)
            finally:
                self._fs.rm_file(probe)
        except (NotImplementedError, FileNotFoundError, KeyError, TypeError):  # not every store has times
            return None
        return max(0.0, float((now - then).total_seconds()))

    def _content(self, path: str) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
