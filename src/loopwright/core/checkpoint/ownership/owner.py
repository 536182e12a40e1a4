"""The owner of an output folder: one run at a time writes into it.

A run takes the folder before it reads or writes anything in it, sends heartbeats while it trains, and releases the
folder when it ends. A run that has lost the folder writes nothing more into it and stops.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from ....errors import OwnerError
from ....notices import logger
from .claim import Claim, own_claim
from .lock_file import FREE, HELD, UNKNOWN, FoundLock, Lock

LIMIT = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
GRACE = 3.0
"""Seconds to wait for an owner on this machine, which may be about to end."""
POLL = 0.1
SETTLE = 0.2
"""Seconds after which a lock that was written without flock is read again: the last of several runs keeps it."""

Pause = Callable[[float], None]
"""Waits so many seconds; raises an exception if the run is to stop."""


@dataclass
class Watch:
    """The lock of another owner over time."""

    started: float
    token: str | None = None
    sign: object = None

    def has_moved(self, found: FoundLock) -> bool:
        """Whether there was a heartbeat since the first look."""
        token = found.claim.token if found.claim else ""
        if token != self.token:
            self.token, self.sign, self.started = token, found.sign, time.monotonic()
        return found.sign != self.sign

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Owner:
    """The right of this run to write into its output folder."""

    def __init__(self, lock: Lock, place: str, *, token: str | None = None) -> None:
        self._lock, self._place = lock, place
        self.claim = own_claim(token or secrets.token_hex(8))
        self.on_loss: Callable[[OwnerError], None] = lambda error: None
        """Called in another thread when the folder was lost."""
        self.has_seized = False
        """Whether the folder was taken from a living owner."""
        self._is_active = False
        self._is_shared = False
        """Whether another rank of this run holds the lock."""
        self._lost: str | None = None
        self._writers = 0
        self._state = threading.Condition()
        self._lock_use = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- taking -----------------------------------------------------------------------------------------------------

    def take(self, *, take_over: bool = False, pause: Pause = time.sleep) -> None:
        """Become the owner; raises `OwnerError` if another run is."""
        watch = Watch(time.monotonic())
        try:
            while not self._attempt(watch, take_over, pause):
                pause(POLL)
        except OSError as error:
            logger.warning(
                f"{self._place} cannot be locked ({error}); nothing prevents another run from using it at the same time"
            )
            return
        except BaseException:  # a signal may arrive after the lock was replaced
            self._give_up()
            raise
        self._is_active = True
        if not self._is_shared:
            self._thread = threading.Thread(target=self._send_heartbeats, name="owner", daemon=True)
            self._thread.start()

    def _attempt(self, watch: Watch, take_over: bool, pause: Pause) -> bool:
        found = self._lock.find()
        if found is None:
            return self._lock.create(self.claim) and self._is_settled(pause, is_held=self._lock.is_local)
        with closing(found):
            if found.claim is not None and found.claim.token == self.claim.token:
                self._is_shared = True
                return True
            if _is_dead(found, watch):
                self._lock.replace(self.claim)
                is_here = found.claim is None or found.claim.is_here()
                return self._is_settled(pause, is_held=found.hold == FREE and is_here)
            if take_over:
                self._seize(found, pause)
            elif _is_alive(found, watch):
                self._refuse(found)
            else:
                return False
        return self._is_own()

    def _is_settled(self, pause: Pause, *, is_held: bool) -> bool:
        """Whether this run keeps the lock it has written; at once if flock kept other runs from writing it."""
        if not is_held:
            pause(SETTLE)
        return self._is_own()

    def _give_up(self) -> None:
        """Remove the lock if it was taken already."""
        with suppress(OSError):
            if self._is_own():
                self._lock.remove()

    def _is_own(self) -> bool:
        """Whether the lock holds this claim: without flock another run may have replaced it in the same moment."""
        claim = self._lock.read()
        return claim is not None and claim.token == self.claim.token

    def _seize(self, found: FoundLock, pause: Pause) -> None:
        """Replace the claim of a living owner, and wait until it has noticed."""
        who = found.claim.name if found.claim else "an unknown process"
        logger.warning(f"taking {self._place} over from {who}; waiting until that run has stopped writing")
        self._lock.replace(self.claim)
        self.has_seized = True
        started = time.monotonic()
        while (waited := time.monotonic() - started) < LIMIT:
            released = found.is_released()
            if released or (released is None and waited > 2 * self._lock.beat + 1):
                return
            pause(POLL)
        logger.warning(f"{who} does not respond; it will find out that it has lost {self._place} when it continues")

    def _refuse(self, found: FoundLock) -> NoReturn:
        claim, age = found.claim, None
        with suppress(OSError):
            age = found.age()
        who = "by a process that left no name" if claim is None else f"by {claim.name}, since {claim.since}"
        sign = "" if age is None else f", last sign of life {age:.0f} s ago"
        raise OwnerError(
            f"{self._place} is in use {who}{sign}. Choose another output_dir, wait until that run has ended, or stop "
            "it with take_over=True (`loopwright launch --take-over`)"
        )

    # ---- while the run owns it --------------------------------------------------------------------------------------

    def name_run(self, run: str | None) -> None:
        """Add the id of the run to the lock."""
        self.claim = replace(self.claim, run=run)
        if self._is_active and not self._is_shared:
            with suppress(OSError), self._lock_use:
                if self._is_own():
                    self._lock.replace(self.claim)

    def check(self, *, from_lock: bool = True) -> None:
        """Raise `OwnerError` if another run has taken the folder; `from_lock` reads the lock, not the last result."""
        if not self._is_active or os.getpid() != self.claim.pid:
            return
        if self._lost is None and from_lock:
            # What cannot be read now is not lost: the write that follows reports the problem, if it remains.
            with suppress(OSError):
                self._compare(self._lock.read())
        if self._lost is not None:
            raise OwnerError(self._lost)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context for writing into the folder; another run that takes over waits until it is left."""
        with self._state:
            self._writers += 1
        try:
            self.check(from_lock=self._lock.is_local)
            yield
        finally:
            with self._state:
                self._writers -= 1
                self._state.notify_all()

    def release(self) -> None:
        """Give the folder back; nothing of the lock remains."""
        if not self._is_active or os.getpid() != self.claim.pid:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join(self._lock.beat + 1)
        with suppress(OwnerError):
            self.check()
        self._is_active = False
        with suppress(OSError), self._lock_use:
            if self._lost is None and not self._is_shared:
                self._lock.remove()
            else:
                self._lock.let_go()

    def _compare(self, current: Claim | None) -> None:
        """Compare the lock with the claim of this run."""
        if current is None:  # deleted by the user, or with the folder
            with self._lock_use:
                if not self._is_shared and self._is_active:
                    self._lock.create(self.claim)
        elif current.token != self.claim.token:
            self._lost = _loss(self._place, current)
            self.on_loss(OwnerError(self._lost))

    def _send_heartbeats(self) -> None:
        while not self._over.wait(self._lock.beat):
            try:
                self.check()
                with self._lock_use:
                    self._lock.touch()
            except OwnerError:
                break
            except Exception:  # a store may raise any error; the next heartbeat tries again
                logger.debug(f"no heartbeat in {self._place}", exc_info=True)
        with self._state:
            while self._lost is not None and self._writers and not self._over.is_set():
                self._state.wait(POLL)
        if self._lost is not None:
            with self._lock_use:
                self._lock.let_go()


def _is_dead(found: FoundLock, watch: Watch) -> bool:
    """Whether the owner has ended without releasing the lock."""
    claim = found.claim
    if claim is None or claim.is_here():
        if found.hold == FREE:
            return True
        if claim is not None and claim.has_ended():
            # Held although its process has ended: by another run that is taking it now, or by an orphaned child.
            return found.hold == UNKNOWN or watch.seconds > GRACE
        if claim is not None and (found.hold != UNKNOWN or claim.has_ended() is False):
            return False
    # On another machine: only its heartbeats show that it lives.
    if watch.has_moved(found):
        return False
    age = found.age()
    return watch.seconds > LIMIT or (age is not None and age > LIMIT)


def _is_alive(found: FoundLock, watch: Watch) -> bool:
    """Whether the owner is known to live; False as long as that is not decided."""
    claim = found.claim
    if claim is not None and claim.is_here():
        ended = claim.has_ended()
        if ended is False or (ended is None and found.hold == HELD):
            return watch.seconds > GRACE
    return watch.has_moved(found)


def _loss(place: str, by: Claim) -> str:
    return (
        f"{place} was taken over by {by.name} at {by.since}, so this run has stopped and writes nothing more into it. "
        "Choose another output_dir to run both"
    )
