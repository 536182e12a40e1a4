"""A pool of processes that run cases together; started once, because importing torch takes longer than any case."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = 120.0
"""Seconds a process may take to import torch on a busy machine."""


@dataclass
class Outcome:
    """What a case came to on one process."""

    kind: str
    """returned, raised, exited or ended"""
    value: Any
    seconds: float = 0.0


class Pool:
    """Processes that wait for cases."""

    def __init__(self) -> None:
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._said: dict[int, Any] = {}

    def run(
        self, world: int, case: str, *, timeout: float = 90.0, by_rank: list[dict[str, str]] | None = None, **given: Any
    ) -> Any:
        """What the case returned on each process, by rank."""
        outcomes = self.outcomes(world, case, timeout=timeout, by_rank=by_rank, **given)
        failed = [f"rank {rank}: {each.value}" for rank, each in enumerate(outcomes) if each.kind != "returned"]
        assert not failed, "\n\n".join(failed)
        return [each.value for each in outcomes]

    def outcomes(
        self, world: int, case: str, *, timeout: float = 90.0, by_rank: list[dict[str, str]] | None = None, **given: Any
    ) -> list[Outcome]:
        """What became of the case on each process, by rank."""
        self.send(world, case, by_rank=by_rank, **given)
        return self.receive(world, timeout=timeout)

    def send(self, world: int, case: str, *, by_rank: list[dict[str, str]] | None = None, **given: Any) -> list[int]:
        """Begin a case; returns the ids of its processes by rank."""
        self._grow_to(world)
        place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(free_port())}  # fmt: skip
        for rank, (_, connection) in enumerate(self._members[:world]):
            own = by_rank[rank] if by_rank else {}
            connection.send((case, {"LOCAL_RANK": str(rank), **place, "RANK": str(rank), **own}, given))
        return [process.pid for process, _ in self._members[:world]]

    def receive(self, world: int, *, timeout: float) -> list[Outcome]:
        end = time.monotonic() + timeout
        found = []
        for rank, (process, connection) in enumerate(self._members[:world]):
            try:
                if not connection.poll(max(end - time.monotonic(), 0.01)):
                    raise TimeoutError(f"rank {rank} gave no answer within {timeout} seconds")
                found.append(Outcome(*pickle.loads(connection.recv_bytes())))
            except (TimeoutError, EOFError, OSError) as error:
                process.poll()
                last = self.said(process.pid)[-3000:]
                self.close()
                raise AssertionError(f"rank {rank}: {error or 'ended'}; earlier: {found}; it said: {last}") from error
        return found

    def endings(self, world: int, *, timeout: float) -> list[Outcome]:
        """What became of a case on processes that may not survive it; `ended` holds exit code and last words."""
        started, found = time.monotonic(), []
        for process, connection in self._members[:world]:
            try:
                ready = connection.poll(max(timeout - (time.monotonic() - started), 0.01))
                assert ready, f"a process neither answered nor ended within {timeout} seconds"
                found.append(Outcome(*pickle.loads(connection.recv_bytes())))
            except (EOFError, OSError):
                found.append(
                    Outcome("ended", (process.wait(timeout=10), self.said(process.pid)), time.monotonic() - started)
                )
        if any(each.kind == "ended" for each in found):
            self.close()
        return found

    def _grow_to(self, world: int) -> None:
        if any(process.poll() is not None for process, _ in self._members):
            self.close()
        missing = world - len(self._members)
        if missing <= 0:
            return
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), backlog=64, authkey=key) as listener:
            listener._listener._socket.settimeout(START)
            command = [sys.executable, str(HERE / "member.py"), str(listener.address[1])]
            env = {**os.environ, "POOL_KEY": key.hex()}
            started = []
            for _ in range(missing):
                said = open(self._folder / f"{len(self._said)}.txt", "w+")
                process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=said)
                self._said[process.pid] = said
                started.append(process)
            by_id = {process.pid: process for process in started}
            try:
                for _ in range(missing):
                    connection = listener.accept()
                    self._members.append((by_id[connection.recv()], connection))
            except BaseException:
                for process in started:
                    process.kill()
                raise

    def said(self, process: int) -> str:
        """What a process has written to its error stream."""
        return Path(self._said[process].name).read_text()

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.wait()
        self._members = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
