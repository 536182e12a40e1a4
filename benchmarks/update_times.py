"""The time of each update of a fixed number of updates, so that every arm is timed on the same samples."""

from __future__ import annotations

import fcntl
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from watch import Watch

FEWEST = 4
"""Updates that are timed even if they take longer than the window may."""


TURNS = "LOOPWRIGHT_TURNS"
"""Variable with the name of a folder of arms that get ready at the same time: one after the other is timed."""
QUIET_SECONDS = 1.0
"""Time for kernels that other arms have launched before they were stopped."""


class Turns:
    """Stops all other arms, with their workers and compilers, while an arm is timed.

    The folder has a file named after the process group of each arm, and a lock for the one that is timed.
    """

    def __init__(self, folder: str | None = None) -> None:
        name = folder or os.environ.get(TURNS)
        self.folder = Path(name) if name else None
        self._lock = open(self.folder / "lock", "a") if self.folder else None
        self.waited = 0.0

    def begin(self) -> None:
        """Wait for the turn, and stop the others."""
        if self._lock is None:
            return
        started = time.perf_counter()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.signal_others(signal.SIGSTOP)
        time.sleep(QUIET_SECONDS)
        self.waited += time.perf_counter() - started

    def end(self) -> None:
        """Let the others go on."""
        if self._lock is not None:
            self.signal_others(signal.SIGCONT)
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def signal_others(self, number: int) -> None:
        for name in os.listdir(self.folder):
            if name.isdigit() and int(name) != os.getpgrp():
                with suppress(ProcessLookupError):
                    os.killpg(int(name), number)

    @contextmanager
    def between(self) -> Iterator[bool]:
        """Whether no arm is timed now; none begins within the context."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def enter(self, group: int) -> None:
        """Add an arm."""
        assert self.folder is not None
        (self.folder / str(group)).touch()

    def leave(self, group: int) -> None:
        """Remove an arm; if it ended while it was timed, the others go on."""
        assert self.folder is not None
        (self.folder / str(group)).unlink()
        with self.between() as is_free:
            if is_free:
                self.signal_others(signal.SIGCONT)


@dataclass
class UpdateTimes(Watch):
    """Times `updates` updates after `warmup` of them; `seconds` ends the window early.

    On a GPU the ends of updates are events of the device, read after the run: nobody waits for them, and a host that
    runs ahead does not look fast.
    """

    marks: list[Any] = field(default_factory=list)
    """The end of the warm-up, and of every update after it."""
    turns: Turns = field(default_factory=Turns)

    def update_done(self) -> bool:
        self.done += 1
        if self.done in (1, self.warmup):
            self.wait()
        now = time.perf_counter() - self.turns.waited
        if self.done == 1:
            self.first = now
        if self.done < self.warmup:
            return False
        if self.done == self.warmup:
            self.turns.begin()
            self.borders.append((self.done, now))
        self.marks.append(self._mark(now))
        timed = self.done - self.warmup
        over = timed >= self.updates or (timed >= FEWEST and now - self.borders[0][1] >= self.seconds)
        if over:
            self.wait()
            self.borders.append((self.done, time.perf_counter() - self.turns.waited))
            self.turns.end()
        return over

    def _mark(self, now: float) -> Any:
        if self.device != "cuda":
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """Of each timed update."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        return [before.elapsed_time(after) for before, after in pairs]

    def median(self) -> float:
        return statistics.median(self.milliseconds())
