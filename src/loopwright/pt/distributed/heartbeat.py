"""The hang detector: threads that share the position of each rank and report which one is late or gone.

They have their own connections to the rendezvous store, so that training cannot block them.
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

from ...core.distributed.beacon import Sighting, describe, late_ones, phase_of, stack_text
from ...errors import LostRankError, first_line
from ...notices import logger

TICK = 1.0
SILENT = 6.0
"""Seconds without a heartbeat after which a rank counts as missing."""
LAST_CALL = 2.0
"""Seconds a thread has to finish its last request to the store."""
BEACON = "beacon/{rank}"
LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out", "TCPStore")
"""Substrings of torch's errors about a rank that did not respond."""


class HangDetector:
    """While entered, publishes this rank's position, reports a hang, and identifies lost ranks."""

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
        """Creates a separate connection to the rendezvous store."""
        self._heard = heard
        """The error that another rank published before it failed, if any; no explanation is needed then."""
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
            # A thread inside a torch call at interpreter exit would abort the process. One that is connected to an
            # unreachable machine may never return and is abandoned.
            thread.join(LAST_CALL)
        if error is not None and is_lost_connection(error):
            reason = self.explain()
            if reason:
                raise LostRankError(f"{reason}\n  ({first_line(error)})") from error

    def _until_over(self, work: Callable[[Any], None]) -> None:
        try:
            store = self._connect()
            while not self._over.is_set():
                work(store)
                self._over.wait(TICK)
        except Exception:  # the store is gone because its rank has ended; training fails separately
            logger.debug("the hang detector has lost the store", exc_info=True)

    # ---- publishing --------------------------------------------------------------------------------------------------

    def sighting(self) -> Sighting:
        """The current position of this rank."""
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

    # ---- watching ----------------------------------------------------------------------------------------------------

    def _look(self, store: Any) -> None:
        """After a long time without progress, report once which rank this one waits for."""
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
        """Whether this is the lowest waiting rank: only one of them reports."""
        late = {each.rank for each in late_ones(seen.values())} | set(silent)
        waiting = [rank for rank in seen if rank not in late] or list(seen)
        return min(waiting, default=self.rank) == self.rank

    def look_around(self, store: Any) -> tuple[dict[int, Sighting], dict[int, float]]:
        """The last position of every rank, and the seconds since the last heartbeat of missing ones."""
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
        """After a failed collective: a report on missing or late ranks; None if a rank has published its error."""
        self._beats.clear()
        found: list[str | None] = []
        looking = threading.Thread(target=self._explain_to, args=(found, seconds), daemon=True)
        looking.start()
        looking.join(seconds + 5)  # a connection to an unreachable machine may block
        if found:
            return found[0]
        return (
            f"the rendezvous host {os.environ.get('MASTER_ADDR', '')} cannot be reached from {socket.gethostname()}; "
            "one of the two nodes is down or disconnected"
        )

    def _explain_to(self, found: list[str | None], seconds: float) -> None:
        try:
            found.append(self._explanation(seconds))
        except Exception:  # in a thread, after a failure: no explanation without the store
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
    """Whether this is a torch error about a rank that did not respond."""
    from torch.distributed import DistError

    said = isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
    return said or isinstance(error, DistError)


def patience_for(timeout: float) -> float:
    """Seconds without progress before a report: half the timeout of a collective, at most two minutes."""
    return min(timeout / 2, 120.0)
