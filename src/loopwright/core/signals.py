"""Signal handling: signals set a flag, and the loop reads it.

SIGTERM and SIGUSR1 make the run save its last finished update and exit with code 75. The first Ctrl-C lets the update
finish and then raises KeyboardInterrupt as usual. A second signal does at once what it would have done without us.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..notices import logger

STOPPED_AFTER_SAVING = 75
"""Exit code of a run that a signal stopped and that can go on when it is started again."""

SAVING = ("SIGTERM", "SIGUSR1")
WATCHED = tuple(
    getattr(signal, name) for name in (*SAVING, "SIGINT") if hasattr(signal, name)  # SIGUSR1: not on Windows
)


ECHO = 5.0
"""Seconds in which a second signal under a launcher is taken for the first one again."""

LINGER = 60
"""Seconds a loader worker lives on after a SIGTERM."""


def outlive_signals(worker: int) -> None:
    """In a loader worker: let a signal to all processes pass, since the update it loads for is finished and saved.

    A launcher or scheduler signals whole process groups. The main process ends its workers when it leaves; one that
    got a signal to stop and is not ended within a minute ends by itself.
    """
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _linger)


def _linger(number: int, frame: FrameType | None) -> None:
    signal.alarm(LINGER)


class Interrupted(BaseException):
    """Leaves an evaluation or an unfinished update after a signal; never reaches the user."""


class SignalWatch:
    """While entered, notes the first signal and lets a second one do what it did before."""

    def __init__(self, *, enabled: bool = True, shared: bool = False) -> None:
        self.received: str | None = None
        self.chained: Callable[[], Any] = lambda: None
        """The handler that was there before ours, still to be called."""
        self.shared = shared
        """Whether a signal counts only once all processes of the run have heard of it."""
        self.noted: str | None = None
        """The signal this process got, whether the others know of it or not."""
        self._enabled = enabled
        self._earlier: dict[int, Any] = {}
        self._first = 0.0

    @property
    def wants_save(self) -> bool:
        """Whether the run should save its last finished update and leave."""
        return self.received in SAVING

    def __enter__(self) -> SignalWatch:
        self.received, self.noted, self.chained = None, None, lambda: None
        # Python allows handlers in the main thread only.
        if self._enabled and threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._earlier = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            self._note_again(number)
            return
        earlier = self._earlier.get(number)
        self.noted = signal.Signals(number).name
        if not self.shared:
            self.received = self.noted
        self._first = time.monotonic()
        if not _is_launched():
            self._restore()
        if self.noted == "SIGINT":
            logger.warning("interrupted: finishing this update first; interrupt again to stop now")
            return
        logger.warning(
            f"{self.noted} received: saving the last finished update and stopping; send it again to stop now"
        )
        if callable(earlier):
            self.chained = lambda: earlier(number, frame)  # called after saving: it may well leave

    def _note_again(self, number: int) -> None:
        """A scheduler signals every process of a job, and a launcher passes on what it got: that is one signal."""
        if time.monotonic() - self._first < ECHO:
            return
        self._restore()
        os.kill(os.getpid(), number)


def _is_launched() -> bool:
    """Whether an agent above this process passes signals on to it."""
    return "TORCHELASTIC_RUN_ID" in os.environ
