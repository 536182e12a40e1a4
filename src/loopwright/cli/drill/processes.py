"""Starting the training processes of a drill: as new processes, or forked from one that has imported torch."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ...errors import ArgumentsError

CHILD = "loopwright.cli.drill.drill_child"
NURSERY = "--nursery"


class Launcher(Protocol):
    """Runs a training process until it ends."""

    def run(self, words: list[str], log: Path, deadline: float) -> int | None:
        """The exit code, negative for a signal; None if it was stopped at the deadline."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...


class Anew:
    """Starts a new interpreter for every run."""

    def __init__(self, python: str | None) -> None:
        self.python = shutil.which(python or "") or sys.executable

    def run(self, words: list[str], log: Path, deadline: float) -> int | None:
        command = [self.python, "-m", CHILD, *words]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            return process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_group(process.pid)
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Warm(Anew):
    """Forks every run from one process that has imported torch, which saves seconds per run."""

    def __enter__(self) -> Self:
        # Unbuffered: select does not notice an answer that is already in the buffer.
        self._nurse = subprocess.Popen(
            [self.python, "-m", CHILD, NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        assert self._nurse.stdin is not None and self._nurse.stdout is not None
        self._nurse.stdin.close()
        self._nurse.stdout.close()
        kill_group(self._nurse.pid)
        self._nurse.wait()

    def run(self, words: list[str], log: Path, deadline: float) -> int | None:
        assert self._nurse.stdin is not None
        self._nurse.stdin.write((json.dumps({"words": words, "log": str(log)}) + "\n").encode())
        child = int(self._answer())
        try:
            return int(self._answer()) if self._answers_until(deadline) else None
        finally:
            kill_group(child)
            if not self._has_answered:
                self._answer()

    def _answer(self) -> bytes:
        assert self._nurse.stdout is not None
        line = self._nurse.stdout.readline()
        if not line:
            raise ArgumentsError(f"{self.python} cannot run loopwright; see its output above")
        self._has_answered = True
        return line

    def _answers_until(self, deadline: float) -> bool:
        self._has_answered = False
        assert self._nurse.stdout is not None
        ready, _, _ = select.select([self._nurse.stdout], [], [], max(0.1, deadline - time.monotonic()))
        return bool(ready)


def kill_group(leader: int) -> None:
    """Kill a process and its process group: data loading workers survive a killed run."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def nurse() -> list[str]:
    """Fork a process for each request on standard input; returns, in the fork, the arguments of the request."""
    import torch._dynamo  # noqa: F401  (optimizers import it at their first step)

    from ...pt import trainer  # noqa: F401

    gc.freeze()  # imported modules are never garbage; the collector of a fork need not copy their pages
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become_a_process_of_its_own(request["log"])
            return list(request["words"])
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit(0)


def _become_a_process_of_its_own(log: str) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
