"""Ending the processes of trials with the search: each saves and exits, and is resumed by the next search."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from ..core.shutdown.lost_output import discard_lost_output
from ..core.shutdown.parent import TIME_TO_SAVE
from ..core.shutdown.signals import STOPPED_AFTER_SAVING, WATCHED, restore_handlers, survives_terminal
from ..notices import logger


class Stoppable:
    """A process that saves and exits after a signal; a second signal would end it at once."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._is_stopping = False

    def request_stop(self) -> None:
        """Let the process save and exit."""
        if not self._is_stopping and self.process.poll() is None:
            self._is_stopping = True
            self.process.send_signal(signal.SIGTERM)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """A context after which the process has ended."""
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Let the process save and exit; kill it, with all it has started, if it does not."""
        self.request_stop()
        try:
            self.process.wait(TIME_TO_SAVE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Running:
    """The processes of the trials that run now; several threads may each have one."""

    def __init__(self) -> None:
        self._processes: set[Stoppable] = set()

    @contextmanager
    def holding(self, process: Stoppable) -> Iterator[None]:
        """A context in which a process runs."""
        self._processes.add(process)
        try:
            yield
        finally:
            self._processes.discard(process)

    def request_stop(self) -> None:
        """Let all of them save and exit."""
        for each in list(self._processes):
            each.request_stop()


@contextmanager
def stopped_by_signals(running: Running) -> Iterator[None]:
    """A context in which signals let the trials save; all but Ctrl-C end the search with exit code 75."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        restore_handlers(earlier)  # a second signal has its usual effect
        discard_lost_output()  # the signal may be that of a closed terminal
        name = signal.Signals(number).name
        logger.warning(f"{name} received: the trials save and stop; the same command continues the search")
        running.request_stop()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(STOPPED_AFTER_SAVING)

    earlier = {each: signal.getsignal(each) for each in WATCHED if not survives_terminal(each)}
    for each in earlier:
        signal.signal(each, leave)
    try:
        yield
    finally:
        restore_handlers(earlier)
