"""Noticing that somebody wants the run to stop: signals set a flag, and the loop looks at it.

SIGTERM and SIGUSR1 make the run save its last finished update and exit with code 75. The first Ctrl-C lets the update
finish and then raises KeyboardInterrupt as usual. A second signal does at once what it would have done without us.
"""

from __future__ import annotations

import signal
import threading
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


class Interrupted(BaseException):
    """Leaves an evaluation or an unfinished update after a signal; never reaches the user."""


class SignalWatch:
    """While entered, notes the first signal and lets a second one do what it did before."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.received: str | None = None
        self.chained: Callable[[], Any] = lambda: None
        """The handler that was there before ours, still to be called."""
        self.shared = False
        """Whether a signal counts only once all processes of the run have heard of it."""
        self.noted: str | None = None
        """The signal this process got, whether the others know of it or not."""
        self._enabled = enabled
        self._earlier: dict[int, Any] = {}

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
        earlier = self._earlier.get(number)
        self.noted = signal.Signals(number).name
        if not self.shared:
            self.received = self.noted
        self._restore()
        if self.noted == "SIGINT":
            logger.warning("interrupted: this update is finished first; again to stop now")
            return
        logger.warning(f"{self.noted} received: the run saves its last finished update and stops; again to stop now")
        if callable(earlier):
            self.chained = lambda: earlier(number, frame)  # called after saving: it may well leave
