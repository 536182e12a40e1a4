"""Pushes of a run with two processes: rank 0 sends, and both have the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.runs import checked
from tests.hub.server import HubServer

from .pool import Pool


@pytest.fixture
def server() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    made = HubServer()
    yield made
    made.stop()


@pytest.mark.parametrize("sharding", [{}, {"fsdp": "full_shard"}])
def test_rank_0_pushes(pool: Pool, server: HubServer, tmp_path: Path, sharding: dict[str, str]) -> None:
    first, second = pool.run(
        2, "pushed", folder=str(tmp_path / "run"), url=server.url, hub_strategy="all_checkpoints", **sharding
    )
    repo = server.repo()
    assert first == ("me/model", repo.branches["main"], 6) and second == (None, None, 6)
    assert [checked(repo.commits[-1], f"checkpoint-{step}") for step in (2, 4, 6)] == [2, 4, 6]
    assert [method for method, path in server.seen if path == "/api/repos/create"] == ["POST"]
    assert len([path for _, path in server.seen if "/commit/" in path]) == 4
    assert "model.safetensors" in repo.head(), "the whole model, pushed at the end"


def test_both_ranks_have_the_error_of_a_push(pool: Pool, server: HubServer, tmp_path: Path) -> None:
    server.before = lambda method, path: 507 if method == "PUT" else None
    first, second = pool.run(2, "pushed", folder=str(tmp_path / "run"), url=server.url)
    assert first == second and first[0] == "HubError" and first[2] == 6
    assert "checkpoint-6 to me/model failed: the storage of the account is full" in first[1]


def test_both_ranks_refuse_a_wrong_token(pool: Pool, server: HubServer, tmp_path: Path) -> None:
    first, second = pool.run(2, "pushed", folder=str(tmp_path / "run"), url=server.url, hub_token="hf_" + "wrong" * 5)
    assert first == second and first[0] == "HubError" and "the token was refused" in first[1]


def test_models_in_shards_are_not_pushed_at_every_save(pool: Pool, server: HubServer, tmp_path: Path) -> None:
    found = pool.run(2, "pushed", folder=str(tmp_path / "run"), url=server.url, fsdp="full_shard")
    assert all(kind == "ArgumentsError" and "save shards of it" in text for kind, text, _ in found)
