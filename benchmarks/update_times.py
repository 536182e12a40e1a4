"""The time of each update of a fixed number of updates, so that every arm is timed on the same samples."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from watch import Watch

FEWEST = 4
"""Updates that are timed even if they take longer than the window may."""


@dataclass
class UpdateTimes(Watch):
    """Times `updates` updates after `warmup` of them; `seconds` ends the window early.

    On a GPU the ends of updates are events of the device, read after the run: nobody waits for them, and a host that
    runs ahead does not look fast.
    """

    marks: list[Any] = field(default_factory=list)
    """The end of the warm-up, and of every update after it."""

    def update_done(self) -> bool:
        self.done += 1
        if self.done in (1, self.warmup):
            self.wait()
        now = time.perf_counter()
        if self.done == 1:
            self.first = now
        if self.done == self.warmup:
            self.borders.append((self.done, now))
        if self.done < self.warmup:
            return False
        self.marks.append(self._mark(now))
        timed = self.done - self.warmup
        over = timed >= self.updates or (timed >= FEWEST and now - self.borders[0][1] >= self.seconds)
        if over:
            self.wait()
            self.borders.append((self.done, time.perf_counter()))
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
