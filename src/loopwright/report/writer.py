"""Writes the report of a run from a thread of its own, so that training does not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..notices import logger
from .data_file import write_data
from .document import document
from .folder import RunFolder
from .page import FILE, write_page

FIRST_SECONDS = 1.0
"""Time from the beginning of training to the first writing; a shorter run is written at its end only."""
DATA_SECONDS, PAGE_SECONDS = 3.0, 60.0
"""Least time between two writings of the data, and of the page with all data in it."""
COST_SHARE = 100
"""A writing is followed by a pause of at least so many times what it took of the processor."""
PATIENCE = 20.0
"""Seconds to wait for a writing in progress when training ends."""


class ReportWriter:
    """Keeps the report of an output folder up to date while a run trains."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder = folder
        self._run = RunFolder(folder, facts=facts)
        self._page_due = 0.0
        self._has_failed = False
        self._beside: Beside | None = Beside(self.write)

    def wake(self) -> None:
        """There are new numbers."""
        if self._beside is not None:
            self._beside.changed.set()

    def finish(self) -> None:
        """Write the report a last time, in the calling thread."""
        beside, self._beside = self._beside, None  # a finished writer can be copied with its trainer
        if beside is None or beside.end():
            self.write()
        else:
            logger.warning(f"{self.folder / FILE}: it takes too long to write, so the end of the run is missing in it")

    def write(self, *, with_page: bool = True) -> float:
        """Write the data, and the page if requested or due; returns the seconds of computing it took."""
        started = time.thread_time()
        try:
            found = document([self._run.read()])
            if with_page or time.monotonic() >= self._page_due:
                write_page(self.folder / FILE, found, follows=True)
                self._page_due = time.monotonic() + PAGE_SECONDS
            write_data(self.folder, found)
        except Exception as error:  # a report must not end a run: a full disk, or a mistake of this package
            if not self._has_failed:
                logger.warning(f"the report of {self.folder} cannot be written ({error}); training continues")
            self._has_failed = True
        return time.thread_time() - started


class Beside:
    """A thread that calls `write` after changes, with pauses."""

    def __init__(self, write: Callable[..., float]) -> None:
        self._write = write
        self.changed, self._stop = threading.Event(), threading.Event()
        self.changed.set()
        self._thread = threading.Thread(target=self._work, name="loopwright-report", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Stop; returns whether the thread has ended."""
        self._stop.set()
        self.changed.set()
        self._thread.join(PATIENCE)
        return not self._thread.is_alive()

    def _work(self) -> None:
        pause = FIRST_SECONDS
        while not self._stop.wait(pause):
            self.changed.wait()
            if self._stop.is_set():
                return
            self.changed.clear()
            pause = max(DATA_SECONDS, COST_SHARE * self._write(with_page=False))
