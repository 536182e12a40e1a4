"""What every test of this folder runs under: doubles stay doubles, and accelerations are believed to pay."""

from __future__ import annotations

import pytest

from .running import doubles_stay, everything_pays


@pytest.fixture(autouse=True)
def _doubles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles_stay(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_pays(monkeypatch.setitem)
