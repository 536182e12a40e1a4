"""The local Hub, and huggingface_hub in this process connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import TOKEN, HubServer


@pytest.fixture
def server() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    made = HubServer()
    yield made
    made.stop()


def connect(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub send its requests to a server, and repeat a failed one without long pauses."""
    from huggingface_hub import constants
    from huggingface_hub.utils import http_backoff

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    quick = {**http_backoff.__kwdefaults__, "base_wait_time": 0.01, "max_wait_time": 0.02}
    monkeypatch.setattr(http_backoff, "__kwdefaults__", quick)
    monkeypatch.setattr("loopwright.hub.pushes.PAUSES", (0.05, 0.05))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def online(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A server that huggingface_hub in this process is connected to."""
    connect(server.url, monkeypatch)
    return server
