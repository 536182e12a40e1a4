"""Fixtures of this folder: double precision stays double, and accelerations are estimated to pay off."""

from __future__ import annotations

import pytest

from .running import doubles_stay, everything_pays


@pytest.fixture(autouse=True)
def _doubles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles_stay(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_pays(monkeypatch.setitem)
