"""Time, loss and memory of a run, seen from the end of each update; the device is waited for at borders only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

QUARTERS = 4


@dataclass
class Watch:
    """Lets a run warm up, times it, and says when it is long enough.

    The warm-up ends after `warmup` updates and `warm_seconds` from the end of the first one, whichever is later; the
    window ends after `seconds` and `updates`, at a multiple of `cycle` updates (a sampler that sorts its samples has to
    be seen through one round of lengths).
    """

    device: str
    warmup: int = 3
    warm_seconds: float = 0.0
    seconds: float = 0.0
    updates: int = 1
    cycle: int = 1
    clock: Callable[[], float] = time.perf_counter
    """What is read at borders; `time.process_time` leaves out the time in which other processes had the processor."""
    done: int = 0
    first: float = 0.0
    begun: float = 0.0
    borders: list[tuple[int, float]] = field(default_factory=list)
    """Updates done and the time, at the window's start, at its quarters, and at its end."""
    losses: list[Any] = field(default_factory=list)
    slowest: float = 0.0
    _last: float = 0.0

    def begin(self) -> None:
        self.wait()
        self.begun = self._last = self.clock()
        if not self.warmup:
            self.borders.append((0, self.begun))

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def update_done(self) -> bool:
        """Whether the run has been watched long enough."""
        self.done += 1
        if self.done == 1 or not self.borders:
            self.wait()
        now = self.clock()
        if self.done == 1:
            self.first = now
        if self.borders:
            self.slowest, self._last = max(self.slowest, now - self._last), now
            return self._timing(now)
        self._last = now
        if self.done >= self.warmup and now - self.first >= self.warm_seconds:
            self.borders.append((self.done, now))
        return False

    def _timing(self, now: float) -> bool:
        opened, since = self.borders[0]
        count = self.done - opened
        over = now - since >= self.seconds and count >= self.updates and count % self.cycle == 0
        quarter = self.cycle == 1 and now - self.borders[-1][1] >= max(self.seconds, 1.0) / QUARTERS
        if over or (quarter and len(self.borders) < QUARTERS):
            self.wait()
            self.borders.append((self.done, self.clock()))
        return over

    @property
    def opened(self) -> int:
        """Updates before the window."""
        return self.borders[0][0]

    @property
    def elapsed(self) -> float:
        """Seconds of the window."""
        return self.borders[-1][1] - self.borders[0][1]

    def rates(self, work: list[float]) -> list[float]:
        """Work per second in each part of the window, from the work of each update."""
        pairs = zip(self.borders, self.borders[1:], strict=False)
        return [sum(work[a:b]) / (then - before) for (a, before), (b, then) in pairs]


def matmul_rate(device: str, size: int = 8192) -> float | None:
    """The bf16 matrix product this device reaches now, in operations per second; unknown on a CPU."""
    if device != "cuda":
        return None
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    rate = 20 * 2 * size**3 / (time.perf_counter() - start)
    del a, b
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return rate


def peak_gib(device: str) -> float | None:
    """The most memory the run held at once."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
