"""Progress, speed and remaining time of a training or an evaluation, from its recent steps."""

from __future__ import annotations

from collections import deque
from typing import Any

from .text import clock_time, rate

RECENT_SECONDS = 10.0
RECENT_STEPS = 10
"""The speed is that of the latest steps: as many as took ten seconds, and at least ten."""


class Pace:
    """Counts steps; time spent on something else (`pause_until`) is in the remaining time, but not in the speed."""

    def __init__(self, unit: str, done: int, total: int | None, now: float) -> None:
        self.unit, self.done, self.total = unit, done, total
        self.has_started = False
        self.latest = now
        """When the latest step ended."""
        self._paused = 0.0
        self._first = done
        self._records: deque[tuple[float, int]] = deque([(now, done)])

    def start(self, done: int, now: float) -> None:
        """Start counting after the first step, which compiles and fills caches and is not representative."""
        self.has_started = True
        self.done, self.latest, self._paused, self._first = done, now, 0.0, done
        self._records = deque([(now, done)])

    def advance(self, done: int, now: float) -> None:
        """Record the progress, and drop records that are not recent any more."""
        records, time = self._records, now - self._paused
        self.done, self.latest = done, now
        if done <= records[-1][1]:
            return
        records.append((time, done))
        while len(records) > 2 and time - records[1][0] >= RECENT_SECONDS and done - records[1][1] >= RECENT_STEPS:
            records.popleft()

    def pause_until(self, now: float) -> None:
        """Exclude the time since the latest step from the speed."""
        self._paused += now - self.latest
        self.latest = now

    @property
    def per_second(self) -> float:
        """Steps per second of the recent records; 0 before there are two."""
        (began, first), (ended, last) = self._records[0], self._records[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    def seconds_left(self) -> float | None:
        """The remaining steps at the recent speed, with the pauses that a step had on average."""
        finished = self.done - self._first
        if not self.total or finished <= 0 or self.per_second <= 0:
            return None
        return (1 / self.per_second + self._paused / finished) * max(self.total - self.done, 0)

    def position(self) -> str:
        return f"{self.done:,}/{self.total:,}" if self.total else f"{self.done:,}"

    def speed(self) -> str:
        left = self.seconds_left()
        return rate(self.per_second, self.unit) + ("" if left is None else f", {clock_time(left)} left")


def evaluation_pace(loader: Any, now: float) -> Pace:
    """The pace of an evaluation after its first batch; the total is known if the loader has a length."""
    try:
        total = len(loader)
    except (TypeError, NotImplementedError):
        total = None
    pace = Pace("batches", 0, total, now)
    pace.start(1, now)
    return pace
