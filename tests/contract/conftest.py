"""The framework a contract test runs with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Forks

from .frameworks import BOTH, FRAMEWORKS


@pytest.fixture(params=BOTH)
def framework(request: pytest.FixtureRequest) -> Any:
    return FRAMEWORKS[request.param]


class Processes:
    """One forking server for each framework that is asked for."""

    def __init__(self) -> None:
        self._servers: dict[str, Forks] = {}
        self._whole: dict[str, Path] = {}

    def run(self, framework: Any, call: str, folder: Path, **options: Any) -> int:
        if framework.name not in self._servers:
            self._servers[framework.name] = Forks(f"tests.contract.{framework.name}_runs")
        return self._servers[framework.name].run(call, folder, timeout=120, **options)

    def whole(self, framework: Any, root: Path, **options: Any) -> Path:
        """The uninterrupted run with these options, trained once."""
        key = f"{framework.name} {sorted(options.items())}"
        if key not in self._whole:
            folder = root / f"whole-{len(self._whole)}"
            assert self.run(framework, "train", folder, resume=None, **options) == 0, Path(f"{folder}.out").read_text()
            self._whole[key] = folder
        return self._whole[key]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")
