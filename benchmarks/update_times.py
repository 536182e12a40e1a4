"""The time of each update of a fixed number of updates, so that every arm is timed on the same samples."""

from __future__ import annotations

import fcntl
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from watch import Watch

FEWEST = 4
"""Updates that are timed even if they take longer than the window may."""


TURNS = "LOOPWRIGHT_TURNS"
"""Variable with the name of a file that arms share which get ready at the same time: one after the other is timed."""
QUIET_SECONDS = 1.0
"""Time for the updates of others that are under way when an arm's turn begins."""


class Turns:
    """Keeps arms from computing while another one is timed."""

    def __init__(self) -> None:
        name = os.environ.get(TURNS)
        self._file = open(name, "a") if name else None
        self.waited = 0.0

    def pause(self, kind: int = fcntl.LOCK_SH) -> None:
        """Wait while another arm is timed."""
        if self._file is None:
            return
        started = time.perf_counter()
        fcntl.flock(self._file, kind)
        if kind == fcntl.LOCK_SH:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        else:
            time.sleep(QUIET_SECONDS)
        self.waited += time.perf_counter() - started

    def begin(self) -> None:
        self.pause(fcntl.LOCK_EX)

    def end(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)


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
            self.turns.pause()
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
