"""Throughput between two log points: counters and a wall clock, without a device synchronization."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

Clock = Callable[[], float]


@dataclass(frozen=True)
class Interval:
    """Counts between two log points; NaN for an unknown count."""

    seconds: float = 0.0
    """Wall time, without evaluations and saves."""
    waited: float = 0.0
    """Seconds of it spent waiting for the next batch."""
    updates: int = 0
    samples: int = 0
    micro_batches: int = 0
    real_tokens: float = 0.0
    computed_tokens: float = 0.0
    squared_lengths: float = 0.0
    recompiles: float = 0.0

    def __add__(self, other: Interval) -> Interval:
        return Interval(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class ThroughputMeter:
    """Counts the work of updates and computes throughput at log points.

    The loop updates the public counters directly, without calls, because it does so in every update. A log point reads
    the loss and so synchronizes with the device; from one log point to the next, the wall clock is accurate on GPUs
    too.
    """

    def __init__(
        self,
        *,
        clock: Clock = time.perf_counter,
        peak_operations: float | None = None,
        sustained_operations: float | None = None,
        operations: Callable[[Interval], float | None] | None = None,
        peak_memory: Callable[[], float | None] | None = None,
        recompiles: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock = clock
        self._peak_operations, self._sustained_operations = peak_operations, sustained_operations
        self._operations = operations
        self._peak_memory, self._recompiles = peak_memory, recompiles
        self._recompiled = _or_nan(recompiles)
        self.last_wait = 0.0
        """Seconds the loop waited for the batches of the latest update."""
        self._waited_before = self.waited = 0.0
        self._first: Interval | None = None
        self._later: Interval | None = None
        self._paused: float | None = None
        self._since = clock()
        self._clear()

    def all_waited(self) -> float:
        """Seconds the loop waited for batches since the meter was made."""
        return self._waited_before + self.waited

    def _clear(self) -> None:
        self._waited_before += self.waited
        self.waited = 0.0
        self.updates = self.samples = self.micro_batches = 0
        self.real_tokens: Any = 0
        """May become a host tensor, which is read at the end of the interval."""
        self.computed_tokens: Any = 0
        self.squared_lengths: Any = 0
        self._left_out = 0.0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude the time inside from the time of updates."""
        if self._paused is not None:
            yield
            return
        self._paused = self._clock()
        try:
            yield
        finally:
            self._left_out += self._clock() - self._paused
            self._paused = None

    def read(self) -> dict[str, float]:
        """The numbers since the last reading; starts a new interval."""
        interval = self._close()
        return {} if interval is None else self.numbers(interval)

    def whole(self) -> dict[str, float]:
        """The numbers of the run so far, without its first interval (warm-up) if there are others."""
        interval = self._later or self._first
        return {} if interval is None else self.numbers(interval)

    def numbers(self, interval: Interval) -> dict[str, float]:
        """The numbers of an interval by name, without unknown ones."""
        seconds = interval.seconds
        if seconds <= 0 or not interval.updates:
            return {}
        found: dict[str, float | None] = {
            "tokens_per_second": interval.real_tokens / seconds,
            "computed_tokens_per_second": interval.computed_tokens / seconds,
            "samples_per_second": interval.samples / seconds,
            "steps_per_second": interval.updates / seconds,
            "data_wait_share": min(interval.waited / seconds, 1.0),
            "useful_token_share": _ratio(interval.real_tokens, interval.computed_tokens),
            "mfu": self._utilization(interval, self._peak_operations),
            "mfu_of_matmul": self._utilization(interval, self._sustained_operations),
            "peak_memory_gib": _or_nan(self._peak_memory),
            "recompiles": interval.recompiles,
        }
        return {name: _rounded(value) for name, value in found.items() if value is not None and math.isfinite(value)}

    def _utilization(self, interval: Interval, peak: float | None) -> float | None:
        """Model FLOPs for the real tokens, as a fraction of this many per second."""
        if peak is None or self._operations is None:
            return None
        operations = self._operations(interval)
        return None if operations is None else operations / interval.seconds / peak

    def _close(self) -> Interval | None:
        """The interval up to now; None if no update ended in it."""
        now = self._clock()
        if not self.updates:
            return None
        if self._paused is not None:
            self._left_out += now - self._paused
            self._paused = now
        recompiled = _or_nan(self._recompiles)
        interval = Interval(
            seconds=now - self._since - self._left_out,
            waited=self.waited,
            updates=self.updates,
            samples=self.samples,
            micro_batches=self.micro_batches,
            real_tokens=float(self.real_tokens),
            computed_tokens=float(self.computed_tokens),
            squared_lengths=float(self.squared_lengths),
            recompiles=recompiled - (self._recompiled if math.isfinite(self._recompiled) else 0),
        )
        self._recompiled, self._since = recompiled, now
        self._clear()
        self._remember(interval)
        return interval

    def _remember(self, interval: Interval) -> None:
        if self._first is None:
            self._first = interval
        else:
            self._later = interval if self._later is None else self._later + interval


def _or_nan(ask: Callable[[], float | None] | None) -> float:
    value = None if ask is None else ask()
    return math.nan if value is None else float(value)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float) -> float:
    """Rounded to five digits; more would be noise."""
    return float(f"{value:.5g}")
