"""The hang detector: threads that share the position of each rank and report which one is late or gone.

They have their own connections to the store the processes met at, so that nothing training does can block them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...core.beacon import Sighting, describe, late_ones, phase_of, stack_text
from ...errors import PeerError
from ...notices import logger

TICK = 1.0
SILENT = 6.0
"""Seconds without a sign of life after which a process counts as missing."""
LAST_CALL = 2.0
"""Seconds a thread has to finish what it says to the store."""
BEACON = "beacon/{rank}"
LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "TCPStore")
"""Words of the errors by which torch says that another process did not answer."""


class HangDetector:
    """While entered, this process is seen by the others, reports a standstill, and says who was lost."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        step: Callable[[], int],
        patience: float,
        connect: Callable[[], Any],
        heard: Callable[[], str | None] = lambda: None,
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self._step, self._tell = step, tell
        self._connect = connect
        """Makes a connection of its own to the store the processes met at."""
        self._heard = heard
        """What another process said before it failed, if any did: then nothing has to be explained."""
        self._main = threading.get_ident()
        self._moved = time.monotonic()
        self._last: tuple[Any, ...] | None = None
        self._told: tuple[Any, ...] | None = None
        self._beat = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()

    def __enter__(self) -> HangDetector:
        works = ((self._shine, "beacon"), (self._look, "beacon-watch"))
        self._threads = [
            threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True) for work, name in works
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            # A thread inside a call of torch when Python ends would abort the process. One that talks to a machine
            # which is gone may never return; it is left behind.
            thread.join(LAST_CALL)
        if is_lost_connection(error):
            reason = self.explain()
            if reason:
                raise PeerError(f"{reason}\n  ({str(error).splitlines()[0]})") from error

    def _until_over(self, work: Callable[[Any], None]) -> None:
        try:
            store = self._connect()
            while not self._over.is_set():
                work(store)
                self._over.wait(TICK)
        except Exception:  # the store is gone: its rank has ended, and training finds that out by itself
            logger.debug("the hang detector has lost the store", exc_info=True)

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
        store.set(BEACON.format(rank=self.rank), json.dumps(self.sighting().as_json()))

    # ---- seeing -----------------------------------------------------------------------------------------------------

    def _look(self, store: Any) -> None:
        """When nothing has moved for long, say once what this process waits for."""
        still = time.monotonic() - self._moved
        if still < self.patience - 2 * SILENT or self._told == self._last:
            self._beats.clear()
            return
        seen, silent = self.look_around(store)
        if still < self.patience:
            return
        self._told = self._last
        if self._should_tell(seen, silent):
            self._tell(describe(seen, silent, self.world, still))

    def _should_tell(self, seen: dict[int, Sighting], silent: dict[int, float]) -> bool:
        """Whether this is the first of those that wait: one voice is enough."""
        late = {each.rank for each in late_ones(seen.values())} | set(silent)
        waiting = [rank for rank in seen if rank not in late] or list(seen)
        return min(waiting, default=self.rank) == self.rank

    def look_around(self, store: Any) -> tuple[dict[int, Sighting], dict[int, float]]:
        """What every process last said, and for how long those who have fallen silent have been so."""
        now = time.monotonic()
        seen, silent = {}, {}
        for rank in range(self.world):
            key = BEACON.format(rank=rank)
            if not store.check([key]):
                continue
            seen[rank] = Sighting(**json.loads(store.get(key)))
            beat, since = self._beats.get(rank, (-1, now))
            if beat != seen[rank].beat:
                self._beats[rank] = (seen[rank].beat, now)
            elif now - since >= SILENT and rank != self.rank:
                silent[rank] = now - since
        return seen, silent

    def explain(self, seconds: float = SILENT + 3 * TICK) -> str | None:
        """After a failed collective: who is missing or late, as far as seconds can tell; None if it has said so."""
        self._beats.clear()
        found: list[str | None] = []
        looking = threading.Thread(target=self._explain_to, args=(found, seconds), daemon=True)
        looking.start()
        looking.join(seconds + 5)  # a connection to a machine that is gone may block
        if found:
            return found[0]
        return (
            f"the rendezvous host {os.environ.get('MASTER_ADDR', '')} cannot be reached from {socket.gethostname()}; "
            "one of the two nodes is down or disconnected"
        )

    def _explain_to(self, found: list[str | None], seconds: float) -> None:
        try:
            found.append(self._explanation(seconds))
        except Exception:  # in a thread, after a failure: without the store there is no explanation
            logger.debug("the store cannot be reached", exc_info=True)

    def _explanation(self, seconds: float) -> str | None:
        store, end = self._connect(), time.monotonic() + seconds
        while not self._heard():
            seen, silent = self.look_around(store)
            if silent or time.monotonic() > end:
                return describe(seen, silent, self.world, time.monotonic() - self._moved)
            time.sleep(TICK / 4)
        return None


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether this is how torch says that another process did not answer."""
    from torch.distributed import DistError

    said = isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
    return said or isinstance(error, DistError)


def patience_for(timeout: float) -> float:
    """When to say that nothing moves: well before a collective gives up, and never later than two minutes."""
    return min(timeout / 2, 120.0)
