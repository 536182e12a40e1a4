"""The queue of pushes: a thread sends one after the other while training continues.

At most one push is in progress. Of those that wait, a newer one supersedes an older one, unless each checkpoint has a
place of its own on the Hub; this is logged. The thread ends when nothing is left to send.
"""

from __future__ import annotations

import atexit
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import HubError
from ..notices import logger
from .failures import explained, may_pass
from .repository import Abandoned, Change, Repository

PAUSES = (2.0, 8.0, 30.0)
"""Seconds before a failed push is tried again; huggingface_hub itself repeats single requests before that."""


@dataclass(eq=False)
class Push:
    """One push, which becomes one commit."""

    title: str
    """What is pushed, for messages."""
    target: Repository
    change: Change
    message: str
    """The message of the commit."""
    may_be_superseded: bool = False
    """Whether a newer push makes this one unnecessary."""
    is_awaited: bool = False
    """Whether the caller gets the error from `future`; other errors are kept until the end of training."""
    done: Callable[[], None] = lambda: None
    """Called after the commit."""
    folder: Path | None = None
    """A folder that is removed when the push has ended."""
    future: Future[Any] = field(default_factory=Future)
    """The result: huggingface_hub's CommitInfo, or the error."""

    def discard(self) -> None:
        """Remove the files that were kept for this push."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class PushQueue:
    """The pushes of a trainer, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Push] = deque()
        self._current: Push | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._failed: list[Push] = []
        self._last_succeeded = False
        self._is_waited_for = False

    # ---- what transformers' PushInProgress has ----------------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether nothing is being pushed, or waits to be."""
        with self._changed:
            return self._current is None and not self._waiting

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to push, at most for this many seconds; returns whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._current is None and not self._waiting, timeout)

    def cancel(self) -> None:
        """Drop the pushes that wait; the one in progress is finished."""
        with self._changed:
            for push in self._waiting:
                self._drop(push)
            self._waiting.clear()
            self._changed.notify_all()

    # ---- pushing ----------------------------------------------------------------------------------------------------

    def put(self, push: Push) -> Future[Any]:
        """Add a push; one that waits and that it makes unnecessary is dropped, which is logged."""
        with self._changed:
            self._is_stopped = False
            if push.may_be_superseded:
                for old in [each for each in self._waiting if each.may_be_superseded]:
                    self._waiting.remove(old)
                    self._drop(old)
                    under_way = "an earlier push" if self._current is None else self._current.title
                    logger.warning(
                        f"{old.title} is not pushed to {old.target.name}: {under_way} was still being pushed when "
                        f"{push.title} was ready, which takes its place"
                    )
            self._waiting.append(push)
            if not self._is_waited_for:
                atexit.register(self._finish_before_exit)
                self._is_waited_for = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hub-push", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return push.future

    def stop(self) -> list[str]:
        """Abandon all pushes, the one in progress before its next file; returns the titles of what is not pushed."""
        with self._changed:
            self._is_stopped = True
            left = [each.title for each in (*self._failed, self._current, *self._waiting) if each is not None]
            for push in (*self._waiting, *self._failed):
                self._drop(push)
            self._waiting.clear()
            self._failed.clear()
            self._changed.notify_all()
        return left

    def try_failed_again(self) -> None:
        """Put the failed pushes back into the queue if the last push has succeeded, so that they may as well."""
        with self._changed:
            failed = [push for push in self._failed if self._last_succeeded and push.change.files]
            self._failed = [push for push in self._failed if push not in failed]
        for push in failed:
            push.future = Future()
            self.put(push)

    def take_failures(self) -> list[tuple[Push, BaseException]]:
        """The pushes that failed and that no later one has replaced, with their errors; each is returned once."""
        with self._changed:
            failed, self._failed = self._failed, []
        for push in failed:
            push.discard()
        return [(push, push.future.exception() or HubError(f"{push.title} was not pushed")) for push in failed]

    def add_failure(self, push: Push, error: BaseException) -> None:
        """Record a push that could not even begin, and report it."""
        with self._changed:
            self._fail(push, error)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                push = self._current = self._waiting.popleft()
            result, error = None, None
            try:
                result = self._send(push)
            except BaseException as raised:  # any error of the network or the package; raised at the end of training
                error = raised
            with self._changed:
                self._current = None
                self._conclude(push, result, error)
                self._changed.notify_all()

    def _finish_before_exit(self) -> None:
        """Wait for pushes that a script has left to the background, unless they were abandoned."""
        if not self._is_stopped and not self.is_done():
            logger.warning("waiting for the pushes to the Hub that are in progress")
            self.wait_until_done()

    def _conclude(self, push: Push, result: Any, error: BaseException | None) -> None:
        if isinstance(error, Abandoned):
            self._drop(push)
        elif error is not None:
            self._fail(push, error)
        else:
            self._last_succeeded = True
            replaced = [each for each in self._failed if each.may_be_superseded and push.may_be_superseded]
            for each in replaced:
                each.discard()
            self._failed = [each for each in self._failed if each not in replaced]
            push.discard()
            logger.info(f"pushed {push.title} to {push.target.name}")
            push.future.set_result(result)

    def _fail(self, push: Push, error: BaseException) -> None:
        self._last_succeeded = False
        if push.is_awaited:
            push.discard()
        else:
            self._failed.append(push)
        reason = str(error) if isinstance(error, HubError) else explained(error, push.target.token)
        text = f"pushing {push.title} to {push.target.name} failed: {reason}"
        logger.error(f"{text}. The run is not affected, and its files are intact")
        failure = HubError(text)
        failure.__cause__ = error
        push.future.set_exception(failure)

    def _drop(self, push: Push) -> None:
        push.discard()
        push.future.cancel()

    def _send(self, push: Push) -> Any:
        """Send a push, trying again after errors that may pass."""
        for pause in (*PAUSES, None):
            try:
                result = push.target.commit(push.change, push.message, is_stopped=lambda: self._is_stopped)
            except Exception as error:  # classified below: huggingface_hub passes on errors of three packages
                if pause is None or isinstance(error, (Abandoned, HubError)) or not may_pass(error):
                    raise
                reason = explained(error, push.target.token)
                logger.warning(
                    f"pushing {push.title} to {push.target.name} failed: {reason}; trying again in {pause:g} seconds"
                )
                self._pause(push, pause, error)
                continue
            push.done()
            return result
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, push: Push, seconds: float, error: Exception) -> None:
        """Wait before another attempt; raises if the push is abandoned, or if a newer one makes it unnecessary."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_stopped and (left := end - time.monotonic()) > 0:
                if push.may_be_superseded and any(each.may_be_superseded for each in self._waiting):
                    raise error
                self._changed.wait(left)
        if self._is_stopped:
            raise Abandoned
