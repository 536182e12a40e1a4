"""Threads beside training that tell the other processes where this one stands, and say who is late or gone.

They have their own connections to the store the processes met at, so that nothing training does can block them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..core.beacon import Sighting, describe, late_ones, phase_of, stack_text
from ..notices import logger

TICK = 1.0
SILENT = 6.0
"""Seconds without a sign of life after which a process counts as missing."""
GRACE = 5.0
"""Seconds a process has to notice by itself that another one has failed."""
BEACON, FIRST_ERROR = "loopwright/beacon/{rank}", "loopwright/first-error"
LOST = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "connection was", "Timed out", "TCPStore")
"""Words of the errors by which torch says that another process did not answer."""


class Watch:
    """While entered, this process is seen by the others, reports a standstill, and stops when another one fails."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        step: Callable[[], int],
        patience: float,
        connect: Callable[[], Any],
        tell: Callable[[str], None] = logger.warning,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self._step, self._tell = step, tell
        self._connect = connect
        """Makes a connection of its own to the store the processes met at."""
        self._leave = leave or leave_at_once
        self._main = threading.get_ident()
        self._moved = time.monotonic()
        self._last: tuple[Any, ...] | None = None
        self._told: tuple[Any, ...] | None = None
        self._beat = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        for work, name in ((self._shine, "beacon"), (self._look, "beacon-watch")):
            threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if isinstance(error, Exception):
            if is_lost_connection(error):
                error.add_note(self.explain())
            else:
                _within(3.0, lambda: self._leave_word(error))

    def _until_over(self, work: Callable[[Any], None]) -> None:
        try:
            store = self._connect()
            while not self._over.is_set():
                work(store)
                self._over.wait(TICK)
        except Exception:  # the store is gone: whoever held it has ended, and training finds that out by itself
            logger.debug("the beacon has lost the store", exc_info=True)

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

    def _leave_word(self, error: Exception) -> None:
        """Tell the others what ended this process, unless another one ended before."""
        last = "".join(traceback.format_exception(error)[-6:])
        words = {"rank": self.rank, "host": socket.gethostname(), "process": os.getpid(), "text": last}
        self._connect().compare_set(FIRST_ERROR, "", json.dumps(words))

    # ---- seeing -----------------------------------------------------------------------------------------------------

    def _look(self, store: Any) -> None:
        """See whether another process has failed; when nothing moves for long, say once what it waits for."""
        failed = first_error(store)
        if failed is not None:
            self._stop_after(failed)
            return
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

    def _stop_after(self, failed: str) -> None:
        """Give training time to fail by itself; where it sits in a collective that cannot be woken, leave without it."""
        if self._over.wait(GRACE):
            return
        self._tell(f"{failed}\n  this process was still waiting for it and leaves")
        self._leave()

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

    def explain(self, seconds: float = SILENT + 3 * TICK) -> str:
        """After a failed collective: who failed first, who is missing or late, as far as some seconds can tell."""
        self._beats.clear()
        found = _within(seconds + 5, lambda: self._explanation(seconds))
        return found or (
            f"the meeting point {os.environ.get('MASTER_ADDR', '')} cannot be reached from {socket.gethostname()}: "
            "its machine is gone, or this one is cut off"
        )

    def _explanation(self, seconds: float) -> str:
        store, end = self._connect(), time.monotonic() + seconds
        while True:
            failed = first_error(store)
            if failed is not None:
                return failed
            seen, silent = self.look_around(store)
            if silent or time.monotonic() > end:
                return describe(seen, silent, self.world, time.monotonic() - self._moved)
            time.sleep(TICK / 4)


def first_error(store: Any) -> str | None:
    """Which process failed first and how, if any has."""
    if not store.check([FIRST_ERROR]):
        return None
    words = json.loads(store.get(FIRST_ERROR))
    return f"rank {words['rank']} on {words['host']} (process {words['process']}) failed first:\n{words['text'].rstrip()}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether this is how torch says that another process did not answer."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in LOST))


def patience_for(timeout: float) -> float:
    """When to say that nothing moves: well before a collective gives up, and never later than two minutes."""
    return min(timeout / 2, 120.0)


def leave_at_once() -> None:
    """End the process: a thread that waits in a collective cannot be woken by anything gentler."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _within(seconds: float, action: Callable[[], Any]) -> Any:
    """What the action returns, or None when it fails or takes longer: connections to lost machines may block."""
    found: list[Any] = []

    def act() -> None:
        try:
            found.append(action())
        except Exception:
            logger.debug("the store cannot be reached", exc_info=True)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
