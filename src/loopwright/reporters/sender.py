"""Sends the rows of a run to one reporter, from a queue and in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..notices import logger
from .base import Reporter, Row, RunInfo
from .journal import Journal, Key, Record, key_of, remaining

LIMIT = 10_000
"""Rows that wait at most; more are dropped, counted and reported."""
BATCH = 100
"""Rows between two records of what is stored."""
FINISH_SECONDS = 120.0
"""How long the end of training waits for a tracker."""
Call = Callable[[], None]


class Sender:
    """One start of a reporter: rows in order, errors reported once, an end that waits for a limited time.

    No method waits for the reporter except `wait_started`, `settle` and `finish`, which return after their timeout.
    """

    def __init__(self, reporter: Reporter, *, limit: int = LIMIT) -> None:
        self.reporter = reporter
        self.name = getattr(reporter, "name", "") or type(reporter).__name__
        self._queue: queue.Queue[Row | Call | None] = queue.Queue(limit)
        self._started, self._ended, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._failed: dict[str, int] = {}
        self._error: str | None = None
        self._rows = self._done = 0
        self._earlier: Counter[Key] = Counter()
        self._only: dict[Key, frozenset[str]] = {}
        """Values that are missing of rows that an earlier process sent in part."""
        self._sent: list[Key] = []
        self._is_up = False
        self._status = "finished"

    def begin(self, run: RunInfo, history: list[Row], folder: str | None) -> None:
        """Start the reporter, and send the rows of the history that it does not have."""
        self._journal = Journal(folder, self.name, run.run_id)
        given = [(run, history)]
        threading.Thread(target=self._run, args=(given,), name=f"reporter-{self.name}", daemon=True).start()

    def send(self, row: Row) -> None:
        """Put a row in the queue; never waits."""
        self._rows += 1
        self._put(row)

    def call(self, action: Call) -> None:
        """Put another call of the reporter in the queue."""
        self._put(action)

    def set_back(self, step: int) -> None:
        """The run was set back to this step: rows of later steps that are logged again are not sent again."""
        self._put(lambda: self._earlier.update(key for key in self._sent if key[0] > step))

    def wait_started(self, seconds: float) -> None:
        """Wait until the reporter has started."""
        self._started.wait(seconds)

    def settle(self, seconds: float) -> bool:
        """Wait until everything in the queue is sent; False if the time was too short."""
        reached = threading.Event()
        self._put(reached.set)
        return reached.wait(seconds)

    def finish(self, status: str, seconds: float = FINISH_SECONDS) -> None:
        """Send what is in the queue, finish the reporter and report what could not be sent."""
        self._status = status
        end = time.monotonic() + seconds
        while not self._ended.is_set():
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() > end:
                    break
        if not self._ended.wait(max(0.0, end - time.monotonic())):
            self._abandoned.set()
            self._count(f"after waiting {seconds:.0f} s", self._rows - self._done - sum(self._failed.values()))
        self._report()

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _run(self, given: list[tuple[RunInfo, list[Row]]]) -> None:
        try:
            self._start(*given.pop())  # the thread may wait longer than the run's model is needed
            self._started.set()
            while not self._abandoned.is_set() and self._step():
                pass
        finally:
            self._started.set()
            self._ended.set()

    def _start(self, run: RunInfo, history: list[Row]) -> None:
        record = self._journal.read() or Record()
        if record.state:
            # A checkpoint that was saved before the tracker had started has no identifier of its run.
            known = {name: value for name, value in self._state().items() if value is not None}
            self._guarded("load_state_dict", {**record.state, **known})
        if getattr(self.reporter, "purges", False):
            run, record = _purged(run, record)
        self._is_up = self._guarded("start", run)
        stored = record.stored + self._certain(record)
        if run.resumed_from is not None:
            self._earlier = Counter(stored)
        if self._is_up:
            self._journal.begin(self._state(), stored)
        self._rows += len(history)
        for first in range(0, len(history), BATCH):
            self._send_rows(history[first : first + BATCH])

    def _certain(self, record: Record) -> list[Key]:
        """Of the rows sent shortly before the last process ended, those that are not to be sent again."""
        rows = record.uncertain
        missing: list[Row] | None = None
        if rows and self._is_up:
            try:
                missing = getattr(self.reporter, "unstored", lambda rows: None)(rows)
            except Exception as error:  # a tracker may raise anything
                self._note("unstored", error)
            if missing is None:
                logger.warning(
                    f"{self.name}: {len(rows)} rows were being sent when the run was killed, and are not sent again. "
                    "If some are missing there, metrics.jsonl has them."
                )
        self._only = {key_of(row): frozenset(row.values) for row in missing or ()}
        gone = Counter(map(key_of, missing or ()))
        return list((Counter(map(key_of, rows)) - gone).elements())

    def _step(self) -> bool:
        """Send what is waiting; False after the end."""
        rows: list[Row] = []
        item = self._queue.get()
        while True:
            if isinstance(item, Row):
                rows.append(item)
            if not isinstance(item, Row) or len(rows) == BATCH:
                break
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
        if rows:
            self._send_rows(rows)
        if item is None:
            self._finish()
            return False
        if not isinstance(item, Row):
            self._act(item)
        return True

    def _send_rows(self, waiting: list[Row]) -> None:
        rows = remaining(waiting, self._earlier)
        self._rows -= len(waiting) - len(rows)
        if not self._is_up:
            self._count("after errors", len(rows))
            return
        if rows:
            self._journal.sending(rows)
        for row in rows:
            if self._abandoned.is_set():
                return
            only = self._only.pop(key_of(row), row.values)
            if self._guarded("log", {name: row.values[name] for name in row.values if name in only}, row.step):
                self._done += 1
            else:
                self._count("after errors", 1)
            self._sent.append(key_of(row))
        if rows and self._flushed():
            self._journal.stored()

    def _finish(self) -> None:
        if self._is_up and self._guarded("finish", self._status):
            self._journal.stored()

    def _flushed(self) -> bool:
        try:
            return bool(getattr(self.reporter, "flush", lambda: True)())
        except Exception as error:  # a tracker may raise anything
            self._note("flush", error)
            return False

    def _act(self, action: Call) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything
            self._note("a call", error)

    def _guarded(self, verb: str, *given: Any) -> bool:
        """Call a method of the reporter; False after an error, which is reported once."""
        try:
            getattr(self.reporter, verb)(*given)
        except (Exception, SystemExit) as error:  # a tracker may raise anything
            self._note(verb, error)
            return False
        return True

    def _state(self) -> dict[str, Any]:
        return dict(getattr(self.reporter, "state_dict", dict)())

    # ---- reports --------------------------------------------------------------------------------------------------

    def _put(self, item: Row | Call) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if isinstance(item, Row):
                self._count("because the queue was full", 1)

    def _count(self, why: str, rows: int) -> None:
        with self._lock:
            if rows > 0:
                self._failed[why] = self._failed.get(why, 0) + rows

    def _note(self, verb: str, error: BaseException) -> None:
        text = f"{verb} failed: {type(error).__name__}: {error}"
        if self._error is None:
            self._error = text
            logger.warning(
                f"{self.name}: {text}. Training continues, metrics.jsonl has all values, and further errors of this "
                "tracker are counted only."
            )

    def _report(self) -> None:
        if self._failed:
            parts = ", ".join(f"{count:,} {why}" for why, count in self._failed.items())
            logger.warning(
                f"{self.name}: {sum(self._failed.values()):,} of {self._rows:,} rows were not sent ({parts}). "
                "metrics.jsonl has them."
            )


def _purged(run: RunInfo, record: Record) -> tuple[RunInfo, Record]:
    """For a tracker that discards later steps: what it keeps, and from where it is sent again."""
    if run.resumed_from is None:
        return run, record
    first = min([run.resumed_from + 1, *(row.step for row in record.uncertain)])
    kept = [key for key in record.stored if key[0] < first]
    return replace(run, resumed_from=first - 1), Record(record.state, kept)
