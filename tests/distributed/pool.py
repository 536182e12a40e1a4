"""A pool of processes that run cases together, forked from one: importing torch takes longer than any case."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
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
"""Seconds a process may take to answer on a busy machine."""


@dataclass
class Outcome:
    """What a case came to on one process."""

    kind: str
    """returned, raised, exited or ended"""
    value: Any
    seconds: float = 0.0


class Nursery:
    """A process that has imported everything and is forked; see member.py."""

    def __init__(self, key: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "member.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "POOL_KEY": key.hex()},
        )  # fmt: skip
        self.is_ready = False

    def ask(self, **wish: Any) -> Any:
        assert self._process.stdin is not None
        if not self.is_ready:
            self.is_ready = self._answer() == "ready"
        print(json.dumps(wish), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that is forked has ended"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


class Member:
    """A process that was forked, as `subprocess` would have it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    def poll(self) -> int | None:
        return self._nursery.ask(status=self.pid)

    def wait(self, timeout: float = 30.0) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} goes on"
            time.sleep(0.002)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Pool:
    """Processes that wait for cases."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._nurseries: list[Nursery] = []
        self._members: list[tuple[Member, Connection]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._said: dict[int, Path] = {}

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
        port = free_port()
        place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port)}  # fmt: skip
        for rank, (_, connection) in enumerate(self._members[:world]):
            own = by_rank[rank] if by_rank else {}
            connection.send((case, {"LOCAL_RANK": str(rank), **place, "RANK": str(rank), **own}, given))
            if rank == 0 and world > 1:
                self._wait_for_the_store(port)
        return [process.pid for process, _ in self._members[:world]]

    def _wait_for_the_store(self, port: int) -> None:
        """Until rank 0 listens or has answered: torch tries again half a second after a connection was refused."""
        end = time.monotonic() + 5
        while not (listens(port) or self._members[0][1].poll() or time.monotonic() > end):
            time.sleep(0.002)

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
        if not self._nurseries:  # two, so that neighbours hash strings differently, as processes of their own would
            self._nurseries = [Nursery(self._key), Nursery(self._key)]
        with Listener(("127.0.0.1", 0), backlog=64, authkey=self._key) as listener:
            listener._listener._socket.settimeout(START)
            started = []
            for number in range(len(self._members), world):
                nursery, said = self._nurseries[number % 2], self._folder / f"{len(self._said)}.txt"
                said.touch()
                process = Member(nursery, nursery.ask(fork=listener.address[1], out=str(said)))
                self._said[process.pid] = said
                started.append(process)
            try:
                accepted = [listener.accept() for _ in started]
                by_id = {connection.recv(): connection for connection in accepted}
                self._members += [(process, by_id[process.pid]) for process in started]
            except BaseException:
                for process in started:
                    process.kill()
                raise

    def said(self, process: int) -> str:
        """What a process has written to its error stream."""
        return self._said[process].read_text()

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.wait()
        self._members = []

    def end(self) -> None:
        """Close the pool for good."""
        self.close()
        for nursery in self._nurseries:
            nursery.close()
        self._nurseries = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether a process of this machine listens on the port; True where the kernel does not list that."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return not tables or any(row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)
