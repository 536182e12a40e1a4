"""Runs trials: in processes of their own, or in this one; with several ranks, on all of them."""

from __future__ import annotations

import random
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

from ..core.strategy import Strategy
from ..errors import SearchError
from ..notices import Notices
from .coordinator import TrialCoordinator
from .main_module import MainModule, this_main, why_not_imported
from .process import TrialProcess, Unready
from .recipe import Recipe, part_not_pickled
from .stopping import Running
from .transfer import packed
from .trial_run import Job, Outcome, run_trial
from .trials import KnownTrial

PORTS = range(20_000, 30_000)
"""Ports for process groups: systems give none of these to a program that does not name one."""
OVER = None
"""What rank 0 broadcasts instead of a job when the search is over."""


class Runner:
    """Runs one trial after the other, or several at a time."""

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        notices: Notices,
        running: Running,
        *,
        in_process: bool,
        frame: FrameType | None,
    ) -> None:
        self._recipe, self._strategy, self._notices, self._running = recipe, strategy, notices, running
        self._data: bytes | None = None
        self._main: MainModule | None = None
        self._lock = threading.Lock()
        self.in_process = in_process
        if not in_process:
            self._pack(frame)
        self.in_process = strategy.any_rank(self.in_process)

    @property
    def is_alone(self) -> bool:
        """Whether a trial has one process."""
        return self._strategy.world_size == 1

    def _pack(self, frame: FrameType | None) -> None:
        """Prepare the recipe for other processes; trials run in this one if that is not possible."""
        if _is_replaced():
            self._stay("loopwright.compat is installed in this process only")
            return
        try:
            self._data = packed(self._recipe)
        except Exception as error:  # any class may define how it is pickled
            self._stay(f"this cannot be pickled: {part_not_pickled(self._recipe) or error}")
            return
        if b"__main__" in self._data:
            reason = why_not_imported(frame)
            if reason is not None:
                self._stay(reason)
            self._main = this_main()

    def _stay(self, reason: str) -> None:
        self.in_process = True
        self._notices.warn_once(f"trials run in this process, so memory may be left from one to the next: {reason}")

    def run(self, job: Job, trial: Any, coordinator: TrialCoordinator) -> Outcome:
        """Run a trial on all ranks; called on rank 0."""
        port = self._strategy.broadcast((job, None if self.is_alone else free_port()))[1]
        return self._run(job, trial, coordinator, port)

    def follow(self) -> None:
        """On other ranks than 0: run the trials that rank 0 runs, until the search is over."""
        while True:
            job, port = self._strategy.broadcast(None)
            if job is OVER:
                if port is not None:
                    raise SearchError(f"the search was stopped on rank 0: {port}")
                return
            with suppress(Exception):  # rank 0 raises it, unless `catch` names it
                self._run(job, KnownTrial(job.number, job.params), None, port)

    def end(self, problem: str | None = None) -> None:
        """On rank 0: let the other ranks leave `follow`."""
        self._strategy.broadcast((OVER, problem))

    def _run(self, job: Job, trial: Any, coordinator: TrialCoordinator | None, port: int | None) -> Outcome:
        outcome: Outcome | None = None
        problem: Exception | None = None
        try:
            outcome = self._run_here(job, trial, coordinator, port)
        except Exception as error:  # raised once all ranks have received it
            problem = error
        if self._strategy.any_rank(isinstance(problem, Unready)):
            self._stay_after(problem)
            return self._run(job, trial, coordinator, port)
        failed = self._strategy.any_rank(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise SearchError(f"trial {job.number} failed on another rank; the output of that rank shows the reason")
        assert outcome is not None
        return outcome

    def _stay_after(self, problem: Exception | None) -> None:
        with self._lock:
            if not self.in_process:
                self._stay(f"another process cannot load the trainer ({problem or 'on another rank'})")

    def _run_here(self, job: Job, trial: Any, coordinator: TrialCoordinator | None, port: int | None) -> Outcome:
        if self.in_process:
            return run_trial(self._recipe, job, trial, coordinator)
        assert self._data is not None
        more = {} if port is None else {"MASTER_PORT": str(port)}
        process = TrialProcess(self._data, job, main=self._main, more=more)
        with self._running.holding(process.ended):
            return process.attend(coordinator)


def _is_replaced() -> bool:
    """Whether loopwright's classes are in the place of transformers' in this process."""
    module = sys.modules.get(f"{__package__.partition('.')[0]}.compat.installation")
    return module is not None and bool(module.is_installed())


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise SearchError(f"no port between {PORTS[0]} and {PORTS[-1]} is free for the ranks of a trial; free one")
