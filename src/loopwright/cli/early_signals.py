"""Signals before training: a command that loads model and data has nothing to save, and exits as if it had saved."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ..core.shutdown.lost_output import discard_lost_output
from ..core.shutdown.signals import STOPPED_AFTER_SAVING, WATCHED, restore_handlers, survives_terminal


class StoppedEarly(SystemExit):
    """A signal was received before training."""


@contextmanager
def stopped_early() -> Iterator[None]:
    """A context in which SIGTERM, SIGUSR1 and SIGHUP raise `StoppedEarly`; Ctrl-C has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[str] = []

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        restore_handlers(earlier)  # a second signal has its usual effect
        discard_lost_output()  # the signal may be that of a closed terminal
        received.append(signal.Signals(number).name)
        raise StoppedEarly(STOPPED_AFTER_SAVING)

    chosen = [each for each in WATCHED if each != signal.SIGINT and not survives_terminal(each)]
    earlier = {each: signal.getsignal(each) for each in chosen}
    try:
        for each in chosen:
            signal.signal(each, stop)
        yield
        if received:  # the exception was raised inside a library that discards all of them
            raise StoppedEarly(STOPPED_AFTER_SAVING)
    except StoppedEarly:
        print(f"{received[0]} received: stopped before training; the same command can be run again", file=sys.stderr)
        raise
    finally:
        restore_handlers(earlier)
