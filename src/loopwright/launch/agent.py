"""Runs torchrun's elastic agent in this process and returns the documented exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher import api as launcher

from ..core.resuming.run_record import RESUME, STOPPED
from ..core.shutdown.parent import TIME_TO_SAVE
from ..core.shutdown.signals import ECHO, STOPPED_AFTER_SAVING
from ..errors import LoopwrightError, first_line
from ..notices import logger
from . import guard
from .rank_process import RankProcess
from .stores import listening
from .torchrun import Way

DONE, FAILED, INTERRUPTED = 0, 1, 130
PAUSE = 3.0
"""Seconds between two attempts to join the rendezvous again."""
LAST_LINES = 20


class Agent(LocalElasticAgent):
    """torchrun's agent, extended by the exit code of a run that saved and stopped, and by restart detection."""

    current: Agent | None = None
    elastic = False
    guard: guard.Guard | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Agent.current = self
        self.codes: list[int | None] = []
        """Exit codes of the last workers."""

    @property
    def was_saved(self) -> bool:
        """Whether the workers saved a checkpoint and exited.

        They exit together after all have saved. A slow one may still be killed, or aborted by torch, whose gloo groups
        sometimes do that at exit (seen in 2.13); therefore they also write a marker file.
        """
        return STOPPED_AFTER_SAVING in self.codes or os.path.exists(os.environ.get(STOPPED, ""))

    def log_of(self, local_rank: int) -> Path | None:
        """The file with the worker's stderr, if there is one."""
        path = getattr(self._pcontext, "stderrs", {}).get(local_rank)
        return Path(path) if path and Path(path).is_file() else None

    def _rendezvous(self, worker_group: Any) -> None:
        # torch keeps the store and its address for later rendezvous rounds (seen in 2.13): restarted processes
        # would read old values, and connect to a first node that may be gone.
        handler = worker_group.spec.rdzv_handler
        for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(handler, name):
                setattr(handler, name, None)
        super()._rendezvous(worker_group)

    def _initialize_workers(self, worker_group: Any) -> None:
        Path(os.environ[STOPPED]).unlink(missing_ok=True)
        if self.guard is not None:
            self.guard.clean_up()  # what a killed rank had started
        super()._initialize_workers(worker_group)
        # Workers started from now on are restarts: they resume from this run's checkpoints.
        os.environ[RESUME] = "auto"

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        if self.guard is not None:
            self.guard.watch(started.values())
        return started

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        self.codes = [failure.exitcode for failure in result.failures.values()]
        if self.codes and self.was_saved:
            # Another node leaves: an elastic job continues without it. Otherwise the whole job is stopped.
            self._remaining_restarts += 1 if Agent.elastic else -self._remaining_restarts
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **options: Any) -> None:
        workers = getattr(self._pcontext, "subprocess_handlers", {})
        self._shut_down(death_sig, *more, **options)  # a version of torch may pass a timeout
        if workers:
            self.codes = [worker.proc.poll() for worker in workers.values()]

    def _shut_down(self, death_sig: signal.Signals, *more: Any, **options: Any) -> None:
        """Stop the workers; a second signal to the launcher kills them, unless it only repeats the first."""
        begun = time.monotonic()
        while True:
            try:
                super()._shutdown(death_sig, *more, **options)
                return
            except SignalException as again:
                if again.sigval == signal.SIGINT or time.monotonic() - begun > ECHO:
                    death_sig = signal.SIGKILL


def run(make_words: Callable[[], list[str]], way: Way, *, elastic: bool, patience: float) -> int:
    """Run the agent and return the exit code; it waits up to `patience` seconds for lost nodes."""
    Agent.elastic = elastic
    wait_for_orphans()
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        os.environ[STOPPED] = os.path.join(folder, "stopped")
        with guard.Guard(folder, TIME_TO_SAVE) as Agent.guard, listening(way):
            code = _run(make_words, patience)
            if code != DONE:
                Agent.guard.clean_up()
            return code


def wait_for_orphans() -> None:
    """Wait until no process is left of a launch whose launcher was killed; kill those that do not exit."""
    found = guard.orphans()
    if not found:
        return
    logger.warning(
        f"waiting for {len(found)} processes of an earlier launch whose launcher has died to save and exit "
        f"(process {', '.join(map(str, found))}); they are killed after {TIME_TO_SAVE:.0f} s"
    )
    deadline = time.monotonic() + TIME_TO_SAVE
    while (left := guard.orphans()) and time.monotonic() < deadline + guard.TIME_TO_DIE:
        if time.monotonic() > deadline:
            for pid in left:
                guard.send(pid, signal.SIGKILL)
        time.sleep(guard.PAUSE)
    for mark in set(found.values()):
        shutil.rmtree(guard.folder_in(mark), ignore_errors=True)
    if left:
        raise LoopwrightError(
            f"process {', '.join(map(str, left))} of an earlier launch cannot be killed; it may hang in a device or "
            "file system. End it before starting again"
        )


def _run(make_words: Callable[[], list[str]], patience: float) -> int:
    lost_at: float | None = None
    while True:
        started = time.monotonic()
        try:
            with _our_classes():
                torchrun.run(torchrun.parse_args(make_words()))
            return DONE
        except ChildFailedError as error:
            return _failed(error)
        except SignalException as error:
            return _signalled(error)
        except (RendezvousConnectionError, RendezvousTimeoutError, ConnectionError) as error:
            now = time.monotonic()
            lost_at = now if lost_at is None or now - started > patience else lost_at
            if now - lost_at >= patience:
                logger.error(f"the other nodes cannot be reached: {error}")
                return FAILED
            logger.warning(f"lost the rendezvous ({first_line(error)}); this node tries to rejoin")
            os.environ[RESUME] = "auto"
            time.sleep(PAUSE)


@contextmanager
def _our_classes() -> Iterator[None]:
    originals = launcher.LocalElasticAgent, handlers.SubprocessHandler
    launcher.LocalElasticAgent, handlers.SubprocessHandler = Agent, RankProcess  # type: ignore[misc]
    try:
        yield
    finally:
        launcher.LocalElasticAgent, handlers.SubprocessHandler = originals  # type: ignore[misc]


def _signalled(error: SignalException) -> int:
    if Agent.current is not None and Agent.current.was_saved:
        return _saved()
    return INTERRUPTED if error.sigval == signal.SIGINT else 128 + int(error.sigval)


def _failed(error: ChildFailedError) -> int:
    if Agent.current is not None and Agent.current.was_saved:
        return _saved()
    log = Agent.current.log_of(error.get_first_failure()[1].local_rank) if Agent.current is not None else None
    print(failure_text(error, log), file=sys.stderr)
    # A worker exits with code 2 for invalid arguments; the agent returns the same.
    first = error.get_first_failure()[1].exitcode
    return first if first in (2, INTERRUPTED) else FAILED


def _saved() -> int:
    logger.warning("every worker saved and stopped; the same command resumes from there")
    return STOPPED_AFTER_SAVING


def failure_text(error: ChildFailedError, log: Path | None) -> str:
    """Which rank failed first, how, and the last lines it wrote."""
    rank, failure = error.get_first_failure()
    ended = f"signal {_signal_name(-failure.exitcode)}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    lines = [f"loopwright: rank {rank} failed first (process {failure.pid}, {ended})"]
    others = sorted(set(error.failures) - {rank})
    if others:
        lines[0] += f"; after it: {', '.join(map(str, others))}"
    if log is not None:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        lines += [f"its last lines ({log}):", *(f"  {line}" for line in last)]
    return "\n".join(lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
