"""The lock of a local folder: a file that names the owner and that its process holds with flock.

The system releases a lock of flock when its process ends, however it ends. Where flock is not supported, or does not
reach other machines (some network file systems), the time of the last change of the file shows that the owner lives.
"""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from .claim import Claim, decoded, own_claim

LOCK = "run.lock"
BEAT = 2.0
"""Seconds between two heartbeats."""
OLD = 60.0
"""Seconds after which a temporary file is a leftover."""
MOST = 1 << 16

FREE, HELD, UNKNOWN = "free", "held", "unknown"

_descriptors: set[int] = set()
"""Open lock files of this process; a child process closes them, since it would keep the locks."""
_is_registered = False


class FoundLock(Protocol):
    """A lock that exists, as another run has left or holds it."""

    claim: Claim | None
    """The owner; None if the file is incomplete."""
    hold: str
    """Whether a process holds it: free, held or unknown. A free one is held by this process until it is closed."""
    sign: object
    """Changes with each heartbeat of the owner."""

    def age(self) -> float | None:
        """Seconds since the last heartbeat by the clock of the file system; None if it has no such clock."""

    def is_released(self) -> bool | None:
        """Whether the owner has released it; None if that cannot be determined."""

    def close(self) -> None: ...


class Lock(Protocol):
    """The lock of an output folder or URL."""

    beat: float
    """Seconds between two heartbeats."""
    is_local: bool
    """Whether reading it takes no request over a network."""

    def find(self) -> FoundLock | None:
        """The existing lock, or None."""

    def create(self, claim: Claim) -> bool:
        """Create the lock; False if one exists."""

    def replace(self, claim: Claim) -> None:
        """Put this claim in the place of the existing one."""

    def read(self) -> Claim | None:
        """The current claim, or None if there is none; raises OSError if it cannot be read now."""

    def touch(self) -> None:
        """Send a heartbeat."""

    def remove(self) -> None:
        """Remove the lock, which belongs to this run."""

    def let_go(self) -> None:
        """Release the lock without removing it, since it belongs to another run now."""


class FoundFile:
    """A lock file that exists."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.hold = _hold(descriptor)
        self.claim = decoded(os.pread(descriptor, MOST, 0))
        self.sign: object = os.fstat(descriptor).st_mtime_ns

    def is_current(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def age(self) -> float | None:
        # Both times are those of the file system, so the clocks of the machines do not matter.
        with _temporary(self._path) as probe:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            now = os.stat(probe).st_mtime
        return max(0.0, now - os.fstat(self._descriptor).st_mtime)

    def is_released(self) -> bool | None:
        if self.hold != HELD:
            return None if self.claim is None else self.claim.has_ended()
        return _hold(self._descriptor) == FREE or (self.claim is not None and self.claim.has_ended() is True)

    def close(self) -> None:
        _close(self._descriptor)


class LockFile:
    """The lock of a local folder; see `Lock` for the methods."""

    beat = BEAT
    is_local = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor: int | None = None

    def find(self) -> FoundFile | None:
        while True:
            try:
                descriptor = _open(self.path)
            except FileNotFoundError as error:
                if self.path.is_symlink():  # it cannot be created either
                    raise OSError(errno.ELOOP, f"{self.path} is a link to a file that does not exist") from error
                return None
            try:
                found = FoundFile(self.path, descriptor)
            except OSError:
                _close(descriptor)
                raise
            if found.is_current():
                return found
            found.close()

    def create(self, claim: Claim) -> bool:
        error = self._put(claim, os.link)
        if error is None:
            return True
        if isinstance(error, FileNotFoundError) and not self.path.parent.is_dir():
            raise error
        if isinstance(error, (FileExistsError, FileNotFoundError)):  # another run has it, or removed the temporary file
            return False
        return self._create_in_place(claim)  # a file system without links

    def _create_in_place(self, claim: Claim) -> bool:
        try:
            self._keep(_write(self.path, claim))
        except FileExistsError:
            return False
        return True

    def replace(self, claim: Claim) -> None:
        error = self._put(claim, os.replace)
        if error is not None:
            raise error

    def _put(self, claim: Claim, place: Callable[[Path, Path], None]) -> OSError | None:
        """Write the claim to a temporary file and give it its place; returns the error if that fails."""
        with _temporary(self.path) as temporary:
            descriptor = _write(temporary, claim)
            try:
                place(temporary, self.path)
            except OSError as error:
                _close(descriptor)
                return error
        self._keep(descriptor)
        return None

    def read(self) -> Claim | None:
        try:
            descriptor = _open(self.path)
        except FileNotFoundError:
            return None
        try:
            claim = decoded(os.pread(descriptor, MOST, 0))
        finally:
            _close(descriptor)
        if claim is None:
            raise OSError(f"{self.path} is incomplete")
        return claim

    def touch(self) -> None:
        if self._descriptor is not None and os.utime in os.supports_fd:
            os.utime(self._descriptor)
        else:
            os.utime(self.path)

    def remove(self) -> None:
        with suppress(OSError):
            self._remove_leftovers()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self.let_go()

    def let_go(self) -> None:
        if self._descriptor is not None:
            _close(self._descriptor)
            self._descriptor = None

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of runs that were killed while they took the folder."""
        now = self.path.stat().st_mtime
        for each in self.path.parent.glob(f".{LOCK}.*"):
            if now - each.stat().st_mtime > OLD or _is_of_dead_process(each):
                each.unlink(missing_ok=True)

    def _keep(self, descriptor: int) -> None:
        self.let_go()
        self._descriptor = descriptor


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path beside the lock file for a temporary file, which is removed at exit."""
    temporary = path.with_name(f".{path.name}.{_maker()}{secrets.token_hex(6)}")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _maker() -> str:
    """Machine, container and process, for the name of a temporary file: it may be killed before it writes."""
    claim = own_claim("")
    place = zlib.crc32(f"{claim.boot or claim.host} {claim.space}".encode())
    return f"{place:08x}-{claim.pid}-"


def _is_of_dead_process(path: Path) -> bool:
    """Whether the process that has made a temporary file has certainly ended."""
    with open(path, "rb") as file:
        claim = decoded(file.read(MOST))
    if claim is not None:
        return claim.has_ended() is True
    here = _maker().partition("-")[0]
    place, _, rest = path.name.removeprefix(f".{LOCK}.").partition("-")
    number = rest.partition("-")[0]
    if place != here or not number.isdecimal():
        return False
    return replace(own_claim(""), pid=int(number), born=None).has_ended() is True


def _write(path: Path, claim: Claim) -> int:
    """A new file with the claim, held by this process."""
    descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, claim.encoded())
        _hold(descriptor)
    except OSError:
        _close(descriptor)
        raise
    return descriptor


def _open(path: Path) -> int:
    try:
        return _opened(path, os.O_RDWR)  # network file systems lock only what can be written
    except PermissionError:
        return _opened(path, os.O_RDONLY)


def _opened(path: Path, flags: int) -> int:
    global _is_registered
    if not _is_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
        _is_registered = True
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    _descriptors.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    """In a child process: close the lock files of its parent, which keeps its locks."""
    while _descriptors:
        with suppress(OSError):
            os.close(_descriptors.pop())


def _hold(descriptor: int) -> str:
    """Lock an open file without waiting."""
    try:
        import fcntl
    except ImportError:
        return UNKNOWN
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return HELD
    except (OSError, AttributeError):  # not supported by this file system
        return UNKNOWN
    return FREE
