"""A thread beside training that tells the other processes where this one stands, and says who is late.

It has its own connection to the store the processes met at, so that nothing training does can block it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..core.beacon import Sighting, describe, late_ones, phase_of, stack_text
from ..notices import logger

TICK = 1.0
SILENT = 6.0
"""Seconds without a sign of life after which a process counts as missing."""
KEY = "loopwright/beacon/{attempt}/{rank}"


class Watch:
    """While entered, this process is seen by the others, and reports the late one when nothing moves."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        step: Callable[[], int],
        patience: float,
        connect: Callable[[], Any] | None = None,
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self._step, self._tell = step, tell
        self._connect = connect or connect_to_store
        self._main = threading.get_ident()
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._moved = time.monotonic()
        self._last: tuple[Any, ...] | None = None
        self._told: tuple[Any, ...] | None = None
        self._beat = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.reports: list[str] = []

    def __enter__(self) -> Watch:
        for work, name in ((self._shine, "beacon"), (self._look, "beacon-watch")):
            thread = threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=TICK)  # one that is stuck in a dead connection is left behind; it is a daemon

    def _until_over(self, work: Callable[[Any], None]) -> None:
        try:
            store = self._connect()
            while not self._over.is_set():
                work(store)
                self._over.wait(TICK)
        except Exception as error:  # the store is gone: whoever held it has ended, and so will this run
            self._lost = str(error)

    _lost: str | None = None

    # ---- being seen -------------------------------------------------------------------------------------------------

    def sighting(self) -> Sighting:
        """Where this process stands now."""
        frame = sys._current_frames().get(self._main)
        phase, waits = phase_of(frame)
        now, place = time.monotonic(), (self._step(), phase, waits)
        if place != self._last:
            self._last, self._moved = place, now
        self._beat += 1
        still = now - self._moved
        stack = stack_text(frame) if still > min(self.patience / 2, 10.0) else ""
        return Sighting(
            self.rank, socket.gethostname(), os.getpid(), place[0], phase, waits, round(still, 1), self._beat, stack
        )

    def _shine(self, store: Any) -> None:
        store.set(self._key(self.rank), json.dumps(self.sighting().as_json()))

    def _key(self, rank: int) -> str:
        return KEY.format(attempt=self._attempt, rank=rank)

    # ---- seeing -----------------------------------------------------------------------------------------------------

    def _look(self, store: Any) -> None:
        """When this process has stood still for long, find out why; each standstill is told once, by one process."""
        still = time.monotonic() - self._moved
        if still < self.patience - 2 * SILENT or self._told == self._last:
            self._beats.clear()
            return
        seen, silent = self.look_around(store)
        if still < self.patience:
            return
        place, self._told = self._last, self._last
        if place is not None and self._should_tell(seen, silent):
            self.reports.append(describe(seen, silent, self.world, still))
            self._tell(self.reports[-1])

    def _should_tell(self, seen: dict[int, Sighting], silent: dict[int, float]) -> bool:
        """Whether this is the first of those that wait: one voice is enough."""
        late = {each.rank for each in late_ones(seen.values())} | set(silent)
        waiting = [rank for rank in seen if rank not in late]
        return bool(waiting) and min(waiting) == self.rank

    def look_around(self, store: Any) -> tuple[dict[int, Sighting], dict[int, float]]:
        """What every process last said, and for how long those who have fallen silent have been so."""
        now = time.monotonic()
        seen, silent = {}, {}
        for rank in range(self.world):
            if not store.check([self._key(rank)]):
                continue
            seen[rank] = Sighting(**json.loads(store.get(self._key(rank))))
            beat, since = self._beats.get(rank, (-1, now))
            if beat != seen[rank].beat:
                self._beats[rank] = (seen[rank].beat, now)
            elif now - since >= SILENT:
                silent[rank] = now - since
        return seen, silent

    def explain(self, seconds: float = SILENT + 4 * TICK) -> str | None:
        """After a failed collective: who is missing or late, as far as it can be found out in some seconds."""
        found: list[str] = []

        def look() -> None:
            store = self._connect()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                seen, silent = self.look_around(store)
                if silent or len(seen) < self.world:
                    break
                time.sleep(TICK)
            found.append(describe(seen, silent, self.world, time.monotonic() - self._moved))

        self._beats.clear()
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(timeout=seconds + 5)
        if found:
            return found[0]
        return (
            f"the meeting point {os.environ.get('MASTER_ADDR')} cannot be reached from {socket.gethostname()}: "
            "its machine is gone, or this one is cut off"
        )


def connect_to_store(seconds: float = 20.0) -> Any:
    """A connection of its own to the store the processes met at."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def patience_for(timeout: float) -> float:
    """When to say that nothing moves: well before a collective gives up, and never later than two minutes."""
    return min(timeout / 2, 120.0)
