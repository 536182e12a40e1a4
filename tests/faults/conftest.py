"""The forking server, and the uninterrupted runs to compare with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """Runs functions of a module, each in a process of its own forked from a warmed one."""

    def __init__(self, module: str = "tests.faults.runs") -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the forking server died"
        return json.loads(line)

    def run(
        self,
        call: str,
        folder: Path,
        *,
        timeout: float = 60,
        kill_after: float | None = None,
        kill_with: int = signal.SIGKILL,
        **options: Any,
    ) -> int:
        """The exit status of one call; what it printed is added to FOLDER.out."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        job = {"call": call, "options": {"folder": str(folder), **options}, "timeout": timeout,
               "kill_after": kill_after, "kill_with": int(kill_with), "out": f"{folder}.out"}  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return int(self._read()["status"])

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="session")
def reference(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from .checks import Reference

    return Reference(forks, tmp_path_factory.mktemp("references"))
