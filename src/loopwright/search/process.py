"""A trial in a process of its own: started, served while it trains, and ended with the search."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ..core.resuming.run_record import LAUNCH, RESUME, STOPPED, TAKE_OVER
from ..core.shutdown.signals import FORWARDED, STOPPED_AFTER_SAVING
from ..core.trial import PAUSE, Reply
from ..errors import SearchError
from .coordinator import TrialCoordinator
from .main_module import MainModule
from .stopping import Stoppable
from .transfer import packed, unpacked
from .trial_run import Job, Outcome

TICK = 0.2
"""Seconds between two checks whether the process still lives."""
DONE, FAILED, UNREADY, REPORT, SUGGEST = "done", "failed", "unready", "report", "suggest"
"""The messages of a trial's process."""
OF_THE_LAUNCH = (LAUNCH, RESUME, STOPPED, TAKE_OVER, "TORCHELASTIC_USE_AGENT_STORE")
"""Variables by which a launcher describes the process of the search, not that of a trial."""


class Unready(Exception):
    """The process could not load the trainer; nothing was trained."""


class Header(NamedTuple):
    """What a process needs before it can load anything of the user's."""

    descriptor: int | None
    path: list[str]
    words: list[str]
    main: MainModule | None


class TrialProcess:
    """The process of one trial, on one rank."""

    def __init__(self, recipe: bytes, job: Job, *, main: MainModule | None, more: Mapping[str, str]) -> None:
        self.number = job.number
        self._pipe, remote = Pipe()
        environment = {**{k: v for k, v in os.environ.items() if k not in OF_THE_LAUNCH}, FORWARDED: "1", **more}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child"],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=[remote.fileno()],
            # Ctrl-C reaches the search only, which lets the trial save.
            start_new_session=True,
        )
        self.ended = Stoppable(self._process)
        """Ends the process."""
        header = Header(remote.fileno(), [each or os.getcwd() for each in sys.path], list(sys.argv), main)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # one that has died is noticed below
            stdin.write(packed(header) + packed(recipe) + packed(job))
        remote.close()

    def attend(self, coordinator: TrialCoordinator | None) -> Outcome:
        """Answer the process until it ends, and return what it reached; other ranks than 0 have no coordinator."""
        try:
            message = self._last_message(coordinator)
            code = self._process.wait()
        except BaseException:  # of the user's objective, or Ctrl-C: the trial saves and ends with the search
            self._pipe.close()  # it may be waiting for an answer
            self.ended.stop()
            raise
        finally:
            self._pipe.close()
        kind, content = message
        if kind == DONE:
            return content  # type: ignore[no-any-return]
        if kind == UNREADY:
            raise Unready(content)
        if code == STOPPED_AFTER_SAVING:
            raise SystemExit(STOPPED_AFTER_SAVING)
        if kind == FAILED:
            raise _error_of(content, self.number)
        raise SearchError(f"the process of trial {self.number} {_how(code)}; its output shows the reason")

    def _last_message(self, coordinator: TrialCoordinator | None) -> tuple[str, Any]:
        while True:
            if not self._pipe.poll(TICK):
                if self._process.poll() is not None and not self._pipe.poll():
                    return "", None
                continue
            try:
                kind, content = self._pipe.recv()
            except (EOFError, ConnectionError):
                return "", None
            if kind not in (REPORT, SUGGEST):
                return kind, content
            assert coordinator is not None  # only rank 0 reports
            given, options = content
            answer = coordinator.report(*given) if kind == REPORT else coordinator.suggest(*given, **options)
            with suppress(ConnectionError):
                self._pipe.send(answer)


class RemoteCoordinator:
    """The coordinator as the trial's process sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def report(self, step: int, metrics: dict[str, float]) -> Any:
        """Send an evaluation; returns the objective and the decision."""
        try:
            return self._call(REPORT, step, metrics)
        except (EOFError, OSError):  # the search has ended: save and exit, to be resumed by the next one
            return Reply(math.nan, PAUSE)

    def suggest(self, *given: Any, **options: Any) -> Any:
        """A value that the search chooses."""
        return self._call(SUGGEST, *given, **options)

    def send(self, kind: str, content: Any) -> None:
        """Send the last message."""
        with suppress(ConnectionError):  # the search has died; this process ends as well
            self._pipe.send((kind, content))

    def _call(self, kind: str, *given: Any, **options: Any) -> Any:
        self._pipe.send((kind, (given, options)))
        return self._pipe.recv()


def packed_error(error: BaseException) -> tuple[bytes | None, str]:
    """An exception for another process: pickled if it can be, and as text."""
    text = "".join(traceback.format_exception(error))
    try:
        data = packed(error)
        unpacked(data)
    except Exception:  # an exception of the user's may not be made for it
        return None, text
    return data, text


def _error_of(content: tuple[bytes | None, str], number: int) -> BaseException:
    data, text = content
    error: BaseException | None = None
    if data is not None:
        with suppress(Exception):  # of a class that only the other process has
            error = unpacked(data)
    if error is None:
        error = SearchError(f"trial {number} failed: {text.strip().splitlines()[-1]}")
    error.add_note(f"in the process of trial {number}:\n{text}")
    return error


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"
