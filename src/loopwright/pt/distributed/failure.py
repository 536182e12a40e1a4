"""Propagation of errors: an error on one rank stops all ranks within seconds, and each reports it.

A failing rank writes its error to the store of the process group, which a thread of every other rank polls. The main
thread of a rank may be blocked in a collective that would wait for the failed one until the timeout; if it does not
return in time, the process is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import PeerError
from .process_group import Processes

LOOK_EVERY = 0.5
GRACE = 3.0
"""Seconds the main thread has to return before the process is ended."""

LOST = ("gloo", "nccl", "connection", "timed out", "process group", "store")


def _lost_the_others(error: BaseException | None) -> bool:
    """Whether an error only reports that the connection to another rank was lost."""
    words = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(word in words for word in LOST)


class Alarm:
    """Context manager that reports errors between ranks; reentrant."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._depth = self._rounds = 0
        self._over = threading.Event()
        self.heard: str | None = None
        self.before_exit: Callable[[], None] = lambda: None
        """Called before this process is ended because another rank failed."""

    def __enter__(self) -> Alarm:
        self._depth += 1
        if self._depth == 1 and self._processes.world_size > 1:
            self._rounds += 1
            self._over, self.heard = threading.Event(), None
            self._store = self._processes.store.clone()
            self._thread = threading.Thread(
                target=self._listen, args=(self._over, self._key), name="alarm", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if self._depth or self._processes.world_size == 1:
            return
        first = self._ring(error) if isinstance(error, Exception) else None
        self._over.set()
        self._thread.join(2.0)  # a thread inside a torch call at interpreter exit would abort the process
        if first is not None and _lost_the_others(error):
            raise PeerError(first) from error

    @property
    def _key(self) -> str:
        return f"loopwright/alarm/{self._rounds}"

    def _ring(self, error: Exception) -> str | None:
        """Publish the error; returns the error of another rank if that was published first."""
        where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-2:]))
        name = self._processes.names[self._processes.rank]
        text = f"rank {self._processes.rank} on {name} stopped with {type(error).__name__}: {error}\n{where}"
        try:
            kept = self._store.compare_set(self._key, "", text).decode()
        except Exception:  # the store may be gone with the process that held it
            return self.heard
        return None if kept == text else kept

    def _listen(self, over: threading.Event, key: str) -> None:
        while not over.wait(LOOK_EVERY):
            try:
                if not self._store.check([key]):
                    continue
                self.heard = self._store.get(key).decode()
            except Exception:  # the store is gone, and with it the rank that held it
                return
            if not over.wait(GRACE):
                print(f"{self.heard}\nThis rank was waiting for it and stops too.", file=sys.stderr, flush=True)
                with suppress(Exception):  # the process ends in any case
                    self.before_exit()
                os._exit(1)
