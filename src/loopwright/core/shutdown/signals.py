"""Signal handling: signals set a flag, and the loop reads it.

SIGTERM, SIGUSR1 and SIGHUP (the terminal was closed) make the run save its last finished update and exit with code 75.
The first Ctrl-C lets the update finish and then raises KeyboardInterrupt as usual. A second signal goes to the previous
handlers at once.
"""

from __future__ import annotations

import _thread
import mmap
import multiprocessing.synchronize
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ...notices import logger
from .interruption import interrupt
from .lost_output import discard_lost_output

STOPPED_AFTER_SAVING = 75
"""Exit code of a run that was stopped by a signal and can be resumed."""

SAVING = ("SIGTERM", "SIGUSR1", "SIGHUP")
WATCHED = tuple(
    getattr(signal, name)
    for name in (*SAVING, "SIGINT")
    if hasattr(signal, name)  # Windows has two of them
)


FORWARDED = "LOOPWRIGHT_FORWARDED"
"""Variable of a process whose parent forwards its signals: one that is sent to both is received twice."""
ECHO = 5.0
"""Seconds in which, under such a parent, a second signal is treated as a repetition of the first."""

SPREAD = 1.0
"""Seconds within which a signal to all processes of a run reaches each of them."""
LINGER = 60
"""Seconds a loader worker continues after a SIGTERM."""


def outlive_signals(worker: int) -> None:
    """In a loader worker: ignore a signal sent to all processes, so that the main process can finish and save.

    A launcher or scheduler signals whole process groups. The main process ends its workers when it exits; a worker that
    received SIGTERM and is still alive after a minute ends itself. One that its own loader ends exits at once.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, _linger)


def _linger(number: int, frame: FrameType | None) -> None:
    signal.alarm(LINGER)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":  # torch's loop of a worker
            # In a thread: the interrupted code may hold the lock of the event, and can release it only after this call.
            _thread.start_new_thread(_exit_if_ended, (frame.f_locals["done_event"],))
            return
        frame = frame.f_back


def _exit_if_ended(done: multiprocessing.synchronize.Event) -> None:
    """Exit if the loader has ended this worker: it sets the event before it sends SIGTERM."""
    if done.is_set():
        os._exit(0)


def restore_handlers(earlier: Mapping[int, Any]) -> None:
    """Set the handlers that signals had before; None is one that was not set by Python."""
    for number, handler in earlier.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class Interrupted(BaseException):
    """Raised after a signal to leave an evaluation or an unfinished update; never reaches the user."""


class SignalWatch:
    """While entered, records the first signal; a second one has its previous effect."""

    def __init__(self, *, enabled: bool = True, shared: bool = False) -> None:
        self.received: str | None = None
        self.chained: Callable[[], Any] = lambda: None
        """The previous handler, to be called after saving."""
        self.shared = shared
        """Whether a signal takes effect only once all ranks have been notified."""
        self.noted: str | None = None
        """The signal this process received, whether or not other ranks have been notified."""
        self._enabled = enabled
        self._earlier: dict[int, Any] = {}
        self._first = 0.0
        self._process = os.getpid()
        self._is_noted: bytearray | mmap.mmap = bytearray(1)
        """While this is entered, shared with forked processes: whether this process has received a signal."""

    @property
    def wants_save(self) -> bool:
        """Whether the run should save its last finished update and exit."""
        return self.received in SAVING

    def __enter__(self) -> SignalWatch:
        self.received, self.noted, self.chained = None, None, lambda: None
        self._process, self._is_noted = os.getpid(), mmap.mmap(-1, 1)
        # Python allows handlers in the main thread only.
        if self._enabled and threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.getsignal(number) for number in WATCHED if not survives_terminal(number)}
            for number in list(self._earlier):
                signal.signal(number, self._note)
            if self.noted is not None and not _is_launched():  # received between two of them
                self._restore()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._restore()
        self._is_noted = bytearray(1)
        if kind is None and self.noted is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        """The effect of a signal that was received too late to stop the run, which has finished."""
        if self.noted == "SIGINT":
            logger.warning("interrupted while training finished; the run is complete, and nothing is left to save")
            interrupt()
        logger.warning(f"{self.noted} was received while training finished; there is nothing left to save")
        self.chained()

    def _restore(self) -> None:
        restore_handlers(self._earlier)
        self._earlier = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._note_in_child(number)
            return
        self._is_noted[0] = 1
        if self.noted is not None:
            self._note_again(number)
            return
        discard_lost_output()  # the signal may be that of a closed terminal
        earlier = self._earlier.get(number)
        self.noted = signal.Signals(number).name
        if not self.shared:
            self.received = self.noted
        self._first = time.monotonic()
        if not _is_launched():
            self._restore()
        if self.noted == "SIGINT":
            logger.warning("interrupted: finishing this step first; interrupt again to stop now")
            return
        logger.warning(f"{self.noted} received: saving the last finished step and stopping; send it again to stop now")
        if callable(earlier):
            self.chained = lambda: earlier(number, frame)  # called after saving, because it may exit

    def _note_in_child(self, number: int) -> None:
        """In a process that the user's code has forked: only a signal to this process alone has its usual effect.

        One that the run has received too, because it was sent to all processes, is left to the run: it finishes its
        update, which may need this process.
        """
        end = time.monotonic() + SPREAD
        while not self._is_noted[0] and time.monotonic() < end:
            time.sleep(0.01)
        if self._is_noted[0] and os.getppid() == self._process:
            return
        self._restore()
        os.kill(os.getpid(), number)

    def _note_again(self, number: int) -> None:
        """Ignore a signal that a launcher repeats; after ECHO seconds, send it to the previous handlers."""
        if time.monotonic() - self._first < ECHO:
            return
        self._restore()
        os.kill(os.getpid(), number)


def survives_terminal(number: int) -> bool:
    """Whether the signal is that of a closed terminal, and `nohup` makes this process ignore it."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) == signal.SIG_IGN


def _is_launched() -> bool:
    """Whether a launcher or a search forwards signals to this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or FORWARDED in os.environ
