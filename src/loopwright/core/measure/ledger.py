"""The time ledger: the wall time of a run by what it was spent on, over all its starts.

At every moment exactly one part is measured, so the parts add up to the wall time. The loop only compares one number
with its own clock; the wait for data is read from the throughput meter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

UPDATES, DATA, COMPILING, PROVING = "updates", "data_wait", "compiling", "proving"
SAVING, EVALUATION, PREPARING = "saving", "evaluation", "preparing"
RESTARTS, LOST = "restarts", "lost_work"
PARTS = (UPDATES, DATA, COMPILING, PROVING, EVALUATION, SAVING, PREPARING, RESTARTS, LOST)
REPEATED = (UPDATES, DATA, COMPILING, PROVING, EVALUATION)
"""Work that is lost if a run returns to an earlier checkpoint."""

MOST_MARKS = 200
"""Checkpoints and starts that are recorded, the latest ones."""

Seconds = dict[str, float]


@dataclass
class Account:
    """The seconds of a run so far, and what they were at each checkpoint."""

    seconds: Seconds = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    saved: dict[int, Seconds] = field(default_factory=dict)
    """The seconds when the checkpoint of a step was saved."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Starts and returns to a checkpoint: `kind`, `step` and `time`."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def save(self, step: int) -> None:
        """Record the seconds of the checkpoint of a step."""
        self.saved[step] = dict(self.seconds)
        for old in sorted(self.saved)[:-MOST_MARKS]:
            del self.saved[old]

    def return_to(self, step: int) -> None:
        """Count the work since the checkpoint of this step as lost."""
        found = max((each for each in self.saved if each <= step), default=None)
        before: Mapping[str, float] = {} if found is None else self.saved[found]
        for part in REPEATED:
            lost = max(self.seconds[part] - before.get(part, 0.0), 0.0)
            self.seconds[part] -= lost
            self.seconds[LOST] += lost
        self.saved = {each: seconds for each, seconds in self.saved.items() if each <= step}

    def note(self, kind: str, step: int, now: float) -> None:
        """Record a start or a return."""
        self.starts = [*self.starts, {"kind": kind, "step": step, "time": now}][-MOST_MARKS:]


class Ledger:
    """Measures the parts of one call of `train()` and adds them to the account of its run."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, now: Callable[[], float] = time.time) -> None:
        self.account = Account()
        self.waited: Callable[[], float] = lambda: 0.0
        """Seconds that updates have waited for data in this call."""
        self._waited = 0.0
        self._clock, self._now = clock, now
        self._part, self._since = PREPARING, clock()

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Measure a part; a part inside it is not counted twice."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, part: str) -> str:
        """Measure another part from now on; returns the one before."""
        self.settle()
        before, self._part = self._part, part
        return before

    def move(self, part: str, seconds: float) -> None:
        """Count the latest seconds as another part: it is known only afterwards what they were spent on."""
        account = self.settle()
        moved = min(seconds, account.seconds[self._part])
        account.seconds[self._part] -= moved
        account.seconds[part] += moved

    def settle(self) -> Account:
        """Add the time up to now."""
        now, waited, seconds = self._clock(), self.waited(), self.account.seconds
        seconds[self._part] += now - self._since
        self._since = now
        seconds[DATA] += waited - self._waited
        seconds[UPDATES] -= waited - self._waited
        self._waited = waited
        return self.account

    def begin(self, earlier: Account | None, *, step: int, away: float, waited: Callable[[], float]) -> None:
        """Everything is ready for the first update: continue the account of earlier starts, if there were any.

        `away` is the time from the last sign of the earlier start to the beginning of this call.
        """
        self.settle()
        if earlier is not None:
            ready = self.account.total
            self.account = earlier
            self.account.return_to(step)
            self.account.seconds[RESTARTS] += max(away, 0.0) + ready
        self.account.note("start" if earlier is None else "resume", step, self._now())
        self.waited = waited
        self._waited = waited()
        self._part = UPDATES

    def save(self, step: int) -> None:
        """Record the checkpoint of a step."""
        self.settle().save(step)

    def roll_back(self, step: int) -> None:
        """The weights are those of the checkpoint of an earlier step again."""
        self.settle().return_to(step)
        self.account.note("rollback", step, self._now())
